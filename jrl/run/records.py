"""What a run writes and restores: checkpoints, metrics, rollouts, the summary. The loop's effects on disk are here."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl import config as gin
from jrl import paths
from jrl.device.placement import fetch
from jrl.device.replicas import differing_replica
from jrl.experiment import Config, Online, segments_of, stored_attributes
from jrl.learning.critic import CRITIC
from jrl.learning.learner import KL_REACHED
from jrl.learning.step import Learned
from jrl.models import decoder
from jrl.models.adapters.matrices import MATRICES
from jrl.models.adapters.quantized import quantize
from jrl.models.contract import axes
from jrl.models.pretrained.published import load
from jrl.ops.fingerprint import fingerprint
from jrl.rollout.collect import Collected, Draw, example_indices, fields, redraw_prompts, task_hashes
from jrl.rollout.strategies.contract import PLAIN
from jrl.run.begin_from import state_from_run
from jrl.run.best import Best, is_comparable, present_best, update_best
from jrl.run.checkpoints.run_state import DamagedStep, NoIntactStep, StateMismatch, list_steps, newest_intact
from jrl.run.clock import StepWork
from jrl.run.identity import PUBLISHED, RefusedIdentity
from jrl.run.job import Job
from jrl.run.offline import OfflineStage, stored_rows
from jrl.run.online import OnlineStage
from jrl.run.precompile import Inputs, rollout_shape, state_shape
from jrl.run.programs import abstract
from jrl.run.replay import fitting, score_columns
from jrl.run.report.goodput import goodput, open_goodput, read_goodput
from jrl.run.report.messages import (
    LostSignal,
    best_line,
    closing_message,
    collapse_warning,
    condemned_message,
    evaluation_line,
    left_out_message,
    lost_rollouts_warning,
    no_signal_warning,
    resume_message,
    scoring_warning,
)
from jrl.run.report.metrics import no_metrics, open_metrics, read_metrics
from jrl.run.report.rollouts import lost_chunks, open_rollouts
from jrl.run.report.sinks import open_sinks
from jrl.run.report.summary import read_summary, write_summary
from jrl.run.report.text import printable
from jrl.run.stage_steps import can_be_best, ends, stage_at, starts, warms_up
from jrl.run.teacher import open_teacher, with_teacher
from jrl.run.throughput import computed_epochs, count_rows, figures
from jrl.tasks.data.curricula import Outcomes
from jrl.tasks.data.prompts import dropped_prompts
from jrl.tasks.data.stream import Stream
from jrl.tasks.verifiers.part_location import part_location
from jrl.types import Array, PyTree, TrainState

OF_UPDATES = "update/skipped_nonfinite"  # a metric that is ready when the updates of a step are done
# What the names of metrics begin with that a step without a token to learn from has too: of its data, samples and time,
# and counts of its updates. All others but sums (loss, grad_norm) are means over tokens or comparisons.
OF_EVERY_STEP = ("advantage/", "critic/update/", "curriculum/", "data/", "eval/", "eval_task/", "host/", "loss/",
                 "refill/", "reward/", "reward_component/", "reward_task/", "rollout/", "time/", "update/",
                 "verdict/")  # fmt: skip
STOP_AFTER_SKIPPED = 5  # steps in a row whose update was skipped
WARN_WITHOUT_SIGNAL = 5  # steps from the start, none with a gradient


class Preempted(RuntimeError):
    """The run was asked to stop, and has saved itself."""


class StopRun(RuntimeError):
    """The run cannot go on. The message is the diagnosis; the last checkpoint is good."""


class Diverged(RuntimeError):
    """Processes that should hold the same weights and data no longer do."""


OF_THE_WRITER = ("metrics_offset", "metrics_sha256", "rollout_rows", "time")  # in a save, known to process 0 only


class CheckpointsRemoved(RuntimeError):
    """A run has done steps, and all of its checkpoints are gone."""


class Progress(NamedTuple):
    """What a run carries from step to step besides the data position. All of it is in the checkpoint."""

    state: TrainState
    waiting: tuple[Draw, ...]  # completions being sampled for the next steps, in order
    stage: int  # the stage that the state belongs to; -1: none has begun


@dataclasses.dataclass
class Step:
    """One finished step, for a notebook to look at."""

    step: int  # counted from 1, over all stages
    phase: str  # the name of its stage
    metrics: dict[str, Any]  # device scalars until the step is emitted
    batch: Collected | None = None  # None where nothing was sampled
    learned: Learned | None = None  # kept only if the run may stop after this step
    examples: list[str] = dataclasses.field(default_factory=list)  # the id of every stored row; [] if unknown
    seconds: float = 0.0  # that the loop spent in it, or waiting for its update
    work: StepWork | None = None  # what the time was spent on; None once the step is emitted
    evaluation: dict[str, Any] | None = None  # of the policy after it (Eval.every); None: it was not evaluated

    @property
    def sampled_tokens(self) -> int:
        """The number of sampled tokens; 0 for a step on stored rows."""
        return 0 if self.batch is None else int(self.batch.host["action_mask"].sum())

    @property
    def rollout(self) -> dict[str, np.ndarray] | None:
        """Fields of Rollout and Scores by name, on the host, without routes, which are larger than the rest."""
        if self.batch is None:
            return None
        scores = self.batch.host_scores
        # With several processes all of them must read this. Each device then holds all rows of one field at a time.
        on_host = {name: fetch(value) for name, value in fields(self.batch.rollout.replace(routes=None)).items()}
        return {**on_host, "reward": scores.reward, "valid": scores.valid, "verdict": scores.verdict}

    @property
    def texts(self) -> list[tuple[str, str]] | None:
        """Prompt and completion of every sequence; with several processes a completion may be "" where the process
        neither scores nor stores it."""
        return None if self.batch is None else sequence_texts(self.batch)


def inputs_of(job: Job) -> Inputs:
    """Returns the inputs of a run's programs, as shapes."""
    shapes = lambda tree: abstract(tree, job.mesh)
    first_online = next((stage for stage in job.stages if isinstance(stage, OnlineStage)), None)
    sampler = job.evaluator if first_online is None else first_online.sampler  # both have the run's stop strings
    return Inputs(
        config=job.config,
        mesh=job.mesh,
        programs=job.programs,
        key=shapes(job.key),
        sampling_params=None if first_online is None else shapes(first_online.sampler.params),
        eval_params=None if job.evaluator is None else shapes(job.evaluator.params),
        stop_table=None if sampler is None else shapes(sampler.stop_table),
        arrays=tuple(shapes(stage.arrays) for stage in job.stages),
        strategies=tuple(stage.sampler.strategy if isinstance(stage, OnlineStage) else PLAIN for stage in job.stages),
        shapes=tuple(stage.shape for stage in job.stages),
        components=tuple(stage.sampler.components if isinstance(stage, OnlineStage) else () for stage in job.stages),
        rewards_tokens=tuple(isinstance(stage, OnlineStage) and stage.rewards_tokens for stage in job.stages),
        attributes=tuple(stored_attributes(stage.config, stage.objective) for stage in job.stages),
    )


