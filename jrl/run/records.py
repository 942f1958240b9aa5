"""What a run remembers: restoring, saving, metrics, rollouts and the summary. The loop's effects on disk are here."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl import config as gin
from jrl import paths
from jrl.models import decoder
from jrl.models.adapters.matrices import MATRICES
from jrl.models.adapters.quantized import quantise
from jrl.models.contract import axes
from jrl.models.pretrained.published import load
from jrl.ops.fingerprint import fingerprint
from jrl.rollout.collect import Collected, Draw, redraw_prompts
from jrl.run.checkpoints.run_state import DamagedStep, NoIntactStep
from jrl.run.job import PUBLISHED, Job, RefusedIdentity
from jrl.run.precompile import rollout_shape
from jrl.run.programs import abstract
from jrl.run.report.metrics import open_metrics
from jrl.run.report.rollouts import open_rollouts
from jrl.run.report.sinks import open_sinks
from jrl.run.report.summary import write_summary
from jrl.types import PyTree, TrainState

_log = logging.getLogger(__name__)

STOP_AFTER_SKIPPED = 5  # steps in a row whose update was skipped


class Preempted(RuntimeError):
    """The run was asked to stop, and has saved itself."""


class StopRun(RuntimeError):
    """The run cannot go on. The message is the diagnosis; the last checkpoint is good."""


class Progress(NamedTuple):
    """What a run carries from step to step besides the data position. All of it is in the checkpoint."""

    state: TrainState
    waiting: Draw | None  # completions already being drawn for the next step (lag = 1)
    rl: bool  # RL has begun


@dataclasses.dataclass
class Step:
    """One finished step, for a notebook to look at."""

    step: int  # counted from 1, over all phases
    phase: str  # "sft" or "rl"
    metrics: dict[str, Any]  # device scalars until the step is emitted
    batch: Collected | None = None  # None in the warm start

    @property
    def rollout(self) -> dict[str, np.ndarray] | None:
        """Fields of Rollout and Scores by name, on the host."""
        if self.batch is None:
            return None
        said = self.batch.said
        return {**self.batch.host, "reward": said.reward, "valid": said.valid, "verdict": said.verdict}

    @property
    def texts(self) -> list[tuple[str, str]] | None:
        """Prompt and completion of every sequence."""
        return None if self.batch is None else sequence_texts(self.batch)


def restore(job: Job) -> Progress:
    """Returns the progress of the newest intact checkpoint, or of a run's beginning, with every file cut to match."""
    host = None
    for step in reversed(job.run_state.steps()):
        state = job.programs.init.shape(abstract(job.key, job.mesh))
        if step > job.sft_steps:
            state = job.programs.begin_rl.shape(state)
        wanted = {"state": state}
        if job.config.loop.lag and step > job.sft_steps:
            wanted["waiting"] = rollout_shape(job, state)
        try:
            _, tree, host = job.run_state.restore(wanted, step)
        except DamagedStep as damage:
            job.display.note(f"{damage}; trying the one before")
            continue
        break
    else:
        if job.run_state.steps():
            raise NoIntactStep(
                f"no checkpoint in {job.folder} is intact; nothing was changed. Put a good copy of one back under "
                f"{job.folder / 'checkpoints'}, or remove that folder: the run then begins anew, and metrics.jsonl and "
                "rollouts/ with it"
            )
    if host is None:
        metrics = job.folder / "metrics.jsonl"
        if paths.exists(metrics) and paths.size(metrics):
            job.display.note(f"no checkpoint in {job.folder}: beginning anew, what metrics.jsonl holds is dropped")
        open_files(job, 0, 0)
        return Progress(beginning(job), None, rl=False)
    job.done, job.evals = host["done"], host["evals"]
    job.skipped, job.unscored = host["in_a_row"]["skipped"], host["in_a_row"]["unscored"]
    before = host["time"]["seconds"]
    job.seconds = before | {name: before.get(name, 0.0) + more for name, more in job.seconds.items()}
    job.sampled_tokens = host["time"]["sampled_tokens"]
    open_files(job, host["metrics_offset"], host["rollout_rows"])
    job.sft_stream.set_state(host["data"]["sft"])
    waiting = None
    if "waiting" in tree:
        waiting = Draw(tree["waiting"], redraw_prompts(job, host["data"]["waiting"]), host["data"]["waiting"])
    # Refills of the last step may have moved the stream past the prompts that were under way.
    job.stream.set_state(host["data"]["train"])
    job.display.note(f"resumed after step {job.done} of {job.total}")
    return Progress(tree["state"], waiting, rl=job.done > job.sft_steps)


