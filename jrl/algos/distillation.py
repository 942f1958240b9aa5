"""Distillation: the policy learns a teacher's distribution at every token of stored text.

    l_t = D(policy, teacher) at the state before y_t, over the whole vocabulary              P37
    L   = mean over all tokens of the step                                                   G1

D is the forward KL by default, the cross-entropy with the teacher's distribution; `divergence` selects the reverse KL
or the Jensen-Shannon divergence instead. The teacher is the role `teacher`, trained by an earlier stage. For text that
the policy samples use GKD; for a teacher's text without its distribution use SFT.

Source: Hinton et al. 1503.02531; Kim and Rush 1606.07947.
"""

from __future__ import annotations

import jax

from jrl.algos.contract import Facts, Needs, Objective, Tokens
from jrl.ops import reduce
from jrl.ops.divergence import DIVERGENCES, Divergence
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class Distillation:
    divergence: Divergence = "forward"  # from the teacher: forward is KL(teacher, policy), reverse KL(policy, teacher)


def check(config: Distillation, facts: Facts) -> None:
    check_divergence("Distillation", config.divergence)


def check_divergence(name: str, divergence: str) -> None:
    """Raises ValueError for an unknown divergence."""
    if divergence not in DIVERGENCES:
        raise ValueError(f"{name}.divergence = {divergence!r} must be one of {', '.join(map(repr, DIVERGENCES))}.")


def token_loss(config: Distillation, tokens: Tokens, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P37, the divergence from the teacher at every token, [..., L], 0 where masked; and it as a metric."""
    loss = reduce.masked(tokens.divergence, tokens.mask)
    return loss, {"distillation/divergence": jax.lax.stop_gradient(loss)}


OBJECTIVE = Objective(
    config=Distillation,
    check=check,
    needs=lambda config: Needs(divergence=config.divergence),
    token_loss=token_loss,
)
