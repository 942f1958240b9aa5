"""The list of parts says what is there: functions that import, their parameters, and tests that exist."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pathlib

import pytest

from jrl.algos import ALGOS
from jrl.algos.contract import Objective
from jrl.algos.parts import OBJECTIVE_FUNCTIONS, PARTS

ROOT = pathlib.Path(__file__).parents[2]
NAMES = [f"{part['id']}-{part['function'].split(':')[1]}" for part in PARTS]


@functools.cache
def functions_in(path):
    """Returns the names of the functions of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("part", PARTS, ids=NAMES)
def test_the_function_is_there_with_the_inputs_named(part):
    module, name = part["function"].split(":")
    function = vars(importlib.import_module(module))[name]
    assert list(inspect.signature(function).parameters) == part["inputs"]
    assert part["id"] in function.__doc__ or part["id"] == "A23"  # whiten is a reduction that A23 borrows


def test_every_function_of_an_objective_is_listed_in_the_records_order():
    listed = [part["function"] for part in OBJECTIVE_FUNCTIONS]
    functions = [name for name in Objective._fields if name not in ("config", "unit_size", "strengths")]
    assert listed == [f"jrl.algos.contract:Objective.{name}" for name in functions]


@pytest.mark.parametrize("part", OBJECTIVE_FUNCTIONS, ids=lambda part: part["function"].split(".")[-1])
def test_rows_define_it_with_the_inputs_named(part):
    name = part["function"].split(".")[-1]
    defined = [getattr(row, name) for row in (Objective(config=object), *ALGOS.values())]
    defined = [function for function in defined if function is not None]
    assert defined
    for function in defined:
        assert len(inspect.signature(function).parameters) == len(part["inputs"])


@pytest.mark.parametrize(
    "part",
    [*PARTS, *OBJECTIVE_FUNCTIONS],
    ids=[*NAMES, *(part["function"].split(":")[1] for part in OBJECTIVE_FUNCTIONS)],
)
def test_its_tests_are_there(part):
    assert part["tests"]
    for test in part["tests"]:
        path, name = test.split("::")
        assert name in functions_in(ROOT / path)


def test_a_part_and_its_function_are_listed_once():
    pairs = [(part["id"], part["function"]) for part in PARTS]
    assert len(pairs) == len(set(pairs))


def test_every_public_function_of_the_parts_modules_is_listed_or_serves_a_listed_one():
    # What is public in the modules of advantages and losses is a part; the rest is named here.
    helpers = {"spread", "clipped_high", "clipped_low", "last_action", "clip_ratio"}
    listed = {part["function"] for part in PARTS}
    formulas = ("advantages", "surrogate", "importance", "kl", "entropy", "shaping", "filters", "values")
    formulas += ("sequence_ratio", "geometric_mean", "decoupled", "mix_policy", "mirror_descent", "rejection_sampling")
    formulas += ("offline_advantage", "awr", "likelihood", "gates", "covariance", "trust_region", "token_selection")
    formulas += ("coefficients", "reference", "two_hot")
    formulas += ("constraints", "ensembles", "gated_reward", "length_rewards", "missing_stop", "reward_telemetry")
    formulas += ("robust_scale",)
    formulas += ("baselines", "best_of_k", "gae", "stored_advantages", "tree", "turns", "vtrace")
    for module in formulas:
        functions = functions_in(ROOT / "jrl" / "ops" / f"{module}.py")
        public = {name for name in functions if not name.startswith("_")} - helpers
        assert {f"jrl.ops.{module}:{name}" for name in public} <= listed
