"""GRPO with an entropy bonus that is on only while the entropy is too low, with an adaptive coefficient.

    l_t = GRPO's loss - c * H_t, c = 0 if the last step's entropy was above `target`                      K5
    c  <- c + step where the entropy of the step was below `target`, else c - step, within [0, largest]    K5

c starts at `entropy_bonus` and is saved with the run; a skipped step does not change it. The entropy is the mean over
the tokens of a step, as logged (`policy/entropy`). TRL switches the bonus by the current batch's entropy; here the last
step's is used, since the coefficient is needed before the pass that computes the entropy. Everything else is GRPO.

Source: He et al. 2505.22312 (Skywork-OR1), numbers as in TRL.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jrl.algos import grpo
from jrl.algos.contract import Facts, Groups, Needs, Tokens
from jrl.algos.grpo import GRPO
from jrl.ops import coefficients
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class AdaptiveEntropyGRPO(GRPO):
    entropy_bonus: float | None = 0.005  # the coefficient at the start
    target: float = 0.2  # nats a token, below which the bonus acts
    step: float = 0.005  # how much the coefficient changes in a step
    largest: float = 1.0  # bound of the coefficient


def check(config: AdaptiveEntropyGRPO, facts: Facts) -> None:
    grpo.check(config, facts)
    if config.entropy_bonus is None:
        raise ValueError("AdaptiveEntropyGRPO.entropy_bonus is None; it adapts this number, and 0.005 is a usual start")
    for name in ("target", "step", "largest"):
        if not getattr(config, name) > 0:
            raise ValueError(f"AdaptiveEntropyGRPO.{name} = {getattr(config, name)} must be above 0")
    if config.entropy_bonus > config.largest:
        raise ValueError(
            f"AdaptiveEntropyGRPO.entropy_bonus = {config.entropy_bonus}, the coefficient at the start, must not be "
            f"above largest = {config.largest}, which bounds it"
        )


def init_state(config: AdaptiveEntropyGRPO) -> PyTree:
    return {"coefficient": jnp.float32(config.entropy_bonus), "entropy": jnp.float32(0)}


def advantages(
    config: AdaptiveEntropyGRPO, groups: Groups, reward: Array, state: PyTree
) -> tuple[Array, PyTree, dict[str, Array]]:
    token_advantages, state, counters = grpo.advantages(config, groups, reward, state)
    return token_advantages, state, counters | {"entropy_coefficient": active_coefficient(config, state)}


def active_coefficient(config: AdaptiveEntropyGRPO, state: PyTree) -> Array:
    """Returns the coefficient of the entropy bonus in this step, []."""
    return jnp.where(state["entropy"] <= config.target, state["coefficient"], 0)


def token_loss(config: AdaptiveEntropyGRPO, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    return grpo.token_loss(dataclasses.replace(config, entropy_bonus=active_coefficient(config, state)), tokens, ())


def next_state(config: AdaptiveEntropyGRPO, state: PyTree, metrics: dict[str, Array]) -> PyTree:
    entropy = metrics["policy/entropy"]
    coefficient = coefficients.adapted_entropy_coefficient(
        state["coefficient"], entropy, target=config.target, step=config.step, largest=config.largest
    )
    return {"coefficient": coefficient, "entropy": entropy}


OBJECTIVE = grpo.OBJECTIVE._replace(
    config=AdaptiveEntropyGRPO,
    check=check,
    needs=lambda config: Needs(reference=config.kl is not None, entropy_gradient=True),
    init_state=init_state,
    advantages=advantages,
    token_loss=token_loss,
    next_state=next_state,
)
