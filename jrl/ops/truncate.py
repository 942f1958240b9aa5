"""Truncated sampling distributions: top-k, top-p and min-p as a threshold on the logits, found without sorting the
vocabulary.

Every one of them keeps the tokens at or above some logit. The threshold is found exactly, by building from its highest
bit down the largest number whose tail {v: logit >= number} still holds enough (32 counts of the vocabulary in float32,
64 in float64). Values may therefore be traced: changing them does not recompile. Ties at the threshold are kept.

Order: top-k, then top-p on what top-k left renormalized, then min-p (as in transformers; vLLM puts min-p first).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrl.ops.order_statistics import order_keys

Array = jax.Array


def support(logits: Array, top_k: Array | None = None, top_p: Array | None = None, min_p: Array | None = None) -> Array:
    """Returns S1's mask [..., V] bool of the tokens that may be drawn. At least the most probable one is kept.

    top_k keeps the k highest logits; top_p the fewest highest tokens whose mass reaches p; min_p those whose
    probability is at least min_p times the highest. None switches a rule off.

    Args:
      logits: [..., V] float32 or wider, already divided by the temperature.
      top_k: [] or [..., 1] int32, at least 1. top_p: same shape, float, in (0, 1]. min_p: same shape, float, in [0, 1].

    Source: Holtzman et al. 2020 (top-p); Nguyen et al. 2024 (min-p).
    """
    image = order_keys(logits)
    keep = logits > -jnp.inf
    if top_k is not None:
        keep &= support_of_size(logits, jnp.maximum(top_k, 1))
    if top_p is not None:
        mass = jnp.where(keep, jnp.exp(logits - logits.max(axis=-1, keepdims=True)), 0)
        # Above 0, even where p is so small that the product rounds to it: the likeliest token has a mass of 1.
        enough = jnp.maximum(top_p * mass.sum(axis=-1, keepdims=True), jnp.finfo(mass.dtype).tiny)
        tail = lambda edge: jnp.where(image >= edge, mass, 0).sum(axis=-1, keepdims=True) >= enough
        # At p = 1 tokens whose mass is lost in the rounding of the sum must stay too.
        keep &= (image >= _largest(tail, image)) | (jnp.asarray(top_p) >= 1)
    if min_p is not None:
        keep &= logits >= logits.max(axis=-1, keepdims=True) + jnp.log(jnp.asarray(min_p, logits.dtype))
    return keep


def support_of_size(logits: Array, support_size: Array) -> Array:
    """Returns the mask [..., V] bool of the `support_size` highest logits, and of any that tie with the last of them.

    With the support size from the sampler this recovers the support, whatever rule made it.

    Args:
      logits: [..., V] float32 or wider. support_size: [] or [..., 1] int32; above V it keeps all.
    """
    image = order_keys(logits)
    support_size = jnp.minimum(support_size, logits.shape[-1])
    return image >= _largest(
        lambda edge: (image >= edge).sum(axis=-1, keepdims=True, dtype=jnp.int32) >= support_size, image
    )


def _largest(holds: Callable[[Array], Array], image: Array) -> Array:
    """Returns the largest integer [..., 1] for which `holds` is true; it must be true at 0 and fall at most once."""
    width = image.dtype.itemsize * 8
    start = image[..., :1] & 0  # not a literal: the carry must vary over the same mesh axes as the logits

    def step(i: Array, edge: Array) -> Array:
        raised = edge | (jnp.array(1, image.dtype) << (width - 1 - i).astype(image.dtype))
        return jnp.where(holds(raised), raised, edge)

    return jax.lax.fori_loop(0, width, step, start)
