"""One step's learning, as a sequence of device programs: pack, log-probs, credit, finish, updates."""

from __future__ import annotations

import jax
import numpy as np

from jrl.device.sharding import BATCH_AXES, batch_sharding, replicated
from jrl.learning import pack
from jrl.models.contract import whole
from jrl.rollout.collect import Collected
from jrl.run.job import Job
from jrl.tasks.data import supervised
from jrl.types import Array, Rollout, TrainBatch, TrainState


def packed(
    job: Job, state: TrainState, rollout: Rollout, host: dict[str, np.ndarray]
) -> list[tuple[pack.Plan, TrainBatch]]:
    """Returns the minibatches of a batch with their log-probs, before rewards are known.

    Args:
      host: the rollout's fields.
    """
    out = []
    lengths, acts = host["length"], host["action_mask"]
    prompts = np.where(acts.any(axis=1), acts.argmax(axis=1), lengths)
    for minibatch in range(job.config.learner.minibatches):
        plan = place_plan(job, pack.plan(lengths, job.shape, minibatch, job.config.learner.minibatches, prompts))
        batch = job.programs.pack(rollout, plan, job.temperature)
        if job.programs.values is not None:
            batch = batch.replace(**job.programs.values(whole(state.base, state.params), batch))
        elif job.config.learner.updates_per_batch > 1:
            batch = batch.replace(old_logprobs=job.programs.logprobs(whole(state.base, state.params), batch))
        if state.reference is not None:
            batch = batch.replace(ref_logprobs=job.programs.logprobs(whole(state.base, state.reference), batch))
        out.append((plan, batch))
    return out


def place_plan(job: Job, plan: pack.Plan) -> pack.Plan:
    """Returns the plan on the device, cut as the packed rows are."""
    rows = jax.sharding.NamedSharding(job.mesh, jax.sharding.PartitionSpec(None, BATCH_AXES))
    put = lambda x: jax.device_put(x, rows if np.ndim(x) == 3 else replicated(job.mesh))
    return jax.tree.map(put, plan)


def learn(
    job: Job, state: TrainState, batches: list[tuple[pack.Plan, TrainBatch]], collected: Collected
) -> tuple[TrainState, dict[str, Array]]:
    """Returns the state after every update on the batch, and the means of their metrics, still on the device."""
    values = [] if job.programs.values is None else [[(batch.old_values, plan.source) for plan, batch in batches]]
    credit = job.programs.credit(collected.rollout, collected.scores, state.baseline, job.algo, *values)
    finished = [job.programs.finish(batch, plan, credit, job.algo) for plan, batch in batches]
    skipped = job.programs.copy(state.skipped)
    before = job.programs.copy(state.params) if state.behaviour is not None else None
    all_metrics: list[dict[str, Array]] = []
    for _ in range(job.config.learner.epochs):
        for batch in finished:
            state, metrics = job.programs.update(state, batch, job.algo, job.adamw, job.router)
            all_metrics.append(metrics)
    state = job.programs.close(state, before, credit.baseline, skipped)
    return state, {**credit.metrics, **job.programs.mean(all_metrics)}


def supervise(job: Job, state: TrainState) -> tuple[TrainState, dict[str, Array]]:
    """Returns the state after one step on gold answers of the training split, and its metrics."""
    wanted, width = job.config.sft.sequences, job.shape.width
    visits = job.sft_stream.next(wanted)
    rows, left_out = supervised.supervise(visits, job.tokenizer, width=width, template=job.config.sft.template)
    missing = wanted - len(rows.length)
    fill = lambda x: np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)])
    tokens, lengths, action_mask = fill(rows.tokens), fill(rows.length), fill(rows.action_mask)
    place = lambda x: jax.device_put(x, batch_sharding(job.mesh, x.ndim))
    plan = place_plan(job, pack.plan(lengths, job.sft_shape, 0, 1))
    one = jax.device_put(np.float32(1), replicated(job.mesh))
    batch = job.programs.pack_sft(place(tokens), place(action_mask), plan, one)
    state, metrics = job.programs.update_sft(state, batch, None, job.sft_adamw, job.router)
    state = job.programs.close_sft(state)
    return state, {**metrics, **{f"data/left_out_{cause}": float(count) for cause, count in left_out.items()}}
