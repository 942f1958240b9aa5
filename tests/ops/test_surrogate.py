from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jrl.ops import surrogate

NAN = float("nan")

OLD = jnp.array([-1.0, -2.0, -0.5, -3.0])
ALL = jnp.ones(4, bool)

CLIP = functools.partial(surrogate.clipped, clip_low=0.2, clip_high=0.28)
DUAL = functools.partial(surrogate.dual_clipped, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
CAPPED = functools.partial(surrogate.capped, clip_low=0.2, clip_high=0.28, delta=4.0)
CISPO = functools.partial(surrogate.cispo, max_weight=5.0)
GRADIENT = lambda logprobs, old, advantages, mask: surrogate.policy_gradient(logprobs, advantages, mask)

LOSSES = {"L1": GRADIENT, "L2": CLIP, "L3": DUAL, "L4": CAPPED, "L8": CISPO}


def at(ratio: list[float]) -> jax.Array:
    """Returns log-probs whose ratio to OLD is the one given."""
    return OLD[: len(ratio)] + jnp.log(jnp.array(ratio))


def value_and_gradient(loss, ratio, advantages):
    """Returns per-token values and d loss_t / d logprobs_t, under jit."""
    n = len(ratio)
    fn = jax.jit(lambda lp: loss(lp, OLD[:n], jnp.array(advantages), ALL[:n]))
    return fn(at(ratio)), jax.grad(lambda lp: fn(lp).sum())(at(ratio))


def test_policy_gradient_by_hand():
    # A = 0.5, logprob = -2: -0.5 * -2 = 1, gradient -0.5
    loss = lambda lp: surrogate.policy_gradient(lp, jnp.array([0.5]), ALL[:1])
    assert jax.jit(loss)(jnp.array([-2.0])) == 1.0
    assert jax.grad(lambda lp: loss(lp).sum())(jnp.array([-2.0])) == -0.5


def test_clipped_by_hand():
    # A = 1: rho 1.5 above 1.28: -1.28, no gradient; rho 1.25 below 1.28: -1.25, gradient -rho * A = -1.25
    # A = -1: rho 0.5 below 0.8: max(0.5, 0.8) = 0.8, no gradient; rho 1.5: max(1.5, 1.28) = 1.5, gradient 1.5
    value, gradient = value_and_gradient(CLIP, [1.5, 1.25, 0.5, 1.5], [1.0, 1.0, -1.0, -1.0])
    np.testing.assert_allclose(value, [-1.28, -1.25, 0.8, 1.5], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0, -1.25, 0, 1.5], rtol=1e-6)


def test_the_clip_leaves_the_pessimistic_side_alone():
    # A = 1, rho 0.5: min(0.5, 0.8) = 0.5 with its gradient; A scales both: A = -2, rho 2: 4
    value, gradient = value_and_gradient(CLIP, [0.5, 2.0], [1.0, -2.0])
    np.testing.assert_allclose(value, [-0.5, 4.0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-0.5, 4.0], rtol=1e-6)


def test_the_lower_and_upper_bounds_are_their_own():
    low = functools.partial(surrogate.clipped, clip_low=0.5, clip_high=0.1)
    # A = 1, rho 1.2 > 1.1: -1.1; A = -1, rho 0.6 > 0.5: 0.6; A = -1, rho 0.4: 0.5
    value, _ = value_and_gradient(low, [1.2, 0.6, 0.4], [1.0, -1.0, -1.0])
    np.testing.assert_allclose(value, [-1.1, 0.6, 0.5], rtol=1e-6)


def test_clipped_equals_the_minimum_of_the_paper():
    with jax.enable_x64(True):
        new, advantages = jax.random.normal(jax.random.key(0), (2, 200), jnp.float64)
        old, mask = new + 0.5 * jax.random.normal(jax.random.key(1), (200,), jnp.float64), jnp.ones(200, bool)
        rho = jnp.exp(new - old)
        expected = -jnp.minimum(rho * advantages, jnp.clip(rho, 0.8, 1.28) * advantages)
        np.testing.assert_allclose(CLIP(new, old, advantages, mask), expected, rtol=1e-12)


def test_a_ratio_exactly_on_its_bound_keeps_its_whole_gradient():
    # With clip_high = 0 and equal log-probs rho is exactly 1, which is the bound on both sides.
    loss = functools.partial(surrogate.clipped, clip_low=0.0, clip_high=0.0)
    gradient = jax.grad(lambda lp: loss(lp, OLD, jnp.array([1.0, -1.0, 2.0, 0.0]), ALL).sum())(OLD)
    np.testing.assert_array_equal(gradient, [-1, 1, -2, 0])


def test_at_equal_logprobs_every_ratio_loss_has_the_policy_gradient():
    advantages = jnp.array([0.5, -1.0, 2.0, 0.0])
    expected = jax.grad(lambda lp: surrogate.policy_gradient(lp, advantages, ALL).sum())(OLD)
    for loss in (CLIP, DUAL, CAPPED, CISPO):
        np.testing.assert_allclose(jax.grad(lambda lp: loss(lp, OLD, advantages, ALL).sum())(OLD), expected)  # noqa: B023


def test_dual_clip_by_hand():
    # A = -1, rho = 5: min(max(5, 1.28), 3) = 3, no gradient; rho = 2: 2, gradient 2; A = 1, rho = 5: -1.28
    value, gradient = value_and_gradient(DUAL, [5.0, 2.0, 5.0], [-1.0, -1.0, 1.0])
    np.testing.assert_allclose(value, [3, 2, -1.28], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0, 2, 0], rtol=1e-6)


