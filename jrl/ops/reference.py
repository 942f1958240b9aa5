"""How a reference follows the policy (K6): not at all, by periodic resets, or as a moving average. Functions of the
step alone.

After a reset every KL to the reference starts at 0 again: log the KL to the first reference too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce
from jrl.types import PyTree

Array = jax.Array


def reset_due(step: Array, *, every: int) -> Array:
    """Returns whether K6's periodic reset makes the reference a copy of the policy after `step` steps, [] bool.

    Source: ProRL 2505.24864; ReMix 2507.06892 does it once. Moments of the optimizer stay unless a method says so.
    """
    return (step > 0) & (step % every == 0)


def averaged_reference(reference: PyTree, params: PyTree, *, decay: float) -> PyTree:
    """Returns K6's moving average of the policy: decay * reference + (1 - decay) * params, leaf by leaf.

    Args:
      reference, params: trees of arrays of one structure. The average is computed in float32 or wider and returned in
        the dtypes of the reference.
      decay: in [0, 1]; at 1 the reference is frozen, at 0 it is the policy.

    Source: TR-DPO 2404.09656, as TRL's `ref_model_mixup_alpha` (1 - decay here).
    """

    def average(old: Array, new: Array) -> Array:
        wide = jnp.promote_types(old.dtype, jnp.float32)
        return (decay * old.astype(wide) + (1 - decay) * new.astype(wide)).astype(old.dtype)

    return jax.tree.map(average, reference, params)


def base_share(step: Array) -> Array:
    """Returns lambda of K6's convex mix at a step: lambda * KL(policy to base) + (1 - lambda) * KL(policy to previous).

        lambda = max(1 - 0.1 * ceil(max(step - 50, 0) / 10), 0.5)

    Args:
      step: [] int32.

    Returns:
      [] float32, 1 at first and 0.5 from step 100 on.

    Source: ReMix, 2507.06892.
    """
    tenths = -(-jnp.maximum(step - 50, 0) // 10)
    return jnp.maximum(1 - 0.1 * tenths, 0.5)


def mixed_kl(kl_base: Array, kl_previous: Array, step: Array) -> Array:
    """Returns K6's convex mix of two KL penalties of one shape at a step, by `base_share`."""
    share = base_share(step)
    return share * reduce.widen(kl_base) + (1 - share) * reduce.widen(kl_previous)
