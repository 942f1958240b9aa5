"""Contract tests of every row of CURRICULA, ours or a user's; each raises AssertionError where it fails. No JAX.

Each takes a row and a configuration of it, and tables of a few examples of several tasks, before the first visit and
after some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jrl.tasks.data.curricula import (
    ConfiguredCurriculum,
    Curriculum,
    Outcomes,
    no_outcomes,
    order_of,
    read_only,
    recorded,
    weights_of,
)

EXAMPLES, TASKS, VISITS, SAMPLES, STEPS = 24, 3, 6, 4, 40


def weights_are_of_the_examples(row: Curriculum, config: Any) -> None:
    """Weights are one finite number per example, at least 0, and above 0 somewhere before the first visit."""
    for table in _tables(row, config):
        weights = np.asarray(row.weights(config, table))
        _check(weights.shape == (EXAMPLES,), f"weights are {weights.shape} for {EXAMPLES} examples")
        _check(bool(np.isfinite(weights).all()), "a weight is not finite")
        _check(bool((weights >= 0).all()), "a weight is negative")
        _check(bool(table.step) or bool((weights > 0).any()), "no example has a weight before the first visit")


def tables_stay_as_they_are(row: Curriculum, config: Any) -> None:
    """No function writes into a table that it is given, and the same table gives the same result: a run that goes on
    from a checkpoint draws the prompts of one that was not stopped."""
    for table in _tables(row, config):
        first, second = (_results(row, config, read_only(table)) for _ in range(2))
        _check(all(map(_same, first, second)), "the same table gives another result: it reads numpy's random numbers, "
               "a clock or what a call changes")  # fmt: skip


def limit_chooses_from_the_order(row: Curriculum, config: Any) -> None:
    """What a step may visit is part of the order that `limit` is given, each example once and in that order."""
    for table in _tables(row, config):
        order = np.arange(EXAMPLES)[::-1].copy()
        place = {example: i for i, example in enumerate(order.tolist())}
        limited = row.limit(config, table, order)
        _check(isinstance(limited, np.ndarray), f"limit returns a {type(limited).__name__}; it must be an array")
        _check(order.tolist() == [*place], "limit writes into the order; return another array")
        _check(set(limited.tolist()) <= set(place), "limit returns examples that are not in the order")
        places = [place[example] for example in limited.tolist()]
        _check(places == sorted(set(places)), "limit changes the order, or returns an example twice")


def after_keeps_the_table(row: Curriculum, config: Any) -> None:
    """`after` returns a table with the shapes and dtypes of the one it is given: checkpoints hold it."""
    kinds = lambda table: [(np.shape(x), np.asarray(x).dtype) for x in table]
    for table in _tables(row, config):
        after = row.after(config, table)
        _check(isinstance(after, Outcomes), "after returns no Outcomes")
        _check(kinds(after) == kinds(table), "after changes a shape or a dtype of the table")


def comparing_is_declared(row: Curriculum, config: Any) -> None:
    """The weights of training examples depend on held-out ones, which are never visited, only where the row says
    `compares`: held-out examples are then left out of the table."""
    training = np.arange(EXAMPLES) % 2 == 0
    for table in _tables(row, config, training) if not row.compares else ():
        by_example = ("rate", "judged", "last", "history", "task")
        split = table._replace(**{name: getattr(table, name)[training] for name in by_example})
        shares = lambda weights: weights / weights.sum() if weights.any() else weights
        among_all = shares(np.asarray(row.weights(config, table))[training])
        alone = shares(np.asarray(row.weights(config, split)))
        _check(np.allclose(among_all, alone, atol=1e-6), "the weight of an example depends on examples that are never "
               "visited; say Curriculum(..., compares=True), so that held-out ones are left out")  # fmt: skip


CONTRACT_TESTS: dict[str, Callable[[Curriculum, Any], None]] = {
    test.__name__: test
    for test in (
        weights_are_of_the_examples,
        tables_stay_as_they_are,
        limit_chooses_from_the_order,
        after_keeps_the_table,
        comparing_is_declared,
    )
}


def _tables(row: Curriculum, config: Any, visited: np.ndarray | None = None) -> Iterator[Outcomes]:
    """Yields tables before the first visit and after some steps, whose outcomes are random. visited: [examples] bool,
    those that may be; None: all."""
    curriculum, rng = ConfiguredCurriculum(row, config), np.random.default_rng(0)
    table = no_outcomes(np.arange(EXAMPLES, dtype=np.int32) % TASKS, [curriculum])
    able = rng.random(EXAMPLES)
    for t in range(STEPS):
        if t in (0, 1, 2, 5, 10, 20):
            yield table
        order = order_of(curriculum, table, seed=0, position=t * VISITS) if weights_of(curriculum, table).any() else ()
        index = [i for i in order if visited is None or visited[i]][:VISITS]
        outcome = (rng.random((len(index), SAMPLES)) < able[index][:, None]).astype(np.float32)
        table = recorded(curriculum, table, index, outcome, np.ones(outcome.shape, bool))
    yield table


def _results(row: Curriculum, config: Any, table: Outcomes) -> list[np.ndarray]:
    order = np.arange(EXAMPLES)
    return [np.asarray(row.weights(config, table)), np.asarray(row.limit(config, table, order)),
            *map(np.asarray, row.after(config, table))]  # fmt: skip


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
