"""Packing: from sequences [N, T] to rows [M, R, L] and back, within a batch shard. The only bridge between the two.

plan (host, from lengths alone) -> pack (device)

Where a group's prompt is shared, its samples lie side by side behind one copy of it:

    tokens   p0 p1 p2 | p3 a0 a1 a2 | p3 b0 b1 | p3 c0 c1 c2 c3
              trunk      branch 0     branch 1   branch 2

A branch sees itself and the trunk. It begins with the prompt's last token, so that the token before an action is always
the column before it: what a learner computes is the same, whether prompts are shared or repeated.
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
    samples: int = 1  # neighbours among the N that share a prompt, to be computed once; 1: every sequence has its own


@struct.dataclass
class Plan:
    """Where every token of a packed optimiser step comes from. Made on the host from lengths alone."""

    source: Array  # [M, R, L] int32, row * T + column within the batch shard's own rows; -1 where there is padding
    segment: Array  # [M, R, L] int32
    trunk: Array | None  # [M, R, L] int32, the other segment that a token sees; None where prompts are not shared
    sequence: Array  # [M, R, S] int32, index among all N; N where a place is empty
    member: Array  # [N] bool, the sequences of this optimiser step; padding prompts are none
    num_real: Array  # [] int32


class Bundle(NamedTuple):
    """Sequences that lie side by side in a row, with the start of their prompt before them once."""

    first: int  # index of the first among the shard's own
    shared: int  # tokens of the trunk; 0: each sequence lies whole
    lengths: tuple[int, ...]  # tokens of each sequence without the trunk

    @property
    def length(self) -> int:
        return self.shared + sum(self.lengths)


def bundles(lengths: np.ndarray, prompts: np.ndarray, first: int, shape: Shape) -> list[Bundle]:
    """Returns the sequences of one batch shard as bundles: as many of a group's as a row holds.

    Args:
      lengths: [n] int, tokens of every sequence from `first` on. prompts: [n] int, those before the first action.
    """
    found: list[Bundle] = []
    end = first + len(lengths)
    while first < end:
        group_end = min(end, (first // shape.samples + 1) * shape.samples)
        length = lengths[first - end :][: group_end - first]
        shared = max(int(prompts[first - end]) - 1, 0)
        fits = shared + np.cumsum(length - shared) <= shape.row_length
        count = min(int(fits.sum()), shape.places)
        if length[0] == 0 or shared == 0 or count < 2:
            count, shared = 1, 0
        found.append(Bundle(first, shared, tuple(int(n) - shared for n in length[:count])))
        first += count
    return found


def plan(
    lengths: np.ndarray, shape: Shape, minibatch: int, minibatches: int, prompts: np.ndarray | None = None
) -> Plan:
    """Returns the packing of one minibatch: a contiguous share of each batch shard's rows.

    Args:
      lengths: [N] int, tokens of every sequence, prompt and completion.
      prompts: [N] int, tokens before the first action; needed where `shape.samples` is more than 1.
    """
    local = shape.sequences // shape.shards
    rows = shape.rows // shape.shards
    source = np.full((shape.shards, shape.micro_batches * rows, shape.row_length), -1, np.int32)
    segment = np.full(source.shape, shape.places, np.int32)
    trunk = segment.copy()
    sequence = np.full((shape.shards, shape.micro_batches * rows, shape.places), shape.sequences, np.int32)
    member = np.zeros(shape.sequences, bool)
    starts = np.zeros(shape.sequences, np.int32) if shape.samples == 1 else np.asarray(prompts)
    used = 0
    for shard in range(shape.shards):
        offset = shard * local
        first = local * minibatch // minibatches
        last = local * (minibatch + 1) // minibatches
        own = slice(offset + first, offset + last)
        length = np.asarray(lengths)[own]
        found = bundles(length, starts[own], first, shape)
        counts = np.array([len(b.lengths) for b in found])
        row, start, place, num_rows = plan_rows(
            np.array([b.length for b in found]), shape.row_length, shape.places, counts
        )
        used = max(used, num_rows)
        member[own] = length > 0
        for b, r, s, p in zip(found, row, start, place):
            if b.length == 0:
                continue
            root = shape.places + 1 + p  # of a trunk: no sequence's place, and no padding
            source[shard, r, s : s + b.shared] = b.first * shape.width + np.arange(b.shared)
            segment[shard, r, s : s + b.shared] = trunk[shard, r, s : s + b.shared] = root
            s += b.shared
            for i, n in enumerate(b.lengths):
                source[shard, r, s : s + n] = (b.first + i) * shape.width + b.shared + np.arange(n)
                segment[shard, r, s : s + n] = p + i
                trunk[shard, r, s : s + n] = root if b.shared else p + i
                sequence[shard, r, p + i] = offset + b.first + i
                s += n

    def cut(x: np.ndarray) -> np.ndarray:  # [shards, M * rows, X] -> [M, shards * rows, X]
        x = x.reshape(shape.shards, shape.micro_batches, rows, x.shape[-1])
        return np.moveaxis(x, 0, 1).reshape(shape.micro_batches, shape.rows, x.shape[-1])

    return Plan(
        source=cut(source),
        segment=cut(segment),
        trunk=None if shape.samples == 1 else cut(trunk),
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
        trunk=plan.trunk,
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
        trunk=plan.trunk,
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
