"""Looks at an installation and at a run: what is there, what is missing, what to do about it."""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jrl import __version__, paths
from jrl.experiment import FREE
from jrl.resolve import load_config
from jrl.rollout.scoring import Scoring, open_scoring
from jrl.run.checkpoints.lock import holder_of
from jrl.run.checkpoints.run_state import DamagedStep, list_steps, verify_step
from jrl.run.job import identify, places_of
from jrl.run.policy import is_published
from jrl.run.report.manifest import compare, read_manifest
from jrl.run.report.metrics import read_metrics
from jrl.tasks.envs.mixture import open_source
from jrl.tasks.example import Example, Message
from jrl.tasks.tokenizers import load as load_tokenizer
from jrl.tasks.tokenizers.published import PublishedTokenizer, rewrites
from jrl.tasks.verdict import Status
from jrl.tasks.verifiers import VERIFIERS, Exact
from jrl.tools.inspect_model import recognised

# Module, the extra that brings it (None: jrl itself needs it), what it is for.
OPTIONAL = (
    ("reasoning_gym", None, "tasks of reasoning-gym"),
    ("math_verify", "math", "mathematical equality"),
    ("tokenizers", "hf", "tokenizer.json of published models"),
    ("jinja2", "hf", "chat templates of published models"),
    ("qwix", "quant", "frozen weights in 8 or 4 bits"),
    ("pyarrow", "parquet", "tasks from Parquet files"),
    ("tensorboardX", "log", "TensorBoard events"),
    ("wandb", "wandb", "the wandb writer"),
    ("trackio", "trackio", "the trackio writer"),
)
LITTLE_DISK_BYTES = 2 << 30


class Line(NamedTuple):
    good: bool
    text: str


def examine(run: Path | None) -> list[Line]:
    """Returns what was found, a line each. Changes nothing.

    Raises: ValueError where `run` is the folder of neither a run nor a published model.
    """
    published = run is not None and is_published(run)
    if run is not None and not published and not paths.exists(run / "manifest.json"):
        raise ValueError(f"{run} is not a run folder, which holds manifest.json, nor a published model's, which holds "
                         "config.json")  # fmt: skip
    here = [*installation(), disk(run or Path(".")), verifiers()]
    if published:
        return [*here, *(Line(*finding) for finding in recognised(run))]
    return [*here, *(run_lines(run) if run is not None else ())]


def installation() -> Iterator[Line]:
    """Yields versions, devices and optional packages."""
    yield Line(True, f"jrl {__version__}, Python {platform.python_version()}, JAX {jax.__version__}")
    try:
        devices = jax.devices()
        yield Line(True, f"{len(devices)} {devices[0].platform} device(s): {devices[0].device_kind}")
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        yield Line(False, f"JAX finds no device: {first}; JAX_PLATFORMS=cpu runs without an accelerator")
    for module, extra, use in OPTIONAL:
        there = importlib.util.find_spec(module) is not None
        if there:
            yield Line(True, f"{module} is there ({use})")
        elif extra is None:
            yield Line(False, f"{module} is missing ({use}); install jrl-jax again")
        else:
            yield Line(True, f"{module} is not there ({use}); pip install 'jrl-jax[{extra}]' brings it")


def disk(folder: Path) -> Line:
    """Returns how much room there is where the run is, or would be."""
    free = shutil.disk_usage(folder).free
    text = f"{free / 1e9:.1f} GB free on the disk of {folder.resolve()}"
    return Line(True, text) if free > LITTLE_DISK_BYTES else Line(False, f"{text}: a save may not fit; make room")


def verifiers() -> Line:
    """Returns whether a verifier worker starts and judges, and what confines it."""
    example = Example("doctor", (Message("user", "What is 2 + 2?"),), answer="4")
    try:
        with open_scoring(Scoring(verifiers=(Exact(),), workers=1), VERIFIERS) as scorer:
            said = scorer.collect(scorer.submit(["4"], [example], [((0, 0), 0)]))
            layers = scorer.pool.layers
    except (OSError, RuntimeError, ValueError) as error:
        return Line(False, f"verifier workers do not start: {error}")
    if said.verdict[0] != Status.CORRECT:
        return Line(
            False, f"a verifier worker said {Status(said.verdict[0]).name} of a right answer: {said.details[0]}"
        )
    missing = "" if "seccomp" in layers else "; this system has no filter for system calls"
    return Line(True, f"verifier workers start and judge; they are confined by {', '.join(layers)}{missing}")


