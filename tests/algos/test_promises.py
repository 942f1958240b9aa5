"""The promises can be broken: an algorithm with the fault that one of them is about does not pass it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jrl.algos import ALGOS
from jrl.algos.conformance import PROMISES, default_config
from jrl.algos.grpo import GRPO
from jrl.types import traced

ROW = ALGOS["GRPO"]


@dataclasses.dataclass(frozen=True)
class Untraced:
    """A configuration whose float is structure: every value of it is a program of its own."""

    clip: float = 0.2


jax.tree_util.register_dataclass(Untraced, data_fields=[], meta_fields=["clip"])


@traced
class Needy:
    scale: float


def unmasked_loss(config, tokens):
    ratio = jnp.exp(tokens.logprobs - tokens.old_logprobs)
    return jnp.where(tokens.mask, -ratio * tokens.advantages, 0), {}


def biased_loss(config, tokens):
    return jnp.where(tokens.mask, -jnp.where(tokens.mask, tokens.logprobs, 0), 0), {}


def leaky_metrics(config, tokens):
    loss, metrics = ROW.token_loss(config, tokens)
    return loss, metrics | {"logprob": jnp.where(tokens.mask, tokens.logprobs, 0)}


def row_mean_loss(config, tokens):
    loss, metrics = ROW.token_loss(config, tokens)
    return loss - loss.mean(-1, keepdims=True), metrics


def positional_advantages(config, groups, reward, baseline):
    by_group = reward.reshape(-1, 4)[: groups.num_groups] if reward.shape[0] % 4 == 0 else reward[:12].reshape(-1, 4)
    row = jnp.where(jnp.isnan(by_group), 0, by_group - by_group.mean(-1, keepdims=True)).reshape(-1)
    row = jnp.pad(row, (0, reward.shape[0] - row.shape[0]))
    return jnp.where(groups.action_mask, row[:, None], 0), baseline, {}


def spread_everywhere(config, groups, reward, baseline):
    advantages, baseline, counters = ROW.advantages(config, groups, reward, baseline)
    return jnp.broadcast_to(advantages.max(-1, keepdims=True), advantages.shape), baseline, counters


def trusting_advantages(config, groups, reward, baseline):
    return ROW.advantages(config, groups.replace(valid=jnp.ones_like(groups.valid)), reward, baseline)


FAULTS = {
    "another_float_compiles_nothing": (ROW._replace(config=Untraced, token_loss=biased_loss), Untraced()),
    "zero_advantage_gives_zero_policy_gradient": (ROW._replace(token_loss=biased_loss), GRPO()),
    "masked_tokens_do_not_matter": (ROW._replace(token_loss=unmasked_loss), GRPO()),
    "metrics_speak_of_tokens_and_carry_no_gradient": (ROW._replace(token_loss=leaky_metrics), GRPO()),
    "packing_does_not_matter": (ROW._replace(token_loss=row_mean_loss), GRPO()),
    "row_order_does_not_matter": (ROW._replace(advantages=positional_advantages), GRPO()),
    "pad_columns_do_not_matter": (
        ROW._replace(denominator=lambda config, mask, rows, width: jnp.float32(mask.shape[-1])),
        GRPO(),
    ),
    "rows_without_a_verdict_or_a_token_do_not_matter": (ROW._replace(advantages=trusting_advantages), GRPO()),
    "advantages_lie_on_sampled_tokens": (ROW._replace(advantages=spread_everywhere), GRPO()),
    "an_empty_step_has_loss_zero": (
        ROW._replace(denominator=lambda config, mask, rows, width: mask.sum().astype(jnp.float32)),
        GRPO(),
    ),
}


@pytest.mark.parametrize("promise", FAULTS)
def test_a_fault_breaks_its_promise(promise):
    algorithm, config = FAULTS[promise]
    with pytest.raises(AssertionError):
        PROMISES[promise](algorithm, config)


def test_a_config_without_defaults_is_named():
    with pytest.raises(TypeError, match="Needy has fields without a default, scale"):
        default_config(ROW._replace(config=Needy))
