"""R28: what shows that a policy has learned the reward and not the task. All of it is measured and changes nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array


def length_bucket_means(
    reward: Array, length: Array, valid: Array, *, num_buckets: int, max_completion: int
) -> tuple[Array, Array]:
    """Returns R28's mean reward of the rows in each of num_buckets equal ranges of length, and the share of rows there.

    Bucket b holds lengths from b to b + 1 times max_completion / num_buckets, the upper end included.

    Args:
      reward: [N] float; may be NaN where not valid. length: [N] int32, sampled tokens. valid: [N] bool.

    Returns:
      (means [num_buckets], 0 in an empty one; shares [num_buckets] of the valid rows), float32 or wider.
    """
    bucket = jnp.clip((length * num_buckets - 1) // max_completion, 0, num_buckets - 1)
    member = valid[:, None] & (bucket[:, None] == jnp.arange(num_buckets)[None, :])
    count = member.sum(0)
    total = jnp.where(member, reduce.widen(reward)[:, None], 0).sum(0)
    return total / jnp.maximum(count, 1), count / jnp.maximum(valid.sum(), 1)


def order_flipped(before: Array, after: Array, group: Array, valid: Array) -> Array:
    """Returns R28's rows whose place in their group shaping has turned around, [N] bool: there is a row of the group
    that one is better than before shaping and worse than after it, or the other way round.

    Args:
      before, after: [N] float, rewards without and with shaping; may be NaN where not valid. group: [N] int32.
      valid: [N] bool.
    """
    pair = (group[:, None] == group[None, :]) & valid[:, None] & valid[None, :]
    sign = lambda x: jnp.sign(x[:, None] - x[None, :])
    return jnp.any(pair & (sign(before) * sign(after) < 0), axis=1)


def correlation(a: Array, b: Array, valid: Array) -> Array:
    """Returns Pearson's correlation of two columns over the valid rows, [] float32 or wider; 0 where one is constant or
    varies so little or so much that its squares are beyond the dtype (below 1e-19, above 1e19 in float32).

    Of reward and length, or of a reward and a held-out one, it is R28's first sign of over-optimization.

    Args:
      a, b: [N] float; may be NaN where not valid. valid: [N] bool.
    """
    varied = lambda x: jnp.max(jnp.where(valid, x, -jnp.inf)) > jnp.min(jnp.where(valid, x, jnp.inf))  # exactly (E1)
    center = lambda x: jnp.where(valid, x - reduce.masked_mean(x, valid), 0)
    x, y = center(a), center(b)
    norm = jnp.sqrt((x * x).sum()) * jnp.sqrt((y * y).sum())
    known = varied(a) & varied(b) & (norm > 0) & jnp.isfinite(norm)
    return jnp.where(known, (x * y).sum() / norm, 0)
