"""The training loop: the steps of every stage, in order.

An Offline step learns from stored rows (jrl/run/offline.py); an Online step samples, scores and updates
(jrl/run/online.py). With `lag = 0` an Online step samples with the newest weights. With `lag = k` a queue of k draws is
in flight while a step learns: update t trains on rollouts of version max(0, t - k), by index and not by arrival, so
that asynchronous runs are reproducible too. Device programs are dispatched from this one thread in a fixed order; host
threads only score. Everything that influences training is in `Progress` and the data streams, and the checkpoint has
all of it, including the queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from jrl.experiment import trains_online
from jrl.learning.layout import more_than_asked
from jrl.learning.learner import weights_of
from jrl.learning.step import Learned
from jrl.models import decoder
from jrl.models.contract import num_params, split_params
from jrl.rollout.evaluate import draw, numbers, summary
from jrl.run import fault, offline, online, records
from jrl.run.checkpoints.run_state import StateMismatch
from jrl.run.job import Job
from jrl.run.online import OnlineStage
from jrl.run.precompile import compile_run
from jrl.run.programs import abstract
from jrl.run.records import STOP_AFTER_SKIPPED, Preempted, Progress, Step, draws_ahead
from jrl.run.report.messages import saved_message
from jrl.run.report.text import counted
from jrl.run.sampler_devices import mesh_text, publication_of, publication_text
from jrl.run.stage_steps import can_have_best, ends, evaluated_steps, evaluates_after, saves_after, stage_at, warms_up
from jrl.tasks.stopping import StopRequested, never
from jrl.types import TrainState


def steps(job: Job) -> Iterator[Step]:
    """Yields the remaining steps of the run. A step's metrics are fetched while the next step runs. If the caller
    stops iterating early, the run is saved.

    Raises: Preempted if the run was asked to stop, after saving; StopRun if the run cannot go on learning.
    """
    expected = max(job.run_state.steps(), default=0)
    precompile(job, expected)
    progress = resume(job)
    if job.done < expected:  # a damaged checkpoint
        precompile(job, job.done)
    job.display.note(shapes(job))
    if idle := idle_devices(job):
        job.display.note(idle)
    if evaluated_steps(job.config) and not can_have_best(job.config):
        job.display.note("no step is both evaluated (Eval.every) and saved (Checkpoint.every), so none can be the best "
                         "checkpoint")  # fmt: skip
    job.run_clock.switch("other")
    # An earlier process may have ended after the last step of a stage and before this check.
    if progress.stage >= 0 and job.done >= ends(job.config)[progress.stage]:
        fault.check_end(job, progress)
    pending: Step | None = None  # the newest step, until its metrics are fetched
    resumed_at = saved = job.done
    fault.discard(job)
    bundled = False
    try:
        while job.done < job.total:
            progress = begin_stage(job, progress)
            stage, data_position = job.stages[progress.stage], job.stream.get_state()
            seconds_before = job.seconds.get(stage.name, 0.0)
            try:
                if bundled and not job.skipped:
                    fault.discard(job)
                    bundled = False
                if job.skipped >= STOP_AFTER_SKIPPED - 1:
                    fault.begin_bundle(job, progress)
                    bundled = True
                job.profile.before(job.done + 1)
                # Only an explicit `device_put` or `device_get` may cross between host and device.
                with job.timed(stage.name), jax.transfer_guard("disallow"):
                    progress, step = take_step(job, progress)
            except StopRequested:
                job.stream.set_state(data_position)  # the step is abandoned
                break
            step.metrics |= records.dropped_metrics(job, stage)
            previous, pending = pending, step
            job.done += 1
            records.note_step(job, step, job.seconds[stage.name] - seconds_before)
            job.profile.after(job.done, step.metrics)
            if previous is not None:
                yield records.emit(job, previous)
            job.program_cache.check()  # a later stage that does not compile fails now, not hours later
            if job.done == resumed_at + 2:
                job.program_cache.freeze()
            ended = job.done == ends(job.config)[progress.stage]
            saves = saves_after(job.config, job.done)
            # After a skipped update, every step is checked before the next one starts; one that was evaluated has been
            # waited for.
            if saves or job.skipped or step.evaluation is not None:
                emitted, pending = records.emit(job, pending), None
                if job.skipped >= STOP_AFTER_SKIPPED:
                    raise fault.stopped(job, progress, emitted)
                if ended:
                    fault.check_end(job, progress)
                if saves:
                    records.save(job, progress)
                    saved = job.done
                yield emitted
            if job.stopping():
                break
        emitted = None
        if pending is not None:
            emitted, pending = records.emit(job, pending), None
        if saved != job.done:  # a skipped step is emitted at once and not saved
            records.save(job, progress)
            saved = job.done
        if emitted is not None:
            yield emitted
    except GeneratorExit:  # the caller stopped iterating
        if pending is not None:
            records.emit(job, pending)
        if saved != job.done:
            records.save(job, progress)
        raise
    finally:
        job.profile.close(job.done)
    if job.done < job.total:
        raise Preempted(saved_message(job.done, job.total) if job.done else "Stopped before the first step.")
    evaluate_once(job, progress.state, f"after_{job.stages[-1].name}")
    job.memory.sample(now=True)
    records.summarize(job)


def resume(job: Job) -> Progress:
    """Returns the progress that the run continues from. What it changes is recorded once it is restored.

    Raises: StateMismatch if the checkpoint does not fit the changed configuration; the run directory is unchanged.
    """
    try:
        progress = records.restore(job)
    except StateMismatch as error:
        if job.record_change is None:
            raise
        raise StateMismatch(
            f"--accept-change cannot continue with this change: {error}. Nothing was changed in {job.location}. To "
            f"start a new run from its policy, if the model is the same: another --run with --from {job.location} (in "
            "Python begin_from)"
        ) from error
    records.record_continuation(job)
    return progress


def precompile(job: Job, done: int) -> None:
    """Starts to compile the programs that the run needs after its first `done` steps."""
    with job.timed("compile"), job.spent("compile"):
        compile_run(
            records.inputs_of(job),
            done,
            from_weights=job.published is not None or job.origin is not None,
            classifier=job.classifier,
        )


def shapes(job: Job) -> str:
    """Returns a description of the shapes that the run's programs are compiled for, which no completion changes."""
    mesh = mesh_text(job.mesh.shape)
    frozen, trained = split_params(job.model.spec(job.cfg))
    # Counted on unquantized matrices: quantized ones have fewer entries, and scales.
    size = f"{num_params(trained if frozen is None else decoder.spec(job.cfg)):,} parameters"
    if frozen is not None:
        size += f" under {num_params(trained):,} of adapters"
    lines = []
    for stage in job.stages:
        packed = stage.shape
        prompts = ""
        if isinstance(stage, OnlineStage):
            prompts = f"{counted(stage.config.prompts, 'prompt')} of {job.config.data.prompt_length}, "
        lines.append(
            f"{stage.name}: {prompts}{counted(packed.sequences, 'sequence')} of {packed.width}, at most "
            f"{counted(packed.micro_batches, 'micro-batch')} of {counted(packed.rows, 'row')} of {packed.row_length} "
            f"tokens"
            f"{more_than_asked(packed, stage.config.learner)}"
        )
    return "\n".join([f"{size} on {mesh}", *publication_lines(job), *lines])


