"""Log-probability and entropy under softmax(logits / temperature), with their derivative written out.

With z = logits / T, p = softmax(z) and H the entropy:

    d log p_t / d z_v = [v = t] - p_v
    d H / d z_v       = -p_v (log p_v + H)

This backward pass is one expression over the logits; JAX's automatic one reads them once per forward operation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


@jax.custom_vjp
def logprob_and_entropy(logits: Array, tokens: Array, temperature: Array) -> tuple[Array, Array]:
    """Returns (log-prob of the token, entropy), both [...] in the dtype of the logits.

    Args:
      logits: [..., V] float32 or wider, finite. The vocabulary may be sharded.
      tokens: [...] int32. temperature: [] float.
    """
    return _forward(logits, tokens, temperature)[0]


def _forward(logits: Array, tokens: Array, temperature: Array) -> tuple[tuple[Array, Array], tuple]:
    z = logits / temperature.astype(logits.dtype)
    norm = jax.nn.logsumexp(z, axis=-1)
    # A sum over the one matching entry, not a gather: the vocabulary may be sharded.
    chosen = jnp.where(_matches(tokens, z), z, 0).sum(-1)
    entropy = norm - (jnp.exp(z - norm[..., None]) * z).sum(-1)
    return (chosen - norm, entropy), (logits, tokens, temperature, norm, entropy)


def _backward(residuals: tuple, gradient: tuple[Array, Array]) -> tuple[Array, None, Array]:
    logits, tokens, temperature, norm, entropy = residuals
    d_logprob, d_entropy = (g[..., None] for g in gradient)
    z = logits / temperature.astype(logits.dtype)
    log_p = z - norm[..., None]
    p = jnp.exp(log_p)
    d_z = d_logprob * (_matches(tokens, z) - p) - d_entropy * p * (log_p + entropy[..., None])
    d_temperature = -(d_z * z).sum() / temperature.astype(z.dtype)
    return d_z / temperature.astype(z.dtype), None, d_temperature.astype(temperature.dtype)


def _matches(tokens: Array, z: Array) -> Array:
    vocabulary = jnp.arange(z.shape[-1], dtype=tokens.dtype)
    return tokens[..., None] == vocabulary.reshape((1,) * tokens.ndim + (-1,))


logprob_and_entropy.defvjp(_forward, _backward)
