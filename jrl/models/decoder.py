"""One configurable decoder: grouped-query attention and an MLP between norms, with the options that published
families need, each defined once. The defaults are ours: pre-norm, rotary, normalised heads, gated MLP, tied head.

Parameters are a plain tree with stacked layers [num_layers, ...]; the learner scans them. `unstack` gives the same
parameters with layers as a tuple, which a decode loop unrolls. The same functions serve the learner (under jit, mesh
axes explicit) and the sampler (inside shard_map over the batch axes).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jrl.models import experts
from jrl.models.attention import attend
from jrl.models.cached_attention import attend_cached, edges
from jrl.models.contract import ADAPTER, Cache, Model, ParamSpec, axes, init
from jrl.models.experts import Experts
from jrl.models.rope import LinearRope, Llama3Rope, YarnRope, amplitude, frequencies, rotate, turns
from jrl.sharding import TRAIN, constrain, einsum, gather, take_rows
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
    rope_theta: float = 10_000.0  # base of the wavelengths
    rope: LinearRope | Llama3Rope | YarnRope | None = None  # how wavelengths are stretched
    rotary_dim: int | None = None  # entries of a head that are rotated, the first ones; 0: none. None: all
    rotary_layers: tuple[bool, ...] = (True,)  # which layers rotate: a cycle
    learned_positions: int | None = None  # rows of a table added to the embedding; no longer sequence can be read
    window: int | None = None  # tokens a windowed layer sees, its own included
    window_layers: tuple[bool, ...] = (True,)  # which layers are windowed, where window is given: a cycle
    window_rope_theta: float | None = None  # base in windowed layers, not stretched; None: as in the others
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"  # rms_plus_one: the weight is counted from 1, as in Gemma
    norm_place: Literal["before", "after", "both"] = "before"  # of attention and MLP; after: before it is added
    norm_eps: float = 1e-6
    qk_norm: Literal["head", "all"] | None = "head"  # of queries and keys: each head as Qwen3, or all as OLMo 2
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's last product
    query_scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    attention_cap: float | None = None  # scores x become cap * tanh(x / cap)
    parallel: bool = False  # attention and MLP read the same input, as in GPT-NeoX
    mlp: Literal["gated", "plain"] = "gated"
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    mlp_bias: bool = False
    experts: Experts | None = None  # of sparse layers, which have them instead of the MLP; None: no layer is sparse
    embed_scale: float | None = None  # of the embedding, on its way in
    tied: bool = True  # the head is the embedding
    logit_cap: float | None = None  # logits x become cap * tanh(x / cap)
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # of matmuls and the cache
    param_dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    remat: Literal["none", "layer"] = "none"  # recompute a layer in the backward pass
    attention_block: int | None = None  # queries whose scores exist at once, computed again in the backward pass

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads; got kv_heads={self.kv_heads}, heads={self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding; got {self.head_dim}")
        if not 0 <= self.rotated <= self.head_dim or self.rotated % 2:
            raise ValueError(f"rotary_dim must be even and at most head_dim={self.head_dim}; got {self.rotary_dim}")
        if self.attention_block is not None and self.attention_block < 1:
            raise ValueError(f"attention_block must be at least 1; got {self.attention_block}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1; got {self.window}")
        if not self.rotary_layers or not self.window_layers:
            raise ValueError("rotary_layers and window_layers are cycles and need at least one entry")

    @property
    def rotated(self) -> int:
        """Entries of a head that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def windowed(self, layer: int) -> bool:
        return self.window is not None and self.window_layers[layer % len(self.window_layers)]

    def rotates(self, layer: int) -> bool:
        return self.rotated > 0 and self.rotary_layers[layer % len(self.rotary_layers)]

    def sparse(self, layer: int) -> bool:
        return self.experts is not None and self.experts.sparse(layer)


class Kind(NamedTuple):
    """What sets a layer apart from the others: a bool where all agree, else a traced [] bool."""

    windowed: bool | Array
    rotates: bool | Array


class Turns(NamedTuple):
    """(cos, sin) of rotated pairs, [B, L, 1, rotated / 2] each."""

    far: tuple[Array, Array]
    near: tuple[Array, Array]  # in windowed layers


