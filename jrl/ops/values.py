"""Value loss and explained variance of a value head. Returns carry no gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array


def clipped_value_loss(
    values: Array, old_values: Array, returns: Array, mask: Array, *, clip: float | None
) -> tuple[Array, Array]:
    """Returns V1, PPO's value loss, and where its clip binds:

        0.5 * max((v - Ret)^2, (v_old + clip(v - v_old, -clip, clip) - Ret)^2)

    A value that has moved by more than `clip` gets no gradient unless its error has grown. Like the policy's clip, this
    is written with `where` on the side that binds.

    Args:
      values: [...] float, differentiated. old_values, returns: same shape, float, fixed. mask: same shape, bool.
      clip: how far a value may move; None: no limit.

    Returns:
      loss [...] float32 or wider and bool [...], 0 and False where masked whatever the inputs hold there.

    Source: Schulman et al. 2017, "baselines" ppo2; TRL and Tunix clip at 0.2, verl and AReaL at 0.5.
    """
    values = reduce.masked(values, mask)
    old, returns = (reduce.masked(jax.lax.stop_gradient(x), mask) for x in (old_values, returns))
    plain = jnp.square(values - returns)
    if clip is None:
        return 0.5 * plain, jnp.zeros_like(mask)
    moved = values - old
    held = jnp.square(old + jnp.clip(jax.lax.stop_gradient(moved), -clip, clip) - returns)
    # Within the clip both are equal up to rounding.
    binds = (jnp.abs(moved) > clip) & (held > plain)
    return 0.5 * jnp.where(binds, held, plain), binds


def explained_variance(values: Array, returns: Array, mask: Array) -> Array:
    """Returns V4: 1 - var(Ret - v) / (var(Ret) + 1e-5) over the mask, variances over the count, [] float32 or wider.

    NaN if the returns are all equal. 1: perfect up to a constant; 0: no better than a constant.

    Args:
      values, returns: [...] float. mask: same shape, bool.

    Source: verl.
    """
    high, low = jnp.max(jnp.where(mask, returns, -jnp.inf)), jnp.min(jnp.where(mask, returns, jnp.inf))

    def variance(x: Array) -> Array:
        return reduce.masked_mean(jnp.square(reduce.masked(x, mask) - reduce.masked_mean(x, mask)), mask)

    left = variance(reduce.masked(returns, mask) - reduce.masked(values, mask))
    return jnp.where(high > low, 1 - left / (variance(returns) + 1e-5), jnp.nan)
