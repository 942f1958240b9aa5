from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.algos.contract import Facts, Groups, Tokens
from jrl.algos.dr_grpo import DrGRPO

OBJECTIVE = ALGOS["DrGRPO"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)


def test_rewards_are_centred_and_not_divided():
    # [4, 0, 0, 0] - 1, and a second group of [1, 1] -> 0
    reward = jnp.array([4.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    groups = Groups(
        reward=reward,
        outcome=reward,
        valid=jnp.ones(6, bool),
        group=jnp.array([0, 0, 0, 0, 1, 1], jnp.int32),
        action_mask=jnp.ones((6, 1), bool),
        finish=jnp.zeros(6, jnp.int8),
        num_groups=2,
        max_completion=1,
    )
    fn = jax.jit(lambda config, g: OBJECTIVE.advantages(config, g, OBJECTIVE.shape(config, g), ()))
    got, _, counters = fn(DrGRPO(), groups)
    np.testing.assert_allclose(got[:, 0], [3, -1, -1, -1, 0, 0], rtol=1e-6)
    assert counters["zero_variance_groups"] == 1


def test_the_denominator_is_the_configured_constant():
    # two rows of at most 3 tokens, one of them all masked: 2 * 3, whatever the width of the arrays
    mask = jnp.array([[True, False, False, False], [False] * 4])
    np.testing.assert_array_equal(OBJECTIVE.weights(DrGRPO(), mask, 3), mask)
    assert OBJECTIVE.denominator(DrGRPO(), mask, 2, 3) == 6
    assert jax.jit(lambda rows: OBJECTIVE.denominator(DrGRPO(), mask, rows, 3))(jnp.int32(2)) == 6


def test_the_loss_is_the_clip_by_hand():
    # rho 1.5, A 1: -1.2; rho 0.5, A -2: 1.6; dual clip 2 at rho 5, A -1: 2
    new = jnp.log(jnp.array([1.5, 0.5, 5.0]))
    tokens = Tokens(
        logprobs=new,
        old_logprobs=jnp.zeros(3),
        behaviour_logprobs=jnp.zeros(3),
        ref_logprobs=None,
        entropy=jnp.ones(3),
        advantages=jnp.array([1.0, -2.0, -1.0]),
        mask=jnp.ones(3, bool),
        segment=jnp.zeros(3, jnp.int32),
        num_segments=1,
    )
    loss, _ = jax.jit(OBJECTIVE.token_loss)(DrGRPO(dual_clip=2.0), tokens, ())
    np.testing.assert_allclose(loss, [-1.2, 1.6, 2.0], rtol=1e-6)
    with_bonus, _ = OBJECTIVE.token_loss(DrGRPO(dual_clip=2.0, entropy_bonus=0.1), tokens, ())
    np.testing.assert_allclose(with_bonus - loss, -0.1, rtol=1e-5)


def test_it_needs_no_reference_and_no_refill():
    assert not OBJECTIVE.needs(DrGRPO()).reference
    assert OBJECTIVE.refill(DrGRPO()) is None


@pytest.mark.parametrize(
    "config, facts, message",
    [
        (DrGRPO(), FACTS._replace(samples=1), "DrGRPO compares the samples of one prompt"),
        (DrGRPO(clip_low=1.5), FACTS, r"DrGRPO\.clip_low = 1\.5"),
        (DrGRPO(dual_clip=1.0), FACTS, r"DrGRPO\.dual_clip = 1\.0"),
    ],
)
def test_illegal_combinations_are_refused(config, facts, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, facts)
