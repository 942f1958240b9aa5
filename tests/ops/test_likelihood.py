from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import likelihood, reduce

NAN = float("nan")


def test_the_term_by_hand():
    # a correct row of log-probs [-0.5, -1.5], a wrong one of [-9, -9]: 0.1 * mean([0.5, 1.5]) = 0.1
    logprobs, correct = jnp.array([[-0.5, -1.5, NAN], [-9.0, -9.0, NAN]]), jnp.array([[True] * 3, [False] * 3])
    mask = jnp.array([[True, True, False]] * 2)

    @jax.jit
    def term(lp):
        return 0.1 * reduce.token_mean(likelihood.positive_nll(lp, correct, mask), mask & correct)

    np.testing.assert_allclose(term(logprobs), 0.1, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(term)(logprobs), [[-0.05, -0.05, 0], [0, 0, 0]], rtol=1e-6)


def test_the_weights_turn_a_mean_over_all_tokens_into_one_over_correct_rows():
    # 5 tokens, 2 of them of correct rows: weight 5 / 2 on those
    mask, correct = jnp.array([[True, True, False], [True, True, True]]), jnp.array([True, False])
    weights = jax.jit(likelihood.positive_weights)(correct, mask)
    np.testing.assert_array_equal(weights, [[2.5, 2.5, 0], [0, 0, 0]])
    loss = jnp.array([[0.5, 1.5, NAN], [9.0, 9.0, 9.0]])
    np.testing.assert_allclose(reduce.token_mean(weights * reduce.masked(loss, mask), mask), 1.0, rtol=1e-6)


def test_without_a_correct_row_there_is_no_term():
    mask = jnp.ones((2, 3), bool)
    np.testing.assert_array_equal(likelihood.positive_weights(jnp.zeros(2, bool), mask), 0)
    np.testing.assert_array_equal(likelihood.positive_nll(jnp.full((2, 3), -1.0), ~mask, mask), 0)


def test_the_term_of_stored_rows_by_hand():
    # log-probs [-0.5, -1.5] of 2 tokens in a loss that is divided by 4: 0.1 * [0.5, 1.5] * 4 / 2 = [0.1, 0.3], and
    # 0.4 / 4 is 0.1 * mean([0.5, 1.5]) = 0.1
    logprobs, mask = jnp.array([-0.5, -1.5, NAN]), jnp.array([True, True, False])
    term = jax.jit(lambda lp, c: likelihood.pretraining_nll(lp, mask, coefficient=c, num_tokens=2.0, denominator=4.0))
    np.testing.assert_allclose(term(logprobs, 0.1), [0.1, 0.3, 0], rtol=1e-6)
    gradient = jax.grad(lambda lp: term(lp, 0.1).sum())(logprobs)
    np.testing.assert_allclose(gradient, [-0.2, -0.2, 0], rtol=1e-6)


def test_alone_and_at_a_coefficient_of_one_it_is_supervised_learning():
    logprobs, mask = jnp.log(jnp.array([[0.5, 0.2], [0.9, 0.3]])), jnp.array([[True, False], [True, True]])
    given = dict(coefficient=1.0, num_tokens=3.0, denominator=3.0)
    term = likelihood.pretraining_nll(logprobs, mask, **given)
    np.testing.assert_allclose(term.sum() / 3, reduce.token_mean(-logprobs, mask), rtol=1e-6)
