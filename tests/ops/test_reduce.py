from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jrl.device.sharding import constrain
from jrl.ops import reduce

NAN = float("nan")

# Two rows of the G test: losses [4] and [1, 1, 1], NaN where nothing counts.
LOSS = jnp.array([[4.0, NAN, NAN], [1.0, 1.0, 1.0]])
MASK = jnp.array([[True, False, False], [True, True, True]])
EMPTY_ROW = (jnp.array([[NAN, NAN, NAN]]), jnp.zeros((1, 3), bool))

AGGREGATIONS = {
    "G1": reduce.token_mean,
    "G2": reduce.sequence_mean_token_mean,
    "G3": reduce.sequence_mean_token_sum,
}


def test_widen_promotes_to_float32_and_keeps_float64():
    assert reduce.widen(jnp.ones(2, jnp.bfloat16)).dtype == jnp.float32
    assert reduce.widen(jnp.ones(2, jnp.int32)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert reduce.widen(jnp.ones(2, jnp.float64)).dtype == jnp.float64


def test_masked_mean_and_variance_by_hand():
    x, mask = jnp.array([1.0, 3.0, NAN, 8.0]), jnp.array([True, True, False, True])
    assert jax.jit(reduce.masked_sum)(x, mask) == 12.0
    assert jax.jit(reduce.masked_mean)(x, mask) == 4.0  # 12 / 3
    np.testing.assert_allclose(jax.jit(reduce.masked_var)(x, mask), 13.0, rtol=1e-6)  # (9 + 1 + 16) / 2


def test_nothing_masked_in_gives_zero_and_one_element_has_no_variance():
    x = jnp.array([NAN, 2.0])
    nothing, one = jnp.zeros(2, bool), jnp.array([False, True])
    assert reduce.masked_sum(x, nothing) == reduce.masked_mean(x, nothing) == reduce.masked_var(x, nothing) == 0
    assert reduce.masked_mean(x, one) == 2.0
    assert reduce.masked_var(x, one) == 0.0


def test_variance_does_not_cancel_far_from_zero():
    # E[x^2] - E[x]^2 at 1e4 in float32 has a rounding of about 10.
    x = jnp.array([10000.0, 10001.0, 10002.0])
    np.testing.assert_allclose(reduce.masked_var(x, jnp.ones(3, bool)), 1.0, rtol=1e-6)


def test_whiten_by_hand():
    # mean 0.5, variance (4 * 0.25) / 3 = 1/3; 0.5 / sqrt(1/3 + 1e-8) = 0.866025
    x, mask = jnp.array([1.0, 1.0, 0.0, 0.0, NAN]), jnp.array([True, True, True, True, False])
    expected = [0.8660254, 0.8660254, -0.8660254, -0.8660254, 0.0]
    np.testing.assert_allclose(jax.jit(reduce.whiten)(x, mask), expected, atol=1e-6)
    # +-1e-4: variance 2e-8, 1e-4 / sqrt(2e-8 + 1e-8) = 0.577350
    small = reduce.whiten(jnp.array([1e-4, -1e-4]), jnp.ones(2, bool))
    np.testing.assert_allclose(small, [0.5773503, -0.5773503], rtol=1e-4)
    # seven times 0.4 over 7 is 0.40000004 in float32, and still all are equal; the eighth is masked
    equal = reduce.whiten(jnp.full(8, 0.4), jnp.arange(8) < 7)
    np.testing.assert_array_equal(equal, 0)


def test_whiten_gives_mean_zero_and_variance_one():
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(0), (50,), jnp.float64) * 7 + 3
        mask = jnp.arange(50) % 3 > 0
        white = reduce.whiten(x, mask)
        np.testing.assert_allclose(reduce.masked_mean(white, mask), 0, atol=1e-12)
        np.testing.assert_allclose(reduce.masked_var(white, mask), 1, rtol=1e-8)  # the epsilon of 1e-8 in 49


def test_whiten_of_equal_values_is_exactly_zero():
    # The float32 mean of seven 0.1s is not 0.1: its rounding over 1e-4 must not become a signal.
    x = jnp.array([0.1] * 7 + [9.0])
    white = reduce.whiten(x, jnp.arange(8) < 7)
    assert jnp.all(white == 0)
    assert jnp.all(reduce.whiten(jnp.array([NAN]), jnp.array([False])) == 0)


def test_whiten_makes_no_zeros_of_nan():
    # A step that is not finite is skipped and counted; one of zeros would be taken.
    white = reduce.whiten(jnp.array([1.0, NAN, 0.0, 5.0]), jnp.array([True, True, True, False]))
    np.testing.assert_array_equal(white, [NAN, NAN, NAN, 0])


def test_aggregations_by_hand():
    # G1 (4 + 3) / 4 tokens; G2 (4/1 + 3/3) / 2 rows; G3 (4 + 3) / 2 rows; G4 7 / (2 rows * 3 tokens)
    assert jax.jit(reduce.token_mean)(LOSS, MASK) == 1.75
    np.testing.assert_allclose(jax.jit(reduce.sequence_mean_token_mean)(LOSS, MASK), 2.5, rtol=1e-6)
    assert jax.jit(reduce.sequence_mean_token_sum)(LOSS, MASK) == 3.5
    np.testing.assert_allclose(reduce.constant_mean(LOSS, MASK, rows=2, max_completion=3), 7 / 6, rtol=1e-6)


