"""The training loop: the steps of every stage, in order.

An Offline step learns from stored rows (jrl/run/offline.py); an Online step samples, scores and updates
(jrl/run/online.py). With `lag = 0` an Online step samples with the newest weights. With `lag = k` a queue of k draws is
under way while a step learns: update t trains on rollouts of version max(0, t - k), by index and not by arrival, so
that asynchronous runs reproduce too. Device programs are dispatched from this one thread in a fixed order; host threads
only score. Whatever influences training is in `Progress` and the data streams, and all of that is in the checkpoint,
the queue too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from jrl.experiment import trains_online
from jrl.learning.learner import weights_of
from jrl.learning.step import Learned
from jrl.models import decoder
from jrl.models.contract import num_params, split_params
from jrl.rollout.evaluate import measure, numbers
from jrl.run import fault, offline, online, records
from jrl.run.checkpoints.run_state import StateMismatch
from jrl.run.job import Job
from jrl.run.online import OnlineStage
from jrl.run.precompile import compile_run
from jrl.run.programs import abstract
from jrl.run.records import STOP_AFTER_SKIPPED, Preempted, Progress, Step, draws_ahead
from jrl.run.report.messages import saved_message
from jrl.run.sampler_devices import mesh_text, publication_of, publication_text, publishing_lags
from jrl.run.stage_steps import ends, evaluates_after, stage_at, warms_up
from jrl.tasks.stopping import StopRequested, never
from jrl.types import TrainState


def steps(job: Job) -> Iterator[Step]:
    """Yields every step that is still to be done; a step's metrics are fetched while the next one is under way. Left
    early, it saves.

    Raises: Preempted where the run was asked to stop, and has saved itself; StopRun where learning has stopped being
      possible.
    """
    expected = max(job.run_state.steps(), default=0)
    precompile(job, expected)
    progress = resume(job)
    if job.done < expected:  # a damaged checkpoint
        precompile(job, job.done)
    job.display.note(shapes(job))
    job.run_clock.switch("other")
    # The caller may have left while the last step of a stage was under way.
    if progress.stage >= 0 and job.done >= ends(job.config)[progress.stage]:
        fault.check_end(job, progress)
    held: Step | None = None
    first = saved = job.done
    fault.discard(job)
    bundled = False
    try:
        while job.done < job.total:
            progress = begin_stage(job, progress)
            stage, position = job.stages[progress.stage], job.stream.get_state()
            before = job.seconds.get(stage.name, 0.0)
            try:
                if bundled and not job.skipped:
                    fault.discard(job)
                    bundled = False
                if job.skipped >= STOP_AFTER_SKIPPED - 1:
                    fault.begin_bundle(job, progress)
                    bundled = True
                # Host and device meet where `device_put` or `device_get` says so, and nowhere else.
                job.profile.before(job.done + 1)
                with job.timed(stage.name), jax.transfer_guard("disallow"):
                    progress, step = take_step(job, progress)
            except StopRequested:
                job.stream.set_state(position)  # the step is given up
                break
            counts = records.stream_of(job, stage).counts
            step.metrics |= {f"data/dropped_{cause}": float(count) for cause, count in counts.items()}
            previous, held = held, step
            job.done += 1
            records.clock(job, held, job.seconds[stage.name] - before)
            job.profile.after(job.done, held.metrics)
            if previous is not None:
                yield records.emit(job, previous)
            job.program_cache.check()  # a stage of hours must not end with what cannot be compiled
            if job.done == first + 2:
                job.program_cache.freeze()
            ended = job.done == ends(job.config)[progress.stage]
            saves = job.done % job.config.checkpoint.every == 0 or ended
            # After an update that was not finite, the next is looked at before another is made.
            if saves or job.skipped:
                emitted, held = records.emit(job, held), None
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
        if held is not None:
            emitted, held = records.emit(job, held), None
        if saved != job.done:  # a skipped step is emitted at once and not saved
            records.save(job, progress)
            saved = job.done
        if emitted is not None:
            yield emitted
    except GeneratorExit:  # the caller has left the loop
        if held is not None:
            records.emit(job, held)
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
    """Returns the progress that the run continues from. Accepted changes are written down once it is restored.

    Raises: StateMismatch where the checkpoint does not fit the changed configuration; the folder is as it was.
    """
    try:
        progress = records.restore(job)
    except StateMismatch as error:
        if job.record_change is None:
            raise
        raise StateMismatch(
            f"--accept-change cannot continue with this change: {error}. Nothing was changed in {job.location}"
        ) from error
    if job.record_change is not None:
        job.record_change(job.done)
    return progress


def precompile(job: Job, done: int) -> None:
    """Begins to compile what the run needs after `done` of its steps."""
    with job.timed("compile"), job.spent("compile"):
        compile_run(
            records.inputs_of(job),
            done,
            from_weights=job.published is not None or job.origin is not None,
            classifier=job.classifier,
        )


def shapes(job: Job) -> str:
    """Returns the shapes that the run's programs are compiled for: one of each, whatever the completions do."""
    mesh = mesh_text(job.mesh.shape)
    frozen, trained = split_params(job.model.spec(job.cfg))
    # Of whole matrices: in few bits there are fewer entries, and scales.
    size = f"{num_params(trained if frozen is None else decoder.spec(job.cfg)):,} parameters"
    if frozen is not None:
        size += f" under {num_params(trained):,} of adapters"
    lines = []
    for stage in job.stages:
        s = stage.shape
        prompts = ""
        if isinstance(stage, OnlineStage):
            prompts = f"{stage.config.prompts} prompts of {job.config.data.prompt_length}, "
        lines.append(
            f"{stage.name}: {prompts}{s.sequences} sequences of {s.width}, at most {s.micro_batches} micro-batches of "
            f"{s.rows} rows of {s.row_length} tokens"
        )
    return "\n".join([f"{size} on {mesh}", *publication_lines(job), *lines])


