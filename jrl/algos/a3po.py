"""A-3PO: decoupled PPO that interpolates the proximal policy instead of computing it with a pass over the batch.

    u_t    = versions between the weights that drew the token and the weights before the updates
    prox_t = behaviour_logprobs_t + u_t / (u_t + 1) * sg(logprobs_t - behaviour_logprobs_t)
    w_t    = min(exp(prox_t - behaviour_logprobs_t), cap)
    l_t    = w_t * max(-rho_t * A_i, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_i),  rho_t = exp(logprobs_t - prox_t)
                                                                                             L11
    A and L are those of DecoupledPPO                                                        A3, G1

The trained weights count as one version after the weights before the updates. So for a fresh token (u = 0) the proximal
policy is the one that drew it, with weight 1; this is exact up to the sampler-learner mismatch. A truncated sampler is
refused, since its log-probs are of another distribution. The older a token, the closer its trust region is to the
current policy and the weaker the clip. Use it with a lag of 1 or more and several updates per batch; with one update
the proximal policy is the current one, and DecoupledPPO needs no pass either.

The metrics of the ratio, the clip and the step's KL are relative to the interpolated policy.

Source: Li et al. 2512.06547 (A-3PO), and AReaL's documentation of its "loglinear" proximal log-probs. AReaL's code
counts the weights before the updates as the current version, so its factor is (u - 1) / u, 0 at u = 0. It caps the
weight at 5 and normalizes advantages over the batch.
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
    # Sampler-learner mismatch is undefined here: the interpolated log-probs are not the learner's.
    return loss, {name: value for name, value in metrics.items() if not name.startswith("mismatch")}


OBJECTIVE = Objective(
    config=A3PO,
    check=check,
    corrects_staleness=lambda config: True,
    needs=needs,
    advantages=grpo.advantages,
    token_loss=token_loss,
)
