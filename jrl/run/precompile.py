"""Compiles the programs of a run before they are needed, from shapes alone.

The compiler works in the order in which they are needed, while weights are read and the first steps are made: a call
waits for its own program only. All are known before the second step ends, so that a compilation afterwards can be an
error. Only shapes are asked of the job: a plan (jrl.tools.plan.shapes) goes the same way with a run never opened.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jrl.device.sharding import batch_sharding
from jrl.models.contract import policy_of, whole
from jrl.run import programs
from jrl.run.job import Job
from jrl.types import Rollout, Scores, TrainState


def rollout_shape(job: Job, state: TrainState) -> Rollout:
    """Returns the rollout that a step of RL draws, as shapes."""
    return job.programs.sample.shape(*sample_arguments(job, state, job.config.loop.prompts))


def sample_arguments(job: Job, state: TrainState, count: int) -> tuple:
    prompts = programs.abstract_prompts(count, job.config.data.prompt_length, job.mesh)
    sampling_params, key, table = programs.abstract((job.sampling_params, job.key, job.stop_table), job.mesh)
    params = policy_of(whole(state.base, state.params))
    return (params, prompts, key, _scalar(job, np.uint32), state.version, sampling_params, table, None)


def compile_ahead(job: Job, done: int) -> None:
    """Begins to compile every program that the run needs after `done` of its steps."""
    if done >= job.total:
        return
    with job.timed("compile"):
        key = programs.abstract(job.key, job.mesh)
        state = job.programs.init.shape(key)
        if done == 0 and job.published is None:
            job.programs.init.compile(key)
        elif done == 0:
            job.programs.init_from.compile(policy_of(state.params) if state.base is None else state.base, key)
        if done < job.sft_steps:
            compile_sft(job, state)
        if job.config.eval is not None:
            compile_eval(job, state)
        if job.config.loop.steps and job.judge is not None:
            compile_reward(job)
        if job.config.loop.steps:
            begin_rl = job.programs.begin_rl
            compile_rl(job, begin_rl.compile(state) if done <= job.sft_steps else begin_rl.shape(state))


def compile_eval(job: Job, state: TrainState) -> None:
    """Compiles the sampling of evaluation."""
    arguments = list(sample_arguments(job, state, job.config.eval.batch))
    arguments[5] = programs.abstract(job.eval_sampling_params, job.mesh)
    job.programs.sample_eval.compile(*arguments)


def compile_reward(job: Job) -> None:
    """Compiles the run's reward model."""
    judge = job.judge
    by_row = lambda *dims: jax.ShapeDtypeStruct(
        (judge.batch, *dims), np.int32, sharding=batch_sharding(judge.mesh, 1 + len(dims))
    )
    judge.program.compile(programs.abstract(judge.params, judge.mesh), by_row(judge.width), by_row())


def compile_sft(job: Job, state: TrainState) -> None:
    """Compiles the programs of a supervised step."""
    p, shape = job.programs, job.sft_shape
    by_row = lambda dtype: jax.ShapeDtypeStruct(
        (shape.sequences, shape.width), dtype, sharding=batch_sharding(job.mesh, 2)
    )
    plan = programs.abstract_plan(shape, job.mesh)
    batch = p.pack_sft.compile(by_row(np.int32), by_row(bool), plan, _scalar(job, np.float32))
    state, _ = p.update_sft.compile(state, batch, None, *programs.abstract((job.sft_adamw, job.router), job.mesh))
    p.close_sft.compile(state)


def compile_rl(job: Job, state: TrainState) -> None:
    """Compiles the programs of a step of RL, following the shapes from one to the next as the loop does the arrays."""
    p, config = job.programs, job.config
    algo, adamw, router = programs.abstract((job.algo, job.adamw, job.router), job.mesh)
    rollout = p.sample.compile(*sample_arguments(job, state, config.loop.prompts))
    plan = programs.abstract_plan(job.shape, job.mesh)
    batch = p.pack.compile(rollout, plan, _scalar(job, np.float32))
    if p.values is not None:
        batch = batch.replace(**p.values.compile(whole(state.base, state.params), batch))
    elif config.learner.updates_per_batch > 1:
        batch = batch.replace(old_logprobs=p.logprobs.compile(whole(state.base, state.params), batch))
    if state.reference is not None:
        batch = batch.replace(ref_logprobs=p.logprobs.compile(whole(state.base, state.reference), batch))
    rows = rollout.length.shape
    by_row = lambda dtype: jax.ShapeDtypeStruct(rows, dtype, sharding=batch_sharding(job.mesh, 1))
    scores = Scores(reward=by_row(np.float32), valid=by_row(bool), verdict=by_row(np.int8), outcome=by_row(np.float32))
    if job.algorithm.refill(config.algo) is not None:
        p.keep.compile(rollout, scores, algo)
    values = [] if p.values is None else [[(batch.old_values, plan.source)] * config.learner.minibatches]
    credit = p.credit.compile(rollout, scores, state.baseline, algo, *values)
    batch = p.finish.compile(batch, plan, credit, algo)
    p.copy.compile(state.skipped)
    before = None
    if state.behaviour is not None:
        before = p.copy.compile(state.params)
        p.before.compile(state.version)
    skipped = state.skipped
    state, metrics = p.update.compile(state, batch, algo, adamw, router)
    p.mean.compile([metrics] * config.learner.updates_per_batch)
    p.close.compile(state, before, credit.baseline, skipped)


def _scalar(job: Job, dtype: type) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), dtype, sharding=NamedSharding(job.mesh, PartitionSpec()))
