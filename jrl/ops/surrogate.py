"""Policy losses, per token, to be minimized. Aggregation is in jrl.ops.reduce.

Shared by all: `logprobs` is differentiated; `old_logprobs` (the learner's at the start of the update) and `advantages`
never are; rho = exp(clamp(logprobs - old_logprobs, +-20)); everything is [...] of one shape, float32 or wider comes
out, and 0 where `mask` is False whatever the inputs hold there. A zero advantage gives a zero gradient.

Clips are written with `where` on the side that binds, not with minimum and maximum, which halve the gradient at a tie.
Here a ratio exactly at the bound is not clipped.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import ratios, reduce

Array = jax.Array


def policy_gradient(logprobs: Array, advantages: Array, mask: Array) -> Array:
    """Returns L1, REINFORCE: -A * logprobs. Exact on policy, for one update per batch.

    Source: Williams 1992. Its gradient is that of -A * exp(logprobs - sg(logprobs)).
    """
    return -_fixed(advantages, mask) * reduce.masked(logprobs, mask)


def clipped(
    logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array, *, clip_low: float, clip_high: float
) -> Array:
    """Returns L2, PPO's clip: -min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A).

    The gradient is 0 where A > 0 and rho > 1 + clip_high, or A < 0 and rho < 1 - clip_low. Separate bounds are
    DAPO's clip-higher.

    Source: Schulman et al. 1707.06347 eq. 7; Yu et al. 2503.14476 (DAPO) eq. 10. verl, TRL, AReaL 0.2/0.2; DAPO, VAPO
    0.2/0.28; open-instruct 0.2/0.272.
    """
    advantages = _fixed(advantages, mask)
    rho = ratios.ratio(logprobs, old_logprobs, mask)
    return -clip_ratio(rho, advantages, clip_low, clip_high) * advantages


def dual_clipped(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> Array:
    """Returns L3: where A < 0, min(PPO's clip, -dual_clip * A); elsewhere PPO's clip.

    It bounds the loss of a token with A < 0 and a large ratio. `dual_clip` must exceed 1 + clip_high.

    Source: Ye et al. 1912.09729 eq. 5. verl has it always on at 3; CURE 10; off in Tunix, AReaL and OpenRLHF.
    """
    loss = clipped(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    advantages = _fixed(advantages, mask)
    bound = -dual_clip * advantages
    return jnp.where((advantages < 0) & (loss > bound), bound, loss)


def capped(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    *,
    clip_low: float,
    clip_high: float,
    delta: float,
) -> Array:
    """Returns L4: -min(min(rho, delta) * A, clip(rho) * A): the ratio of the unclipped term is capped.

    `delta` must exceed 1 + clip_high. Where A < 0 its value is that of `dual_clipped` at dual_clip = delta.

    Source: INTELLECT-2, 2505.07291 section 3.4; TRL's `delta`.
    """
    advantages = _fixed(advantages, mask)
    rho = ratios.ratio(logprobs, old_logprobs, mask)
    rho = jnp.where(rho > delta, delta, rho)
    return -clip_ratio(rho, advantages, clip_low, clip_high) * advantages


def cispo(logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array, *, max_weight: float) -> Array:
    """Returns L8: -sg(min(rho, max_weight)) * A * logprobs. No token ever loses its gradient; there is no lower clip.

    `max_weight` is absolute and at least 1. In verl, slime and open-instruct the cap is 1 + epsilon; TRL reads
    `epsilon_high` as the absolute cap, so that its default of 0.2 shrinks every weight.

    Source: MiniMax-M1, 2506.13585 eq. 4 and 5.
    """
    rho = jax.lax.stop_gradient(ratios.ratio(logprobs, old_logprobs, mask))
    return -jnp.minimum(rho, max_weight) * _fixed(advantages, mask) * reduce.masked(logprobs, mask)


def clipped_high(logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array, *, clip_high: float) -> Array:
    """Returns where the upper clip binds, [...] bool: A > 0 and rho > 1 + clip_high.

    Peers that test |rho - 1| whatever the sign of A report a larger number.
    """
    rho = ratios.ratio(logprobs, old_logprobs, mask)
    return mask & (_fixed(advantages, mask) > 0) & (rho > 1 + clip_high)


def clipped_low(logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array, *, clip_low: float) -> Array:
    """Returns where the lower clip binds, [...] bool: A < 0 and rho < 1 - clip_low."""
    rho = ratios.ratio(logprobs, old_logprobs, mask)
    return mask & (_fixed(advantages, mask) < 0) & (rho < 1 - clip_low)


def _fixed(advantages: Array, mask: Array) -> Array:
    return reduce.masked(jax.lax.stop_gradient(advantages), mask)


def clip_ratio(rho: Array, advantages: Array, clip_low: float, clip_high: float) -> Array:
    """Returns the ratio that PPO's minimum (L2) picks: clipped where A > 0 and rho > 1 + clip_high, or A < 0 and
    rho < 1 - clip_low. Exactly at the bound it keeps its gradient."""
    rho = jnp.where((advantages > 0) & (rho > 1 + clip_high), 1 + clip_high, rho)
    return jnp.where((advantages < 0) & (rho < 1 - clip_low), 1 - clip_low, rho)
