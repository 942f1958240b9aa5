"""One reward from several components."""

from __future__ import annotations

import math
from collections.abc import Sequence

LARGEST_REWARD = (2 - 2**-23) * 2.0**127  # what float32 can hold


def weighted_sum(components: Sequence[float | None], weights: Sequence[float]) -> float:
    """Returns R5: sum_k w_k C_k, added in the order given; NaN where a component is missing (None or NaN).

    Python's floats are float64: the sum does not depend on what the rewards are stored in afterwards. A missing
    component never drops out of the sum: the rest would be a reward of another scale.

    Args:
      components: K. weights: K.
    """
    if any(component is None for component in components):
        return math.nan
    return float(sum(weight * component for weight, component in zip(weights, components, strict=True)))
