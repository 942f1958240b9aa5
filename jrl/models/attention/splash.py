"""Attention by JAX's Pallas kernel for TPUs, "splash": the scores of one block of queries and keys exist at a time, in
the core's memory, and blocks that the causal mask or a window leaves empty are skipped. The reference is
`attention.attend`. So far it is compiled for TPUs and interpreted on CPUs; no TPU has run it.

Source: jax.experimental.pallas.ops.tpu.splash_attention; the running softmax is that of FlashAttention (2205.14135).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from jrl.device.sharding import per_shard
from jrl.models.attention.kernels import block_of, padded_length
from jrl.models.attention.reference import pad_to
from jrl.types import Array


def attend(
    q: Array,
    k: Array,
    v: Array,
    segment: Array | None,
    *,
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
    sinks: Array | None = None,
    interpret: bool = False,
) -> Array:
    """Returns the result of `attention.attend` where a token sees itself and earlier tokens of its segment, to
    rounding, [B, L, H, K]. In bfloat16 queries are rounded once more, after they are scaled.

    Args:
      q: [B, L, H, K]. k, v: [B, J, L, K], where J divides H. A row is padded to a multiple of 128 tokens inside.
      segment: [B, L] int32; the tokens of a segment are adjacent and in order. None: a row is one segment.
      scale, cap, sinks: as in the reference.
      window: tokens that a token sees, including itself; None: all.
      interpret: XLA runs the kernel's operations, on any device. For tests.

    Raises: ValueError where there are not as many queries as keys.
    """
    length, head_dim = q.shape[1], q.shape[3]
    if k.shape[2] != length:
        raise ValueError(
            f"attention='splash' needs as many keys as queries; got {length} queries and {k.shape[2]} keys. "
            f"attention='reference' takes them"
        )
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q = (q.astype(wide) * (head_dim**-0.5 if scale is None else scale)).astype(q.dtype)
    given = {"q": q, "k": k, "v": v, "segment": segment, "sinks": sinks}
    axes = {
        "q": ("batch", None, "heads", None),
        "k": ("batch", "kv_heads", None, None),
        "v": ("batch", "kv_heads", None, None),
        "segment": ("batch", None),
        "sinks": ("heads",),
    }
    names = [name for name, x in given.items() if x is not None]

    def shard(*arrays: Array) -> tuple[Array]:
        share = dict(zip(names, arrays))
        kernel = _kernel(share["q"].shape[2], length, window, cap, interpret)

        run = _row if q.dtype == jnp.float32 else _in_one_pass(_row)
        ids = _pad(share["segment"], 1) if "segment" in share else None
        heads_first = _pad(share["q"].swapaxes(1, 2), 2)
        each = jax.vmap(run, in_axes=(None, 0, 0, 0, 0, None))
        out = each(kernel, heads_first, _pad(share["k"], 2), _pad(share["v"], 2), ids, share.get("sinks"))
        return (out[:, :, :length].swapaxes(1, 2),)

    # A kernel does not say over which axes of the mesh its result varies.
    return per_shard(shard, [given[n] for n in names], [axes[n] for n in names], [axes["q"]], checked=False)[0]


def _row(
    kernel: kernels.SplashAttentionKernel, q: Array, k: Array, v: Array, segment: Array | None, sinks: Array | None
) -> Array:
    """Returns attention of one row, [H, L, K] as q. The kernel holds arrays, so it is an argument and not a closure."""
    return kernel(q, k, v, None if segment is None else kernels.SegmentIds(segment, segment), sinks)


def _pad(x: Array, axis: int) -> Array:
    """Returns `x` padded along `axis`. The padding comes last, where no other token sees it."""
    return pad_to(x, axis, padded_length(x.shape[axis]))


def _in_one_pass(fn: Callable[..., Array]) -> Callable[..., Array]:
    """Returns `fn` with products, also in its backward pass, in one pass of bfloat16 summed into float32. A run asks
    for "highest" precision, which gives the same bits for two bfloat16 operands but which the kernel's compiler
    rejects."""
    precision = functools.partial(jax.default_matmul_precision, "default")

    @jax.custom_vjp
    def run(*args: Any) -> Array:
        with precision():
            return fn(*args)

    def forward(*args: Any) -> tuple[Array, Callable[..., Any]]:
        with precision():
            return jax.vjp(fn, *args)

    def backward(back: Callable[..., Any], gradient: Array) -> Any:
        with precision():
            return back(gradient)

    run.defvjp(forward, backward)
    return run


def _kernel(
    heads: int, length: int, window: int | None, cap: float | None, interpret: bool
) -> kernels.SplashAttentionKernel:
    """Returns the kernel of one padded row of `length` tokens."""
    block, square = block_of(length), (padded_length(length), padded_length(length))
    mask = masks.CausalMask(square) if window is None else masks.LocalMask(square, (window - 1, 0), offset=0)
    return kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=kernels.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=cap,
        interpret=interpret,
    )
