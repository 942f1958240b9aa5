"""R19: PPO on rewards of any scale, with DreamerV3's tricks. Its two-hot values and symlog are in two_hot.py (V2).

Source: Sullivan et al. 2310.17805, who find no general gain over clipped rewards; the tricks help if rewards have no
known scale.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import order_statistics, reduce

Array = jax.Array

FEWEST = 20  # returns per batch; with fewer, percentiles are unreliable


def percentile_range(
    returns: Array, mask: Array, low: Array, high: Array, *, decay: float
) -> tuple[Array, Array, Array]:
    """Returns R19's S, the difference of moving 95th and 5th percentiles of returns, and these percentiles.

        low <- decay * low + (1 - decay) * q05,    high likewise with q95,    S = high - low

    Percentiles are interpolated between neighbors. A batch with fewer than 20 returns leaves them as they are.

    Args:
      returns: [...] float; masked entries may be NaN. mask: same shape, bool. low, high: [] float, NaN before the first
        batch, whose percentiles they become. decay: 0.99 is usual.

    Returns:
      (S [], low [], high []), float32 or wider; S is 0 while there is none.
    """
    first, enough = jnp.isnan(low), jnp.sum(mask) >= FEWEST
    moved = lambda old, new: jnp.where(enough, jnp.where(first, new, decay * old + (1 - decay) * new), old)
    low, high = moved(low, _quantile(returns, mask, 0.05)), moved(high, _quantile(returns, mask, 0.95))
    return jnp.where(jnp.isnan(low), 0, high - low), low, high


def _quantile(x: Array, mask: Array, q: float) -> Array:
    """Returns the q-quantile of the masked elements, interpolated between neighbors, []; -inf where there are none."""
    x = reduce.masked(x, mask)
    keys = order_statistics.order_keys(x)
    position = jnp.maximum(q * (jnp.sum(mask) - 1), 0)

    def at(rank: Array) -> Array:
        found = order_statistics.largest_key(_rank_of, keys, mask, rank)
        return jnp.max(jnp.where(mask & (keys == found), x, -jnp.inf))

    below, above = at(jnp.floor(position)), at(jnp.ceil(position))
    return below + (position - jnp.floor(position)) * jnp.where(above > below, above - below, 0)


def _rank_of(key: Array, keys: Array, mask: Array, rank: Array) -> Array:
    return jnp.sum(mask & (keys < key)) <= rank


def percentile_scaled(advantages: Array, scale: Array) -> Array:
    """Returns R19's advantages / max(1, S), [...] float32 or wider: scaled down if returns are large, never scaled up.

    Args:
      advantages: [...] float. scale: [] float, S of `percentile_range`.
    """
    return reduce.widen(advantages) / jnp.maximum(scale, 1)


def unimix(logprobs: Array, *, share: float) -> Array:
    """Returns R19's log((1 - share) * p + share / V), [..., V] float32 or wider: every token keeps some probability.

    Sampler and learner must both use it, and for a large vocabulary it is noise; no jrl objective does.

    Args:
      logprobs: [..., V] float, normalized. share: 0.01 is usual.
    """
    lp = reduce.widen(logprobs)
    return jnp.logaddexp(jnp.log1p(-share) + lp, jnp.log(share / lp.shape[-1]))
