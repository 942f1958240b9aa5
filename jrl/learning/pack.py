"""Packing: from sequences [N, T] to rows [M, R, L] and back, within a batch shard. The only bridge between the two.

plan (host, from lengths alone) -> pack (device)

Where a group's prompt is shared, its samples lie side by side behind one copy of it:

    tokens   p0 p1 p2 | p3 a0 a1 a2 | p3 b0 b1 | p3 c0 c1 c2 c3
              trunk      branch 0     branch 1   branch 2

or the trunk lies at the beginning of one row, and the branches in that and the next rows of the micro-batch (`ahead`):

    p0 p1 p2 | p3 b0 b1        p3 a0 a1 a2        p3 c0 c1 c2 c3

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

from jrl.device.sharding import BATCH_AXES
from jrl.learning.bin_packing import plan_rows
from jrl.learning.prefix_packing import Part, plan_trunks
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
    ahead: int = 0  # columns that rows see of another row; 0: a trunk lies in the row of its branches

    @property
    def keys(self) -> int:
        """Tokens that attention compares each token of a row with."""
        return self.row_length + self.ahead


@struct.dataclass
class Plan:
    """Where every token of a packed optimiser step comes from. Made on the host from lengths alone."""

    source: Array  # [M, R, L] int32, row * T + column within the batch shard's own rows; -1 where there is padding
    segment: Array  # [M, R, L] int32
    trunk: Array | None  # [M, R, L] int32, the other segment that a token sees; None: no trunk lies in its row
    ahead: Array | None  # [M, R, shape.ahead] int32, the shard's row of whose column c the row's branches see; -1: none
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


class Piece(NamedTuple):
    """Tokens that lie side by side in a row, and where they come from."""

    row: int
    start: int  # first column
    first: int  # index of their sequence among the shard's own
    begin: int  # their columns in the sequence
    end: int
    segment: int
    trunk: int  # the other segment that they see


def in_bundles(length: np.ndarray, starts: np.ndarray, first: int, shape: Shape) -> tuple[list[Piece], int]:
    """Returns the pieces of a shard whose trunks lie in the rows of their branches, and the rows used."""
    found = bundles(length, starts, first, shape)
    counts = np.array([len(b.lengths) for b in found])
    row, start, place, used = plan_rows(np.array([b.length for b in found]), shape.row_length, shape.places, counts)
    pieces = []
    for b, r, s, p in zip(found, row, start, place):
        if b.length == 0:
            continue
        root = shape.places + 1 + p  # of a trunk: no sequence's place, and no padding
        pieces.append(Piece(r, s, b.first, 0, b.shared, root, root))
        s += b.shared
        for i, n in enumerate(b.lengths):
            pieces.append(Piece(r, s, b.first + i, b.shared, b.shared + n, p + i, root if b.shared else p + i))
            s += n
    return pieces, used


def apart(
    length: np.ndarray, starts: np.ndarray, first: int, shape: Shape
) -> tuple[list[Piece], int, list[tuple[Part, int]]]:
    """Returns the pieces of a shard whose trunks are seen from other rows, the rows used, and every part with the
    tokens of its trunk."""
    rows = shape.rows // shape.shards
    groups = np.arange(first, first + len(length)) // shape.samples
    index = np.full((groups[-1] - groups[0] + 1, shape.samples), -1)
    index[groups - groups[0], np.arange(first, first + len(length)) % shape.samples] = np.arange(len(length))
    own = lambda x: np.where(index >= 0, np.asarray(x)[index], 0)
    # Of a row without an action all is prompt: the group's shortest is what they share.
    trunks = np.maximum(np.where(own(length) > 0, own(starts), shape.width).min(axis=1) - 1, 0)
    branches = np.maximum(own(length) - trunks[:, None], 0)
    row, start, place, parts, used = plan_trunks(
        trunks, branches, row_length=shape.row_length, rows=rows, max_per_row=shape.places
    )
    pieces, root = [], shape.places + 1
    for part in parts:
        t = int(trunks[part.group])
        members = [i for i, r in enumerate(row[part.group]) if part.row <= r < part.row + part.rows]
        pieces.append(Piece(part.row, 0, first + index[part.group, members[0]], 0, t, root, root))
        for i in members:
            r, s, p = (int(x[part.group, i]) for x in (row, start, place))
            pieces.append(Piece(r, s, first + index[part.group, i], t, t + int(branches[part.group, i]), p, p))
    return pieces, used * rows, [(part, int(trunks[part.group])) for part in parts]


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
    ahead = np.full((*source.shape[:2], shape.ahead), -1, np.int32)
    sequence = np.full((shape.shards, shape.micro_batches * rows, shape.places), shape.sequences, np.int32)
    member = np.zeros(shape.sequences, bool)
    starts = np.zeros(shape.sequences, np.int32) if shape.samples == 1 else np.asarray(prompts)
    most = 0
    for shard in range(shape.shards):
        offset = shard * local
        first = local * minibatch // minibatches
        last = local * (minibatch + 1) // minibatches
        own = slice(offset + first, offset + last)
        length = np.asarray(lengths)[own]
        if shape.ahead:
            pieces, used, parts = apart(length, starts[own], first, shape)
            for part, tokens in parts:
                ahead[shard, part.row : part.row + part.rows, :tokens] = part.row % rows
        else:
            pieces, used = in_bundles(length, starts[own], first, shape)
        most = max(most, used)
        member[own] = length > 0
        for piece in pieces:
            columns = slice(piece.start, piece.start + piece.end - piece.begin)
            at = (shard, piece.row, columns)
            source[at] = piece.first * shape.width + np.arange(piece.begin, piece.end)
            segment[at], trunk[at] = piece.segment, piece.trunk
            if piece.segment < shape.places:
                sequence[shard, piece.row, piece.segment] = offset + piece.first

    def cut(x: np.ndarray) -> np.ndarray:  # [shards, M * rows, X] -> [M, shards * rows, X]
        x = x.reshape(shape.shards, shape.micro_batches, rows, x.shape[-1])
        return np.moveaxis(x, 0, 1).reshape(shape.micro_batches, shape.rows, x.shape[-1])

    return Plan(
        source=cut(source),
        segment=cut(segment),
        trunk=None if shape.samples == 1 or shape.ahead else cut(trunk),
        ahead=cut(ahead) if shape.ahead else None,
        sequence=cut(sequence),
        member=member,
        num_real=np.int32(-(-most // rows)),
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
        ahead=plan.ahead,
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
        ahead=plan.ahead,
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
