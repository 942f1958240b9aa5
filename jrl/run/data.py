"""The examples of a run: those of its task, and of stages with their own task."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.compatibility import check
from jrl.experiment import Config, Tables, configured_curriculum, stage_names, stored_rows_of
from jrl.rollout.scoring import Scorer
from jrl.run.offline import OfflineStage, PretrainingRows, stored_rows
from jrl.run.online import OnlineStage
from jrl.run.report.text import counted
from jrl.tasks.data.curricula import no_outcomes
from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.stream import ENOUGH_SEEN, Stream, open_stream
from jrl.tasks.envs.contract import REPEATED_PROMPT, Source, digest_of, tasks_of
from jrl.tasks.envs.mixture import open_source
from jrl.tasks.stopping import Stop, never

SHOWN_EVERY = 100  # rows; one may take a tenth of a second
LOOKED_AT = 16  # examples of a stored source to try before a run begins


class RunData(NamedTuple):
    """The examples of a run."""

    source: Source  # of Config.task
    stored: Sequence[Source]  # of every stage with stored rows, in order


def open_data(config: Config, tables: Tables, stop: Stop) -> RunData:
    """Returns the examples of a run. Raises StopRequested if `stop` says so; ValueError as `check_named_verifiers`."""
    open_ = lambda task: open_source(task, tables["envs"], stop)
    source = open_(config.task)
    check_named_verifiers(config, tables, source)
    return RunData(source, stored_sources(config, source, open_))


def showing_rows(stop: Stop, phase: Callable[..., None]) -> Stop:
    """Returns `stop` for what polls it as it reads rows, about once for each, so that the phase "data" counts them."""
    polls = itertools.count(1)

    def poll() -> bool:
        if (count := next(polls)) % SHOWN_EVERY == 0:
            phase("data", done=count)
        return stop()

    return poll


def note_counts(config: Config, data: RunData, note: Callable[[str], None]) -> None:
    """Reports how many examples a run has, and how many were dropped."""
    for name, source in {"": data.source, **of_their_own(config, data.stored)}.items():
        if source.counts:
            others = {cause: count for cause, count in source.counts.items() if cause != REPEATED_PROMPT}
            notes = [counted(len(source), "example")]
            if repeated := source.counts.get(REPEATED_PROMPT):
                what = "repeat the prompt of another and are kept"
                notes.append(
                    f"{repeated} of them {what if repeated > 1 else 'repeats the prompt of another and is kept'}"
                )
            counts = ", ".join(f"{count} {cause}" for cause, count in sorted(others.items()))
            notes += [f"dropped or noticed: {counts}"] * bool(others)
            note(f"{name}{': ' * bool(name)}{'; '.join(notes)}")


def stored_sources(config: Config, source: Source, open_: Callable[[Any], Source]) -> list[Source]:
    """Returns the examples of every stage with stored rows: of its own task, which is opened once for all stages that
    have it, or of the run's.

    Args:
      source: of Config.task.
    """
    tasks = [rows.task for stage in config.stages if (rows := stored_rows_of(stage)) is not None]
    opened: list[tuple[Any, Source]] = [(None, source), (config.task, source)]
    for task in tasks:
        if all(task != opened_task for opened_task, _ in opened):
            opened.append((task, open_(task)))
    return [next(examples for opened_task, examples in opened if task == opened_task) for task in tasks]


def of_their_own(config: Config, stored: Sequence[Source]) -> dict[str, Source]:
    """Returns the examples of stages whose stored rows have their own task, by the name of the stage."""
    by_stage = [(name, stored_rows_of(stage)) for name, stage in zip(stage_names(config.stages), config.stages)]
    with_rows = [(name, rows) for name, rows in by_stage if rows is not None]
    return {name: source for (name, rows), source in zip(with_rows, stored) if rows.task is not None}


def check_named_verifiers(config: Config, tables: Tables, source: Source) -> None:
    """Raises ValueError if examples name a verifier first that only watches, and a stage learns from the first
    verifier's verdicts: `jrl.compatibility.check` refuses that of Scoring.verifiers, which such examples replace."""
    configured = {type(verifier).__name__: verifier for verifier in reversed(config.scoring.verifiers)}
    watching = {name: verifier for name, verifier in configured.items() if not verifier.weight > 0}
    examples = (source[i] for i in range(min(len(source), ENOUGH_SEEN) if watching else 0))
    for name in sorted(watching.keys() & {example.verifiers[0] for example in examples if example.verifiers}):
        others = (verifier for verifier in config.scoring.verifiers if verifier is not watching[name])
        scoring = dataclasses.replace(config.scoring, verifiers=(watching[name], *others))
        try:
            check(dataclasses.replace(config, scoring=scoring), tables)
        except ValueError as error:
            raise ValueError(f"Examples name {name} as their first verifier, and Scoring.verifiers gives it no weight "
                             f"above 0: {error}") from error  # fmt: skip


