from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import reduce, rejection_sampling

NAN = float("nan")


def run(fn, reward, group, sample, valid, *answers, **limits):
    """Returns a function's weights; `sample` None: rows are samples in their order."""
    group, count = np.asarray(group), len(reward)
    sample = [list(group[:i]).count(group[i]) for i in range(count)] if sample is None else sample
    valid = jnp.ones(count, bool) if valid is None else jnp.array(valid)
    fn = jax.jit(functools.partial(fn, num_groups=3, **limits))
    rows = jnp.asarray(reward, jnp.float32), jnp.asarray(group, jnp.int32), jnp.asarray(sample, jnp.int32), valid
    return fn(*rows, *answers)


def best(reward, group, sample=None, valid=None):
    return run(rejection_sampling.best_of_group, reward, group, sample, valid)


def above(reward, group, sample=None, threshold=0.5, max_kept=2, valid=None, tokens=None, action_mask=None):
    """`tokens` None: every answer is a token of its own."""
    tokens = jnp.arange(len(reward), dtype=jnp.int32)[:, None] if tokens is None else jnp.array(tokens, jnp.int32)
    action_mask = jnp.ones(tokens.shape, bool) if action_mask is None else jnp.array(action_mask, bool)
    limits = {"threshold": threshold, "max_kept": max_kept}
    return run(rejection_sampling.above_threshold, reward, group, sample, valid, tokens, action_mask, **limits)


def test_best_of_group_by_hand():
    # R = [0.2, 0.9] -> the second. Group 1: two tie for the best, of which the earlier sample. Group 2: all equal.
    got = best([0.2, 0.9, 1, 0, 1, 3, 3], [0, 0, 1, 1, 1, 2, 2])
    np.testing.assert_array_equal(got, [0, 1, 1, 0, 0, 0, 0])
    got = best([0.2, 0.9, 1, 0, 1, 3, 3], [0, 0, 1, 1, 1, 2, 2], sample=[0, 1, 2, 1, 0, 0, 1])
    np.testing.assert_array_equal(got, [0, 1, 0, 0, 1, 0, 0])


def test_the_loss_is_the_mean_over_the_tokens_of_the_best_row():
    # log-probs sum to -5 over 5 tokens and to -8 over 4: 8 / 4 = 2
    weights = best([0.2, 0.9], [0, 0])
    mask = jnp.arange(5)[None, :] < jnp.array([5, 4])[:, None]
    logprobs = jnp.where(mask, jnp.array([[-1.0], [-2.0]]), NAN)
    loss = -weights[:, None] * reduce.masked(logprobs, mask)
    np.testing.assert_allclose(reduce.token_mean(loss, mask & (weights > 0)[:, None]), 2.0, rtol=1e-6)


@pytest.mark.parametrize("reward", [[0.2, 0.9], [1, 1, 0], [1, 1, 1, 1, 1, 1, 1, 0]])
def test_the_loss_is_as_large_however_many_rows_tie(reward):
    # log-probs of -2, 4 tokens a row: 2 for one best row and for seven
    weights = best(reward, [0] * len(reward))
    kept = jnp.broadcast_to((weights > 0)[:, None], (len(reward), 4))
    np.testing.assert_allclose(reduce.token_mean(jnp.where(kept, 2.0 * weights[:, None], 0), kept), 2.0, rtol=1e-6)


def test_rows_that_do_not_count_are_neither_best_nor_compared_with():
    # the NaN and the 9 are not valid; of group 1 one row is left
    got = best([NAN, 0, 1, 9, 1, 9], [0, 0, 0, 0, 1, 1], valid=[False, True, True, False, True, False])
    np.testing.assert_array_equal(got, [0, 0, 1, 0, 0, 0])


def test_negative_rewards_have_a_best_too():
    np.testing.assert_array_equal(best([-2.0, -1.0, NAN], [0, 0, 0], valid=[True, True, False]), [0, 1, 0])


def test_above_threshold_by_hand():
    # Group 0: one of two, on the threshold itself. Group 1: three, of which two are kept. Group 2: none.
    rows = [0.5, 0.4, 1, 1, 0.7, 0, 0], [0, 0, 1, 1, 1, 2, 2]
    np.testing.assert_array_equal(above(*rows), [1, 0, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(above(*rows, sample=[1, 0, 2, 1, 0, 1, 0]), [1, 0, 0, 1, 1, 0, 0])
    np.testing.assert_array_equal(above(*rows, max_kept=9), [1, 0, 1, 1, 1, 0, 0])


def test_identical_answers_are_imitated_once():
    # Group 0 has 7 8 twice, then 7 9 twice: the third row is its second answer. Group 1 has 7 8 too.
    reward, group = [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]
    tokens = [[7, 8], [7, 8], [7, 9], [7, 9], [7, 8]]
    np.testing.assert_array_equal(above(reward, group, tokens=tokens), [1, 0, 1, 0, 1])
    np.testing.assert_array_equal(above(reward, group, tokens=tokens, sample=[1, 0, 3, 2, 0]), [0, 1, 0, 1, 1])
    np.testing.assert_array_equal(above(reward, group, tokens=tokens, max_kept=1), [1, 0, 0, 0, 1])
    # the first 7 8 is wrong, and the second one is not its duplicate
    np.testing.assert_array_equal(above([0, 1, 1, 1, 1], group, tokens=tokens), [0, 1, 1, 0, 1])


def test_answers_are_compared_up_to_their_last_sampled_token():
    # 7 and 7 with something after it are one answer; the same token at another place is another
    tokens = [[7, 1], [7, 2], [1, 7]]
    mask = [[True, False], [True, False], [False, True]]
    np.testing.assert_array_equal(above([1, 1, 1], [0, 0, 0], tokens=tokens, action_mask=mask), [1, 0, 1])
    # token 0, and no token
    one = [[True, True], [True, False]]
    np.testing.assert_array_equal(above([1, 1], [0, 0], tokens=[[7, 0], [7, 0]], action_mask=one), [1, 1])
    # 1 7, of which a branch sampled 7 alone; 2 7, of which it did too; 1 7 as the first sample
    branches = [[False, True], [False, True], [True, True]]
    found = above([1, 1, 1], [0, 0, 0], tokens=[[1, 7], [2, 7], [1, 7]], action_mask=branches)
    np.testing.assert_array_equal(found, [1, 1, 0])


def test_a_row_without_a_verdict_is_not_imitated():
    np.testing.assert_array_equal(above([NAN, 1, 1], [0, 0, 0], valid=[False, False, True]), [0, 0, 1])
    np.testing.assert_array_equal(above([NAN, 1], [0, 0], threshold=-1.0, valid=[False, True]), [0, 1])


@pytest.mark.parametrize("fn", [best, above])
def test_row_order_does_not_matter(fn):
    rng = np.random.default_rng(0)
    reward, group = rng.integers(0, 3, 12) / 2, rng.integers(0, 3, 12)
    order, sample = rng.permutation(12), rng.permutation(12)
    expected = fn(reward, group, sample)[order]
    np.testing.assert_array_equal(fn(reward[order], group[order], sample[order]), expected)
