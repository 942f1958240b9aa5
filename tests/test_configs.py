"""Every file under configs/ can be read, and says how to run it."""

from __future__ import annotations

import pathlib
import re

import pytest

import jrl
from jrl.tools.plan.case import make_case
from jrl.tools.plan.chips import parse_topology

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.gin"))


def test_there_are_configs():
    assert "configs/tiny.gin" in FILES


@pytest.mark.parametrize("name", FILES)
def test_it_loads(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    config, _ = jrl.load_config(name)
    assert sum(stage.steps for stage in config.stages) > 0


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("configs/plan/")])
def test_its_head_gives_command_hardware_time_and_expectation(name):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    head = "\n".join(line for line in lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))])
    assert f"jrl train {name}" in head
    for word in ("Hardware:", "Time:", "Expected:"):
        assert word in head


@pytest.mark.parametrize("name", [n for n in FILES if n.startswith("configs/algos/") and n != "configs/algos/toy.gin"])
def test_the_head_of_a_recipe_gives_its_paper_and_how_it_differs_and_docs_list_it(name):
    head, _, rest = (ROOT / name).read_text(encoding="utf-8").partition("\n\n")
    lines = head.splitlines()
    assert lines[0].startswith("# ") and lines[0].endswith(".")
    assert any(line.startswith(f"#   jrl train {name} --run runs/") for line in lines)
    assert any(line.startswith("# Paper: ") for line in lines) and any(line.startswith("# Differs: ") for line in lines)
    assert rest.startswith("include '")
    assert f"`{name}`" in (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("configs/plan/")])
def test_the_head_of_a_shape_gives_its_plan_and_topology(name):
    head = (ROOT / name).read_text(encoding="utf-8").split("\n\n")[0]
    topology = re.search(r"^# Topology: (\S+)$", head, re.MULTILINE)[1]
    assert f"jrl plan {name} --topology {topology}" in head
    chips = parse_topology(topology).num_devices
    config, parts = jrl.load_config(str(ROOT / name))
    assert make_case(config, parts, chips).spec
