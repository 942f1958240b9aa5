"""Supervised learning of given completions: the warm start before RL. Not a row of the table; the loop's SFT phase.

    l_t = -log pi(y_t | y_<t),  L = mean over all tokens of the step

Source: maximum likelihood of the given tokens, reduced as G1.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jrl.algos.contract import Algorithm, Facts, Groups, Tokens
from jrl.ops import reduce

Array = jax.Array


def check(config: Any, facts: Facts) -> None:
    """Every combination is legal."""


def token_loss(config: Any, tokens: Tokens) -> tuple[Array, dict[str, Array]]:
    return -tokens.logprobs, {}


def _no_credit(config: Any, groups: Groups, reward: Array, baseline: Array) -> tuple[Array, Array, dict[str, Array]]:
    return jnp.zeros(groups.action_mask.shape, jnp.float32), baseline, {}


SUPERVISED = Algorithm(
    config=type(None),
    check=check,
    keep=lambda config, groups: groups.valid,
    refill=lambda config: None,
    shape=lambda config, groups: groups.reward,
    advantages=_no_credit,
    token_loss=token_loss,
    weights=lambda config, loss_mask, max_completion: reduce.token_weights(loss_mask),
    denominator=lambda config, loss_mask, rows, max_completion: reduce.count_tokens(loss_mask),
    needs_reference=lambda config: False,
    needs_entropy_gradient=lambda config: False,
)
