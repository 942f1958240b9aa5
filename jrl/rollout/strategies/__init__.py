"""The sampling strategies: one file each, one row here, by the class of their configuration."""

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
from jrl.rollout.strategies.contract import PLAIN, Strategy

STRATEGIES: dict[type, Strategy] = {
    row.config: row
    for row in (
        PLAIN,
        branching.STRATEGY,
        opponent.STRATEGY,
        partial.STRATEGY,
        reference_samples.STRATEGY,
        refinement.STRATEGY,
        reset.STRATEGY,
        roll_in.STRATEGY,
        roll_out.STRATEGY,
        self_correction.STRATEGY,
    )
}


def strategy_of(config: object) -> Strategy:
    """Returns the row of a strategy's configuration; None is plain sampling."""
    return STRATEGIES[type(config)]
