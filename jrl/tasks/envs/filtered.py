"""Another environment without duplicates, and without what evaluation sets hold. No JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from jrl.tasks.data.contamination import EvaluationIndex, Overlap, described, repeats
from jrl.tasks.envs.contract import Source, digest_of, in_range, named_verifiers, tasks_of
from jrl.tasks.example import Example
from jrl.tasks.stopping import Stop, check_stop, never

Action = Literal["drop", "report", "refuse"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filtered:
    """A task without examples that it holds twice, and without prompts of evaluation sets. All of its examples are read
    when it is opened. Unlike Cleaned it looks at no answer, so that it is for conversations and pairs, too."""

    task: Any = dataclasses.field(metadata={"table": "envs"})  # what is filtered
    duplicates: Action = "drop"  # examples with the prompt, answer, rejected answer and label of an earlier one
    evaluation: tuple[Any, ...] = dataclasses.field(default=(), metadata={"table": "envs"})  # sets to be kept out
    contaminated: Action = "drop"  # examples whose prompt holds one of these sets
    ngram: int | None = 8  # words of an n-gram that counts as shared; None: only prompts of the same words
    overlap: float = 0.5  # share of an evaluation prompt's words, in shared n-grams, above which it is held

    def __post_init__(self) -> None:
        if self.ngram is not None and self.ngram < 1:
            raise ValueError(f"Filtered.ngram must be at least 1, or None; got {self.ngram}")
        if not 0 <= self.overlap < 1:
            raise ValueError(f"Filtered.overlap is a share, at least 0 and below 1; got {self.overlap}")


@dataclasses.dataclass(frozen=True, eq=False)
class FilteredSource:
    """The examples that are left, and what the others share with evaluation sets."""

    source: Source
    kept: np.ndarray  # [n] int64, their places in `source`
    overlaps: tuple[Overlap, ...]  # of all examples, also those that are left out
    fingerprint: str
    counts: dict[str, int]
    verifiers: frozenset[str]
    task: np.ndarray  # [n] int32

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> Example:
        return self.source[int(self.kept[in_range(index, len(self))])]


def open_filtered(config: Filtered, source: Source, evaluation: Sequence[Source], stop: Stop = never) -> FilteredSource:
    """Returns the examples of `source` that are left.

    Args:
      evaluation: the sources of Filtered.evaluation, opened.

    Raises: ValueError where something is found that is to be refused, naming the examples, or nothing is left;
        StopRequested where `stop` says so.
    """

    def examples(source: Source):
        for index in range(len(source)):
            check_stop(stop, "reading the examples to be filtered")
            yield source[index]

    index = EvaluationIndex((one for held in evaluation for one in examples(held)), config.ngram)
    found = {place: index.overlap(example) for place, example in enumerate(examples(source))} if len(index) else {}
    overlaps = {place: one for place, one in found.items() if one is not None and one.share > config.overlap}
    twice = repeats(examples(source))
    if overlaps and config.contaminated == "refuse":
        lines = "; ".join(described(tuple(overlaps.values()), 5))
        raise ValueError(f"{len(overlaps)} of {len(source)} examples hold prompts of Filtered.evaluation: {lines}")
    if twice and config.duplicates == "refuse":
        place, first = twice[0]
        raise ValueError(f"{len(twice)} of {len(source)} examples repeat earlier ones: {source[place].id} is "
                         f"{source[first].id} again")  # fmt: skip
    counts = dict(source.counts)
    names = ["duplicate"] * len(twice) + [f"contaminated_{one.kind}" for one in overlaps.values()]
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    left = np.ones(len(source), bool)
    if config.duplicates == "drop":
        left[[place for place, _ in twice]] = False
    if config.contaminated == "drop":
        left[list(overlaps)] = False
    if not left.any():
        raise ValueError(f"Filtered leaves no example of {len(source)}: {dict(sorted(counts.items()))}")
    rules = (config.duplicates, config.contaminated, config.ngram, config.overlap)
    return FilteredSource(
        source=source,
        kept=np.flatnonzero(left),
        overlaps=tuple(overlaps.values()),
        fingerprint=digest_of("filtered", *rules, *(one.fingerprint for one in (source, *evaluation))),
        counts=counts,
        verifiers=named_verifiers(source),
        task=tasks_of(source)[left],
    )
