"""Configurations that come with jrl: found by name, carried by the wheel, readable from any folder."""

from __future__ import annotations

import pathlib
import tomllib

import pytest

import jrl
from jrl.config import ConfigError, all_fields
from jrl.experiment import TABLES, Config, config_classes
from jrl.resolve import PATH_FIELDS, bundled_configs, find_config
from jrl.tools import catalog

ROOT = pathlib.Path(__file__).parents[1]
TINY = (ROOT / "configs" / "tiny.gin").as_posix()
PART = "VERIFIERS = {'Fine': lambda completion, example: 1.0}\n"


@pytest.fixture
def installed(tmp_path):
    """A package folder as a wheel installs it, with two configurations."""
    package = tmp_path / "site-packages" / "jrl"
    (package / "configs" / "more").mkdir(parents=True)
    (package / "configs" / "small.gin").write_text("# The small one.\n")
    (package / "configs" / "more" / "large.gin").write_text("# The large one.\n")
    return package


def test_the_wheel_carries_the_configurations_inside_the_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert settings["only-include"] == ["jrl", "configs"]
    assert settings["sources"] == {"configs": "jrl/configs"}


def test_a_wheel_finds_its_configurations_in_the_package_and_a_checkout_beside_it(installed):
    assert bundled_configs(installed) == {
        "small": installed / "configs" / "small.gin",
        "more/large": installed / "configs" / "more" / "large.gin",
    }
    assert bundled_configs()["tiny"] == ROOT / "configs" / "tiny.gin"


