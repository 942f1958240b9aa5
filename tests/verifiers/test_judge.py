from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from verifier_fakes import example

from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers import as_verifier
from jrl.tasks.verifiers.judge import judge, to_verdict


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
    verdict = to_verdict(returned)
    assert (verdict.status, verdict.reward) == (status, reward)
    assert verdict.reward is None or type(verdict.reward) is float


@pytest.mark.parametrize(
    "returned",
    [
        float("nan"), float("inf"), -float("inf"), np.float32("nan"), None, "1.0", b"1", 1 + 0j,
        [1.0], np.ones(1), Decimal(1), 10**400, 1e300, object(),
        Verdict(Status.CORRECT, None), Verdict(Status.CORRECT, float("nan")),
        Verdict(Status.INFRA_ERROR, None), Verdict(Status.CPU_LIMIT, None), Verdict(17, 1.0),
    ],
)  # fmt: skip
def test_what_is_no_finite_number_is_the_verifiers_error_and_no_reward(returned):
    verdict = to_verdict(returned)
    assert verdict.status is Status.VERIFIER_ERROR
    assert verdict.reward is None
    assert verdict.detail


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