def spec(cfg: Decoder) -> PyTree:
    """Returns the abstract parameter tree of `cfg`."""
    layers, width, dtype = cfg.layers, cfg.width, jnp.dtype(cfg.param_dtype)
    # Variance 1 / fan-in everywhere; what is added to the residual stream is scaled down by its number of additions.
    # Two-digit addition after 200 supervised steps: 24 % right; with 0.02 everywhere, as GPT-2 has it, 4 %.
    inward, added = width**-0.5, (2 * layers) ** -0.5

    def stacked(shape: tuple[int, ...], axes: tuple[str, ...], scale: float | None, count: int = layers) -> ParamSpec:
        return ParamSpec((count, *shape), dtype, ("layers", *axes), scale)

    kv = (cfg.kv_heads, cfg.head_dim)
    block = {
        "q": stacked((width, cfg.heads, cfg.head_dim), ("embed", "heads", "head_dim"), inward),
        "k": stacked((width, *kv), ("embed", "kv_heads", "head_dim"), inward),
        "v": stacked((width, *kv), ("embed", "kv_heads", "head_dim"), inward),
        "o": stacked(
            (cfg.heads, cfg.head_dim, width), ("heads", "head_dim", "embed"), (cfg.heads * cfg.head_dim) ** -0.5 * added
        ),
    }
    sparse = sum(map(cfg.sparse, range(layers)))
    if dense := layers - sparse:
        block["up"] = stacked((width, cfg.mlp_width), ("embed", "mlp"), inward, dense)
        block["down"] = stacked((cfg.mlp_width, width), ("mlp", "embed"), cfg.mlp_width**-0.5 * added, dense)
        if cfg.mlp == "gated":
            block["gate"] = stacked((width, cfg.mlp_width), ("embed", "mlp"), inward, dense)
        if cfg.mlp_bias:
            for name in ("gate", "up") if cfg.mlp == "gated" else ("up",):
                block[f"{name}_bias"] = stacked((cfg.mlp_width,), ("mlp",), 0.0, dense)
            block["down_bias"] = stacked((width,), ("norm",), 0.0, dense)
    if sparse:
        count, own = cfg.experts.count, cfg.experts.width
        block["router"] = stacked((width, count), ("embed", "experts"), inward, sparse)
        for name in ("expert_gate", "expert_up"):
            block[name] = stacked((count, width, own), ("experts", "embed", "mlp"), inward, sparse)
        block["expert_down"] = stacked((count, own, width), ("experts", "mlp", "embed"), own**-0.5 * added, sparse)
    identity = 0.0 if cfg.norm == "rms_plus_one" else None
    for name in norms(cfg):
        block[name] = stacked((width,), ("norm",), identity)
        if cfg.norm == "layer":
            block[f"{name}_bias"] = stacked((width,), ("norm",), 0.0)
    if cfg.qk_norm == "head":
        block["q_norm"] = stacked((cfg.head_dim,), ("head_dim",), identity)
        block["k_norm"] = stacked((cfg.head_dim,), ("head_dim",), identity)
    elif cfg.qk_norm == "all":
        block["q_norm"] = stacked((cfg.heads, cfg.head_dim), ("heads", "head_dim"), identity)
        block["k_norm"] = stacked(kv, ("kv_heads", "head_dim"), identity)
    if cfg.qkv_bias:
        block["q_bias"] = stacked((cfg.heads, cfg.head_dim), ("heads", "head_dim"), 0.0)
        block["k_bias"] = stacked(kv, ("kv_heads", "head_dim"), 0.0)
        block["v_bias"] = stacked(kv, ("kv_heads", "head_dim"), 0.0)
    if cfg.output_bias:
        block["o_bias"] = stacked((width,), ("norm",), 0.0)
    tree = {
        "embed": ParamSpec((cfg.vocab_size, width), dtype, ("vocab", "embed"), inward),
        "layers": block,
        "final_norm": ParamSpec((width,), dtype, ("norm",), identity),
    }
    if cfg.norm == "layer":
        tree["final_norm_bias"] = ParamSpec((width,), dtype, ("norm",), 0.0)
    if cfg.learned_positions is not None:
        tree["positions"] = ParamSpec((cfg.learned_positions, width), dtype, (None, "embed"), inward)
    if not cfg.tied:
        tree["head"] = ParamSpec((cfg.vocab_size, width), dtype, ("vocab", "embed"), inward)
    return tree