def restore(job: Job) -> Progress:
    """Returns the progress of the newest intact checkpoint, or of a new run. Every file is truncated to match."""
    inputs = inputs_of(job)

    def read(step: int) -> tuple[PyTree, dict[str, Any]]:
        state = state_shape(inputs, step)
        return job.run_state.restore({"state": state, **beside_state(job, inputs, step, state)}, step)[1:]

    if steps := job.run_state.steps():
        try:
            _, tree, host = newest_intact(job.location, steps, read, job.display.note)
        except NoIntactStep as error:
            raise NoIntactStep(
                f"{error}; nothing was changed: {to_bring_back(job)}, or start a new run under another --run"
            ) from error
        return Progress(tree["state"], take_up(job, tree, host), stage=stage_at(job.config, job.done))
    if set_aside := job.run_state.condemned():
        job.display.note(condemned_message(set_aside))
    else:
        check_not_removed(job, to_bring_back(job))
    begin_files(job)
    return Progress(beginning(job, job.key), (), stage=-1)


def beside_state(job: Job, inputs: Inputs, step: int, state: TrainState) -> dict[str, PyTree]:
    """Returns what a checkpoint of a step holds besides the state, as shapes: completions being sampled, and the
    curriculum's record of outcomes."""
    target: dict[str, PyTree] = {}
    for name in waiting_names(draws_ahead(job.config, step)):
        target[name] = rollout_shape(inputs, stage_at(job.config, step), state)
    if job.stream.outcomes is not None:
        target["outcomes"] = job.stream.outcomes._asdict()
    return target


def record_continuation(job: Job) -> None:
    """Writes what a restored run changes: changes that were accepted, or a configuration with more steps or another
    setting that may change on a resume. A run in a bucket that had ended commits at once that it goes on."""
    had_ended = job.processes.from_writer("had ended", paths.exists(job.folder / "summary.json"))
    if job.record_change is not None:
        job.record_change(job.done)
    elif job.write_configuration is not None and job.done < job.total:
        job.write_configuration()
    if had_ended and job.done < job.total:
        job.publish()