def run_lines(folder: Path) -> Iterator[Line]:
    """Yields the state of a run folder."""
    holder = holder_of(folder)
    if holder is None:
        yield Line(True, "no process trains in this folder")
    else:
        who = f"process {holder['pid']} on {holder['host']}, since {holder['started']}" if holder else "another process"
        yield Line(True, f"{who} trains in this folder")
    yield from saves(folder)
    yield metrics(folder)
    yield identity(folder)
    yield from conversations(folder)
    if paths.exists(folder / "summary.json"):
        summary = json.loads(paths.read_bytes(folder / "summary.json"))
        yield Line(True, f"finished: {summary['steps']} steps in {summary['seconds']['total']:.0f} s")
    else:
        yield Line(True, "not finished; `jrl train` with the same configuration and --run goes on")


def saves(folder: Path) -> Iterator[Line]:
    """Yields one line for each saved step, after hashing every file of it."""
    root = folder / "checkpoints"
    steps = list_steps(root)
    if not steps:
        yield Line(True, "nothing is saved yet")
    for step in steps:
        try:
            body = verify_step(root, step)
            size = sum(entry["bytes"] for entry in body["files"].values())
            yield Line(True, f"step {step} is saved and intact, {size / 1e6:.1f} MB")
        except DamagedStep as error:
            if step in list_steps(root):  # else the run has removed it meanwhile
                yield Line(False, f"{error}; a resume passes it over for the one before")
    for name in paths.list_dir(root):
        if name.startswith(paths.TEMPORARY):
            yield Line(True, f"{name} is of a save under way or cut short; the next resume removes it")


def metrics(folder: Path) -> Line:
    try:
        steps = [row["step"] for row in read_metrics(folder / "metrics.jsonl")]
    except ValueError as error:
        return Line(False, str(error))
    if steps != list(range(1, len(steps) + 1)):
        return Line(False, "metrics.jsonl does not hold one row for each step in order; a resume cuts it to the save")
    return Line(True, f"metrics.jsonl holds {len(steps)} rows")


def identity(folder: Path) -> Line:
    """Returns whether the run's own configuration, read here, is still the run's identity."""
    try:
        config, parts = load_config(str(folder / "config.gin"))
        source = open_source(config.task, parts.tables["envs"])
        tokenizer = load_tokenizer(folder / "tokenizer", parts.tables["tokenizers"])
        now = identify(config, parts, tokenizer, source)
        differs, environment = compare(read_manifest(folder / "manifest.json"), now, places_of(FREE, config))
    except Exception as error:  # a part or a task of the user's may raise anything; that is the finding
        return Line(False, f"the run cannot be opened here: {type(error).__name__}: {error}")
    if differs:
        return Line(False, "a resume here would be refused: " + _joined(differs))
    tail = f"; other than when it began: {_joined(environment)}" if environment else ""
    return Line(True, f"configuration, tokenizer, data and parts are those of the run{tail}")


def conversations(folder: Path) -> Iterator[Line]:
    """Yields whether the chat template of a published tokenizer keeps what it wrote when a turn is added."""
    try:
        tokenizer = load_tokenizer(folder / "tokenizer")
    except ValueError:
        return  # a tokenizer of the run's own parts; `identity` has opened it
    if isinstance(tokenizer, PublishedTokenizer) and tokenizer.chat is not None:
        said = rewrites(tokenizer)
        yield Line(True, said or "the chat template keeps earlier turns as they are when one is added")


def _joined(lines: list[Any]) -> str:
    return "; ".join(map(str, lines[:4])) + (f" and {len(lines) - 4} more" if len(lines) > 4 else "")
