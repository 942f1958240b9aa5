"""Another environment without the examples that should not be learned from. No JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jrl.tasks.data.hygiene import clean
from jrl.tasks.envs.contract import Generated, Source, digest_of, named_verifiers, tasks_of
from jrl.tasks.stopping import Stop, check_stop, never


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cleaned:
    """A task without duplicates, without what an evaluation set holds, and without answers that cannot be judged well
    (F13). All of its examples are read when it is opened; what each rule dropped is counted."""

    task: Any = dataclasses.field(metadata={"table": "envs"})  # what is cleaned
    evaluation: tuple[Any, ...] = dataclasses.field(default=(), metadata={"table": "envs"})  # sets to be kept out
    ngram: int = 10  # words that a prompt may not share with a prompt of these sets; shorter prompts: all of them
    max_words: int | None = None  # of a prompt; None: any number


def open_cleaned(config: Cleaned, source: Source, evaluation: Sequence[Source], stop: Stop = never) -> Generated:
    """Returns the examples of `source` that are left.

    Args:
      evaluation: those of Cleaned.evaluation, opened.

    Raises: ValueError for bounds below 1, or where nothing is left; StopRequested where `stop` says so.
    """
    if config.ngram < 1 or (config.max_words is not None and config.max_words < 1):
        raise ValueError(f"Cleaned.ngram and max_words must be at least 1; got {config.ngram} and {config.max_words}")

    def examples(source: Source) -> list:
        found = []
        for index in range(len(source)):
            check_stop(stop, "reading the examples to be cleaned")
            found.append(source[index])
        return found

    held_out = [example for held in evaluation for example in examples(held)]
    kept, dropped = clean(examples(source), held_out, n=config.ngram, most_words=config.max_words)
    if not kept:
        causes = ", ".join(f"{count} {rule}" for rule, count in sorted(dropped.items()))
        raise ValueError(f"Cleaned leaves no example of {len(source)}: {causes}")
    fingerprints = [one.fingerprint for one in (source, *evaluation)]
    return Generated(
        len(kept),
        lambda index: source[kept[index]],
        digest_of("cleaned", config.ngram, config.max_words, *fingerprints),
        {**source.counts, **{rule: source.counts.get(rule, 0) + count for rule, count in dropped.items()}},
        verifiers=named_verifiers(source),
        task=tasks_of(source)[kept],
    )
