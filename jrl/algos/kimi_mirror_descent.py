"""Kimi's mirror descent: a sequence-level policy gradient with a squared penalty on the distance to the last policy.

    A_i = R_i - mean_g                                                                       A4
    l_i = -A_i * LP_i + tau / 2 * (LP_i - LP_old_i)^2, LP the sum of a sequence's log-probs   L13
    L   = mean over sequences                                                                G2 of l_i on each token

`per` = 'token' makes LP a mean over the sequence, for answers of very different lengths. The penalty is relative to the
weights before the updates, so it acts from a batch's second update on, and then also on groups without a signal. Kimi
resets the optimizer's moments whenever that reference moves, which here is at every step; we keep them.

Source: Kimi k1.5, 2501.12599 section 2.3.2.
"""

from __future__ import annotations

from typing import Literal

import jax

from jrl.algos import common, dr_grpo, grpo
from jrl.algos.contract import Facts, Tokens
from jrl.ops import mirror_descent
from jrl.types import PyTree, traced

Array = jax.Array

LOSSES = {"sequence": mirror_descent.mirror_descent, "token": mirror_descent.mean_mirror_descent}


@traced
class KimiMirrorDescent:
    tau: float = 0.1  # strength of the pull to the policy that the updates of a step begin with
    per: Literal["sequence", "token"] = "sequence"  # whether LP is a sum over a sequence or a mean
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus


def check(config: KimiMirrorDescent, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=True)
    common.check_entropy(config)
    common.check_positive(config, {"tau": "without a pull nothing bounds the updates of a batch. 0.1 to 1 is usual."})
    if config.per not in LOSSES:
        raise ValueError(f"KimiMirrorDescent.per = {config.per!r} must be 'sequence' (a sum of log-probs) or 'token'.")


def token_loss(config: KimiMirrorDescent, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    loss = LOSSES[config.per](
        tokens.logprobs,
        tokens.old_logprobs,
        tokens.advantages,
        tokens.mask,
        tokens.segment,
        num_segments=tokens.num_segments,
        tau=config.tau,
    )
    return common.unweighted_loss(config, loss, tokens)


OBJECTIVE = grpo.OBJECTIVE._replace(
    config=KimiMirrorDescent,
    check=check,
    corrects_staleness=lambda config: False,
    needs=common.entropy_needs,
    advantages=dr_grpo.advantages,
    token_loss=token_loss,
)
