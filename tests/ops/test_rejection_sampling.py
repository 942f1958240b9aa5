from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import reduce, rejection_sampling

NAN = float("nan")


def best(reward, group, valid=None):
    valid = jnp.ones(len(reward), bool) if valid is None else jnp.array(valid)
    fn = jax.jit(lambda *arrays: rejection_sampling.best_of_group(*arrays, num_groups=3))
    return fn(jnp.asarray(reward, jnp.float32), jnp.asarray(group, jnp.int32), valid)


def above(reward, group, threshold=0.5, max_kept=2.0, valid=None):
    valid = jnp.ones(len(reward), bool) if valid is None else jnp.array(valid)
    limits = {"threshold": threshold, "max_kept": max_kept}
    fn = jax.jit(lambda *arrays: rejection_sampling.above_threshold(*arrays, num_groups=3, **limits))
    return fn(jnp.asarray(reward, jnp.float32), jnp.asarray(group, jnp.int32), valid)


def test_best_of_group_by_hand():
    # R = [0.2, 0.9] -> the second. Group 1: two tie for the best. Group 2: all equal.
    got = best([0.2, 0.9, 1, 0, 1, 3, 3], [0, 0, 1, 1, 1, 2, 2])
    np.testing.assert_array_equal(got, [0, 1, 0.5, 0, 0.5, 0, 0])


def test_the_loss_is_the_mean_over_the_tokens_of_the_best_row():
    # log-probs sum to -5 over 5 tokens and to -8 over 4: 8 / 4 = 2
    weights = best([0.2, 0.9], [0, 0])
    mask = jnp.arange(5)[None, :] < jnp.array([5, 4])[:, None]
    logprobs = jnp.where(mask, jnp.array([[-1.0], [-2.0]]), NAN)
    loss = -weights[:, None] * reduce.masked(logprobs, mask)
    np.testing.assert_allclose(reduce.token_mean(loss, mask & (weights > 0)[:, None]), 2.0, rtol=1e-6)


def test_rows_that_do_not_count_are_neither_best_nor_compared_with():
    # the NaN and the 9 are not valid; of group 1 one row is left
    got = best([NAN, 0, 1, 9, 1, 9], [0, 0, 0, 0, 1, 1], valid=[False, True, True, False, True, False])
    np.testing.assert_array_equal(got, [0, 0, 1, 0, 0, 0])


def test_negative_rewards_have_a_best_too():
    np.testing.assert_array_equal(best([-2.0, -1.0, NAN], [0, 0, 0], valid=[True, True, False]), [0, 1, 0])


def test_above_threshold_by_hand():
    # Group 0: one of two, on the threshold itself. Group 1: three for a weight of 2. Group 2: none.
    got = above([0.5, 0.4, 1, 1, 0.7, 0, 0], [0, 0, 1, 1, 1, 2, 2])
    np.testing.assert_allclose(got, [1, 0, 2 / 3, 2 / 3, 2 / 3, 0, 0], rtol=1e-6)


def test_a_row_without_a_verdict_is_not_imitated():
    np.testing.assert_array_equal(above([NAN, 1, 1], [0, 0, 0], valid=[False, False, True]), [0, 0, 1])
    # A masked reward is 0 inside: a threshold below 0 must not let it in.
    np.testing.assert_array_equal(above([NAN, 1], [0, 0], threshold=-1.0, valid=[False, True]), [0, 1])


@pytest.mark.parametrize("fn", [best, above])
def test_row_order_does_not_matter(fn):
    rng = np.random.default_rng(0)
    reward, group = rng.integers(0, 3, 12) / 2, rng.integers(0, 3, 12)
    order = rng.permutation(12)
    np.testing.assert_array_equal(fn(reward[order], group[order]), fn(reward, group)[order])
