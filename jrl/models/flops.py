"""Floating-point operations of a decoder by its shape: a multiply-add is two. Only products of matrices are counted."""

from __future__ import annotations

import math

import jax

from jrl.models.attention.linear import chunk_of
from jrl.models.contract import ParamSpec, is_spec
from jrl.models.experts import Experts
from jrl.models.leaves import layers_of as layers_with
from jrl.models.shape import Decoder
from jrl.types import PyTree


def layer_weights(spec: PyTree, experts: Experts | None = None) -> int:
    """Returns the elements of all layers' matrices that a token is multiplied with: of experts, those it goes to."""
    leaves = jax.tree.leaves(spec["layers"], is_leaf=is_spec)
    matrices = [leaf for leaf in leaves if "embed" in leaf.axes and len(leaf.axes) > 2 and not of_experts(leaf)]
    some = sum(math.prod(leaf.shape) for leaf in leaves if of_experts(leaf))
    chosen = 0 if experts is None else some // experts.count * experts.per_token
    return sum(math.prod(leaf.shape) for leaf in matrices) + chosen


def of_experts(leaf: ParamSpec) -> bool:
    """Whether a parameter has a matrix for each expert; a router, whose columns they are, has not."""
    return len(leaf.axes) == 4 and leaf.axes[1] == "experts"


def head_weights(cfg: Decoder) -> int:
    """Returns the elements of the head. The embedding lookup has no products."""
    return cfg.vocab_size * cfg.width


def attention(cfg: Decoder, columns: float) -> float:
    """Returns the operations of one query token over `columns` keys, in all layers: scores, then weighted values. Of
    linear attention, those of a token in a row as long."""
    return softmax_attention(cfg, columns) + linear_attention(cfg, int(columns))


def softmax_attention(cfg: Decoder, columns: float) -> float:
    full, linear = len(layers_with(cfg, "full_q")), len(layers_with(cfg, "linear_q"))
    total = (cfg.layers - full - linear) * 2 * (2 * cfg.heads * cfg.head_dim * columns)
    return total + (full * 2 * (2 * cfg.heads * cfg.full.head_dim * columns) if full else 0)


def linear_attention(cfg: Decoder, length: int, states: int = 1) -> float:
    """Returns the operations of one token in all linear layers, in rows of `length`. In a chunk of C tokens: for each
    key head, keys with keys and queries with keys; for each value head, sums of decays, shares with corrections, and
    the triangular system for values and keys, which is half a product. With each state that is carried: read for keys
    and queries, and written."""
    if cfg.linear is None:
        return 0
    shape, layers = cfg.linear, len(layers_with(cfg, "linear_q"))
    chunk, keys, values = chunk_of(length), shape.key_dim, shape.value_dim
    inside = chunk * (2 * chunk + 2 * values + keys + values)
    between = states * 3 * 2 * keys * values
    return layers * (shape.key_heads * 4 * keys * chunk + shape.value_heads * (inside + between))
