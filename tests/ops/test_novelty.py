"""Novelty on the device: n-grams against a plain count, nearest neighbors by hand, and the history as a ring."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from narrow_inputs import check_widens

from jrl.ops import novelty
from jrl.ops.novelty import History


def embed(rows, width=4096, max_order=2, mask=None):
    tokens = jnp.array(rows, jnp.int32)
    mask = jnp.ones(tokens.shape, bool) if mask is None else jnp.array(mask)
    run = jax.jit(lambda t, m: novelty.ngram_embedding(t, m, max_order=max_order, width=width))
    return np.asarray(run(tokens, mask))


def test_the_cosine_of_embeddings_is_that_of_counts():
    # a b a has a twice, b, ab, ba: norm sqrt(7). a b b: a, b twice, ab, bb: sqrt(7). 2 * 1 + 1 * 2 + 1 * 1 = 5: 5 / 7.
    found = embed([[1, 2, 1], [1, 2, 2], [1, 2, 1], [3, 4, 3]])
    expected = [[1, 5 / 7, 1, 0], [5 / 7, 1, 5 / 7, 0], [1, 5 / 7, 1, 0], [0, 0, 0, 1]]
    np.testing.assert_allclose(found @ found.T, expected, atol=1e-6)


def test_masked_tokens_are_none_and_no_ngram_spans_them():
    mask = [[True, True, False], [True, False, True], [True, False, True], [False] * 3]
    found = embed([[1, 2, 9], [1, 9, 2], [1, 8, 2], [1, 2, 3]], mask=mask)
    # The first has a, b and ab, the second a and b: 2 / (sqrt(3) sqrt(2)).
    expected = [[1, 0.81650, 0.81650, 0], [0.81650, 1, 1, 0], [0.81650, 1, 1, 0], [0] * 4]
    np.testing.assert_allclose(found @ found.T, expected, atol=1e-5)


def test_ngrams_are_hashed_as_in_whole_numbers():
    """The formula of the docstring in Python's integers, n-gram by n-gram."""
    rng = np.random.default_rng(1)
    tokens, mask = rng.integers(0, 50_000, (6, 9)), rng.random((6, 9)) < 0.8
    tokens[0, 0], mask[5] = 0, [True] + [False] * 8
    expected = np.zeros((6, 16))
    for row in range(6):
        for start in range(9):
            hashed = 0
            for order in range(1, min(3, 9 - start) + 1):
                if not mask[row, start : start + order].all():
                    break
                hashed = (31 * hashed + int(tokens[row, start + order - 1]) + 1) * 2654435761 % 2**32
                bucket = (hashed + order) % 2**32 // 2**7 % 16
                expected[row, bucket] += -1 if hashed // 2**6 % 2 else 1
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    found = embed(tokens, width=16, max_order=3, mask=mask)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert sorted(abs(found[5])) == [0] * 15 + [1]  # one token


def test_few_numbers_stand_for_many_ngrams():
    rng = np.random.default_rng(0)
    found = embed(rng.integers(0, 50_000, (16, 40)), width=64, max_order=3)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    assert (found != 0).mean() > 0.5  # the hash fills all of them
    # Of 300 n-grams in 64 numbers, texts that share none have a cosine of 0 +- 1 / 8, and not near 1.
    long = embed(rng.integers(0, 50_000, (16, 100)), width=64, max_order=3)
    assert abs(np.mean((long @ long.T)[~np.eye(16, dtype=bool)])) < 0.05


def test_the_nearest_of_the_history_by_hand():
    # cosines 1, 0.6 and 0 to a history of three of four places: the nearest two have the mean 0.8.
    known = History(jnp.array([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [9.0, 9.0]]), jnp.int32(3))
    y = jnp.array([[1.0, 0.0]])
    near = jax.jit(novelty.nearest_cosine, static_argnames="neighbors")
    for neighbors, expected in ((1, 1.0), (2, 0.8), (3, 1.6 / 3), (9, 1.6 / 3)):
        np.testing.assert_allclose(near(y, known, neighbors=neighbors), [expected], rtol=1e-6)
    np.testing.assert_array_equal(near(y, novelty.no_history(4, 2), neighbors=2), [0])
    # R_target 0.8, cosine 0.6, c = 0.5
    found = novelty.novelty_reward(jnp.array([0.8]), jnp.array([0.6]), coefficient=0.5)
    np.testing.assert_allclose(found, [0.5], rtol=1e-6)
    check_widens(lambda r, s: novelty.novelty_reward(r, s, coefficient=0.5), jnp.array([0.8, 0.3]), jnp.array([0.6, 0]))


def added(history, rows, counts=None, order=None):
    """Returns the history with rows [x, 0] added, as samples of two prompts in turn, in any order."""
    count = len(rows)
    order = np.arange(count) if order is None else order
    counts = np.ones(count, bool) if counts is None else np.array(counts)
    embedding = np.stack([np.array(rows, np.float32), np.zeros(count, np.float32)], axis=1)
    group, sample = np.arange(count) // 2, np.arange(count) % 2
    run = jax.jit(lambda *x: novelty.add_to_history(*x, num_groups=-(-count // 2)))
    return run(
        history, *(jnp.asarray(x[order]) for x in (embedding, counts, group.astype(np.int32), sample.astype(np.int32)))
    )


def test_the_history_is_a_ring_in_the_order_of_prompts_and_samples():
    first = added(novelty.no_history(3, 2), [1, 2])
    np.testing.assert_array_equal(first.embeddings[:, 0], [1, 2, 0])
    assert int(first.count) == 2  # the third place is empty
    second = added(first, [3, 99, 4], counts=[True, False, True])
    np.testing.assert_array_equal(second.embeddings[:, 0], [4, 2, 3])
    assert int(second.count) == 4
    for order in ([2, 0, 1], [1, 2, 0]):
        again = added(first, [3, 99, 4], counts=[True, False, True], order=np.array(order))
        np.testing.assert_array_equal(again.embeddings, second.embeddings)


def test_of_more_rows_than_it_holds_the_last_stay_and_nan_does_not_enter():
    found = added(novelty.no_history(3, 2), [1, 2, 3, 4, np.nan], counts=[True] * 4 + [False])
    np.testing.assert_array_equal(found.embeddings[:, 0], [4, 2, 3])
    for _ in range(20):
        found = added(found, [5, 6])
    np.testing.assert_array_equal(sorted(np.asarray(found.embeddings[:, 0])), [5, 6, 6])
    assert 3 <= int(found.count) <= 6