def test_a_file_that_exists_comes_before_a_bundled_name_and_a_folder_does_not(installed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bundled = str(installed / "configs" / "small.gin")
    assert find_config("small", installed) == bundled
    (tmp_path / "small").mkdir()
    assert find_config("small", installed) == bundled
    (tmp_path / "small").rmdir()
    (tmp_path / "small").write_text("")
    assert find_config("small", installed) == "small"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smal", "'smal': neither a file nor a bundled configuration; did you mean small?"),
        ("configs/small.gin", "did you mean small?"),
        ("configs/smal", "did you mean small?"),
        ("large", "did you mean more/large?"),
        ("large.gin", "did you mean more/large?"),
        ("configs/more/large.gin", "did you mean more/large?"),
        ("zzz", "'zzz': neither a file nor a bundled configuration (`jrl list configs`"),
        (".", "'.': a folder, not a .gin file"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(installed, tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        find_config(name, installed)
    assert message in str(refused.value)


def test_a_missing_gin_file_is_left_to_the_reader(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.gin").write_text("")
    with pytest.raises(ConfigError, match=r"there is no file 'mnie.gin'; did you mean mine.gin"):
        jrl.load_config("mnie.gin")


def test_a_bundled_configuration_loads_by_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, parts = jrl.load_config("own/nnx")
    assert parts.added["models"] == ("Bag",)
    assert config.parts == (str(ROOT / "configs" / "own" / "nnx_model.py"),)


@pytest.mark.parametrize("name", ["tiny", "tiny.gin"])
def test_an_include_means_a_file_beside_the_including_one_then_a_bundled_configuration(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()  # a folder does not count
    (tmp_path / "mine.gin").write_text(f"include '{name}'\nOnline.steps = 7\n")
    config, _ = jrl.load_config("mine.gin")
    assert config.stages[0].steps == 7 and config.model.width == 64
    (tmp_path / "tiny").rmdir()
    (tmp_path / name).write_text(f"include '{TINY}'\nDecoder.width = 32\n")
    assert jrl.load_config("mine.gin")[0].model.width == 32


def test_a_file_with_the_name_of_a_bundled_configuration_may_include_it(tmp_path):
    (tmp_path / "tiny.gin").write_text("include 'tiny'\nDecoder.width = 32\n")
    assert jrl.load_config(tmp_path / "tiny.gin")[0].model.width == 32
    (tmp_path / "tiny.gin").write_text("include 'tiny.gin'\n")
    with pytest.raises(ConfigError, match="the file includes itself; write include 'tiny' for the bundled one"):
        jrl.load_config(tmp_path / "tiny.gin")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("configs/tiny.gin", "; did you mean tiny.gin?"),
        ("toy.gin", "; did you mean algos/toy.gin?"),
        ("algos/grpoo.gin", "; did you mean algos/grpo.gin?"),
        ("bese.gin", "; did you mean base.gin?"),
        ("sub/bese.gin", "; did you mean sub/base.gin?"),
        ("zzzzzz", ""),
    ],
)
def test_a_missing_include_says_where_it_was_looked_for(tmp_path, name, hint):
    (tmp_path / "sub").mkdir()
    for file in ("base.gin", "sub/base.gin"):
        (tmp_path / file).touch()
    (tmp_path / "mine.gin").write_text(f"include '{name}'\n")
    with pytest.raises(ConfigError) as refused:
        jrl.load_config(tmp_path / "mine.gin")
    reason = f"there is no file {name!r} in {tmp_path}, and no bundled configuration of that name{hint}"
    assert (refused.value.location, refused.value.reason) == (f"{tmp_path}/mine.gin:1", reason)


def test_a_relative_path_is_looked_for_beside_the_gin_file_that_binds_it(tmp_path, monkeypatch):
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "part.py").write_text(PART)
    (folder / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (folder / "base.gin").write_text(
        f"include '{TINY}'\nparts = ['part.py']\nROWS = 'rows.jsonl'\n"
        "Config.task = @Jsonl()\nJsonl.path = %ROWS\nScoring.verifiers = [@Fine()]\n".replace("Addition", "Jsonl")
    )
    (folder / "mine.gin").write_text("include 'base.gin'\n")
    monkeypatch.chdir(tmp_path)
    config, parts = jrl.load_config("task/mine.gin", ["Scoring.workers=1"])
    assert config.task.path == "task/rows.jsonl" and config.parts == ("task/part.py",)
    assert parts.added["verifiers"] == ("Fine",)
    monkeypatch.chdir(folder)
    assert jrl.load_config("mine.gin")[0].task.path == "rows.jsonl"


def test_the_current_directory_comes_first_and_the_command_line_knows_no_other(tmp_path, monkeypatch):
    (tmp_path / "task").mkdir()
    text = f"include '{TINY}'\nConfig.task = @Jsonl()\nJsonl.path = 'rows.jsonl'\n"
    (tmp_path / "task" / "mine.gin").write_text(text)
    monkeypatch.chdir(tmp_path)
    path = lambda *bindings: jrl.load_config("task/mine.gin", bindings)[0].task.path
    assert path() == "rows.jsonl"  # nowhere: shown as it was written
    (tmp_path / "task" / "rows.jsonl").touch()
    assert path() == "task/rows.jsonl"
    assert path("Jsonl.path='rows.jsonl'") == "rows.jsonl"
    (tmp_path / "rows.jsonl").touch()
    assert path() == "rows.jsonl"


def test_a_chat_template_is_looked_for_beside_the_gin_file_too(tmp_path, monkeypatch):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "chat.jinja").touch()
    text = "Config.tokenizer = @HuggingFace()\nHuggingFace.path = 'here'\nHuggingFace.chat_template = 'chat.jinja'\n"
    (tmp_path / "task" / "mine.gin").write_text(f"include '{TINY}'\n{text}")
    monkeypatch.chdir(tmp_path)
    assert jrl.load_config("task/mine.gin")[0].tokenizer.chat_template == "task/chat.jinja"


def test_every_field_that_names_a_file_is_resolved_so():
    fields = {f"{cls.__name__}.{name}" for cls, name in all_fields(Config, config_classes(TABLES))}
    named = {field for field in fields if field.rsplit(".")[-1] in ("path", "parts", "chat_template")}
    assert named <= set(PATH_FIELDS) <= fields


def test_configurations_are_listed_with_their_headlines():
    rows = {row["name"]: row["doc"] for row in catalog.rows("configs")}
    assert rows["tiny"].startswith("The smallest run") and "gsm8k/try" in rows
    assert all(rows.values())
    assert rows["ppo"] == "PPO from random weights: answer a sum with something that begins with a digit."
    assert rows["algos/dr_grpo"].startswith("Dr. GRPO: rewards less the mean of their group")
    assert f"{'tiny':<{max(map(len, rows))}}  The smallest run" in catalog.table("configs")
