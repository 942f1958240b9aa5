"""Aggregation of the scores of an ensemble of reward models (R11). A method is selected by its configuration class."""

from __future__ import annotations

import dataclasses

from jrl.ops import ensembles
from jrl.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnsembleMean:
    """The mean of the members."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorstCase:
    """The smallest of the members' scores (WCO): one low score suffices for a low reward."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariancePenalty:
    """The mean of the members, less their variance (UWO)."""

    coefficient: float = 0.1  # of the variance; 0.5 is usual for best of n

    def __post_init__(self) -> None:
        if not self.coefficient > 0:
            raise ValueError(f"VariancePenalty.coefficient is {self.coefficient}; it must be above 0. EnsembleMean has "
                             "no penalty")  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class NominalWorstCase:
    """A share of the first member's score, and the rest of the smallest (BRME)."""

    share: float = 0.6  # of the first member

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"NominalWorstCase.share is {self.share}; it must lie in [0, 1]")


Ensemble = EnsembleMean | WorstCase | VariancePenalty | NominalWorstCase


def aggregate(ensemble: Ensemble, scores: Array) -> Array:
    """Returns one score from those of the members, [M, ...] -> [...] float32 or wider; NaN where one is NaN."""
    if isinstance(ensemble, WorstCase):
        return ensembles.worst_case(scores)
    if isinstance(ensemble, VariancePenalty):
        return ensembles.variance_penalized(scores, coefficient=ensemble.coefficient)
    if isinstance(ensemble, NominalWorstCase):
        return ensembles.nominal_worst_case(scores, share=ensemble.share)
    return ensembles.mean_score(scores)
