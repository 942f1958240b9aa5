"""The age of sampled tokens in policy versions (S12), and the number of rows that may start under a bound on it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def token_staleness(version: Array, token_version: Array, action_mask: Array) -> Array:
    """Returns S12's u_t = version - token_version, [...] int32; 0 where the policy did not sample the token.

    Args:
      version: [] int32, of the weights that learn. token_version: [...] int32, of those that drew the token.
      action_mask: same shape, bool.
    """
    return jnp.where(action_mask, version - token_version, 0)


def row_staleness(version: Array, token_version: Array, action_mask: Array) -> Array:
    """Returns S12's u of a row, that of its oldest token: version - min_t token_version, [...] int32; 0 where the
    policy sampled none.

    Args:
      version: [] int32. token_version: [..., T] int32. action_mask: same shape, bool.
    """
    return jnp.max(token_staleness(version, token_version, action_mask), axis=-1, initial=0)


def rows_to_start(version: int, accepted: int, running: int, *, lag: int, batch: int, most_running: int) -> int:
    """Returns S12's capacity: min(most_running - running, (lag + version + 1) * batch - (accepted + running)), the rows
    that a sampler may start now so that none is older than `lag` when it is learned from; 0 or less: none.

    Args:
      version: updates done. accepted: rows that are finished, since the beginning; after a restart version * batch.
      running: rows that are being sampled. batch: rows an update. most_running: rows that fit at once.

    Source: AReaL, Fu et al. 2505.24298. `Online.lag` has the bound with equality: update t learns from version
    max(0, t - lag), by a queue of `lag` draws of a batch each. So no row is ever dropped for its age.
    """
    return min(most_running - running, (lag + version + 1) * batch - (accepted + running))