def idle_devices(job: Job) -> str | None:
    """Returns a note on the devices that the run's meshes leave out; None if they use all."""
    meshes = [mesh for mesh in (job.mesh, job.policy.sampler_mesh) if mesh is not None]
    used, present = len({device for mesh in meshes for device in mesh.devices.flat}), jax.device_count()
    if used == present:
        return None
    change = "" if len(meshes) > 1 else "; 'Config.mesh=@MeshShape()' MeshShape.data=-1 divides each batch over all"
    return f"the run uses {used} of {present} devices{change}"


def publication_lines(job: Job) -> list[str]:
    """Returns the devices that only sample, and what publishing weights to them takes; [] where there are none."""
    sampler_mesh = job.policy.sampler_mesh
    if sampler_mesh is None:
        return []
    state = job.programs.initial(abstract(job.key, job.mesh))
    weights = weights_of(state.models, "policy").params
    lag = max(stage.config.lag for stage in job.stages if isinstance(stage, OnlineStage))
    return [f"sampling on devices of its own, {mesh_text(sampler_mesh.shape)}: "
            f"{publication_text(publication_of(weights, job.mesh, sampler_mesh, lag))}"]  # fmt: skip


def begin_stage(job: Job, progress: Progress) -> Progress:
    """Returns the progress that the next step starts from. Before the first step of a stage it evaluates, and begins
    with a fresh optimizer, or that of the stage before, and copies of the policy for the roles that the stage needs."""
    next_stage = stage_at(job.config, job.done + 1)
    if next_stage == progress.stage:
        return progress
    if progress.stage >= 0 and trains_online(job.config.stages[progress.stage]):
        evaluate_once(job, progress.state, f"after_{job.stages[progress.stage].name}")
    if trains_online(job.config.stages[next_stage]):
        evaluate_once(job, progress.state, f"before_{job.stages[next_stage].name}")
    return Progress(job.programs.stages[next_stage].begin(progress.state), (), stage=next_stage)


