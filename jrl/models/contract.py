"""The interface between a model and the rest of jrl: parameter specs, the model's functions and its cache records."""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jrl.types import Array, PyTree

Names = tuple[str | None, ...]  # logical axes of a parameter
# The layout of a cache: blocks of columns; the same with keys [layers, B, J, K, m]; or one block, padded for the
# ragged attention kernel.
Layout = Literal["token_major", "head_dim_major", "single_block"]
ADAPTER = "adapter"  # key of a layer's adapters, by matrix, in the weights that the decoder reads


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """The specification of a parameter: shape, dtype, logical axes and initialization."""

    shape: tuple[int, ...]
    dtype: Any
    axes: Names
    scale: float | None  # standard deviation of its normal initialization; 0: zeros; None: ones; NaN: see Model.init
    trained: bool = True  # False: no gradient; neither the optimizer nor weight decay changes it


@struct.dataclass
class Cache:
    """Keys and values of earlier tokens, each a tuple of blocks of columns: [layers, B, J, m, K]. If layers are
    unrolled, there is a tuple of caches, one per layer, whose blocks have no layer axis."""

    k: Any
    v: Any
    layout: Layout = struct.field(pytree_node=False, default="token_major")


@struct.dataclass
class ShareSegments:
    """Segments of shares of packed rows, of L / S tokens each, where the mesh axis `sequence` divides rows of L."""

    segment: Any  # [B, L / S] int32, or [B, L / S, 2], of the share's own tokens
    column: Any  # [B, L / S] int32, their columns in the row
    row_segment: Any  # [B, L] or [B, L, 2], of all of the row's tokens
    row_positions: Any  # [B, L] int32


@struct.dataclass
class PrefixSegments:
    """Segments of packed rows whose continuations share a prefix at the beginning of the same row or of another
    row."""

    segment: Any  # [B, L] int32, or ShareSegments; a token attends to its own segment
    continuation: Any  # [B, L] bool, tokens that also attend to the prefix
    prefix_row: Any  # [B, P] int32: the row of the batch shard whose column c is this row's prefix; -1: none


@struct.dataclass
class State:
    """The recurrent state of linear attention; its size does not depend on the number of tokens. [layers, B, ...], or
    without the layer axis for a single layer."""

    matrix: Any  # [layers, B, H, K, V] float32 or wider
    tap_q: Any  # [layers, B, taps - 1, J, K], the last tokens' inputs of the convolutions
    tap_k: Any
    tap_v: Any  # [layers, B, taps - 1, H, V]


@struct.dataclass
class Stacks:
    """The caches of a decoder with several kinds of layers: one stack per kind, or a tuple with one entry per layer of
    the kind; None: there are no layers of that kind."""

    plain: Any  # Cache
    full: Any  # Cache, of layers whose heads have the shape of Decoder.full
    linear: Any  # State


def unstack_cache(cache: Any) -> Any:
    """Returns the caches of the layers as a tuple; if there are several kinds of layers, a tuple for each kind."""
    if isinstance(cache, Stacks):
        return Stacks(*(x and unstack_cache(x) for x in (cache.plain, cache.full, cache.linear)))
    layers = jax.tree.leaves(cache)[0].shape[0]
    return tuple(jax.tree.map(lambda stack, i=i: stack[i], cache) for i in range(layers))


def has_state(cache: Any) -> bool:
    """Whether the cache holds recurrent states, which must not process a token twice."""
    return isinstance(cache, Stacks) and cache.linear is not None


class MixedTokens(NamedTuple):
    """Tokens for which a Decoder reads a mixture of two embeddings, (1 - share) e(tokens) + share e(others)."""

    tokens: Array  # [B, L] int32
    others: Array  # [B, L] int32; equal to the tokens where nothing is mixed
    share: Array | float  # [] float, in [0, 1]


class Routes(NamedTuple):
    """How a model records the experts of tokens: [B, L, F] unsigned integers, F per token."""

    empty: Callable  # (cfg, batch, length) -> routes that are all marked as not recorded
    record: Callable  # (params, tokens, positions, segment, cfg, cache=None) -> (hidden, cache, routes)


