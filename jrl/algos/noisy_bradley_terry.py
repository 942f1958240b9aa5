"""Bradley-Terry that trusts a label as far as other reward models agree with it.

    strength = mean over the models of r_w - r_l, without a gradient; m = s_w - s_l of the trained model
    strength < flip_below:   l_u = -log sigmoid(-m), the label is treated as wrong                         P2
    strength < soft_below:   l_u = -(1 - noise) log sigmoid(m) - noise log sigmoid(-m)                     P2
    else:                    l_u = -log sigmoid(m - strength), a clear pair must win by as much            P2
    L   = mean over the pairs of the step

The models are roles that earlier stages trained on the same pairs, each in a different order. The paper's bounds are
quantiles of the strength over the data, about the lowest 10 and 20 %; read them off the metric pairs/strength.

Source: Wang et al. 2401.06080 sections 2.3 and 2.4.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos.contract import Facts, Needs, Objective, Sequences, other_of_pair
from jrl.algos.paired import preferred_of, share
from jrl.ops import pair_losses
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class NoisyBradleyTerry:
    models: tuple[str, ...] = ("first", "second", "third")  # the roles whose scores say how strong a preference is
    flip_below: float = -1.0  # strength below which a label is taken for wrong
    soft_below: float = 0.0  # strength below which it may be wrong
    noise: float = 0.1  # probability that it is, then


def check(config: NoisyBradleyTerry, facts: Facts) -> None:
    if not config.models:
        raise ValueError("NoisyBradleyTerry.models is empty; name roles that earlier stages train, ten are usual")
    if not config.flip_below <= config.soft_below:
        raise ValueError(
            f"NoisyBradleyTerry.flip_below = {config.flip_below} must not be above soft_below = {config.soft_below}: "
            "the weakest preferences are turned around"
        )
    if len(config.models) == 1 and config.flip_below > -1e6:
        # A single model's mistakes would become labels.
        raise ValueError(
            f"NoisyBradleyTerry.flip_below = {config.flip_below} turns labels around by the word of one model, "
            f"{config.models[0]!r}; name several in models, or set it to -1e9"
        )
    share("NoisyBradleyTerry.noise", config.noise, 0.1)


def sequence_loss(config: NoisyBradleyTerry, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P2 at the preferred sequence of every pair, 0 elsewhere, [..., S] float32; and its metrics."""
    score, value = (jnp.where(sequences.mask, x, 0) for x in (sequences.score, sequences.value))
    preferred = preferred_of(sequences)
    difference = jnp.where(preferred, score - other_of_pair(score, sequences), 0)
    strength = jnp.where(preferred, value - other_of_pair(value, sequences), 0)
    loss = pair_losses.noisy_preference(difference, strength, config.flip_below, config.soft_below, config.noise)
    metrics = {
        "reward_model/accuracy": 0.5 * (1 + jnp.sign(difference)),
        "reward_model/margin": difference,
        "pairs/strength": strength,
        "pairs/flipped": (strength < config.flip_below).astype(jnp.float32),
    }
    logged = lambda x: jax.lax.stop_gradient(jnp.where(preferred, x, 0).astype(jnp.float32))
    return jnp.where(preferred, loss, 0), {name: logged(x) for name, x in metrics.items()}


OBJECTIVE = Objective(
    config=NoisyBradleyTerry,
    check=check,
    needs=lambda config: Needs(logprobs=False, score=True, scored_by=config.models),
    sequence_loss=sequence_loss,
    unit_size=2,
)
