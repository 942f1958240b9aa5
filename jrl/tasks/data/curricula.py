"""Curricula: choose the prompts of the next step by the outcomes of earlier steps. One table serves all. No JAX.

    table (host) --weights--> probability of each prompt --draw_order--> the prompts of a step --outcomes--> table

The prompts of a draw are a function of the run's seed, the number of earlier visits, and the table at the time of the
draw. A curriculum is selected by its config class.
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
from jrl.tasks.wrong_result import WrongResult

Array = np.ndarray

SOLVED = 0.9  # success rate at which reports call a prompt solved; a running rate approaches 1 slowly


class Outcomes(NamedTuple):
    """The table of outcomes for every example of the source and for its K tasks. Saved with the run."""

    rate: Array  # [P] float32, running success rate; 0 if never judged
    judged: Array  # [P] int32, visits with a verdict
    last: Array  # [P] int32, the step of the last such visit
    step: Array  # [] int32, steps recorded
    history: Array  # [P, E] float32, success rates of the first visits, in order; NaN: no visit
    task: Array  # [P] int32, the index of the example's task in a mixture, 0..K-1
    recent: Array  # [K, W] float32, success rates of a task's last visits, oldest first; NaN: no visit
    level: Array  # [] int32, the current task, for a curriculum that visits one at a time


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
    """Samples prompts in proportion to (1 - success rate)^exponent + floor (F9)."""

    exponent: float = 1.0  # 0: uniform; above 1: mostly prompts that are seldom solved
    floor: float = 0.02  # weight of a solved prompt, so that forgetting is noticed

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exponent < 0 or self.floor < 0:
            raise ValueError(f"Prioritized.exponent and floor must be 0 or more; got {self.exponent} and {self.floor}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DifficultyBand(OutcomeMemory):
    """Samples uniformly from new prompts and those with a success rate within a band (F2)."""

    low: float = 0.1  # smallest success rate
    high: float = 0.9  # largest success rate
    forget_after: int | None = 100  # steps until a prompt counts as new; None: one that leaves the band never returns

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"DifficultyBand needs 0 <= low <= high <= 1; got {self.low} and {self.high}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardFocus(OutcomeMemory):
    """Samples uniformly from the share of prompts with the lowest success rates; new ones count as 0 (F6)."""

    share: float = 0.5  # of the prompts
    max_unsolved: int | None = None  # at most this many never-solved prompts in a step; None: any number

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share <= 1:
            raise ValueError(f"HardFocus.share must be above 0 and at most 1; got {self.share}")
        if self.max_unsolved is not None and self.max_unsolved < 1:
            raise ValueError(f"HardFocus.max_unsolved must be at least 1, or None; got {self.max_unsolved}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pilot(OutcomeMemory):
    """A pilot phase for curricula that choose prompts once: it samples uniformly and records the outcomes."""

    pilot: int = 30  # steps before the choice
    visits: int = 8  # at most this many visits are recorded per prompt

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pilot < 1 or self.visits < 2:
            raise ValueError(f"{type(self).__name__} needs pilot >= 1 and visits >= 2; got {self.pilot} and "
                             f"{self.visits}")  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class MostVaried(Pilot):
    """After the pilot, repeats the few of its prompts with the largest variance of their success rate (F14)."""

    count: int = 1  # prompts to choose

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count < 1:
            raise ValueError(f"MostVaried.count must be at least 1; got {self.count}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningImpact(Pilot):
    """After the pilot, visits the prompts with a success rate that followed the mean over prompts in it (F4)."""

    threshold: float = 0.2  # a prompt is chosen if its score is above this; below 1
    fewest: int = 2  # prompts with fewer visits in the pilot are left out

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.threshold < 1 or not 1 <= self.fewest <= self.visits:
            raise ValueError(f"LearningImpact needs threshold < 1 and 1 <= fewest <= visits; got {self}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizeMixing(OutcomeMemory):
    """Samples the tasks of a Mixture in proportion to (number of examples)^alpha; uniform within a task (F12)."""

    alpha: float = 0.5  # 1: proportional to size; 0: equal

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"SizeMixing.alpha must lie in [0, 1]; got {self.alpha}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgressMixing(OutcomeMemory):
    """Samples the tasks of a Mixture in proportion to the change of their success rate; uniform within a task (F12)."""

    window: int = 64  # visits of a task; the later half is compared with the earlier one
    floor: float = 0.05  # added to every task's change, so that no task is dropped

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 2 or not self.floor > 0:
            raise ValueError(f"ProgressMixing needs window >= 2 and floor > 0; got {self.window} and {self.floor}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveLevel(OutcomeMemory):
    """Visits one task of a Mixture at a time. The tasks are levels from the easiest to the hardest: one up if the
    success rate is high, one down if it is low (F8)."""

    window: int = 20  # the last visits at a level that decide, and the fewest before it changes
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
    # (config, table, [.] int64 in a random order) -> the examples that a step may visit, in that order
    limit: Callable[[Any, Outcomes, Array], Array] = lambda config, table, order: order
    after: Callable[[Any, Outcomes], Outcomes] = lambda config, table: table  # update after a step is recorded
    visits: Callable[[Any], int] = lambda config: 1  # E, visits of a prompt in `Outcomes.history`
    pilot: Callable[[Any], int] = lambda config: 0  # steps during which `Outcomes.history` is recorded
    window: Callable[[Any], int] = lambda config: 1  # W
    of_tasks: bool = False  # it chooses between the tasks of a mixture
    # the weight of an example depends on the other examples, so held-out ones must be excluded
    compares: bool = False


def hard_weights(config: HardFocus, table: Outcomes) -> Array:
    seen = seen_of(config, table)
    return hardest(np.where(seen, table.rate, 0), share=config.share).astype(np.float64)


def limit_unsolved(config: HardFocus, table: Outcomes, order: Array) -> Array:
    if config.max_unsolved is None:
        return order
    rate = np.where(seen_of(config, table), table.rate, 1)  # a prompt never tried does not count as unsolved
    return order[cap_unsolved(rate[order], most=config.max_unsolved)]


def varied_weights(config: MostVaried, table: Outcomes) -> Array:
    if table.step < config.pilot:
        return np.ones(len(table.rate))
    weights = np.zeros(len(table.rate))
    visited = np.flatnonzero(np.isfinite(table.history).any(axis=1))  # so no held-out example fills up the count
    weights[visited[most_varied(table.history[visited], count=config.count)]] = 1
    return weights


def impact_weights(config: LearningImpact, table: Outcomes) -> Array:
    if table.step < config.pilot:
        return np.ones(len(table.rate))
    rates, enough = fill_epochs(table.history, fewest=config.fewest)
    if not enough.any():
        return np.zeros(len(rates))
    return (enough & (learning_impact(rates, rates[enough].mean(axis=0)) > config.threshold)).astype(np.float64)


def task_weights(table: Outcomes, shares: Array) -> Array:
    """Returns weights of examples, [P] float64, that visit each task in proportion to its share. shares: [K]."""
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


class ConfiguredCurriculum(NamedTuple):
    """A curriculum as a stage has it: its row of CURRICULA, and its config."""

    row: Curriculum
    config: Any


def no_outcomes(task: Array, configured: Sequence[ConfiguredCurriculum] = ()) -> Outcomes:
    """Returns the table of a source before any visit.

    Args:
      task: [P] int32, the task index of each example. configured: the curricula that read the table.

    Raises: ValueError if a curriculum chooses between tasks and there is only one.
    """
    tasks = int(task.max()) + 1
    for row, _ in configured:
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
        history=unknown(size, max([1, *(row.visits(config) for row, config in configured)])),
        task=np.asarray(task, np.int32),
        recent=unknown(tasks, max([1, *(row.window(config) for row, config in configured)])),
        level=zeros(np.int32),
    )


def seen_of(config: OutcomeMemory, table: Outcomes) -> Array:
    """Returns whether the outcome of each example counts, [P] bool: judged, and not yet forgotten."""
    seen = table.judged > 0
    return seen if config.forget_after is None else seen & (table.step - table.last < config.forget_after)


def weights_of(curriculum: ConfiguredCurriculum, table: Outcomes, training: Array | None = None) -> Array:
    """Returns the unnormalized probability that each example is visited, [P] float64; 0: never.

    Args:
      training: [P] bool, the examples of the training split. Others are ignored: they are not among the hardest and do
        not count in the size of a task. None: all are in the training split.
    """
    if training is None:
        return _checked_weights(curriculum, table)
    by_example = ("rate", "judged", "last", "history", "task")
    split = table._replace(**{name: getattr(table, name)[training] for name in by_example})
    weights = np.zeros(len(training), np.float64)
    if training.any():
        weights[training] = _checked_weights(curriculum, split)
    return weights


def _checked_weights(curriculum: ConfiguredCurriculum, table: Outcomes) -> Array:
    """Returns a curriculum's weights of all examples of the table. Raises WrongResult if they are not what they must
    be."""
    row, config = curriculum
    name = f"Online.curriculum = @{type(config).__name__}()"
    weights = _array_of(row.weights(config, read_only(table)), f"{name} returns weights", row.weights)
    if weights.shape != table.rate.shape:
        raise WrongResult(f"{name} returns weights of the shape {weights.shape} for {len(table.rate)} examples",
                          row.weights)  # fmt: skip
    if not np.can_cast(weights.dtype, np.float64, "same_kind"):  # bfloat16 too: its kind is V
        raise WrongResult(f"{name} returns weights of the dtype {weights.dtype}; they must be numbers", row.weights)
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise WrongResult(f"{name} returns weights that are negative, infinite or NaN; they must be 0 or more",
                          row.weights)  # fmt: skip
    return weights.astype(np.float64)


def _array_of(result: Any, subject: str, function: Callable[..., Any]) -> Array:
    """Returns what a user's function returned as an array. Raises WrongResult for rows of several lengths."""
    try:
        return np.asarray(result)
    except ValueError as error:
        raise WrongResult(f"{subject} that are no array: {error}", function) from None


