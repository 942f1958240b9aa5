"""Floating-point operations of a decoder, from its shape. A multiply-add counts as two; only matrix products count."""

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
    """Returns the number of matrix elements in all layers that a token is multiplied by; of experts, only its own."""
    leaves = jax.tree.leaves(spec["layers"], is_leaf=is_spec)
    matrices = [leaf for leaf in leaves if "embed" in leaf.axes and len(leaf.axes) > 2 and not of_experts(leaf)]
    some = sum(math.prod(leaf.shape) for leaf in leaves if of_experts(leaf))
    chosen = 0 if experts is None else some // experts.count * experts.per_token
    return sum(math.prod(leaf.shape) for leaf in matrices) + chosen


def of_experts(leaf: ParamSpec) -> bool:
    """Whether a parameter has one matrix per expert. A router does not: experts are its columns."""
    return len(leaf.axes) == 4 and leaf.axes[1] == "experts"


def head_weights(cfg: Decoder) -> int:
    """Returns the number of elements of the head. The embedding lookup has no products."""
    return cfg.vocab_size * cfg.width


def attention(cfg: Decoder, columns: float) -> float:
    """Returns the operations of one query token over `columns` keys, in all layers: scores, then weighted values. For
    linear layers, those of one token in a row of that length."""
    return softmax_attention(cfg, columns) + linear_attention(cfg, int(columns))


def softmax_attention(cfg: Decoder, columns: float) -> float:
    full, linear = len(layers_with(cfg, "full_q")), len(layers_with(cfg, "linear_q"))
    total = (cfg.layers - full - linear) * 2 * (2 * cfg.heads * cfg.head_dim * columns)
    return total + (full * 2 * (2 * cfg.heads * cfg.full.head_dim * columns) if full else 0)


def linear_attention(cfg: Decoder, length: int, states: int = 1) -> float:
    """Returns the operations of one token in all linear layers, in rows of `length`. Within a chunk of C tokens: per
    key head, keys times keys and queries times keys; per value head, sums of decays, weights times corrections, and the
    triangular solve for values and keys, which counts as half a product. Per carried state: reads for keys and queries,
    and one write."""
    if cfg.linear is None:
        return 0
    shape, layers = cfg.linear, len(layers_with(cfg, "linear_q"))
    chunk, keys, values = chunk_of(length), shape.key_dim, shape.value_dim
    inside = chunk * (2 * chunk + 2 * values + keys + values)
    between = states * 3 * 2 * keys * values
    return layers * (shape.key_heads * 4 * keys * chunk + shape.value_heads * (inside + between))
