"""The KV cache of a decoder: its stacks, which layer reads which stack, and how a stack is written."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jrl.device.sharding import constrain
from jrl.models.attention import linear
from jrl.models.attention.cached import edges
from jrl.models.attention.kernels import padded_length
from jrl.models.attention.reference import pad_to
from jrl.models.contract import Cache, Layout, Stacks, State
from jrl.models.leaves import layers_of
from jrl.models.shape import Decoder, LayerVariant, check_length
from jrl.types import Array


def init_cache(cfg: Decoder, batch: int, length: int) -> Cache:
    """Returns an empty cache of `length` columns in one block, stacked. Create it inside the program that uses it.

    Raises: ValueError for more columns than there are learned positions.
    """
    check_length(cfg, length)
    arrays, stacks = {}, {}
    for stack, leaves in cache_shapes(cfg, batch, length).items():
        stacks[stack] = {}
        for name, entry in leaves.items():
            if entry not in arrays:
                shape, dtype, names = entry
                arrays[entry] = constrain(jnp.zeros(shape, dtype), *names)
            stacks[stack][name] = arrays[entry]
    of = lambda name: Cache(**{x: (leaf,) for x, leaf in stacks[name].items()}) if name in stacks else None
    if cfg.full is None and cfg.linear is None:
        return of("plain")
    return Stacks(plain=of("plain"), full=of("full"), linear=State(**stacks["linear"]) if "linear" in stacks else None)


def cache_shapes(
    cfg: Decoder, batch: int, length: int
) -> dict[str, dict[str, tuple[tuple[int, ...], Any, tuple[str | None, ...]]]]:
    """Returns stack of a cache -> its fields -> (shape, dtype, logical axes)."""
    shapes, dtype = {}, jnp.dtype(cfg.dtype)
    for stack, prefix, heads in (("plain", "", cfg), ("full", "full_", cfg.full)):
        if layers := len(layers_of(cfg, f"{prefix}k")):
            entry = (
                (layers, batch, heads.kv_heads, length, heads.head_dim),
                dtype,
                (None, "batch", "kv_heads", None, None),
            )
            shapes[stack] = {"k": entry, "v": entry}
    if cfg.linear is not None:
        layers, wide = len(layers_of(cfg, "linear_q")), jnp.promote_types(dtype, jnp.float32)
        shapes["linear"] = {
            name: ((layers, *shape), wide if name == "matrix" else dtype, (None, *names))
            for name, (shape, names) in linear.state_shapes(cfg.linear, batch).items()
        }
    return shapes


def cut_cache(cache: Any, length: int, layout: Layout) -> Any:
    """Returns a one-block cache, stacked or a tuple of layers, in another layout: cut into the blocks for `length`
    columns, some of them empty if it has fewer; or padded for a kernel."""
    if isinstance(cache, Stacks):
        return cache.replace(plain=cache.plain and cut_cache(cache.plain, length, layout),
                             full=cache.full and cut_cache(cache.full, length, layout))  # fmt: skip
    if isinstance(cache, tuple):
        return tuple(cut_cache(layer, length, layout) for layer in cache)
    if layout == "single_block":
        return Cache(k=_padded(cache.k), v=_padded(cache.v), layout=layout)
    starts = (0, *edges(length)[:-1])
    cut = lambda single: tuple(single[..., a:b, :] for a, b in zip(starts, edges(length)))
    transpose = lambda blocks: (
        tuple(block.swapaxes(-1, -2) for block in blocks) if layout == "head_dim_major" else blocks
    )
    return Cache(k=transpose(cut(*cache.k)), v=cut(*cache.v), layout=layout)


def _padded(blocks: tuple[Array]) -> tuple[Array]:
    (block,) = blocks
    return (pad_to(pad_to(block, -2, padded_length(block.shape[-2])), -1, padded_length(block.shape[-1])),)


def ends(columns: int, length: int, layout: Layout) -> tuple[int, ...]:
    """Returns where each block ends in a cache of `columns` columns that is laid out like one of `length` columns."""
    if layout == "single_block":
        return (padded_length(columns),)
    every = edges(length)
    return tuple(min(end, columns) for start, end in zip((0, *every), every) if start < columns)


def row_of(cfg: Decoder, layer: int) -> int:
    """Returns the index, in its stack of the cache, of the entry that a layer reads: its own, or another's."""
    variant = cfg.variant(layer)
    if variant.shared:
        layer = cfg.shared_from[cfg.windowed(layer)]
    return layers_of(cfg, {"plain": "k", "full": "full_k", "linear": "linear_q"}[variant.stack]).index(layer)


def stack_of(cache: Any, variant: LayerVariant) -> Any:
    """Returns the stack of a cache, or the tuple of layers, that holds a layer's entry."""
    return getattr(cache, variant.stack) if isinstance(cache, Stacks) else cache


def with_stack(cache: Any, variant: LayerVariant, stack: Any) -> Any:
    return cache.replace(**{variant.stack: stack}) if isinstance(cache, Stacks) else stack


def write(
    blocks: tuple[Array, ...], new: Array, start: Array, layer: Array | None, transposed: bool
) -> tuple[Array, ...]:
    """Returns the cache's blocks with `new` [B, J, L, K] written from column `start` [B] on, in `layer` if they hold
    all layers. Several tokens per row are written only to a one-block cache whose keys are not transposed."""
    if new.shape[2] > 1:
        (only_block,) = blocks
        update = jax.vmap(lambda c, n, s: jax.lax.dynamic_update_slice_in_dim(c, n, s, 1))
        if layer is None:
            return (update(only_block, new, start),)
        return (
            jax.lax.dynamic_update_index_in_dim(only_block, update(of_layer(only_block, layer), new, start), layer, 0),
        )
    rows, written, first = jnp.arange(new.shape[0]), [], 0
    if not transposed:
        new = pad_to(new, -1, blocks[0].shape[-1])
    for block in blocks:
        width = block.shape[-1 if transposed else -2]
        column = jnp.where(start < first, width, start - first)  # columns outside this block are dropped
        index = (rows, slice(None), slice(None), column) if transposed else (rows, slice(None), column)
        cells = block.at[index if layer is None else (layer, *index)]
        written.append(cells.set(new[:, :, 0], mode="drop"))
        first += width
    return tuple(written)


def of_layer(stack: Array, layer: Array | None) -> Array:
    return stack if layer is None else jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)
