"""A-3PO: decoupled PPO whose clip is around a policy that is interpolated, not computed: no pass over the batch for it.

    u_t    = versions between the weights that drew the token and those that the updates begin with
    prox_t = behaviour_logprobs_t + u_t / (u_t + 1) * sg(logprobs_t - behaviour_logprobs_t)
    w_t    = min(exp(prox_t - behaviour_logprobs_t), cap)
    l_t    = w_t * max(-rho_t * A_i, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_i),  rho_t = exp(logprobs_t - prox_t)
                                                                                             L11
    A and L are those of DecoupledPPO                                                        A3, G1

The weights that learn count as the version after those that the updates begin with, which they are about to be. So the
old policy of a fresh token (u = 0) is the one that drew it, and its weight is 1: exact, but for what the sampler
computes otherwise. A truncated sampler is refused, since its log-probs are of another distribution. The older a token,
the nearer its trust region is to the policy that learns, and the weaker is the clip. Its use is a lag of 1 or more with
several updates a batch; with one update the old policy is the one that learns, for which DecoupledPPO makes no pass.

Metrics of the ratio, the clip and the step's KL are against the interpolated policy.

Source: Li et al. 2512.06547 (A-3PO), and AReaL's documentation of its "loglinear" proximal log-probs. AReaL's code
counts the weights that the updates begin with as the current version, so that its factor is (u - 1) / u, 0 at u = 0. It
cuts the weight at 5 and normalizes advantages over the batch.
"""

from __future__ import annotations

import jax

from jrl.algos import common, decoupled_ppo, grpo
from jrl.algos.contract import Facts, Needs, Objective, Tokens
from jrl.algos.decoupled_ppo import DecoupledPPO
from jrl.ops import decoupled
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class A3PO(DecoupledPPO):
    """Decoupled PPO whose old log-probs are interpolated."""


def check(config: A3PO, facts: Facts) -> None:
    decoupled_ppo.check(config, facts)
    if facts.truncated_sampling:
        raise ValueError(
            "A3PO puts its clip around the sampler's log-probs, and top-k, top-p and min-p raise these: ratios would "
            "not begin at 1. Leave them out, or use DecoupledPPO, which computes old log-probs."
        )


def needs(config: A3PO) -> Needs:
    return common.entropy_needs(config)._replace(old_logprobs=False, staleness=True)


def token_loss(config: A3PO, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    proximal = decoupled.interpolated_logprobs(
        tokens.logprobs, tokens.behaviour_logprobs, tokens.mask, -tokens.staleness, old_version=0, version=1
    )
    loss, metrics = decoupled_ppo.token_loss(config, tokens.replace(old_logprobs=proximal), state)
    # The interpolated policy is no learner that a sampler could be compared with.
    return loss, {name: value for name, value in metrics.items() if not name.startswith("mismatch")}


OBJECTIVE = Objective(
    config=A3PO,
    check=check,
    corrects_staleness=lambda config: True,
    needs=needs,
    advantages=grpo.advantages,
    token_loss=token_loss,
)
