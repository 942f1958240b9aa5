"""The parts of docs/algorithms.md and the functions of an objective, as data: what `jrl list parts --json` prints.

A file for each section of that document, in its order.
"""

from __future__ import annotations

from jrl.algos.parts import (
    advantages,
    filters,
    losses,
    measurement,
    optimizers,
    preferences,
    reductions,
    regularizers,
    rewards,
    sampling,
    values,
)
from jrl.algos.parts.objective import OBJECTIVE_FUNCTIONS as OBJECTIVE_FUNCTIONS
from jrl.algos.parts.part import Part

PARTS: list[Part] = [
    *sampling.PARTS,
    *rewards.PARTS,
    *filters.PARTS,
    *advantages.PARTS,
    *losses.PARTS,
    *regularizers.PARTS,
    *reductions.PARTS,
    *values.PARTS,
    *preferences.PARTS,
    *optimizers.PARTS,
    *measurement.PARTS,
]
