"""Verifiers of likeness, calibration and tests, with true, false, tricky and hostile texts."""

from __future__ import annotations

import dataclasses

import pytest

from jrl.tasks.example import Example, Message
from jrl.tasks.verdict import Status
from jrl.tasks.verifiers import VERIFIERS, calibration, confidence_span, expression_tests, similarity
from jrl.tasks.verifiers.calibration import Calibration
from jrl.tasks.verifiers.confidence_span import ConfidenceSpan
from jrl.tasks.verifiers.expression_tests import ExpressionTests
from jrl.tasks.verifiers.similarity import Similarity


def example(answer="bcde", **info):
    return Example("e", (Message("user", "?"),), answer=answer, info=info)


@pytest.mark.parametrize(
    ("text", "status", "reward"),
    [
        ("abcd", Status.CORRECT, 0.75),  # 2 * 3 / 8
        (" bcde\n", Status.CORRECT, 1.0),
        ("xyz", Status.WRONG, 0.0),
        ("  ", Status.UNPARSABLE, -1.0),
    ],
)
def test_similarity(text, status, reward):
    verdict = similarity.score(Similarity(), text, example())
    assert (verdict.status, verdict.reward) == (status, reward)


def test_similarity_of_what_cannot_be_compared():
    verdict = similarity.score(Similarity(extract="answer_tag", unparsable=-0.5), "bcde", example())
    assert (verdict.status, verdict.reward) == (Status.UNPARSABLE, -0.5)
    verdict = similarity.score(Similarity(max_characters=4), "bcdef", example())
    assert (verdict.status, verdict.reward) == (Status.FORBIDDEN, None)
    assert similarity.score(Similarity(), "a", example(answer="")).reward == 0.0
    ranges = [VERIFIERS["Similarity"].limits(Similarity(unparsable=value))[:2] for value in (-0.5, 0.0, 2.0)]
    assert ranges == [(-0.5, 1.0), (0.0, 1.0), (0.0, 2.0)]
    told = Similarity(info="feedback")  # 2 * 2 of 2 + 8 characters
    assert similarity.score(told, "12", example(feedback="It is 12")).reward == pytest.approx(0.4)
    with pytest.raises(ValueError, match="'e' has no text 'feedback' in its info; Similarity needs one"):
        similarity.score(told, "12", example())
    with pytest.raises(ValueError, match="'e' has no answer; Similarity needs one"):
        similarity.score(Similarity(), "a", example(answer=None))


@pytest.mark.parametrize(
    ("text", "status", "reward"),
    [
        ("bcde <confidence>8</confidence>", Status.CORRECT, 0.92),
        ("wrong<confidence> 8.0 </confidence>\n", Status.WRONG, -0.28),
        ("bcde<confidence>0</confidence>", Status.CORRECT, -1.0),
        ("bcde<confidence>10</confidence>", Status.CORRECT, 1.0),
        ("bcde<confidence>10.01</confidence>", Status.UNPARSABLE, -1.0),
        ("bcde<confidence>-1</confidence>", Status.UNPARSABLE, -1.0),
        ("bcde<confidence>high</confidence>", Status.UNPARSABLE, -1.0),
        ("bcde<confidence>nan</confidence>", Status.UNPARSABLE, -1.0),
        ("bcde<confidence>8", Status.UNPARSABLE, -1.0),
        ("bcde", Status.UNPARSABLE, -1.0),
        ("<confidence>8</confidence>", Status.UNPARSABLE, -1.0),
        ("bcde<confidence>0</confidence><confidence>10</confidence>", Status.UNPARSABLE, -1.0),
        ("bcde<confidence>8</confidence> bcde", Status.UNPARSABLE, -1.0),
        ("bcde<confidence>1e400</confidence>", Status.UNPARSABLE, -1.0),
    ],
)
def test_calibration(text, status, reward):
    verdict = calibration.score(Calibration(), text, example())
    assert verdict.status is status and verdict.reward == pytest.approx(reward)


def test_calibration_on_another_scale():
    config = Calibration(scale=1.0, extract="boxed")
    verdict = calibration.score(config, r"\boxed{bcde}<confidence>.8</confidence>", example())
    assert verdict.reward == pytest.approx(0.92)
    with pytest.raises(ValueError, match="it must be above 0"):
        Calibration(scale=0.0)