def beginning(job: Job) -> TrainState:
    """Returns the state before the first step: random weights, or the published ones that the run starts from."""
    if job.published is None:
        return job.programs.init(job.key)
    tenths = lambda done, total: f"{10 * (10 * done // total)} % of {total / 1e9:.1f} GB"
    told = lambda done, total: job.display.phase(f"reading weights: {tenths(done, total)}")
    weights = load(job.published, job.mesh, told)
    refuse_other_weights(job, int(jax.jit(fingerprint)(weights)))
    if job.config.adapter is not None and job.config.adapter.base is not None:
        weights = quantised(job, weights)
    return job.programs.init_from(weights, job.key)


def quantised(job: Job, weights: PyTree) -> PyTree:
    """Returns weights with every matrix of the layers as the run's adapters want it. Deletes each that it has made."""
    layers, names = dict(weights["layers"]), axes(decoder.spec(job.cfg))["layers"]
    one = jax.jit(quantise, static_argnames=("name", "kind", "names"))
    for name in layers.keys() & MATRICES.keys():
        matrix = layers[name]
        layers[name] = jax.block_until_ready(one(matrix, name=name, kind=job.config.adapter.base, names=names[name]))
        matrix.delete()
    return {**weights, "layers": layers}


def refuse_other_weights(job: Job, found: int) -> None:
    """Raises RefusedIdentity where a run that begins anew finds other weights than it began with."""
    kept = job.folder / PUBLISHED / "weights.json"
    said = json.dumps({"fingerprint": f"{found:08x}"}).encode() + b"\n"
    if not paths.exists(kept):
        paths.write_bytes_atomic(kept, said)
    elif paths.read_bytes(kept) != said:
        raise RefusedIdentity(
            f"the weights in {job.published.path} are not those that {job.folder} began with; put those back, or name "
            "another folder with --run"
        )


def open_files(job: Job, metrics_offset: int, rollout_rows: int) -> None:
    sinks = open_sinks(job.config.log.writers, job.folder, step=job.done, config=gin.to_json(job.config))
    try:
        job.metrics = open_metrics(job.folder / "metrics.jsonl", metrics_offset, sinks)
        if job.config.log.rollouts:
            job.rollouts = open_rollouts(job.folder / "rollouts", rows=rollout_rows)
    except ValueError as error:
        raise ValueError(
            f"{error}. Put it back as it was, or remove {job.folder / 'checkpoints'}: the run then begins anew"
        ) from error
    job.rollout_rows = rollout_rows


def save(job: Job, progress: Progress) -> None:
    """Writes the one state tree, and with it how much of every file belongs to it."""
    tree: dict[str, PyTree] = {"state": progress.state}
    data = {"train": job.stream.get_state(), "sft": job.sft_stream.get_state()}
    if progress.waiting is not None:
        tree["waiting"] = progress.waiting.rollout
        data["waiting"] = progress.waiting.position
    with job.timed("checkpoint"):
        if job.rollouts is not None:
            job.rollout_rows = job.rollouts.commit()
        host = {
            "done": job.done,
            "data": data,
            "evals": job.evals,
            "metrics_offset": job.metrics.commit(),
            "rollout_rows": job.rollout_rows,
            "in_a_row": {"skipped": job.skipped, "unscored": job.unscored},
            "time": {"seconds": job.clock(), "sampled_tokens": job.sampled_tokens},
        }
        job.run_state.save(job.done, tree, host)


def clock(job: Job, step: Step, seconds: float) -> None:
    """Notes how long a step took and, of a step of RL, how many tokens a second it sampled."""
    step.metrics["time/step_seconds"] = seconds
    if step.batch is not None:
        tokens = int(step.batch.host["action_mask"].sum())
        job.sampled_tokens += tokens
        step.metrics["time/tokens_per_second"] = tokens / seconds


