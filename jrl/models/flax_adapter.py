"""Adapter for Flax: a Linen or NNX module as the model of a run. docs/bring-your-own.md has an example of each.

    MODELS = {"Mine": from_linen(Mine, Network)}        in a parts file; then Config.model = @Mine()

`Mine` is a frozen dataclass, the shape of the model. The module has two methods, and may have two more, both or
neither:

    __call__(tokens [B, L] int32, positions [B, L] int32, mask [B, L, L] bool) -> hidden [B, L, D]
    unembed(hidden [B, L, D]) -> logits [B, L, V]
    init_cache(batch, length) -> tree of arrays [batch, ...]: the state of `length` tokens a row
    decode(tokens [B, L], positions [B, L], cache) -> (hidden [B, L, D], cache)

A row holds several sequences: mask[b, i, j] is True where token i sees token j, and positions count from 0 in each. The
L tokens of `decode` follow those in the cache; a token's column is its position. Without `decode` every new token
recomputes its row, which is correct, but slower by a factor of the length.

A module names no logical axes, so its parameters are replicated; the batch is sharded over MeshShape.data and fsdp.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, traverse_util

from jrl.device.sharding import ACTIVATIONS, constrain, spec
from jrl.models.contract import CustomModel, Model, Names, ParamSpec, axes
from jrl.models.decoder import visible
from jrl.types import Array, PyTree

try:
    from flax import nnx
except (ImportError, AttributeError):  # flax 0.12.8 with jax 0.11 or newer
    nnx = None

Flat = dict[str, Array]  # a module's parameters: "block.0.kernel" -> array


def from_linen(config: type, module: Callable[[Any], linen.Module]) -> CustomModel:
    """Returns a row of MODELS for a Linen module whose methods share the submodules made in `setup`.

    Args:
      config: a frozen dataclass with vocab_size, dtype, param_dtype and whatever else `module` reads.
      module: (instance of `config`) -> the module.
    """

    def draw(key: Array, cfg: Any) -> Flat:
        every = lambda self, *example: self.unembed(self(*example))
        variables = dict(linen.meta.unbox(module(cfg).init(key, *_example(), method=every)))
        params = variables.pop("params", {})
        _check_no_state(config, variables)
        return traverse_util.flatten_dict(params, sep=".")

    def call(flat: Flat, cfg: Any, method: str, *args: Any) -> Any:
        return module(cfg).apply({"params": traverse_util.unflatten_dict(flat, sep=".")}, *args, method=method)

    return CustomModel(config, _model(config, draw, call, module))


def from_nnx(config: type, module: Callable[[Any, Any], Any]) -> CustomModel:
    """Returns a row of MODELS for an NNX module. All of its state must be nnx.Param.

    Args:
      config: a frozen dataclass with vocab_size, dtype, param_dtype and whatever else `module` reads.
      module: (instance of `config`, nnx.Rngs) -> the module.

    Raises: ImportError if this version of flax has no NNX that works with this version of JAX.
    """
    if nnx is None:
        raise ImportError(
            f"flax.nnx does not work with JAX {jax.__version__}: flax 0.12.8 goes with jax 0.10, and flax 0.12.12 "
            "with jax 0.11.1 or newer"
        )

    # Abstract: enough for what needs no parameter values.
    instance = functools.lru_cache(lambda cfg: nnx.eval_shape(lambda: module(cfg, nnx.Rngs(0))))

    @functools.lru_cache
    def abstract(cfg: Any) -> tuple[Any, dict[str, tuple[tuple, Any]]]:
        graph, params, rest = nnx.split(instance(cfg), nnx.Param, ...)
        _check_no_state(config, dict(nnx.to_flat_state(rest)))
        return graph, {_dotted(path): (path, variable) for path, variable in nnx.to_flat_state(params)}

    def draw(key: Array, cfg: Any) -> Flat:
        abstract(cfg)
        params = nnx.state(module(cfg, nnx.Rngs(key)), nnx.Param)
        return {_dotted(path): variable[...] for path, variable in nnx.to_flat_state(params)}

    def call(flat: Flat, cfg: Any, method: str, *args: Any) -> Any:
        graph, variables = abstract(cfg)
        state = nnx.from_flat_state([(path, v.replace(flat[name])) for name, (path, v) in variables.items()])
        return getattr(nnx.merge(graph, state), method)(*args)

    return CustomModel(config, _model(config, draw, call, instance))


def _model(config: type, draw: Callable[..., Flat], call: Callable[..., Any], instance: Callable[[Any], Any]) -> Model:
    """Returns the functions of a model.

    Args:
      config: its config class, for messages.
      draw: (key, cfg) -> fresh parameters. call: (parameters, cfg, method, *arguments) -> what the method returns.
      instance: cfg -> the module, used only where no parameter values are needed.
    """

    @functools.lru_cache
    def module_spec(cfg: Any) -> dict[str, ParamSpec]:
        _has_cache(config, instance(cfg))  # raises for half of one
        drawn = jax.eval_shape(lambda key: draw(key, cfg), jax.eval_shape(jax.random.key, 0))
        dtype = jnp.dtype(cfg.param_dtype)
        return {name: ParamSpec(x.shape, dtype, (None,) * len(x.shape), math.nan) for name, x in drawn.items()}

    def init(key: Array, cfg: Any, place: Callable[[Names], Any] = lambda names: None) -> Flat:
        drawn, placed = draw(key, cfg), {}
        for name, leaf in module_spec(cfg).items():
            value, where = drawn[name].astype(leaf.dtype), place(leaf.axes)
            placed[name] = value if where is None else jax.sharding.reshard(value, where)
        return placed

    def module_cache(cfg: Any, batch: int, length: int) -> PyTree:
        module = instance(cfg)
        if _has_cache(config, module):
            return module.init_cache(batch, length)
        return jnp.zeros((batch, length), jnp.int32)  # the tokens themselves

    def init_cache(cfg: Any, batch: int, length: int) -> PyTree:
        return jax.tree.map(lambda x: constrain(x[None], None, *_rows(x)), module_cache(cfg, batch, length))

    def decode(params: Flat, tokens: Array, positions: Array, cache: PyTree, cfg: Any) -> tuple[Array, PyTree]:
        if _has_cache(config, instance(cfg)):
            return call(params, cfg, "decode", tokens, positions, cache)
        update = lambda row, new, start: jax.lax.dynamic_update_slice_in_dim(row, new, start, 0)
        seen = jax.vmap(update)(cache, tokens, positions[:, 0])
        columns = jnp.broadcast_to(jnp.arange(seen.shape[1], dtype=jnp.int32), seen.shape)
        mask = jnp.broadcast_to(columns[:1, :, None] >= columns[:1, None, :], (*seen.shape, seen.shape[1]))
        hidden = call(params, cfg, "__call__", seen, columns, mask)
        return jnp.take_along_axis(hidden, positions[..., None], axis=1), seen

    def forward(
        params: Flat, tokens: Array, positions: Array, segment: Array | None, cfg: Any, cache: Any = None
    ) -> tuple[Array, Any]:
        if cache is None:
            read = lambda params, *args: call(params, cfg, "__call__", *args)
            return _auto_sharded(read, params, tokens, positions, visible(positions, segment)), None
        like = jax.eval_shape(lambda: module_cache(cfg, 1, 1))
        leaves, outer = jax.tree.flatten(cache)  # with a layer axis of size 1, or a tuple of one entry
        stacked = leaves[0].ndim > jax.tree.leaves(like)[0].ndim
        inner = jax.tree.unflatten(jax.tree.structure(like), [x[0] for x in leaves] if stacked else leaves)
        hidden, after = _auto_sharded(functools.partial(decode, cfg=cfg), params, tokens, positions, inner)
        after = [x[None] for x in jax.tree.leaves(after)] if stacked else jax.tree.leaves(after)
        return hidden, jax.tree.unflatten(outer, after)

    def routed(params: Flat, tokens: Array, positions: Array, segment: Array | None, cfg: Any) -> tuple[Array, None]:
        return forward(params, tokens, positions, segment, cfg)[0], None

    def unembed(params: Flat, hidden: Array, cfg: Any) -> Array:
        logits = _auto_sharded(lambda params, hidden: call(params, cfg, "unembed", hidden), params, hidden)
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

    return Model(
        spec=module_spec,
        init=init,
        forward=forward,
        routed=routed,
        unembed=unembed,
        init_cache=init_cache,
        cut_cache=lambda cache, length, layout: cache,  # the module defines its own cache
        unstack=lambda params, cfg: params,
        prepare_for_decode=lambda params, cfg: (params, axes(module_spec(cfg))),
        checked=False,
    )


def _auto_sharded(fn: Callable[..., Any], params: Flat, *args: Any) -> Any:
    """Returns fn(params, *args), arrays [batch, ...], with automatic sharding: `fn` may ignore the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return fn(params, *args)
    bare = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        shapes = jax.eval_shape(fn, *jax.tree.map(bare, (params, *args)))
    out = jax.tree.map(lambda x: spec(_rows(x), ACTIVATIONS), shapes)
    return jax.sharding.auto_axes(fn, axes=mesh.explicit_axes, out_sharding=out)(params, *args)


