"""Where tokens go, and the terms of a router, by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import router

LN = np.log
# Probabilities 1/8, 2/8, 4/8, 1/8.
LOGITS = jnp.log(jnp.array([1.0, 2.0, 4.0, 1.0]))


def test_weights_over_all_experts_or_over_those_chosen():
    run = jax.jit(router.route, static_argnums=(1, 2))
    weights, ids = run(LOGITS, 2, "all")
    np.testing.assert_array_equal(ids, [2, 1])
    np.testing.assert_allclose(weights, [1 / 2, 1 / 4], rtol=1e-6)
    weights, ids = run(LOGITS, 2, "chosen")
    np.testing.assert_array_equal(ids, [2, 1])
    np.testing.assert_allclose(weights, [2 / 3, 1 / 3], rtol=1e-6)


def test_over_the_chosen_is_over_all_divided_by_what_the_chosen_have():
    logits = jax.random.normal(jax.random.key(0), (50, 7)) * 3
    every, _ = router.route(logits, 3, "all")
    some, _ = router.route(logits, 3, "chosen")
    np.testing.assert_allclose(some, every / every.sum(-1, keepdims=True), rtol=1e-5)


def test_of_equal_experts_the_first_are_taken():
    np.testing.assert_array_equal(router.route(jnp.zeros((3, 4)), 2, "all")[1], [[0, 1]] * 3)


# Two experts, one a token. A row of two sequences, A A' and B, and a token that is masked, whose logits are NaN:
#   A and A' have probabilities (3/4, 1/4), B has (1/4, 3/4).
ROW = jnp.array([[[LN(3), 0.0], [LN(3), 0.0], [0.0, LN(3)], [np.nan, np.nan]]])
MASK = jnp.array([[True, True, True, False]])
SEGMENT = jnp.array([[0, 0, 1, 1]])
balance = jax.jit(functools.partial(router.balance_sum, num_segments=3, per_token=1))


def test_balance_by_hand():
    # A: n = 2, visits (2, 0), so f = 2/(1*2) * (2, 0) = (2, 0); P = (3/4, 1/4): n sum f P = 2 * 3/2 = 3.
    # B: n = 1, visits (0, 1), so f = (0, 2); P = (1/4, 3/4): 3/2. Together 9/2.
    np.testing.assert_allclose(balance(ROW, MASK, SEGMENT), 4.5, rtol=1e-6)
    # One sequence of two tokens, an expert each: f = (1, 1), P = (1/2, 1/2), n sum f P = 2: 1 a token.
    even = jnp.array([[[LN(3), 0.0], [0.0, LN(3)]]])
    np.testing.assert_allclose(balance(even, jnp.ones((1, 2), bool), jnp.zeros((1, 2), int)), 2, rtol=1e-6)


def test_balance_where_a_few_experts_have_everything():
    # 6 experts, 2 a token, always the same two and with all of the probability: E / K = 3 a token.
    logits = jnp.broadcast_to(jnp.array([40.0, 40, 0, 0, 0, 0]), (2, 5, 6))
    actual = router.balance_sum(logits, jnp.ones((2, 5), bool), jnp.zeros((2, 5), int), num_segments=1, per_token=2)
    np.testing.assert_allclose(actual / 10, 3, rtol=1e-5)


def test_balance_is_a_sum_over_sequences_however_they_are_packed():
    logits = jax.random.normal(jax.random.key(1), (1, 9, 5))
    mask = jnp.ones((1, 9), bool)
    segment = jnp.array([[0] * 4 + [1] * 5])
    of = functools.partial(router.balance_sum, num_segments=2, per_token=2)
    apart = sum(of(logits[:, s], mask[:, s], jnp.zeros_like(segment[:, s])) for s in (slice(0, 4), slice(4, 9)))
    np.testing.assert_allclose(of(logits, mask, segment), apart, rtol=1e-6)


def test_the_gradient_of_balance_goes_through_the_probabilities_alone():
    # d/dz_0 of A: f . dP/dz_0 = 2 * p_0 (1 - p_0) = 2 * 3/16 = 3/8, and -3/8 for z_1. B: the other way round.
    gradient = jax.grad(lambda z: balance(z, MASK, SEGMENT))(ROW)
    expected = [[[3 / 8, -3 / 8], [3 / 8, -3 / 8], [-3 / 8, 3 / 8], [0, 0]]]
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_z_by_hand_and_its_gradient():
    # logsumexp of (ln 3, 0) is ln 4, of all three tokens. d/dz = 2 ln 4 * p.
    actual, gradient = jax.value_and_grad(jax.jit(router.z_sum))(ROW, MASK)
    np.testing.assert_allclose(actual, 3 * LN(4) ** 2, rtol=1e-6)
    np.testing.assert_allclose(gradient[0, 0], 2 * LN(4) * np.array([3 / 4, 1 / 4]), rtol=1e-6)
    np.testing.assert_array_equal(gradient[0, 3], 0)


def test_entropy_and_load_by_hand():
    # -(3/4 ln 3/4 + 1/4 ln 1/4) = 2 ln 2 - 3/4 ln 3.
    np.testing.assert_allclose(jax.jit(router.entropy_sum)(ROW, MASK), 3 * (2 * LN(2) - 0.75 * LN(3)), rtol=1e-6)
    np.testing.assert_array_equal(router.load(ROW, MASK, 1), [2, 1])
    np.testing.assert_array_equal(router.load(ROW, MASK, 2), [3, 3])


@pytest.mark.parametrize("term", ["balance", "z", "entropy"])
def test_what_is_masked_reaches_neither_value_nor_gradient(term):
    run = {"balance": lambda z: balance(z, MASK, SEGMENT), "z": lambda z: router.z_sum(z, MASK),
           "entropy": lambda z: router.entropy_sum(z, MASK)}[term]  # fmt: skip
    clean = jnp.nan_to_num(ROW)
    for a, b in zip(jax.value_and_grad(run)(ROW), jax.value_and_grad(run)(clean)):
        np.testing.assert_array_equal(a, b)


NONE = 255  # not recorded


def test_weights_of_replayed_routes_and_their_gradient():
    # Recorded are the experts 3 and 1, with 1/8 and 2/8 of all: 1/3 and 2/3 among themselves.
    recorded = jnp.array([3, 1], jnp.uint8)
    run = lambda softmax: jax.jit(lambda z: router.route(z, 2, softmax, recorded))
    weights, ids = run("chosen")(LOGITS)
    assert ids.tolist() == [3, 1] and ids.dtype == jnp.int32
    np.testing.assert_allclose(weights, [1 / 3, 2 / 3], rtol=1e-6)
    np.testing.assert_allclose(run("all")(LOGITS)[0], [1 / 8, 2 / 8], rtol=1e-6)
    # Of the first weight w: w (1 - w) at its own logit, -w w' at the other's, 0 where it was not recorded.
    of_first = lambda softmax: jax.grad(lambda z: run(softmax)(z)[0][0])(LOGITS)
    np.testing.assert_allclose(of_first("chosen"), [0, -2 / 9, 0, 2 / 9], atol=1e-7)
    # Of all, w (1 - w) at its own and -w w' at every other: 1/8 * (1, 2, 4, 1) / 8.
    np.testing.assert_allclose(of_first("all"), [-1 / 64, -2 / 64, -4 / 64, 7 / 64], rtol=1e-6)


def test_where_no_route_is_recorded_the_router_decides():
    logits, recorded = jnp.stack([LOGITS, LOGITS]), jnp.array([[NONE, NONE], [0, 3]], jnp.uint8)
    weights, ids = router.route(logits, 2, "all", recorded)
    assert ids.tolist() == [[2, 1], [0, 3]]
    np.testing.assert_allclose(weights, [[1 / 2, 1 / 4], [1 / 8, 1 / 8]], rtol=1e-6)


def test_load_and_changes_count_sets_of_recorded_routes():
    # Of LOGITS the router takes 2 and 1. Recorded: the same in another order; one other; nothing; and a masked other.
    logits = jnp.stack([LOGITS, LOGITS, LOGITS, jnp.full(4, jnp.nan)])[None]
    recorded, mask = jnp.array([[[1, 2], [2, 3], [NONE, NONE], [0, 3]]], jnp.uint8), jnp.array([[1, 1, 1, 0]], bool)
    assert jax.jit(router.changed_sum)(logits, mask, recorded) == 1
    np.testing.assert_array_equal(router.load(logits, mask, 2, recorded), [0, 2, 3, 1])


@pytest.mark.parametrize(("experts", "dtype"), [(255, jnp.uint8), (256, jnp.uint16)])
def test_recorded_routes_hold_every_expert_and_a_value_that_is_none(experts, dtype):
    assert router.route_dtype(experts) == dtype and router.not_recorded(dtype) >= experts


def test_routes_by_token_and_by_layer():
    routes = jnp.arange(2 * 3 * 4 * 2).reshape(2, 3, 4, 2)  # layers, B, L, k
    flat = router.by_token(routes)
    assert flat.shape == (3, 4, 4) and flat[1, 2].tolist() == [*routes[0, 1, 2].tolist(), *routes[1, 1, 2].tolist()]
    np.testing.assert_array_equal(router.by_layer(flat, 2), routes)
