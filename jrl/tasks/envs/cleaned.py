"""An environment that removes unsuitable examples from another one. No JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jrl.tasks.data.hygiene import clean
from jrl.tasks.envs.contract import REPEATED_PROMPT, Generated, Source, digest_of, named_verifiers, tasks_of
from jrl.tasks.example import Example
from jrl.tasks.stopping import Stop, check_stop


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cleaned:
    """A task without duplicates, evaluation prompts, and answers that cannot be judged well (F13). Opening it reads all
    examples; the examples that each rule dropped are counted."""

    task: Any = dataclasses.field(metadata={"table": "envs"})  # the task to clean
    evaluation: tuple[Any, ...] = dataclasses.field(
        default=(), metadata={"table": "envs"}
    )  # evaluation sets to exclude
    ngram: int = 10  # words of a shared n-gram that excludes a prompt; shorter prompts must match as a whole
    max_words: int | None = None  # of a prompt; None: any number


def open_cleaned(config: Cleaned, source: Source, evaluation: Sequence[Source], stop: Stop) -> Generated:
    """Returns the remaining examples of `source`.

    Args:
      evaluation: the opened sources of Cleaned.evaluation.

    Raises: ValueError for bounds below 1, or if nothing is left; StopRequested if `stop` returns True.
    """
    if config.ngram < 1 or (config.max_words is not None and config.max_words < 1):
        raise ValueError(f"Cleaned.ngram and max_words must be at least 1; got {config.ngram} and {config.max_words}")

    def examples(source: Source) -> Iterator[Example]:
        for index in range(len(source)):
            check_stop(stop, "reading the examples to be cleaned")
            yield source[index]

    held_out = (example for evaluation_set in evaluation for example in examples(evaluation_set))
    indices, dropped = clean(examples(source), held_out, n=config.ngram, most_words=config.max_words)
    if not indices:
        causes = ", ".join(f"{count} {rule}" for rule, count in sorted(dropped.items()))
        raise ValueError(f"Cleaned leaves no example of {len(source)}: {causes}")
    added = {rule: source.counts.get(rule, 0) + count for rule, count in dropped.items()}
    fingerprints = [each.fingerprint for each in (source, *evaluation)]
    return Generated(
        len(indices),
        lambda index: source[indices[index]],
        digest_of("cleaned", 3, config.ngram, config.max_words, *fingerprints),  # 3: the version of the rules
        {cause: count for cause, count in (source.counts | added).items() if cause != REPEATED_PROMPT},
        verifiers=named_verifiers(source),
        task=tasks_of(source)[indices],
    )
