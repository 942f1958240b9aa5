"""One reward from several components."""

from __future__ import annotations

import math
from collections.abc import Sequence

LARGEST_REWARD = (2 - 2**-23) * 2.0**127  # the largest float32


def weighted_sum(components: Sequence[float | None], weights: Sequence[float]) -> float:
    """Returns R5: sum_k w_k C_k, added in the given order; NaN if a component is missing (None or NaN).

    Python's floats are float64, so the sum does not depend on the dtype that the rewards are stored in later. A missing
    component is not left out of the sum: the rest would be a reward on another scale.

    Args:
      components: K. weights: K.
    """
    if any(component is None for component in components):
        return math.nan
    return float(sum(weight * component for weight, component in zip(weights, components, strict=True)))
