"""Log-probabilities and entropies of given tokens, one chunk of positions at a time, only where the mask is set.

No [rows, L, V] array ever exists: logits exist for one chunk and are recomputed in the backward pass. Most positions of
a packed batch are never read (prompts, padding), so each row's masked-in positions are moved together first, and chunks
that are empty in every row are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jrl.ops.categorical import logprob_and_entropy
from jrl.ops.members import most_of_members
from jrl.types import Array, PyTree

CHUNK = "chunk"  # named scope of the condition that skips empty chunks; `jrl plan` finds it by this name


def before(hidden: Array) -> Array:
    """Returns the hidden states that columns are computed from, [R, L, D]: that of the previous column."""
    return jnp.concatenate([hidden[:, :1], hidden[:, :-1]], axis=1)


def token_logprobs(
    hidden: Array,
    tokens: Array,
    mask: Array,
    unembed: Callable[[Array], Array],
    *,
    temperature: Array,
    chunk: int,
    predictor: Callable[[Array], Array] = before,
) -> tuple[Array, Array]:
    """Returns log-prob and entropy of every token given the tokens before it, [R, L] each, float32 or wider.

    Column t describes tokens[:, t] and is computed from hidden[:, t - 1]; `before` is the only place of that shift.
    Column 0 has no predecessor; if it is in the mask, its values are finite but meaningless.

    Args:
      hidden: [R, L, D]. tokens: [R, L] int32.
      mask: [R, L] bool, the positions to compute; elsewhere both results are 0.
      unembed: hidden [R, c, D] -> logits [R, c, V].
      temperature: [] float32; log-probs are of softmax(logits / temperature).
      chunk: positions of a row whose logits exist at once.
      predictor: hidden -> the hidden states that columns are computed from; for shares of rows
        (jrl.device.row_shares) it is the identity, and tokens and mask are those of the next column.
    """

    def chunk_logprobs(h: Array, t: Array) -> tuple[Array, Array]:
        return logprob_and_entropy(unembed(h), t, temperature)

    return by_chunk(chunk_logprobs, (predictor(hidden), tokens), mask, chunk=chunk)


def state_values(
    hidden: Array,
    mask: Array,
    unembed: Callable[[Array], Array],
    *,
    temperature: Array,
    chunk: int,
    predictor: Callable[[Array], Array] = before,
) -> Array:
    """Returns the soft value of every token's state, logsumexp(logits / temperature), [R, L] float32 or wider, 0
    outside the mask; plus the log-prob it is the token's logit / temperature. Arguments as in `token_logprobs`.
    """

    def one(h: Array) -> Array:
        logits = unembed(h)
        return jax.nn.logsumexp(logits / temperature.astype(logits.dtype), axis=-1)

    return by_chunk(one, (predictor(hidden),), mask, chunk=chunk)


def squared_probabilities(
    hidden: Array,
    mask: Array,
    unembed: Callable[[Array], Array],
    *,
    temperature: Array,
    chunk: int,
    predictor: Callable[[Array], Array] = before,
) -> Array:
    """Returns sum_v p_v^2 over the vocabulary for every token's distribution (A10's OTB), [R, L] float32 or wider, 0
    outside the mask: the probability that two draws are equal. Arguments as in `token_logprobs`.
    """

    def one(h: Array) -> Array:
        logits = unembed(h)
        scaled = logits / temperature.astype(logits.dtype)
        return jnp.exp(jax.nn.logsumexp(2 * scaled, axis=-1) - 2 * jax.nn.logsumexp(scaled, axis=-1))

    return by_chunk(one, (predictor(hidden),), mask, chunk=chunk)


def likeliest_tokens(
    hidden: Array,
    tokens: Array,
    mask: Array,
    unembed: Callable[[Array], Array],
    *,
    chunk: int,
    predictor: Callable[[Array], Array] = before,
) -> Array:
    """Returns the likeliest token at each position given the tokens before it (P34's IFT), [R, L] int32; outside the
    mask the token itself; at ties the first (E11). Arguments as in `token_logprobs`; no gradient passes.
    """

    def one(h: Array) -> Array:
        return jnp.argmax(unembed(h), axis=-1).astype(jnp.int32)

    return jnp.where(mask, by_chunk(one, (predictor(hidden),), mask, chunk=chunk), tokens)


def by_chunk(one: Callable[..., PyTree], arrays: Sequence[Array], mask: Array, *, chunk: int) -> PyTree:
    """Returns what `one` gives for every position in the mask, [R, L] each, 0 elsewhere.

    Args:
      one: chunks of the arrays, [R, c, ...] each -> a tree of [R, c], each position by itself.
      arrays: [R, L, ...] each. mask: [R, L] bool. chunk: c.
    """
    rows, length = mask.shape
    chunk = min(chunk, length)
    num_chunks = -(-length // chunk)
    padding = num_chunks * chunk - length
    order = jnp.argsort(~mask, axis=1, stable=True)  # masked-in positions first
    back = jnp.argsort(order, axis=1)

    def chunked(x: Array) -> Array:
        x = permute(x, order, back) if x.ndim > 2 else jnp.take_along_axis(x, order, axis=1)
        x = jnp.pad(x, ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(rows, num_chunks, chunk, *x.shape[2:])

    chunks = [chunked(x) for x in arrays]
    # Chunks with a masked-in position in some row: of a population, in some row of any member.
    filled = most_of_members(-(-mask.sum(axis=1).max() // chunk))
    shapes = jax.eval_shape(one, *(x[:, 0] for x in chunks))

    def nothing(*given: Array) -> PyTree:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, out_sharding=s.sharding), shapes)

    # Around the condition, not inside: it would keep a copy of the head for every chunk.
    @jax.checkpoint
    def some(i: Array, *given: Array) -> PyTree:
        with jax.named_scope(CHUNK):
            return jax.lax.cond(i < filled, one, nothing, *given)

    def step(i: Array, xs: Sequence[Array]) -> tuple[Array, PyTree]:
        return i + 1, some(i, *xs)

    moved = [jnp.moveaxis(x, 1, 0) for x in chunks]
    _, chunks_read = jax.lax.scan(step, jnp.zeros((), jnp.int32), moved)

    def in_place(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1).reshape(rows, num_chunks * chunk)[:, :length]
        return jnp.where(mask, permute(x, back, order), 0)

    return jax.tree.map(in_place, chunks_read)


@jax.custom_vjp
def permute(x: Array, order: Array, back: Array) -> Array:
    """Returns x [R, L, ...] with its columns in another order, out[r, i] = x[r, order[r, i]].

    `back` undoes `order`. The gradient is a gather along it; JAX's own would be a scatter, which is slow.
    """
    return jnp.take_along_axis(x, order.reshape(order.shape + (1,) * (x.ndim - 2)), axis=1)


def _permute_forward(x: Array, order: Array, back: Array) -> tuple[Array, tuple[Array, Array]]:
    return permute(x, order, back), (order, back)


def _permute_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, None, None]:
    order, back = residuals
    return permute(gradient, back, order), None, None


permute.defvjp(_permute_forward, _permute_backward)
