"""The list of parts says what is there: functions that import, their parameters, and tests that exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib

import pytest

from jrl.algos.parts import PARTS

ROOT = pathlib.Path(__file__).parents[2]
NAMES = [f"{part['id']}-{part['function'].split(':')[1]}" for part in PARTS]


@pytest.mark.parametrize("part", PARTS, ids=NAMES)
def test_the_function_is_there_with_the_inputs_named(part):
    module, name = part["function"].split(":")
    function = vars(importlib.import_module(module))[name]
    assert list(inspect.signature(function).parameters) == part["inputs"]
    assert part["id"] in function.__doc__ or part["id"] == "A23"  # whiten is a reduction that A23 borrows


@pytest.mark.parametrize("part", PARTS, ids=NAMES)
def test_its_tests_are_there(part):
    assert part["tests"]
    for test in part["tests"]:
        path, name = test.split("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_a_part_and_its_function_are_listed_once():
    pairs = [(part["id"], part["function"]) for part in PARTS]
    assert len(pairs) == len(set(pairs))


def test_every_public_function_of_the_parts_modules_is_listed_or_serves_a_listed_one():
    # What is public in the modules of advantages and losses is a part; the rest is named here.
    helpers = {"spread", "clipped_high", "clipped_low", "last_action"}
    listed = {part["function"] for part in PARTS}
    for module in ("advantages", "surrogate", "importance", "kl", "entropy", "shaping", "filters", "values"):
        tree = ast.parse((ROOT / "jrl" / "ops" / f"{module}.py").read_text(encoding="utf-8"))
        public = {n.name for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")} - helpers
        assert {f"jrl.ops.{module}:{name}" for name in public} <= listed
