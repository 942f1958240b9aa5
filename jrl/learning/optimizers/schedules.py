"""Learning-rate schedules: the share of the peak at each update. A schedule is selected by its configuration class."""

from __future__ import annotations

import jax.numpy as jnp

from jrl.types import Array, traced


@traced
class ConstantRate:
    """The peak throughout, after a linear warmup: the usual choice for reinforcement learning."""

    warmup_steps: int = 0  # updates; the first one is at peak / warmup_steps

    def __post_init__(self) -> None:
        check_steps(self)


@traced
class LinearDecay:
    """A straight line from the peak to its end, after a linear warmup."""

    decay_steps: int  # updates from the peak to the end
    warmup_steps: int = 0  # updates; the first one is at peak / warmup_steps
    end: float = 0.0  # share of the peak that is left at the end

    def __post_init__(self) -> None:
        check_steps(self)


@traced
class CosineDecay:
    """Half a cosine from the peak to its end, after a linear warmup: the usual choice for supervised learning."""

    decay_steps: int  # updates from the peak to the end
    warmup_steps: int = 0  # updates; the first one is at peak / warmup_steps
    end: float = 0.0  # share of the peak that is left at the end

    def __post_init__(self) -> None:
        check_steps(self)


@traced
class WarmupStableDecay:
    """The peak for a time, then a straight line to its end (WSD, 2404.06395), after a linear warmup."""

    stable_steps: int  # updates at the peak
    decay_steps: int  # updates from the peak to the end
    warmup_steps: int = 0  # updates; the first one is at peak / warmup_steps
    end: float = 0.0  # share of the peak that is left at the end

    def __post_init__(self) -> None:
        check_steps(self)


MOST_UPDATES = 2**31 - 1  # updates are counted in int32
Schedule = ConstantRate | LinearDecay | CosineDecay | WarmupStableDecay


def check_steps(schedule: Schedule) -> None:
    """Raises ValueError for invalid counts or an invalid end."""
    name = type(schedule).__name__
    for field, least in (("warmup_steps", 0), ("stable_steps", 0), ("decay_steps", 1)):
        if (value := getattr(schedule, field, least)) < least:
            raise ValueError(f"{name}.{field} must be at least {least}; got {value}")
        if value > MOST_UPDATES:
            raise ValueError(f"{name}.{field} must be at most {MOST_UPDATES}; got {value}")
    end = getattr(schedule, "end", 0.0)
    if isinstance(end, int | float) and not 0 <= end <= 1:  # else it is traced
        raise ValueError(f"{name}.end is a share of the peak, 0 to 1; got {end}")


def updates_until_zero(schedule: Schedule) -> int | None:
    """Returns how many updates have a rate above 0, warmup included; None: all."""
    if isinstance(schedule, ConstantRate) or schedule.end > 0:
        return None
    stable = schedule.stable_steps if isinstance(schedule, WarmupStableDecay) else 0
    return schedule.warmup_steps + stable + schedule.decay_steps


def share_of_peak(schedule: Schedule, count: Array) -> Array:
    """Returns O3, the factor of the peak learning rate at an update, [] float32.

    Warmup over w updates: (count + 1) / w, so that update w is the first at the peak. With u = count - w:

        linear   1 - (1 - end) x          x = clip(u / decay_steps, 0, 1)
        cosine   end + (1 - end) (1 + cos(pi x)) / 2
        WSD      linear, with u reduced by stable_steps

    Args:
      count: [] int32, updates before this one. A skipped update is not counted.

    Source: cosine: 1608.03983 eq. 5; WSD: MiniCPM, 2404.06395 section 4.
    """
    after = (count - schedule.warmup_steps).astype(jnp.float32)
    if isinstance(schedule, ConstantRate):
        share = jnp.ones_like(after)
    else:
        stable = schedule.stable_steps if isinstance(schedule, WarmupStableDecay) else 0
        progress = jnp.clip((after - stable) / schedule.decay_steps, 0, 1)
        remaining = (1 + jnp.cos(jnp.pi * progress)) / 2 if isinstance(schedule, CosineDecay) else 1 - progress
        share = schedule.end + (1 - schedule.end) * remaining
    if schedule.warmup_steps == 0:
        return share
    return jnp.where(after < 0, (count + 1) / schedule.warmup_steps, share).astype(jnp.float32)
