"""The gated MLP of one new token a row, its norm included, by a Pallas kernel of our own for TPUs: a layer's three
matrices are read once, a block of the MLP's width at a time, while the block before is multiplied. They stay in their
stack, from which blocks are fetched. XLA's products stream a weight at little more than half the memory's rate, and the
norm and the activation are operations of their own beside them. The reference is the decoder's MLP. Compiled for TPUs
and interpreted on CPUs so far; no TPU has run it.
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
from jrl.models.attention.fused import Stacked
from jrl.models.attention.fused_blocks import mlp_block
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
    """Returns down(activation(gate(h)) * up(h)) where h is the norm of x, [B, 1, D].

    Args:
      x: [B, 1, D], the residual stream.
      weights: mlp_norm [layers, D], gate and up [layers, D, F], down [layers, F, D], the latter three as x. D and a
        device's share of F are multiples of `kernels.LANES`.
      plus_one: the norm's scale is stored less 1.
      interpret: the kernel's operations are done by XLA, on any device. For tests.
    """
    leaves, layer = weights
    shard = functools.partial(_shard, activation=activation, eps=eps, plus_one=plus_one, interpret=interpret)
    arrays = (layer, x, leaves["mlp_norm"], leaves["gate"], leaves["up"], leaves["down"])
    rows, wide, narrow = ("batch", None, None), (None, None, "mlp"), (None, "mlp", None)
    # A kernel does not say over which axes of the mesh its result varies.
    return mapped(shard, arrays, ((), rows, (None, None), wide, wide, narrow), rows, summed="mlp", checked=False)


def _shard(
    layer: Array, x: Array, norm: Array, gate: Array, up: Array, down: Array, *,
    activation: Callable[[Array], Array], eps: float, plus_one: bool, interpret: bool,
) -> Array:  # fmt: skip
    """Returns what a device's share of the MLP's width adds."""
    rows, _, width = x.shape
    mlp_width = gate.shape[2]
    block = mlp_block(rows, width, mlp_width, x.dtype.itemsize)
    full_block = pl.BlockSpec((rows, width), lambda step, layer: (0, 0))
    of_width = pl.BlockSpec((None, width, block), lambda step, layer: (layer[0], 0, step))
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
            ],
            out_specs=full_block,
            scratch_shapes=[pltpu.VMEM((rows, width), x.dtype), pltpu.VMEM((rows, width), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((rows, width), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="fused_mlp",
    )
    return jnp.expand_dims(run(layer[None], x[:, 0], norm[:, None], gate, up, down), 1)


# The signature is Pallas's: a reference for each prefetched scalar, input, output and scratch buffer, in their order.
def _kernel(
    layer: Any, x: Any, norm: Any, gate: Any, up: Any, down: Any, out: Any, h: Any, total: Any, *,
    activation: Callable[[Array], Array], eps: float, plus_one: bool,
) -> None:  # fmt: skip
    """Adds what one block of the MLP's width gives to the sum of all.

    Args:
      x, out, h: [B, D]. norm: [1, D]. gate, up: [D, block]. down: [block, D]. total: [B, D] float32.
    """
    step = pl.program_id(0)

    @pl.when(step == 0)
    def begin() -> None:
        h[...] = normed(x[...], norm[...], eps, plus_one)
        total[...] = jnp.zeros_like(total)

    # Rounded where the reference rounds: the learner's log-probs are compared with the sampler's.
    rounded = lambda y: y.astype(h.dtype).astype(jnp.float32)
    gated = rounded(activation(rounded(product(h[...], gate[...])))) * rounded(product(h[...], up[...]))
    total[...] += product(gated.astype(h.dtype), down[...])

    @pl.when(step == pl.num_programs(0) - 1)
    def finish() -> None:
        out[...] = total[...].astype(out.dtype)


def normed(x: Array, scale: Array, eps: float, plus_one: bool) -> Array:
    """Returns `norm.rms_norm` of rows [B, D], as x; inside a kernel."""
    wide, scale = x.astype(jnp.float32), scale.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * (1 + scale if plus_one else scale)).astype(x.dtype)


def product(x: Array, y: Array) -> Array:
    """Returns x y summed into float32, inside a kernel: of bfloat16 in one pass, of float32 in as many as it needs."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(x, y, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
