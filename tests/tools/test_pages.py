"""What the pages name is there: files, anchors, fields, commands and their options, values of fields."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
import shlex
from collections.abc import Iterator

import pytest

from jrl import cli
from jrl.config.errors import ConfigError
from jrl.config.schema import fields_of, schema_of
from jrl.config.syntax import Reference, Statement, read_statements
from jrl.config.typed import Misfit, fit
from jrl.experiment import TABLES, Config, config_classes

ROOT = pathlib.Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for folder in (ROOT.glob("*.md"), (ROOT / "docs").rglob("*.md"), (ROOT / "tpu").glob("*.md"))
    for path in sorted(folder)
}
HISTORY = ("CHANGELOG.md", "docs/log.md")  # they keep the names of their time
TODAY = [page for page in PAGES if page not in HISTORY]
SECTIONS = schema_of(Config, config_classes(TABLES))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LETTERS = ("N", "S", "k")  # stand for a value
# Parts in examples: the reader's, or written on the page.
PARTS = {"Mine", "mine", "one", "two", "says_seven", "Small", "LeaveOneOut", "RunningBaseline", "Lion", "Opening",
         "Uncertain", "Reversal", "right_or_digits"}  # fmt: skip
RECORDS = {"Needs"}  # of an objective, which no configuration binds


def blocks(page: str, *languages: str) -> list[str]:
    return [text for language, text in FENCE.findall(PAGES[page]) if language in languages]


def words_in_code(page: str) -> list[str]:
    """Returns what stands between single backticks."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", PAGES[page]))


def anchors(text: str) -> set[str]:
    """Returns the anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", FENCE.sub("", PAGES[page])):
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent.joinpath(name).resolve() if name else ROOT / page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("page", TODAY)
def test_every_file_of_the_package_that_is_named_exists(page):
    files = re.compile(r"(?:jrl|tests|docs|configs|benchmarks|constraints|notebooks)/[\w./-]*")
    for word in words_in_code(page):
        if files.fullmatch(word) and "NAME" not in word and "jrl/exit_code" != word:
            assert (ROOT / word).exists(), word


@pytest.mark.parametrize("page", TODAY)
def test_every_field_that_is_named_exists(page):
    code = "\n".join([*words_in_code(page), *blocks(page, "", "bash", "gin")])
    for section, field in re.findall(r"(?<![\w./])([A-Z]\w+)\.([a-z]\w*)", code):
        if (cls := SECTIONS.sections.get(section)) is not None:
            assert field in fields_of(cls) or hasattr(cls, field), f"{section}.{field}"


def commands(page: str) -> Iterator[list[str]]:
    """Yields the words after `jrl` of the command lines in a page's blocks."""
    for block in blocks(page, "", "bash"):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if line.startswith("jrl "):
                yield shlex.split(line, comments=True)[1:]


@pytest.mark.parametrize("page", TODAY)
def test_every_command_is_taken(page):
    for name, *arguments in commands(page):
        with contextlib.redirect_stderr(io.StringIO()) as error:
            try:
                cli.parser_of(name).parse_intermixed_args(arguments)
            except SystemExit:
                pytest.fail(f"jrl {name} {shlex.join(arguments)}: {error.getvalue()}")
    for word in words_in_code(page):
        if called := re.match(r"(?:\.venv/bin/)?jrl ([a-z]+)\b(.*)", word):
            assert called[1] in cli.COMMANDS, word
            options = cli.parser_of(called[1])._option_string_actions
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", called[2])) <= options.keys(), word


def bindings(page: str, folder: pathlib.Path) -> Iterator[Statement]:
    """Yields the bindings in a page's blocks, and those that stand alone between backticks."""
    for block in blocks(page, "", "gin"):
        if re.search(r"^(?:\w+/)?[A-Z]\w+(?:\.\w+ = |:$)", block, re.MULTILINE):
            (folder / "block.gin").write_text(re.sub(r"^include .*\n", "", block, flags=re.MULTILINE), encoding="utf-8")
            yield from read_statements(str(folder / "block.gin"), [], Config)
    for word in words_in_code(page):
        if (bound := re.fullmatch(r"(?:\w+/)?[A-Z]\w+\.\w+ ?= ?([^=]+)", word)) and bound[1] not in LETTERS:
            yield from read_statements(None, [word], Config)


def chosen(part: object, allowed: dict[str, type]) -> object:
    """As loading a configuration does, but builds nothing."""
    if isinstance(part, Reference) and part.name in {*allowed, *PARTS}:
        return part
    raise Misfit(f"{part} is none of {', '.join(allowed)}")


@pytest.mark.parametrize("page", [page for page in TODAY if page != "docs/sweeps.md"])  # its values are lists of them
def test_every_value_fits_its_field(page, tmp_path):
    try:
        for statement in bindings(page, tmp_path):
            if not statement.field:  # a macro, or the head of a block
                continue
            if (cls := SECTIONS.sections.get(statement.section)) is None:
                assert statement.section in PARTS | RECORDS, statement.name
            else:
                field = fields_of(cls)[statement.field]
                fit(statement.value, field.hint, SECTIONS.rows(field), chosen)
    except (ConfigError, Misfit) as error:
        pytest.fail(str(error))


def test_there_is_much_to_test(tmp_path):
    assert sum(len([*commands(page)]) for page in TODAY) > 40
    assert sum(len([*bindings(page, tmp_path)]) for page in TODAY) > 200
