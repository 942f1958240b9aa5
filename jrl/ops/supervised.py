"""Weights and choices of supervised fine-tuning beside the plain mean over tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce
from jrl.ops.segments import segment_mean, to_tokens

Array = jax.Array


def propagated_weights(
    logprobs: Array, mask: Array, segment: Array, *, num_segments: int, discount: Array | float
) -> Array:
    """Returns P34's weights of IFT, w_t proportional to sum_{j >= t} discount^(j - t) (-lp_j / len), with a mean of 1
    over each sequence's mask, [..., L] float32 or wider; 0 where masked. They carry no gradient.

    A token is worth as much as the loss that follows from it. j counts tokens of the mask. Where every lp of a sequence
    is 0 its weights are 1.

    Args:
      logprobs: [..., L] float, of packed rows. mask: [..., L] bool. segment: [..., L] int32, the sequence of a token,
        whose tokens are adjacent.

    Source: Intuitive Fine-Tuning, Hua et al. 2405.11870, eq. 9 and its code; discount 0.95 there.
    """
    surprise = jax.lax.stop_gradient(-reduce.masked(logprobs, mask))

    def back(following: tuple[Array, Array], here: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        loss, learned, sequence = here
        after = jnp.where(following[1] == sequence, following[0], 0)
        total = jnp.where(learned, loss + discount * after, after)
        return (total, sequence), jnp.where(learned, total, 0)

    by_token = tuple(jnp.moveaxis(x, -1, 0) for x in (surprise, mask, segment))
    start = reduce.zeros_of_rows(surprise), reduce.zeros_of_rows(segment) - 1
    sums = jnp.moveaxis(jax.lax.scan(back, start, by_token, reverse=True)[1], 0, -1)
    mean = segment_mean(sums, mask, segment, num_segments=num_segments)
    mean = to_tokens(mean, segment)
    return jnp.where(mean > 0, sums / jnp.where(mean > 0, mean, 1), mask.astype(sums.dtype))


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
