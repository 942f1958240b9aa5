from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import credited_values, rows_with_values, whitened

from jrl.algos import ALGOS
from jrl.algos.contract import Facts, Tokens
from jrl.algos.ppo import PPO
from jrl.algos.vapo import VAPO
from jrl.config.errors import ConfigError
from jrl.resolve import load_config

OBJECTIVE = ALGOS["VAPO"]
FACTS = Facts(samples=1, lag=0, updates_per_batch=4, truncated_sampling=False, greedy=False, max_completion=6)


def test_the_policys_lambda_grows_with_length_and_the_critic_learns_returns():
    # length_alpha 0.5: 3 sampled tokens have lambda 1 - 1 / 1.5 = 1/3, 2 have 0. Row 0: 1 - 0.6 = 0.4;
    # 0.6 - 0.4 + 0.4 / 3 = 1/3; 0.4 - 0.2 + 1/9 = 0.311111. Row 1: 0 - 0.1; 0.1 - 0.5.
    advantages, returns = credited_values(OBJECTIVE, VAPO(length_alpha=0.5), rows_with_values())
    np.testing.assert_allclose(advantages, whitened([0.311111, 1 / 3, 0.4], [-0.4, -0.1]), atol=1e-5)
    np.testing.assert_allclose(returns, [[1, 1, 0, 1], [0] * 4, [0] * 4, [0] * 4], atol=1e-6)


def test_a_lambda_for_rows_of_every_length():
    # lambda 0.95: 0.4; 0.2 + 0.38 = 0.58; 0.2 + 0.95 * 0.58 = 0.751. Row 1: -0.1; -0.4 - 0.095.
    advantages, returns = credited_values(OBJECTIVE, VAPO(gae_lambda=0.95), rows_with_values())
    np.testing.assert_allclose(advantages, whitened([0.751, 0.58, 0.4], [-0.495, -0.1]), atol=1e-5)
    np.testing.assert_allclose(returns[0], [1, 1, 0, 1], atol=1e-6)


def tokens():
    return Tokens(
        logprobs=jnp.log(jnp.array([1.5, 1.0, 1.0])),
        old_logprobs=jnp.zeros(3),
        behaviour_logprobs=jnp.full(3, -np.log(2.0), jnp.float32),
        ref_logprobs=None,
        entropy=jnp.full(3, 3.0),
        advantages=jnp.array([1.0, -2.0, 0.0]),
        mask=jnp.array([True, True, False]),
        segment=jnp.zeros(3, jnp.int32),
        num_segments=1,
        values=jnp.array([0.9, 0.9, jnp.nan]),
        old_values=jnp.array([0.5, 0.5, jnp.nan]),
        returns=jnp.array([0.0, 1.0, jnp.nan]),
        positive_weights=jnp.array([0.0, 2.0, jnp.nan]),
    )


def test_right_answers_are_imitated():
    # PPO's loss: rho 1.5, A 1, clip 0.28: -1.28 and 0.1 * 0.405; rho 1, A -2: 2 and 0.1 * 0.045, its value is clipped.
    # The second token is of a right row: 0.1 * -lp = 0. With lp -0.5 and -1.5 on right rows, of all: 0.1 * mean(0.5,
    # 1.5) = 0.1.
    loss, metrics = jax.jit(OBJECTIVE.token_loss)(VAPO(), tokens(), ())
    np.testing.assert_allclose(loss, [-1.28 + 0.0405, 2 + 0.0045, 0], rtol=1e-6)
    np.testing.assert_array_equal(metrics["right"], [0, 1, 0])
    right = tokens().replace(logprobs=jnp.array([-0.5, -1.5, jnp.nan]), positive_weights=jnp.array([1.0, 1.0, jnp.nan]))
    loss_of = lambda config, lp: OBJECTIVE.token_loss(config, right.replace(logprobs=lp), ())[0]
    more = loss_of(VAPO(), right.logprobs) - loss_of(VAPO(positive_nll=None), right.logprobs)
    np.testing.assert_allclose(more, [0.05, 0.15, 0], rtol=1e-5)
    np.testing.assert_allclose(more.sum() / 2, 0.1, rtol=1e-5)
    gradient = lambda config: jax.grad(lambda lp: loss_of(config, lp).sum())(right.logprobs)
    np.testing.assert_allclose(gradient(VAPO()) - gradient(VAPO(positive_nll=None)), [-0.1, -0.1, 0], rtol=1e-5)


