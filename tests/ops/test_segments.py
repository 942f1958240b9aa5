from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.device.sharding import constrain
from jrl.ops import segments

NAN = float("nan")

# Row 0: two sequences and padding; row 1: one sequence, places 1 and 2 empty. S = 3.
X = jnp.array([[1.0, 2.0, NAN, 4.0, NAN], [5.0, 6.0, 7.0, 8.0, 9.0]])
SEGMENT = jnp.array([[0, 0, 1, 1, 3], [0, 0, 0, 0, 3]], jnp.int32)
MASK = jnp.array([[True, True, False, True, False], [False, True, True, True, True]])


def test_sums_means_and_counts_by_hand():
    # row 0: 1 + 2, then 4 (its NaN is masked); row 1: 6 + 7 + 8 (padding is no sequence's, though unmasked)
    total = jax.jit(segments.segment_sum, static_argnames="num_segments")(X, MASK, SEGMENT, num_segments=3)
    np.testing.assert_array_equal(total, [[3, 4, 0], [21, 0, 0]])
    np.testing.assert_array_equal(segments.segment_count(MASK, SEGMENT, num_segments=3), [[2, 1, 0], [3, 0, 0]])
    np.testing.assert_array_equal(segments.segment_mean(X, MASK, SEGMENT, num_segments=3), [[1.5, 4, 0], [7, 0, 0]])


def test_values_return_to_their_tokens_and_padding_gets_zero():
    value = jnp.array([[10.0, 20.0, NAN], [30.0, NAN, NAN]])
    np.testing.assert_array_equal(segments.to_tokens(value, SEGMENT), [[10, 10, 20, 20, 0], [30, 30, 30, 30, 0]])


def test_one_segment_a_row_equals_the_row_sum():
    x = jax.random.normal(jax.random.key(0), (3, 6))
    mask, segment = jnp.ones((3, 6), bool), jnp.zeros((3, 6), jnp.int32)
    total = segments.segment_sum(x, mask, segment, num_segments=1)
    np.testing.assert_allclose(total[:, 0], x.sum(-1), rtol=1e-6)


def test_packing_two_rows_into_one_keeps_their_sums():
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(1), (2, 4), jnp.float64)
        mask = jax.random.bernoulli(jax.random.key(2), 0.7, (2, 4))
        apart = segments.segment_sum(x, mask, jnp.zeros((2, 4), jnp.int32), num_segments=1)
        together = segments.segment_sum(
            x.reshape(1, 8), mask.reshape(1, 8), jnp.repeat(jnp.arange(2), 4)[None, :], num_segments=2
        )
        np.testing.assert_allclose(together[0], apart[:, 0], rtol=1e-12)


def test_leading_axes_are_free():
    flat = segments.segment_sum(X[0], MASK[0], SEGMENT[0], num_segments=3)
    stacked = segments.segment_sum(X[None], MASK[None], SEGMENT[None], num_segments=3)
    np.testing.assert_array_equal(flat, stacked[0, 0])
    np.testing.assert_array_equal(
        segments.to_tokens(flat, SEGMENT[0]), segments.to_tokens(stacked, SEGMENT[None])[0, 0]
    )


def test_gradient_is_one_on_counted_tokens_and_nan_stays_out():
    def total(x):
        sums = segments.segment_sum(x, MASK, SEGMENT, num_segments=3)
        return (sums * jnp.array([[1.0, 10.0, 100.0]])).sum()

    gradient = jax.jit(jax.grad(total))(X)
    np.testing.assert_array_equal(gradient, [[1, 1, 0, 10, 0], [0, 1, 1, 1, 0]])


def test_gradient_of_broadcast_counts_the_tokens_of_a_sequence():
    gradient = jax.grad(lambda value: segments.to_tokens(value, SEGMENT).sum())(jnp.full((2, 3), NAN))
    np.testing.assert_array_equal(gradient, [[2, 2, 0], [4, 0, 0]])


def test_the_first_tokens_of_each_sequence():
    mask = jnp.array([[True, False, True, True, True, True, False, True]])
    segment = jnp.array([[0, 0, 0, 0, 1, 1, 1, 2]])  # 3 is a sequence without tokens
    found = jax.jit(segments.first_tokens)(jnp.array([[2, 1, 0, 5]]), mask, segment)
    np.testing.assert_array_equal(found, [[True, False, True, False, True, False, False, False]])
    np.testing.assert_array_equal(segments.first_tokens(jnp.array([[9, 9, 9, 9]]), mask, segment), mask)
    # One axis, three axes, and a last sequence of the row's last token where every token counts.
    full, ends = jnp.ones(4, bool), jnp.array([0, 0, 0, 1])
    np.testing.assert_array_equal(segments.first_tokens(jnp.array([1, 1]), full, ends), [True, False, False, True])
    stacked = segments.first_tokens(
        jnp.array([[[1, 1]], [[2, 0]]]), full[None, None].repeat(2, 0), ends[None, None].repeat(2, 0)
    )
    np.testing.assert_array_equal(stacked, [[[True, False, False, True]], [[True, True, False, False]]])


def test_what_follows_is_of_the_next_masked_token_of_the_same_sequence():
    # Row 0: 1 is followed by 2, after which only another sequence's token comes; row 1: 6, 7, 8, and padding's 9.
    value, there = jax.jit(segments.following)(X, MASK, SEGMENT)
    np.testing.assert_array_equal(value, [[2, 0, 0, 0, 0], [0, 7, 8, 0, 0]])
    np.testing.assert_array_equal(there, [[True, False, False, False, False], [False, True, True, False, False]])
    # A token off the mask is stepped over.
    value, _ = segments.following(jnp.array([1.0, NAN, 3.0]), jnp.array([True, False, True]), jnp.zeros(3, jnp.int32))
    np.testing.assert_array_equal(value, [3, 0, 0])


def test_columns_are_shifted_by_one():
    x = jnp.array([[1, 2, 3], [4, 5, 6]])
    np.testing.assert_array_equal(segments.next_column(x, -1), [[2, 3, -1], [5, 6, -1]])
    np.testing.assert_array_equal(segments.next_column(x > 2), [[False, True, False], [True, True, False]])
    np.testing.assert_array_equal(segments.previous_column(x), [[0, 1, 2], [0, 4, 5]])
    bins = jnp.stack([x, -x], axis=-1)
    np.testing.assert_array_equal(segments.previous_column(bins)[..., 1], [[0, -1, -2], [0, -4, -5]])
    # Each entry but the one that leaves the row is read once: by column, the weights 1, 10, 100 of where it goes.
    weights = jnp.array([1.0, 10.0, 100.0])
    of = lambda shift: jax.grad(lambda x: (shift(x) * weights[None]).sum())(x.astype(jnp.float32))
    np.testing.assert_array_equal(of(segments.next_column), [[0, 1, 10]] * 2)
    np.testing.assert_array_equal(of(segments.previous_column), [[10, 100, 0]] * 2)


def test_one_row_is_sharded_after_a_shift_as_before(mesh):
    # A slice of one entry is on every device with jax 0.12, and nothing sharded can be joined to it.
    def shifted(x):
        return segments.next_column(constrain(x, "batch", None)), segments.previous_column(constrain(x, "batch", None))

    x = jnp.array([[1.0, 2.0, 3.0]])
    following, before = jax.jit(shifted)(x)
    np.testing.assert_array_equal(following, [[2, 3, 0]])
    np.testing.assert_array_equal(before, [[0, 1, 2]])
    assert (
        following.sharding.spec
        == before.sharding.spec
        == jax.jit(lambda x: constrain(x, "batch", None))(x).sharding.spec
    )