MLP_LEAVES = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")  # of a layer that is not sparse


def layers_of(cfg: Decoder, name: str) -> tuple[int, ...]:
    """Returns which layers have a leaf of that name: what its first dimension counts."""
    if name in experts.LEAVES:
        return tuple(filter(cfg.sparse, range(cfg.layers)))
    if name in MLP_LEAVES:
        return tuple(i for i in range(cfg.layers) if not cfg.sparse(i))
    return tuple(range(cfg.layers))


def norms(cfg: Decoder) -> tuple[str, ...]:
    """Returns the names of a layer's norms of the residual stream."""
    before, after = ("attention_norm", "mlp_norm"), ("attention_out_norm", "mlp_out_norm")
    return {"before": before, "after": after, "both": before + after}[cfg.norm_place]


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """Returns x / sqrt(mean(x^2) + eps) * scale over the last axis, computed in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normed * scale.reshape((1,) * (x.ndim - 1) + (-1,)).astype(wide.dtype)).astype(x.dtype)


def layer_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    """Returns (x - mean) / sqrt(variance + eps) * scale + bias over the last axis, computed in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    scale, bias = (w.reshape((1,) * (x.ndim - 1) + (-1,)).astype(wide.dtype) for w in (scale, bias))
    return (normed * scale + bias).astype(x.dtype)


def _norm(x: Array, weights: PyTree, name: str, cfg: Decoder) -> Array:
    if cfg.norm == "layer":
        return layer_norm(x, weights[name], weights[f"{name}_bias"], cfg.norm_eps)
    return rms_norm(x, _weight(weights[name], cfg), cfg.norm_eps)


def _weight(scale: Array, cfg: Decoder) -> Array:
    if cfg.norm != "rms_plus_one":
        return scale
    return 1 + scale.astype(jnp.promote_types(scale.dtype, jnp.float32))


def forward(
    params: PyTree, tokens: Array, positions: Array, segment: Array | None, cfg: Decoder, cache: Cache | None = None
) -> tuple[Array, Cache | None]:
    """Returns the last hidden states of `tokens`, and the cache with them in it.

    Args:
      params: the tree of `spec`, or of `unstack`.
      tokens, positions: [B, L] int32. Positions count within a token's own sequence.
      segment: [B, L] int32, sequences packed in a row see only themselves; [B, L, 2] int32, a token's own segment and
        the other one it sees, or its own twice; None: one sequence a row.
      cache: keys and values of M columns. The L tokens of a row go to the columns positions[:, 0] .. + L - 1, and a
        query sees the columns up to its own position.

    Returns:
      hidden: [B, L, D] in cfg.dtype, after the final norm. cache: as given, written; None where none was given.
    """
    hidden, cache, _ = _run(params, tokens, positions, segment, cfg, cache)
    return hidden, cache


def routed(
    params: PyTree, tokens: Array, positions: Array, segment: Array | None, cfg: Decoder
) -> tuple[Array, Array | None]:
    """Returns the last hidden states as `forward` does, and the logits of every router on the way.

    Returns:
      logits: [sparse layers, B, L, experts] float32 or wider; None where no layer is sparse.
    """
    hidden, _, logits = _run(params, tokens, positions, segment, cfg, None, routed=True)
    return hidden, logits


