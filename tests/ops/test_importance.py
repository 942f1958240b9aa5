from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import importance

NAN = float("nan")

# One packed row: sequence 0 is tokens 0-1, sequence 1 tokens 2-4, then padding.
SEGMENT = jnp.array([0, 0, 1, 1, 1, 2], jnp.int32)
MASK = jnp.array([True, True, True, False, True, False])
OLD = jnp.array([-1.0, -2.0, -1.0, NAN, -1.2, NAN])
BEHAVIOUR = jnp.array([-1.1, -2.2, -1.0, NAN, -1.0, NAN])

LEVELS = {
    "token": lambda old, behaviour, mask, segment, cap: importance.token_weights(old, behaviour, mask, cap=cap),
    "sequence": lambda *arrays, cap: importance.sequence_weights(*arrays, num_segments=2, cap=cap),
    "geometric": lambda *arrays, cap: importance.geometric_weights(*arrays, num_segments=2, cap=cap),
}


def weights(level, cap=2.0, old=OLD, behaviour=BEHAVIOUR, mask=MASK, segment=SEGMENT):
    return jax.jit(lambda *arrays: LEVELS[level](*arrays, cap=cap))(old, behaviour, mask, segment)


def test_token_weights_by_hand():
    # old -1, behaviour -2: min(exp(1), 2) = 2; old -2, behaviour -1.5: exp(-0.5) = 0.606531
    got = importance.token_weights(jnp.array([-1.0, -2.0]), jnp.array([-2.0, -1.5]), jnp.ones(2, bool), cap=2.0)
    np.testing.assert_allclose(got, [2.0, 0.6065307], rtol=1e-6)
    # the packed row: exp(0.1), exp(0.2), exp(0), masked, exp(-0.2), padding
    np.testing.assert_allclose(weights("token"), np.exp([0.1, 0.2, 0, 0, -0.2, 0]), rtol=1e-6)


def test_sequence_weights_by_hand():
    # sequence 0: exp(0.1 + 0.2); sequence 1: exp(0 - 0.2) over its two counted tokens; masked and padding 1
    expected = np.exp([0.3, 0.3, -0.2, 0, -0.2, 0])
    np.testing.assert_allclose(weights("sequence"), expected, rtol=1e-6)
    np.testing.assert_allclose(weights("sequence", cap=1.2), np.minimum(expected, 1.2), rtol=1e-6)


def test_geometric_weights_by_hand():
    # sequence 0: exp((0.1 + 0.2) / 2); sequence 1: exp((0 - 0.2) / 2)
    np.testing.assert_allclose(weights("geometric"), np.exp([0.15, 0.15, -0.1, 0, -0.1, 0]), rtol=1e-6)


def test_levels_agree_on_sequences_of_one_token():
    old, behaviour = jnp.array([-1.0, -2.0]), jnp.array([-1.3, -1.6])
    arrays = {"old": old, "behaviour": behaviour, "mask": jnp.ones(2, bool), "segment": jnp.arange(2)}
    for level in ("sequence", "geometric"):
        np.testing.assert_allclose(weights(level, **arrays), weights("token", **arrays), rtol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_equal_laws_have_weight_one(level):
    np.testing.assert_array_equal(weights(level, behaviour=OLD), 1)


@pytest.mark.parametrize("level", LEVELS)
def test_weights_carry_no_gradient(level):
    total = lambda old, behaviour: LEVELS[level](old, behaviour, MASK, SEGMENT, cap=2.0).sum()
    for gradient in jax.grad(total, argnums=(0, 1))(OLD, BEHAVIOUR):
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("level", LEVELS)
def test_log_weights_are_clamped(level):
    # 30 nats apart on both tokens of a sequence: exp(20) and exp(-20), not inf and not 0
    old, mask, segment = jnp.array([0.0, 0.0]), jnp.ones(2, bool), jnp.zeros(2, jnp.int32)
    arrays = {"mask": mask, "segment": segment, "cap": 1e30}
    np.testing.assert_allclose(weights(level, old=old, behaviour=old - 30, **arrays), np.exp(20.0), rtol=1e-5)
    np.testing.assert_allclose(weights(level, old=old, behaviour=old + 30, **arrays), np.exp(-20.0), rtol=1e-5)


def test_truncated_weights_are_unbiased_where_the_cap_is_out_of_reach():
    # sum over tokens of behaviour * w * f = sum of old * f, for any f
    with jax.enable_x64(True):
        old, behaviour = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (2, 9), jnp.float64))
        value = jnp.arange(9.0)
        w = importance.token_weights(old, behaviour, jnp.ones(9, bool), cap=1e9)
        np.testing.assert_allclose((jnp.exp(behaviour) * w * value).sum(), (jnp.exp(old) * value).sum(), rtol=1e-12)


