"""Truncation thresholds against sorting the vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops.truncate import support, support_of_size


def by_sorting(logits, top_k=None, top_p=None, min_p=None):
    """The same support from a sorted vocabulary in float64, ties at an edge kept."""
    logits = np.asarray(logits, np.float64)
    order = np.sort(logits)[::-1]
    edge = -np.inf
    if top_k is not None:
        edge = order[min(top_k, len(order)) - 1]
    if top_p is not None:
        left = order[order >= edge]
        mass = np.exp(left - left[0])
        mass /= mass.sum()
        edge = max(edge, left[np.flatnonzero(np.cumsum(mass) >= top_p - 1e-12)[0]])
    if min_p is not None:
        edge = max(edge, order[0] + np.log(min_p))
    return logits >= edge


CASES = [
    dict(top_k=1),
    dict(top_k=7),
    dict(top_k=10_000),
    dict(top_p=0.05),
    dict(top_p=0.9),
    dict(min_p=0.1),
    dict(top_k=20, top_p=0.7),
    dict(top_k=20, min_p=0.2),
    dict(top_p=0.8, min_p=0.05),
    dict(top_k=30, top_p=0.9, min_p=0.02),
]


def test_top_p_is_of_probabilities_whatever_the_logits_scale_and_1_keeps_all():
    # exp(200) is not finite in float32; 0.731 of the mass is the first's
    logits = jnp.array([200.0, 199.0, 0.0])
    np.testing.assert_array_equal(support(logits, top_p=jnp.array(0.7)), [True, False, False])
    np.testing.assert_array_equal(support(logits, top_p=jnp.array(0.8)), [True, True, False])
    # exp(-50) is lost in a sum with 1
    np.testing.assert_array_equal(support(jnp.array([0.0, -50.0]), top_p=jnp.array(1.0)), [True, True])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_support_equals_sorting(case):
    rng = np.random.default_rng(0)
    sampling_params = {
        name: jnp.asarray(value, jnp.int32 if name == "top_k" else jnp.float32) for name, value in case.items()
    }
    run = jax.jit(support)
    for _ in range(50):
        logits = (rng.normal(size=200) * rng.choice([0.1, 1, 5])).astype(np.float32)
        np.testing.assert_array_equal(run(logits, **sampling_params), by_sorting(logits, **case))


def test_hand_numbers():
    # Probabilities 0.5, 0.3, 0.15, 0.05. Mass 0.5 < 0.79 <= 0.8: two tokens; 0.81 needs the third.
    logits = jnp.log(jnp.array([0.15, 0.5, 0.05, 0.3]))
    assert support(logits, top_p=jnp.float32(0.79)).tolist() == [False, True, False, True]
    assert support(logits, top_p=jnp.float32(0.81)).tolist() == [True, True, False, True]
    # top-p acts on what top-k left: 0.5 / 0.8 = 0.625 alone reaches 0.6.
    assert support(logits, top_k=jnp.int32(2), top_p=jnp.float32(0.6)).tolist() == [False, True, False, False]
    # 0.15 / 0.5 = 0.3 and 0.05 / 0.5 = 0.1.
    assert support(logits, min_p=jnp.float32(0.29)).tolist() == [True, True, False, True]
    assert support(logits, min_p=jnp.float32(0.31)).tolist() == [False, True, False, True]


def test_ties_at_the_edge_stay():
    logits = jnp.array([1.0, 0.0, 0.0, 0.0, -1.0])
    assert support(logits, top_k=jnp.int32(2)).tolist() == [True, True, True, True, False]
    assert support(logits, top_p=jnp.float32(0.6)).tolist() == [True, True, True, True, False]
    assert support(jnp.array([-0.0, 0.0, -1.0]), top_k=jnp.int32(1)).tolist() == [True, True, False]


def test_p_of_one_keeps_tokens_whose_mass_is_lost_in_the_sum():
    logits = jnp.array([0.0, -60.0, -200.0, -jnp.inf])
    assert support(logits, top_p=jnp.float32(1.0)).tolist() == [True, True, True, False]


@pytest.mark.parametrize("p", [1e-38, 1e-46])  # below float32's smallest normal number, 1.2e-38, and its smallest
def test_a_p_that_rounds_to_zero_keeps_the_likeliest(p):
    keep = jax.jit(support)(jnp.array([1.0, 3.0, 2.0, 3.0]), top_p=jnp.float32(p))
    np.testing.assert_array_equal(keep, [False, True, False, True])


def test_a_token_of_minus_infinity_is_never_kept():
    logits = jnp.array([0.0, -jnp.inf, 1.0])
    assert support(logits, top_k=jnp.int32(3)).tolist() == [True, False, True]


def test_values_are_traced_and_rows_are_independent():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(4, 50)), jnp.float32)
    traced = []

    @jax.jit
    def run(logits, top_k):
        traced.append(top_k)
        return support(logits, top_k=top_k)

    rows = run(logits, top_k=jnp.array([[1], [5], [50], [7]], jnp.int32))
    assert rows.sum(axis=1).tolist() == [1, 5, 50, 7]
    run(logits, top_k=jnp.array([[2], [3], [4], [5]], jnp.int32))
    assert len(traced) == 1


def test_the_support_is_recovered_from_its_size():
    rng = np.random.default_rng(2)
    for case in CASES:
        sampling_params = {
            name: jnp.asarray(value, jnp.int32 if name == "top_k" else jnp.float32) for name, value in case.items()
        }
        logits = jnp.asarray(rng.normal(size=(5, 80)) * 3, jnp.float32)
        keep = support(logits, **sampling_params)
        np.testing.assert_array_equal(support_of_size(logits, keep.sum(axis=-1, keepdims=True)), keep)


def test_float64_bisects_all_its_bits():
    with jax.enable_x64(True):
        logits = jnp.array([1.0, 1.0 + 2.0**-52, 1.0 - 2.0**-53, -3.0], jnp.float64)
        assert support(logits, top_k=jnp.int32(1)).tolist() == [False, True, False, False]
        assert support(logits, top_k=jnp.int32(2)).tolist() == [True, True, False, False]


def test_forgetting_the_kept_mass_shifts_log_probs_by_its_log():
    # docs/algorithms.md S1: top-p that keeps mass 0.9 gives every kept token a log-ratio of log(0.9) ~ -0.10536.
    logits = jnp.log(jnp.array([0.6, 0.3, 0.1]))
    limited = jnp.where(support(logits, top_p=jnp.float32(0.85)), logits, -jnp.inf)
    shift = jax.nn.log_softmax(logits)[:2] - jax.nn.log_softmax(limited)[:2]
    np.testing.assert_allclose(shift, -0.10536, atol=1e-5)