def _run(
    params: PyTree,
    tokens: Array,
    positions: Array,
    segment: Array | None,
    cfg: Decoder,
    cache: Cache | None,
    *,
    routed: bool = False,
) -> tuple[Array, Cache | None, Array | None]:
    """Returns hidden states, the cache, and the routers' logits where they are asked for."""
    dtype = jnp.dtype(cfg.dtype)
    # Rows of the table must be whole for a lookup: exchange its vocabulary shards for shards of the width.
    table = constrain(params["embed"].astype(dtype), None, "embed_shard")
    x = constrain(take_rows(table, tokens, ("batch", None, "embed_shard")), "batch", None, None)
    if cfg.embed_scale is not None:
        x = x * jnp.asarray(cfg.embed_scale, dtype)
    if cfg.learned_positions is not None:
        table = constrain(params["positions"].astype(dtype), None, "embed_shard")
        x = x + constrain(take_rows(table, positions, ("batch", None, "embed_shard")), "batch", None, None)
    mask = visible(positions, segment) if cache is None else None
    turned = _turns(positions, cfg)

    def block(
        kind: Kind, x: Array, weights: PyTree, own: Cache | None = None, at: Array | None = None
    ) -> tuple[Array, Cache | None, Array | None]:
        before, after = cfg.norm_place != "after", cfg.norm_place != "before"
        h = _norm(x, weights, "attention_norm", cfg) if before else x
        y, own = _attention(h, weights, kind, positions, turned, mask, own, at, cfg)
        between = x if cfg.parallel else x + (_norm(y, weights, "attention_out_norm", cfg) if after else y)
        h = _norm(between, weights, "mlp_norm", cfg) if before else between
        if "router" in weights:
            z, logits = experts.mix(h, weights, cfg.experts, ACTIVATIONS[cfg.activation])
        else:
            z, logits = _mlp(h, weights, cfg), None
        if cfg.parallel:
            between = x + (_norm(y, weights, "attention_out_norm", cfg) if after else y)
        x = between + (_norm(z, weights, "mlp_out_norm", cfg) if after else z)
        return x, own, logits if routed else None

    kinds = [Kind(cfg.windowed(i), cfg.rotates(i)) for i in range(cfg.layers)]
    # Where layers differ the scan carries along which kind each is.
    vary = tuple(name for name in Kind._fields if len({getattr(kind, name) for kind in kinds}) > 1)
    flags = {name: jnp.array([getattr(kind, name) for kind in kinds]) for name in vary}
    kind_of = lambda flags: kinds[0]._replace(**flags)

    def layer(kind: Kind) -> Callable[..., tuple[Array, Cache | None, Array | None]]:
        run = functools.partial(block, kind)
        return jax.checkpoint(run) if cfg.remat == "layer" and cache is None else run

    found = []  # of each scan, or layer
    if isinstance(params["layers"], tuple):
        caches = []
        for i, weights in enumerate(params["layers"]):
            x, own, logits = layer(kinds[i])(x, weights, cache and cache[i])
            caches.append(own)
            found.append(None if logits is None else jnp.expand_dims(logits, 0))
        cache = cache and tuple(caches)
    else:
        # The cache is carried and written in place. As inputs and outputs of the scan there would be two of it.
        def step(carry: tuple[Array, Cache | None], xs: tuple) -> tuple[tuple[Array, Cache | None], Array | None]:
            (x, cache), (weights, flags, i) = carry, xs
            x, cache, logits = layer(kind_of(flags))(x, weights, cache, i)
            return (x, cache), logits

        for start, stop in _stretches(cfg):
            some = {name: flag[start:stop] for name, flag in flags.items()}
            stack = _some_layers(params["layers"], cfg, start, stop)
            (x, cache), logits = jax.lax.scan(step, (x, cache), (stack, some, jnp.arange(start, stop)))
            found.append(logits)
    found = [logits for logits in found if logits is not None]
    return _norm(x, params, "final_norm", cfg), cache, jnp.concatenate(found) if found else None


def unembed(params: PyTree, hidden: Array, cfg: Decoder) -> Array:
    """Returns logits [B, L, V], float32 or wider, of hidden [B, L, D]."""
    head = gather(params["embed" if cfg.tied else "head"].astype(hidden.dtype), "vocab", "embed")
    # Summed into wide numbers, not widened afterwards: logits rounded to bfloat16 move log-probs by about 1e-2.
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = einsum("bld,vd->blv", hidden, head, ("batch", None, "vocab"), wide)
    return logits if cfg.logit_cap is None else cfg.logit_cap * jnp.tanh(logits / cfg.logit_cap)


def init_cache(cfg: Decoder, batch: int, length: int) -> Cache:
    """Returns an empty cache of `length` columns in one block, stacked. Create it inside the program that uses it.

    Raises: ValueError for more columns than there are learned positions.
    """
    check_length(cfg, length)
    shape = (cfg.layers, batch, cfg.kv_heads, length, cfg.head_dim)
    zeros = constrain(jnp.zeros(shape, jnp.dtype(cfg.dtype)), None, "batch", "kv_heads", None, None)
    return Cache(k=(zeros,), v=(zeros,))


