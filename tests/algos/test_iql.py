"""IQL by hand: what follows in the data, and tokens imitated by what they changed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import tokens, two_stored_answers

import jrl
from jrl.algos import ALGOS
from jrl.algos.contract import Facts, Needs
from jrl.algos.iql import IQL
from jrl.compatibility import check
from jrl.experiment import TABLES
from jrl.learning.learner import ModelOutputs, token_terms

ROW = ALGOS["IQL"]
FACTS = Facts(samples=1, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=8)
NAN = float("nan")
LOGPROBS, VALUES = [-1.0, -2.0, -0.5], [0.4, 0.7, 0.5]


def answer(logprobs, values, reward, segment=None, mask=None):
    """Returns tokens of stored answers; reward: one for all of them, or one for each token."""
    batch = tokens(logprobs, [0.0] * len(logprobs), [0.0] * len(logprobs), segment=segment)
    reward = jnp.stack([jnp.broadcast_to(jnp.float32(reward), len(logprobs)), jnp.full(len(logprobs), NAN)], axis=-1)
    mask = batch.mask if mask is None else jnp.array(mask)
    return batch.replace(values=jnp.float32(values), row_values=reward, mask=mask, advantages=None)


def loss_of(batch, **config):
    return jax.jit(ROW.token_loss)(IQL(**config), batch, ())


def slopes(batch, **config):
    """Returns the gradients of the sum, by log-prob and by value."""
    total = lambda lp, v: ROW.token_loss(IQL(**config), batch.replace(logprobs=lp, values=v), ())[0].sum()
    return jax.jit(jax.grad(total, (0, 1)))(batch.logprobs, batch.values)


def test_by_hand():
    loss, metrics = loss_of(answer(LOGPROBS, VALUES, 1.0), beta=0.5)
    # delta: 0.7 - 0.4, 0.5 - 0.7, 1 - 0.5. Weights exp(2 delta) 1.822119, 0.670320, 2.718282, times 1, 2, 0.5;
    # value losses 0.7 * 0.09, 0.3 * 0.04, 0.7 * 0.25
    np.testing.assert_allclose(loss, [1.822119 + 0.063, 1.340640 + 0.012, 1.359141 + 0.175], rtol=1e-5)
    np.testing.assert_allclose(metrics["advantage/mean"], [0.3, -0.2, 0.5], rtol=1e-5)
    np.testing.assert_allclose(metrics["value/loss"], [0.063, 0.012, 0.175], rtol=1e-5)
    np.testing.assert_allclose(metrics["advantage/weight"], [1.822119, 0.670320, 2.718282], rtol=1e-5)
    np.testing.assert_allclose(
        metrics["stored/reward_logprob"], LOGPROBS, rtol=1e-5
    )  # reward 1 at every token of the row
    # exp(1 / 0.1) is cut at 20; half of what follows: 0.35 - 0.4, 0.25 - 0.7 and 1 - 0.5
    assert loss_of(answer([-1.0], [0.0], 1.0), beta=0.1, value_coefficient=1e-9)[0][0] == pytest.approx(20)
    halved = loss_of(answer(LOGPROBS, VALUES, 1.0), discount=0.5)[1]["advantage/mean"]
    np.testing.assert_allclose(halved, [-0.05, -0.45, 0.5], rtol=1e-5)


def test_no_gradient_goes_through_what_follows_or_through_the_weights():
    of_logprobs, of_values = slopes(answer(LOGPROBS, VALUES, 1.0), beta=0.5, value_coefficient=2.0)
    np.testing.assert_allclose(of_logprobs, [-1.822119, -0.670320, -2.718282], rtol=1e-5)
    # -2 * 2 * |tau - 1[delta < 0]| * delta
    np.testing.assert_allclose(of_values, [-4 * 0.7 * 0.3, 4 * 0.3 * 0.2, -4 * 0.7 * 0.5], rtol=1e-5)


def test_the_value_rests_at_the_expectile_of_the_rewards():
    # Of rewards 1 and 0, as often: tau = v, for 0.7 (1 - v) = 0.3 v at v = 0.7.
    at_rest = slopes(answer([-1.0, -1.0], [0.7, 0.7], [1.0, 0.0], segment=[0, 1]))[1]
    np.testing.assert_allclose(at_rest.sum(), 0, atol=1e-6)


def test_where_values_are_right_it_is_sft():
    batch = answer(LOGPROBS, [1.0, 1.0, 1.0], 1.0)
    np.testing.assert_allclose(loss_of(batch)[0], [1, 2, 0.5], rtol=1e-6)


def test_what_follows_is_the_next_learned_token_of_the_answer():
    # The second token is another speaker's; the fourth is of another answer, with a reward of its own.
    batch = answer([-1.0, NAN, -2.0, -0.5], [0.4, NAN, 0.7, 0.5], [1.0, 1.0, 1.0, 0.0], segment=[0, 0, 0, 1],
                   mask=[True, False, True, True])  # fmt: skip
    loss, metrics = loss_of(batch)
    np.testing.assert_allclose(metrics["advantage/mean"], [0.3, 0, 0.3, -0.5], rtol=1e-5)
    assert loss[1] == 0 and np.isfinite(loss).all()
    assert all(np.isfinite(slope).all() and slope[1] == 0 for slope in slopes(batch))


def test_the_learner_gives_every_token_the_reward_of_its_row():
    # Answers of tokens 1 and 2, reward 0.9, and of token 4, reward -0.5; V = 0.
    micro = two_stored_answers([[0.9], [-0.5]], 3)
    still = jnp.zeros((1, 6))
    outputs = ModelOutputs(still - 1, still, None, still, None, None)
    _, metrics = token_terms(outputs, micro, IQL(), (), ROW)
    np.testing.assert_allclose(metrics["stored/reward"], [[0, 0.9, 0.9, 0, -0.5, 0]], rtol=1e-6)
    np.testing.assert_allclose(metrics["advantage/mean"], [[0, 0, 0.9, 0, -0.5, 0]], rtol=1e-6)


def test_an_answer_without_a_reward_is_not_learned_from():
    batch = answer([-1.0, -2.0], [0.4, 0.7], [NAN, 1.0], segment=[0, 1])
    np.testing.assert_allclose(loss_of(batch)[0], [0, 2 * np.exp(0.3 / 0.25) + 0.7 * 0.09], rtol=1e-5)
    assert all(slope[0] == 0 and np.isfinite(slope).all() for slope in slopes(batch))


@pytest.mark.parametrize(
    "field, value", [("tau", 0.4), ("tau", 1.0), ("beta", 0.0), ("max_weight", 0.5), ("discount", 1.5),
                     ("value_coefficient", 0.0)],
)  # fmt: skip
def test_a_setting_out_of_range_is_refused(field, value):
    with pytest.raises(ValueError, match=rf"IQL\.{field} = {value} must be"):
        ROW.check(IQL(**{field: value}), FACTS)


def test_data_whose_rewards_are_all_one_are_refused():
    with pytest.raises(ValueError, match=r"the 3 stored rows have the rewards \[1\.0\]: no answer is better"):
        ROW.check_stored(IQL(), np.float32([[1.0], [1.0], [NAN]]))
    ROW.check_stored(IQL(), np.float32([[1.0], [0.0]]))


def test_what_the_data_say_of_an_answer_is_refused_of_samples():
    config, _ = jrl.load_config("configs/algos/grpo.gin")
    reads = ALGOS["GRPO"]._replace(needs=lambda config: Needs(row_values=True))
    tables = {**TABLES, "algos": {**ALGOS, "GRPO": reads}}
    with pytest.raises(ValueError, match=r"GRPO reads values of answers in the data .* samples do not have"):
        check(config, tables)
