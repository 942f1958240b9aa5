from __future__ import annotations

import pytest
from reader_tree import TABLES, Config, Length

from jrl.config import load
from jrl.config.sweep import axis, chain, grid, zip_


def test_grid_is_every_combination_with_the_last_varying_fastest():
    assert grid(axis("A.x", [1, 2]), axis("A.y", ["a", None])) == [
        ["A.x = 1", "A.y = 'a'"],
        ["A.x = 1", "A.y = None"],
        ["A.x = 2", "A.y = 'a'"],
        ["A.x = 2", "A.y = None"],
    ]
    assert grid() == [[]]
    assert grid(axis("A.x", [1]), []) == []


def test_zip_joins_points_of_equal_rank():
    assert zip_(axis("A.x", [1, 2]), axis("A.y", [0.5, 1e-7])) == [["A.x = 1", "A.y = 0.5"], ["A.x = 2", "A.y = 1e-07"]]
    with pytest.raises(ValueError, match=r"unequal lengths \[1, 2\]"):
        zip_(axis("A.x", [1]), axis("A.y", [1, 2]))


def test_chain_puts_sweeps_one_after_the_other():
    assert chain(axis("A.x", [1]), grid(axis("A.x", [2]), axis("A.y", [True]))) == [
        ["A.x = 1"],
        ["A.x = 2", "A.y = True"],
    ]


def test_references_are_not_quoted_and_other_values_are_refused():
    assert axis("A.x", ["@B()", "%C", ["@B()", "b"]]) == [["A.x = @B()"], ["A.x = %C"], ["A.x = [@B(), 'b']"]]
    with pytest.raises(TypeError, match="not set"):
        axis("A.x", [{1}])


def test_points_of_a_sweep_are_what_the_reader_takes():
    fixed = axis("Config.task", ["@Sum()"])
    sweep = grid(fixed, axis("Config.algo", ["@GRPO()"]), axis("Loop.steps", [3]),
                 axis("Scoring.verifiers", [["@Length()"]]), axis("Length.target", [1, 2.5]))  # fmt: skip
    targets = [load(None, point, Config, TABLES).scoring.verifiers for point in sweep]
    assert targets == [(Length(target=1),), (Length(target=2.5),)]