def cut_cache(cache: Cache, length: int) -> Cache:
    """Returns a stacked cache of one block in the blocks that `length` columns have; some of them are empty where it
    has fewer."""
    starts = (0, *edges(length)[:-1])
    cut = lambda whole: tuple(whole[..., a:b, :] for a, b in zip(starts, edges(length)))
    return Cache(k=cut(*cache.k), v=cut(*cache.v))


def check_length(cfg: Decoder, length: int) -> None:
    """Raises ValueError where a sequence of `length` tokens is longer than the table of positions."""
    if cfg.learned_positions is not None and length > cfg.learned_positions:
        raise ValueError(f"{length} tokens are more than the {cfg.learned_positions} positions that this model learned")


def check_divides(cfg: Decoder, mesh: Any) -> None:
    """Raises ValueError naming the field of Decoder that does not divide over the mesh."""
    fields = {"heads": "heads", "kv_heads": "kv_heads", "mlp": "mlp_width", "vocab": "vocab_size", "embed": "width"}
    sizes = [(name, f"Decoder.{field}", getattr(cfg, field)) for name, field in fields.items()]
    if cfg.experts is not None:
        sizes.append(("mlp", "Experts.width", cfg.experts.width))
    for name, field, size in sizes:
        axis = TRAIN[name]
        if size % mesh.shape[axis]:
            raise ValueError(f"{field} = {size} does not divide over MeshShape.{axis} = {mesh.shape[axis]}")


def unstack(params: PyTree, cfg: Decoder) -> PyTree:
    """Returns the same parameters with the layers as a tuple of trees."""
    one = lambda w, rows: w[rows[0]]
    layers = tuple(_rows(params["layers"], cfg, range(i, i + 1), one) for i in range(cfg.layers))
    return {**params, "layers": layers}


def ready(params: PyTree, cfg: Decoder) -> tuple[PyTree, PyTree]:
    """Returns the parameters as a decode loop reads them, and their logical axes: matrices already in the dtype that
    every use casts them to, so that no wider ones are gathered."""
    narrow = lambda tree, names: {k: v.astype(cfg.dtype) if k in names else v for k, v in tree.items()}
    matrices = ("q", "k", "v", "o", "gate", "up", "down", "expert_gate", "expert_up", "expert_down")
    layers = narrow(params["layers"], matrices)
    return {**narrow(params, ("embed", "positions", "head")), "layers": layers}, axes(spec(cfg))


def _stretches(cfg: Decoder) -> list[tuple[int, int]]:
    """Returns (first, last + 1) of every stretch of layers that are all sparse, or all not: what one scan runs over."""
    ends = [i for i in range(1, cfg.layers) if cfg.sparse(i) != cfg.sparse(i - 1)]
    return list(zip([0, *ends], [*ends, cfg.layers]))


def _some_layers(stacked: PyTree, cfg: Decoder, start: int, stop: int) -> PyTree:
    """Returns the leaves of the layers from `start` to `stop`, which have the same, still stacked."""
    if (start, stop) == (0, cfg.layers):
        return stacked
    return _rows(stacked, cfg, range(start, stop), lambda w, rows: w[rows[0] : rows[-1] + 1])


def _rows(stacked: PyTree, cfg: Decoder, layers: range, cut: Callable[[Array, list[int]], Array]) -> PyTree:
    """Returns the leaves that `layers` have, each cut to its rows of them; adapters as what they belong to."""
    found = {}
    for name, leaf in stacked.items():
        if name == ADAPTER:
            found[name] = _rows(leaf, cfg, layers, cut)
        elif rows := [row for row, i in enumerate(layers_of(cfg, name)) if i in layers]:
            found[name] = jax.tree.map(lambda w, rows=rows: cut(w, rows), leaf)
    return found


def visible(positions: Array, segment: Array | None) -> Array:
    """Returns which tokens of its row each token sees, [B, L, L] bool: itself and those before it in its sequence."""
    column = jnp.arange(positions.shape[1])
    causal = (column[:, None] >= column[None, :])[None]
    if segment is None:
        return constrain(jnp.broadcast_to(causal, (positions.shape[0], *causal.shape[1:])), "batch", None, None)
    if segment.ndim == 2:
        return causal & (segment[:, :, None] == segment[:, None, :])
    own, other = segment[..., 0], segment[..., 1]
    return causal & ((own[:, :, None] == own[:, None, :]) | (other[:, :, None] == own[:, None, :]))


