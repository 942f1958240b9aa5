"""Evaluates the folders of runs and of published models one after another, and has judges compare their answers: the
work of `jrl eval`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jrl import paths
from jrl.bucket.client import shown
from jrl.run.bucket_run import readable
from jrl.run.trained import Trained, is_published, open_trained
from jrl.tools import evaluation
from jrl.tools.judged_wins import comparing, judged_wins


class OpenOptions(NamedTuple):
    """How the models of one command are opened."""

    bindings: Sequence[str]  # over the configuration of each
    config: Path | None  # of published models, and of `only`; a run has a configuration of its own otherwise
    only: Path | None  # the source, where there is a single one
    announce: Callable[[int, int], None] | None  # of (bytes read, bytes in all) of published weights


class Source(NamedTuple):
    """A model to evaluate, which is opened when its turn comes."""

    name: str  # in tables
    address: Path
    open: Callable[[], Trained]


def open_model(
    address: Path, options: OpenOptions, step: int | None = None, stage: str | None = None, role: str = "policy"
) -> Trained:
    """Returns the model of a run or of a published folder, which may be in a bucket."""
    folder = readable(address)
    config = options.config if address == options.only or is_published(folder) else None
    return open_trained(folder, options.bindings, step, config, options.announce, stage=stage, role=role)


def sources_of(
    addresses: Sequence[Path], steps: Sequence[int | None], options: OpenOptions, stage: str | None, role: str
) -> list[Source]:
    """Returns a source for each step of each address; None: the newest step."""
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
) -> tuple[list[dict[str, Any]], Trained]:
    """Returns the report of each source under its name ("source"), and the last model.

    Args:
      announce: of (prompts done, prompts in all) of one source.
      warn: of what makes accuracies doubtful.
    """
    addresses = dict.fromkeys(source.address for source in sources)
    results, private = [], [address for address in addresses if not paths.is_remote(address)]
    for source in sources:
        trained = source.open()
        config = trained.policy.config
        evaluation.check_evaluated(config, f"the configuration of {source.name}")
        if (warning := evaluation.trained_prompts_warning(source.address, config)) is not None:
            warn(warning)
        results.append({"source": source.name, **evaluation.reevaluate(trained, announce, asked, private)})
        trained.policy.program_cache.close()
    return results, trained


def judge_sources(
    results: Sequence[Mapping[str, Any]], last: Trained, answers: Path | None
) -> dict[str, list[list[dict[str, float | None] | None]]]:
    """Returns {judge: table} of `judged_wins`; {} for a single source, and without a judge that compares.

    Args:
      last: the model of the last result, whose judges are asked; all results are of the same prompts.
      answers: a folder as in `judged_wins`.
    """
    judges = comparing(last.policy.config.judges)
    if len(results) == 1 or not judges:
        return {}
    examples = [visit.example for visit in evaluation.held_out_visits(last)]
    return judged_wins(judges, results, examples, answers)


def write_results(out: Path | None, results: Sequence[Mapping[str, Any]]) -> None:
    """Writes reports as JSON, that of a single source without its name; None: nowhere."""
    if out is not None:
        written = results if len(results) > 1 else {k: v for k, v in results[0].items() if k != "source"}
        paths.write_bytes_atomic(out, json.dumps(written, indent=2).encode() + b"\n")
