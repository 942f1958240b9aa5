"""Verifiers of steps and of repetition, by hand."""

from __future__ import annotations

import pytest

from jrl.tasks.example import Example, Message
from jrl.tasks.verdict import Status
from jrl.tasks.verifiers.contract import SPANS_LIMIT
from jrl.tasks.verifiers.equation_steps import EquationSteps, holds, score
from jrl.tasks.verifiers.repetition import Repetition
from jrl.tasks.verifiers.repetition import score as score_repetition

EXAMPLE = Example("e", (Message("user", "2 + 3?"),))
SOLUTION = "First,\n2+3=5\n5*2=11\nso 11\n4-1=3"  # lines end after 6, 12, 19, 25 and 31 characters; right, wrong, right


@pytest.mark.parametrize(
    ("line", "expected"),
    [("1+1=2", True), ("1+1=3", False), (" 1/2 = 0.5 ", True), ("x+x=2*x", True), ("1=1=2", False), ("x=y", False),
     ("so it is", None), ("a = that", None), ("=", None), ("", None)],
)  # fmt: skip
def test_a_line_is_an_equation_that_holds_or_none(line, expected):
    assert holds(line) is expected


@pytest.mark.parametrize(("reward", "expected"), [("min", 0), ("product", 0), ("last", 1), ("mean", 2 / 3)])
def test_one_reward_of_steps_by_hand(reward, expected):
    verdict = score(EquationSteps(reward=reward), SOLUTION, EXAMPLE)
    assert (verdict.status, verdict.spans) == (Status.WRONG, ())
    assert verdict.reward == pytest.approx(expected)
    assert score(EquationSteps(reward=reward), "2+3=5\n5+1=6", EXAMPLE).reward == 1


def test_rewards_of_steps_are_at_the_ends_of_their_lines():
    found = score(EquationSteps(reward="differences"), SOLUTION, EXAMPLE)
    # 1 - 0.5, 0 - 1, 1 - 0
    assert found.reward == 0 and found.spans == ((12, 0.5), (19, -1.0), (31, 1.0))
    assert SOLUTION[:12].endswith("2+3=5") and SOLUTION[:19].endswith("=11") and len(SOLUTION) == 31
    assert score(EquationSteps(reward="differences", prior=0.2), "1=1", EXAMPLE).spans == ((3, 0.8),)
    assert score(EquationSteps(reward="values"), SOLUTION, EXAMPLE).spans == ((12, 1.0), (19, 0.0), (31, 1.0))


def test_more_steps_than_are_rewarded_is_a_cap_and_no_error_of_the_verifier():
    for kind in ("differences", "values"):
        config, allowed = EquationSteps(reward=kind), "1=1\n" * SPANS_LIMIT
        assert len(score(config, allowed, EXAMPLE).spans) == SPANS_LIMIT
        assert score(config, allowed + "1=1", EXAMPLE).status is Status.FORBIDDEN
    assert score(EquationSteps(), "1=1\n" * 2 * SPANS_LIMIT, EXAMPLE).reward == 1


def test_without_a_step_the_completion_is_one_wrong_step():
    found = score(EquationSteps(reward="differences"), "so 5", EXAMPLE)
    assert (found.status, found.reward, found.spans) == (Status.UNPARSABLE, 0.0, ((4, -0.5),))
    assert score(EquationSteps(), "so 5", EXAMPLE).reward == 0.0
    assert score(EquationSteps(reward="differences"), "", EXAMPLE).spans == ()


def test_repetition_by_hand():
    # Bigrams ab, ba, ab, ba, ab: 2 of 5 are distinct
    assert score_repetition(Repetition(size=2), "a b a\nb a b", EXAMPLE).reward == pytest.approx(-0.6)
    assert score_repetition(Repetition(), "a b a b a b", EXAMPLE).reward == pytest.approx(-1 / 3)  # abab, baba, abab
    assert score_repetition(Repetition(size=2), "a b", EXAMPLE).reward == 0.0
    with pytest.raises(ValueError, match=r"Repetition\.size is 0"):
        Repetition(size=0)
