"""Converts adapters between the tree and published modules, whose dimensions `Place` describes as for the weight.

A published matrix may hold several leaves (fused q, k, v). Its one adapter of rank R is read as an adapter of rank R
to each of them, with the same A. On export, n leaves of rank r become one adapter of rank n r, with a block of B each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.models.adapters.lora import LoRA
from jrl.models.adapters.matrices import ADAPTABLE
from jrl.models.contract import Adapted
from jrl.models.families.contract import Pick, Place
from jrl.models.pretrained.peft import Module

Box = tuple[slice, ...]


def inputs_and_outputs(place: Place) -> tuple[tuple[int | Pick, ...], tuple[int | Pick, ...]]:
    """Returns the published dimension of a matrix's inputs, the leaf's first axes, and that of its outputs."""
    first = next(dims for dims in place.dims if 0 in dims)
    return first, next(dims for dims in place.dims if dims is not first)


def transposed(place: Place) -> bool:
    """Whether the published matrix is [in, out]."""
    return 0 in place.dims[0]


def rows_of(dims: Sequence[int | Pick], shape: Sequence[int]) -> int:
    """Returns the size of a published dimension that holds the leaf's axes `dims`."""
    return int(np.prod([d.of if isinstance(d, Pick) else shape[d] for d in dims], dtype=np.int64))


def unfold(x: np.ndarray, dims: Sequence[int | Pick], shape: Sequence[int]) -> np.ndarray:
    """Returns x [published dimension, ...] with that dimension split into the leaf's axes, in the leaf's order."""
    x = x.reshape([d.of if isinstance(d, Pick) else shape[d] for d in dims] + list(x.shape[1:]))
    x = x[tuple(d.index if isinstance(d, Pick) else slice(None) for d in dims)]
    order = np.argsort([d for d in dims if not isinstance(d, Pick)])
    return x.transpose([*order, *range(len(order), x.ndim)])


def fold(x: np.ndarray, dims: Sequence[int | Pick], shape: Sequence[int]) -> np.ndarray:
    """Returns the inverse of `unfold`, with 0 where other leaves go. x: [*axes, ...]."""
    axes = [d for d in dims if not isinstance(d, Pick)]
    rest = x.shape[len(axes) :]
    out = np.zeros([*(d.of if isinstance(d, Pick) else shape[d] for d in dims), *rest], x.dtype)
    ranks = np.argsort(np.argsort(axes))
    index = tuple(d.index if isinstance(d, Pick) else slice(None) for d in dims)
    out[index] = x.transpose([*ranks, *range(len(axes), x.ndim)])
    return out.reshape(-1, *rest)


def check(name: str, module: Module, leaf: str, place: Place, shape: Sequence[int]) -> None:
    """Raises ValueError where an adapter does not fit the published matrix, of `shape`, that holds a leaf."""
    if leaf not in ADAPTABLE:
        raise ValueError(f"the adapter also adapts {name}; only the matrices of attention and of MLPs are supported")
    sizes = (module.b.shape[0], module.a.shape[1])
    expected = tuple(shape[::-1] if transposed(place) else shape)
    lengths = expected[0] if module.magnitude is None else len(module.magnitude)
    if sizes != expected or lengths != expected[0]:
        raise ValueError(
            f"the adapter to {name} has {sizes[1]} inputs and {sizes[0]} outputs, expected {expected[1]} and "
            f"{expected[0]}"
        )


def merged(
    weight: np.ndarray,
    module: Module,
    leaf: str,
    place: Place,
    start: int,
    shape: Sequence[int],
    box: Box,
    read: Callable[[Box], np.ndarray],
) -> np.ndarray:
    """Returns a box of a layer's leaf with its adapter merged in, float32 or wider.

    Args:
      weight: the box as published.
      start: where the leaf begins in the published dimension of the outputs.
      shape: of the layer's leaf.
      read: reads any box of the leaf as published; DoRA's norms are over all inputs.
    """
    inputs = len(ADAPTABLE[leaf])
    into, out = inputs_and_outputs(place)
    rows = module.b[start : start + rows_of(out, shape)]
    a, b = unfold(module.a.T, into, shape), unfold(rows, out, shape)  # [*in, r], [*out, r]
    change = lambda box: module.scale * np.tensordot(a[box[:inputs]], b[box[inputs:]], [[-1], [-1]])
    wide = jnp.promote_types(weight.dtype, np.float32)
    now = weight.astype(wide) + change(box)
    if module.magnitude is None:
        return now
    every = (*(slice(0, size) for size in shape[:inputs]), *box[inputs:])
    column = now if every == box else read(every).astype(wide) + change(every)
    magnitude = unfold(module.magnitude[start : start + len(rows)], out, shape)[box[inputs:]]
    return now * (magnitude / length(column, inputs))


def length(weight: np.ndarray, inputs: int) -> np.ndarray:
    """Returns the norm of every output's weights, [*out]."""
    return np.sqrt(np.square(weight).sum(tuple(range(inputs))))


def modules_of(params: Adapted, config: LoRA, plans: Mapping[str, Any]) -> Iterator[tuple[str, Module]]:
    """Yields (module name, adapter) of every published matrix that holds an adapted leaf.

    Args:
      params: of an adapted model, stacked. Fetched one layer of a leaf at a time.
      plans: published name -> plan, of `published.plans`.
    """
    adapters, weights = params.adapters, params.base["layers"]
    fetch = lambda leaf, index: np.asarray(jax.device_get(part_of(leaf, index)), np.float32)
    for name, plan in plans.items():
        slots = [slot for slot in plan.slots if len(slot.index) == 1 and slot.path[-1] in adapters]
        if not slots:
            continue
        rank, index = config.rank, slots[0].index
        outputs = plan.shape[1 if transposed(slots[0].place) else 0]
        a, b, magnitude = [], np.zeros((outputs, rank * len(slots)), np.float32), None
        for number, slot in enumerate(slots):
            leaf, shape = adapters[slot.path[-1]], weights[slot.path[-1]].shape[1:]
            into, out = inputs_and_outputs(slot.place)
            a.append(fold(fetch(leaf["a"], index), into, shape).T)
            rows = fold(np.moveaxis(fetch(leaf["b"], index), 0, -1), out, shape)
            b[slot.start : slot.start + len(rows), number * rank : (number + 1) * rank] += rows
        if config.kind == "dora":
            magnitude = np.zeros(outputs, np.float32)
            for slot in plan.slots:  # an output that is not adapted keeps its norm
                path = slot.path[-1]
                norm = length(fetch(weights[path], index), len(ADAPTABLE[path]))
                norm = norm + fetch(adapters[path]["d"], index) if path in adapters else norm
                rows = fold(norm, inputs_and_outputs(slot.place)[1], weights[path].shape[1:])
                magnitude[slot.start : slot.start + len(rows)] += rows
        yield name.removesuffix(".weight"), Module(np.concatenate(a), b, magnitude, config.scale)


@jax.jit
def part_of(leaf: jax.Array, index: tuple[int, ...]) -> jax.Array:
    """Returns one layer of a stacked leaf, or one expert of one layer; all of it where `index` is empty."""
    for i in index:
        leaf = jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False)
    return leaf