def _rows(x: Any) -> Names:
    """Returns the logical axes of [batch, ...]."""
    return "batch", *[None] * (x.ndim - 1)


def _example() -> tuple[Array, Array, Array]:
    """Returns the arguments of a first call: one row of two tokens."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    return tokens, jnp.arange(2, dtype=jnp.int32)[None], jnp.tril(jnp.ones((1, 2, 2), bool))


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _has_cache(config: type, module: Any) -> bool:
    """Returns whether a module has `init_cache` and `decode`. Raises ValueError if it has only one of them: sampling
    uses both, or neither."""
    defined = [name for name in ("init_cache", "decode") if callable(getattr(module, name, None))]
    if len(defined) == 1:
        (missing,) = {"init_cache", "decode"} - {*defined}
        raise ValueError(f"the module of {config.__name__} has the method {defined[0]} and no {missing}: define both "
                         "to sample with a cache, or neither to recompute the row at every token")  # fmt: skip
    return bool(defined)


def _check_no_state(config: type, rest: Mapping[Any, Any]) -> None:
    """Raises ValueError for state of a module other than parameters: it would be lost between steps."""
    if rest:
        names = ", ".join(name if isinstance(name, str) else _dotted(name) for name in rest)
        raise ValueError(f"the module of {config.__name__} keeps state other than parameters ({names}), which is "
                         "lost between steps: leave out batch statistics and dropout")  # fmt: skip