@pytest.mark.parametrize(
    ("text", "status", "spans"),
    [
        ("bcde<confidence>8</confidence>", Status.CORRECT, ((5, 0.92),)),
        ("wrong<confidence>8</confidence>", Status.WRONG, ((6, -0.28),)),
        ("bcde<confidence>high", Status.UNPARSABLE, ((5, -1.0),)),  # where the confidence begins
        ("bcde", Status.UNPARSABLE, ((4, -1.0),)),  # there is none
        ("", Status.UNPARSABLE, ((0, -1.0),)),  # a stop token alone is not empty
    ],
)
def test_the_reward_of_a_confidence_is_on_its_first_character(text, status, spans):
    verdict = confidence_span.score(ConfidenceSpan(), text, example())
    assert verdict.status is status and verdict.reward == 0
    assert verdict.spans == tuple((end, pytest.approx(reward)) for end, reward in spans)
    short = ConfidenceSpan(opening="[", closing="]")
    assert confidence_span.score(short, "bcde[8]", example()).spans == ((5, pytest.approx(0.92)),)
    with pytest.raises(ValueError, match=r"ConfidenceSpan\.opening and ConfidenceSpan\.closing must be texts"):
        ConfidenceSpan(opening="")


TESTS = [["0", "1"], [1, 3], ["1/2", "2"], [-1, 0]]  # 2 x + 1 passes the first three


@pytest.mark.parametrize(
    ("text", "status", "all_or_nothing", "share"),
    [
        ("2*x + 1", Status.WRONG, 0.0, 0.75),
        ("x", Status.WRONG, 0.0, 0.0),
        # Through all four points: 2 x + 1 + c x (x - 1) (x - 1/2), where -1 + c (-1) (-2) (-3/2) = 0 gives c = -1/3.
        ("2*x + 1 - x*(x-1)*(x-1/2)/3", Status.CORRECT, 1.0, 1.0),
        ("y", Status.UNPARSABLE, 0.0, 0.0),
        ("f(x)", Status.UNPARSABLE, 0.0, 0.0),
        ("1/x", Status.UNPARSABLE, 0.0, 0.0),
        ("__import__('os')", Status.UNPARSABLE, 0.0, 0.0),
        ("9**9**9", Status.UNPARSABLE, 0.0, 0.0),
        ("", Status.UNPARSABLE, 0.0, 0.0),
    ],
)
def test_expressions_against_tests(text, status, all_or_nothing, share):
    for reward, wanted in (("all", all_or_nothing), ("share", share)):
        verdict = expression_tests.score(ExpressionTests(reward=reward), text, example(tests=TESTS))
        assert (verdict.status, verdict.reward) == (status, wanted)


@pytest.mark.parametrize(
    ("text", "staged", "speed"),
    [
        ("f(x)", 0.0, 0.0),  # it cannot be read
        ("y", 0.1, 0.0),  # it can, and has no value at an x
        ("2*x + 1", 0.3, 0.0),  # it has values, and one is wrong
        ("2*x + 1 - x*(x-1)*(x-1/2)/3", 1.0, 0.1),  # 9 operations against 10
        ("x - x + 2*x + 1 - x*(x-1)*(x-1/2)/3", 1.0, 0.0),  # 11: no faster, and no reward below 0
    ],
)
def test_stages_and_speed_of_expressions(text, staged, speed):
    given = dataclasses.replace(example(tests=TESTS), answer="1+1+1+1+1+1+1+1+1+1+x")
    for reward, wanted in (("staged", staged), ("speed", speed)):
        verdict = expression_tests.score(ExpressionTests(reward=reward), text, given)
        assert verdict.reward == pytest.approx(wanted) and verdict.status.scorable
    for answer in (None, "x"):
        with pytest.raises(ValueError, match="needs an expression with an operation"):
            expression_tests.score(ExpressionTests(reward="speed"), "x", dataclasses.replace(given, answer=answer))


@pytest.mark.parametrize("tests", [None, [], "1 2", [[1]], [[1, 2, 3]], [["one", 1]], [5]])
def test_tests_that_are_none_are_an_error_and_no_reward(tests):
    with pytest.raises(ValueError, match="'e' has"):
        expression_tests.score(ExpressionTests(), "x", example(tests=tests))
