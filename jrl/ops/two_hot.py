"""Values as a distribution over bins, on a logarithmic scale: a critic that is robust to the scale of rewards."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array


def symlog(x: Array) -> Array:
    """Returns sign(x) * log(1 + |x|), the scale of V2's bins; like x near 0, like a logarithm far off."""
    x = reduce.widen(x)
    return jnp.sign(x) * jnp.log1p(jnp.abs(x))


def symexp(x: Array) -> Array:
    """Returns sign(x) * (exp(|x|) - 1), the inverse of `symlog` (V2)."""
    x = reduce.widen(x)
    return jnp.sign(x) * jnp.expm1(jnp.abs(x))


def bins_of(count: int, limit: int) -> Array:
    """Returns the bins of V2 on the scale of symlog, [count] float32: evenly spaced from -limit to limit."""
    return jnp.linspace(-limit, limit, count, dtype=jnp.float32)


def two_hot(x: Array, bins: Array) -> Array:
    """Returns the weights of V2 over the bins: x lies between two of them, whose weights sum to 1 and average to x.

        weight of b_j = (b_{j+1} - x) / (b_{j+1} - b_j), of b_{j+1} the rest

    x is clipped to the range of the bins.

    Args:
      x: [...] float, already on the scale of the bins. bins: [K] float, ascending, K of 2 or more.

    Returns:
      [..., K] float32 or wider.

    Source: Hafner et al. 2301.04104 section "critic learning"; rlax.
    """
    bins = reduce.widen(bins)
    x = jnp.clip(reduce.widen(x), bins[0], bins[-1])[..., None]
    bins = bins.reshape((1,) * (x.ndim - 1) + bins.shape)
    width = bins[..., 1:] - bins[..., :-1]
    # The share of the way from each bin to the next that x has come: 1 before its bin, 0 after it.
    passed = jnp.clip((x - bins[..., :-1]) / width, 0, 1)
    before = jnp.concatenate([jnp.ones_like(x), passed], axis=-1)
    after = jnp.concatenate([passed, jnp.zeros_like(x)], axis=-1)
    return before - after


def two_hot_loss(logits: Array, returns: Array, mask: Array, *, bins: Array) -> Array:
    """Returns V2: the cross-entropy of the head's distribution to the two-hot weights of symlog(returns).

    Args:
      logits: [..., K] float, differentiated. returns: [...] float, fixed; masked entries may be NaN. mask: [...] bool.
      bins: [K] float, on the scale of symlog: 256 from -20 to 20 is usual.

    Returns:
      [...] float32 or wider, 0 where masked.

    Source: Sullivan et al. 2310.17805 (DreamerV3's tricks on PPO).
    """
    target = two_hot(symlog(reduce.masked(jax.lax.stop_gradient(returns), mask)), bins)
    logprobs = jax.nn.log_softmax(jnp.where(mask[..., None], reduce.widen(logits), 0), axis=-1)
    return jnp.where(mask, -jnp.sum(target * logprobs, axis=-1), 0)


def two_hot_value(logits: Array, *, bins: Array) -> Array:
    """Returns what a head of V2 expects, symexp(sum of softmax(logits) * bins). [..., K] -> [...] float32 or wider."""
    probability = jax.nn.softmax(reduce.widen(logits), axis=-1)
    return symexp(jnp.sum(probability * bins.reshape((1,) * (probability.ndim - 1) + bins.shape), axis=-1))


def out_of_range(returns: Array, mask: Array, *, bins: Array) -> Array:
    """Returns where V2 clips its target, [...] bool: the share of it says whether the bins are wide enough."""
    x = symlog(reduce.masked(returns, mask))
    return mask & ((x < bins[0]) | (x > bins[-1]))
