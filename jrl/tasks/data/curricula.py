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

from jrl.tasks.data.levels import LevelRule, next_level
from jrl.tasks.data.mixing import progress_shares, size_shares
from jrl.tasks.data.selection import (
    cap_unsolved,
    fill_epochs,
    hardest,
    in_band,
    learning_impact,
    most_varied,
    sampling_weights,
)

Array = np.ndarray

SOLVED = 0.9  # success rate from which reports call a prompt solved; a running rate reaches 1 late


class Outcomes(NamedTuple):
    """What was seen of every example of the source, and of its K tasks. Saved with the run."""

    rate: Array  # [P] float32, running success rate; 0 where never judged
    judged: Array  # [P] int32, visits with a verdict
    last: Array  # [P] int32, the step of the last of them
    step: Array  # [] int32, steps recorded
    history: Array  # [P, E] float32, success rates of the first visits, in order; NaN: there was none
    task: Array  # [P] int32, which task of a mixture an example is of, 0..K-1
    recent: Array  # [K, W] float32, success rates of a task's last visits, the oldest first; NaN: there was none
    level: Array  # [] int32, the task that is visited, where that is one at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutcomeMemory:
    """How long outcomes count."""

    decay: float = 0.5  # of the running success rate, at a visit; 0: the last visit alone
    forget_after: int | None = None  # steps after which an outcome no longer counts; None: never

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not 0 <= self.decay < 1:
            raise ValueError(f"{name}.decay must be at least 0 and below 1; got {self.decay}")
        if self.forget_after is not None and self.forget_after < 1:
            raise ValueError(f"{name}.forget_after must be at least 1, or None; got {self.forget_after}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prioritized(OutcomeMemory):
    """Prompts in proportion to what they miss: (1 - success rate)^exponent + floor (F9)."""

    exponent: float = 1.0  # 0: all prompts alike; above 1: mostly those that are seldom solved
    floor: float = 0.02  # of a solved prompt, so that forgetting is noticed

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exponent < 0 or self.floor < 0:
            raise ValueError(f"Prioritized.exponent and floor must be 0 or more; got {self.exponent} and {self.floor}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DifficultyBand(OutcomeMemory):
    """Prompts whose success rate is within a band, and new ones, all alike (F2)."""

    low: float = 0.1  # smallest success rate
    high: float = 0.9  # largest success rate
    forget_after: int | None = 100  # steps after which a prompt counts as new; None: what leaves the band never returns

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"DifficultyBand needs 0 <= low <= high <= 1; got {self.low} and {self.high}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardFocus(OutcomeMemory):
    """The share of the prompts with the lowest success rates, all alike; new ones are among them (F6)."""

    share: float = 0.5  # of the prompts
    max_unsolved: int | None = None  # prompts of a step that were never solved; None: any number

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share <= 1:
            raise ValueError(f"HardFocus.share must be above 0 and at most 1; got {self.share}")
        if self.max_unsolved is not None and self.max_unsolved < 1:
            raise ValueError(f"HardFocus.max_unsolved must be at least 1, or None; got {self.max_unsolved}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pilot(OutcomeMemory):
    """The first steps of a curriculum that then chooses once: all prompts alike, and their outcomes are kept."""

    pilot: int = 30  # steps before the choice
    visits: int = 8  # of a prompt that are kept, at most

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pilot < 1 or self.visits < 2:
            raise ValueError(f"{type(self).__name__} needs pilot >= 1 and visits >= 2; got {self.pilot} and "
                             f"{self.visits}")  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class MostVaried(Pilot):
    """After a pilot, the few prompts whose success rate varied most in it, again and again (F14)."""

    count: int = 1  # prompts that are chosen

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count < 1:
            raise ValueError(f"MostVaried.count must be at least 1; got {self.count}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningImpact(Pilot):
    """After a pilot, the prompts whose success rate followed that of the mean prompt in it (F4)."""

    threshold: float = 0.2  # smallest score of a prompt that is chosen, below 1
    fewest: int = 2  # visits in the pilot; prompts with fewer are left out

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.threshold < 1 or not 1 <= self.fewest <= self.visits:
            raise ValueError(f"LearningImpact needs threshold < 1 and 1 <= fewest <= visits; got {self}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizeMixing(OutcomeMemory):
    """Tasks of a Mixture in proportion to (their number of examples)^alpha; the prompts of a task alike (F12)."""

    alpha: float = 0.5  # 1: as large as they are; 0: equal

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"SizeMixing.alpha must lie in [0, 1]; got {self.alpha}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgressMixing(OutcomeMemory):
    """Tasks of a Mixture in proportion to how their success rate changes; the prompts of a task alike (F12)."""

    window: int = 64  # visits of a task: the later half is compared with the earlier
    floor: float = 0.05  # added to every task's change, so that none is given up

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 2 or not self.floor > 0:
            raise ValueError(f"ProgressMixing needs window >= 2 and floor > 0; got {self.window} and {self.floor}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveLevel(OutcomeMemory):
    """One task of a Mixture at a time, its levels from the easiest to the hardest: one up where the success rate is
    high, one down where it is low (F8)."""

    window: int = 20  # visits at a level that are looked at, and the fewest before it changes
    up: float = 0.7  # success rate above which the level rises
    down: float = 0.1  # success rate below which it falls

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1 or not 0 <= self.down <= self.up <= 1:
            raise ValueError(f"AdaptiveLevel needs window >= 1 and 0 <= down <= up <= 1; got {self}")


class Curriculum(NamedTuple):
    """A row of CURRICULA."""

    config: type
    weights: Callable[[Any, Outcomes], Array]  # (config, table) -> [P], at least 0
    # (config, table, [.] int64 in a random order) -> those of them that a step may visit
    limit: Callable[[Any, Outcomes, Array], Array] = lambda config, table, order: order
    after: Callable[[Any, Outcomes], Outcomes] = lambda config, table: table  # once a step is recorded
    visits: Callable[[Any], int] = lambda config: 1  # E, of a prompt that `Outcomes.history` holds
    pilot: Callable[[Any], int] = lambda config: 0  # steps that it holds them of
    window: Callable[[Any], int] = lambda config: 1  # W
    of_tasks: bool = False  # it chooses between the tasks of a mixture
    # the weight of an example depends on the others: those that are held out must not be among them
    compares: bool = False


def hard_weights(config: HardFocus, table: Outcomes) -> Array:
    seen = seen_of(config, table)
    return hardest(np.where(seen, table.rate, 0), share=config.share).astype(np.float64)


def limit_unsolved(config: HardFocus, table: Outcomes, order: Array) -> Array:
    if config.max_unsolved is None:
        return order
    rate = np.where(seen_of(config, table), table.rate, 1)  # what was never tried is not known to be unsolved
    return order[cap_unsolved(rate[order], most=config.max_unsolved)]


def varied_weights(config: MostVaried, table: Outcomes) -> Array:
    weights = np.full(len(table.rate), float(table.step < config.pilot))
    if table.step >= config.pilot:
        weights[most_varied(table.history, count=config.count)] = 1
    return weights


def impact_weights(config: LearningImpact, table: Outcomes) -> Array:
    if table.step < config.pilot:
        return np.ones(len(table.rate))
    rates, enough = fill_epochs(table.history, fewest=config.fewest)
    if not enough.any():
        return np.zeros(len(rates))
    return (enough & (learning_impact(rates, rates[enough].mean(axis=0)) > config.threshold)).astype(np.float64)


def task_weights(table: Outcomes, shares: Array) -> Array:
    """Returns weights of examples, [P] float64, by which a task is visited with its share. shares: [K]."""
    return (shares / np.maximum(sizes_of(table), 1))[table.task]


def sizes_of(table: Outcomes) -> Array:
    """Returns the number of examples of every task, [K] int64."""
    return np.bincount(table.task, minlength=len(table.recent))


def progress_weights(config: ProgressMixing, table: Outcomes) -> Array:
    window = table.recent[:, -config.window :]
    half, judged = config.window // 2, np.isfinite(window).all(axis=1)
    means = [np.where(judged, part.mean(axis=1), 0) for part in (window[:, :half], window[:, half:])]
    return task_weights(table, progress_shares(*means, judged, floor=config.floor))


def level_after(config: AdaptiveLevel, table: Outcomes) -> Outcomes:
    level, recent = int(table.level), table.recent
    scores = recent[level, -config.window :]
    rule = LevelRule(window=config.window, up=config.up, down=config.down, lowest=0, highest=len(recent) - 1)
    after, _ = next_level(level, scores[np.isfinite(scores)].tolist(), rule)
    if after != level:
        recent = np.full_like(recent, np.nan)
    return table._replace(level=np.asarray(after, np.int32), recent=recent)


CURRICULA: dict[str, Curriculum] = {
    "Prioritized": Curriculum(
        Prioritized,
        lambda c, table: sampling_weights(table.rate, seen_of(c, table), exponent=c.exponent, floor=c.floor),
    ),
    "DifficultyBand": Curriculum(
        DifficultyBand,
        lambda c, table: in_band(table.rate, seen_of(c, table), low=c.low, high=c.high).astype(np.float64),
    ),
    "HardFocus": Curriculum(HardFocus, hard_weights, limit=limit_unsolved, compares=True),
    "MostVaried": Curriculum(MostVaried, varied_weights, visits=lambda c: c.visits, pilot=lambda c: c.pilot),
    "LearningImpact": Curriculum(LearningImpact, impact_weights, visits=lambda c: c.visits, pilot=lambda c: c.pilot),
    "SizeMixing": Curriculum(
        SizeMixing,
        lambda c, table: task_weights(table, size_shares(sizes_of(table), alpha=c.alpha)),
        of_tasks=True,
        compares=True,
    ),
    "ProgressMixing": Curriculum(
        ProgressMixing, progress_weights, window=lambda c: c.window, of_tasks=True, compares=True
    ),
    "AdaptiveLevel": Curriculum(
        AdaptiveLevel,
        lambda c, table: (table.task == table.level).astype(np.float64),
        after=level_after,
        window=lambda c: c.window,
        of_tasks=True,
    ),
}


def row_of(config: Any) -> Curriculum:
    """Returns the row of a curriculum's configuration."""
    return CURRICULA[type(config).__name__]


def no_outcomes(task: Array, configs: Sequence[Any] = ()) -> Outcomes:
    """Returns the table of a source before any visit.

    Args:
      task: [P] int32, which of its tasks each example is of. configs: the curricula that read the table.

    Raises: ValueError for a curriculum of tasks where there is one.
    """
    tasks, rows = int(task.max()) + 1, [row_of(config) for config in configs]
    for row in rows:
        if row.of_tasks and tasks < 2:
            raise ValueError(
                f"Online.curriculum = @{row.config.__name__}() chooses between tasks, and Config.task has one; set "
                "Config.task = @Mixture() with several"
            )
    zeros = lambda dtype, *shape: np.zeros(shape, dtype)
    unknown = lambda *shape: np.full(shape, np.nan, np.float32)
    size = len(task)
    return Outcomes(
        rate=zeros(np.float32, size),
        judged=zeros(np.int32, size),
        last=zeros(np.int32, size),
        step=zeros(np.int32),
        history=unknown(size, max([1, *(row.visits(config) for row, config in zip(rows, configs))])),
        task=np.asarray(task, np.int32),
        recent=unknown(tasks, max([1, *(row.window(config) for row, config in zip(rows, configs))])),
        level=zeros(np.int32),
    )


def seen_of(config: OutcomeMemory, table: Outcomes) -> Array:
    """Returns the examples whose outcome counts, [P] bool."""
    seen = table.judged > 0
    return seen if config.forget_after is None else seen & (table.step - table.last < config.forget_after)


def weights_of(config: Any, table: Outcomes, training: Array | None = None) -> Array:
    """Returns how likely each example is visited, in proportion, [P] float64; 0: not at all.

    Args:
      training: [P] bool, the examples of the training split. Others count nowhere: not among the hardest, nor in the
        size of a task. None: all are of it.
    """
    if training is None:
        return row_of(config).weights(config, table)
    by_example = ("rate", "judged", "last", "history", "task")
    split = table._replace(**{name: getattr(table, name)[training] for name in by_example})
    weights = np.zeros(len(training), np.float64)
    if training.any():
        weights[training] = row_of(config).weights(config, split)
    return weights


def recorded(config: Any, table: Outcomes, index: Sequence[int], outcome: Array, valid: Array) -> Outcomes:
    """Returns the table after a step.

    The success rate of a visit is the mean over its judged completions; a visit without any changes nothing. The
    running rate is that of the first visit, then decay times itself plus (1 - decay) times the visit's, in their order.

    Args:
      index: the example of each visit. outcome: [visits, G] float, anything where not valid. valid: [visits, G] bool.
    """
    row = row_of(config)
    rate, judged, last, step = table.rate.copy(), table.judged.copy(), table.last.copy(), table.step + np.int32(1)
    history, recent = table.history.copy(), table.recent.copy()
    for i, scores, counts in zip(index, outcome, valid, strict=True):
        if not counts.any():
            continue
        mean = scores[counts].mean(dtype=np.float32)
        if table.step < row.pilot(config) and (free := np.flatnonzero(np.isnan(history[i]))).size:
            history[i, free[0]] = mean
        recent[table.task[i]] = [*recent[table.task[i]][1:], mean]
        rate[i] = mean if judged[i] == 0 else config.decay * rate[i] + (1 - config.decay) * mean
        judged[i] += 1
        last[i] = step
    moved = table._replace(
        rate=rate, judged=judged, last=last, step=np.asarray(step, np.int32), history=history, recent=recent
    )
    return row.after(config, moved)


def order_of(config: Any, table: Outcomes, seed: int, position: int, training: Array | None = None) -> Array:
    """Returns the examples that a step may visit, [..] int64, in the order in which it takes them. training: as
    `weights_of` has it."""
    return row_of(config).limit(config, table, draw_order(weights_of(config, table, training), seed, position))


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


def metrics(config: Any, table: Outcomes, training: Array | None = None) -> dict[str, float]:
    """Returns shares of all examples of the source: judged so far, solved (SOLVED), and judged but not visited now; and
    each task's share of the visits, where the curriculum chooses between tasks. Examples that are held out are never
    judged. training: as `weights_of` has it."""
    seen, judged = seen_of(config, table), table.judged > 0
    weights = weights_of(config, table, training)
    found = {
        "curriculum/seen": float(np.mean(judged)),
        "curriculum/solved": float(np.mean(seen & (table.rate >= SOLVED))),
        "curriculum/dropped": float(np.mean(judged & (weights <= 0))),
    }
    if row_of(config).of_tasks and weights.sum() > 0:
        shares = np.bincount(table.task, weights, minlength=len(table.recent)) / weights.sum()
        found |= {f"curriculum/task_{k}": float(share) for k, share in enumerate(shares)}
    return found
