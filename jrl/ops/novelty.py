"""Novelty of a completion relative to a history of earlier ones, by the cosine of n-gram counts."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrl.ops import groups, reduce
from jrl.ops.segments import next_column

Array = jax.Array

MULTIPLIER = 2654435761  # an odd number near 2^32 / golden ratio, after which high bits depend on all low ones


class History(NamedTuple):
    """The most recent completions."""

    embeddings: Array  # [H, D] float32
    count: Array  # [] int32, of all that were ever added


def no_history(size: int, width: int) -> History:
    """Returns an empty history with room for `size` completions of `width` numbers each."""
    return History(jnp.zeros((size, width), jnp.float32), jnp.int32(0))


def ngram_embedding(tokens: Array, mask: Array, *, max_order: int, width: int) -> Array:
    """Returns R23's emb(y) without a model: counts of n-grams, hashed to `width` numbers and scaled to length 1.

    n goes from 1 to max_order; n-grams do not cross gaps in the mask. Each is counted in the bucket of its hash, with a
    sign from the same hash, so that collisions cancel and the expected cosine of texts that share nothing is 0 at any
    length (Weinberger et al. 0902.2206). A row without a token is all 0.

    Args:
      tokens: [N, T] int32. mask: [N, T] bool, tokens of the completion.

    Returns:
      [N, D] float32.
    """
    ids = jnp.where(mask, tokens, 0).astype(jnp.uint32) + 1
    place = jnp.arange(width, dtype=jnp.uint32)
    counts = jnp.zeros((tokens.shape[0], width), jnp.float32)
    hashed, whole, following, inside = jnp.zeros_like(ids), jnp.ones_like(mask), ids, mask
    for order in range(1, max_order + 1):
        hashed, whole = (hashed * jnp.uint32(31) + following) * jnp.uint32(MULTIPLIER), whole & inside
        bucket = ((hashed + jnp.uint32(order)) >> jnp.uint32(7)) % jnp.uint32(width)
        sign = jnp.where((hashed >> jnp.uint32(6)) & 1, -1.0, 1.0)
        hits = (bucket[..., None] == place[None, None]) & whole[..., None]
        counts += jnp.sum(jnp.where(hits, sign[..., None], 0), axis=1)
        following, inside = next_column(following), next_column(inside)
    norm = jnp.sqrt(jnp.sum(counts**2, axis=1, keepdims=True))
    return counts / jnp.maximum(norm, 1e-6)


def nearest_cosine(embedding: Array, history: History, *, neighbors: int) -> Array:
    """Returns the mean cosine to the `neighbors` nearest completions of the history, or to all if it holds fewer, [N]
    float32; 0 for an empty history. R23's Nov_cos is minus that.

    Args:
      embedding: [N, D] float32 of length 1 (`ngram_embedding`).

    Source: curiosity-driven red teaming, 2402.19464, whose embeddings are a sentence model's.
    """
    size = history.embeddings.shape[0]
    there = jnp.arange(size) < history.count
    cosine = jnp.where(there[None, :], embedding @ history.embeddings.T, -jnp.inf)
    nearest = jax.lax.top_k(cosine, min(neighbors, size))[0]
    found = jnp.isfinite(nearest)
    return jnp.sum(jnp.where(found, nearest, 0), axis=1) / jnp.maximum(found.sum(axis=1), 1)


def novelty_reward(reward: Array, similarity: Array, *, coefficient: float) -> Array:
    """Returns R23: reward - coefficient * similarity, [N] float32 or wider.

    Args:
      reward: [N] float. similarity: [N] float, the mean cosine to earlier completions.
    """
    return reduce.widen(reward) - coefficient * similarity


def add_to_history(
    history: History, embedding: Array, counts: Array, group: Array, sample: Array, *, num_groups: int
) -> History:
    """Returns R23's history after adding the rows that count, which replace the oldest; if there are more rows than it
    holds, the last ones.

    Rows are added in the order of group and sample, whatever their order in the arrays.

    Args:
      embedding: [N, D] float32. counts: [N] bool. group: [N] int32 in 0..num_groups-1. sample: [N] int32, below N /
        num_groups rounded up for rows that count; (group, sample) identifies a row.
    """
    size, more = history.embeddings.shape[0], jnp.sum(counts).astype(jnp.int32)
    samples = -(-group.shape[0] // num_groups)
    name = group * samples + sample
    of_name = groups.count(name, counts, num_groups=num_groups * samples)
    rank = groups.to_rows(jnp.cumsum(of_name) - of_name, name).astype(jnp.int32)
    stays = counts & (more - rank <= size)
    slot = (history.count + rank) % size
    goes = stays[:, None] & (slot[:, None] == jnp.arange(size)[None, :])  # [N, H], at most one row for a slot
    there = jnp.where(stays[:, None], embedding, 0)
    # Under explicit axes the sum over sharded rows needs an output sharding: that of the history.
    where = jax.typeof(history.embeddings).sharding
    new = jnp.einsum("nh,nd->hd", goes.astype(there.dtype), there, out_sharding=None if where.mesh.empty else where)
    old = jnp.where(jnp.any(goes, axis=0)[:, None], new.astype(history.embeddings.dtype), history.embeddings)
    # Above the size only count % size matters, so it is reduced and never overflows.
    count = history.count + more
    return History(old, jnp.where(count > 2 * size, size + count % size, count).astype(jnp.int32))