def _attention(
    h: Array,
    weights: PyTree,
    kind: Kind,
    positions: Array,
    turned: Turns | None,
    mask: Array | None,
    cache: Cache | None,
    layer: Array | None,
    cfg: Decoder,
) -> tuple[Array, Cache | None]:
    """Returns attention's output, and the cache with the new keys and values in it: of this layer alone, or of all
    layers where `layer` says which this is."""
    q = _multiply("bld,dhk->blhk", h, weights, "q", ("embed", "heads", "head_dim"))
    k = _multiply("bld,dhk->blhk", h, weights, "k", ("embed", "kv_heads", "head_dim"))
    v = _multiply("bld,dhk->blhk", h, weights, "v", ("embed", "kv_heads", "head_dim"))
    q, k, v = _plus(q, weights, "q_bias"), _plus(k, weights, "k_bias"), _plus(v, weights, "v_bias")
    if cfg.qk_norm == "head":
        q = rms_norm(q, _weight(weights["q_norm"], cfg), cfg.norm_eps)
        k = rms_norm(k, _weight(weights["k_norm"], cfg), cfg.norm_eps)
    elif cfg.qk_norm == "all":
        q = _norm_all(q, _weight(weights["q_norm"], cfg), cfg.norm_eps)
        k = _norm_all(k, _weight(weights["k_norm"], cfg), cfg.norm_eps)
    q, k = _rotate(q, turned, kind), _rotate(k, turned, kind)
    # Heads before columns: one head's keys lie together, and a decode step reads them without a copy.
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    if cache is not None:
        cache = Cache(k=_write(cache.k, k, positions[:, 0], layer), v=_write(cache.v, v, positions[:, 0], layer))
        column = jnp.arange(sum(block.shape[-2] for block in cache.k))[None]
        mask = column[:, None] <= positions[:, :, None]
    if kind.windowed is not False:
        near = positions[:, :, None] - (positions if cache is None else column)[:, None, :] < cfg.window
        mask = mask & (near if kind.windowed is True else near | ~kind.windowed)
    if cache is not None and q.shape[1] == 1:
        out = attend_cached(q, cache.k, cache.v, layer, mask, scale=cfg.query_scale, cap=cfg.attention_cap)
    else:
        if cache is not None:
            k, v = (_of_layer(*blocks, layer) for blocks in (cache.k, cache.v))
        out = attend(q, k, v, mask, scale=cfg.query_scale, cap=cfg.attention_cap, block=cfg.attention_block)
    out = _multiply("blhk,hkd->bld", out, weights, "o", ("heads", "head_dim", "embed"))
    return _plus(out, weights, "o_bias"), cache


def _turns(positions: Array, cfg: Decoder) -> Turns | None:
    """Returns how far tokens have turned, in the layers that look far and in those that have a window; None where no
    layer rotates."""
    if not any(map(cfg.rotates, range(cfg.layers))):
        return None
    wide, half = jnp.promote_types(jnp.dtype(cfg.dtype), jnp.float32), cfg.rotated // 2
    far = turns(positions, frequencies(cfg.rope_theta, half, wide, cfg.rope), amplitude(cfg.rope))
    if cfg.window_rope_theta is None:
        return Turns(far, far)
    return Turns(far, turns(positions, frequencies(cfg.window_rope_theta, half, wide)))


def _rotate(x: Array, turned: Turns | None, kind: Kind) -> Array:
    if kind.rotates is False:
        return x
    cos, sin = turned.near if kind.windowed is True else turned.far
    if not isinstance(kind.windowed, bool) and turned.near is not turned.far:
        cos, sin = (jnp.where(kind.windowed, near, far) for near, far in zip(turned.near, turned.far))
    if kind.rotates is not True:  # a turn by 0 is none
        cos, sin = jnp.where(kind.rotates, cos, 1), jnp.where(kind.rotates, sin, 0)
    return rotate(x, cos, sin)


