"""What a model family is to the rest of jrl: a spec, three functions and a cache record."""

from __future__ import annotations

import dataclasses
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
# How a cache lies: in blocks of columns; the same, of keys [layers, B, J, K, m]; or in one block, filled up to what the
# kernel of ragged attention reads.
Layout = Literal["token_major", "head_dim_major", "whole"]
ADAPTER = "adapter"  # the entry of a parameter tree that is trained, where there is one; the others are frozen
VALUE = "value"  # the entry that is a value head: always trained, and no part of the policy


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter before it exists: shape, dtype, logical axes and how it starts."""

    shape: tuple[int, ...]
    dtype: Any
    axes: Names
    scale: float | None  # standard deviation of the normal it starts from; 0: zeros; None: ones; NaN: see Model.init
    trained: bool = True  # else it has no gradient, and neither an optimiser nor weight decay moves it


@struct.dataclass
class Cache:
    """Keys and values of tokens already seen, each a tuple of blocks of columns: [layers, B, J, m, K]. Where layers are
    computed one by one there is a tuple of caches, one a layer, of blocks with no such axis."""

    k: Any
    v: Any
    layout: Layout = struct.field(pytree_node=False, default="token_major")


@struct.dataclass
class Ahead:
    """Segments of packed rows whose branches continue what lies at the beginning of a row: their own, or another."""

    segment: Any  # [B, L] int32; a token sees its own segment
    branch: Any  # [B, L] bool, whose tokens see what is ahead too
    row: Any  # [B, P] int32: of which of the batch shard's rows column c is ahead of this one; -1: none


@struct.dataclass
class State:
    """What layers of linear attention keep of tokens already seen: nothing for each of them. [layers, B, ...], or of
    one layer."""

    matrix: Any  # [layers, B, H, K, V] float32 or wider
    tap_q: Any  # [layers, B, taps - 1, J, K], what the convolutions see of the last tokens
    tap_k: Any
    tap_v: Any  # [layers, B, taps - 1, H, V]


@struct.dataclass
class Stacks:
    """The caches of a decoder whose layers do not all keep the same: a stack for each kind of layer, or a tuple of what
    its layers keep; None: there is no such layer."""

    plain: Any  # Cache
    full: Any  # Cache, of layers whose heads have a shape of their own
    linear: Any  # State


def unstack_cache(cache: Any) -> Any:
    """Returns the caches of the layers, one by one: a tuple; of layers that keep different things, a tuple of each."""
    if isinstance(cache, Stacks):
        return Stacks(*(x and unstack_cache(x) for x in (cache.plain, cache.full, cache.linear)))
    layers = jax.tree.leaves(cache)[0].shape[0]
    return tuple(jax.tree.map(lambda stack, i=i: stack[i], cache) for i in range(layers))


def has_state(cache: Any) -> bool:
    """Whether something is kept that has no column for each token: it must not see a token twice."""
    return isinstance(cache, Stacks) and cache.linear is not None


class Model(NamedTuple):
    """The functions of a model. `cfg` is hashable and static; parameters are an explicit pytree."""

    spec: Callable  # (cfg) -> tree of ParamSpec
    init: Callable  # (key, cfg, place) -> fresh parameters; `init` of the spec, unless a module draws its own
    forward: Callable  # (params, tokens, positions, segment, cfg, cache=None) -> (hidden, cache)
    routed: Callable  # (params, tokens, positions, segment, cfg) -> (hidden, logits of its routers; None: it has none)
    unembed: Callable  # (params, hidden, cfg) -> logits
    init_cache: Callable  # (cfg, batch, length) -> Cache, in one block
    cut_cache: Callable  # (cache, length, layout) -> the cache in the blocks in which `length` columns are decoded
    unstack: Callable  # (params, cfg) -> params whose layers are a tuple
    ready: Callable  # (params, cfg) -> (params as a decode loop reads them, their logical axes); once a sampling call


class CustomModel(NamedTuple):
    """A row of MODELS: a model of the user's own, chosen by its configuration class."""

    config: type  # a frozen dataclass with the fields of OWN_FIELDS
    model: Model


