"""Muon: orthogonalized momentum for matrices. Embeddings, the output layer, norms and biases take Adam's steps.

An array of the layers is a stack of matrices, [layers, (experts,) inputs.., outputs..]. Each matrix is orthogonalized
separately, with its input axes and its output axes flattened, as optax.contrib.muon does for a list of 2-D leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, PartitionSpec

from jrl.learning.optimizers.contract import Leaf, Optimizer
from jrl.learning.optimizers.settings import OptimizerSettings, check_rates
from jrl.types import Array, PyTree, traced

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the iteration: steep at 0, and singular values end between 0.7 and 1.2


@traced
class Muon(OptimizerSettings):
    """Orthogonalized momentum for the matrices of the layers, Adam for the rest; clipped and scheduled as AdamW."""

    learning_rate: float = 1e-4  # peak, of both
    momentum: float = 0.95  # decay of the gradients' average, used as Nesterov does
    iterations: int = 5  # of Newton-Schulz
    # Dtype of the iterations' products; None: that of the gradient, whose float32 takes a TPU six passes.
    dtype: Literal["bfloat16"] | None = None
    update_rms: float | None = 0.2  # of a matrix's direction; Adam's is near 0.2. None: not fixed, see `direction`
    b1: float = 0.9  # Adam's decay of the first moment
    b2: float = 0.95  # Adam's decay of the second moment
    eps: float = 1e-8  # added to the root of Adam's second moment, and to norms of matrices

    def __post_init__(self) -> None:
        decays = lambda x: 0 <= x < 1
        positive = lambda x: x > 0
        check_rates(self, b1=decays, b2=decays, momentum=decays, eps=positive, update_rms=positive)
        if self.iterations < 1:
            raise ValueError(f"Muon.iterations must be at least 1; got {self.iterations}")


class MuonState(NamedTuple):
    """Momentum of the matrices, and Adam's moments of the other arrays. Each has None where the other has an array."""

    count: Array  # [] int32
    momentum: PyTree
    adam: optax.OptState


def direction(config: Muon, leaves: PyTree) -> optax.GradientTransformation:
    """Returns O1, Muon's direction.

    For a matrix: m <- momentum m + (1 - momentum) g, both corrected for their start at 0; orthogonalize(momentum m +
    (1 - momentum) g); times update_rms sqrt(max(inputs, outputs)), or sqrt(max(1, outputs / inputs)) if update_rms is
    None.

    Source: Jordan 2024 (kellerjordan.github.io/posts/muon), who iterates in bfloat16; update_rms: 2502.16982 section
    2.2. optax.contrib.muon is the same for 2-D leaves, but explicit axes reject its reshapes of sharded stacks.
    """
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    matrices = lambda tree: jax.tree.map(lambda leaf, x: x if leaf.hidden else None, leaves, tree)
    others = lambda tree: jax.tree.map(lambda leaf, x: None if leaf.hidden else x, leaves, tree)

    def init(params: PyTree) -> MuonState:
        zeros = jax.tree.map(jnp.zeros_like, matrices(params))
        return MuonState(jnp.zeros((), jnp.int32), zeros, adam.init(others(params)))

    def update(gradient: PyTree, state: MuonState, params: PyTree) -> tuple[PyTree, MuonState]:
        beta, count, matrix_gradient = config.momentum, state.count + 1, matrices(gradient)
        momentum = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, state.momentum, matrix_gradient)
        nesterov = lambda m, g: beta * m / (1 - beta ** (count + 1)) + (1 - beta) * g / (1 - beta**count)
        orthogonal = jax.tree.map(
            lambda leaf, m, g: None if m is None else direction_of(nesterov(m, g).astype(m.dtype), leaf, config),
            leaves, momentum, matrix_gradient, is_leaf=lambda x: x is None,
        )  # fmt: skip
        adam_steps, moments = adam.update(others(gradient), state.adam, others(params))
        either = lambda a, b: b if a is None else a
        directions = jax.tree.map(either, orthogonal, adam_steps, is_leaf=lambda x: x is None)
        return directions, MuonState(count, momentum, moments)

    return optax.GradientTransformation(init, update)