class Model(NamedTuple):
    """The functions of a model. `cfg` is hashable and static; parameters are an explicit pytree."""

    spec: Callable  # (cfg) -> tree of ParamSpec
    init: Callable  # (key, cfg, place) -> fresh parameters; `init` of the spec, unless the module initializes itself
    forward: Callable  # (params, tokens, positions, segment, cfg, cache=None) -> (hidden, cache)
    # (params, tokens, positions, segment, cfg) -> (hidden, logits of its routers; None: it has none). If `routes` is
    # set, it also takes routes to replay, after cfg
    routed: Callable
    unembed: Callable  # (params, hidden, cfg) -> logits
    init_cache: Callable  # (cfg, batch, length) -> Cache, in one block
    cut_cache: Callable  # (cache, length, layout) -> the cache in the blocks used to decode `length` columns
    unstack: Callable  # (params, cfg) -> params whose layers are a tuple
    # (params, cfg) -> (params as a decode loop reads them, their logical axes); called once per sampling call
    prepare_for_decode: Callable
    # (params, cfg) -> vocab_parallel.OutputHead, from which the learner computes log-probs; None: from `unembed`
    output_head: Callable | None = None
    routes: Routes | None = None  # None: the model cannot record and replay routes
    # Whether JAX checks what differs between batch shards (check_vma) while it samples. Its type of a loop's carry does
    # not admit one that begins with constants, as the recurrent layers of Flax do.
    checked: bool = True


class Adapted(NamedTuple):
    """The parameters of a model with adapters."""

    base: PyTree  # frozen weights
    adapters: PyTree  # the trained parameters


class CustomModel(NamedTuple):
    """A row of MODELS: a user's model, selected by its configuration class."""

    config: type  # a frozen dataclass with the fields of CUSTOM_MODEL_FIELDS
    model: Model


# Their types: int | None (None: the tokenizer's size), and two dtype names
CUSTOM_MODEL_FIELDS = ("vocab_size", "dtype", "param_dtype")


@functools.cache  # one object per model, so that equal programs are compiled once
def unrolled(model: Model) -> Model:
    """Returns the model with forward passes that take stacked parameters and unroll the layers."""

    def forward(params: PyTree, tokens: Array, positions: Array, segment: Array | None, cfg: Any, cache: Any = None):
        return model.forward(model.unstack(params, cfg), tokens, positions, segment, cfg, cache)

    def routed(params: PyTree, tokens: Array, positions: Array, segment: Array | None, cfg: Any, *routes: Array):
        return model.routed(model.unstack(params, cfg), tokens, positions, segment, cfg, *routes)

    return model._replace(forward=forward, routed=routed)


def split_params(params: PyTree) -> tuple[PyTree | None, PyTree]:
    """Returns (frozen, trained) parameters; (None, all of them) without adapters."""
    return (params.base, params.adapters) if isinstance(params, Adapted) else (None, params)


def merge_params(frozen: PyTree | None, trained: PyTree) -> PyTree:
    """Returns the parameters that a model's functions take; the inverse of `split_params`. Copies nothing."""
    return trained if frozen is None else Adapted(frozen, trained)


def without_gradient(params: PyTree, spec: PyTree) -> PyTree:
    """Returns the trained parameters, with the gradient stopped where the spec has ParamSpec.trained = False."""
    return jax.tree.map(lambda x, s: x if s.trained else jax.lax.stop_gradient(x), params, split_params(spec)[1])


def is_spec(x: Any) -> bool:
    return isinstance(x, ParamSpec)


def axes(spec: PyTree) -> PyTree:
    """Returns the logical axes of every parameter."""
    return jax.tree.map(lambda s: s.axes, spec, is_leaf=is_spec)


def abstract(spec: PyTree) -> PyTree:
    """Returns every parameter's shape and dtype."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), spec, is_leaf=is_spec)


def init(key: Array, spec: PyTree, place: Callable[[Names], PartitionSpec | None] = lambda names: None) -> PyTree:
    """Returns fresh parameters. The key of each depends on its name, so adding a parameter changes no other.

    Args:
      place: logical axes -> the parameter's sharding. Each device draws its own shard: no device ever holds a full
        parameter. The values do not depend on the sharding.
    """

    def draw(path: tuple, s: ParamSpec) -> Array:
        sharding = place(s.axes)
        if s.scale is None:
            return jnp.ones(s.shape, s.dtype, out_sharding=sharding)
        if s.scale == 0:
            return jnp.zeros(s.shape, s.dtype, out_sharding=sharding)
        name = zlib.crc32(jax.tree_util.keystr(path).encode())
        drawn = jax.random.normal(jax.random.fold_in(key, name), s.shape, out_sharding=sharding)
        return (drawn * s.scale).astype(s.dtype)

    return jax.tree_util.tree_map_with_path(draw, spec, is_leaf=is_spec)


def num_params(spec: PyTree) -> int:
    return sum(math.prod(s.shape) for s in jax.tree.leaves(spec, is_leaf=is_spec))
