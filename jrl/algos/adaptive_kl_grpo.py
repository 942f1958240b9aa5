"""GRPO with an adaptive KL coefficient: the penalty grows while the policy is too far from the reference.

    e    = clip(KL / target - 1, -0.2, 0.2)
    beta <- beta * (1 + e * rows / horizon), after the updates of a step                                    K4

KL is the k1 estimate against the reference, summed over a sequence (or averaged over tokens: `kl_per`), then averaged
over the step. If older weights drew the tokens, it is multiplied by the ratio to them (K1), so that it is the current
policy's KL. beta starts at `kl` and is saved with the run; a skipped step does not change it. Everything else is GRPO.

Source: Ziegler et al. 1909.08593 section 2.2, whose target is 6 nats per sequence; the horizon form and its 10,000 are
those of TRL and verl. They average the KL differently (X38), hence the field `kl_per`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jrl.algos import grpo
from jrl.algos.contract import Facts, Groups, Needs, Tokens
from jrl.algos.grpo import GRPO
from jrl.ops import coefficients
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class AdaptiveKLGRPO(GRPO):
    kl: float | None = 0.1  # the coefficient at the start
    target: float = 6.0  # nats that the policy may stray from the reference
    horizon: float = 10_000.0  # rows over which the coefficient adapts
    kl_per: Literal["sequence", "token"] = "sequence"  # what the target is for


def check(config: AdaptiveKLGRPO, facts: Facts) -> None:
    grpo.check(config, facts)
    if config.kl is None:
        raise ValueError("AdaptiveKLGRPO.kl is None; it adapts this number, and 0.1 is a usual start")
    for name in ("target", "horizon"):
        if not getattr(config, name) > 0:
            raise ValueError(f"AdaptiveKLGRPO.{name} = {getattr(config, name)} must be above 0")
    if not config.horizon > coefficients.LARGEST_ERROR * facts.rows:
        raise ValueError(
            f"AdaptiveKLGRPO.horizon = {config.horizon} must be above {coefficients.LARGEST_ERROR} * {facts.rows}, the "
            "completions of a step: a step multiplies the coefficient by 1 - that / horizon or more, and one below "
            "0 rewards the distance to the reference. 10000 is usual"
        )


def init_state(config: AdaptiveKLGRPO) -> PyTree:
    return {"kl": jnp.float32(config.kl)}


def advantages(
    config: AdaptiveKLGRPO, groups: Groups, reward: Array, state: PyTree
) -> tuple[Array, PyTree, dict[str, Array]]:
    token_advantages, state, counters = grpo.advantages(config, groups, reward, state)
    return token_advantages, state, counters | {"kl_coefficient": state["kl"]}


def token_loss(config: AdaptiveKLGRPO, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    return grpo.token_loss(dataclasses.replace(config, kl=state["kl"]), tokens, ())


def next_state(config: AdaptiveKLGRPO, state: PyTree, metrics: dict[str, Array]) -> PyTree:
    rows = jnp.maximum(metrics["loss/rows"], 1)
    measured = metrics["kl_ref_k1"]
    if config.kl_per == "sequence":
        measured = measured * metrics["loss/tokens"] / rows
    return {
        "kl": coefficients.adapted_kl_coefficient(
            state["kl"], measured, rows, target=config.target, horizon=config.horizon
        )
    }


OBJECTIVE = grpo.OBJECTIVE._replace(
    config=AdaptiveKLGRPO,
    check=check,
    needs=lambda config: Needs(reference=True, entropy_gradient=config.entropy_bonus is not None),
    init_state=init_state,
    advantages=advantages,
    token_loss=token_loss,
    next_state=next_state,
)