def _norm_all(x: Array, scale: Array, eps: float) -> Array:
    """Returns x [B, L, H, K] normalised over all its heads together."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=(-2, -1), keepdims=True) + eps)
    return (normed * scale[None, None].astype(wide.dtype)).astype(x.dtype)


def _multiply(formula: str, x: Array, weights: PyTree, name: str, axes: tuple[str, ...]) -> Array:
    """Returns x times the matrix of that name, and through its adapter where it has one: c * (x W + (x A) B).

    Args:
      formula: of an einsum of x and the matrix; letters that only the matrix and the result have are its outputs.
      axes: logical axes of the matrix.
    """
    rows, matrix, result = formula.replace("->", ",").split(",")
    into, out = [[i for i, letter in enumerate(matrix) if (letter in result) is made] for made in (False, True)]
    laid = ("batch", None, *(OUTPUTS.get(axes[i]) for i in out))
    y = einsum(formula, x, gather(weights[name].astype(x.dtype), *axes), laid)
    if name not in weights.get(ADAPTER, ()):
        return y
    adapter = weights[ADAPTER][name]
    a = gather(adapter["a"], *(axes[i] for i in into), "rank").astype(x.dtype)
    b = gather(adapter["b"], "rank", *(axes[i] for i in out)).astype(x.dtype)
    low = einsum(f"{rows},{''.join(matrix[i] for i in into)}r->{rows[:2]}r", x, a, ("batch", None, None))
    y = y + einsum(f"{rows[:2]}r,r{''.join(matrix[i] for i in out)}->{result}", low, b, laid)
    if "c" not in adapter:
        return y
    return y * gather(adapter["c"], *(axes[i] for i in out))[None, None].astype(y.dtype)


def _plus(x: Array, weights: PyTree, name: str) -> Array:
    """Returns x [B, L, ...] plus the bias of that name, where the model has it."""
    return x + weights[name][None, None].astype(x.dtype) if name in weights else x


def _write(blocks: tuple[Array, ...], new: Array, start: Array, layer: Array | None) -> tuple[Array, ...]:
    """Returns the cache's blocks with new [B, J, L, K] at the columns from start [B] on, of `layer` if they hold all.
    More than one token a row is written to a cache in one block."""
    if new.shape[2] > 1:
        (whole,) = blocks
        put = jax.vmap(lambda c, n, s: jax.lax.dynamic_update_slice_in_dim(c, n, s, 1))
        if layer is None:
            return (put(whole, new, start),)
        return (jax.lax.dynamic_update_index_in_dim(whole, put(_of_layer(whole, layer), new, start), layer, 0),)
    rows, found, first = jnp.arange(new.shape[0]), [], 0
    for block in blocks:
        width = block.shape[-2]
        column = jnp.where(start < first, width, start - first)  # what does not lie in this block is dropped
        at = block.at[rows, :, column] if layer is None else block.at[layer, rows, :, column]
        found.append(at.set(new[:, :, 0], mode="drop"))
        first += width
    return tuple(found)


def _of_layer(stack: Array, layer: Array | None) -> Array:
    return stack if layer is None else jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)


def _mlp(h: Array, weights: PyTree, cfg: Decoder) -> Array:
    activation = ACTIVATIONS[cfg.activation]
    gate = None
    if cfg.mlp == "gated":
        gate = _multiply("bld,df->blf", h, weights, "gate", ("embed", "mlp"))
        gate = activation(_plus(gate, weights, "gate_bias"))
    product = _plus(_multiply("bld,df->blf", h, weights, "up", ("embed", "mlp")), weights, "up_bias")
    product = activation(product) if gate is None else gate * product
    return _plus(_multiply("blf,fd->bld", product, weights, "down", ("mlp", "embed")), weights, "down_bias")


OUTPUTS = {"heads": "heads", "kv_heads": "kv_heads", "mlp": "mlp"}  # axes of a matrix that activations stay cut over
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}

MODEL = Model(
    spec=spec,
    init=lambda key, cfg, place=lambda names: None: init(key, spec(cfg), place),
    forward=forward,
    routed=routed,
    unembed=unembed,
    init_cache=init_cache,
    cut_cache=cut_cache,
    unstack=unstack,
    ready=ready,
)
