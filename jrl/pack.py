"""Packing: from sequences [N, T] to rows [M, R, L] and back, within a batch shard. The only bridge between the two.

plan (host, from lengths alone) -> pack (device)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec

from jrl.data.packing import plan_rows
from jrl.sharding import BATCH_AXES
from jrl.types import Array, Rollout, TrainBatch


class Shape(NamedTuple):
    """The static shape of packed batches: one per run."""

    sequences: int  # N
    width: int  # T
    row_length: int  # L
    rows: int  # R, rows of a micro-batch over all shards
    micro_batches: int  # M
    places: int  # S
    shards: int  # batch shards of the mesh


@struct.dataclass
class Plan:
    """Where every token of a packed optimiser step comes from. Made on the host from lengths alone."""

    source: Array  # [M, R, L] int32, row * T + column within the batch shard's own rows; -1 where there is padding
    segment: Array  # [M, R, L] int32
    sequence: Array  # [M, R, S] int32, index among all N; N where a place is empty
    member: Array  # [N] bool, the sequences of this optimiser step; padding prompts are none
    num_real: Array  # [] int32


def plan(lengths: np.ndarray, shape: Shape, minibatch: int, minibatches: int) -> Plan:
    """Returns the packing of one minibatch: a contiguous share of each batch shard's rows.

    Args:
      lengths: [N] int, tokens of every sequence, prompt and completion.
    """
    local = shape.sequences // shape.shards
    rows = shape.rows // shape.shards
    source = np.full((shape.shards, shape.micro_batches * rows, shape.row_length), -1, np.int32)
    segment = np.full(source.shape, shape.places, np.int32)
    sequence = np.full((shape.shards, shape.micro_batches * rows, shape.places), shape.sequences, np.int32)
    member = np.zeros(shape.sequences, bool)
    used = 0
    for shard in range(shape.shards):
        first = local * minibatch // minibatches
        last = local * (minibatch + 1) // minibatches
        own = np.arange(first, last)
        length = np.asarray(lengths[shard * local + own])
        row, start, place, num_rows = plan_rows(length, shape.row_length, shape.places)
        used = max(used, num_rows)
        member[shard * local + own] = length > 0
        for i, r, s, p, n in zip(own, row, start, place, length):
            source[shard, r, s : s + n] = i * shape.width + np.arange(n)
            segment[shard, r, s : s + n] = p
            sequence[shard, r, p] = shard * local + i

    def cut(x: np.ndarray) -> np.ndarray:  # [shards, M * rows, X] -> [M, shards * rows, X]
        x = x.reshape(shape.shards, shape.micro_batches, rows, x.shape[-1])
        return np.moveaxis(x, 0, 1).reshape(shape.micro_batches, shape.rows, x.shape[-1])

    return Plan(
        source=cut(source),
        segment=cut(segment),
        sequence=cut(sequence),
        member=member,
        num_real=np.int32(-(-used // rows)),
    )


def pack(x: Array, source: Array) -> Array:
    """Returns [M, R, L] from [N, T]: the tokens that `source` names, zero (False) where there is padding.

    With `unpack` the only bridge between the two layouts; it stays within a batch shard.
    """

    def local(x: Array, source: Array) -> Array:
        taken = x.reshape(-1)[jnp.maximum(source, 0)]
        return jnp.where(source >= 0, taken, jnp.zeros((), x.dtype))

    return _per_shard(local, x, source, PartitionSpec(None, BATCH_AXES))


def unpack(x: Array, source: Array, width: int, rows: int) -> Array:
    """Returns [N, T] from [M, R, L]: the inverse of `pack`, zero where nothing was packed.

    Args:
      width: T. rows: N.
    """
    mesh = jax.sharding.get_abstract_mesh()
    shards = 1 if mesh.empty else int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))

    def local(x: Array, source: Array) -> Array:
        size = rows // shards * width
        flat = jnp.zeros((size + 1,), x.dtype)
        where = jnp.where(source >= 0, source, size).reshape(-1)
        return flat.at[where].set(x.reshape(-1))[:size].reshape(-1, width)

    return _per_shard(local, x, source, PartitionSpec(BATCH_AXES))


def _per_shard(fn: Any, x: Array, source: Array, out: PartitionSpec) -> Array:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return fn(x, source)
    batch_first, batch_second = PartitionSpec(BATCH_AXES), PartitionSpec(None, BATCH_AXES)
    x_spec = batch_first if x.ndim == 2 else batch_second
    x = jax.sharding.reshard(x, x_spec)
    source = jax.sharding.reshard(source, batch_second)
    return jax.shard_map(
        fn, in_specs=(x_spec, batch_second), out_specs=out, axis_names=set(BATCH_AXES), check_vma=False
    )(x, source)


def pack_rollout(rollout: Rollout, plan: Plan, temperature: Array) -> TrainBatch:
    """Returns the packed sequences of one optimiser step, before rewards are known: no token enters the loss yet."""
    width = rollout.tokens.shape[1]
    behaviour = rollout.sampler_logprobs if rollout.truncated_logprobs is None else rollout.truncated_logprobs
    real = plan.source >= 0
    action_mask = pack(rollout.action_mask, plan.source)
    zeros = jnp.zeros_like(action_mask, jnp.float32)
    return TrainBatch(
        tokens=pack(rollout.tokens, plan.source),
        positions=jnp.where(real, jnp.maximum(plan.source, 0) % width, 0),
        segment=plan.segment,
        action_mask=action_mask,
        loss_mask=jnp.zeros_like(action_mask),
        loss_weights=zeros,
        advantages=zeros,
        old_logprobs=None,
        behaviour_logprobs=pack(behaviour, plan.source),
        sampler_logprobs=pack(rollout.sampler_logprobs, plan.source),
        ref_logprobs=None,
        sequence=plan.sequence,
        denominator=jnp.float32(1),
        temperature=temperature,
        num_real=plan.num_real,
    )


def pack_supervised(tokens: Array, action_mask: Array, plan: Plan, temperature: Array) -> TrainBatch:
    """Returns a packed batch of given completions: every action enters the loss, with the mean over tokens.

    Args:
      tokens: [N, T] int32. action_mask: [N, T] bool, tokens of the completion, the end token included.
    """
    real = plan.source >= 0
    actions = pack(action_mask, plan.source)
    zeros = jnp.zeros_like(actions, jnp.float32)
    return TrainBatch(
        tokens=pack(tokens, plan.source),
        positions=jnp.where(real, jnp.maximum(plan.source, 0) % tokens.shape[1], 0),
        segment=plan.segment,
        action_mask=actions,
        loss_mask=actions,
        loss_weights=actions.astype(jnp.float32),
        advantages=zeros,
        old_logprobs=None,
        behaviour_logprobs=zeros,
        sampler_logprobs=zeros,
        ref_logprobs=None,
        sequence=plan.sequence,
        denominator=jnp.maximum(actions.sum(), 1).astype(jnp.float32),
        temperature=temperature,
        num_real=plan.num_real,
    )
