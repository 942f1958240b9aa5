"""What a decoder keeps of tokens already seen: its cache's stacks, which layer reads which, and how one is written."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jrl.device.sharding import constrain
from jrl.models.attention import linear
from jrl.models.attention.cached import edges
from jrl.models.attention.kernels import filled
from jrl.models.attention.reference import fill_up
from jrl.models.contract import Cache, Layout, Stacks, State
from jrl.models.leaves import layers_of
from jrl.models.shape import Decoder, Variant, check_length
from jrl.types import Array


def init_cache(cfg: Decoder, batch: int, length: int) -> Cache:
    """Returns an empty cache of `length` columns in one block, stacked. Create it inside the program that uses it.

    Raises: ValueError for more columns than there are learned positions.
    """
    check_length(cfg, length)
    made, stacks = {}, {}
    for stack, leaves in cache_shapes(cfg, batch, length).items():
        stacks[stack] = {}
        for name, what in leaves.items():
            if what not in made:
                shape, dtype, names = what
                made[what] = constrain(jnp.zeros(shape, dtype), *names)
            stacks[stack][name] = made[what]
    of = lambda name: Cache(**{x: (leaf,) for x, leaf in stacks[name].items()}) if name in stacks else None
    if cfg.full is None and cfg.linear is None:
        return of("plain")
    return Stacks(plain=of("plain"), full=of("full"), linear=State(**stacks["linear"]) if "linear" in stacks else None)


def cache_shapes(
    cfg: Decoder, batch: int, length: int
) -> dict[str, dict[str, tuple[tuple[int, ...], Any, tuple[str | None, ...]]]]:
    """Returns stack of a cache -> its fields -> (shape, dtype, logical axes)."""
    found, dtype = {}, jnp.dtype(cfg.dtype)
    for stack, prefix, heads in (("plain", "", cfg), ("full", "full_", cfg.full)):
        if layers := len(layers_of(cfg, f"{prefix}k")):
            what = (
                (layers, batch, heads.kv_heads, length, heads.head_dim),
                dtype,
                (None, "batch", "kv_heads", None, None),
            )
            found[stack] = {"k": what, "v": what}
    if cfg.linear is not None:
        layers, wide = len(layers_of(cfg, "linear_q")), jnp.promote_types(dtype, jnp.float32)
        found["linear"] = {
            name: ((layers, *shape), wide if name == "matrix" else dtype, (None, *names))
            for name, (shape, names) in linear.state_shapes(cfg.linear, batch).items()
        }
    return found


def cut_cache(cache: Any, length: int, layout: Layout) -> Any:
    """Returns a cache of one block, stacked or a tuple of layers, laid out as `layout` says: in the blocks that
    `length` columns have, of which some are empty where it has fewer; or filled up to what a kernel reads."""
    if isinstance(cache, Stacks):
        return cache.replace(plain=cache.plain and cut_cache(cache.plain, length, layout),
                             full=cache.full and cut_cache(cache.full, length, layout))  # fmt: skip
    if isinstance(cache, tuple):
        return tuple(cut_cache(layer, length, layout) for layer in cache)
    if layout == "whole":
        return Cache(k=_filled(cache.k), v=_filled(cache.v), layout=layout)
    starts = (0, *edges(length)[:-1])
    cut = lambda whole: tuple(whole[..., a:b, :] for a, b in zip(starts, edges(length)))
    turn = lambda blocks: tuple(block.swapaxes(-1, -2) for block in blocks) if layout == "head_dim_major" else blocks
    return Cache(k=turn(cut(*cache.k)), v=cut(*cache.v), layout=layout)


def _filled(blocks: tuple[Array]) -> tuple[Array]:
    (whole,) = blocks
    return (fill_up(fill_up(whole, -2, filled(whole.shape[-2])), -1, filled(whole.shape[-1])),)


def ends(columns: int, length: int, layout: Layout) -> tuple[int, ...]:
    """Returns where each block of a cache of `columns` ends that is laid out as one of `length` columns."""
    if layout == "whole":
        return (filled(columns),)
    every = edges(length)
    return tuple(min(end, columns) for start, end in zip((0, *every), every) if start < columns)


def row_of(cfg: Decoder, layer: int) -> int:
    """Returns where in its stack of the cache lies what a layer reads: its own, or another's."""
    variant = cfg.variant(layer)
    if variant.shared:
        layer = cfg.shared_from[cfg.windowed(layer)]
    return layers_of(cfg, {"plain": "k", "full": "full_k", "linear": "linear_q"}[variant.stack]).index(layer)


def stack_of(cache: Any, variant: Variant) -> Any:
    """Returns the stack of a cache, or the tuple of layers, that a layer's is in."""
    return getattr(cache, variant.stack) if isinstance(cache, Stacks) else cache


def with_stack(cache: Any, variant: Variant, stack: Any) -> Any:
    return cache.replace(**{variant.stack: stack}) if isinstance(cache, Stacks) else stack


def write(blocks: tuple[Array, ...], new: Array, start: Array, layer: Array | None, turned: bool) -> tuple[Array, ...]:
    """Returns the cache's blocks with new [B, J, L, K] at the columns from start [B] on, of `layer` if they hold all.
    More than one token a row is written to a cache in one block, whose keys are not turned."""
    if new.shape[2] > 1:
        (whole,) = blocks
        put = jax.vmap(lambda c, n, s: jax.lax.dynamic_update_slice_in_dim(c, n, s, 1))
        if layer is None:
            return (put(whole, new, start),)
        return (jax.lax.dynamic_update_index_in_dim(whole, put(of_layer(whole, layer), new, start), layer, 0),)
    rows, found, first = jnp.arange(new.shape[0]), [], 0
    if not turned:
        new = fill_up(new, -1, blocks[0].shape[-1])
    for block in blocks:
        width = block.shape[-1 if turned else -2]
        column = jnp.where(start < first, width, start - first)  # what does not lie in this block is dropped
        at = (rows, slice(None), slice(None), column) if turned else (rows, slice(None), column)
        at = block.at[at if layer is None else (layer, *at)]
        found.append(at.set(new[:, :, 0], mode="drop"))
        first += width
    return tuple(found)


def of_layer(stack: Array, layer: Array | None) -> Array:
    return stack if layer is None else jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)
