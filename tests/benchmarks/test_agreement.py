"""The comparison with other libraries: what it is made of, without them."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from benchmarks import environments
from benchmarks.agreement import compare, preferences
from benchmarks.agreement.rows import FINISH, PREPARE, ROWS

PEERS = Path(compare.__file__).parent / "peers"


def names_asked(library):
    """Returns the names of the rows that a library's file answers, which needs the library to be imported."""
    tree = ast.parse((PEERS / f"{library}.py").read_text(encoding="utf-8"))
    table = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ROWS"
    )
    return {key.value for key in table.keys}


@pytest.mark.parametrize("library", ["trl", "verl", "areal", "rlax"])
def test_every_row_is_answered_and_every_answer_is_asked_for(library):
    assert names_asked(library) == {row.name for row in ROWS if row.library == library}


def test_every_loss_of_preferences_is_answered_and_has_its_cases():
    rows = (*preferences.ROWS, *preferences.ARRAY_ROWS)
    assert names_asked("trl_preferences") == {row.name for row in rows}
    assert len({row.objective for row in preferences.ROWS}) >= 15
    assert all(len(preferences.cases_of(row, 2, seed=0)) == 2 for row in rows)
    for row in (row for row in rows if row.name in ("kto", "alpha_divergence", "reward")):
        cases = preferences.cases_of(row, 2, seed=0)
        value, slope = preferences.answers(row, cases)
        assert np.isfinite(value).all() and np.isfinite(slope).all() and np.any(slope)


def test_rows_are_of_parts_and_of_known_preparations():
    for row in ROWS:
        assert compare.part_of(row.part)
        assert row.finish in {"", *FINISH} and row.prepare in PREPARE


def test_cases_of_libraries_have_nothing_in_which_they_differ():
    row = next(row for row in ROWS if row.name == "grpo" and row.library == "verl")
    for case in compare.shared_cases(row, 20, seed=0):
        assert case["valid"].all() and case["action_mask"].any(axis=1).all()
        assert min(np.unique(case["group"], return_counts=True)[1]) >= 2


@pytest.mark.parametrize("name", ["bradley_terry", "kto", "pro", "win_probability", "win_share", "pair_strength"])
def test_losses_of_preferences_equal_their_loops(name):
    worst = compare.against_preference_loop(compare.preferences_compared()[name], count=20, seed=0)
    assert all(difference <= compare.BAR for difference in worst if difference is not None)


def test_a_difference_is_relative_above_1_and_infinite_where_one_is_not_a_number():
    assert compare.difference(np.array([0.5]), np.array([0.25])) == 0.25
    assert compare.difference(np.array([110.0]), np.array([100.0])) == pytest.approx(0.1)
    assert compare.difference(np.array([np.nan]), np.array([0.0])) == np.inf
    assert compare.difference(np.array([np.nan]), np.array([np.nan])) == 0


def test_the_libraries_have_pinned_versions():
    lines = (environments.VERSIONS / "agreement.txt").read_text().split()
    assert all(line.count("==") == 1 for line in lines)
    assert {"areal", "rlax", "trl", "verl"} <= {line.split("==")[0] for line in lines}