def read_only(table: Outcomes) -> Outcomes:
    """Returns the table without the right to write into its arrays: what a curriculum changes is a new table."""
    views = [np.asarray(array).view() for array in table]
    for view in views:
        view.flags.writeable = False
    return Outcomes(*views)


def recorded(
    curriculum: ConfiguredCurriculum, table: Outcomes, index: Sequence[int], outcome: Array, valid: Array
) -> Outcomes:
    """Returns the table after a step.

    The success rate of a visit is the mean over its judged completions; a visit without any changes nothing. The
    running rate starts as that of the first visit; each later visit sets it to decay * rate + (1 - decay) * the visit's
    rate, in order.

    Args:
      index: the example of each visit. outcome: [visits, G] float, ignored where not valid. valid: [visits, G] bool.

    Raises: WrongResult if the curriculum's `after` returns no table, or one of other shapes or dtypes.
    """
    row, config = curriculum
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
    updated = table._replace(
        rate=rate, judged=judged, last=last, step=np.asarray(step, np.int32), history=history, recent=recent
    )
    after = row.after(config, read_only(updated))
    name = f"Online.curriculum = @{type(config).__name__}(): `after`"
    if not isinstance(after, Outcomes):
        raise WrongResult(f"{name} returns a {type(after).__name__}; it must return a table: table._replace(...)",
                          row.after)  # fmt: skip
    kind = lambda array: f"{array.dtype}{list(array.shape)}"
    for field, (old, new) in zip(Outcomes._fields, zip(updated, after)):
        new = _array_of(new, f"{name} returns values of `{field}`", row.after)
        if kind(new) != kind(old):  # no run could go on from a checkpoint that holds it
            raise WrongResult(f"{name} returns a table whose `{field}` is {kind(new)}; it must stay {kind(old)}",
                              row.after)  # fmt: skip
    return after


