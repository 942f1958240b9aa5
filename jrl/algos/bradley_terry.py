"""Bradley-Terry: a reward model trained on pairs, by the log-odds that the preferred answer wins.

    s   = the reward head at the last token of a sequence
    l_u = -log sigmoid(s_preferred - s_other - margin) + center * (s_preferred + s_other)^2    per pair u   P1
    L   = mean over the pairs of the step

Sources: Bradley and Terry 1952; as a loss of reward models Ouyang et al. 2203.02155 eq. 1; the centring term, which
keeps the mean score of a pair at 0, Eisenstein et al. 2312.09244 section 2 (coefficient 0.01 there; off by default).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos.contract import Facts, Needs, Objective, Sequences, other_of_pair
from jrl.algos.paired import preferred_of
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class BradleyTerry:
    margin: float = 0.0  # by how much the preferred answer must score higher before the loss is that of a tie
    center: float | None = None  # weight of the squared sum of a pair's scores; None: scores may drift together


def check(config: BradleyTerry, facts: Facts) -> None:
    if not config.margin >= 0:
        raise ValueError(f"BradleyTerry.margin = {config.margin} must not be negative; 0 is usual")
    if config.center is not None and not config.center > 0:
        raise ValueError(f"BradleyTerry.center = {config.center} must be above 0, or None; 0.01 is usual")


def sequence_loss(config: BradleyTerry, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P1 at the preferred sequence of every pair, 0 elsewhere, [..., S] float32; and its metrics."""
    score = jnp.where(sequences.mask, sequences.score, 0)
    other = other_of_pair(score, sequences)
    preferred = preferred_of(sequences)
    difference = score - other
    loss = jax.nn.softplus(config.margin - difference)
    if config.center is not None:
        loss = loss + config.center * (score + other) ** 2
    accuracy = 0.5 * (1 + jnp.sign(difference))  # a tie is half right
    metrics = {"reward_model/accuracy": accuracy, "reward_model/margin": difference}
    return jnp.where(preferred, loss, 0), {
        name: jax.lax.stop_gradient(jnp.where(preferred, value, 0).astype(jnp.float32))
        for name, value in metrics.items()
    }


OBJECTIVE = Objective(
    config=BradleyTerry,
    check=check,
    needs=lambda config: Needs(logprobs=False, score=True),
    sequence_loss=sequence_loss,
    unit_size=2,
)