def data_fingerprint(config: Config, source: Source, stored: Sequence[Source]) -> str:
    """Returns a fingerprint of the examples of a run: of Config.task, and of stages with their own tasks."""
    fingerprint = lambda examples: getattr(examples, "fingerprint", "")
    stage_sources = of_their_own(config, stored)
    if not stage_sources:
        return fingerprint(source)
    by_stage = (f"{name}={fingerprint(stage_source)}" for name, stage_source in stage_sources.items())
    return digest_of("stages", fingerprint(source), *by_stage)


def open_streams(
    config: Config, tables: Tables, source: Source, stored: Sequence[Source], tokenizer: Any, stop: Stop = never
) -> list[Stream]:
    """Returns the streams over the training split: first that of the prompts that Online stages sample, then one for
    each stage with stored rows, in order, over its examples in `stored`.

    Reads every example for a curriculum that compares them. Raises StopRequested if `stop` returns True."""
    sources = (source, *stored)
    seeds = np.random.SeedSequence(config.run.seed).generate_state(max(len(sources), 2))[: len(sources)]
    streams = [open_stream(examples, tokenizer, config.data, seed=int(seed)) for examples, seed in zip(sources, seeds)]
    curricula = [
        curriculum for stage in config.stages if (curriculum := configured_curriculum(stage, tables)) is not None
    ]
    if curricula:
        streams[0].outcomes = no_outcomes(tasks_of(source), curricula)
        for curriculum in curricula:
            streams[0].training_examples(curriculum, stop)
    return streams


def preflight_data(
    config: Config,
    data: RunData,
    tokenizer: Any,
    stages: Sequence[OfflineStage | OnlineStage],
    scorer: Scorer,
    held_out: Callable[[Stop], list[Visit]],
    stop: Stop,
) -> None:
    """Raises ValueError for data that would stop a run later: no usable prompt, no stored row, nothing held out for
    evaluation, no verifier for the first prompt, or no prompt with what a strategy reads. The run opens streams of its
    own."""
    open_ = lambda source: open_stream(source, tokenizer, config.data, seed=config.run.seed, stop=stop)
    stored = iter(data.stored)
    for stage in stages:
        rows = stored_rows(stage)
        if rows is not None:
            source = next(stored)
            check_stored_source(stage.name, rows, source, open_, tokenizer)
        if isinstance(stage, OfflineStage):
            check_labels(stage, source, open_, tokenizer)
        elif stage.config.steps:
            check_examples(stage, data.source)
            prompts = open_(data.source).next(min(len(data.source), ENOUGH_SEEN))
            scorer.rows_for(prompts[0].example)
            strategy = stage.sampler.strategy
            strategy.row.check_prompts(strategy.config, prompts)
    if config.eval is not None:
        for visit in held_out(stop):
            scorer.rows_for(visit.example)


def check_examples(stage: OnlineStage, source: Source) -> None:
    """Raises ValueError if the state of a stage's objective has no entry for some example."""
    most = stage.objective.needs(stage.config.objective).examples
    if most is not None and len(source) > most:
        name = type(stage.config.objective).__name__
        raise ValueError(f"stage {stage.name}: the state of {name} has entries for {most} examples (Needs.examples), "
                         f"and the source has {len(source)}; raise the number in its configuration")  # fmt: skip


def check_stored_source(
    name: str,
    stage: OfflineStage | PretrainingRows,
    source: Source,
    open_: Callable[[Source], Stream],
    tokenizer: Any,
) -> None:
    """Raises ValueError if the first examples of a stage's stored rows give no row. name: the stage's."""
    visits = open_(source).next(LOOKED_AT)
    rows, left_out = stage.source.rows(stage.config.source, visits, tokenizer, stage.shape.width)
    if not len(rows.length):
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(left_out.items()))
        if "too_long" in left_out:
            field = "Sampler.completion_length" if isinstance(stage, OfflineStage) else "the stage's completion_length"
            causes += f"; prompt and answer together may have Data.prompt_length + {field} = {stage.shape.width} tokens"
        raise ValueError(
            f"stage {name}: none of the first {LOOKED_AT} examples gives a row to "
            f"{type(stage.config.source).__name__} ({causes})"
        )


def check_labels(stage: OfflineStage, source: Source, open_: Callable[[Source], Stream], tokenizer: Any) -> None:
    """Raises ValueError if the objective of a stage can learn from none of its rows."""
    # A larger source is not read to its end, and the rows to learn from may come later.
    if stage.objective.check_stored is not None and len(source) <= ENOUGH_SEEN:
        visits = open_(source).next(len(source))
        rows, _ = stage.source.rows(stage.config.source, visits, tokenizer, stage.shape.width)
        stage.objective.check_stored(stage.config.objective, rows.value)
