"""Estimates of KL(policy to reference) from the sampled token, and their gradients as a loss.

With d = logprobs - ref_logprobs on tokens sampled from the policy:

    estimator  value            bias          expected gradient as a loss         coefficient of grad logprobs
    k1         d                none, signed  zero: it regularizes nothing        1
    k2         d^2 / 2          biased, >= 0  reverse KL(policy to reference)     d
    k3         exp(-d) - 1 + d  none, >= 0    forward KL(reference to policy)     1 - exp(-d)
    rho * k3   (K3)             none          reverse KL                          d at rho = 1

So k1 belongs in the reward, never in the loss. A KL of each token given its prefix ignores the token's effect on later
states; only k1 in the reward includes it. Everything is [...] float32 or wider, 0 where `mask` is False.

Source: Schulman, "Approximating KL divergence"; GRPO's published loss is k3 (2402.03300 eq. 4); the gradients are
derived in docs/algorithms.md, K2. Peers number the same estimators differently and call k3 "low_var_kl" (verl).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import ratios

Array = jax.Array


def k1(logprobs: Array, ref_logprobs: Array, mask: Array) -> Array:
    """Returns K1's d = logprobs - ref_logprobs: unbiased, signed. For metrics and for rewards."""
    return ratios.log_ratio(logprobs, ref_logprobs, mask)


def k2(logprobs: Array, ref_logprobs: Array, mask: Array) -> Array:
    """Returns d^2 / 2 (K1): biased, never negative; as a loss (K2) its gradient is that of the reverse KL."""
    return jnp.square(ratios.log_ratio(logprobs, ref_logprobs, mask)) / 2


def k3(logprobs: Array, ref_logprobs: Array, mask: Array) -> Array:
    """Returns exp(-d) - 1 + d (K1), d clamped to +-20: unbiased, never negative; as a loss (K2) the forward KL.

    verl also clamps the result to +-10, which stops the gradient where it is needed most; we do not.
    """
    d = ratios.clamp(ratios.log_ratio(logprobs, ref_logprobs, mask))
    # expm1: for d near 0, exp(-d) - 1 + d would be nothing but rounding.
    return jnp.expm1(-d) + d


def corrected_k3(logprobs: Array, old_logprobs: Array, ref_logprobs: Array, mask: Array) -> Array:
    """Returns K3, rho * k3 with the gradient through both factors: the reverse KL, unbiased off policy too.

    Source: DeepSeek-V3.2 as in TRL's `use_bias_correction_kl`.
    """
    return ratios.ratio(logprobs, old_logprobs, mask) * k3(logprobs, ref_logprobs, mask)


def straight_through_k3(logprobs: Array, ref_logprobs: Array, mask: Array) -> Array:
    """Returns K3's other form: the value of k3 with the gradient of k2.

    Source: verl's "+" variants.
    """
    loss = k2(logprobs, ref_logprobs, mask)
    return loss + jax.lax.stop_gradient(k3(logprobs, ref_logprobs, mask) - loss)
