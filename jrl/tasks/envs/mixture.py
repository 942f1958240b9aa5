"""A mixture of environments as one source, interleaved by index in exact proportions. No JAX."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from jrl import paths
from jrl.tasks.envs.cleaned import Cleaned, open_cleaned
from jrl.tasks.envs.contract import Environment, Generated, Source, check_opened, digest_of, named_verifiers
from jrl.tasks.envs.filtered import Filtered, open_filtered
from jrl.tasks.example import Example
from jrl.tasks.stopping import Stop, check_stop, never

_LONGEST_CYCLE = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """Tasks in proportion to their weights. The mixture ends when every task has been read once. Tasks that end earlier
    start over, with new ids for the repeated examples."""

    tasks: tuple[Any, ...] = dataclasses.field(metadata={"table": "envs"})  # the tasks to mix
    weights: tuple[float, ...] = ()  # one for each task; empty: equal


def open_source(config: Any, table: Mapping[str, Environment], stop: Stop = never) -> Source:
    """Returns the source for `config`, an instance of the config class of a row of `table`.

    `table` is the run's table, with the rows of parts files, so a mixture may contain any of them.

    Raises: ValueError if no row has this config class; StopRequested if `stop` returns True while a file is read.
    """
    name = type(config).__name__
    if name not in table or table[name].config is not type(config):
        near = difflib.get_close_matches(name, table, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"Unknown environment {name!r}.{hint} Available: {', '.join(table)}")
    if isinstance(config, Mixture):
        return mix([open_source(task, table, stop) for task in config.tasks], config.weights)
    if isinstance(config, Cleaned):
        held_out = [open_source(task, table, stop) for task in config.evaluation]
        return open_cleaned(config, open_source(config.task, table, stop), held_out, stop)
    if isinstance(config, Filtered):
        held_out = [open_source(task, table, stop) for task in config.evaluation]
        return open_filtered(config, open_source(config.task, table, stop), held_out, stop)
    check_stop(stop, "opening data")
    row = table[name]
    if getattr(config, "path", None) is not None and paths.is_remote(config.path):
        config = dataclasses.replace(config, path=str(paths.readable(config.path)))
    source = row.open(config, stop) if row.takes_stop else row.open(config)
    check_opened(name, source)
    return source


def mix(sources: list[Source], weights: tuple[float, ...] = ()) -> Source:
    """Returns the interleaved source.

    One cycle contains task k exactly w_k times (the weights as smallest integers), spread out by always taking the task
    that is furthest behind its share. Index i is slot i mod cycle of cycle i // cycle.

    Raises: ValueError if there is no task, a task has no examples, or the weights do not match the tasks, are not
        positive, or have no small common denominator.
    """
    if not sources:
        raise ValueError("Mixture.tasks is empty")
    if empty := [task for task, source in enumerate(sources) if not len(source)]:
        raise ValueError(f"Mixture.tasks[{empty[0]}] has no examples; leave it out")
    counts = integer_weights(weights or (1.0,) * len(sources), len(sources))
    cycle = sum(counts)
    taken = [0] * len(sources)
    slots: list[tuple[int, int]] = []  # (task, its earlier slots in this cycle)
    for slot in range(cycle):
        behind = [(slot + 1) * count / cycle - so_far for count, so_far in zip(counts, taken)]
        task = behind.index(max(behind))  # the first on a tie
        slots.append((task, taken[task]))
        taken[task] += 1
    size = max(_ends(len(source), task, count, slots) for task, (source, count) in enumerate(zip(sources, counts)))

    def make(index: int) -> Example:
        task, before = slots[index % cycle]
        step = index // cycle * counts[task] + before
        epoch, local = divmod(step, len(sources[task]))
        example = sources[task][local]
        suffix = f"/again{epoch}" if epoch else ""
        return dataclasses.replace(example, id=f"{task}/{example.id}{suffix}")

    totals: dict[str, int] = {}
    for source in sources:
        for cause, count in source.counts.items():
            totals[cause] = totals.get(cause, 0) + count
    names = collections.Counter(source[0].task for source in sources)
    if same_name := sum(count for count in names.values() if count > 1):
        totals["task_of_same_name"] = same_name  # a warning: metrics and objectives treat them as one task
    return Generated(
        size,
        make,
        digest_of("mixture", counts, *(source.fingerprint for source in sources)),
        totals,
        verifiers=frozenset().union(*map(named_verifiers, sources)),
        task=np.resize(np.array([task for task, _ in slots], np.int32), size),
    )


def integer_weights(weights: tuple[float, ...], num_tasks: int) -> list[int]:
    """Returns the smallest integers in proportion to `weights`, which are rounded to fractions of the largest."""
    if len(weights) != num_tasks:
        raise ValueError(f"Mixture.weights has {len(weights)} numbers for {num_tasks} tasks")
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"Mixture.weights: {weight} is not a positive number; leave the task out instead")
    exact = [Fraction(weight / max(weights)).limit_denominator(1000) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    counts = [int(weight * common) for weight in exact]
    counts = [count // math.gcd(*counts) for count in counts]
    if min(counts) < 1 or sum(counts) > _LONGEST_CYCLE:
        raise ValueError(
            f"Mixture.weights {weights}: in whole numbers {counts}, which must each be at least 1 and at most "
            f"{_LONGEST_CYCLE} together; use rounder weights, such as (3, 1)"
        )
    return counts


def _ends(length: int, task: int, count: int, slots: list[tuple[int, int]]) -> int:
    """Returns the size of the mixture at which a task of `length` examples has been read exactly once."""
    cycles, before = divmod(length - 1, count)
    return cycles * len(slots) + slots.index((task, before)) + 1
