"""Packing: converts sequences [N, T] to rows [M, R, L] and back, within a batch shard. The only bridge between the two.

plan (host, from lengths alone) -> pack (device)

With prefix_sharing='in_row' the samples of a group follow one copy of their prompt in the same row:

    tokens   p0 p1 p2 | p3 a0 a1 a2 | p3 b0 b1 | p3 c0 c1 c2 c3
              prefix   continuation 0  cont. 1    continuation 2

With 'cross_row' the prefix is at the beginning of one row, and the continuations are in that row and the next rows of
the micro-batch (`prefix_row`):

    p0 p1 p2 | p3 b0 b1        p3 a0 a1 a2        p3 c0 c1 c2 c3

A continuation attends to itself and the prefix. It begins with the prompt's last token, so that the token before an
action is always in the column before it: the learner computes the same result, whether prompts are shared or repeated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec

from jrl.device.sharding import row_axes, row_shards
from jrl.learning.bin_packing import plan_rows
from jrl.learning.prefix_packing import PrefixBlock, plan_prefixes
from jrl.ops.router import not_recorded
from jrl.types import Array, PackedBatch, Rollout


class Shape(NamedTuple):
    """The static shape of packed batches: one per run."""

    sequences: int  # N
    width: int  # T
    row_length: int  # L
    rows: int  # R, rows of a micro-batch over all shards
    micro_batches: int  # M
    places: int  # S
    shards: int  # batch shards of the mesh
    samples: int = 1  # adjacent sequences that share a prompt, computed once; 1: no prompt is shared
    prefix_columns: int = 0  # prefix columns read from another row; 0: a prefix is in its continuations' row
    unit: int = 1  # adjacent sequences that are compared: they are placed in one row

    @property
    def keys(self) -> int:
        """Keys that attention reads for each row: its tokens and the prefix columns."""
        return self.row_length + self.prefix_columns


@struct.dataclass
class PackingPlan:
    """Where every token of a packed optimizer step comes from. Computed on the host from lengths alone."""

    source: Array  # [M, R, L] int32, row * T + column within the batch shard's rows; -1 at padding
    segment: Array  # [M, R, L] int32
    shared_prefix: Array | None  # [M, R, L] int32, the second segment a token attends to; None: no prefix in the row
    prefix_row: Array | None  # [M, R, shape.prefix_columns] int32, the shard's row that holds column c; -1: none
    sequence: Array  # [M, R, S] int32, index among all N; N in an empty place
    member: Array  # [N] bool, the sequences of this optimizer step, without padding prompts
    num_real: Array  # [] int32


class Bundle(NamedTuple):
    """Adjacent sequences of a row, after one copy of the prefix they share."""

    first: int  # index of the first among the shard's sequences
    shared: int  # tokens of the prefix; 0: nothing is shared
    lengths: tuple[int, ...]  # tokens of each sequence without the prefix

    @property
    def length(self) -> int:
        return self.shared + sum(self.lengths)


def bundles(lengths: np.ndarray, prompts: np.ndarray, first: int, shape: Shape) -> list[Bundle]:
    """Returns the sequences of one batch shard as bundles: as many of a group as fit in a row, or one comparison each.

    Args:
      lengths: [n] int, tokens of every sequence from `first` on. prompts: [n] int, tokens before the first action.
    """
    if shape.unit > 1:
        units = lengths.reshape(-1, shape.unit)
        return [Bundle(first + shape.unit * i, 0, tuple(map(int, unit))) for i, unit in enumerate(units)]
    if shape.samples == 1:
        return [Bundle(first + i, 0, (int(n),)) for i, n in enumerate(lengths)]
    out: list[Bundle] = []
    end = first + len(lengths)
    while first < end:
        group_end = min(end, (first // shape.samples + 1) * shape.samples)
        length = lengths[first - end :][: group_end - first]
        shared = max(int(prompts[first - end]) - 1, 0)
        fits = shared + np.cumsum(length - shared) <= shape.row_length
        count = min(int(fits.sum()), shape.places)
        if length[0] == 0 or shared == 0 or count < 2:
            count, shared = 1, 0
        out.append(Bundle(first, shared, tuple(int(n) - shared for n in length[:count])))
        first += count
    return out


class Piece(NamedTuple):
    """Adjacent tokens of a row, and where they come from."""

    row: int
    start: int  # first column
    first: int  # index of their sequence among the shard's sequences
    begin: int  # their columns in the sequence
    end: int
    segment: int
    prefix: int  # the second segment they attend to


def pack_in_row(length: np.ndarray, starts: np.ndarray, first: int, shape: Shape) -> tuple[list[Piece], int]:
    """Returns the pieces of a shard, with each prefix in the row of its continuations, and the number of rows used."""
    row_bundles = bundles(length, starts, first, shape)
    counts = np.array([len(bundle.lengths) for bundle in row_bundles])
    bundle_lengths = np.array([bundle.length for bundle in row_bundles])
    rows, columns, places, used = plan_rows(bundle_lengths, shape.row_length, shape.places, counts)
    pieces = []
    for bundle, row, column, place in zip(row_bundles, rows, columns, places):
        if bundle.length == 0:
            continue
        shared = bundle.shared
        prefix_segment = shape.places + 1 + place  # neither a sequence's place nor padding
        if shared:
            pieces.append(Piece(row, column, bundle.first, 0, shared, prefix_segment, prefix_segment))
            column += shared
        for i, n in enumerate(bundle.lengths):
            segment = place + i
            seen = prefix_segment if shared else segment
            pieces.append(Piece(row, column, bundle.first + i, shared, shared + n, segment, seen))
            column += n
    return pieces, used


def pack_cross_row(
    length: np.ndarray, starts: np.ndarray, first: int, shape: Shape
) -> tuple[list[Piece], int, list[tuple[PrefixBlock, int]]]:
    """Returns the pieces of a shard whose prefixes are shared across rows, the number of rows used, and every block of
    rows with the length of its prefix."""
    rows = shape.rows // shape.shards
    groups = np.arange(first, first + len(length)) // shape.samples
    index = np.full((groups[-1] - groups[0] + 1, shape.samples), -1)
    index[groups - groups[0], np.arange(first, first + len(length)) % shape.samples] = np.arange(len(length))
    to_groups = lambda x: np.where(index >= 0, np.asarray(x)[index], 0)
    # A row without an action is all prompt. The group shares its shortest prompt, and what other rows can read of it:
    # tokens that a strategy puts after the longest prompt are repeated in the continuations.
    prefixes = np.where(to_groups(length) > 0, to_groups(starts), shape.width).min(axis=1) - 1
    prefixes = np.clip(prefixes, 0, shape.prefix_columns)
    continuations = np.maximum(to_groups(length) - prefixes[:, None], 0)
    row, start, place, blocks, used = plan_prefixes(
        prefixes, continuations, row_length=shape.row_length, rows=rows, max_per_row=shape.places
    )
    pieces, prefix_segment = [], shape.places + 1
    for block in blocks:
        shared = int(prefixes[block.group])
        members = [i for i, r in enumerate(row[block.group]) if block.row <= r < block.row + block.rows]
        sequence = first + index[block.group, members[0]]
        pieces.append(Piece(block.row, 0, sequence, 0, shared, prefix_segment, prefix_segment))
        for i in members:
            r, s, p = (int(x[block.group, i]) for x in (row, start, place))
            end = shared + int(continuations[block.group, i])
            pieces.append(Piece(r, s, first + index[block.group, i], shared, end, p, p))
    return pieces, used * rows, [(block, int(prefixes[block.group])) for block in blocks]


def plan(
    lengths: np.ndarray, shape: Shape, minibatch: int, minibatches: int, prompts: np.ndarray | None = None
) -> PackingPlan:
    """Returns the packing of one minibatch: a contiguous share of each batch shard's rows.

    Args:
      lengths: [N] int, tokens of every sequence, prompt and completion.
      prompts: [N] int, tokens before the first action; needed where `shape.samples` is more than 1.
    """
    local = shape.sequences // shape.shards
    rows = shape.rows // shape.shards
    source = np.full((shape.shards, shape.micro_batches * rows, shape.row_length), -1, np.int32)
    segment = np.full(source.shape, shape.places, np.int32)
    shared_prefix = segment.copy()
    prefix_row = np.full((*source.shape[:2], shape.prefix_columns), -1, np.int32)
    sequence = np.full((shape.shards, shape.micro_batches * rows, shape.places), shape.sequences, np.int32)
    member = np.zeros(shape.sequences, bool)
    starts = np.zeros(shape.sequences, np.int32) if shape.samples == 1 else np.asarray(prompts)
    max_used = 0
    for shard in range(shape.shards):
        offset = shard * local
        first = local * minibatch // minibatches
        last = local * (minibatch + 1) // minibatches
        selected = slice(offset + first, offset + last)
        length = np.asarray(lengths)[selected]
        if shape.prefix_columns:
            pieces, used, blocks = pack_cross_row(length, starts[selected], first, shape)
            for block, tokens in blocks:
                prefix_row[shard, block.row : block.row + block.rows, :tokens] = block.row % rows
        else:
            pieces, used = pack_in_row(length, starts[selected], first, shape)
        max_used = max(max_used, used)
        member[selected] = length > 0
        for piece in pieces:
            columns = slice(piece.start, piece.start + piece.end - piece.begin)
            target = (shard, piece.row, columns)
            source[target] = piece.first * shape.width + np.arange(piece.begin, piece.end)
            segment[target], shared_prefix[target] = piece.segment, piece.prefix
            if piece.segment < shape.places:
                sequence[shard, piece.row, piece.segment] = offset + piece.first

    def to_micro_batches(x: np.ndarray) -> np.ndarray:  # [shards, M * rows, X] -> [M, shards * rows, X]
        x = x.reshape(shape.shards, shape.micro_batches, rows, x.shape[-1])
        return np.moveaxis(x, 0, 1).reshape(shape.micro_batches, shape.rows, x.shape[-1])

    return PackingPlan(
        source=to_micro_batches(source),
        segment=to_micro_batches(segment),
        shared_prefix=None if shape.samples == 1 or shape.prefix_columns else to_micro_batches(shared_prefix),
        prefix_row=to_micro_batches(prefix_row) if shape.prefix_columns else None,
        sequence=to_micro_batches(sequence),
        member=member,
        num_real=np.int32(-(-max_used // rows)),
    )


def pack(x: Array, source: Array, fill: int = 0) -> Array:
    """Returns [M, R, L, ...] from [N, T, ...]: the tokens at `source`, and `fill` at padding, zero (False).

    Each batch shard packs its own rows. With `unpack`, the only conversion between the two layouts.
    """

    def local(x: Array, source: Array) -> Array:
        trailing = x.shape[2:]
        values = x.reshape(-1, *trailing)[jnp.maximum(source, 0)]
        real = source.reshape(*source.shape, *(1,) * len(trailing)) >= 0
        return jnp.where(real, values, jnp.full((), fill, x.dtype))

    return _per_shard(local, x, source, PartitionSpec(None, row_axes()))


def unpack(x: Array, source: Array, width: int, rows: int) -> Array:
    """Returns [N, T] from [M, R, L]: the inverse of `pack`, zero where no token was packed.

    Args:
      width: T. rows: N.
    """
    mesh = jax.sharding.get_abstract_mesh()
    shards = 1 if mesh.empty else row_shards(mesh)

    def local(x: Array, source: Array) -> Array:
        size = rows // shards * width
        flat = jnp.zeros((size + 1,), x.dtype)
        index = jnp.where(source >= 0, source, size).reshape(-1)
        return flat.at[index].set(x.reshape(-1))[:size].reshape(-1, width)

    return _per_shard(local, x, source, PartitionSpec(row_axes()))


def _per_shard(fn: Any, x: Array, source: Array, out: PartitionSpec) -> Array:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return fn(x, source)
    rows = row_axes()
    batch_first, batch_second = PartitionSpec(rows), PartitionSpec(None, rows)
    x_spec = batch_second if out == batch_first else batch_first
    x = jax.sharding.reshard(x, x_spec)
    source = jax.sharding.reshard(source, batch_second)
    return jax.shard_map(fn, in_specs=(x_spec, batch_second), out_specs=out, axis_names=set(rows), check_vma=False)(
        x, source
    )


def pack_tokens(
    tokens: Array,
    action_mask: Array,
    plan: PackingPlan,
    temperature: Array,
    sampler_logprobs: Array | None = None,
    behaviour_logprobs: Array | None = None,
    routes: Array | None = None,
) -> PackedBatch:
    """Returns the packed sequences of one optimizer step.

    Args:
      tokens: [N, T] int32. action_mask: [N, T] bool. sampler_logprobs, behaviour_logprobs: [N, T] float32, and routes:
        [N, T, F], of sampled rows.
    """
    real = plan.source >= 0
    packed = lambda x: None if x is None else pack(x, plan.source)
    return PackedBatch(
        tokens=packed(tokens),
        positions=jnp.where(real, jnp.maximum(plan.source, 0) % tokens.shape[1], 0),
        segment=plan.segment,
        shared_prefix=plan.shared_prefix,
        prefix_row=plan.prefix_row,
        action_mask=packed(action_mask),
        behaviour_logprobs=packed(behaviour_logprobs),
        sampler_logprobs=packed(sampler_logprobs),
        sequence=plan.sequence,
        temperature=temperature,
        num_real=plan.num_real,
        routes=None if routes is None else pack(routes, plan.source, not_recorded(routes.dtype)),
    )


def pack_rollout(rollout: Rollout, plan: PackingPlan, temperature: Array) -> PackedBatch:
    """Returns the packed sampled rows of one optimizer step."""
    return pack_tokens(
        rollout.tokens,
        rollout.action_mask,
        plan,
        temperature,
        sampler_logprobs=rollout.sampler_logprobs,
        behaviour_logprobs=rollout.behaviour_logprobs,
        routes=rollout.routes,
    )


def by_place(x: Array, sequence: Array) -> Array:
    """Returns [M, R, S] from [N]: the value of the sequence at each place, 0 (False) in an empty place.

    Args:
      sequence: [M, R, S] int32, PackedBatch.sequence; N in an empty place.
    """

    def local(x: Array, sequence: Array) -> Array:
        return jnp.concatenate([x, jnp.zeros_like(x[:1])])[sequence]

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return local(x, sequence)
    everywhere, axes = PartitionSpec(), row_axes()
    rows = PartitionSpec(None, axes)
    x, sequence = jax.sharding.reshard(x, everywhere), jax.sharding.reshard(sequence, rows)
    return jax.shard_map(local, in_specs=(everywhere, rows), out_specs=rows, axis_names=set(axes), check_vma=False)(
        x, sequence
    )
