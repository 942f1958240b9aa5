"""Log-probabilities and entropies of given tokens, a chunk of positions at a time.

No [rows, L, V] array ever exists: logits live for one chunk, and are computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrl.types import Array


def token_logprobs(
    hidden: Array, tokens: Array, unembed: Callable[[Array], Array], *, temperature: Array, chunk: int
) -> tuple[Array, Array]:
    """Returns log-prob and entropy of every token given the tokens before it, [R, L] each, float32 or wider.

    Column t speaks about tokens[:, t] and is computed from hidden[:, t - 1]: this is the one place of that shift.
    Column 0 has no predecessor; its values are finite and meaningless, and masked by whoever uses them.

    Args:
      hidden: [R, L, D]. tokens: [R, L] int32.
      unembed: hidden [R, c, D] -> logits [R, c, V].
      temperature: [] float32; log-probs are of softmax(logits / temperature).
      chunk: positions whose logits exist at once.
    """
    rows, length, width = hidden.shape
    chunk = min(chunk, length)
    num_chunks = -(-length // chunk)
    padding = num_chunks * chunk - length
    before = jnp.concatenate([hidden[:, :1], hidden[:, :-1]], axis=1)
    before = jnp.pad(before, ((0, 0), (0, padding), (0, 0))).reshape(rows, num_chunks, chunk, width)
    targets = jnp.pad(tokens, ((0, 0), (0, padding))).reshape(rows, num_chunks, chunk)

    @jax.checkpoint
    def one(h: Array, t: Array) -> tuple[Array, Array]:
        logits = unembed(h)
        logits = logits / temperature.astype(logits.dtype)
        norm = jax.nn.logsumexp(logits, axis=-1)
        # A sum over the one matching entry, not a gather: the vocabulary may be sharded.
        vocabulary = jnp.arange(logits.shape[-1], dtype=t.dtype)
        chosen = jnp.where(t[..., None] == vocabulary[None, None, :], logits, 0).sum(-1)
        probabilities = jnp.exp(logits - norm[..., None])
        return chosen - norm, norm - (probabilities * logits).sum(-1)

    def step(carry: None, xs: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        return carry, one(*xs)

    _, (logprobs, entropy) = jax.lax.scan(step, None, (jnp.moveaxis(before, 1, 0), jnp.moveaxis(targets, 1, 0)))
    flat = [jnp.moveaxis(x, 0, 1).reshape(rows, num_chunks * chunk)[:, :length] for x in (logprobs, entropy)]
    return flat[0], flat[1]