def direction_of(x: Array, leaf: Leaf, config: Muon) -> Array:
    """Returns the orthogonalized and scaled matrices of a stack, sharded like `x`."""
    inputs = math.prod(x.shape[axis] for axis in leaf.input_axes())
    outputs = math.prod(x.shape[axis] for axis in leaf.output_axes(x.ndim))
    scale = math.sqrt(max(1, outputs / inputs))
    if config.update_rms is not None:
        scale = config.update_rms * math.sqrt(max(inputs, outputs))

    def of_whole(x: Array, eps: Array) -> Array:
        matrices = x.reshape(-1, inputs, outputs)
        return orthogonalize(matrices, iterations=config.iterations, eps=eps, dtype=config.dtype).reshape(x.shape)

    return (scale * by_layer(of_whole, x, leaf.stack, jnp.asarray(config.eps))).astype(x.dtype)


def orthogonalize(x: Array, *, iterations: int, eps: Array | float, dtype: Literal["bfloat16"] | None) -> Array:
    """Returns matrices with the singular vectors of `x` and singular values near 1, [M, inputs, outputs] like `x`.

    X <- X / |X|_F; then, `iterations` times, A = X X^T, X <- a X + (b A + c A A) X, on the side of the shorter axis. A
    matrix of zeros stays zeros.

    Args:
      x: [M, inputs, outputs] float32 or wider. eps: added to the norm.
      dtype: of the iterations; None: that of `x`. The norm has that of `x`.
    """
    (a, b, c), given = COEFFICIENTS, x.dtype
    wide = x.shape[1] > x.shape[2]
    x = jnp.swapaxes(x, 1, 2) if wide else x
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(1, 2), keepdims=True)) + eps)
    x = x.astype(dtype or x.dtype)
    for _ in range(iterations):
        gram = x @ jnp.swapaxes(x, 1, 2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (jnp.swapaxes(x, 1, 2) if wide else x).astype(given)


def by_layer(fn: Callable[..., Array], x: Array, stack: int, *scalars: Array) -> Array:
    """Returns `fn` of a stack of matrices, sharded like `x`, each matrix whole on one device.

    Every device gives its parts of the other devices' layers and takes theirs of its own (all-to-all), and back. Copies
    along an axis that `x` is not sharded over each take a share of the layers, and gather the results. Where the number
    of layers does not divide, there are layers of zeros at the end.

    Args:
      fn: of [layers here, ..] and `scalars`; each layer on its own, with zeros for zeros.
      x: [layers, ..]. stack: its leading axes that count matrices; over those after the first it stays sharded.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types)
    explicit = {name: size for name, size, kind in kinds if kind == AxisType.Explicit}
    if not explicit:
        return fn(x, *scalars)
    sizes = {name: size for name, size in explicit.items() if size > 1}
    spec = jax.typeof(x).sharding.spec
    parts = [() if part is None else part if isinstance(part, tuple) else (part,) for part in spec]
    # Of several axes along one dimension, the parts of the last are neighbors.
    cuts = [(axis, dim) for dim, part in enumerate(parts) for axis in reversed(part) if axis in sizes]
    copies = [axis for axis in sizes if axis not in {axis for axis, _ in cuts}]
    cuts = [(axis, dim) for axis, dim in cuts if dim >= stack]
    layers = x.shape[0]
    padding = -layers % math.prod(sizes[axis] for axis in [*copies, *(axis for axis, _ in cuts)])

    def local(x: Array, *scalars: Array) -> Array:
        x = jnp.pad(x, [(0, padding), *[(0, 0)] * (x.ndim - 1)])
        for axis in copies:
            count = x.shape[0] // sizes[axis]
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * count, count)
        for axis, dim in cuts:
            x = jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=dim, tiled=True)
        x = fn(x, *scalars)
        for axis, dim in reversed(cuts):
            x = jax.lax.all_to_all(x, axis, split_axis=dim, concat_axis=0, tiled=True)
        for axis in reversed(copies):
            x = jax.lax.all_gather(x, axis, tiled=True)
        return x[:layers]

    in_specs = (spec, *[PartitionSpec() for _ in scalars])
    mapped = jax.shard_map(local, in_specs=in_specs, out_specs=spec, axis_names=set(explicit), check_vma=False)
    return mapped(x, *scalars)


def check(config: Muon, leaves: PyTree) -> None:
    """Raises ValueError for a model without matrices of layers."""
    if not any(leaf.hidden for leaf in jax.tree.leaves(leaves)):
        raise ValueError(
            "Muon orthogonalizes the matrices of stacked layers, and this model has none that it knows (a module of "
            "your own names no axes, or every matrix is frozen); use AdamW"
        )


OPTIMIZER = Optimizer(config=Muon, direction=direction, check=check)
