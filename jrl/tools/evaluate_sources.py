"""Evaluates runs and published models one after another, and has judges compare their answers, for `jrl eval`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jrl import paths
from jrl.bucket.client import shown
from jrl.run.best import saved_step
from jrl.run.bucket_run import readable
from jrl.run.run_hash import saved_steps
from jrl.run.trained import Trained, check_is_model, is_published, open_trained
from jrl.tasks.data.prompts import Visit
from jrl.tasks.stopping import Stop, never
from jrl.tools import evaluation
from jrl.tools.judged_wins import comparing, judged_wins


class OpenOptions(NamedTuple):
    """How the models of one command are opened."""

    bindings: Sequence[str]  # override the configuration of each
    config: Path | None  # for published models and for `only`; other runs use their own configuration
    only: Path | None  # the source, if it is the only one
    announce: Callable[[int, int], None] | None  # called with (bytes read, total bytes) of published weights


class Source(NamedTuple):
    """A model to evaluate. It is opened only when it is evaluated."""

    name: str  # as shown in tables
    address: Path
    open: Callable[[], Trained]


def open_model(
    address: Path, options: OpenOptions, step: int | str | None = None, stage: str | None = None, role: str = "policy"
) -> Trained:
    """Returns the model of a run or of a published folder, local or in a bucket."""
    folder = readable(address)
    config = options.config if address == options.only or is_published(folder) else None
    return open_trained(folder, options.bindings, step, config, options.announce, stage=stage, role=role)


def check_evaluation_given(addresses: Sequence[Path], options: OpenOptions) -> None:
    """Raises ValueError for a published model that is given no evaluation, before any source is evaluated."""
    bound = {binding.partition("=")[0].strip() for binding in options.bindings}
    if options.config is not None or "Config.eval" in bound:
        return
    local = [address for address in addresses if not paths.is_remote(address)]
    runs = [address for address in local if paths.exists(address / "config.gin")]
    for address in local:
        if is_published(address):
            like = f": --config {runs[0] / 'config.gin'} asks it what that run is asked" if runs else ""
            evaluation.check_evaluated(None, f"the published model {address}", like)


def sources_of(
    addresses: Sequence[Path], steps: Sequence[int | str | None], options: OpenOptions, stage: str | None, role: str
) -> list[Source]:
    """Returns a source for every step of every address. Step None is the newest.

    Raises: ValueError for a local folder that holds no model, or a step that it has not saved, before any is evaluated.
    """
    for folder in addresses:
        if not paths.is_remote(folder):
            check_is_model(folder)
        for step in () if paths.is_remote(folder) or is_published(folder) else steps:
            saved_steps(folder) if step is None else saved_step(folder, step)
    return [
        Source(
            f"{shown(address)} {step}" if len(steps) > 1 else shown(address),
            address,
            functools.partial(open_model, address, options, step, stage, role),
        )
        for address in addresses
        for step in steps
    ]


def evaluate_sources(
    sources: Sequence[Source],
    asked: evaluation.Asked,
    announce: Callable[[int, int], None],
    warn: Callable[[str], None],
    stop: Stop = never,
) -> tuple[list[dict[str, Any]], Trained, list[Visit]]:
    """Returns the report of each source, with its name under "source", and the last model and its held-out prompts.

    Args:
      announce: called with (prompts done, total prompts) of one source.
      warn: called with what makes accuracies doubtful.
      stop: polled as prompts are read.

    Raises: StopRequested if `stop` returns True.
    """
    addresses = dict.fromkeys(source.address for source in sources)
    results, private = [], [address for address in addresses if not paths.is_remote(address)]
    read: Path | None = None  # whose prompts `visits` are: steps of one run are evaluated on the same
    for source in sources:
        trained = source.open()
        config = trained.policy.config
        evaluation.check_evaluated(config, f"the configuration of {source.name}")
        if read != source.address:
            if (warning := evaluation.trained_prompts_warning(source.address, config)) is not None:
                warn(warning)
            visits, read = evaluation.held_out_visits(trained, stop), source.address
        results.append({"source": source.name, **evaluation.reevaluate(trained, visits, announce, asked, private)})
        trained.policy.program_cache.close()
    return results, trained, visits


def judge_sources(
    results: Sequence[Mapping[str, Any]], last: Trained, visits: Sequence[Visit], answers: Path | None
) -> dict[str, list[list[dict[str, float | None] | None]]]:
    """Returns {judge: table} as `judged_wins` does; {} for a single source, or if no judge compares completions.

    Args:
      results: reports on the same prompts.
      last: the model of the last result. Its judges compare.
      visits: these prompts.
      answers: the folder of cached answers; see `judged_wins`.
    """
    judges = comparing(last.policy.config.judges)
    if len(results) == 1 or not judges:
        return {}
    return judged_wins(judges, results, [visit.example for visit in visits], answers)


def write_results(out: Path | None, results: Sequence[Mapping[str, Any]]) -> None:
    """Writes the reports as JSON, a single one without "source". `out` None: writes nothing."""
    if out is not None:
        written = results if len(results) > 1 else {k: v for k, v in results[0].items() if k != "source"}
        paths.write_bytes_atomic(out, json.dumps(written, indent=2).encode() + b"\n")
