"""One configurable decoder: pre-norm, rotary, grouped-query attention, gated MLP.

Parameters are a plain tree with stacked layers [num_layers, ...]; the learner scans them. `unstack` gives the same
parameters with layers as a tuple, which a decode loop unrolls. The same functions serve the learner (under jit, mesh
axes explicit) and the sampler (inside shard_map over the batch axes).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jrl.models.attention import attend, rotate
from jrl.models.contract import Cache, Model, ParamSpec
from jrl.sharding import constrain, einsum, gather, take_rows
from jrl.types import Array, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """Shape of a decoder. Hashable: the compile key."""

    vocab_size: int | None = None  # rows of the embedding; None: the tokenizer's
    layers: int = 2
    width: int = 128
    heads: int = 4
    kv_heads: int = 4  # must divide heads
    head_dim: int = 32  # must be even
    mlp_width: int = 384
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    qk_norm: bool = True  # normalise queries and keys a head, as Qwen3 does
    tied: bool = True  # the head is the embedding
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # of matmuls and the cache
    param_dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    remat: Literal["none", "layer"] = "none"  # recompute a layer in the backward pass

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads; got kv_heads={self.kv_heads}, heads={self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding; got {self.head_dim}")


def spec(cfg: Decoder) -> PyTree:
    """Returns the abstract parameter tree of `cfg`."""
    layers, width, dtype = cfg.layers, cfg.width, jnp.dtype(cfg.param_dtype)
    # Variance 1 / fan-in everywhere; what is added to the residual stream is scaled down by its number of additions.
    # Two-digit addition after 200 supervised steps: 24 % right; with 0.02 everywhere, as GPT-2 has it, 4 %.
    inward, added = width**-0.5, (2 * layers) ** -0.5

    def stacked(shape: tuple[int, ...], axes: tuple[str, ...], scale: float | None) -> ParamSpec:
        return ParamSpec((layers, *shape), dtype, ("layers", *axes), scale)

    block = {
        "attention_norm": stacked((width,), ("norm",), None),
        "q": stacked((width, cfg.heads, cfg.head_dim), ("embed", "heads", "head_dim"), inward),
        "k": stacked((width, cfg.kv_heads, cfg.head_dim), ("embed", "kv_heads", "head_dim"), inward),
        "v": stacked((width, cfg.kv_heads, cfg.head_dim), ("embed", "kv_heads", "head_dim"), inward),
        "o": stacked(
            (cfg.heads, cfg.head_dim, width), ("heads", "head_dim", "embed"), (cfg.heads * cfg.head_dim) ** -0.5 * added
        ),
        "mlp_norm": stacked((width,), ("norm",), None),
        "gate": stacked((width, cfg.mlp_width), ("embed", "mlp"), inward),
        "up": stacked((width, cfg.mlp_width), ("embed", "mlp"), inward),
        "down": stacked((cfg.mlp_width, width), ("mlp", "embed"), cfg.mlp_width**-0.5 * added),
    }
    if cfg.qk_norm:
        block["q_norm"] = stacked((cfg.head_dim,), ("head_dim",), None)
        block["k_norm"] = stacked((cfg.head_dim,), ("head_dim",), None)
    tree = {
        "embed": ParamSpec((cfg.vocab_size, width), dtype, ("vocab", "embed"), inward),
        "layers": block,
        "final_norm": ParamSpec((width,), dtype, ("norm",), None),
    }
    if not cfg.tied:
        tree["head"] = ParamSpec((cfg.vocab_size, width), dtype, ("vocab", "embed"), inward)
    return tree


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """Returns x / sqrt(mean(x^2) + eps) * scale over the last axis, computed in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normed * scale.reshape((1,) * (x.ndim - 1) + (-1,)).astype(wide.dtype)).astype(x.dtype)


def forward(
    params: PyTree, tokens: Array, positions: Array, segment: Array | None, cfg: Decoder, cache: Cache | None = None
) -> tuple[Array, Cache | None]:
    """Returns the last hidden states of `tokens`, and the cache with them in it.

    Args:
      params: the tree of `spec`, or of `unstack`.
      tokens, positions: [B, L] int32. Positions count within a token's own sequence.
      segment: [B, L] int32, sequences packed in a row see only themselves; None: one sequence a row.
      cache: keys and values of M columns. The L tokens of a row go to the columns positions[:, 0] .. + L - 1, and a
        query sees the columns up to its own position.

    Returns:
      hidden: [B, L, D] in cfg.dtype, after the final norm. cache: as given, written; None where none was given.
    """
    dtype = jnp.dtype(cfg.dtype)
    # Rows of the table must be whole for a lookup: exchange its vocabulary shards for shards of the width.
    table = constrain(params["embed"], None, "embed_shard").astype(dtype)
    x = constrain(take_rows(table, tokens, ("batch", None, "embed_shard")), "batch", None, None)
    mask = _mask(positions, segment) if cache is None else None

    def block(x: Array, weights: PyTree, k_cache: Array | None, v_cache: Array | None) -> tuple[Array, tuple]:
        y, k_cache, v_cache = _attention(x, weights, positions, mask, k_cache, v_cache, cfg)
        x = x + y
        return x + _mlp(x, weights, cfg), (k_cache, v_cache)

    if cfg.remat == "layer" and cache is None:
        block = jax.checkpoint(block)
    if isinstance(params["layers"], tuple):
        keys, values = [], []
        for i, weights in enumerate(params["layers"]):
            x, (k, v) = block(x, weights, cache and cache.k[i], cache and cache.v[i])
            keys.append(k)
            values.append(v)
        cache = cache and Cache(k=tuple(keys), v=tuple(values))
    elif cache is None:
        x, _ = jax.lax.scan(lambda x, weights: (block(x, weights, None, None)[0], None), x, params["layers"])
    else:
        x, (k, v) = jax.lax.scan(lambda x, xs: block(x, *xs), x, (params["layers"], cache.k, cache.v))
        cache = Cache(k=k, v=v)
    return rms_norm(x, params["final_norm"], cfg.norm_eps), cache


