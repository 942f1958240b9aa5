"""The entropy bonus. Entropies come from full logits (jrl.ops.logprobs, in chunks), never from the sampled token."""

from __future__ import annotations

import jax

from jrl.ops import reduce

Array = jax.Array


def entropy_bonus(entropy: Array, mask: Array, *, coefficient: float) -> Array:
    """Returns K5's term of the loss: -coefficient * entropy, 0 where masked.

    The sampled surprisal -logprobs is no substitute: its expected gradient on policy is zero.

    Args:
      entropy: [...] float, nats, differentiated, of the policy at the sampling temperature. mask: same shape, bool.

    Returns:
      [...] float32 or wider.

    Source: Williams and Peng 1991; off by default here, in verl and in TRL.
    """
    return -coefficient * reduce.masked(entropy, mask)
