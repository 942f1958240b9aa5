"""An environment that removes duplicates and evaluation prompts from another one. No JAX."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from jrl.tasks.data.contamination import EvaluationIndex, Overlap, described, example_digest
from jrl.tasks.envs.contract import REPEATED_PROMPT, Source, digest_of, in_range, named_verifiers, tasks_of
from jrl.tasks.example import Example
from jrl.tasks.stopping import Stop, check_stop, never

Action = Literal["drop", "report", "refuse"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filtered:
    """A task without duplicates and evaluation prompts. Opening it reads all examples. Unlike Cleaned, it has no rules
    about answers, so it also works for conversations and pairs."""

    task: Any = dataclasses.field(metadata={"table": "envs"})  # the task to filter
    duplicates: Action = "drop"  # examples with the prompt, answer, rejected answer and label of an earlier one
    evaluation: tuple[Any, ...] = dataclasses.field(
        default=(), metadata={"table": "envs"}
    )  # evaluation sets to exclude
    contaminated: Action = "drop"  # examples whose prompt contains a prompt of these sets
    ngram: int | None = 8  # words of an n-gram that counts as shared; None: only prompts with the same words
    overlap: float = 0.5  # share of an evaluation prompt's words in shared n-grams above which a prompt contains it

    def __post_init__(self) -> None:
        if self.ngram is not None and self.ngram < 1:
            raise ValueError(f"Filtered.ngram must be at least 1, or None; got {self.ngram}")
        if not 0 <= self.overlap < 1:
            raise ValueError(f"Filtered.overlap is a share, at least 0 and below 1; got {self.overlap}")


@dataclasses.dataclass(frozen=True, eq=False)
class FilteredSource:
    """The remaining examples, and the overlaps with evaluation sets."""

    source: Source
    indices: np.ndarray  # [n] int64, of the examples in `source`
    overlaps: tuple[Overlap, ...]  # of all examples above Filtered.overlap, dropped ones included
    fingerprint: str
    counts: dict[str, int]
    verifiers: frozenset[str]
    task: np.ndarray  # [n] int32

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Example:
        return self.source[int(self.indices[in_range(index, len(self))])]


def open_filtered(config: Filtered, source: Source, evaluation: Sequence[Source], stop: Stop = never) -> FilteredSource:
    """Returns the remaining examples of `source`.

    Args:
      evaluation: the opened sources of Filtered.evaluation.

    Raises: ValueError naming the examples if there are some with the action "refuse", or if nothing is left;
        StopRequested if `stop` returns True.
    """

    def examples(source: Source):
        for index in range(len(source)):
            check_stop(stop, "reading the examples to be filtered")
            yield source[index]

    index = EvaluationIndex((example for held_out in evaluation for example in examples(held_out)), config.ngram)
    overlaps: dict[int, Overlap] = {}
    duplicates: list[tuple[int, int]] = []  # (example, the first that it repeats)
    first_with: dict[bytes, int] = {}
    prompts = array.array("Q")  # of every example, if some repeat one
    for i, example in enumerate(examples(source)):
        if REPEATED_PROMPT in source.counts:
            prompts.append(int.from_bytes(example.prompt_digest()[:8], "little"))
        if (overlap := index.overlap(example)) is not None and overlap.share > config.overlap:
            overlaps[i] = overlap
        if (first := first_with.setdefault(example_digest(example), i)) != i:
            duplicates.append((i, first))
    if overlaps and config.contaminated == "refuse":
        lines = "; ".join(described(tuple(overlaps.values()), 5))
        raise ValueError(f"{len(overlaps)} of {len(source)} examples hold prompts of Filtered.evaluation: {lines}. "
                         "Filtered.contaminated = 'drop' drops them")  # fmt: skip
    if duplicates and config.duplicates == "refuse":
        repeated, first = duplicates[0]
        raise ValueError(f"{len(duplicates)} of {len(source)} examples repeat earlier ones: {source[repeated].id} is "
                         f"{source[first].id} again. Filtered.duplicates = 'drop' drops them")  # fmt: skip
    counts = {cause: count for cause, count in source.counts.items() if cause != REPEATED_PROMPT}
    names = ["duplicate"] * len(duplicates) + [f"contaminated_{overlap.kind}" for overlap in overlaps.values()]
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    keep = np.ones(len(source), bool)
    if config.duplicates == "drop":
        keep[[repeated for repeated, _ in duplicates]] = False
    if config.contaminated == "drop":
        keep[list(overlaps)] = False
    if not keep.any():
        raise ValueError(f"Filtered leaves no example of {len(source)}: {dict(sorted(counts.items()))}")
    if prompts:
        kept = np.asarray(prompts, np.uint64)[keep]
        if repeats := len(kept) - len(np.unique(kept)):
            counts[REPEATED_PROMPT] = repeats
    rules = (config.duplicates, config.contaminated, config.ngram, config.overlap)
    return FilteredSource(
        source=source,
        indices=np.flatnonzero(keep),
        overlaps=tuple(overlaps.values()),
        fingerprint=digest_of("filtered", *rules, *(each.fingerprint for each in (source, *evaluation))),
        counts=counts,
        verifiers=named_verifiers(source),
        task=tasks_of(source)[keep],
    )
