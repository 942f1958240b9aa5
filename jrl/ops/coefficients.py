"""Adaptive coefficients of the KL to a reference and of the entropy bonus."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

LARGEST_ERROR = 0.2  # bound of K4's error: a step changes the coefficient by at most 0.2 * rows / horizon, relatively


def adapted_kl_coefficient(coefficient: Array, kl: Array, rows: Array, *, target: float, horizon: float) -> Array:
    """Returns K4, the KL coefficient for the next step: coefficient * (1 + e * rows / horizon),
    e = clip(kl / target - 1, -0.2, 0.2).

    Args:
      coefficient: [] float. kl: [] float, nats, measured in this step. rows: [] number of sequences in it.
      target: above 0, nats, per sequence or per token as `kl` is.
      horizon: above 0, rows over which the coefficient adapts.

    Returns:
      [] float.

    Source: Ziegler et al. 1909.08593 section 2.2, target 6 nats a sequence; horizon 10,000 as in TRL and verl.
    """
    error = jnp.clip(kl / target - 1, -LARGEST_ERROR, LARGEST_ERROR)
    return coefficient * (1 + error * rows / horizon)


def adapted_entropy_coefficient(
    coefficient: Array, entropy: Array, *, target: float, step: float, largest: float
) -> Array:
    """Returns K5's coefficient for the next step: increased by `step` if the entropy is below its target, else
    decreased, within [0, largest].

    The bonus is on only while the entropy is at most its target (Skywork-OR1): above it use 0, and keep adapting this
    coefficient.

    Args:
      coefficient: [] float. entropy: [] float, nats, mean over the tokens of this step.

    Source: He et al. 2505.22312 (Skywork-OR1) as in TRL: target 0.2, step 0.005, largest 1.
    """
    return jnp.clip(jnp.where(entropy < target, coefficient + step, coefficient - step), 0, largest)