@pytest.mark.parametrize("wrong_tokens", [0, 2, 6])
def test_the_imitation_is_a_mean_over_the_tokens_of_right_rows(wrong_tokens):
    # -lp 0.5 and 1.5 on the right row, mean 1, whatever comes beside it: 0.1 * 1 in the step's loss.
    lp = jnp.array([-0.5, -1.5, *[-9.0] * wrong_tokens])
    of = lambda x: jnp.full(lp.shape, x)
    mask = jnp.ones(lp.shape, bool)
    weights = jnp.where(jnp.arange(len(lp)) < 2, len(lp) / 2, 0.0)
    batch = tokens().replace(
        logprobs=lp, old_logprobs=lp, behaviour_logprobs=lp, entropy=of(0.0), advantages=of(0.0), mask=mask,
        segment=jnp.minimum(jnp.arange(len(lp)) // 2, 1), num_segments=2, values=of(0.0), old_values=of(0.0),
        returns=of(0.0), positive_weights=weights,
    )  # fmt: skip
    np.testing.assert_allclose(OBJECTIVE.token_loss(VAPO(), batch, ())[0].sum() / len(lp), 0.1, rtol=1e-6)


def test_right_answers_are_those_of_a_positive_outcome():
    rows = rows_with_values()
    found = jax.jit(lambda g: OBJECTIVE.positive(VAPO(), g))(rows.replace(outcome=jnp.array([1.0, 0.0, 1.0, 1.0])))
    np.testing.assert_array_equal(found, [True, False, False, False])  # one without a verdict, one without a token
    assert not OBJECTIVE.positive(VAPO(), rows.replace(outcome=jnp.array([0.0, -1.0, jnp.nan, 0.0]))).any()


def test_wrong_answers_are_not_imitated():
    wrong = tokens().replace(positive_weights=jnp.zeros(3))
    with_it, without = (OBJECTIVE.token_loss(VAPO(positive_nll=c), wrong, ())[0] for c in (0.1, None))
    np.testing.assert_array_equal(with_it, without)


def test_defaults_are_those_of_the_paper():
    config = VAPO()
    assert (config.clip_low, config.clip_high, config.length_alpha, config.positive_nll) == (0.2, 0.28, 0.05, 0.1)
    OBJECTIVE.check(config, FACTS)
    assert OBJECTIVE.needs(config) == ALGOS["PPO"].needs(PPO())


@pytest.mark.parametrize(
    "config, message",
    [
        (VAPO(value_clip=0.0), r"VAPO\.value_clip = 0\.0"),
        (VAPO(discount=0.0), r"VAPO\.discount = 0\.0"),
        (VAPO(gae_lambda=1.5), r"VAPO\.gae_lambda = 1\.5"),
        (VAPO(length_alpha=0.0), r"VAPO\.length_alpha = 0\.0"),
        (VAPO(positive_nll=0.0), r"VAPO\.positive_nll = 0\.0"),
    ],
)
def test_illegal_combinations_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)


def test_a_verdict_that_is_held_out_is_not_imitated():
    # The reward is a model's; what is right was read off the verifier that only watches.
    held_out = ["Online.objective=@VAPO()", "VAPO.gae_lambda=1.0"]
    with pytest.raises(ConfigError, match=r"VAPO imitates what .* calls right \(positive_nll = 0\.1\), and the fi"):
        load_config("configs/algos/tldr_ppo.gin", held_out)
    load_config("configs/algos/tldr_ppo.gin", [*held_out, "VAPO.positive_nll=None"])
    load_config("configs/algos/tldr_ppo.gin", [*held_out, "Exact.weight=0.1"])
    with pytest.raises(ConfigError, match=r"the first in Scoring\.verifiers has no weight above 0"):  # the other has
        load_config("configs/algos/tldr_ppo.gin", [*held_out, "Scoring.verifiers=[@Exact(), @Numeric()]"])
    load_config("configs/algos/vapo.gin")
