"""DAPO: GRPO's advantage with a wider upper clip, the mean over tokens, and filters of groups and rows.

    keep  groups whose outcomes are not all equal; sample fresh prompts for the others         F1
    keep  rows that were not truncated at the length limit, if `overlong_filter` is on         F3
    R_i   = reward + overlong_penalty * clip((C - buffer - len_i) / buffer, -1, 0)             R7
    A_i   = (R_i - mean_g) / (std_g + 1e-6)                                                  A3
    l_t   = max(-rho_t * A_i, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_i)                L2 (L3)
    L     = mean over all tokens of the step                                                 G1

The zero-signal filter reads the outcome before R7, since the length penalty would make every group varied. Refilling
biases the batch toward prompts of medium difficulty.

Source: Yu et al. 2503.14476 eq. 8 to 13: buffer 4096 of 20480 tokens, penalty 1. Both length rules are off by default,
since they depend on the task's answer length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, contract, grpo
from jrl.algos.contract import Facts, Groups
from jrl.ops import filters, shaping
from jrl.types import traced

Array = jax.Array


@traced
class DAPO:
    clip_low: float = 0.2  # a ratio below 1 - clip_low is not pushed down further
    clip_high: float = 0.28  # a ratio above 1 + clip_high is not pushed up further
    dual_clip: float | None = None  # largest ratio where A < 0, above 1 + clip_high; None: no bound
    max_refills: int | None = 10  # rounds of fresh prompts; 0 only filters, None keeps groups without signal
    overlong_buffer: int | None = None  # tokens before the limit over which the penalty grows
    overlong_penalty: float = 1.0  # subtracted from the reward at the length limit
    overlong_filter: bool = False  # leave out rows that were cut at the length limit
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus
    importance: common.TruncatedImportance | None = None  # correction for stale or mismatched samplers; None: none


def check(config: DAPO, facts: Facts) -> None:
    common.check_clipped(config, facts)
    if config.max_refills is not None and config.max_refills < 0:
        raise ValueError(
            f"DAPO.max_refills = {config.max_refills} must be at least 0 (filter, never refill), or None (no filter)."
        )
    if config.max_refills is not None:
        reads = f"keeps the groups on which the first verifier is divided (max_refills = {config.max_refills})"
        common.check_outcome(config, facts, reads=reads, instead="Set DAPO.max_refills = None")
    if config.overlong_buffer is not None and not 0 < config.overlong_buffer <= facts.max_completion:
        raise ValueError(
            f"DAPO.overlong_buffer = {config.overlong_buffer} must be 1 to {facts.max_completion} tokens, the longest "
            "completion: the penalty grows over the last so many of them. A fifth of it is usual; None: no penalty."
        )
    if not config.overlong_penalty > 0:
        raise ValueError(
            f"DAPO.overlong_penalty = {config.overlong_penalty} must be above 0: it is subtracted at the length limit. "
            "To switch it off, set DAPO.overlong_buffer = None."
        )


def keep(config: DAPO, groups: Groups) -> Array:
    rows = contract.eligible(groups)
    if config.max_refills is not None:
        rows &= filters.has_signal(groups.outcome, groups.group, rows, num_groups=groups.num_groups)
    if config.overlong_filter:
        rows &= filters.not_truncated(groups.finish)
    return rows


def shape(config: DAPO, groups: Groups) -> Array:
    if config.overlong_buffer is None:
        return groups.reward
    return groups.reward + shaping.soft_overlong(
        jnp.sum(groups.action_mask, axis=-1),
        max_completion=groups.max_completion,
        buffer=config.overlong_buffer,
        penalty=config.overlong_penalty,
    )


OBJECTIVE = common.CLIPPED._replace(
    config=DAPO,
    check=check,
    keep=keep,
    refill=lambda config: config.max_refills,
    shape=shape,
    advantages=grpo.advantages,
)
