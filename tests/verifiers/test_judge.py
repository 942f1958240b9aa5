import json
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from verifier_fakes import example

from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers import as_verifier
from jrl.tasks.verifiers.contract import Limits, Verifier
from jrl.tasks.verifiers.judge import judge, to_verdict
from jrl.tasks.verifiers.source import PART_MODULE


@pytest.mark.parametrize(
    ("returned", "status", "reward"),
    [
        (1, Status.CORRECT, 1.0),
        (0.25, Status.CORRECT, 0.25),
        (0.0, Status.WRONG, 0.0),
        (-1.5, Status.WRONG, -1.5),
        (Fraction(1, 2), Status.CORRECT, 0.5),
        (np.float32(0.5), Status.CORRECT, 0.5),
        (np.int64(2), Status.CORRECT, 2.0),
        (True, Status.CORRECT, 1.0),
        (False, Status.WRONG, 0.0),
        (np.bool_(True), Status.CORRECT, 1.0),
        (np.bool_(False), Status.WRONG, 0.0),
        (Verdict(Status.WRONG, True), Status.WRONG, 1.0),
        (Verdict(Status.WRONG, 0.5), Status.WRONG, 0.5),
        (Verdict(Status.FORBIDDEN, 3.0), Status.FORBIDDEN, None),
    ],
)
def test_a_number_or_bool_is_correct_where_it_is_positive(returned, status, reward):
    verdict = to_verdict(returned, Limits(), 10)
    assert (verdict.status, verdict.reward) == (status, reward)
    assert verdict.reward is None or type(verdict.reward) is float


NO_NUMBERS = (
    float("nan"), float("inf"), -float("inf"), np.float32("nan"), None, "1.0", b"1", 1 + 0j, [1.0], np.ones(1),
    Decimal(1), 10**400, 1e300, object(), np.float16("inf"), np.complex64(1), {}, {"reward": 1.0}, "", set(), range(2),
    len, int, np.zeros(0), "nan",
)  # fmt: skip


@pytest.mark.parametrize("returned", [
    *NO_NUMBERS, Verdict(Status.CORRECT, None), Verdict(Status.CORRECT, float("nan")),
    Verdict(Status.INFRA_ERROR, None), Verdict(Status.CPU_LIMIT, None), Verdict(17, 1.0),
])  # fmt: skip
def test_what_is_no_finite_number_is_the_verifiers_error_and_no_reward(returned):
    verdict = to_verdict(returned, Limits(), 10)
    assert verdict.status is Status.VERIFIER_ERROR
    assert verdict.reward is None
    assert verdict.detail


RANGES = ((-1e6, 1e6), (0, 1), (-1, 1), (0, 1e6), (1, 1), (-0.5, 0.5))
WAYS = (
    lambda x: x, lambda x: Verdict(Status.CORRECT, x), lambda x: Verdict(Status.WRONG, x),
    lambda x: Verdict(Status.UNPARSABLE, x), lambda x: (x,), lambda x: [x, 1.0], lambda x: {"reward": x},
)  # fmt: skip


def test_no_way_to_return_what_is_no_number_is_a_reward(trials):
    returned = [way(x) for way in WAYS for x in NO_NUMBERS]
    trials(len(RANGES) * len(returned))
    for bounds in RANGES:
        for value in returned:
            verifier = Verifier(object, lambda *_, value=value: value, reward_range=bounds, rewards_spans=True)
            verdict = judge(verifier, None, "x", example())
            assert (verdict.status, verdict.reward) == (Status.VERIFIER_ERROR, None), (bounds, value)


@pytest.mark.parametrize(
    ("returned", "taken"),
    [(0.0, True), (1.0, True), (1.0000001, False), (-1e-9, False), (Verdict(Status.WRONG, 2.0), False), (True, True)],
)
def test_a_reward_outside_the_declared_range_is_the_verifiers_error(returned, taken):
    verifier = Verifier(as_verifier("x", lambda c, e: 0).config, lambda *_: returned, reward_range=(0, 1))
    verdict = judge(verifier, None, "x", example())
    assert (verdict.status is not Status.VERIFIER_ERROR) == taken
    assert taken or "not in [0, 1]" in verdict.detail


@pytest.mark.parametrize("reward", [1e7, -1e7, 1e29, 1.001e6])
def test_no_reward_is_larger_than_a_million(reward):
    assert to_verdict(reward, Limits(), 10).status is Status.VERIFIER_ERROR
    assert to_verdict(math.copysign(1e6, reward), Limits(), 10).reward == math.copysign(1e6, reward)


@pytest.mark.parametrize(
    "bounds",
    [(1, 0), (0, 2e6), (-2e6, 0), (float("nan"), 1), (0, float("inf")), (0, 10**400), 1.0, None, (0, "a"), (0, 1, 2)],
)
def test_a_range_that_holds_no_reward_is_refused(bounds):
    with pytest.raises(ValueError, match="reward_range is"):
        Verifier(object, lambda *_: 1.0, reward_range=bounds)
    with pytest.raises(ValueError, match="reward_range is"):
        Verifier(object, lambda *_: 1.0, reward_range=lambda config: bounds).limits(None)


@pytest.mark.parametrize("error", [RuntimeError("boo"), KeyboardInterrupt(), SystemExit(0), RecursionError()])
def test_whatever_a_verifier_raises_is_its_error(error):
    def raises(completion, example):
        raise error

    verifier = as_verifier("raises", raises)
    verdict = judge(verifier, verifier.config(), "x", example())
    assert verdict.status is Status.VERIFIER_ERROR
    assert type(error).__name__ in verdict.detail
    assert "test_judge.py" in verdict.detail


def test_an_error_that_cannot_be_printed_is_still_one_verdict():
    class Nasty(Exception):
        def __str__(self):
            raise ValueError

    def raises(completion, example):
        raise Nasty

    verifier = as_verifier("raises", raises)
    assert judge(verifier, verifier.config(), "x", example()).status is Status.VERIFIER_ERROR


def test_an_error_deep_in_a_library_is_reported_with_the_line_of_the_user_s_own_file():
    part = {"__name__": f"{PART_MODULE}0", "json": json}
    exec(compile("def nested(completion, example):\n    return json.loads(completion)", "mine.py", "exec"), part)
    detail = judge(
        as_verifier("nested", part["nested"]), as_verifier("nested", part["nested"]).config(), "[", example()
    ).detail
    assert "mine.py:2 in nested; " in detail and "in raw_decode" in detail