def publication_lines(job: Job) -> list[str]:
    """Returns what the devices of their own for sampling are, and what publishing weights to them takes; [] without."""
    sampler_mesh = job.policy.sampler_mesh
    if sampler_mesh is None:
        return []
    state = job.programs.initial(abstract(job.key, job.mesh))
    weights, lag = weights_of(state.models, "policy").params, max(publishing_lags(job.config))
    return [f"sampling on devices of its own, {mesh_text(sampler_mesh.shape)}: "
            f"{publication_text(publication_of(weights, job.mesh, sampler_mesh, lag))}"]  # fmt: skip


def begin_stage(job: Job, progress: Progress) -> Progress:
    """Returns the progress that the next step begins with: where it is the first of its stage, evaluated, with a fresh
    optimizer and copies of the policy for the roles that the stage needs."""
    i = stage_at(job.config, job.done + 1)
    if i == progress.stage:
        return progress
    if progress.stage >= 0 and trains_online(job.config.stages[progress.stage]):
        evaluate_once(job, progress.state, f"after_{job.stages[progress.stage].name}")
    if trains_online(job.config.stages[i]):
        evaluate_once(job, progress.state, f"before_{job.stages[i].name}")
    return Progress(job.programs.stages[i].begin(progress.state), (), stage=i)


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
        step.metrics |= numbers(evaluate(job, stepped.state, "on the way", interruptible=False))
    records.keep(job, step)
    return Progress(stepped.state, stepped.waiting, progress.stage), step


def learned_if_stopping(job: Job, learned: Learned) -> Learned | None:
    """Returns what a step learned from where the run may stop after it, which is then looked into; None elsewhere: it
    takes memory."""
    return learned if job.skipped >= STOP_AFTER_SKIPPED - 1 else None


def evaluate_once(job: Job, state: TrainState, name: str) -> None:
    """Evaluates the policy under a name, such as "before_rl", unless that was done in an earlier life."""
    if job.config.eval is not None and name not in job.evals:
        job.evals[name] = evaluate(job, state, name.replace("_", " "))


def evaluate(job: Job, state: TrainState, name: str, *, interruptible: bool = True) -> dict[str, Any]:
    """Returns `measure` of the policy on the run's held-out prompts.

    Args:
      name: what the display calls it.
      interruptible: raises Preempted where someone asked the run to stop: the last step is saved.
    """
    announce = lambda done, total: job.display.phase(f"evaluating {name}", done=done, total=total)
    weights = weights_of(state.models, "policy").params
    stop = job.stop_alone if interruptible else never
    with job.timed("eval"), job.spent("evaluate"):
        try:
            result = measure(job.evaluator, weights, job.held_out(stop), job.scorer, announce, stop)
        except StopRequested as error:
            raise Preempted(f"stopped during an evaluation. {saved_message(job.done, job.total)}") from error
    del result["by_prompt"], result["rewards"], result["completions"]  # what `jrl eval` compares policies by
    temperature = job.config.eval.temperature
    how = "greedy" if temperature is None else f"temperature {temperature:g}"
    job.display.note(f"{name}, the first held-out prompt ({how}):")
    first = result["sample"]
    job.display.sample(first["prompt"], first["completion"], first["reward"])
    return result
