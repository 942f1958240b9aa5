"""The geometric mixture of two policies (S14)."""

from __future__ import annotations

import jax

from jrl.ops import reduce

Array = jax.Array


def mixed_logits(logits: Array, reference_logits: Array, *, weight: float) -> Array:
    """Returns S14: (1 - weight) * logits + weight * reference_logits, whose softmax is the normalized geometric mean of
    both policies.

    Args:
      logits, reference_logits: [..., V] float. weight: 0: the policy, 1: the reference.

    Returns:
      [..., V] float32 or wider.

    Source: Munos et al. 2312.00886 (Nash-MD), 0.5; TRL mixes raw logits too.
    """
    return (1 - weight) * reduce.widen(logits) + weight * reduce.widen(reference_logits)