def begin_files(job: Job) -> None:
    """Opens the files of a new run."""
    metrics = job.folder / "metrics.jsonl"
    if job.processes.writer and paths.exists(metrics) and paths.size(metrics):
        aside = unused_name(job.folder, "metrics.jsonl")
        paths.rename(metrics, aside)
        job.display.note(f"no good checkpoint in {job.location}: starting over; the rows so far are now {aside.name}")
    open_files(job, 0, 0)


def take_up(job: Job, tree: dict[str, PyTree], host: dict[str, Any]) -> tuple[Draw, ...]:
    """Sets the run back to a checkpoint, with every file truncated to match. Returns the completions being sampled.

    Args:
      tree: arrays of the checkpoint besides the state. host: what it holds other than arrays.
    """
    data = host["data"]
    for stage in job.stages:
        if stored_stream(stage) is not None and stage.name not in data["stages"]:
            raise StateMismatch(
                f"step {host['done']} was saved by a run without stored rows in the stage {stage.name!r}"
            )
    job.done, job.evals = host["done"], host["evals"]
    if job.evals and host.get("eval_identity", job.eval_identity) != job.eval_identity:
        job.display.note(left_out_message(job.evals))
        job.evals = {}
    if job.done >= job.total:
        job.evals |= evaluations_after(job)
    in_a_row = host["in_a_row"]
    job.skipped, job.unscored, job.without_signal = (in_a_row[k] for k in ("skipped", "unscored", "without_signal"))
    job.overflowed = dict(host.get("overflowed", {}))  # earlier versions saved neither
    job.last_signal = None if (signal := host.get("last_signal")) is None else (signal[0], signal[1])
    job.best = intact_best(job, host)
    earlier = host["time"]["seconds"]
    job.seconds = earlier | {name: earlier.get(name, 0.0) + seconds for name, seconds in job.seconds.items()}
    job.sampled_tokens = host["time"]["sampled_tokens"]
    open_files(job, host["metrics_offset"], host["rollout_rows"], host.get("metrics_sha256"))
    for stage in job.stages:
        if (stream := stored_stream(stage)) is not None:
            stream.set_state(data["stages"][stage.name])
    waiting = []
    for name in waiting_names(draws_ahead(job.config, job.done)):
        sampler = job.stages[stage_at(job.config, job.done)].sampler
        waiting.append(Draw(tree[name], redraw_prompts(sampler, data[name]), data[name]))
    if "outcomes" in tree:
        job.stream.outcomes = Outcomes(**tree["outcomes"])
    # Refills of the last step may have moved the stream past the prompts that were being sampled.
    job.stream.set_state(data["train"])
    has_ended = job.record_change is None and paths.exists(job.folder / "summary.json")
    job.display.note(resume_message(job.done, job.total, has_ended=has_ended))
    if set_aside := job.run_state.condemned():
        job.display.note(condemned_message(set_aside))
    return tuple(waiting)


def intact_best(job: Job, host: Mapping[str, Any]) -> Best | None:
    """Returns the best step that a save names; None if that one is gone or damaged. Else no later step could take its
    place as long as its accuracy is lower, and there would be no policy with the accuracy that the run shows."""
    best = present_best(host, job.run_state.steps())
    if best is None or best.step == job.done:  # that one was just read
        return best
    try:
        job.run_state.verify(best.step)
    except DamagedStep as error:
        job.display.note(f"{error}; it was the best checkpoint, and the next step that is evaluated and saved is now")
        return None
    return best


def evaluations_after(job: Job) -> dict[str, Any]:
    """Returns the evaluations of an earlier process that ended the run at this step; {} if there was none, or what they
    measured has changed since. They were made after the last checkpoint."""
    path, evals = job.folder / "summary.json", None
    if job.processes.writer and job.record_change is None and paths.exists(path):  # the writer alone has the change
        summary = read_summary(path)
        evals = summary["eval"] if summary["steps"] == job.done else None
    return job.processes.from_writer("evaluations", evals) or {}


def check_not_removed(job: Job, remedy: str) -> None:
    """Raises CheckpointsRemoved if a run without checkpoints has done more steps than it did before its first save. A
    rerun may save earlier: what counts is the configuration that the steps were done with.

    Args:
      remedy: what to do instead of using another --run.
    """
    record = job.folder / "config.json"  # some processes of a new run have none
    config = paths.read_object(record) if paths.exists(record) else gin.to_json(job.config)
    stage_ends = itertools.accumulate(stage["steps"] for stage in config["stages"])
    # A step's row is written before its checkpoint: a run killed during its first save has the row alone.
    first_save = min([config["checkpoint"]["every"], *(end for end in stage_ends if end)])
    last = max((row["step"] for row in read_metrics(job.folder / "metrics.jsonl")), default=0)
    if last > first_save or paths.exists(job.folder / "summary.json"):
        raise CheckpointsRemoved(
            f"{job.location} has done {last} steps and holds no checkpoint: they were removed, or it is a member of a "
            f"population (`jrl sweep --population` continues that). Nothing was changed; {remedy}, or start anew under "
            "another --run"
        )