def test_an_all_masked_row_counts_only_in_the_constant():
    loss, mask = jnp.concatenate([LOSS, EMPTY_ROW[0]]), jnp.concatenate([MASK, EMPTY_ROW[1]])
    assert reduce.token_mean(loss, mask) == 1.75
    np.testing.assert_allclose(reduce.sequence_mean_token_mean(loss, mask), 2.5, rtol=1e-6)
    assert reduce.sequence_mean_token_sum(loss, mask) == 3.5
    np.testing.assert_allclose(reduce.constant_mean(loss, mask, rows=3, max_completion=3), 7 / 9, rtol=1e-6)


def test_weights_and_denominators_by_hand():
    np.testing.assert_array_equal(reduce.token_weights(MASK), [[1, 0, 0], [1, 1, 1]])
    np.testing.assert_allclose(reduce.inverse_length_weights(MASK), [[1, 0, 0], [1 / 3, 1 / 3, 1 / 3]], rtol=1e-6)
    assert reduce.count_tokens(MASK) == 4
    assert reduce.count_sequences(MASK) == 2
    assert reduce.constant_count(2, 3) == 6
    assert jax.jit(reduce.constant_count, static_argnums=1)(jnp.int32(2), 3) == 6


def test_denominators_are_at_least_one():
    nothing = jnp.zeros((2, 3), bool)
    assert reduce.count_tokens(nothing) == reduce.count_sequences(nothing) == reduce.constant_count(0, 3) == 1
    assert jnp.all(reduce.inverse_length_weights(nothing) == 0)


def test_constant_count_does_not_overflow_int32():
    assert reduce.constant_count(jnp.int32(16384), 131072) == 2.0**31


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_row_order_pad_columns_and_empty_rows_do_not_matter(name):
    aggregate = AGGREGATIONS[name]
    with jax.enable_x64(True):
        loss = jax.random.normal(jax.random.key(1), (5, 4), jnp.float64)
        mask = jax.random.bernoulli(jax.random.key(2), 0.6, (5, 4))
        value = aggregate(loss, mask)
        order = jnp.array([3, 0, 4, 1, 2])
        np.testing.assert_allclose(aggregate(loss[order], mask[order]), value, rtol=1e-12)
        pad = ((0, 1), (0, 2))
        padded = aggregate(jnp.pad(loss, pad, constant_values=NAN), jnp.pad(mask, pad))
        np.testing.assert_allclose(padded, value, rtol=1e-12)


def test_constant_mean_ignores_the_width_and_rows_of_its_arrays():
    pad = ((0, 1), (0, 2))
    loss, mask = jnp.pad(LOSS, pad, constant_values=NAN), jnp.pad(MASK, pad)
    np.testing.assert_allclose(reduce.constant_mean(loss, mask, rows=2, max_completion=3), 7 / 6, rtol=1e-6)


def test_numerators_over_a_step_do_not_depend_on_the_cut():
    # The mean of the two micro-batches' own token means is (4/1 + 3/3) / 2 = 2.5, which is not G1.
    weights, denominator = reduce.token_weights(MASK), reduce.count_tokens(MASK)
    parts = [reduce.aggregate(LOSS[i : i + 1], MASK[i : i + 1], weights[i : i + 1], denominator) for i in range(2)]
    assert sum(parts) == reduce.token_mean(LOSS, MASK) == 1.75


def test_g2_equals_g1_on_rows_of_one_length():
    loss, mask = jnp.array([[1.0, 2.0, 9.0], [3.0, 4.0, 9.0]]), jnp.array([[True, True, False]] * 2)
    assert reduce.sequence_mean_token_mean(loss, mask) == reduce.token_mean(loss, mask) == 2.5
    assert reduce.sequence_mean_token_sum(loss, mask) == 2 * reduce.token_mean(loss, mask)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_gradient_is_weight_over_denominator_and_nan_stays_out(name):
    gradient = jax.jit(jax.grad(AGGREGATIONS[name]))(LOSS, MASK)
    expected = {
        "G1": [[1 / 4, 0, 0], [1 / 4, 1 / 4, 1 / 4]],
        "G2": [[1 / 2, 0, 0], [1 / 6, 1 / 6, 1 / 6]],
        "G3": [[1 / 2, 0, 0], [1 / 2, 1 / 2, 1 / 2]],
    }[name]
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_an_all_masked_batch_has_loss_and_gradient_zero():
    for aggregate in AGGREGATIONS.values():
        value, gradient = jax.value_and_grad(aggregate)(*EMPTY_ROW)
        assert value == 0
        assert jnp.all(gradient == 0)


def test_whiten_gradient_matches_finite_differences():
    with jax.enable_x64(True):
        x = jnp.array([0.3, -1.0, 2.0, 0.7])
        mask = jnp.array([True, True, True, False])
        check_grads(lambda v: reduce.whiten(v, mask), (x,), order=1, modes=["rev"], atol=1e-7, rtol=1e-7)


def test_zeros_of_rows_are_sharded_as_the_rows(mesh):
    x = jnp.array([[jnp.nan, 2.0, 3.0]])
    zeros = jax.jit(lambda x: reduce.zeros_of_rows(constrain(x, "batch", None)))(x)
    row = jax.jit(lambda x: constrain(x, "batch"))(x[:, 1])
    np.testing.assert_array_equal(zeros, [0])
    assert (zeros.dtype, zeros.sharding.spec) == (x.dtype, row.sharding.spec)
    assert reduce.zeros_of_rows(x > 2).dtype == bool and reduce.zeros_of_rows(x, jnp.int32).dtype == jnp.int32
