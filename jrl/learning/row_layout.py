"""The layout of packed rows as a model reads them: whole rows, or shares of rows if the mesh axis `sequence` divides
them.

Only the model and its heads see shares. Their outputs are a few numbers per token, which are gathered: objectives,
reductions over sequences and metrics see whole rows, the same on every device of `sequence`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from jrl.device import row_shares
from jrl.device.sharding import SEQUENCE, axis_size
from jrl.models.contract import MixedTokens, PrefixSegments, ShareSegments
from jrl.ops.logprobs import before
from jrl.ops.segments import next_column, previous_column
from jrl.types import Array, PackedBatch


class RowLayout(NamedTuple):
    """Functions between packed rows and the layout of their hidden states."""

    predictor: Callable[[Array], Array]  # hidden states -> those that a column's log-prob is computed from
    columns: Callable[[Array], Array]  # [R, L], of columns -> laid out as what `predictor` returns
    joined: Callable[[Array], Array]  # laid out as hidden states -> [R, L, ...]
    rows: Callable[[Array], Array]  # the inverse of `columns`


def _same(x: Array) -> Array:
    return x


ROWS = RowLayout(before, _same, _same, _same)
# Moving tokens to the column that predicts them costs nothing; moving hidden states would cross devices.
SHARES = RowLayout(
    _same, lambda x: row_shares.cut(next_column(x)), row_shares.joined, lambda x: previous_column(row_shares.joined(x))
)


def row_layout() -> RowLayout:
    """Returns the layout of rows on the current mesh."""
    return ROWS if axis_size(SEQUENCE) == 1 else SHARES


def share_of_rows(x: Array) -> Array:
    """Returns an array of rows, [R, L, ...], as a model takes it: [B, L, ...], or shares [B, L / S, ...]."""
    return x if axis_size(SEQUENCE) == 1 else row_shares.cut(x)


def model_inputs(micro: PackedBatch) -> tuple[Array, Array, Any]:
    """Returns tokens, positions and segments of a micro-batch as a model takes them, [B, L] or [B, L / S]."""
    segment = micro.segment
    if micro.shared_prefix is not None:
        segment = jnp.stack([micro.segment, micro.shared_prefix], axis=-1)
    if axis_size(SEQUENCE) == 1:
        if micro.prefix_row is not None:
            segment = PrefixSegments(segment, segment < micro.sequence.shape[-1], micro.prefix_row)
        return micro.tokens, micro.positions, segment
    column = jnp.broadcast_to(jnp.arange(micro.segment.shape[1], dtype=jnp.int32), micro.segment.shape)
    share_segment = row_shares.cut(segment)
    shares = ShareSegments(
        segment=share_segment,
        column=row_shares.cut(column),
        row_segment=row_shares.copied(segment),
        row_positions=row_shares.copied(micro.positions),
    )
    if micro.prefix_row is not None:
        shares = PrefixSegments(shares, share_segment < micro.sequence.shape[-1], row_shares.copied(micro.prefix_row))
    tokens = micro.tokens
    if isinstance(tokens, MixedTokens):
        tokens = tokens._replace(tokens=row_shares.cut(tokens.tokens), others=row_shares.cut(tokens.others))
    else:
        tokens = row_shares.cut(tokens)
    return tokens, row_shares.cut(micro.positions), shares