def to_bring_back(job: Job) -> str:
    """Returns how to bring back a checkpoint that is missing or damaged."""
    if job.address is not None:
        return (
            f"bring back an earlier version of {job.address}/run.json and the objects that it names, where the bucket "
            "keeps versions or deleted objects, before anything else trains there"
        )
    return f"put a good copy of one back under {job.folder / 'checkpoints'}"


def unused_name(folder: Path, name: str) -> Path:
    """Returns the first unused path in the folder: NAME.1, NAME.2 ..."""
    return next(path for n in itertools.count(1) if not paths.exists(path := folder / f"{name}.{n}"))


def draws_ahead(config: Config, done: int) -> int:
    """Returns for how many of the next steps completions are being sampled after `done` steps: Online.lag, or the
    segments of a completion less one; at most the steps left in the stage, unless it is the last, which may go on."""
    i = stage_at(config, done)
    if i < 0 or not isinstance(config.stages[i], Online):
        return 0
    stage = config.stages[i]
    max_ahead = stage.lag + segments_of(stage, config) - 1
    return max_ahead if i + 1 == len(config.stages) else min(max_ahead, ends(config)[i] - done)


def waiting_names(count: int) -> list[str]:
    """Returns the checkpoint's names of the draws in progress, in the order of their steps: waiting, waiting_2, ..."""
    return [f"waiting_{i}" if i > 1 else "waiting" for i in range(1, count + 1)]


def beginning(job: Job, key: Array) -> TrainState:
    """Returns the state before the first step: the policy, and the teacher if Config.teacher names one.

    Args:
      key: the run's root.
    """
    state = policy_beginning(job, key)
    if job.config.teacher is None:
        return state
    job.display.phase("reading the teacher")
    return with_teacher(state, open_teacher(job.config, job.mesh))


def policy_beginning(job: Job, key: Array) -> TrainState:
    """Returns the state of the policy before the first step: random weights, or the published ones that it starts from.

    Args:
      key: the run's root.
    """
    if job.origin is not None:
        return state_from_run(job.origin, job.programs, key, abstract(key, job.mesh), job.processes)
    if job.published is None:
        return job.programs.init(key)
    of_total = lambda done, total: f": {10 * (10 * done // total)} % of {total / 1e9:.1f} GB" if total >= 1e9 else ""
    on_progress = lambda done, total: job.display.phase(f"reading weights{of_total(done, total)}")
    weights = load(job.published, job.mesh, on_progress)
    refuse_other_weights(job, int(fetch(jax.jit(fingerprint)(weights))))
    if job.config.adapter is not None and job.config.adapter.base is not None:
        weights = quantized(job, weights)
    return job.programs.init_from(weights, key)


def quantized(job: Job, weights: PyTree) -> PyTree:
    """Returns the weights with the layers' matrices quantized as LoRA.base says. Deletes each original in turn."""
    layers, names = dict(weights["layers"]), axes(decoder.spec(job.cfg))["layers"]
    quantize_matrix = jax.jit(quantize, static_argnames=("name", "kind", "names"))
    for name in layers.keys() & MATRICES.keys():
        matrix = layers[name]
        quantized_matrix = quantize_matrix(matrix, name=name, kind=job.config.adapter.base, names=names[name])
        layers[name] = jax.block_until_ready(quantized_matrix)
        matrix.delete()
    return {**weights, "layers": layers}


def refuse_other_weights(job: Job, fingerprint: int) -> None:
    """Raises RefusedIdentity if a run that starts over reads other weights than it first began with."""
    record = job.folder / PUBLISHED / "weights.json"
    content = json.dumps({"fingerprint": f"{fingerprint:08x}"}).encode() + b"\n"
    if job.processes.from_writer("weights", paths.exists(record)) is False:
        if job.processes.writer:
            paths.write_bytes_atomic(record, content)
    elif paths.read_bytes(record) != content:
        raise RefusedIdentity(
            f"the weights in {job.published.path} are not those that {job.location} began with; restore those, or use "
            "another --run"
        )


