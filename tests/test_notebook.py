"""The notebook's cells, with a run in the place of jrl's: they work anywhere, and again."""

from __future__ import annotations

import json
import linecache
import sys
import types
from pathlib import Path

import pytest

import jrl

ROOT = Path(__file__).parents[1]
CELLS = [
    "".join(cell["source"])
    for cell in json.loads((ROOT / "notebooks" / "first_run.ipynb").read_text())["cells"]
    if cell["cell_type"] == "code"
]


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
