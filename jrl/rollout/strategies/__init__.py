"""The sampling strategies: one file each, one row here, by the name of the class of their configuration."""

from __future__ import annotations

from jrl.rollout.strategies import (
    branching,
    opponent,
    partial,
    reference_samples,
    refinement,
    reset,
    roll_in,
    roll_out,
    self_correction,
)
from jrl.rollout.strategies.contract import Strategy

STRATEGIES: dict[str, Strategy] = {
    "Branching": branching.STRATEGY,
    "MixtureOpponent": opponent.STRATEGY,
    "Partial": partial.STRATEGY,
    "ReferenceSamples": reference_samples.STRATEGY,
    "Refinement": refinement.STRATEGY,
    "Reset": reset.STRATEGY,
    "RollIn": roll_in.STRATEGY,
    "RollOut": roll_out.STRATEGY,
    "SelfCorrection": self_correction.STRATEGY,
}