def open_files(job: Job, metrics_offset: int, rollout_rows: int, metrics_sha256: str | None = None) -> None:
    if not job.processes.writer:
        job.metrics, job.rollout_rows = no_metrics(), rollout_rows
        return
    if job.run_clock is not None:
        begin_goodput(job, job.done)
    sinks = open_sinks(job.config.log.writers, job.folder, step=job.done, config=gin.to_json(job.config))
    try:
        job.metrics = open_metrics(job.folder / "metrics.jsonl", metrics_offset, sinks, metrics_sha256)
        if job.config.log.rollouts:
            job.rollouts = open_rollouts(job.folder / "rollouts", rows=rollout_rows)
            if lost := lost_chunks(job.folder / "rollouts") if rollout_rows else []:
                job.display.warn("rollouts", lost_rollouts_warning(job.location, lost))
    except ValueError as error:
        raise ValueError(f"{error}. Restore it, or start a new run in another folder") from error
    job.rollout_rows = rollout_rows


def save(job: Job, progress: Progress) -> None:
    """Writes a checkpoint: the state, and how much of every file belongs to it."""
    job.display.phase("saving a checkpoint")
    job.processes.status.begin("saving")  # so that other processes know where this one is
    with job.timed("checkpoint"), job.spent("save"):
        step, result = job.evaluated
        # Not a step that is saved only because the run was stopped: the best would depend on where it was.
        if step == job.done and can_be_best(job.config, step):
            job.best = update_best(job.best, step, result["mean"], job.eval_identity)
        tree, host = to_save(job, progress.waiting)
        check_not_diverged(job, progress.state, host)
        best = None if job.best is None else job.best.step
        job.run_state.save(job.done, {"state": progress.state, **tree}, host, unproven=job.unproven, best=best)
        job.publish()
    note_time(job)


def begin_goodput(job: Job, step: int) -> None:
    """Opens the goodput file and appends the start of this process, which goes on from the checkpoint of `step`."""
    job.goodput, seconds = open_goodput(job.folder), job.run_clock.read()
    job.goodput.append({"start": time.time() - sum(seconds.values()), "step": step, "seconds": seconds})


def note_time(job: Job) -> None:
    """Appends how this process has spent its time so far to the goodput file."""
    if job.goodput is not None:
        job.goodput.append({"step": job.done, "seconds": job.run_clock.read()})


def note_stop(job: Job, error: Exception) -> None:
    """Appends the error that stops this process to the goodput file, for `jrl doctor`. Before the run's files are open
    only that of a user's part, in a step that is being traced: a resume that is refused changes nothing."""
    if job.run_clock is None or not job.processes.writer or (job.goodput is None and part_location(error) is None):
        return
    with contextlib.suppress(OSError):  # the disk may be what stops the run
        step = job.done
        if job.goodput is None:
            step = max(list_steps(job.folder / "checkpoints"), default=0)
            begin_goodput(job, step)
        stopped = printable(paths.first_line(error), limit=1000)
        job.goodput.append({"step": step, "seconds": job.run_clock.read(), "stopped": stopped})


def check_not_diverged(job: Job, state: TrainState, host: dict[str, Any]) -> None:
    """Raises Diverged if the processes of a run disagree: in the copies of weights on their devices, or in their
    position in the data. Does nothing for a single process."""
    if job.processes.count == 1:
        return
    advice = f"Nothing was saved of step {job.done}; start all processes again from the checkpoint before it"
    if (replica := differing_replica(state)) is not None:
        first, other = (job.processes.name(device.process_index) for device in (replica.device, replica.other))
        raise Diverged(
            f"after step {job.done}, {replica.leaf} has other bits on {replica.device} of {first} than on "
            f"{replica.other} of {other}: a device or its memory is at fault. {advice}"
        )
    shared = {name: value for name, value in host.items() if name not in OF_THE_WRITER}
    texts = [json.dumps(shared[name], sort_keys=True) for name in sorted(shared)]
    hashes_by_process = job.processes.exchange("position", [zlib.crc32(text.encode()) for text in texts])
    for index, hashes in enumerate(hashes_by_process):
        if different := [name for name, a, b in zip(sorted(shared), hashes_by_process[0], hashes) if a != b]:
            raise Diverged(
                f"after step {job.done}, {', '.join(different)} differ between {job.processes.name(0)} and "
                f"{job.processes.name(index)}: the processes have not read the same data. {advice}"
            )


