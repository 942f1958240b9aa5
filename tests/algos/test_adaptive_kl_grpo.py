"""The adaptive KL coefficient by hand, and that all else is GRPO."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.algos.adaptive_kl_grpo import OBJECTIVE, AdaptiveKLGRPO, next_state
from jrl.algos.conformance import sample_groups, sample_tokens
from jrl.algos.contract import Facts
from jrl.algos.grpo import GRPO
from jrl.config.errors import ConfigError
from jrl.resolve import load_config

FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=8)


def step(config, kl, rows, tokens, beta=0.1):
    metrics = {"kl_ref_k1": kl, "loss/rows": rows, "loss/tokens": tokens}
    metrics = {name: jnp.float32(value) for name, value in metrics.items()}
    return float(jax.jit(next_state)(config, {"kl": jnp.float32(beta)}, metrics)["kl"])


def test_the_coefficient_by_hand():
    token = AdaptiveKLGRPO(target=0.1, kl_per="token")
    # 0.15 / 0.1 - 1 = 0.5, clipped to 0.2; 0.1 * (1 + 0.2 * 256 / 10000) = 0.100512
    np.testing.assert_allclose(step(token, 0.15, 256, 2560), 0.100512, 1e-6)
    # 0.09 / 0.1 - 1 = -0.1; 0.1 * (1 - 0.1 * 256 / 10000) = 0.099744
    np.testing.assert_allclose(step(token, 0.09, 256, 2560), 0.099744, 1e-6)
    # 0.7 nats a token over 2560 / 256 = 10 tokens a row are 7 a sequence: 7 / 6 - 1 = 1 / 6; 0.1 * (1 + 256 / 60000)
    np.testing.assert_allclose(step(AdaptiveKLGRPO(), 0.7, 256, 2560), 0.1 * (1 + 256 / 60000), 1e-6)


def test_on_target_it_stays_and_an_estimate_below_zero_is_the_clip():
    token = AdaptiveKLGRPO(target=0.1, kl_per="token")
    np.testing.assert_allclose(step(token, 0.1, 256, 2560), 0.1, 1e-6)
    np.testing.assert_allclose(step(token, -3.0, 256, 2560), 0.1 * (1 - 0.2 * 256 / 10000), 1e-6)


def test_a_horizon_that_makes_the_coefficient_negative_is_refused():
    # At the start the KL is 0: 0.1 * (1 - 0.2 * 256 / 32) = -0.06, a reward for leaving the reference.
    np.testing.assert_allclose(step(AdaptiveKLGRPO(horizon=32.0), 0.0, 256, 2560), -0.06, 1e-6)
    facts = FACTS._replace(rows=256)
    for horizon in (32.0, 51.2):
        with pytest.raises(ValueError, match=rf"horizon = {horizon} must be above 0\.2 \* 256"):
            OBJECTIVE.check(AdaptiveKLGRPO(horizon=horizon), facts)
    OBJECTIVE.check(AdaptiveKLGRPO(horizon=51.3), facts)
    with pytest.raises(ConfigError, match=r"must be above 0\.2 \* 256"):  # 32 prompts of 8
        load_config("configs/algos/adaptive_kl_grpo.gin", ["AdaptiveKLGRPO.horizon=50.0"])


def test_an_empty_step_divides_by_nothing():
    assert np.isfinite(step(AdaptiveKLGRPO(), 0.0, 0, 0))


def test_with_its_coefficient_the_loss_and_its_gradient_are_those_of_grpo():
    tokens, state = sample_tokens(), {"kl": jnp.float32(0.3)}
    config = AdaptiveKLGRPO()
    ours = lambda lp: OBJECTIVE.token_loss(config, tokens.replace(logprobs=lp), state)[0].sum()
    theirs = lambda lp: ALGOS["GRPO"].token_loss(GRPO(kl=jnp.float32(0.3)), tokens.replace(logprobs=lp), ())[0].sum()
    np.testing.assert_array_equal(jax.jit(ours)(tokens.logprobs), jax.jit(theirs)(tokens.logprobs))
    np.testing.assert_array_equal(jax.jit(jax.grad(ours))(tokens.logprobs), jax.jit(jax.grad(theirs))(tokens.logprobs))


def test_advantages_are_those_of_grpo_and_the_state_begins_at_its_coefficient():
    groups, config = sample_groups(), AdaptiveKLGRPO(kl=0.25)
    state = OBJECTIVE.init_state(config)
    assert float(state["kl"]) == 0.25
    actual, after, _ = OBJECTIVE.advantages(config, groups, groups.reward, state)
    np.testing.assert_array_equal(actual, ALGOS["GRPO"].advantages(GRPO(), groups, groups.reward, ())[0])
    assert after is state


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AdaptiveKLGRPO(kl=None), "AdaptiveKLGRPO.kl is None"),
        (AdaptiveKLGRPO(target=0.0), "target = 0.0 must be above 0"),
        (AdaptiveKLGRPO(horizon=-1.0), "horizon = -1.0 must be above 0"),
    ],
)
def test_settings_that_cannot_adapt_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)