def emit(job: Job, step: Step) -> Step:
    """Fetches a step's metrics and writes them. Raises StopRun where learning has stopped being possible."""
    step.metrics = {name: _number(value) for name, value in jax.device_get(step.metrics).items()}
    if step.metrics.get("rollout/valid_share") == 0:  # nothing was judged: there is no reward, not one of 0
        step.metrics |= {name: None for name in step.metrics if name.startswith("reward/")}
    step.metrics["host/peak_bytes"] = job.memory.sample()
    job.metrics.append({"step": step.step, "phase": step.phase, **step.metrics})
    job.display.step({"step": step.step, "phase": step.phase, **step.metrics})
    if step.batch is not None:
        show_samples(job, step)
    job.skipped = job.skipped + 1 if step.metrics["update/skipped_nonfinite"] else 0
    job.unscored = job.unscored + 1 if step.metrics.get("rollout/valid_share") == 0 else 0
    if job.unscored >= STOP_AFTER_SKIPPED:
        counts = {name: n for name, n in step.batch.said.counts.items() if n}
        raise StopRun(
            f"for {STOP_AFTER_SKIPPED} steps in a row no completion could be scored: {counts} at step {step.step}. "
            f"The first said: {next(filter(None, step.batch.said.details), 'nothing')}"
        )
    if job.skipped >= STOP_AFTER_SKIPPED:
        raise StopRun(
            f"{STOP_AFTER_SKIPPED} updates in a row were skipped, the last at step {step.step}: "
            f"loss {step.metrics['loss']}, gradient norm {step.metrics['grad_norm']}, "
            f"{step.metrics.get('loss/tokens', 0):.0f} tokens in the loss. The last checkpoint is from before; "
            "look at the learning rate and at the rewards of these steps in RUN/rollouts"
        )
    return step


def show_samples(job: Job, step: Step) -> None:
    """Prints a few rollouts, at a few steps of the run."""
    every = max(1, job.config.loop.steps // 5)
    if (step.step - job.sft_steps) % every == 0:
        said = step.batch.said
        for (prompt, completion), reward, valid in list(zip(step.texts, said.reward, said.valid))[
            : job.config.log.samples
        ]:
            job.display.sample(prompt, completion, float(reward) if valid else None)
        lost = [detail for detail, valid in zip(said.details, said.valid) if not valid]
        if lost:
            why = next(filter(None, lost), "nothing")
            job.display.note(f"  {len(lost)} of {len(said.valid)} completions were not scored; the first said: {why}")


def keep(job: Job, step: Step) -> None:
    """Appends a step's rollouts to the store."""
    if job.rollouts is None or step.batch is None:
        return
    prompts, completions = zip(*step.texts)
    ids = [visit.example.id for visit in step.batch.visits]
    uids = np.array([visit.uid for visit in step.batch.visits], np.uint32)
    fingerprint = jax.device_get(step.batch.rollout.weights_fingerprint)
    fields = {**step.rollout, "weights_fingerprint": fingerprint}
    job.rollouts.append(step.step, fields, list(prompts), list(completions), ids, uids)


def summarise(job: Job) -> None:
    """Writes summary.json, and says how the run went and where everything is."""
    job.memory.sample(now=True)
    rl = job.seconds.get("rl", 0.0)
    summary = write_summary(
        job.folder / "summary.json",
        steps=job.done,
        seconds=job.clock(),
        evals=job.evals,
        tokens_per_second=job.sampled_tokens / rl if rl and job.sampled_tokens else None,
        peak_bytes=job.memory.peak,
    )
    dropped = Counter(job.sft_stream.counts) + Counter(job.stream.counts)
    if dropped:
        counts = ", ".join(f"{count} {cause}" for cause, count in sorted(dropped.items()))
        job.display.note(f"prompts dropped on the way: {counts} (Data.on_bad_prompt = 'drop')")
    for name, result in job.evals.items():
        if result["mean"] is None:
            job.display.note(f"{name.replace('_', ' ')}: no held-out completion could be scored")
            continue
        job.display.note(
            f"{name.replace('_', ' ')}: {100 * result['mean']:.1f} % of {result['n']} held-out prompts "
            f"[{100 * result['low']:.1f}, {100 * result['high']:.1f}]"
        )
    job.display.note(
        f"{job.done} steps in {summary['seconds']['total']:.0f} s; metrics.jsonl, rollouts/, checkpoints/ and "
        f"summary.json are in {job.folder}; talk to the policy with `jrl sample {job.folder}`"
    )


def sequence_texts(batch: Collected) -> list[tuple[str, str]]:
    """Returns (prompt, completion) of every sequence that is not padding."""
    samples = len(batch.texts) // max(int(batch.host["group"].max()) + 1, 1)
    said = ["\n".join(m.content for m in visit.example.messages) for visit in batch.visits]
    return [(said[g], batch.texts[g * samples + k]) for g in range(len(said)) for k in range(samples)]


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, np.ndarray | np.generic) else value