def to_save(job: Job, waiting: Sequence[Draw]) -> tuple[dict[str, PyTree], dict[str, Any]]:
    """Returns what a checkpoint holds besides the state: arrays, and everything else. Commits every file.

    Args:
      waiting: the completions being sampled, in the order of their steps.

    Raises: WrongWeights if the sampling devices drew one of them with other weights than were published.
    """
    for drawn in waiting:
        if drawn.under_way is not None:
            drawn.under_way()  # raises WrongWeights: such a draw is not saved
    tree: dict[str, PyTree] = {}
    streams = {stage.name: stored_stream(stage) for stage in job.stages}
    stored = {name: stream.get_state() for name, stream in streams.items() if stream is not None}
    data: dict[str, Any] = {"train": job.stream.get_state(), "stages": stored}
    for name, drawn in zip(waiting_names(len(waiting)), waiting):
        tree[name], data[name] = drawn.rollout, drawn.position
    if job.stream.outcomes is not None:
        tree["outcomes"] = job.stream.outcomes._asdict()
    if job.rollouts is not None:
        job.rollout_rows = job.rollouts.commit()
    host = {
        "done": job.done,
        "data": data,
        "evals": job.evals,
        "eval_identity": job.eval_identity,
        "metrics_offset": job.metrics.commit(),
        "metrics_sha256": job.metrics.sha256(),
        "rollout_rows": job.rollout_rows,
        "in_a_row": {"skipped": job.skipped, "unscored": job.unscored, "without_signal": job.without_signal},
        "overflowed": dict(job.overflowed),
        "last_signal": job.last_signal,
        "best": job.best,
        "time": {"seconds": job.all_seconds(), "sampled_tokens": job.sampled_tokens},
    }
    return tree, host


def note_step(job: Job, step: Step, seconds: float) -> None:
    """Records how long a step took until its update was dispatched, and how many tokens it sampled."""
    step.seconds = seconds
    job.sampled_tokens += step.sampled_tokens
    if job.run_clock is not None:
        step.work = job.run_clock.take_step()


def emit(job: Job, step: Step) -> Step:
    """Waits for a step's update, fetches its metrics and writes them. Raises StopRun if no completion could be scored
    for several steps in a row, or the objective says that the run must not go on."""
    before = job.seconds.get(step.phase, 0.0)
    with job.timed(step.phase):
        if job.run_clock is not None:
            job.run_clock.wait_for(step.metrics[OF_UPDATES])
        step.metrics = {name: _number(value) for name, value in fetch(step.metrics).items()}
    step.seconds += job.seconds[step.phase] - before
    step.metrics["time/step_seconds"] = step.seconds
    if step.batch is not None:
        step.metrics["time/tokens_per_second"] = step.sampled_tokens / step.seconds
    step.metrics |= time_metrics(job, step)
    step.metrics |= unmeasured(step.metrics)
    step.metrics["host/peak_bytes"] = job.memory.sample()
    job.metrics.append({"step": step.step, "phase": step.phase, **step.metrics})
    note_time(job)
    job.display.step({"step": step.step, "phase": step.phase, **step.metrics})
    job.lost_signal = None
    if step.batch is not None:
        show_samples(job, step)
        job.final_reward = step.metrics["reward/mean"]
        warn(job, step)
    if step.evaluation is not None:
        show_evaluation(job, f"after step {step.step}", step.evaluation)
    job.skipped = job.skipped + 1 if step.metrics[OF_UPDATES] else 0
    note_overflows(job, step)
    job.unscored = job.unscored + 1 if step.metrics.get("rollout/valid_share") == 0 else 0
    if job.unscored >= STOP_AFTER_SKIPPED:
        counts = {name: n for name, n in step.batch.host_scores.counts.items() if n}
        raise StopRun(
            f"for {STOP_AFTER_SKIPPED} steps in a row no completion could be scored: {counts} at step {step.step}. "
            f"The first said: {next(filter(None, step.batch.host_scores.details), 'nothing')}"
        )
    stage = job.stages[stage_at(job.config, step.step)]
    # Metrics of skipped updates may be of NaN.
    why = None if job.skipped else stage.objective.stop(stage.config.objective, step.metrics)
    if why is not None:
        raise StopRun(f"at step {step.step} {why}")
    return step


def unmeasured(metrics: Mapping[str, Any]) -> dict[str, None]:
    """Returns {name: None} of a step's means over nothing, which would be read as means of 0."""
    quarters = [name for name, share in metrics.items() if name.startswith("rollout/length_quarter_") and share == 0]
    names = [f"reward/{name.removeprefix('rollout/')}" for name in quarters]  # no completion has such a length
    groups = () if metrics.get("rollout/valid_share") != 0 else ("reward/",)  # no completion was scored
    if metrics.get("update/tokens") == 0:  # none was learned from, as where no group of DAPO has a signal
        sums = ("loss", "grad_norm", "critic/loss", "critic/grad_norm")
        names += [name for name in metrics if name not in sums and not name.startswith(OF_EVERY_STEP)]
    return dict.fromkeys([*names, *(name for name in metrics if name.startswith(groups))])


