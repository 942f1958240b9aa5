"""Several environments as one source, interleaved by index in exact proportions. No JAX."""

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
    """Tasks in proportion to their weights. The mixture ends when the task that takes longest has been walked once;
    those that end before start over, as further examples with ids of their own."""

    tasks: tuple[Any, ...] = dataclasses.field(metadata={"table": "envs"})  # the sources that are mixed
    weights: tuple[float, ...] = ()  # one for each task; empty: equal


def open_source(config: Any, table: Mapping[str, Environment], stop: Stop = never) -> Source:
    """Returns the source that `config`, an instance of some row's config class, describes.

    `table` is the one of the run, the user's parts included, so that a mixture may hold any of its rows.

    Raises: ValueError where no row has this config class; StopRequested where `stop` says so while a file is read.
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

    One cycle holds task k exactly w_k times (the weights as least whole numbers), spread out by always taking the task
    that is furthest behind its share; index i is place i mod cycle of cycle i // cycle.

    Raises: ValueError where there is no task, one has no examples, weights do not match the tasks, are not positive, or
        have no small common measure.
    """
    if not sources:
        raise ValueError("Mixture.tasks is empty")
    if empty := [place for place, source in enumerate(sources) if not len(source)]:
        raise ValueError(f"Mixture.tasks[{empty[0]}] has no examples; leave it out")
    counts = integer_weights(weights or (1.0,) * len(sources), len(sources))
    cycle = sum(counts)
    taken = [0] * len(sources)
    places: list[tuple[int, int]] = []  # (task, how many of it came before in this cycle)
    for place in range(cycle):
        behind = [(place + 1) * count / cycle - so_far for count, so_far in zip(counts, taken)]
        task = behind.index(max(behind))  # the first of equals
        places.append((task, taken[task]))
        taken[task] += 1
    size = max(_ends(len(source), task, count, places) for task, (source, count) in enumerate(zip(sources, counts)))

    def make(index: int) -> Example:
        task, before = places[index % cycle]
        step = index // cycle * counts[task] + before
        walk, local = divmod(step, len(sources[task]))
        example = sources[task][local]
        again = f"/again{walk}" if walk else ""
        return dataclasses.replace(example, id=f"{task}/{example.id}{again}")

    counted: dict[str, int] = {}
    for source in sources:
        for cause, count in source.counts.items():
            counted[cause] = counted.get(cause, 0) + count
    named = collections.Counter(source[0].task for source in sources)
    if alike := sum(count for count in named.values() if count > 1):
        counted["task_of_same_name"] = alike  # noticed: metrics and objectives take them for one
    return Generated(
        size,
        make,
        digest_of("mixture", counts, *(source.fingerprint for source in sources)),
        counted,
        verifiers=frozenset().union(*map(named_verifiers, sources)),
        task=np.resize(np.array([task for task, _ in places], np.int32), size),
    )


def integer_weights(weights: tuple[float, ...], num_tasks: int) -> list[int]:
    """Returns the least whole numbers in proportion to `weights`, read as fractions of the largest."""
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


def _ends(length: int, task: int, count: int, places: list[tuple[int, int]]) -> int:
    """The size of the mixture at which a task of `length` examples has been walked exactly once."""
    cycles, before = divmod(length - 1, count)
    return cycles * len(places) + places.index((task, before)) + 1
