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
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from jrl.device.row_shares import columns_of_shares
from jrl.device.sharding import SEQUENCE, per_shard
from jrl.models.attention.kernels import block_of, padded_row
from jrl.models.attention.reference import pad_to
from jrl.models.contract import ShareSegments
from jrl.models.remat import PRODUCT, product
from jrl.types import Array


def attend(
    q: Array,
    k: Array,
    v: Array,
    segment: Array | ShareSegments | None,
    *,
    start: Array | None = None,
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
    sinks: Array | None = None,
    interpret: bool = False,
) -> Array:
    """Returns the result of `attention.attend` where a token sees itself and earlier tokens of its segment, to
    rounding, [B, L, H, K]. In bfloat16 queries are rounded once more, after they are scaled.

    Args:
      q: [B, L, H, K]. k, v: [B, J, L, K], where J divides H. Rows are padded internally (kernels.padded_row).
      start: [B] int32, where there are more columns of keys than queries: the column of a row's first query. The
        columns after a row's last query are not read. None: the queries are all of a row's tokens.
      segment: [B, L] int32; the tokens of a segment are adjacent and in order. None: a row is one segment.
        ShareSegments, where the queries are shares of rows and the keys whole rows: k, v [B, J, S L, K].
      scale, cap, sinks: as in the reference.
      window: tokens that a token sees, including itself; None: all.
      interpret: runs the kernel in interpret mode, on any device. For tests.

    Raises: ValueError if there are not as many queries as keys, without `start` or shares; or for segments with
      `start`.
    """
    length, head_dim, columns = q.shape[1], q.shape[3], k.shape[2]
    divided = isinstance(segment, ShareSegments)
    if start is not None and segment is not None:
        raise ValueError("attention='splash' over a cache has no segments: a row is one sequence")
    if columns != length and start is None and not divided:
        raise ValueError(
            f"attention='splash' needs as many keys as queries; got {length} queries and {columns} keys. "
            f"attention='reference' takes them"
        )
    wide, dtype = jnp.promote_types(q.dtype, jnp.float32), q.dtype
    q = (q.astype(wide) * (head_dim**-0.5 if scale is None else scale)).astype(q.dtype)
    blocks = tuple(block_of(rows, head_dim * dtype.itemsize) for rows in (length, columns))
    given = {"q": q, "k": k, "v": v, "segment": segment, "start": start, "sinks": sinks}
    if divided:
        given |= {"segment": segment.segment, "row_segment": segment.row_segment}
    axes = {
        "q": ("batch", None, "heads", None),
        "k": ("batch", "kv_heads", None, None),
        "v": ("batch", "kv_heads", None, None),
        "segment": ("batch", None),
        "row_segment": ("batch", None),
        "start": ("batch",),
        "sinks": ("heads",),
    }
    names = [name for name, x in given.items() if x is not None]

    def shard(*arrays: Array) -> tuple[Array]:
        share = dict(zip(names, arrays))
        build = functools.partial(_build, heads=share["q"].shape[2], blocks=blocks, cap=cap, interpret=interpret)
        if divided:
            kernel = _kernel_of_share(build, length, columns, window)
        else:
            kernel = build(_mask((padded_row(length), padded_row(columns)), window, columns - length))
        k, v, ids = share["k"], share["v"], None
        if "start" in share:
            k, v, ids = jax.vmap(functools.partial(_last_columns, length))(k, v, share["start"])
            ids = (jnp.ones((len(k), padded_row(length)), jnp.int32), _pad(ids, 1))
        elif divided:
            ids = tuple(_pad(share[name], 1) for name in ("segment", "row_segment"))
        elif "segment" in share:
            ids = (_pad(share["segment"], 1),) * 2

        run = _row if dtype == jnp.float32 else _in_one_pass(_row)
        each = jax.vmap(run, in_axes=(None, 0, 0, 0, 0, None))
        # Saved as the backward kernel reads them: norms, rotation and layout are not computed again.
        # For a share only the queries are saved: the layer gathers its row's keys and values again.
        keep = (lambda x: x) if divided else product
        q, k, v = product(_pad(share["q"].swapaxes(1, 2), 2)), keep(_pad(k, 2)), keep(_pad(v, 2))
        out = each(kernel, q, k, v, ids, share.get("sinks"))
        return (out[:, :, :length].swapaxes(1, 2),)

    # The kernel's output type does not say which mesh axes it varies over.
    return per_shard(shard, [given[n] for n in names], [axes[n] for n in names], [axes["q"]], checked=False)[0]


