from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import groups_of

from jrl.algos import ALGOS
from jrl.algos.contract import Facts
from jrl.algos.self_focus import SELF

OBJECTIVE = ALGOS["SELF"]
FACTS = Facts(samples=2, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=2)


def given():
    """Prompts whose greedy answer is right, wrong, and without a verdict; three rows each, of which the first is it."""
    nan = float("nan")
    rows = groups_of([1, 1, 0, 0, 1, 0, nan, 1, 0], [0, 0, 0, 1, 1, 1, 2, 2, 2], valid=[True] * 6 + [False, True, True])
    return rows.replace(sample=jnp.tile(jnp.arange(3, dtype=jnp.int32), 3))


def test_prompts_that_the_greedy_answer_solves_are_left_out():
    kept = jax.jit(lambda g: OBJECTIVE.keep(SELF(), g))(given())
    np.testing.assert_array_equal(kept, [0, 0, 0, 0, 1, 1, 0, 1, 1])
    assert OBJECTIVE.refill(SELF()) == 10


def test_right_is_judged_before_shaping():
    rows = given().replace(outcome=jnp.array([0.0, 1, 0, 1, 1, 0, jnp.nan, 1, 0]))
    np.testing.assert_array_equal(OBJECTIVE.keep(SELF(), rows), [0, 1, 1, 0, 0, 0, 0, 1, 1])


def test_samples_are_compared_with_one_another_and_not_with_the_greedy_answer():
    # 1 and 0: mean 0.5, deviation sqrt(0.5): +-0.70711, in every group.
    found = OBJECTIVE.advantages(SELF(), given(), given().reward, ())[0][:, 1]
    np.testing.assert_allclose(found, np.array([0, 1, -1] * 3) * np.sqrt(0.5), atol=1e-5)


def test_illegal_values_are_refused():
    with pytest.raises(ValueError, match="SELF compares the samples of a prompt beside its greedy one; got samples=2"):
        OBJECTIVE.check(SELF(), FACTS)
    with pytest.raises(ValueError, match=r"SELF\.max_refills = -1"):
        OBJECTIVE.check(SELF(max_refills=-1), FACTS._replace(samples=4))
    with pytest.raises(
        ValueError, match=r"SELF learns on prompts whose greedy answer .* learn from a held-out verdict"
    ):
        OBJECTIVE.check(SELF(), FACTS._replace(samples=4, held_out_outcome=True))
