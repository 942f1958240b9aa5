"""Pallas TPU kernel for the queries, keys and values of one new token per row: the norm of the residual stream, the
product with a layer's matrix, which is read in place in the stack of all layers, the norms of queries and keys, and
their rotation. With XLA these are a dozen operations per layer, each of which costs more than its arithmetic. The
reference is the decoder's. Compiled for TPUs and interpreted on CPUs so far; no TPU has run it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jrl.device.sharding import per_shard
from jrl.models.attention.fused import LOW_A, LOW_B, QK_NORM, QKV, Stacked
from jrl.models.attention.fused_blocks import qkv_block
from jrl.models.kernel_ops import normed, product
from jrl.models.shape import Decoder
from jrl.types import Array

# The most rows whose results are stored as [rows, heads, K], as attention reads them: a store for each row and head. Of
# more rows, heads come first, a store for each head: with 64 rows of 48 heads libtpu 0.0.42.1 compiled for 2 minutes.
MOST_STORED = 16


def project(
    x: Array, weights: Stacked, cos: Array, sin: Array, cfg: Decoder, *, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """Returns rotated queries [B, 1, H, K], rotated keys and values [B, 1, J, K]. With an adapter, W + A B
    takes the place of the matrix W.

    Args:
      x: [B, 1, D], the residual stream.
      weights: attention_norm [layers, D]; QKV [layers, D, shares n K], the heads of each share side by side, n =
        (H + 2 J) / shares; QK_NORM [layers, (H + J) / shares, K], or none; the adapter of QKV, or none: A [layers, r,
        D] and B [layers, r, shares n K] (`fused.LOW_AXES`).
      cos, sin: [B, 1, 1, K / 2], of the angle by which every pair rotates.
      interpret: runs the kernel in interpret mode, on any device. For tests.
    """
    leaves, layer = weights
    axes_of = {QK_NORM: (None, None, None), QKV + LOW_A: (None, None, None), QKV + LOW_B: (None, None, "heads")}
    some = {name: leaves[name] for name in axes_of if name in leaves}
    shard = functools.partial(_shard, names=tuple(some), cfg=cfg, interpret=interpret)
    arrays = (layer, x, cos, sin, leaves["attention_norm"], leaves[QKV], *some.values())
    row, angle = ("batch", None, None), ("batch", None, None, None)
    axes = ((), row, angle, angle, (None, None), (None, None, "heads"), *[axes_of[name] for name in some])
    queries, keys = ("batch", None, "heads", None), ("batch", None, "kv_heads", None)
    # The kernel's output type does not say which mesh axes it varies over.
    return per_shard(shard, arrays, axes, (queries, keys, keys), checked=False)


def _shard(
    layer: Array, x: Array, cos: Array, sin: Array, norm: Array, matrix: Array, *some: Array,
    names: tuple[str, ...], cfg: Decoder, interpret: bool,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Returns the queries, keys and values of one device's heads. names: of the leaves `some`."""
    (rows, _, width), head_dim, columns = x.shape, cfg.head_dim, matrix.shape[2]
    shares = head_dim * (cfg.heads + 2 * cfg.kv_heads) // columns
    queries, keys = cfg.heads // shares, cfg.kv_heads // shares
    rank = next((x.shape[1] for name, x in zip(names, some) if name == QKV + LOW_A), 0)
    block = qkv_block(rows, width, (queries, keys), head_dim, x.dtype.itemsize, rank)
    # Both halves of a head are rotated by the same angle, the first with the opposite sign of the sine.
    cos, sin = (z.reshape(rows, -1).astype(jnp.float32) for z in (cos, sin))
    angles = (jnp.concatenate([cos, cos], axis=1), jnp.concatenate([-sin, sin], axis=1))
    full_block = lambda *shape: pl.BlockSpec(shape, lambda step, layer: (0,) * len(shape))
    of_layer = lambda *shape: pl.BlockSpec((None, *shape), lambda step, layer: (layer[0],) + (0,) * len(shape))
    heads_first = rows > MOST_STORED
    results = [(n, rows, head_dim) if heads_first else (rows, n, head_dim) for n in (queries, keys, keys)]
    run = pl.pallas_call(
        functools.partial(
            _kernel, names=names, queries=queries, keys=keys, eps=cfg.norm_eps, plus_one=cfg.norm == "rms_plus_one"
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(width // block,),
            in_specs=[
                full_block(rows, width), full_block(rows, head_dim), full_block(rows, head_dim), of_layer(1, width),
                pl.BlockSpec((None, block, columns), lambda step, layer: (layer[0], step, 0)),
                *[of_layer(*x.shape[1:]) for x in some],
            ],
            out_specs=[full_block(*shape) for shape in results],
            scratch_shapes=[
                pltpu.VMEM((width // block, rows, block), x.dtype), pltpu.VMEM((rows, columns), jnp.float32),
                *([pltpu.VMEM((rows, rank), x.dtype)] if rank else []),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(shape, x.dtype) for shape in results],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="fused_qkv",
    )  # fmt: skip
    qkv = run(layer[None], x[:, 0], *angles, norm[:, None], matrix, *some)
    return tuple(jnp.expand_dims(y.swapaxes(0, 1) if heads_first else y, 1) for y in qkv)


# Pallas fixes the signature: one ref per prefetched scalar, input, output and scratch buffer, in this order.
def _kernel(
    layer: Any, x: Any, cos: Any, sin: Any, norm: Any, matrix: Any, *rest: Any,
    names: tuple[str, ...], queries: int, keys: int, eps: float, plus_one: bool,
) -> None:  # fmt: skip
    """Adds the contribution of one block of the stream to all heads; after the last block, norms and rotates them.

    Args:
      x: [B, D]. cos, sin: [B, K]. norm: [1, D]. matrix: [block, n K].
      rest: those of `names`: scale [H + J, K] where queries and keys have norms, A [r, D] and B [r, n K] where they
        have an adapter; q [B, H, K]; k, v [B, J, K], or heads first; h [D / block, B, block]; total [B, n K] float32;
        with an adapter x A [B, r].
    """
    some, (q, k, v, h, total, *low) = dict(zip(names, rest)), rest[len(names) :]
    step, block, head_dim = pl.program_id(0), h.shape[2], q.shape[2]
    of_head = lambda i: i if x.shape[0] > MOST_STORED else (slice(None), i)

    @pl.when(step == 0)
    def begin() -> None:
        stream = normed(x[...], norm[...], eps, plus_one)
        for i in range(h.shape[0]):
            h[i] = stream[:, i * block : (i + 1) * block]
        total[...] = jnp.zeros_like(total)
        if low:
            low[0][...] = product(stream, some[QKV + LOW_A][...], inputs=1).astype(h.dtype)

    total[...] += product(h[step], matrix[...])

    @pl.when(step == pl.num_programs(0) - 1)
    def finish() -> None:
        for i in range(queries + 2 * keys):
            columns = slice(i * head_dim, (i + 1) * head_dim)
            head = total[:, columns].astype(q.dtype)  # rounded like the reference's product
            if low:
                head += product(low[0][...], some[QKV + LOW_B][:, columns]).astype(q.dtype)
            if i >= queries + keys:
                v[of_head(i - queries - keys)] = head
                continue
            if QK_NORM in some:
                head = normed(head, some[QK_NORM][i : i + 1, :], eps, plus_one)
            wide = head.astype(jnp.float32)
            rotated = (wide * cos[...] + pltpu.roll(wide, head_dim // 2, 1) * sin[...]).astype(q.dtype)
            if i < queries:
                q[of_head(i)] = rotated
            else:
                k[of_head(i - queries)] = rotated
