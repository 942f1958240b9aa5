"""The training loop: prompt, sample, score, assemble, update.

With `lag = 0` a step samples with the newest weights. With `lag = 1` the completions of the next step are drawn before
this one is learned from: update t trains on rollouts of version max(0, t - 1), by index and not by arrival, so that
asynchronous runs reproduce too. Device programs are dispatched from this one thread in a fixed order; host threads only
score. Whatever influences training is in `Progress` and the data streams, and all of that is in the checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import jax

from jrl.learning.learn import learn, packed, supervise
from jrl.models import decoder
from jrl.models.contract import num_params, policy_of, split, value_of, whole
from jrl.rollout.collect import collect, draw
from jrl.rollout.evaluate import evaluate, numbers
from jrl.run import records
from jrl.run.job import Job
from jrl.run.precompile import compile_ahead
from jrl.run.records import Preempted, Progress, Step
from jrl.types import PyTree, TrainState


def steps(job: Job) -> Iterator[Step]:
    """Yields every step that is still to be done; a step's metrics are fetched while the next one is under way."""
    expected = max(job.run_state.steps(), default=0)
    compile_ahead(job, expected)
    progress = records.restore(job)
    if job.done < expected:  # a damaged checkpoint
        compile_ahead(job, job.done)
    if job.done >= job.total:
        job.display.note(f"nothing to do: {job.done} of {job.total} steps are done")
    job.display.note(shapes(job))
    held: Step | None = None
    first = job.done
    while job.done < job.total:
        start = time.monotonic()
        phase = "sft" if job.done < job.sft_steps else "rl"
        if phase == "rl" and not progress.rl:
            progress = begin_rl(job, progress)
        # Host and device meet where `device_put` or `device_get` says so, and nowhere else.
        with job.timed(phase), jax.transfer_guard("disallow"):
            progress, made = sft_step(job, progress) if phase == "sft" else rl_step(job, progress)
        counts = (job.sft_stream if phase == "sft" else job.stream).counts
        made.metrics |= {f"data/dropped_{cause}": float(count) for cause, count in counts.items()}
        if held is not None:
            yield records.emit(job, held)
        held = made
        job.done += 1
        records.clock(job, held, time.monotonic() - start)
        job.program_cache.check()  # a warm start of hours must not end with what cannot be compiled
        if job.done == first + 2:
            job.program_cache.freeze()
        asked = job.stop.is_set()
        due = job.done % job.config.checkpoint.every == 0 or job.done in (job.sft_steps, job.total)
        if due or asked:
            yield records.emit(job, held)
            held = None
            records.save(job, progress)
        if asked and job.done < job.total:
            raise Preempted(f"saved after step {job.done} of {job.total}; the same command goes on from there")
    if job.config.eval is not None and "after_rl" not in job.evals:
        job.evals["after_rl"] = evaluate(job, weights(progress.state), "after RL", lambda: leave_if_asked(job))
    records.summarise(job)


def shapes(job: Job) -> str:
    """Returns the shapes that the run's programs are compiled for: one of each, whatever the completions do."""
    loop, data, s = job.config.loop, job.config.data, job.shape
    mesh = " x ".join(f"{axis} {size}" for axis, size in job.mesh.shape.items() if size > 1) or "one device"
    spec = job.model.spec(job.cfg)
    base, trained = split(policy_of(spec))
    # Of whole matrices: in few bits there are fewer entries, and scales.
    size = f"{num_params(trained if base is None else decoder.spec(job.cfg)):,} parameters"
    if base is not None:
        size += f" under {num_params(trained):,} of adapters"
    if value_of(spec):
        size += f" and {num_params(value_of(spec)):,} of a value head"
    return (
        f"{size} on {mesh}; shapes: {loop.prompts} prompts of {data.prompt_length}, {s.sequences} "
        f"sequences of {s.width}, at most {s.micro_batches} micro-batches of {s.rows} rows of {s.row_length} tokens"
    )


def weights(state: TrainState) -> PyTree:
    """Returns the parameters of the policy: what is trained, and what is frozen under it."""
    return policy_of(whole(state.base, state.params))


def begin_rl(job: Job, progress: Progress) -> Progress:
    """Returns the progress RL starts with: evaluated, the optimiser fresh, the reference frozen."""
    if job.config.eval is not None and "before_rl" not in job.evals:
        job.evals["before_rl"] = evaluate(job, weights(progress.state), "before RL", lambda: leave_if_asked(job))
    return Progress(job.programs.begin_rl(progress.state), None, rl=True)


def leave_if_asked(job: Job) -> None:
    """Raises Preempted where someone asked the run to stop. Only where the last step is saved."""
    if job.stop.is_set():
        raise Preempted(f"stopped before an evaluation was done, after step {job.done} of {job.total}; nothing is "
                        "lost, and the same command goes on from there")  # fmt: skip


def sft_step(job: Job, progress: Progress) -> tuple[Progress, Step]:
    job.display.phase("warm start")
    state, metrics = supervise(job, progress.state)
    return progress._replace(state=state), Step(job.done + 1, "sft", metrics)


def rl_step(job: Job, progress: Progress) -> tuple[Progress, Step]:
    """Returns the progress after one step of RL."""
    state, lag = progress.state, job.config.loop.lag
    job.display.phase("sampling")
    current = progress.waiting or draw(job, weights(state), state.version)
    waiting = draw(job, weights(state), state.version) if lag else None

    def refill_with():
        before = lambda: (policy_of(whole(state.base, state.behaviour)), job.programs.before(state.version))
        return before() if lag else (weights(state), state.version)

    job.display.phase("scoring")
    batch, batches = collect(job, current, refill_with, lambda rollout, host: packed(job, state, rollout, host))
    job.display.phase("updating")
    state, metrics = learn(job, state, batches, batch)
    step = Step(job.done + 1, "rl", {**metrics, **batch.metrics}, batch)
    every = job.config.eval.every if job.config.eval is not None else None
    if every is not None and (job.done + 1 - job.sft_steps) % every == 0:
        step.metrics |= numbers(evaluate(job, weights(state), "evaluating"))
    records.keep(job, step)
    return Progress(state, waiting, rl=True), step