def test_delta_by_hand():
    # A = -1, rho = 5, delta = 4: max(min(5, 4), 1.28) = 4, no gradient; rho = 3.5: 3.5; rho 0.5: 0.8; A = 1: -1.28
    value, gradient = value_and_gradient(CAPPED, [5.0, 3.5, 0.5, 5.0], [-1.0, -1.0, -1.0, 1.0])
    np.testing.assert_allclose(value, [4, 3.5, 0.8, -1.28], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0, 3.5, 0, 0], rtol=1e-6)


def test_delta_equals_dual_clip_at_the_same_bound():
    with jax.enable_x64(True):
        new, old, advantages = jax.random.normal(jax.random.key(2), (3, 100), jnp.float64)
        mask = jnp.ones(100, bool)
        dual = surrogate.dual_clipped(new, old, advantages, mask, clip_low=0.2, clip_high=0.2, dual_clip=2.0)
        delta = surrogate.capped(new, old, advantages, mask, clip_low=0.2, clip_high=0.2, delta=2.0)
        np.testing.assert_allclose(delta, dual, rtol=1e-12)


def test_a_dual_clip_out_of_reach_equals_the_clip():
    new = at([5.0, 0.5, 1.1, 3.0])
    advantages = jnp.array([-1.0, -1.0, 1.0, -2.0])
    loose = surrogate.dual_clipped(new, OLD, advantages, ALL, clip_low=0.2, clip_high=0.28, dual_clip=1e6)
    np.testing.assert_array_equal(loose, CLIP(new, OLD, advantages, ALL))


def test_cispo_by_hand():
    # rho = 6, cap 5, A = 1, logprob = -2: -5 * 1 * -2 = 10, gradient -5; rho = 0.5: no lower clip, gradient -0.5
    new, old = jnp.array([-2.0, -2.0]), jnp.array([-2.0 - np.log(6), -2.0 - np.log(0.5)], jnp.float32)
    loss = jax.jit(lambda lp: CISPO(lp, old, jnp.array([1.0, 1.0]), ALL[:2]))
    np.testing.assert_allclose(loss(new), [10, 1], rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda lp: loss(lp).sum())(new), [-5, -0.5], rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "L8"])  # L8 holds its weight fixed
def test_gradient_matches_finite_differences(name):
    with jax.enable_x64(True):
        # away from the kinks at 0.8, 1.28, 3 and 4
        new = OLD.astype(jnp.float64) + jnp.log(jnp.array([1.1, 0.5, 2.0, 6.0]))
        advantages = jnp.array([1.5, -1.0, -0.5, -2.0])
        loss = lambda lp: LOSSES[name](lp, OLD, advantages, ALL)
        check_grads(loss, (new,), order=1, modes=["rev"], atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_masked_tokens_give_no_loss_and_no_gradient(name):
    mask = jnp.array([True, False, False, False])
    new, old = at([1.1, 1.1, 1.1, 1.1]).at[1].set(NAN), OLD.at[2].set(NAN)
    advantages = jnp.array([1.0, 1.0, 1.0, NAN])
    fn = jax.jit(lambda lp: LOSSES[name](lp, old, advantages, mask))
    value, gradient = fn(new), jax.grad(lambda lp: fn(lp).sum())(new)
    assert value[0] != 0
    assert gradient[0] != 0
    np.testing.assert_array_equal(value[1:], 0)
    np.testing.assert_array_equal(gradient[1:], 0)


@pytest.mark.parametrize("name", LOSSES)
def test_a_zero_advantage_gives_a_zero_gradient(name):
    fn = lambda lp: LOSSES[name](lp, OLD, jnp.zeros(4), ALL).sum()
    np.testing.assert_array_equal(jax.grad(fn)(at([0.5, 1.0, 1.5, 9.0])), 0)


@pytest.mark.parametrize("name", LOSSES)
def test_old_logprobs_and_advantages_carry_no_gradient(name):
    fn = lambda old, advantages: LOSSES[name](at([1.1, 0.9, 1.0, 0.5]), old, advantages, ALL).sum()
    for gradient in jax.grad(fn, argnums=(0, 1))(OLD, jnp.array([1.0, -1.0, 1.0, 1.0])):
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("name", LOSSES)
def test_a_ratio_beyond_float32_stays_finite(name):
    new, old = jnp.array([0.0, -500.0]), jnp.array([-500.0, 0.0])
    fn = lambda lp: LOSSES[name](lp, old, jnp.array([-1.0, -1.0]), ALL[:2])
    assert jnp.all(jnp.isfinite(fn(new)))
    assert jnp.all(jnp.isfinite(jax.grad(lambda lp: fn(lp).sum())(new)))


def test_clip_indicators_by_hand():
    # rho = [1.3, 0.7, 1.3, 0.7], A = [1, 1, -1, -1], bounds 0.2: only the first binds above, only the last below
    new, advantages = at([1.3, 0.7, 1.3, 0.7]), jnp.array([1.0, 1.0, -1.0, -1.0])
    high = surrogate.clipped_high(new, OLD, advantages, ALL, clip_high=0.2)
    low = surrogate.clipped_low(new, OLD, advantages, ALL, clip_low=0.2)
    np.testing.assert_array_equal(high, [True, False, False, False])
    np.testing.assert_array_equal(low, [False, False, False, True])
    assert not jnp.any(surrogate.clipped_high(new, OLD, advantages, ~ALL, clip_high=0.2))
    assert not jnp.any(surrogate.clipped_low(new, OLD, advantages, ~ALL, clip_low=0.2))
