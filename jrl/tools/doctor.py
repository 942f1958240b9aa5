"""Examines an installation and a run, for `jrl doctor`: what is there, what is missing, what to do about it."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import platform
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jrl import __version__, paths
from jrl.experiment import stage_names
from jrl.plugins import saved_parts
from jrl.resolve import PATH_FIELDS, load_config, load_run_config, part_names
from jrl.rollout.scoring import Scoring, open_scoring
from jrl.run.best import present_best
from jrl.run.checkpoints.lock import holder_of, holder_text
from jrl.run.checkpoints.run_state import DamagedStep, list_condemned, list_steps, step_dir, verify_step
from jrl.run.data import data_fingerprint, stored_sources
from jrl.run.fault import FOLDER as FAULT
from jrl.run.identity import free_places, identify
from jrl.run.population import FOLDER as POPULATION
from jrl.run.report.goodput import read_goodput
from jrl.run.report.manifest import compare, read_manifest
from jrl.run.report.metrics import check_committed, read_metrics
from jrl.run.report.rollouts import read_every_chunk, snapshot
from jrl.run.report.summary import read_summary
from jrl.run.report.text import counted
from jrl.run.stage_steps import stage_at
from jrl.run.trained import check_is_model, is_published
from jrl.tasks.envs.mixture import open_source
from jrl.tasks.example import Example, Message
from jrl.tasks.judges import preflight
from jrl.tasks.stopping import Stop, StopRequested, never
from jrl.tasks.tokenizers import load as load_tokenizer
from jrl.tasks.tokenizers.published import PublishedTokenizer
from jrl.tasks.verdict import Status
from jrl.tasks.verifiers import VERIFIERS, Exact
from jrl.tools.inspect_model import recognized, template
from jrl.tools.sweep.population import AGAIN, MEMBERS
from jrl.tools.time_spent import time_lines

# (module, the extra that installs it or None if jrl requires it, what it is for)
OPTIONAL = (
    ("reasoning_gym", None, "tasks of reasoning-gym"),
    ("safetensors", "hf", "weights of published models, and jrl export"),
    ("tokenizers", "hf", "tokenizer.json of published models"),
    ("jinja2", "hf", "chat templates of published models"),
    ("qwix", "quant", "frozen weights in 8 or 4 bits"),
    ("pyarrow", "parquet", "tasks from Parquet files"),
    ("tensorboardX", "log", "TensorBoard events"),
    ("wandb", "wandb", "the wandb writer"),
    ("trackio", "trackio", "the trackio writer"),
)
LOW_DISK_BYTES = 2 << 30


class Line(NamedTuple):
    good: bool | None  # None: something optional that is not installed, or something that was not compared
    text: str


def examine(run: Path | None, stop: Stop = never) -> list[Line]:
    """Returns the findings, one line each. Changes nothing.

    Raises: ValueError if `run` is not the folder of a run or a published model; StopRequested if `stop` returns True
      while examples are read.
    """
    if run is not None:
        check_is_model(run)
    lines = [*installation(), disk(run or Path(".")), verifiers()]
    if run is not None and is_published(run):
        return [*lines, *(Line(*finding) for finding in recognized(run))]
    return [*lines, *(run_lines(run, stop) if run is not None else ())]


def installation() -> Iterator[Line]:
    """Yields versions, devices and optional packages."""
    yield Line(True, f"jrl {__version__}, Python {platform.python_version()}, JAX {jax.__version__}")
    try:
        devices = jax.devices()
        yield Line(True, f"{len(devices)} {devices[0].platform} device(s): {devices[0].device_kind}")
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        yield Line(False, f"JAX found no device: {first}; set JAX_PLATFORMS=cpu to run without an accelerator")
    for module, extra, use in OPTIONAL:
        installed = importlib.util.find_spec(module) is not None
        if installed:
            yield Line(True, f"{module}: installed ({use})")
        elif extra is None:
            yield Line(False, f"{module}: not installed, but required ({use}); reinstall jrl-jax")
        else:
            yield Line(None, f"{module}: not installed (optional, for {use}): pip install 'jrl-jax[{extra}]'")


def disk(folder: Path) -> Line:
    """Returns the free disk space where the run is, or would be."""
    free = shutil.disk_usage(folder).free
    text = f"{free / 1e9:.1f} GB free on the disk of {folder.resolve()}"
    return Line(True, text) if free > LOW_DISK_BYTES else Line(False, f"{text}: a checkpoint may not fit")


def verifiers() -> Line:
    """Returns whether a verifier worker starts and judges, and how it is sandboxed."""
    example = Example("doctor", (Message("user", "What is 2 + 2?"),), answer="4")
    try:
        with open_scoring(Scoring(verifiers=(Exact(),), workers=1), VERIFIERS) as scorer:
            scores = scorer.collect(scorer.submit(["4"], [example], [((0, 0), 0)]))
            layers = scorer.pool.layers
    except (OSError, RuntimeError, ValueError) as error:
        return Line(False, f"verifier workers do not start: {error}")
    if scores.verdict[0] != Status.CORRECT:
        return Line(
            False,
            f"a verifier worker returned {Status(scores.verdict[0]).name} for a correct answer: {scores.details[0]}",
        )
    missing = "" if "seccomp" in layers else "; this system cannot filter system calls"
    return Line(True, f"verifier workers start and judge; they are confined by {', '.join(layers)}{missing}")


def run_lines(folder: Path, stop: Stop = never) -> Iterator[Line]:
    """Yields the state of a run folder."""
    holder = holder_of(folder)
    if holder is None:
        yield Line(True, "no process is training in this folder")
    else:
        yield Line(True, f"{holder_text(holder)} is training in this folder")
    yield from stages(folder)
    rows, problem = metrics_rows(folder)
    saved = yield from saves(folder, rows)
    yield from metrics(folder, rows, problem, saved)
    yield from rollouts(folder, saved)
    yield from time_spent(folder)
    yield identity(folder, stop)
    yield from judges(folder)
    yield from conversations(folder)
    yield ending(folder)


def ending(folder: Path) -> Line:
    """Returns whether the run is finished, or why it is not and how it goes on."""
    if (sweep := population_of(folder)) is not None:
        return Line(True, f"not finished; it trains in the population of {sweep}, whose checkpoints are in "
                          f"{sweep / POPULATION}: the same `jrl sweep` with --out {sweep} continues it")  # fmt: skip
    if paths.exists(folder / "summary.json"):
        try:
            summary = read_summary(folder / "summary.json")
        except ValueError as error:
            return Line(False, str(error))
        return Line(True, f"finished: {counted(summary['steps'], 'step')} in {summary['seconds']['total']:.0f} s")
    if list_condemned(folder / "checkpoints"):
        repeats = f"; `jrl replay` of its {FAULT}/ repeats it" if paths.exists(folder / FAULT) else ""
        return Line(False, "not finished: the same command meets the same fault, unless you change what led there with "
                           f"--accept-change{repeats}")  # fmt: skip
    last = (read_goodput(folder) or [{}])[-1]
    if "stopped" in last and holder_of(folder) is None:
        return Line(False, f"not finished: an error stopped it after step {last['step']}. Once the cause is fixed, "
                           "`jrl train` with the same configuration and --run continues it. The error: "
                           f"{last['stopped']}")  # fmt: skip
    return Line(True, "not finished; `jrl train` with the same configuration and --run continues it")


def population_of(folder: Path) -> Path | None:
    """Returns the folder of the sweep if the run is an unfinished member of its population; None for any other run."""
    sweep = folder.resolve().parent
    record = sweep / POPULATION / MEMBERS
    training = paths.read_object(record) if paths.exists(record) else {}
    is_member = folder.resolve().name in training.get("members", ()) and AGAIN not in training
    return sweep if is_member and not paths.exists(folder / "summary.json") else None


def stages(folder: Path) -> Iterator[Line]:
    """Yields the stages of a run, and the roles that they train, if there are several of them."""
    try:
        config, _ = load_run_config(folder)
    except Exception:
        return  # `identity` reports it
    names = stage_names(config.stages)
    if len(names) > 1:
        cells = [f"{name} ({counted(stage.steps, 'step')})" for name, stage in zip(names, config.stages)]
        saved = list_steps(folder / "checkpoints")
        newest = f"; the newest checkpoint is of {names[max(stage_at(config, saved[-1]), 0)]}" if saved else ""
        yield Line(True, f"stages: {', '.join(cells)}{newest}")
    roles = list(dict.fromkeys(["policy", *(stage.trains for stage in config.stages)]))
    if len(roles) > 1:
        yield Line(True, f"trained roles: {', '.join(roles)}")


def saves(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Generator[Line, None, dict[str, Any]]:
    """Yields the state of every checkpoint, after hashing all its files. Returns the host part of the one that a resume
    uses, which says how much of the run's files belongs to it; {} if there is none.

    Args:
      rows: of metrics.jsonl, with the held-out accuracy after each step that was evaluated.
    """
    root = folder / "checkpoints"
    steps = list_steps(root)
    if condemned := list_condemned(root):
        yield Line(
            False,
            f"the checkpoints of step {', '.join(map(str, condemned))} are set aside: updates or weights were not "
            "finite. See loss and grad_norm in metrics.jsonl, and change what led there before you rerun it",
        )
    if not steps:
        yield Line(True, "no checkpoint yet" if population_of(folder) is None else "no checkpoint of its own yet")
    accuracy = {row["step"]: row["eval/mean"] for row in rows if isinstance(row.get("eval/mean"), int | float)}
    intact, damaged, saved = [], [], {}
    measured_by: dict[int, str | None] = {}  # step -> the identity of its evaluation
    for step in steps:
        try:
            body = verify_step(root, step)
            saved = paths.read_object(step_dir(root, step) / "host.json")
        except (DamagedStep, OSError) as error:
            if step in list_steps(root):  # else the run has removed it meanwhile
                damaged.append(step)
                yield Line(False, str(error))
            continue
        intact.append(step)
        size = sum(entry["bytes"] for entry in body["files"].values())
        measured = f"; {100 * accuracy[step]:.1f} % of held-out prompts" if step in accuracy else ""
        if measured:
            measured_by[step] = saved.get("eval_identity")  # earlier versions saved none
        yield Line(True, f"checkpoint of step {step}: intact, {size / 1e6:.1f} MB{measured}")
    if damaged and intact:
        yield Line(True, f"a resume uses the checkpoint of step {intact[-1]}")
    elif damaged:
        yield Line(False, "no checkpoint is intact, so a resume is refused: put a good copy of one back")
    if best := present_best(saved, intact):
        of_best = f"step {best.step}, {100 * best.mean:.1f} % of held-out prompts"
        yield Line(True, f"best checkpoint (--step best): {of_best}")
    last = next(reversed(measured_by), None)
    if others := [str(step) for step, identity in measured_by.items() if identity not in (None, measured_by[last])]:
        yield Line(True, f"measured by another evaluation than that of step {last}, with which they do not compare: "
                         f"the accuracies of step {', '.join(others)}")  # fmt: skip
    for name in paths.list_dir(root):
        if name.startswith(paths.TEMPORARY):
            yield Line(True, f"{name} belongs to a save in progress or interrupted; the next resume removes it")
    return saved


def metrics_rows(folder: Path) -> tuple[list[dict[str, Any]], str | None]:
    """Returns the rows of metrics.jsonl, and what keeps it from being read, or None."""
    try:
        return list(read_metrics(folder / "metrics.jsonl")), None
    except ValueError as error:
        return [], str(error)


def metrics(
    folder: Path, rows: Sequence[Mapping[str, Any]], problem: str | None, saved: Mapping[str, Any]
) -> Iterator[Line]:
    """Yields the state of metrics.jsonl. rows, problem: as `metrics_rows` returns them. saved: as `saves` does."""
    if problem is not None:
        yield Line(False, problem)
        return
    path = folder / "metrics.jsonl"
    if [row["step"] for row in rows] != list(range(1, len(rows) + 1)):
        yield Line(False, "metrics.jsonl is damaged: it does not have one row per step in order. Put a good copy back")
        return
    try:
        check_committed(path, saved.get("metrics_offset", 0), saved.get("metrics_sha256"))
    except ValueError as error:
        yield Line(False, f"{error}. A resume is refused: put a good copy back")
        return
    yield Line(True, f"metrics.jsonl has {counted(len(rows), 'row')}")
    skipped = len(list(itertools.takewhile(lambda row: row.get("update/skipped_nonfinite"), reversed(rows))))
    if skipped:
        last = "the last step" if skipped == 1 else f"each of the last {skipped} steps"
        of_stage = sum(row.get("phase") == rows[-1].get("phase") for row in rows)
        yield Line(paths.exists(folder / "summary.json") and skipped < of_stage,
                   f"{last} skipped updates, since the loss or the gradient was not finite")  # fmt: skip


def rollouts(folder: Path, saved: Mapping[str, Any]) -> Iterator[Line]:
    """Yields a line per damaged chunk of the stored rollouts, or one if all are intact. Reads every chunk.

    Args:
      saved: as `saves` returns it.
    """
    store, rows = folder / "rollouts", saved.get("rollout_rows", 0)
    if not rows and not paths.list_dir(store):
        return
    advice = INDEX_ADVICE if rows else ROLLOUTS_ADVICE
    try:
        present = snapshot(store).rows
        count, damaged = read_every_chunk(store)
    except ValueError as error:
        yield Line(False, f"rollouts: {error}; {advice}")
        return
    if present < rows:
        yield Line(False, f"rollouts: {store / 'index.json'} counts {present} rows, and the checkpoint was saved with "
                          f"{rows}; {advice}")  # fmt: skip
        return
    for text in damaged:
        yield Line(False, f"rollouts/{text}; {ROLLOUTS_ADVICE}")
    if not damaged:
        yield Line(True, f"rollouts: all {count} chunks are intact")


INDEX_ADVICE = "put back a good copy of the folder. Without one a resume is refused, unless it has Log.rollouts=False"
ROLLOUTS_ADVICE = (
    "put back a good copy of the file. Training does not read it: without one a resume goes on, unless the newest rows "
    "are in it, but `jrl rollouts` and `jrl replay` cannot read those rows"
)


def time_spent(folder: Path) -> Iterator[Line]:
    """Yields where the run's time goes."""
    try:
        lines = time_lines(read_metrics(folder / "metrics.jsonl"), read_goodput(folder))
    except ValueError as error:
        lines = [f"where the time went is not known: {error}"]
    for text in lines:
        yield Line(True, text)


