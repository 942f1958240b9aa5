"""Frozen matrices quantized to 8 or 4 bits, for training adapters. They are dequantized one layer at a time, when used.

    W = scale * level      int8: level -128..127; int4: -8..7; nf4: NF4[0..15], quantiles of a normal

int8 has one scale per output; the 4-bit kinds have one per GROUP consecutive inputs of an output. qwix derives scales
from the largest absolute value and rounds to the nearest level. In the tree a matrix is {kind: values, "scale":
float32}, still stacked; two 4-bit values share a uint8, input 2i in the lower half of byte i and 2i + 1 in the upper.
Embedding, head, norms, biases and routers are not quantized.

Source: QLoRA, 2305.14314, section 3; NF4 is its appendix E.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrl.device.sharding import GATHERED, TRAIN, axis_fields, axis_names, gather, num_shards, spec
from jrl.models.adapters.matrices import MATRICES
from jrl.models.contract import Names, ParamSpec
from jrl.types import Array, PyTree

KINDS = ("int8", "int4", "nf4")
GROUP = 64
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)  # fmt: skip


def quantized_spec(base: PyTree, kind: str) -> PyTree:
    """Returns a decoder's spec with the matrices of its layers quantized to `kind`."""
    layers = {name: _spec(name, leaf, kind) if name in MATRICES else leaf for name, leaf in base["layers"].items()}
    return {**base, "layers": layers}


def is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, dict)


def check_bytes(base: PyTree, mesh: Any) -> None:
    """Raises ValueError if a quantized matrix of a decoder's spec, with two inputs in a byte, does not divide over the
    mesh."""
    for name, leaf in base["layers"].items():
        for values in leaf.values() if is_quantized(leaf) else ():
            for size, part in zip(values.shape, spec(values.axes, TRAIN, mesh.shape)):
                if size % num_shards(part, mesh.shape):
                    raise ValueError(
                        f"LoRA.base puts two inputs of {name!r} in a byte, and {size} bytes do not divide over "
                        f"{axis_fields(axis_names(part), mesh.shape)}; 'int8' does"
                    )


