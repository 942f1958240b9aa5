"""Pallas TPU kernel for the experts of one new token per row: the three matrices of each expert that a token goes to
are fetched from the stack of all layers while the previous expert is multiplied.

    y_t = sum over the experts e that any token goes to of weight_te * expert_e(x_t),   weight_te = 0 if t does not

Every such expert multiplies all tokens: a few rows cost a matrix unit as much as one, and nothing is sorted or copied.
XLA's grouped product instead copies all of the layer's experts for every token. The reference is `experts.mix`.
Compiled for TPUs and interpreted on CPUs so far; no TPU has run it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jrl.device.sharding import EXPERT, axis_size, mapped
from jrl.models.attention.fused import Stacked
from jrl.models.attention.fused_blocks import expert_block
from jrl.models.experts import KERNEL_LEAVES, gated
from jrl.models.kernel_ops import product
from jrl.types import Array


def mix(
    h: Array,
    share: Array,
    ids: Array,
    weights: Stacked,
    *,
    activation: Callable[[Array], Array],
    clamp: float | None,
    interpret: bool = False,
) -> Array:
    """Returns the weighted sum of each token's experts, [B, 1, D], without the bias of `down`.

    Args:
      h: [B, 1, D]. share: [B, 1, k], weights of the token's experts. ids: [B, 1, k] int32, the experts.
      weights: expert_gate, expert_up and expert_down, [layers, experts, width, D] each, in h's dtype; biases of the
        first two, [layers, experts, width], or none.
      clamp: as in `Experts`.
      interpret: runs the kernel in interpret mode, on any device. For tests.
    """
    leaves, layer = weights
    shard = functools.partial(_shard, activation=activation, clamp=clamp, interpret=interpret)
    names = [name for name in KERNEL_LEAVES if name in leaves]
    rows = ("batch", None, None)
    axes = [(None, "experts", "mlp", None)[: leaves[name].ndim] for name in names]
    arrays = (layer, h, share, ids, *(leaves[name] for name in names))
    # The kernel's output type does not say which mesh axes it varies over.
    return mapped(shard, arrays, ((), rows, rows, rows, *axes), rows, summed="mlp", checked=False)


def _shard(
    layer: Array, h: Array, share: Array, ids: Array, *weights: Array,
    activation: Callable[[Array], Array], clamp: float | None, interpret: bool,
) -> Array:  # fmt: skip
    """Returns the contribution of a device's experts and of its share of their width. If experts are sharded, it
    computes the gathered tokens of its group of devices and the sums are scattered back."""
    shards = axis_size(EXPERT)
    if shards > 1:
        h, share, ids = (jax.lax.all_gather(x, EXPERT, tiled=True) for x in (h, share, ids))
        ids = ids - jax.lax.axis_index(EXPERT).astype(ids.dtype) * weights[0].shape[1]
    (rows, _, width), (_, count, inner, _) = h.shape, weights[0].shape
    chosen = ids[:, 0, :, None] == jnp.arange(count, dtype=ids.dtype)[None, None]  # [rows, k, experts]
    # Rounded as the reference rounds it: the learner's log-probs are compared with the sampler's.
    weight = jnp.where(chosen, share[:, 0, :, None].astype(h.dtype).astype(jnp.float32), 0).sum(1).T[..., None]
    expert, number = _visits(chosen)
    block = expert_block(rows, width, inner, h.dtype.itemsize)
    read = functools.partial(_read, parts=inner // block)
    full = pl.BlockSpec((rows, width), lambda visit, part, *_: (0, 0))
    matrix = pl.BlockSpec((None, None, block, width), lambda *at: (*read(*at), 0))
    # A kernel cannot read part of a tile, so each block of a bias is a separate array. Copying them is cheap.
    in_blocks = lambda bias: bias[layer].astype(h.dtype).reshape(count, inner // block, 1, block)
    biases = [in_blocks(bias) for bias in weights[3:]]
    bias = pl.BlockSpec((None, None, 1, block), lambda *at: (*read(*at)[1:], 0, 0))
    run = pl.pallas_call(
        functools.partial(_kernel, activation=activation, clamp=clamp),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(len(expert), inner // block),
            in_specs=[
                full,
                pl.BlockSpec((None, rows, 1), lambda visit, part, layer, number, expert: (expert[visit], 0, 0)),
                *([matrix] * 3 + [bias] * len(biases)),
            ],
            out_specs=full,
            scratch_shapes=[pltpu.VMEM((rows, width), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((rows, width), h.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name="fused_experts",
    )
    out = jnp.expand_dims(run(layer[None], number, expert, h[:, 0], weight, *weights[:3], *biases), 1)
    return jax.lax.psum_scatter(out, EXPERT, tiled=True) if shards > 1 else out


def _visits(chosen: Array) -> tuple[Array, Array]:
    """Returns the experts that any token goes to, [visits] int32, and their number, [1]. Visits after the last repeat
    it and do nothing.

    Args:
      chosen: [rows, k, experts], whether the row's token goes to the expert.
    """
    rows, per_token, count = chosen.shape
    visited = chosen.any((0, 1))
    number = visited.sum(dtype=jnp.int32)
    first = jnp.argsort(~visited, stable=True).astype(jnp.int32)  # visited experts first
    visit = jnp.arange(min(count, rows * per_token))
    return first[jnp.minimum(visit, jnp.maximum(number - 1, 0))], number[None]


def _read(visit: Any, part: Any, layer: Any, number: Any, expert: Any, *, parts: int) -> tuple[Any, Any, Any]:
    """Returns the layer, the expert and the block of its width that a visit reads. Visits after the last keep the last
    one's final block: Pallas does not fetch the same block again.

    Args:
      layer, number, expert: the kernel's prefetched scalars.
    """
    return layer[0], expert[visit], jnp.where(visit < number[0], part, parts - 1)


# Pallas fixes the signature: one ref per prefetched scalar, input, output and scratch buffer, in this order.
def _kernel(
    layer: Any, number: Any, expert: Any, x: Any, weight: Any, gate: Any, up: Any, down: Any, *rest: Any,
    activation: Callable[[Array], Array], clamp: float | None,
) -> None:  # fmt: skip
    """Adds the contribution of one block of an expert's width to the sum.

    Args:
      x: [B, D]. weight: [B, 1] float32. gate, up, down: [block, D].
      rest: biases of gate and up [1, block], or none; out [B, D]; total [B, D] float32.
    """
    *biases, out, total = rest
    visit, part = pl.program_id(0), pl.program_id(1)

    @pl.when((visit == 0) & (part == 0))
    def begin() -> None:
        total[...] = jnp.zeros_like(total)

    @pl.when(visit < number[0])
    def add() -> None:
        # Rounded where the reference rounds, except that a clamped gate, the outputs of down and their sums stay
        # float32.
        rounded = lambda y: y.astype(x.dtype).astype(jnp.float32)

        def multiplied(i: int, matrix: Any) -> Array:
            y = rounded(product(x[...], matrix[...], inputs=1))
            return rounded(y + biases[i][...].astype(jnp.float32)) if biases else y

        inner = gated(multiplied(0, gate), multiplied(1, up), lambda y: rounded(activation(y)), clamp)
        # An expert's output for a token that does not go to it may be infinite.
        total[...] += jnp.where(weight[...] == 0, 0, weight[...] * product(inner.astype(x.dtype), down[...]))

    @pl.when((visit == pl.num_programs(0) - 1) & (part == pl.num_programs(1) - 1))
    def finish() -> None:
        out[...] = total[...].astype(out.dtype)