def show_evaluation(job: Job, name: str, result: Mapping[str, Any]) -> None:
    """Shows the held-out accuracy of the policy, with its first completion. name: when it was measured."""
    temperature = job.config.eval.temperature
    how = "greedy" if temperature is None else f"temperature {temperature:g}"
    job.display.note(f"{evaluation_line(name, result)}; the first ({how}):")
    first = result["sample"]
    job.display.sample(first["prompt"], first["completion"], first["reward"])


def note_overflows(job: Job, step: Step) -> None:
    """Records the step of a role's update whose norm is not finite, until a later update of that role has a finite one:
    the loss was finite then, and so were the weights."""
    norms = {CRITIC: step.metrics.get("critic/update/norm", 0)}
    if not warms_up(job.config, step.step):  # else all metrics are the critic's
        norms[job.config.stages[stage_at(job.config, step.step)].trains] = step.metrics["update/norm"]
    for role, norm in norms.items():
        if not math.isfinite(norm):
            job.overflowed.setdefault(role, step.step)
        elif norm > 0:  # 0: nothing was learned
            job.overflowed.pop(role, None)


def time_metrics(job: Job, step: Step) -> dict[str, float]:
    """Returns how a step spent its time, and its throughput; {} if its time was not measured."""
    work, step.work = step.work, None
    if work is None:
        return {}
    stage = job.config.stages[stage_at(job.config, step.step)]
    if step.batch is not None:
        samples = job.stages[stage_at(job.config, step.step)].shape.samples
        count = count_rows(step.batch.host["length"], step.batch.host["action_mask"], samples)
        work = work._replace(packed=count)
    epochs = computed_epochs(stage.learner, step.metrics.get(KL_REACHED, 0))
    return figures(job.speed, job.run_clock, work, epochs)


def warn(job: Job, step: Step) -> None:
    """Warns about completions that were not scored, about a run that has had no gradient so far, and about one that has
    none any more."""
    share, reward = step.metrics["rollout/valid_share"], step.metrics["reward/mean"]
    if (text := scoring_warning(share, step.batch.host_scores.first_problem)) is not None:
        job.display.warn("scoring", text)
    if warms_up(job.config, step.step):  # the gradient is the critic's
        return
    if job.last_signal is not None and job.last_signal[0] <= starts(job.config)[stage_at(job.config, step.step)]:
        job.last_signal = None  # of an earlier stage
    if job.without_signal is not None:
        job.without_signal = job.without_signal + 1 if step.metrics["grad_norm"] == 0 else None
        if job.without_signal == WARN_WITHOUT_SIGNAL:
            job.display.warn("signal", no_signal_warning(job.without_signal, scored=share > 0))
    if step.metrics["grad_norm"] != 0:
        if reward is not None and math.isfinite(reward):
            job.last_signal = (step.step, float(reward))
        elif job.last_signal is not None:
            job.last_signal = (step.step, job.last_signal[1])
    job.lost_signal = lost_signal(job.last_signal, step)
    if job.lost_signal is not None:
        job.display.warn("collapse", collapse_warning(job.lost_signal))


def lost_signal(last: tuple[int, float] | None, step: Step) -> LostSignal | None:
    """Returns that a run has had no gradient for some steps although it may not have learned all there is: its rewards
    differ from prompt to prompt, or their mean is lower than with the last gradient. None otherwise.

    Args:
      last: the newest step with a gradient and its mean reward; None: none is known.
    """
    mean, low, high = (step.metrics[f"reward/{name}"] for name in ("mean", "min", "max"))
    if last is None or mean is None or step.step - last[0] < WARN_WITHOUT_SIGNAL or not (low < high or mean < last[1]):
        return None
    return LostSignal(step.step - last[0], last[1], float(mean))


