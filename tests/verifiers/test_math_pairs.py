"""MathEqual on 355 pairs of answers that were written down before its code was read.

Eight of them are equal to who wrote them and not by the default policy: their last column has its row.
"""

from __future__ import annotations

import pathlib

from benchmarks import math_answers
from jrl.tasks.verdict import Status
from jrl.tasks.verifiers.expressions.terms import NoAnswer
from jrl.tasks.verifiers.math_equal import MathEqual, compare

PAIRS = pathlib.Path(__file__).with_name("math_pairs.tsv")
ROWS = [line.split("\t") for line in PAIRS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
BY_POLICY = {"symbol", "unit", "percent", "degree", "currency"}


def judged_equal(gold: str, answer: str, **fields) -> bool:
    try:
        return compare(MathEqual(**fields), gold, answer).status is Status.CORRECT
    except NoAnswer:  # the gold answer is not read: the row would be masked
        return False


def test_no_pair_is_misjudged_but_for_the_stated_policy():
    wrong = [row for row in ROWS if judged_equal(row[1], row[2]) != (row[0] == "equal")]
    assert len(ROWS) == 355
    assert [row for row in wrong if row[0] == "unequal"] == []
    assert [row for row in wrong if not BY_POLICY & set(row[3:])] == []
    assert len(wrong) == 8


def test_units_and_a_symbol_that_are_declared_leave_no_pair_out():
    pairs = [row for row in ROWS if row[3:]]
    assert all(judged_equal(gold, answer, units="optional", symbol="x") for _, gold, answer, _ in pairs)


def test_pairs_that_are_equal_or_not_by_construction(trials):
    report = math_answers.measure(trials(200, 4_000, seed=2), seed=2, kinds=["near", "equal"])
    assert (report["wrong"], report["exceptions"]) == ([], [])
