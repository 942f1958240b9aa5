"""R9: the reward of a completion that did not end by itself. `stopped` is True for a stop token and for a stop string;
with several turns the last one counts.

Peers: N+ replaces the reward, TRL's online trainers subtract, NeMo and OpenRLHF scale (a negative factor replaces
there), AReaL scales by 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array


def replace_reward(reward: Array, stopped: Array, *, value: float) -> Array:
    """Returns R9a, the EOS trick: `value` if the completion did not stop, [N] float32 or wider; -1 is usual
    (R30, detail 18).

    Args:
      reward: [N] float. stopped: [N] bool.

    Source: N+, 2403.17031, for a reward model whose demonstrations score 0 on average (R10).
    """
    return jnp.where(stopped, reduce.widen(reward), value)


def subtract_penalty(reward: Array, stopped: Array, *, penalty: float) -> Array:
    """Returns R9b: reward - penalty where the completion did not stop, [N] float32 or wider. Args as above."""
    return reduce.widen(reward) - jnp.where(stopped, 0, penalty)


def scale_reward(reward: Array, stopped: Array, *, factor: float) -> Array:
    """Returns R9c: factor * reward where the completion did not stop, [N] float32 or wider. Args as above."""
    return jnp.where(stopped, 1, factor) * reduce.widen(reward)