CUSTOM_MODEL_FIELDS = (
    "vocab_size",
    "dtype",
    "param_dtype",
)  # int | None (None: the tokenizer's), and two names of dtypes


def unrolled(model: Model) -> Model:
    """Returns the model whose forward passes take stacked parameters and compute the layers one by one."""

    def forward(params: PyTree, tokens: Array, positions: Array, segment: Array | None, cfg: Any, cache: Any = None):
        return model.forward(model.unstack(params, cfg), tokens, positions, segment, cfg, cache)

    def routed(params: PyTree, tokens: Array, positions: Array, segment: Array | None, cfg: Any):
        return model.routed(model.unstack(params, cfg), tokens, positions, segment, cfg)

    return model._replace(forward=forward, routed=routed)


def split(params: PyTree) -> tuple[PyTree | None, PyTree]:
    """Returns (frozen, trained) parameters: (None, all of them) where there are no adapters. A value head is trained
    beside them, an entry among theirs."""
    if ADAPTER not in params:
        return None, params
    frozen = {name: leaf for name, leaf in params.items() if name not in (ADAPTER, VALUE)}
    return frozen, {**params[ADAPTER], **value_of(params)}


def whole(frozen: PyTree | None, trained: PyTree) -> PyTree:
    """Returns the parameters that a model's functions take; the inverse of `split`. Copies nothing."""
    return trained if frozen is None else {**frozen, ADAPTER: policy_of(trained), **value_of(trained)}


def policy_of(params: PyTree) -> PyTree:
    """Returns parameters, all or the trained ones, without the value head: what samples and is exported."""
    return {name: leaf for name, leaf in params.items() if name != VALUE} if VALUE in params else params


def value_of(params: PyTree) -> PyTree:
    """Returns the entry of `params` that is the value head; {} where there is none."""
    return {VALUE: params[VALUE]} if VALUE in params else {}


def without_gradient(params: PyTree, spec: PyTree) -> PyTree:
    """Returns the trained parameters of a model, those constant that its spec says ParamSpec.trained = False of."""
    return jax.tree.map(lambda x, s: x if s.trained else jax.lax.stop_gradient(x), params, split(spec)[1])


def trained(spec: PyTree) -> PyTree:
    """Returns for each of the trained parameters of a model whether an optimiser may move it: ParamSpec.trained."""
    return jax.tree.map(lambda s: s.trained, split(spec)[1], is_leaf=is_spec)


def is_spec(x: Any) -> bool:
    return isinstance(x, ParamSpec)


def axes(spec: PyTree) -> PyTree:
    """Returns the logical axes of every parameter."""
    return jax.tree.map(lambda s: s.axes, spec, is_leaf=is_spec)


def abstract(spec: PyTree) -> PyTree:
    """Returns every parameter's shape and dtype."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), spec, is_leaf=is_spec)


def init(key: Array, spec: PyTree, place: Callable[[Names], PartitionSpec | None] = lambda names: None) -> PyTree:
    """Returns fresh parameters. Each is drawn under a key that its name gives, so adding one moves no other.

    Args:
      place: logical axes -> where the parameter lies. It is drawn there, a shard by each device: no device ever holds
        a whole one. The numbers do not depend on it.
    """

    def draw(path: tuple, s: ParamSpec) -> Array:
        where = place(s.axes)
        if s.scale is None:
            return jnp.ones(s.shape, s.dtype, out_sharding=where)
        if s.scale == 0:
            return jnp.zeros(s.shape, s.dtype, out_sharding=where)
        name = zlib.crc32(jax.tree_util.keystr(path).encode())
        drawn = jax.random.normal(jax.random.fold_in(key, name), s.shape, out_sharding=where)
        return (drawn * s.scale).astype(s.dtype)

    return jax.tree_util.tree_map_with_path(draw, spec, is_leaf=is_spec)


def num_params(spec: PyTree) -> int:
    return sum(math.prod(s.shape) for s in jax.tree.leaves(spec, is_leaf=is_spec))
