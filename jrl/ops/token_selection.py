"""Selection of the tokens to train on: those with high entropy."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import order_statistics

Array = jax.Array


def high_entropy(entropy: Array, mask: Array, *, share: float) -> Array:
    """Returns L23, the 80/20 rule: the tokens whose entropy is at least the (1 - share) quantile over the mask, [...].

    The quantile is over the whole arrays (an optimizer step, not a row), interpolated linearly; all tokens that tie at
    it are selected. The others stay in the loss's denominator. At least one token is selected, if there is one.

    Args:
      entropy: [...] float, nats; masked entries may be NaN. mask: same shape, bool. share: in (0, 1].

    Returns:
      [...] bool, a subset of the mask.

    Source: Wang et al. 2506.01939, share 0.2; TRL.
    """
    # (n - 1)(1 - share) elements lie below a linear quantile; those at or above it are the rest.
    count = jnp.floor(share * jnp.maximum(jnp.sum(mask) - 1, 0) * (1 + 1e-6)) + 1
    return order_statistics.largest(order_statistics.order_keys(entropy), mask, count)
