"""Every row of the policy in docs/math-answers.md, by pairs that were written for it: math_policy.tsv."""

from __future__ import annotations

import pathlib
import re

import pytest

from jrl.tasks.verdict import Status
from jrl.tasks.verifiers.expressions.terms import NoAnswer
from jrl.tasks.verifiers.math_equal import MathEqual, compare

HERE = pathlib.Path(__file__).parent
PAIRS = [line.split("\t") for line in (HERE / "math_policy.tsv").read_text(encoding="utf-8").splitlines()[1:]]
DOCUMENT = (HERE.parents[1] / "docs" / "math-answers.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([a-z][a-z-]*) \| ", DOCUMENT.split("## Policy")[1].split("## How")[0], re.MULTILINE)[1:]


def config(fields: list[str]) -> MathEqual:
    values = dict(field.split("=") for field in fields)
    return MathEqual(**{name: float(v) if name == "decimal_tolerance" else v for name, v in values.items()})


def judged_equal(gold: str, answer: str, fields: list[str]) -> bool:
    try:
        return compare(config(fields), gold, answer).status is Status.CORRECT
    except NoAnswer:  # the gold answer is not read
        return False


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_policy(row):
    pairs = [pair for pair in PAIRS if pair[0] == row]
    assert {verdict for _, verdict, *_ in pairs} == ({"unequal"} if row == "cap" else {"equal", "unequal"})
    wrong = [pair for pair in pairs if judged_equal(pair[2], pair[3], pair[4:]) is not (pair[1] == "equal")]
    assert not wrong


def test_sets_within_a_tolerance_are_matched_in_whatever_order():
    # Within 6 %: 0.96 of 1.0 alone, 1.05 of both 1.0 and 1.1. Whoever gives 1.05 to 1.0 first leaves 0.96 alone.
    same = lambda answer, gold=r"\{1.0, 1.1\}": judged_equal(gold, answer, ["decimal_tolerance=0.06"])
    assert same(r"\{0.96, 1.05\}") and same(r"\{1.05, 0.96\}") and same("1.05, 0.96", "1.0, 1.1")
    assert not same(r"\{0.96, 0.96\}") and not same(r"\{1.05\}")
    assert same(r"\{1.15, 1.05, 0.96\}", r"\{1.1, 1.0, 1.1\}")


@pytest.mark.parametrize("element", ["{0}", "x^{{{0}}} + {0}", r"\sqrt{{{0}}}", "{0}.5"])
def test_a_long_set_in_another_order_is_no_more_work_with_a_tolerance(element):
    elements = [element.format(i) for i in range(2, 42)]
    gold, answer = (r"\{" + ", ".join(order) + r"\}" for order in (elements, elements[::-1]))
    assert judged_equal(gold, answer, ["decimal_tolerance=0.001"])
    assert not judged_equal(gold, answer.replace(elements[7], elements[8]), ["decimal_tolerance=0.001"])


def test_what_is_no_decimal_takes_its_partner_before_those_within_a_tolerance_do():
    # 1.0 may be 1.05 or 1, of which 1 is needed elsewhere.
    assert judged_equal(r"\{1.0, 1\}", r"\{1, 1.05\}", ["decimal_tolerance=0.06"])
    assert not judged_equal(r"\{1.0, 1\}", r"\{1.02, 1.05\}", ["decimal_tolerance=0.06"])


def test_pairs_are_of_rows_that_the_document_has():
    assert {pair[0] for pair in PAIRS} == set(ROWS)
    assert len(PAIRS) >= 200


@pytest.mark.parametrize(
    ("field", "value"), [("units", "none"), ("decimal_tolerance", -0.1), ("decimal_tolerance", float("nan"))]
)
def test_a_field_out_of_range_is_refused(field, value):
    with pytest.raises(ValueError, match=f"MathEqual.{field}"):
        MathEqual(**{field: value})