def order_of(
    curriculum: ConfiguredCurriculum, table: Outcomes, seed: int, position: int, training: Array | None = None
) -> Array:
    """Returns the examples that a step may visit, [..] int64, in the order in which it takes them. training: as in
    `weights_of`. Raises WrongResult if the curriculum's `limit` returns anything else than a part of the order."""
    (row, config), order = curriculum, draw_order(weights_of(curriculum, table, training), seed, position)
    order.flags.writeable = False
    limited = row.limit(config, read_only(table), order)
    if limited is order:
        return order
    name = f"Online.curriculum = @{type(config).__name__}(): `limit`"
    limited = _array_of(limited, f"{name} returns examples", row.limit)
    place = np.full(len(table.rate), -1)
    place[order] = np.arange(len(order))
    is_part = limited.ndim == 1 and limited.dtype.kind in "iu" and np.isin(limited, order).all()
    if limited.size and not (is_part and (np.diff(place[limited]) > 0).all()):
        raise WrongResult(f"{name} returns something else than examples of the order that it is given, each once and "
                          "in that order", row.limit)  # fmt: skip
    return limited.astype(np.int64)


def draw_order(weights: Array, seed: int, position: int) -> Array:
    """Returns the examples with positive weight in a random order, [..] int64: weighted sampling without replacement.

    Uses exponential races: example i finishes at -log(u_i) / w_i. The draws are a function of seed and position.

    Source: Efraimidis and Spirakis, 2006.
    """
    key = hashlib.sha256(f"curriculum/{seed}".encode()).digest()
    bits = np.random.Philox(key=int.from_bytes(key[:16], "little"), counter=position << 64).random_raw(len(weights))
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    candidates = np.flatnonzero(weights > 0)
    return candidates[np.argsort(-np.log(uniform[candidates]) / weights[candidates], kind="stable")]


def none_left(config: Any, table: Outcomes) -> str:
    """Returns a message that says why no prompt can be visited."""
    seen = seen_of(config, table)
    rate = table.rate[seen]
    judged, solved, never = (int(np.sum(x)) for x in (seen, rate >= SOLVED, rate <= 0))
    return (
        f"{type(config).__name__} leaves no prompt after {int(table.step)} steps: of {len(seen)} examples {judged} "
        f"were judged, {solved} of them solved and {never} never. Widen it, set forget_after so that prompts "
        "come back, or take other prompts"
    )


def metrics(curriculum: ConfiguredCurriculum, table: Outcomes, training: Array | None = None) -> dict[str, float]:
    """Returns shares of all examples of the source: judged so far, solved (SOLVED), and judged but with weight 0; and
    each task's share of the visits, if the curriculum chooses between tasks. Held-out examples are never judged.
    training: as in `weights_of`."""
    seen, judged = seen_of(curriculum.config, table), table.judged > 0
    weights = weights_of(curriculum, table, training)
    values = {
        "curriculum/seen": float(np.mean(judged)),
        "curriculum/solved": float(np.mean(seen & (table.rate >= SOLVED))),
        "curriculum/dropped": float(np.mean(judged & (weights <= 0))),
    }
    if curriculum.row.of_tasks and weights.sum() > 0:
        shares = np.bincount(table.task, weights, minlength=len(table.recent)) / weights.sum()
        values |= {f"curriculum/task_{k}": float(share) for k, share in enumerate(shares)}
    return values
