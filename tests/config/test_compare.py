from __future__ import annotations

import dataclasses

import pytest
from reader_tree import DAPO, GRPO, AdamW, Config, Exact, Length, Loop, Run, Schedule, Scoring, Sum

from jrl.config import difference, identity

A = Config(task=Sum(), algo=GRPO(), run=Run(), loop=Loop(steps=3), optimizer=AdamW(schedule=Schedule()))


def test_equal_configurations_do_not_differ():
    again = dataclasses.replace(A, loop=Loop(steps=3))
    assert difference(A, again) == []
    assert identity(A) == identity(again)


def test_each_field_that_differs_has_a_line():
    b = dataclasses.replace(
        A,
        algo=DAPO(),
        task=Sum(digits=(9,)),
        loop=Loop(steps=4, stop_at=0.5),
        optimizer=AdamW(schedule=Schedule(warmup=2)),
        scoring=Scoring(verifiers=(Exact(weight=2.0),)),
    )
    assert difference(A, b) == [
        "Sum.digits: [1, 2] -> [9]",
        "Config.algo: @GRPO() -> @DAPO()",
        "Loop.steps: 3 -> 4",
        "Loop.stop_at: None -> 0.5",
        "Schedule.warmup: 0 -> 2",
        "Scoring.verifiers[0] Exact.weight: 1.0 -> 2.0",
    ]


def test_what_is_ignored_is_no_difference():
    b = dataclasses.replace(A, loop=Loop(steps=4, lag=1), run=Run(seed=5))
    assert difference(A, b, ["Loop.steps", "Run.*"]) == ["Loop.lag: 0 -> 1"]


def test_lists_of_parts_of_unequal_length_are_shown_whole():
    b = dataclasses.replace(A, scoring=Scoring(verifiers=(Exact(), Length())))
    assert difference(A, b) == ["Scoring.verifiers: [@Exact()] -> [@Exact(), @Length()]"]


def test_identity_leaves_out_only_what_is_ignored():
    longer = dataclasses.replace(A, loop=Loop(steps=9))
    renamed = dataclasses.replace(A, run=Run(name="other", seed=0))
    assert identity(A) != identity(longer)
    assert identity(A, ["Loop.steps"]) == identity(longer, ["Loop.steps"])
    assert identity(A, ["Run.*"]) == identity(renamed, ["Run.*"])
    assert identity(A, ["Run.seed"]) != identity(renamed, ["Run.seed"])
    assert identity(A, ["Loop.steps"]) != identity(dataclasses.replace(A, loop=Loop(steps=3, lag=1)), ["Loop.steps"])


def test_identity_tells_classes_with_the_same_fields_apart():
    other = dataclasses.make_dataclass("Other", [("weight", float, 1.0), ("strip", bool, True)], frozen=True)
    assert identity(Exact()) != identity(other())


def test_identity_refuses_to_ignore_a_field_that_does_not_exist():
    with pytest.raises(ValueError, match="Loop has no field 'stpes'"):
        identity(A, ["Loop.stpes"])
    identity(A, ["DAPO.anything"])  # a row that is not chosen
