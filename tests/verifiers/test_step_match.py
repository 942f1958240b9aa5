"""StepMatch: rewards of lines against a worked solution, with true, false, tricky and hostile texts."""

from __future__ import annotations

import pytest

from jrl.tasks.example import Example, Message
from jrl.tasks.rewards.segments import segment_rewards
from jrl.tasks.verdict import Status
from jrl.tasks.verifiers import VERIFIERS, step_match
from jrl.tasks.verifiers.contract import SPANS_LIMIT
from jrl.tasks.verifiers.judge import judge
from jrl.tasks.verifiers.step_match import StepMatch


def example(steps=("o", "7")):
    info = {"steps": list(steps)} if steps else {}
    return Example(id="3+4", messages=(Message("user", "3+4="),), answer="7", info=info)


def test_rewards_of_segments_by_hand():
    # 0.3 and -0.3, and 0.3 * 1 / 2; both right: 0.3 each, and 0.3.
    assert segment_rewards([True, False], 2) == ([0.3, -0.3], pytest.approx(0.15))
    assert segment_rewards([True, True], 2) == ([0.3, 0.3], pytest.approx(0.3))
    assert segment_rewards([], 2) == ([], 0)
    assert segment_rewards([True] * 3, 2, completeness=1.0)[1] == 1  # no more than complete


@pytest.mark.parametrize(
    ("text", "status", "reward", "spans"),
    [
        ("o\n7\n", Status.CORRECT, 0.3, ((1, 0.3), (3, 0.3))),
        ("o\n 7", Status.CORRECT, 0.3, ((1, 0.3), (4, 0.3))),
        ("\no\n\n7\n", Status.CORRECT, 0.3, ((2, 0.3), (5, 0.3))),
        ("e\n7", Status.WRONG, 0.15, ((1, -0.3), (3, 0.3))),
        ("o", Status.WRONG, 0.15, ((1, 0.3),)),
        ("7\no", Status.WRONG, 0, ((1, -0.3), (3, -0.3))),
        ("o\n7\n7", Status.WRONG, 0.3, ((1, 0.3), (3, 0.3), (5, -0.3))),
        ("", Status.UNPARSABLE, 0, ()),
        (" \n\n", Status.UNPARSABLE, 0, ()),
    ],
)
def test_every_line_is_rewarded_where_it_ends(text, status, reward, spans):
    verdict = step_match.score(StepMatch(), text, example())
    assert verdict.status is status and verdict.reward == pytest.approx(reward)
    assert verdict.spans == tuple((end, pytest.approx(reward)) for end, reward in spans)


def test_an_example_without_steps_is_an_error():
    with pytest.raises(ValueError, match=r"example '3\+4' has no texts in info\['steps'\]"):
        step_match.score(StepMatch(), "o", example(None))


def test_more_segments_than_are_rewarded_is_a_cap_and_no_error_of_the_verifier():
    row = VERIFIERS["StepMatch"]
    allowed = judge(row, StepMatch(), "o\n" * SPANS_LIMIT, example())
    assert (allowed.status, len(allowed.spans)) == (Status.WRONG, SPANS_LIMIT)
    assert judge(row, StepMatch(), "o\n" * SPANS_LIMIT + "o", example()).status is Status.FORBIDDEN