def test_rejection_by_hand():
    # w = [0.3, 1, 6], limits [0.5, 5] -> [0, 1, 0]; the limits themselves are accepted, the masked never
    log_w = jnp.log(jnp.array([0.3, 1.0, 6.0]))
    got = jax.jit(importance.accepted)(log_w, jnp.zeros(3), jnp.ones(3, bool), low=0.5, high=5.0)
    np.testing.assert_array_equal(got, [False, True, False])
    one = importance.accepted(jnp.zeros(2), jnp.zeros(2), jnp.array([True, False]), low=1.0, high=1.0)
    np.testing.assert_array_equal(one, [True, False])
    masked = importance.accepted(OLD, BEHAVIOUR, MASK, low=0.0, high=1e9)
    np.testing.assert_array_equal(masked, MASK)


SEQUENCE_MASKS = {
    "sum": importance.accepted_by_sequence,
    "mean": importance.accepted_by_geometric_mean,
    "every": importance.accepted_by_every_token,
}


def sequences_accepted(rule, low, high, old=OLD, behaviour=BEHAVIOUR):
    fn = jax.jit(lambda *arrays: SEQUENCE_MASKS[rule](*arrays, num_segments=2, low=low, high=high))
    return fn(old, behaviour, MASK, SEGMENT)


# Weights of the packed row: sequence 0 exp(0.1) and exp(0.2), sequence 1 exp(0) and exp(-0.2), the rest masked
FIRST, SECOND = [True, True] + [False] * 4, [False, False, True, False, True, False]


def test_sequence_rejection_by_hand():
    # sequence 0: exp(0.3) = 1.35; sequence 1: exp(-0.2) = 0.82
    np.testing.assert_array_equal(sequences_accepted("sum", 0.5, 1.3), SECOND)
    np.testing.assert_array_equal(sequences_accepted("sum", 0.9, 1.4), FIRST)
    np.testing.assert_array_equal(sequences_accepted("sum", 0.0, 1.4), MASK)


def test_geometric_rejection_by_hand():
    # sequence 0: exp(0.15) = 1.162; sequence 1: exp(-0.1) = 0.905
    np.testing.assert_array_equal(sequences_accepted("mean", 0.9, 1.1), SECOND)
    np.testing.assert_array_equal(sequences_accepted("mean", 0.95, 1.2), FIRST)


def test_rejection_by_the_worst_token_by_hand():
    # sequence 0: 1.105 and 1.221; sequence 1: 1 and 0.819
    np.testing.assert_array_equal(sequences_accepted("every", 0.8, 1.2), SECOND)
    np.testing.assert_array_equal(sequences_accepted("every", 0.9, 1.3), FIRST)
    np.testing.assert_array_equal(sequences_accepted("every", 0.8, 1.3), MASK)


@pytest.mark.parametrize("rule", SEQUENCE_MASKS)
def test_an_accepted_sequence_is_inside_both_limits(rule):
    np.testing.assert_array_equal(sequences_accepted(rule, 1.0, 1.0, old=BEHAVIOUR), MASK)
    np.testing.assert_array_equal(sequences_accepted(rule, 1.5, 2.0), False)
    np.testing.assert_array_equal(sequences_accepted(rule, 0.1, 0.2), False)


def test_the_off_policy_sequence_mask_by_hand():
    # mean(behaviour - new): sequence 0: (0.3 + 0.1) / 2 = 0.2; sequence 1: (0.5 - 0.1) / 2 = 0.2
    new = BEHAVIOUR - jnp.array([0.3, 0.1, 0.5, NAN, -0.1, NAN])
    fn = jax.jit(
        lambda new, advantages, delta: importance.near_policy(
            new, BEHAVIOUR, advantages, MASK, SEGMENT, num_segments=2, delta=delta
        )
    )
    failed_first = jnp.array([-1.0, -1.0, 1.0, NAN, 1.0, NAN])
    np.testing.assert_array_equal(fn(new, failed_first, 0.15), SECOND)
    np.testing.assert_array_equal(fn(new, -failed_first, 0.15), FIRST)
    np.testing.assert_array_equal(fn(new, failed_first, 0.25), MASK)
    np.testing.assert_array_equal(fn(new, 0 * failed_first, 0.15), MASK)
    # a policy that does it more often than the sampler did has not left it behind
    np.testing.assert_array_equal(fn(BEHAVIOUR + 0.3, failed_first, 0.15), MASK)
