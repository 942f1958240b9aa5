"""What every optimizer has in its configuration, a user's own too: rates, schedule, clipping, groups, average."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jrl.learning.optimizers.groups import ParameterGroup, in_float32
from jrl.learning.optimizers.schedules import ConstantRate, CosineDecay, LinearDecay, WarmupStableDecay
from jrl.types import traced


@traced
class OptimizerSettings:
    """The fields that every optimizer has. Each derives its configuration from this class, with @traced."""

    learning_rate: float = 1e-4  # peak
    # The learning rate over updates.
    schedule: ConstantRate | LinearDecay | CosineDecay | WarmupStableDecay = dataclasses.field(
        default_factory=ConstantRate
    )
    weight_decay: float = 0.0  # times the learning rate, subtracted from matrices and embeddings
    clip_norm: float | None = 1.0  # largest global norm of a gradient; None: no clipping
    groups: tuple[ParameterGroup, ...] = ()  # arrays with settings of their own; the first that matches counts
    average: float | None = None  # decay of a moving average of the weights, the role `average`; None: none is kept

    def __post_init__(self) -> None:
        check_rates(self)


def check_rates(config: Any, **limits: Any) -> None:
    """Raises ValueError for a float of an optimizer's configuration that cannot train, as it is or in float32, in which
    programs hold it.

    Args:
      limits: field -> (value) -> bool, of the fields that only this optimizer has.
    """
    common = {
        "learning_rate": lambda x: 0 < x < math.inf,
        "weight_decay": lambda x: 0 <= x < math.inf,
        "clip_norm": lambda x: x > 0,
        "average": lambda x: 0 < x < 1,
    }
    for name, holds in (common | limits).items():
        value = getattr(config, name)
        if not isinstance(value, int | float):  # None, or traced
            continue
        if not holds(value):
            raise ValueError(f"{type(config).__name__}.{name} = {value} cannot train")
        if not holds(held := in_float32(value)):
            raise ValueError(f"{type(config).__name__}.{name} = {value} cannot train: in float32 it is {held}")
    patterns = [group.names for group in config.groups if dataclasses.is_dataclass(group)]
    if duplicates := sorted({pattern for pattern in patterns if patterns.count(pattern) > 1}):
        raise ValueError(f"{type(config).__name__}.groups has the pattern {duplicates[0]!r} twice")
