"""Weights and choices of supervised fine-tuning beside the plain mean over tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array


def propagated_weights(logprobs: Array, mask: Array, *, discount: Array | float) -> Array:
    """Returns P34's weights of IFT, w_t proportional to sum_{j >= t} discount^(j - t) (-lp_j / len), with a mean of 1
    over each row's mask, [..., T] float32 or wider; 0 where masked. They carry no gradient.

    A token is worth as much as the loss that follows from it. j counts tokens of the mask. Where every lp is 0 the
    weights are 1.

    Source: Intuitive Fine-Tuning, Hua et al. 2405.11870, eq. 9 and its code; discount 0.95 there.
    """
    surprise = jax.lax.stop_gradient(-reduce.masked(logprobs, mask))
    counts = mask.sum(-1, keepdims=True)

    def back(following: Array, here: tuple[Array, Array]) -> tuple[Array, Array]:
        loss, learned = here
        total = jnp.where(learned, loss + discount * following, following)
        return total, jnp.where(learned, total, 0)

    by_token = jnp.moveaxis(surprise, -1, 0), jnp.moveaxis(mask, -1, 0)
    _, sums = jax.lax.scan(back, jnp.zeros_like(surprise[..., 0]), by_token, reverse=True)
    sums = jnp.moveaxis(sums, 0, -1)
    total = sums.sum(-1, keepdims=True)
    even = mask.astype(sums.dtype)
    return jnp.where(total > 0, sums * counts / jnp.where(total > 0, total, 1), even)


def closest_refinement(feedback: Array, refinements: Array, valid: Array) -> Array:
    """Returns P34's choice of ILF, [...] int32: the refinement whose embedding is most like the feedback's, by their
    cosine; of equal ones the first (E11), -1 where none is valid.

    Args:
      feedback: [..., D] float. refinements: [..., K, D] float. valid: [..., K] bool, such as not empty.

    Source: Scheurer et al. 2303.16755 section 2.2 (InstructRM there asks a model instead).
    """
    unit = lambda x: x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
    candidates = reduce.masked(refinements, jnp.broadcast_to(valid[..., None], refinements.shape))
    likeness = jnp.einsum("...d,...kd->...k", unit(reduce.widen(feedback)), unit(candidates))
    best = jnp.argmax(jnp.where(valid, likeness, -jnp.inf), axis=-1).astype(jnp.int32)
    return jnp.where(valid.any(-1), best, -1)
