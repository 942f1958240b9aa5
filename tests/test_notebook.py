"""The cells of the notebooks, without their training: they work anywhere, and again."""

from __future__ import annotations

import json
import linecache
import shlex
import sys
import types
from pathlib import Path

import pytest
from documented import write_part

import jrl
from jrl import cli

ROOT = Path(__file__).parents[1]


def cells(name):
    content = json.loads((ROOT / "notebooks" / name).read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]


CELLS = cells("first_run.ipynb")


@pytest.fixture
def plots(tmp_path, monkeypatch):
    """Runs the cells in an empty folder with fakes of jrl.steps and matplotlib; returns what is plotted."""
    monkeypatch.chdir(tmp_path)
    plotted: list[tuple] = []
    pyplot = types.ModuleType("matplotlib.pyplot")
    pyplot.plot = lambda *values: plotted.append(values)
    pyplot.xlabel = pyplot.ylabel = lambda text: None
    pyplot.show = lambda: None
    package = types.ModuleType("matplotlib")
    package.pyplot = pyplot
    package.__spec__ = types.SimpleNamespace()  # it is installed
    monkeypatch.setitem(sys.modules, "matplotlib", package)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    monkeypatch.setattr(jrl, "steps", fake_steps, raising=False)
    return plotted


def fake_steps(config, bindings, *, parts, run):
    """Yields ten steps and writes their metrics; nothing where the run is done."""
    metrics = Path(run) / "metrics.jsonl"
    if metrics.exists():
        return
    metrics.parent.mkdir(parents=True)
    for step in range(1, 11):
        row = {"step": step, "reward/mean": step / 10}
        with open(metrics, "a") as file:
            file.write(json.dumps(row) + "\n")
        yield types.SimpleNamespace(step=step, metrics=row, texts=[("prompt", "completion")])


@pytest.mark.parametrize("name", ["first_run.ipynb", "own_objective.ipynb"])
def test_without_jrl_it_is_installed_from_the_checkout_alone(name, tmp_path, monkeypatch):
    """jrl is on no index; a package that has its name there is somebody else's."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ran = []
    monkeypatch.setattr("subprocess.run", lambda command, check: ran.append(command[1:]))
    monkeypatch.chdir(ROOT / "notebooks")
    exec(compile(cells(name)[0], "<cell>", "exec"), {})
    (command,) = ran
    assert command[:-1] == ["-m", "pip", "install", "--quiet"] and command[-1].startswith(str(ROOT))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="not in a checkout of jrl"):
        exec(compile(cells(name)[0], "<cell>", "exec"), {})
    assert len(ran) == 1


def test_running_it_again_plots_the_same(plots):
    space: dict = {}
    for _ in range(2):
        for cell in CELLS:
            exec(compile(cell, "<cell>", "exec"), space)
    assert plots == [(list(range(1, 11)), [step / 10 for step in range(1, 11)])] * 2


def test_its_bindings_are_those_of_the_bundled_configuration(plots):
    space: dict = {"__name__": "notebook"}
    for number, cell in enumerate(CELLS[:-1]):
        name = f"<cell {number}>"  # as IPython does, so that a function's source can be found
        linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
        exec(compile(cell, name, "exec"), space)
    config, _ = jrl.load_config("tiny", space["bindings"], [space["many_digits"]])
    assert type(config.scoring.verifiers[0]).__name__ == "many_digits"


def test_an_objective_of_ones_own_is_the_documented_one_and_every_command_is_taken(tmp_path, monkeypatch, capsys):
    """The commands without what they train: a sweep prints its members. What is written is what the contract tests of
    documented parts read."""
    monkeypatch.chdir(tmp_path)
    commands = []
    for cell in cells("own_objective.ipynb"):
        if cell.startswith("%%writefile "):
            first, text = cell.split("\n", 1)
            Path(first.removeprefix("%%writefile ")).write_text(text)
        commands += [shlex.split(line[1:]) for line in cell.split("\n") if line.startswith("!")]
    for command in commands:
        words = [word.replace("{OUT}", "sweeps/mine") for word in command]
        assert words[0] == "{JRL}"
        cli.parser_of(words[1]).parse_intermixed_args(words[2:])
        if words[1] == "sweep":
            assert cli.main([*words[1:], "--print"]) == 0
    assert [command[1] for command in commands] == ["check", "sweep", "rollouts"]
    printed = capsys.readouterr().out
    members = [f"sweeps/mine/objective={name},seed={seed}" for name in ("GRPO", "LeaveOneOut") for seed in range(3)]
    assert [line.split("--run ")[1] for line in printed.splitlines()] == members
    assert commands[2][2].replace("{OUT}", "sweeps/mine") in members
    (tmp_path / "page").mkdir()
    assert Path("my_parts.py").read_text().strip() == write_part("An objective", tmp_path / "page").read_text().strip()
