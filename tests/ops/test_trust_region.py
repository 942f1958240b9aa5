from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import trust_region

NAN = float("nan")


def test_dppo_by_hand():
    # p = 0.9 against 0.6: 0.3 > 0.2, so A = 1 is dropped; A = -1 stays: -1.5 * -1 * log 0.9 = -0.158041, gradient 1.5
    # p = 0.3 against 0.6: A = -1 is dropped, A = 1 stays: -0.5 * log 0.3 = 0.601986, gradient -0.5
    behaviour, advantages = jnp.log(jnp.full(4, 0.6)), jnp.array([1.0, -1.0, -1.0, 1.0])
    fn = jax.jit(lambda lp: trust_region.dppo(lp, behaviour, advantages, jnp.ones(4, bool), delta=0.2))
    new = jnp.log(jnp.array([0.9, 0.9, 0.3, 0.3]))
    np.testing.assert_allclose(fn(new), [0, -0.1580408, 0, 0.6019864], rtol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda lp: fn(lp).sum())(new), [0, 1.5, 0, -0.5], rtol=1e-5)


def test_a_rare_token_may_change_its_ratio():
    # 1e-4 to 1e-3: a ratio of 10 and a difference of 0.0009
    inside = trust_region.within_probability(
        jnp.log(jnp.array([1e-3])), jnp.log(jnp.array([1e-4])), jnp.ones(1), jnp.ones(1, bool), delta=0.2
    )
    assert inside[0]


def test_within_probability_is_a_subset_of_the_mask_and_keeps_advantages_of_0():
    new, old = jnp.log(jnp.array([0.9, 0.9, NAN])), jnp.log(jnp.array([0.1, 0.1, NAN]))
    advantages, mask = jnp.array([0.0, 1.0, NAN]), jnp.array([True, True, False])
    got = trust_region.within_probability(new, old, advantages, mask, delta=0.2)
    np.testing.assert_array_equal(got, [True, False, False])


def kept(difference, limit, mask=None):
    behaviour = jnp.full(len(difference), -3.0)
    mask = jnp.ones(len(difference), bool) if mask is None else jnp.array(mask)
    fn = jax.jit(lambda *arrays: trust_region.within_second_moment(*arrays, limit=limit))
    return fn(behaviour + jnp.array(difference), behaviour, mask).tolist()


def test_the_second_moment_by_hand():
    # squares [4, 0.04, 0.01], limit 0.1: without the first the mean is 0.025
    assert kept([2.0, 0.2, -0.1], 0.1) == [False, True, True]
    # their mean with it is 1.35
    assert kept([-2.0, 0.2, -0.1], 1.36) == [True, True, True]
    assert kept([-2.0, 0.2, -0.1], 1.34) == [False, True, True]


def test_all_may_be_dropped_and_equal_squares_are_dropped_together():
    assert kept([2.0, 1.0], 0.1) == [False, False]
    assert kept([1.0, -1.0, 0.0], 0.5) == [False, False, True]  # one of them alone would leave a mean of 0.5
    assert kept([0.0, 0.0], 1e-9) == [True, True]


def test_masked_tokens_are_in_no_mean():
    assert kept([2.0, 0.2, NAN], 0.03, mask=[True, True, False]) == [False, False, False]
    assert kept([2.0, 0.2, NAN], 0.05, mask=[True, True, False]) == [False, True, False]


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_largest_set_of_the_smallest_squares(seed):
    difference = np.random.default_rng(seed).normal(size=9).astype(np.float32)
    squares = np.sort(difference**2)
    means = np.cumsum(squares) / np.arange(1, 10)
    assert sum(kept(difference, 0.3)) == (means <= 0.3).sum()