def identity(folder: Path, stop: Stop = never) -> Line:
    """Returns whether the run's configuration, opened here, still gives the identity in its manifest."""
    try:
        named = part_names(str(folder / "config.gin"), ())
        files = [*named, *named_files(load_run_config(folder)[0])]
        lacking = [str(file) for file in files if not paths.is_remote(file) and not paths.matches(file)]
        if lacking:
            return Line(None, f"{', '.join(lacking)}: not found from here, so not compared with what the run "
                              "began with; run this command where you train")  # fmt: skip
        if len(saved_parts(folder / "parts")) > len(named):
            return Line(None, "the run has parts that were given from Python, with parts=[...], which are not here to "
                              "compare with what it began with; a resume does that")  # fmt: skip
        config, parts = load_config(str(folder / "config.gin"))
        open_ = lambda task: open_source(task, parts.tables["envs"], stop)
        source = open_(config.task)
        data = data_fingerprint(config, source, stored_sources(config, source, open_))
        tokenizer = load_tokenizer(folder / "tokenizer", parts.tables["tokenizers"])
        now = identify(config, parts, tokenizer, data)
        differs, environment = compare(read_manifest(folder / "manifest.json"), now, free_places(config))
    except StopRequested:
        raise
    except Exception as error:  # the user's parts and task may raise anything: report it
        return Line(False, f"the run cannot be opened here: {type(error).__name__}: {error}")
    if differs:
        return Line(False, "a resume here would be refused: " + _joined(differs))
    tail = f"; changed since it began: {_joined(environment)}" if environment else ""
    return Line(True, f"configuration, tokenizer, data and parts match the run{tail}")


