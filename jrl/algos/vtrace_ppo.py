"""VTracePPO: PPO with V-trace, which corrects values and advantages for samples of older weights, token by token.

    w_t  = exp(old - behaviour), rho_t = min(w_t, max_weight), c_t = gae_lambda * min(w_t, max_trace)
    vs_t = v_t + rho_t * (r_t + discount * v_t' - v_t) + discount * c_t * (vs_t' - v_t')                   A16
    A_t  = rho_t * (r_t + discount * vs_t' - v_t), whitened over all sampled tokens of the step            A16, A23

vs are the targets of the value head; ratio, clip, value loss and the mean over tokens are PPO's. Use it with Online.lag
= 1 or a sampler of another dtype; on policy, with gae_lambda = 1, it is PPO. rho already weights the policy loss, so
`importance` is refused.

Source: Espeholt et al. 1802.01561, both bounds 1, without PPO's clip.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import ppo
from jrl.algos.contract import Facts, Groups
from jrl.algos.ppo import PPO
from jrl.ops import ratios
from jrl.ops.vtrace import vtrace
from jrl.types import traced

Array = jax.Array


@traced
class VTracePPO(PPO):
    gae_lambda: float = 1.0  # lambda of the traces
    max_weight: float = 1.0  # rho-bar: largest weight of a token's own step
    max_trace: float = 1.0  # c-bar: largest weight of what follows it


def check(config: VTracePPO, facts: Facts) -> None:
    ppo.check(config, facts)
    for name in ("max_weight", "max_trace"):
        if not getattr(config, name) > 0:
            raise ValueError(f"VTracePPO.{name} = {getattr(config, name)} must be above 0. 1.0 is usual.")
    if config.max_trace > config.max_weight:
        raise ValueError(
            f"VTracePPO.max_trace = {config.max_trace} must not exceed max_weight = {config.max_weight}: the traces "
            "would weigh what follows a token more than the token."
        )
    if config.importance is not None:
        raise ValueError(
            "VTracePPO.importance must be None: V-trace weighs every advantage by min(w, max_weight) already, and the "
            "mismatch would count twice. Use PPO with importance, or VTracePPO without."
        )


def estimates(config: VTracePPO, groups: Groups, reward: Array) -> tuple[Array, Array, Array]:
    """Returns advantages before whitening and returns, [N, T] float, and the tokens that count, [N, T] bool."""
    rewards, counts = ppo.rewards_of_tokens(config, groups, reward)
    weights = jnp.exp(ratios.clamp(ratios.log_ratio(groups.old_logprobs, groups.behaviour_logprobs, counts)))
    unwhitened, targets = vtrace(
        rewards,
        groups.values,
        weights,
        counts,
        discount=config.discount,
        gae_lambda=config.gae_lambda,
        max_weight=config.max_weight,
        max_trace=config.max_trace,
    )
    return unwhitened, targets, counts


OBJECTIVE = ppo.OBJECTIVE._replace(
    config=VTracePPO,
    check=check,
    corrects_staleness=lambda config: True,
    needs=lambda config: ppo.OBJECTIVE.needs(config)._replace(credit_logprobs=True),
    **ppo.estimated_by(estimates),
)
