"""Parses gin text into statements. Only gin's grammar is used (`gin.config_parser`), never its registry: no code runs.

Includes are followed here: to a file in the folder of the including one, else to a bundled configuration. The result is
one list, in which later bindings override earlier ones. Every statement records its location and its layer: 0 for the
command line, 1 for the file that was named, 2 and more for included files.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import stat
import tokenize
from collections.abc import Iterator, Sequence
from typing import Any

from gin import config_parser

from jrl.config.bundled import bundled_configs, same_name
from jrl.config.errors import COMMAND_LINE, ConfigError, nearest
from jrl.config.schema import fields_of

MAX_FILE_CHARACTERS = 1_000_000
MOST_CACHED_BINDINGS = 10_000


@dataclasses.dataclass(frozen=True)
class Reference:
    """`@scope/Name()`; `called` is False for `@scope/Name`, which `check_names` rejects."""

    scope: str
    name: str
    called: bool

    def __str__(self) -> str:
        return f"@{self.scope + '/' if self.scope else ''}{self.name}{'()' if self.called else ''}"


@dataclasses.dataclass(frozen=True)
class Macro:
    """`%NAME`."""

    name: str

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclasses.dataclass(frozen=True)
class Statement:
    """`scope/section.field = value`. A macro has no field; a block header (`is_block`) has neither field nor value."""

    scope: str
    section: str
    field: str
    value: Any  # literals, Reference and Macro, nested in list, tuple and dict
    location: str
    layer: int
    path: str | None  # its file; None on the command line
    is_block: bool = False

    @property
    def name(self) -> str:
        scoped = f"{self.scope}/{self.section}" if self.scope else self.section
        return f"{scoped}.{self.field}" if self.field else scoped


def read_statements(path: str | None, bindings: Sequence[str], root: type) -> list[Statement]:
    """Returns the statements of the file at `path` (None: no file) and its includes, then of the command line.

    A name without a section that is a field of `root` binds that field: `parts = [...]` is `Config.parts = [...]`.

    Raises: ConfigError for a missing file, a cycle of includes, an import, a syntax error, an include below a binding
    that it would replace, or a name that one file or the command line binds twice.
    """
    statements = [] if path is None else _read_file(path, layer=1, open_files=(), referrer=path, root=root)
    seen: set[str] = set()
    for binding in bindings:
        statement = _read_binding(binding, root)
        if statement.name in seen:
            raise ConfigError(COMMAND_LINE, f"{statement.name} is bound twice")
        seen.add(statement.name)
        statements.append(statement)
    return statements


def walk(value: Any) -> Iterator[Any]:
    """Yields every leaf of a parsed value: literals, references and macros, dictionary keys included."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from walk(key)
            yield from walk(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from walk(item)
    else:
        yield value


class _Delegate(config_parser.ParserDelegate):
    """Turns references and macros into records that run no code."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        scope, _, name = scoped_configurable_name.rpartition("/")
        return Reference(scope, name, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


def _read_file(path: str, *, layer: int, open_files: tuple[str, ...], referrer: str, root: type) -> list[Statement]:
    text = _read_text(path, referrer)
    here = os.path.realpath(path)
    statements: list[Statement] = []
    by_name: dict[str, Statement] = {}
    for parsed in _parse(text, path):
        location = f"{path}:{parsed.location.line_num}"
        if isinstance(parsed, config_parser.IncludeStatement):
            if "\0" in parsed.filename:
                raise ConfigError(location, f"{parsed.filename!r} is not a file name")
            target = _included_file(parsed.filename, path, location)
            if os.path.realpath(target) in (*open_files, here):
                name = parsed.filename.removesuffix(".gin")
                hint = f"; write include {name!r} for the bundled one" if name in bundled_configs() else ""
                raise ConfigError(location, f"include of {parsed.filename!r}: the file includes itself{hint}")
            included = _read_file(target, layer=layer + 1, open_files=(*open_files, here), referrer=location, root=root)
            for statement in included:
                if statement.name in by_name and not statement.is_block:
                    raise ConfigError(
                        location,
                        f"include of {parsed.filename!r} would replace {statement.name}, bound above it at "
                        f"{by_name[statement.name].location}; put the include first",
                    )
            statements.extend(included)
            continue
        statement = _statement(parsed, location, layer, path, root)
        if not statement.is_block:
            if statement.name in by_name:
                raise ConfigError(
                    location, f"{statement.name} is bound twice, first at {by_name[statement.name].location}"
                )
            by_name[statement.name] = statement
        statements.append(statement)
    return statements


def _included_file(name: str, path: str, location: str) -> str:
    """Returns the file that an include in `path` names: one in the folder of `path`, else a bundled configuration."""
    beside = os.path.join(os.path.dirname(path), name)
    if os.path.isfile(beside):
        return beside
    bundled = bundled_configs()
    if name.removesuffix(".gin") in bundled:
        return str(bundled[name.removesuffix(".gin")])
    if os.path.exists(beside) or os.path.isabs(name):
        return beside  # reading it says what is wrong
    others = [file for file in _gin_files(beside) if file != os.path.basename(path)]
    valid = [*(os.path.join(os.path.dirname(name), file) for file in others), *(f"{file}.gin" for file in bundled)]
    same = same_name(name, bundled)
    guess = f"{same}.gin" if same else nearest(name, valid)
    hint = f"; did you mean {guess}?" if guess else ""
    folder = os.path.dirname(os.path.abspath(path))
    missing = f"there is no file {name!r} in {folder}, and no bundled configuration of that name"
    raise ConfigError(location, missing + hint)


@functools.lru_cache(MOST_CACHED_BINDINGS)  # the members of a sweep have most of theirs in common
def _read_binding(binding: str, root: type) -> Statement:
    if "=" not in binding and ":" not in binding:
        raise ConfigError(COMMAND_LINE, f"expected one NAME=VALUE, got {_cut(binding)!r}")
    parsed = list(_parse(binding, None))
    if len(parsed) != 1 or not isinstance(parsed[0], config_parser.BindingStatement):
        raise ConfigError(COMMAND_LINE, f"expected one NAME=VALUE, got {_cut(binding)!r}")
    return _statement(parsed[0], COMMAND_LINE, 0, None, root)


def _statement(parsed: Any, location: str, layer: int, path: str | None, root: type) -> Statement:
    if isinstance(parsed, config_parser.ImportStatement):
        raise ConfigError(location, f"'{parsed.format()}': configuration imports nothing; name files in parts = [...]")
    if "/" in parsed.scope:
        raise ConfigError(location, f"scope {parsed.scope!r} has more than one level; write scope/Section.field")
    if isinstance(parsed, config_parser.BlockDeclaration):
        return Statement(parsed.scope, parsed.selector, "", None, location, layer, path, is_block=True)
    section, field = parsed.selector, parsed.arg_name
    if not field and not parsed.scope and section in fields_of(root):
        section, field = root.__name__, section
    return Statement(parsed.scope, section, field, parsed.value, location, layer, path)


def _parse(text: str, path: str | None) -> Iterator[Any]:
    """Yields gin's parsed statements. An error of its tokenizer or parser becomes a ConfigError with a location."""

    def config_error(line: int | None, message: str, source: str | None) -> ConfigError:
        if path is None:  # one binding of several: a line beyond its end names none
            location, source = COMMAND_LINE, text
        else:
            location = f"{path}:{line or 1}"
        shown = f" in {_cut(source.strip())!r}" if source and source.strip() else ""
        return ConfigError(location, f"cannot read this: {_explain(message)}{shown}")

    parser = None
    try:
        parser = config_parser.ConfigParser(text, _Delegate())
        while (statement := parser.parse_statement()) is not None:
            yield statement
    except SyntaxError as error:
        source = error.text if error.text is not None else _line(text, error.lineno)
        raise config_error(error.lineno, error.msg, source) from None
    except tokenize.TokenError as error:
        message, (line, _) = error.args
        raise config_error(line, str(message), _line(text, line)) from None
    except (StopIteration, RecursionError, TypeError, ValueError) as error:
        # Text that ends inside a value, a thousand brackets, a list as a dictionary key, a null byte.
        line = parser.current_token.start[0] if parser is not None else 1
        message = "nested too deeply" if isinstance(error, RecursionError) else str(error) or "the text ends too early"
        raise config_error(line, message, _line(text, line)) from None


def _explain(message: str) -> str:
    token = _cut(message.rpartition("Failed to parse token '")[2].rstrip("'"))
    constants = {"true": "True", "false": "False", "none": "None", "null": "None"}
    if "Failed to parse token" in message and token.casefold() in constants:
        return f"{token} is not a value; write {constants[token.casefold()]}"
    if "Failed to parse token" in message:
        return f"{token} is not a value" + (
            f"; text needs quotes, a part is written @{token}()" if token.isidentifier() else ""
        )
    if message.startswith("Unable to parse value"):
        return "a value is missing or malformed after '='"
    if message.startswith("Invalid identifier name"):
        return "no name begins here; the lines of a block are indented alike"
    if "EOF in multi-line" in message:
        return f"{'a text in quotes' if 'string' in message else 'a bracket'} is not closed"
    return _cut(message.strip().rstrip("."))


def _cut(text: str, most: int = 200) -> str:
    """Returns text for a message: a file that is not gin may be one line."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _line(text: str, line: int | None) -> str:
    lines = text.splitlines()
    return lines[line - 1] if line is not None and 0 < line <= len(lines) else ""


def _read_text(path: str, referrer: str) -> str:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # reading a pipe or a device may never end
            raise ConfigError(referrer, f"cannot read {path!r}: it is not a plain file")
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(MAX_FILE_CHARACTERS + 1)
        if len(text) > MAX_FILE_CHARACTERS:
            raise ConfigError(referrer, f"{path!r} is longer than {MAX_FILE_CHARACTERS} characters: is it a gin file?")
        return text
    except FileNotFoundError:
        guess = nearest(os.path.basename(path), _gin_files(path))
        hint = f"; did you mean {os.path.join(os.path.dirname(path), guess)}?" if guess else ""
        raise ConfigError(referrer, f"there is no file {path!r}{hint}") from None
    except UnicodeDecodeError:
        raise ConfigError(referrer, f"{path!r} is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(referrer, f"cannot read {path!r}: {error.strerror}") from None


def _gin_files(path: str) -> list[str]:
    """Returns the names of the gin files in the folder of a missing file."""
    folder = os.path.dirname(path) or "."
    return [name for name in os.listdir(folder) if name.endswith(".gin")] if os.path.isdir(folder) else []