def _last_columns(queries: int, k: Array, v: Array, start: Array) -> tuple[Array, Array, Array]:
    """Returns a row's keys and values [J, M, K], shifted to make the columns of its `queries` the last ones, and which
    columns are the row's, [M] int32. The kernel's mask is fixed when it is compiled: query i sees the columns up to
    M - queries + i."""
    columns = k.shape[1]
    room = columns - queries

    def moved(x: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(jnp.pad(x, ((0, 0), (room, 0), (0, 0))), start, columns, axis=1)

    return moved(k), moved(v), (jnp.arange(columns) >= room - start).astype(jnp.int32)


def _row(
    kernel: kernels.SplashAttentionKernel,
    q: Array,
    k: Array,
    v: Array,
    ids: tuple[Array, Array] | None,
    sinks: Array | None,
) -> Array:
    """Returns attention of one row, [H, L, K] as q. The kernel holds arrays, so it is an argument and not a closure.

    Args:
      ids: segments of queries and of keys; a query sees the keys of its own segment.
    """
    return kernel(q, k, v, None if ids is None else kernels.SegmentIds(*ids), sinks)


def _pad(x: Array, axis: int) -> Array:
    """Returns `x` padded along `axis`. The padding comes last, where no other token sees it."""
    return pad_to(x, axis, padded_row(x.shape[axis]))


def _in_one_pass(fn: Callable[..., Array]) -> Callable[..., Array]:
    """Returns `fn` with products, also in its backward pass, in one pass of bfloat16 summed into float32. A run's
    default precision is "highest", which gives the same bits for two bfloat16 operands but which the kernel's compiler
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


def _kernel_of_share(
    build: Callable[..., kernels.SplashAttentionKernel], length: int, columns: int, window: int | None
) -> kernels.SplashAttentionKernel:
    """Returns the kernel for this device's share of a row: `length` queries, padded, and the row's `columns` keys.
    build: `_build` with its options."""
    shares = columns // length
    padding = ((0, 0), (0, padded_row(length) - length))
    mask = _mask((shares * padded_row(length), padded_row(columns)), window, 0)
    mask.q_sequence = np.pad(columns_of_shares(columns, shares), padding, mode="edge").reshape(-1)
    kernel = build(mask, shares=shares)

    def local_part(name: str, x: Any) -> Any:
        """Returns this share's part of a field that concatenates the shares."""
        axis = 0 if name == "q_sequence" else 1
        if x is None or name not in ("data_next", "mask_next", "block_mask", "q_sequence"):
            return x
        size = x.shape[axis] // shares
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(SEQUENCE) * size, size, axis)

    infos = [info and type(info)(*map(local_part, info._fields, info)) for info in kernel.tree_flatten()[0]]
    return kernels.SplashAttentionKernel.tree_unflatten(kernel.kwargs, infos)


class _BlockPerDistance(masks.Mask):
    """A mask of JAX that depends only on how far a query is from a key, and computes one block for each distance of a
    block's queries from its first key. JAX reads every block on the host: 2^16 blocks of 512 x 512 in a row of 2^17
    tokens, at 2^9 distances. Equal blocks are one array."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.by_distance, self.distinct = {}, {}

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        columns = range(self.shape[1])[index[1]]
        distance = ((self.q_sequence[index[0]] - columns.start).tobytes(), len(columns))
        if distance not in self.by_distance:
            block = super().__getitem__(index)
            self.by_distance[distance] = self.distinct.setdefault((block.shape, block.tobytes()), block)
        return self.by_distance[distance]


class _CausalMask(_BlockPerDistance, masks.CausalMask):
    """Keys up to the query's own."""


class _LocalMask(_BlockPerDistance, masks.LocalMask):
    """Keys of a window that ends at the query's own."""


def _mask(shape: tuple[int, int], window: int | None, before: int) -> _CausalMask | _LocalMask:
    """Returns which keys each query sees, before segments. before: the column of the first query."""
    return _CausalMask(shape, before) if window is None else _LocalMask(shape, (window - 1, 0), before)


def _build(
    mask: _CausalMask | _LocalMask,
    *,
    heads: int,
    blocks: tuple[int, int],
    cap: float | None,
    interpret: bool,
    shares: int = 1,
) -> kernels.SplashAttentionKernel:
    """Returns the kernel for the same mask in every head. blocks: queries and keys of a block. shares: of the mask's
    queries."""
    queries, keys = blocks
    return kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=kernels.BlockSizes(
            block_q=queries,
            block_kv=keys,
            block_kv_compute=keys,
            block_q_dkv=queries,
            block_kv_dkv=keys,
            block_kv_dkv_compute=keys,
            block_q_dq=queries,
            block_kv_dq=keys,
        ),
        head_shards=1,
        q_seq_shards=shares,
        attn_logits_soft_cap=cap,
        residual_checkpoint_name=PRODUCT,  # not recomputed where a layer saves its products
        interpret=interpret,
    )
