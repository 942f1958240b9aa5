"""DPO: preferences without a reward model, by the log-odds that the policy gives to the preferred answer of a pair.

    u   = LP(y) - LP_ref(y), summed over the answer's tokens; D = u_preferred - u_other                     P0
    l_u = -log sigmoid(beta * D)                                                                            P5
    L   = mean over the pairs of the step

The reference is the policy as the stage found it. Peers: TRL's and open-instruct's default loss is this one.

Source: Rafailov et al. 2305.18290 eq. 7; beta 0.1 as there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos.contract import Facts, Needs, Objective, Sequences, other_of_pair
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class DPO:
    beta: float = 0.1  # strength of the tie to the reference: log-odds for a margin D of 1


def check(config: DPO, facts: Facts) -> None:
    if not config.beta > 0:
        raise ValueError(f"DPO.beta = {config.beta} must be above 0: at 0 the loss is constant. 0.1 is usual.")


def sequence_loss(config: DPO, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P5, -log sigmoid(beta * D), on the preferred sequence of each pair, [..., S], and metrics."""
    gain = jnp.where(sequences.mask, sequences.logprob, 0) - jnp.where(sequences.mask, sequences.ref_logprob, 0)
    preferred = sequences.mask & (sequences.label > 0.5)  # the loss of a pair is that of its preferred sequence
    other = other_of_pair(gain, sequences)
    margin = jnp.where(preferred, gain - other, 0)
    metrics = {
        "dpo/accuracy": jnp.where(margin == 0, 0.5, margin > 0),
        "dpo/margin": config.beta * margin,
        "dpo/preferred": gain,
        "dpo/other": other,
    }
    keep = lambda x: jax.lax.stop_gradient(jnp.where(preferred, x, 0).astype(jnp.float32))
    loss = jnp.where(preferred, jax.nn.softplus(-config.beta * margin), 0)
    return loss, {name: keep(value) for name, value in metrics.items()}


OBJECTIVE = Objective(
    config=DPO,
    check=check,
    needs=lambda config: Needs(reference=True),
    sequence_loss=sequence_loss,
    unit_size=2,
)