def unembed(params: PyTree, hidden: Array, cfg: Decoder) -> Array:
    """Returns logits [B, L, V], float32 or wider, of hidden [B, L, D]."""
    head = gather(params["embed" if cfg.tied else "head"], "vocab", "embed").astype(hidden.dtype)
    # Summed into wide numbers, not widened afterwards: logits rounded to bfloat16 move log-probs by about 1e-2.
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    return einsum("bld,vd->blv", hidden, head, ("batch", None, "vocab"), wide)


def init_cache(cfg: Decoder, batch: int, length: int) -> Cache:
    """Returns an empty cache of `length` columns, stacked. Create it inside the program that uses it."""
    shape = (cfg.layers, batch, cfg.kv_heads, length, cfg.head_dim)
    zeros = constrain(jnp.zeros(shape, jnp.dtype(cfg.dtype)), None, "batch", "kv_heads", None, None)
    return Cache(k=zeros, v=zeros)


def unstack(params: PyTree, cfg: Decoder) -> PyTree:
    """Returns the same parameters with the layers as a tuple of trees."""
    layers = tuple(jax.tree.map(lambda w, i=i: w[i], params["layers"]) for i in range(cfg.layers))
    return {**params, "layers": layers}


def _mask(positions: Array, segment: Array | None) -> Array:
    column = jnp.arange(positions.shape[1])
    causal = (column[:, None] >= column[None, :])[None]
    if segment is None:
        return constrain(jnp.broadcast_to(causal, (positions.shape[0], *causal.shape[1:])), "batch", None, None)
    return causal & (segment[:, :, None] == segment[:, None, :])


def _attention(
    x: Array, weights: PyTree, positions: Array, mask: Array | None, k_cache: Array, v_cache: Array, cfg: Decoder
) -> tuple[Array, Array, Array]:
    h = rms_norm(x, weights["attention_norm"], cfg.norm_eps)
    dtype = x.dtype
    q = _project(h, weights["q"], "heads", dtype)
    k = _project(h, weights["k"], "kv_heads", dtype)
    v = _project(h, weights["v"], "kv_heads", dtype)
    if cfg.qk_norm:
        q = rms_norm(q, weights["q_norm"], cfg.norm_eps)
        k = rms_norm(k, weights["k_norm"], cfg.norm_eps)
    q, k = rotate(q, positions, cfg.rope_theta), rotate(k, positions, cfg.rope_theta)
    # Heads before columns: one head's keys lie together, and a decode step reads them without a copy.
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    if k_cache is not None:
        k = k_cache = _write(k_cache, k, positions[:, 0])
        v = v_cache = _write(v_cache, v, positions[:, 0])
        mask = jnp.arange(k.shape[2])[None, None, :] <= positions[:, :, None]
    out = attend(q, k, v, mask)
    o = gather(weights["o"], "heads", "head_dim", "embed").astype(dtype)
    return einsum("blhk,hkd->bld", out, o, ("batch", None, None)), k_cache, v_cache


def _project(h: Array, weight: Array, heads: str, dtype: jnp.dtype) -> Array:
    weight = gather(weight, "embed", heads, "head_dim").astype(dtype)
    return einsum("bld,dhk->blhk", h, weight, ("batch", None, heads, None))


def _write(cache: Array, new: Array, start: Array) -> Array:
    """Returns cache [B, J, M, K] with new [B, J, L, K] at the columns from start [B] on."""
    return jax.vmap(lambda c, n, s: jax.lax.dynamic_update_slice_in_dim(c, n, s, 1))(cache, new, start)


def _mlp(x: Array, weights: PyTree, cfg: Decoder) -> Array:
    h = rms_norm(x, weights["mlp_norm"], cfg.norm_eps)
    gate = gather(weights["gate"], "embed", "mlp").astype(x.dtype)
    up = gather(weights["up"], "embed", "mlp").astype(x.dtype)
    down = gather(weights["down"], "mlp", "embed").astype(x.dtype)
    activated = jax.nn.silu(einsum("bld,df->blf", h, gate, ("batch", None, "mlp")))
    product = activated * einsum("bld,df->blf", h, up, ("batch", None, "mlp"))
    return einsum("blf,fd->bld", product, down, ("batch", None, None))


MODEL = Model(spec=spec, forward=forward, unembed=unembed, init_cache=init_cache, unstack=unstack)