def take_step(job: Job, progress: Progress) -> tuple[Progress, Step]:
    """Returns the progress after one step of its stage."""
    stage, state = job.stages[progress.stage], progress.state
    if not isinstance(stage, OnlineStage):
        stepped = offline.step(stage, state, job.display.phase, job.run_clock)
        learned = learned_if_stopping(job, stepped.learned)
        step = Step(job.done + 1, stage.name, stepped.metrics, None, learned, stepped.examples)
        return progress._replace(state=stepped.state), step
    ahead = draws_ahead(job.config, job.done + 1)
    stepped = online.step(
        stage,
        state,
        progress.waiting,
        ahead,
        job.display.phase,
        job.stop_alone,
        job.run_clock,
        warms_up=warms_up(job.config, job.done + 1),
    )
    step = Step(job.done + 1, stage.name, stepped.metrics, stepped.batch, learned_if_stopping(job, stepped.learned))
    if evaluates_after(job.config, job.done + 1):
        step.evaluation = evaluate_step(job, stepped.state, job.done + 1)
        step.metrics |= numbers(step.evaluation)
    records.keep(job, step)
    return Progress(stepped.state, stepped.waiting, progress.stage), step


def learned_if_stopping(job: Job, learned: Learned) -> Learned | None:
    """Returns what a step learned from if the run may stop after it, for the diagnosis; else None, to free memory."""
    return learned if job.skipped >= STOP_AFTER_SKIPPED - 1 else None


def evaluate_once(job: Job, state: TrainState, name: str) -> None:
    """Evaluates the policy under a name, such as "before_rl", unless the run has already done so. What was measured at
    the same step under another name is not measured again."""
    if job.config.eval is None:
        return
    if name not in job.evals:
        step, result = job.evaluated
        if step != job.done:
            result = evaluate(job, state, name.replace("_", " "))
            records.show_evaluation(job, name.replace("_", " "), result)
        job.evals[name] = result
    job.evaluated = (job.done, job.evals[name])


def evaluate_step(job: Job, state: TrainState, step: int) -> dict[str, Any]:
    """Returns the evaluation of the policy after a step (Eval.every)."""
    result = evaluate(job, state, f"after step {step}", interruptible=False)
    job.evaluated = (step, result)
    return result


def evaluate(job: Job, state: TrainState, name: str, *, interruptible: bool = True) -> dict[str, Any]:
    """Returns the `summary` of the policy's samples on the run's held-out prompts.

    Args:
      name: what the display calls it.
      interruptible: raise Preempted if the run is asked to stop; the last step is already saved.
    """
    announce = lambda done, total: job.display.phase(f"evaluating {name}", done=done, total=total)
    weights = weights_of(state.models, "policy").params
    stop = job.stop_alone if interruptible else never
    with job.timed("eval"), job.spent("evaluate"):
        try:
            result = summary(draw(job.evaluator, weights, job.held_out(stop), job.scorer, announce, stop))
        except StopRequested as error:
            raise Preempted(f"stopped during an evaluation. {saved_message(job.done, job.total)}") from error
    del result["by_prompt"], result["rewards"], result["completions"]  # only `jrl eval` uses them, to compare policies
    return result