def quantize(weight: Array, name: str, kind: str, names: Names) -> dict[str, Array]:
    """Returns the stacked matrix `name` as {kind: values, "scale"}. Intermediate arrays have the size of one layer.

    Args:
      names: logical axes of the matrix; the result is sharded as in training.

    Raises: ImportError without qwix.
    """
    try:
        import qwix  # takes seconds
    except (ImportError, AttributeError) as error:  # flax 0.12.8 has no NNX with jax 0.11 or newer
        raise ImportError(
            f"LoRA.base = {kind!r} needs the package qwix, and a flax whose NNX works with this JAX; "
            "install them with pip install 'jrl-jax[quant]'"
        ) from error

    specs = _spec(name, ParamSpec(weight.shape, weight.dtype, names, None), kind)
    # Entries per scale, by axis.
    sharing = [size // scales for size, scales in zip(weight.shape[1:], specs["scale"].shape[1:])]
    axes = {"channelwise_axes": [axis for axis, size in enumerate(sharing) if size == 1],
            "tiled_axes": {axis: size for axis, size in enumerate(sharing) if size > 1}}  # fmt: skip

    def layer(w: Array) -> dict[str, Array]:
        quantized = qwix.quantize(w.astype(jnp.float32), kind, **axes)
        values = quantized.qvalue if kind == "int8" else packed(quantized.qvalue, MATRICES[name][-1])
        return {kind: values, "scale": quantized.scale}

    places = {key: spec(leaf.axes, TRAIN) for key, leaf in specs.items()}
    return _auto_sharded(lambda weight: jax.lax.map(layer, weight), places, weight)


def gathered(weights: PyTree, name: str, x: Array, *names: str | None) -> Array:
    """Returns a layer's matrix in the dtype of x, its operand, gathered over `fsdp`. Quantized ones are dequantized
    after the gather."""
    leaf = weights[name]
    if not is_quantized(leaf):
        return gather(leaf.astype(x.dtype), *names)
    axes = lambda key, part: _scale_axes(name, part.shape, names) if key == "scale" else names
    # Not before x exists: else the compiler dequantizes all layers before a loop over tokens.
    leaf, _ = jax.lax.optimization_barrier((leaf, jax.lax.stop_gradient(x)))
    full = {key: gather(part, *axes(key, part)) for key, part in leaf.items()}
    return dequantize(full, name, x.dtype, spec(names, GATHERED))


def dequantize(leaf: Array | dict[str, Array], name: str, dtype: Any, place: Any) -> Array:
    """Returns a layer's matrix `name` in `dtype`; a quantized one is sharded as `place`, a PartitionSpec."""
    return (
        _auto_sharded(lambda leaf: _dequantize(leaf, name, dtype), place, leaf)
        if is_quantized(leaf)
        else leaf.astype(dtype)
    )


def _dequantize(leaf: dict[str, Array], name: str, dtype: Any) -> Array:
    axis, scale = MATRICES[name][-1], leaf["scale"]
    if "int8" in leaf:
        levels = leaf["int8"]
    elif "int4" in leaf:
        levels = jax.lax.bitcast_convert_type(unpacked(leaf["int4"], axis) ^ 8, jnp.int8) - 8
    else:
        values = unpacked(leaf["nf4"], axis).astype(jnp.int32)
        levels = jax.lax.select_n(values, *[jnp.full(values.shape, level, scale.dtype) for level in NF4])
    repeated = jnp.repeat(scale, levels.shape[axis] // scale.shape[axis], axis)
    return (levels.astype(scale.dtype) * repeated).astype(dtype)


def packed(values: Array, axis: int) -> Array:
    """Returns 4-bit values, int4 or uint4, packed two to a uint8: entries 2i and 2i + 1 along `axis` go to entry i."""
    halves = values.astype(jnp.int8).astype(jnp.uint8) & 15
    lower, upper = (jax.lax.slice_in_dim(halves, start, None, 2, axis) for start in (0, 1))
    return lower | upper << 4


def unpacked(values: Array, axis: int) -> Array:
    """Returns uint8 values 0..15, two from each uint8; the inverse of `packed`."""
    shape = list(values.shape)
    shape[axis] *= 2
    return jnp.stack([values & 15, values >> 4], axis + 1).reshape(shape)


def _spec(name: str, leaf: ParamSpec, kind: str) -> dict[str, ParamSpec]:
    shape, scales, inputs = list(leaf.shape), list(leaf.shape), [1 + axis for axis in MATRICES[name]]
    if kind == "int8":
        for axis in inputs:
            scales[axis] = 1
    else:
        last = inputs[-1]
        if shape[last] % 2:
            raise ValueError(f"LoRA.base = {kind!r} puts two inputs in a byte, and {name!r} has {shape[last]}")
        scales[last] //= math.gcd(shape[last], GROUP)
        shape[last] //= 2
    dtypes, names = ("int8" if kind == "int8" else "uint8", "float32"), _scale_axes(name, scales[1:], leaf.axes[1:])
    return {
        kind: ParamSpec(tuple(shape), jnp.dtype(dtypes[0]), leaf.axes, None),
        "scale": ParamSpec(tuple(scales), jnp.dtype(dtypes[1]), ("layers", *names), None),
    }


def _scale_axes(name: str, sizes: Sequence[int], names: Sequence[str | None]) -> Names:
    """Returns the logical axes of a layer's scales: those of the matrix, but none for inputs that share a scale."""
    last = MATRICES[name][-1]
    return tuple(None if size == 1 or i == last else axis for i, (size, axis) in enumerate(zip(sizes, names)))


def _auto_sharded(fn: Callable[[Any], Any], out: Any, arg: Any) -> Any:
    """Returns fn(arg), sharded as `out`, PartitionSpecs. Inside `fn` the compiler chooses: groups may cross shards."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return fn(arg)
    return jax.sharding.auto_axes(fn, axes=mesh.explicit_axes, out_sharding=out)(arg)