def named_files(part: Any) -> Iterator[str]:
    """Yields the files and folders that a configuration names (PATH_FIELDS)."""
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        for inner in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(inner):
                yield from named_files(inner)
            elif isinstance(inner, str) and f"{type(part).__name__}.{field.name}" in PATH_FIELDS:
                yield inner


def judges(folder: Path) -> Iterator[Line]:
    """Yields whether each judge of a run answers a question of the kind that the run would ask."""
    try:
        config, _ = load_run_config(folder)
    except Exception:  # `identity` reports it
        return
    for judge in config.judges:
        try:
            preflight(judge)
            yield Line(True, f"the judge {judge.name!r} at {judge.address} answers as it is asked to")
        except ValueError as error:
            yield Line(False, str(error))


def conversations(folder: Path) -> Iterator[Line]:
    """Yields whether a published tokenizer's chat template leaves earlier turns unchanged when a turn is added."""
    try:
        tokenizer = load_tokenizer(folder / "tokenizer")
    except ValueError:
        return  # the tokenizer comes from the run's parts; `identity` opens it
    if isinstance(tokenizer, PublishedTokenizer) and tokenizer.chat is not None:
        yield Line(*template(tokenizer))


def _joined(lines: list[Any]) -> str:
    return "; ".join(map(str, lines[:4])) + (f" and {len(lines) - 4} more" if len(lines) > 4 else "")
