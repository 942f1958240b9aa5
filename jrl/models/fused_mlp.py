"""Pallas TPU kernel for the gated MLP of one new token per row, norm included: a layer's three matrices are read once
from the stack of all layers, a block of the MLP's width at a time, while the previous block is multiplied. XLA's
products stream weights at little more than half of the memory bandwidth, and its norm and activation are separate
operations. The reference is the decoder's MLP. Compiled for TPUs and interpreted on CPUs so far; no TPU has run it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jrl.device.sharding import mapped
from jrl.models.attention.fused import LOW_A, LOW_AXES, LOW_B, MLP_LEAVES, Stacked
from jrl.models.attention.fused_blocks import mlp_block
from jrl.models.kernel_ops import normed, product
from jrl.types import Array


def mlp(
    x: Array,
    weights: Stacked,
    *,
    activation: Callable[[Array], Array],
    eps: float,
    plus_one: bool,
    interpret: bool = False,
) -> Array:
    """Returns down(activation(gate(h)) * up(h)) where h is the norm of x, [B, 1, D]. With adapters, W + A B takes the
    place of every matrix W.

    Args:
      x: [B, 1, D], the residual stream.
      weights: mlp_norm [layers, D], gate and up [layers, D, F], down [layers, F, D], the last three in x's dtype. D and
        a device's share of F are multiples of `kernels.LANES`. Adapters of all three or of none (`fused.LOW_AXES`):
        A [layers, r, inputs] and B [layers, r, outputs].
      plus_one: the norm's scale is stored minus 1.
      interpret: runs the kernel in interpret mode, on any device. For tests.
    """
    leaves, layer = weights
    low = {name + end: LOW_AXES[name][i] for name in MLP_LEAVES[1:] for i, end in enumerate((LOW_A, LOW_B))}
    low = {name: axis for name, axis in low.items() if name in leaves}
    shard = functools.partial(_shard, activation=activation, eps=eps, plus_one=plus_one, interpret=interpret)
    arrays = (layer, x, leaves["mlp_norm"], leaves["gate"], leaves["up"], leaves["down"])
    arrays += tuple(leaves[name] for name in low)
    rows, wide, narrow = ("batch", None, None), (None, None, "mlp"), (None, "mlp", None)
    split = [wide if axis == "mlp" else (None,) * 3 for axis in low.values()]
    axes = ((), rows, (None, None), wide, wide, narrow, *split)
    # The kernel's output type does not say which mesh axes it varies over.
    return mapped(shard, arrays, axes, rows, summed="mlp", checked=False)


def _shard(
    layer: Array, x: Array, norm: Array, gate: Array, up: Array, down: Array, *low: Array,
    activation: Callable[[Array], Array], eps: float, plus_one: bool, interpret: bool,
) -> Array:  # fmt: skip
    """Returns the contribution of a device's share of the MLP's width."""
    rows, _, width = x.shape
    mlp_width = gate.shape[2]
    rank = low[0].shape[1] if low else 0
    block = mlp_block(rows, width, mlp_width, x.dtype.itemsize, rank)
    full_block = pl.BlockSpec((rows, width), lambda step, layer: (0, 0))
    of_width = pl.BlockSpec((None, width, block), lambda step, layer: (layer[0], 0, step))
    low_of_model = pl.BlockSpec((None, rank, width), lambda step, layer: (layer[0], 0, 0))
    low_of_mlp = pl.BlockSpec((None, rank, block), lambda step, layer: (layer[0], 0, step))
    low_scratch = [pltpu.VMEM((rows, rank), dtype) for dtype in (x.dtype, x.dtype, jnp.float32)]
    run = pl.pallas_call(
        functools.partial(_kernel, activation=activation, eps=eps, plus_one=plus_one),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(mlp_width // block,),
            in_specs=[
                full_block,
                pl.BlockSpec((None, 1, width), lambda step, layer: (layer[0], 0, 0)),
                of_width,
                of_width,
                pl.BlockSpec((None, block, width), lambda step, layer: (layer[0], step, 0)),
                *((low_of_model, low_of_mlp, low_of_model, low_of_mlp, low_of_mlp, low_of_model) if low else ()),
            ],
            out_specs=full_block,
            scratch_shapes=[
                pltpu.VMEM((rows, width), x.dtype), pltpu.VMEM((rows, width), jnp.float32),
                *(low_scratch if low else ()),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((rows, width), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="fused_mlp",
    )  # fmt: skip
    return jnp.expand_dims(run(layer[None], x[:, 0], norm[:, None], gate, up, down, *low), 1)


# Pallas fixes the signature: one ref per prefetched scalar, input, output and scratch buffer, in this order.
def _kernel(
    layer: Any, x: Any, norm: Any, gate: Any, up: Any, down: Any, *rest: Any,
    activation: Callable[[Array], Array], eps: float, plus_one: bool,
) -> None:  # fmt: skip
    """Adds the contribution of one block of the MLP's width to the sum.

    Args:
      x: [B, D]. norm: [1, D]. gate, up: [D, block]. down: [block, D].
      rest: A [r, inputs] and B [r, outputs] of gate, up and down where they have adapters; out, h [B, D]; total [B, D]
        float32; and with adapters h A of gate and of up [B, r], and the sum of down's [B, r] float32.
    """
    low = rest[: len(rest) - 6] if len(rest) > 3 else ()
    out, h, total, *low_sums = rest[len(low) :]
    step = pl.program_id(0)

    @pl.when(step == 0)
    def begin() -> None:
        h[...] = normed(x[...], norm[...], eps, plus_one)
        total[...] = jnp.zeros_like(total)
        if low:
            for i in (0, 1):
                low_sums[i][...] = product(h[...], low[2 * i][...], inputs=1).astype(h.dtype)
            low_sums[2][...] = jnp.zeros_like(low_sums[2])

    # Rounded where the reference rounds: the sampler's log-probs are compared with the learner's.
    rounded = lambda y: y.astype(h.dtype).astype(jnp.float32)

    def multiplied(i: int, matrix: Any) -> Array:
        y = rounded(product(h[...], matrix[...]))
        return rounded(y + rounded(product(low_sums[i][...], low[2 * i + 1][...]))) if low else y

    gated = (rounded(activation(multiplied(0, gate))) * multiplied(1, up)).astype(h.dtype)
    total[...] += product(gated, down[...])
    if low:
        low_sums[2][...] += product(gated, low[4][...], inputs=1)

    @pl.when(step == pl.num_programs(0) - 1)
    def finish() -> None:
        y = total[...] + product(low_sums[2][...].astype(h.dtype), low[5][...]) if low else total[...]
        out[...] = y.astype(out.dtype)
