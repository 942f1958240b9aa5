"""Curricula: which prompts the next step visits, by the outcomes of those before. One table for all of them. No JAX.

    table (host) --weights--> probability of each prompt --draw_order--> the prompts of a step --outcomes--> table

Which prompts a draw visits is a function of the run's seed, how many visits there were, and the table as it was when
the draw was made. Selecting a curriculum is choosing its configuration class.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.tasks.data.selection import in_band, sampling_weights

Array = np.ndarray

SOLVED = 0.9  # success rate from which reports call a prompt solved; a running rate reaches 1 late


class Outcomes(NamedTuple):
    """What was seen of every example of the source. Saved with the run."""

    rate: Array  # [P] float32, running success rate; 0 where never judged
    judged: Array  # [P] int32, visits with a verdict
    last: Array  # [P] int32, the step of the last of them
    step: Array  # [] int32, steps recorded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prioritized:
    """Prompts in proportion to what they miss: (1 - success rate)^exponent + floor (F9)."""

    exponent: float = 1.0  # 0: all prompts alike; above 1: mostly those that are seldom solved
    floor: float = 0.02  # of a solved prompt, so that forgetting is noticed
    decay: float = 0.5  # of the running success rate, at a visit; 0: the last visit alone
    forget_after: int | None = None  # steps after which an outcome no longer counts; None: never

    def __post_init__(self) -> None:
        check_memory(self)
        if self.exponent < 0 or self.floor < 0:
            raise ValueError(f"Prioritized.exponent and floor must be 0 or more; got {self.exponent} and {self.floor}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DifficultyBand:
    """Prompts whose success rate is within a band, and new ones, all alike (F2)."""

    low: float = 0.1  # smallest success rate
    high: float = 0.9  # largest success rate
    decay: float = 0.5  # of the running success rate, at a visit; 0: the last visit alone
    forget_after: int | None = 100  # steps after which a prompt counts as new; None: what leaves the band never returns

    def __post_init__(self) -> None:
        check_memory(self)
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"DifficultyBand needs 0 <= low <= high <= 1; got {self.low} and {self.high}")


def check_memory(config: Prioritized | DifficultyBand) -> None:
    """Raises ValueError for a memory of outcomes that is none."""
    name = type(config).__name__
    if not 0 <= config.decay < 1:
        raise ValueError(f"{name}.decay must be at least 0 and below 1; got {config.decay}")
    if config.forget_after is not None and config.forget_after < 1:
        raise ValueError(f"{name}.forget_after must be at least 1, or None; got {config.forget_after}")


class Curriculum(NamedTuple):
    """A row of CURRICULA."""

    config: type
    weights: Callable[[Any, Array, Array], Array]  # (config, rate [P], seen [P] bool) -> [P], at least 0


CURRICULA: dict[str, Curriculum] = {
    "Prioritized": Curriculum(
        Prioritized, lambda c, rate, seen: sampling_weights(rate, seen, exponent=c.exponent, floor=c.floor)
    ),
    "DifficultyBand": Curriculum(
        DifficultyBand, lambda c, rate, seen: in_band(rate, seen, low=c.low, high=c.high).astype(np.float64)
    ),
}


def no_outcomes(size: int) -> Outcomes:
    """Returns the table of a source of `size` examples before any visit."""
    zeros = lambda dtype: np.zeros(size, dtype)
    return Outcomes(zeros(np.float32), zeros(np.int32), zeros(np.int32), np.zeros((), np.int32))


def seen_of(config: Any, table: Outcomes) -> Array:
    """Returns the examples whose outcome counts, [P] bool."""
    seen = table.judged > 0
    return seen if config.forget_after is None else seen & (table.step - table.last < config.forget_after)


def weights_of(config: Any, table: Outcomes) -> Array:
    """Returns how likely each example is visited, in proportion, [P] float64; 0: not at all."""
    return CURRICULA[type(config).__name__].weights(config, table.rate, seen_of(config, table))


def recorded(config: Any, table: Outcomes, index: Sequence[int], outcome: Array, valid: Array) -> Outcomes:
    """Returns the table after a step.

    The success rate of a visit is the mean over its judged completions; a visit without any changes nothing. The
    running rate is that of the first visit, then decay times itself plus (1 - decay) times the visit's, in their order.

    Args:
      index: the example of each visit. outcome: [visits, G] float, anything where not valid. valid: [visits, G] bool.
    """
    rate, judged, last, step = table.rate.copy(), table.judged.copy(), table.last.copy(), table.step + np.int32(1)
    for i, row, counts in zip(index, outcome, valid, strict=True):
        if not counts.any():
            continue
        mean = row[counts].mean(dtype=np.float32)
        rate[i] = mean if judged[i] == 0 else config.decay * rate[i] + (1 - config.decay) * mean
        judged[i] += 1
        last[i] = step
    return Outcomes(rate, judged, last, np.asarray(step, np.int32))


def draw_order(weights: Array, seed: int, position: int) -> Array:
    """Returns the examples of positive weight in a random order, [..] int64: the first is each with a probability in
    proportion to its weight, the second likewise of the rest, and so on.

    By exponential races: example i finishes at -log(u_i) / w_i. The draws are a function of seed and position.

    Source: Efraimidis and Spirakis, 2006.
    """
    key = hashlib.sha256(f"curriculum/{seed}".encode()).digest()
    bits = np.random.Philox(key=int.from_bytes(key[:16], "little"), counter=position << 64).random_raw(len(weights))
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    there = np.flatnonzero(weights > 0)
    return there[np.argsort(-np.log(uniform[there]) / weights[there], kind="stable")]


def none_left(config: Any, table: Outcomes) -> str:
    """Returns why no prompt can be visited, for a reader."""
    seen = seen_of(config, table)
    rate = table.rate[seen]
    judged, solved, never = (int(np.sum(x)) for x in (seen, rate >= SOLVED, rate <= 0))
    return (
        f"{type(config).__name__} leaves no prompt after {int(table.step)} steps: of {len(seen)} examples {judged} "
        f"were judged, {solved} of them solved and {never} never. Widen it, set forget_after so that prompts "
        "come back, or take other prompts"
    )


def metrics(config: Any, table: Outcomes) -> dict[str, float]:
    """Returns shares of the source's examples: judged so far, solved (SOLVED), and not visited now."""
    seen = seen_of(config, table)
    return {
        "curriculum/seen": float(np.mean(table.judged > 0)),
        "curriculum/solved": float(np.mean(seen & (table.rate >= SOLVED))),
        "curriculum/dropped": float(np.mean(weights_of(config, table) <= 0)),
    }