def show_samples(job: Job, step: Step) -> None:
    """Prints a few rollouts, at a few steps of the run."""
    i = stage_at(job.config, step.step)
    every = max(1, job.config.stages[i].steps // 5)
    if (step.step - starts(job.config)[i]) % every == 0:
        scores = step.batch.host_scores
        shown = list(zip(step.texts, scores.reward, scores.valid))[: job.config.log.samples]
        for row, ((prompt, _), reward, valid) in enumerate(shown):
            completion = completion_text(step.batch, row, job.tokenizer)
            job.display.sample(prompt, completion, float(reward) if valid else None)
        sampled = step.batch.host["action_mask"].any(axis=1)  # False on padding prompts, which fill up the mesh
        unscored = [detail for detail, valid in zip(scores.details, scores.valid | ~sampled) if not valid]
        if unscored:
            why = next(filter(None, unscored), "nothing")
            job.display.note(f"  {len(unscored)} of {sampled.sum()} completions were not scored; the first said: {why}")


def keep(job: Job, step: Step) -> None:
    """Appends a step's rollouts to the store."""
    if not job.config.log.rollouts or step.batch is None:
        return
    fields_on_host, fingerprint = step.rollout, fetch(step.batch.rollout.weights_fingerprint)
    if not job.processes.writer:
        return
    prompts, completions = zip(*step.texts)
    ids = [visit.example.id for visit in step.batch.visits]
    uids = np.array([visit.uid for visit in step.batch.visits], np.uint32)
    online_stages = [stage for stage in job.stages if isinstance(stage, OnlineStage)]
    components = tuple(dict.fromkeys(name for stage in online_stages for name in stage.sampler.components))
    rewards_tokens = any(stage.rewards_tokens for stage in online_stages)
    scores = step.batch.host_scores
    of_rows = lambda column: column(step.batch.visits, step.batch.samples, len(scores.reward))
    scored = score_columns(scores, of_rows(task_hashes), of_rows(example_indices), components, rewards_tokens)
    stored = {**fields_on_host, "weights_fingerprint": fingerprint, **fitting(scored, job.rollouts.columns())}
    job.rollouts.append(step.step, stored, list(prompts), list(completions), ids, uids)


def summarize(job: Job) -> None:
    """Writes summary.json, and prints how the run went and where its files are."""
    if not job.processes.writer:
        return
    sampling = sum(job.seconds.get(stage.name, 0.0) for stage in job.stages if isinstance(stage, OnlineStage))
    note_time(job)
    best = job.best if job.best is not None and is_comparable(job.best, job.eval_identity) else None
    summary = write_summary(
        job.folder / "summary.json",
        steps=job.done,
        seconds=job.all_seconds(),
        evals=job.evals,
        tokens_per_second=job.sampled_tokens / sampling if sampling and job.sampled_tokens else None,
        peak_bytes=job.memory.peak,
        goodput=None if job.goodput is None else goodput(read_goodput(job.folder)),
        best=None if best is None else {"step": best.step, "mean": best.mean},
    )
    streams = [stream for stage in job.stages for stream in (stream_of(job, stage), stored_stream(stage))]
    for stream in {id(s): s for s in streams if s is not None}.values():
        if text := dropped_prompts(stream.counts, stream.seen, job.config.data):
            job.display.note(text)
    for name, result in job.evals.items():
        job.display.note(evaluation_line(name.replace("_", " "), result))
    last = next(reversed(job.evals.values()), {}).get("mean")
    if best is not None and last is not None and best.mean > last:
        job.display.note(best_line(job.location, best.step, best.mean))
    roles = [stage.config.trains for stage in job.stages]
    job.display.close(
        closing_message(
            job.location,
            steps=job.done,
            seconds=summary["seconds"]["total"],
            final_reward=job.final_reward,
            steps_without_signal=job.without_signal or 0,
            lost=job.lost_signal,
            skipped=job.skipped,
            role="policy" if "policy" in roles else roles[-1],
        )
    )


def stream_of(job: Job, stage: OfflineStage | OnlineStage) -> Stream:
    """Returns the data stream of a stage's rows or prompts."""
    return stage.stream if isinstance(stage, OfflineStage) else job.stream


def dropped_metrics(job: Job, stage: OfflineStage | OnlineStage) -> dict[str, float]:
    """Returns how many examples a stage's data stream has dropped so far, as metrics."""
    return {f"data/dropped_{cause}": float(count) for cause, count in stream_of(job, stage).counts.items()}


def stored_stream(stage: OfflineStage | OnlineStage) -> Stream | None:
    """Returns the data stream of a stage's stored rows; None: it has none."""
    rows = stored_rows(stage)
    return None if rows is None else rows.stream


def completion_text(batch: Collected, row: int, tokenizer: Any) -> str:
    """Returns the completion of a sequence, also where another process scores it and `batch.texts` has ""."""
    start = len(batch.visits[row // batch.samples].prompt)
    return tokenizer.decode(batch.host["tokens"][row, start : batch.host["length"][row]].tolist())


def sequence_texts(batch: Collected) -> list[tuple[str, str]]:
    """Returns (prompt, completion) of every sequence that is not padding."""
    samples = batch.samples
    prompts = ["\n".join(m.content for m in visit.example.messages) for visit in batch.visits]
    return [(prompts[g], batch.texts[g * samples + k]) for g in range(len(prompts)) for k in range(samples)]


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, np.ndarray | np.generic) else value
