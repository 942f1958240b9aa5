"""One configurable decoder: attention, linear attention or experts and an MLP between norms, as `shape.Decoder` says.

Parameters are a plain tree with stacked layers [num_layers, ...] (jrl/models/leaves.py); the learner scans them.
`unstack` gives the same parameters with layers as a tuple, which a decode loop unrolls. The same functions serve the
learner (under jit, mesh axes explicit) and the sampler (inside shard_map over the batch axes).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl.device.sharding import constrain, einsum, gather, per_shard, take_rows
from jrl.models import experts
from jrl.models.attention import cudnn, linear
from jrl.models.attention.cached import attend_cached
from jrl.models.attention.kv_cache import cut_cache, init_cache, of_layer, row_of, stack_of, with_stack, write
from jrl.models.attention.reference import attend
from jrl.models.contract import Ahead, Cache, Model, State, init
from jrl.models.leaves import ready, some_layers, spec, stretches, unstack
from jrl.models.norm import layer_norm, rms_norm
from jrl.models.product import multiply, plus
from jrl.models.remat import keeping, layer_input
from jrl.models.rope import amplitude, frequencies, rotate, turns
from jrl.models.shape import Decoder, Variant
from jrl.types import Array, PyTree


class Kind(NamedTuple):
    """What sets a layer apart from the others: a bool where all agree, else a traced [] bool."""

    windowed: bool | Array
    rotates: bool | Array


class Turns(NamedTuple):
    """(cos, sin) of rotated pairs, [B, L, 1, rotated / 2] each."""

    far: tuple[Array, Array]
    near: tuple[Array, Array]  # in windowed layers


class Seen(NamedTuple):
    """What every layer reads of the tokens, and what they may see."""

    positions: Array  # [B, L] int32
    segment: Array | Ahead | None
    mask: Array | None  # [B, L, L] bool, or [B, L, P + L]; None with a cache
    turned: Turns | None


def forward(
    params: PyTree, tokens: Array, positions: Array, segment: Array | None, cfg: Decoder, cache: Cache | None = None
) -> tuple[Array, Cache | None]:
    """Returns the last hidden states of `tokens`, and the cache with them in it.

    Args:
      params: the tree of `spec`, or of `unstack`.
      tokens, positions: [B, L] int32. Positions count within a token's own sequence.
      segment: [B, L] int32, sequences packed in a row see only themselves; [B, L, 2] int32, a token's own segment and
        the other one it sees, or its own twice; Ahead, where rows see the beginning of others (without linear
        attention); None: one sequence a row.
      cache: keys and values of M columns. The L tokens of a row go to the columns positions[:, 0] .. + L - 1, and a
        query sees the columns up to its own position. With a cache `segment` may be [B, L], 0 for the first tokens of
        a row, which the states of linear attention count, and 1 for the rest, which they must not: what a prompt is
        filled up with, and a token that will be given again. None: all count.

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
    inputs = None if cfg.layer_inputs is None else _layer_inputs(params, x, tokens, cfg)
    seen = Seen(positions, segment, mask, turned)
    shared = {}  # is the layer windowed? -> keys and values of these tokens, for layers that have none
    others = lambda kind, variant: shared.get(kind.windowed) if variant.shared else None

    kinds = [Kind(cfg.windowed(i), cfg.rotates(i)) for i in range(cfg.layers)]
    # Where layers of a scan differ it carries along which kind each is.
    apart = ("windowed",) if cfg.variant(0).windowed is not None else ()
    vary = tuple(
        name for name in Kind._fields if name not in apart and len({getattr(kind, name) for kind in kinds}) > 1
    )
    flags = {name: jnp.array([getattr(kind, name) for kind in kinds]) for name in vary}

    found = []  # of each scan, or layer
    if isinstance(params["layers"], tuple):
        for i, weights in enumerate(params["layers"]):
            variant, row = cfg.variant(i), row_of(cfg, i)
            own = None if cache is None else stack_of(cache, variant)[row]
            given = None if inputs is None else inputs[i]
            x, own, pair, logits = _layer_once(
                x, weights, seen, own, None, given, others(kinds[i], variant),
                kind=kinds[i], variant=variant, cfg=cfg, routed=routed,
            )  # fmt: skip
            if cache is not None and not variant.shared:
                rows = stack_of(cache, variant)
                cache = with_stack(cache, variant, (*rows[:row], own, *rows[row + 1 :]))
            if variant.source:
                shared[kinds[i].windowed] = pair
            found.append(None if logits is None else jnp.expand_dims(logits, 0))
    else:
        # The cache is carried and written in place. As inputs and outputs of the scan there would be two of it.
        def step_of(kind: Kind, variant: Variant) -> Callable[[tuple, tuple], tuple[tuple, tuple]]:
            def step(carry: tuple[Array, Any], xs: tuple) -> tuple[tuple[Array, Any], tuple]:
                (x, cache), (weights, flags, i, given) = carry, xs
                own = None if cache is None else stack_of(cache, variant)
                x, own, pair, logits = _layer(
                    x, weights, seen, own, i, given, others(kind, variant),
                    kind=kind._replace(**flags), variant=variant, cfg=cfg, routed=routed,
                )  # fmt: skip
                if cache is not None and not variant.shared:
                    cache = with_stack(cache, variant, own)
                return (x, cache), (logits, pair)

            return step

        for start, stop in stretches(cfg):
            variant, row = cfg.variant(start), row_of(cfg, start)
            some = {name: flag[start:stop] for name, flag in flags.items()}
            stack = some_layers(params["layers"], cfg, start, stop)
            rows = jnp.full(stop - start, row) if variant.shared else jnp.arange(row, row + stop - start)
            given = None if inputs is None else inputs[start:stop]
            (x, cache), (logits, pair) = jax.lax.scan(
                step_of(kinds[start], variant), (x, cache), (stack, some, rows, given)
            )
            if pair is not None:  # of a stretch of one layer
                shared[kinds[start].windowed] = jax.tree.map(lambda leaf: leaf[0], pair)
            found.append(logits)
    found = [logits for logits in found if logits is not None]
    return _norm(x, params, "final_norm", cfg), cache, jnp.concatenate(found) if found else None


def _layer(
    x: Array,
    weights: PyTree,
    seen: Seen,
    own: Cache | State | None,
    at: Array | None,
    given: Array | None,
    others: tuple[Array, Array] | None,
    *,
    kind: Kind,
    variant: Variant,
    cfg: Decoder,
    routed: bool,
) -> tuple[Array, Cache | State | None, tuple[Array, Array] | None, Array | None]:
    """Returns the stream after a layer, what the layer keeps with these tokens in it, the keys and values that later
    layers share, and its router's logits.

    Args:
      x: [B, L, D]. weights: of the layer.
      own: what this layer keeps; or what all of its kind do, of which `at` says which it is.
      given: [B, L, E], what the tokens give to this layer by themselves.
      others: keys and values that a layer without its own reads where there is no cache.
    """

    def block(x: Array, weights: PyTree, given: Array | None, others: tuple[Array, Array] | None) -> tuple:
        x = layer_input(x)
        before, after = cfg.norm_place != "after", cfg.norm_place != "before"
        h = _norm(x, weights, "attention_norm", cfg) if before else x
        if variant.linear:
            y, new = _linear(h, weights, seen, own, at, cfg)
            pair = None
        else:
            y, new, pair = _attention(h, weights, kind, variant, seen, own, at, others, cfg)
        between = x if cfg.parallel else x + (_norm(y, weights, "attention_out_norm", cfg) if after else y)
        h = _norm(between, weights, "mlp_norm", cfg) if before else between
        if "router" in weights:
            z, logits = _sparse(between, h, weights, cfg)
        else:
            z, logits = _mlp(h, weights, cfg), None
        if cfg.parallel:
            between = x + (_norm(y, weights, "attention_out_norm", cfg) if after else y)
        x = between + (_norm(z, weights, "mlp_out_norm", cfg) if after else z)
        if given is not None:
            x = x + _norm(_from_input(x, weights, given, cfg), weights, "input_norm", cfg)
        if cfg.layer_scale:
            x = x * weights["layer_scale"][0].astype(x.dtype)
        return x, new, pair if variant.source else None, logits if routed else None

    run = keeping(cfg.remat, block) if own is None else block
    return run(x, weights, given, others)


# Layers that are alike are traced and lowered once, wherever they stand in a program and however often.
_layer_once = jax.jit(_layer, static_argnames=("kind", "variant", "cfg", "routed"))


def _linear(
    h: Array, weights: PyTree, seen: Seen, own: State | None, layer: Array | None, cfg: Decoder
) -> tuple[Array, State | None]:
    """Returns linear attention's output and the state after it: of this layer alone, or of all linear ones where
    `layer` says which this is."""
    kept = None if own is None else jax.tree.leaves(jax.tree.map(lambda x: of_layer(x, layer), own))
    counted = None if own is None or seen.segment is None else seen.segment == 0
    y, kept = linear.attend(
        h, weights, cfg.linear, cfg.norm_eps, segment=None if own is not None else seen.segment, kept=kept,
        counted=counted,
    )  # fmt: skip
    if own is None:
        return y, None
    if layer is None:
        return y, State(*kept)
    put = lambda whole, new: jax.lax.dynamic_update_index_in_dim(whole, new, layer, 0)
    return y, jax.tree.map(put, own, State(*kept))


def _layer_inputs(params: PyTree, x: Array, tokens: Array, cfg: Decoder) -> Array:
    """Returns what every token gives to each layer by itself, [layers, B, L, E]: from a table, and from the embedding
    x [B, L, D] that the first layer reads.

    Source: transformers' Gemma 4, as Gemma 3n before it (per-layer embeddings).
    """
    size, dtype = cfg.layer_inputs, x.dtype
    table = constrain(params["layer_embed"].astype(dtype), None, "embed_shard")
    own = constrain(take_rows(table, tokens, ("batch", None, "embed_shard")), "batch", None, None)
    project = gather(params["layer_project"].astype(dtype), "embed", None)
    seen = einsum("bld,de->ble", x, project, ("batch", None, None)) * jnp.asarray(cfg.width**-0.5, dtype)
    own, seen = (y.reshape(*x.shape[:2], cfg.layers, size) for y in (own, seen))
    seen = rms_norm(seen, _weight(params["layer_norm"], cfg), cfg.norm_eps)
    both = (seen + own * jnp.asarray(size**0.5, dtype)) * jnp.asarray(2**-0.5, dtype)
    return jnp.moveaxis(both, 2, 0)


def _from_input(x: Array, weights: PyTree, given: Array, cfg: Decoder) -> Array:
    """Returns what a layer adds for its own input `given` [B, L, E], [B, L, D], before its norm."""
    gate = ACTIVATIONS[cfg.activation](multiply("bld,de->ble", x, weights, "input_gate", ("embed", None)))
    return multiply("ble,ed->bld", gate * given, weights, "input_out", (None, "embed"))


def unembed(params: PyTree, hidden: Array, cfg: Decoder) -> Array:
    """Returns logits [B, L, V], float32 or wider, of hidden [B, L, D]."""
    head = gather(params["embed" if cfg.tied else "head"].astype(hidden.dtype), "vocab", "embed")
    # Summed into wide numbers, not widened afterwards: logits rounded to bfloat16 move log-probs by about 1e-2.
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = einsum("bld,vd->blv", hidden, head, ("batch", None, "vocab"), wide)
    return logits if cfg.logit_cap is None else cfg.logit_cap * jnp.tanh(logits / cfg.logit_cap)


def visible(positions: Array, segment: Array | Ahead | None) -> Array:
    """Returns which tokens of its row each token sees, [B, L, L] bool: itself and those before it in its sequence. With
    something ahead of the row, [B, L, P + L]: that first."""
    column = jnp.arange(positions.shape[1])
    causal = (column[:, None] >= column[None, :])[None]
    if segment is None:
        return constrain(jnp.broadcast_to(causal, (positions.shape[0], *causal.shape[1:])), "batch", None, None)
    if isinstance(segment, Ahead):
        ahead = segment.branch[:, :, None] & (segment.row >= 0)[:, None, :]
        return jnp.concatenate([ahead, visible(positions, segment.segment)], axis=-1)
    if segment.ndim == 2:
        return causal & (segment[:, :, None] == segment[:, None, :])
    own, other = segment[..., 0], segment[..., 1]
    return causal & ((own[:, :, None] == own[:, None, :]) | (other[:, :, None] == own[:, None, :]))


def _ahead(x: Array, row: Array) -> Array:
    """Returns of keys or values [B, J, L, K] those ahead of each row, [B, J, P, K], within a batch shard.

    Args:
      row: [B, P] int32, as in Ahead. What no row gives is anything.
    """
    take = lambda x, row: (x[jnp.maximum(row.max(axis=1), 0), :, : row.shape[1]],)
    heads = ("batch", "kv_heads", None, None)
    return per_shard(take, (x, row), (heads, ("batch", None)), (heads,))[0]


def _attention(
    h: Array,
    weights: PyTree,
    kind: Kind,
    variant: Variant,
    seen: Seen,
    cache: Cache | None,
    layer: Array | None,
    others: tuple[Array, Array] | None,
    cfg: Decoder,
) -> tuple[Array, Cache | None, tuple[Array, Array] | None]:
    """Returns attention's output, the cache with the new keys and values in it (of this layer alone, or of all layers
    where `layer` says which this is), and without a cache those keys and values, [B, J, L, K].

    Args:
      cache: of a layer that shares, the one it reads, and `layer` that one's.
      others: keys and values that a layer without its own reads where there is no cache.
    """
    positions, segment, mask, turned = seen
    name_of = lambda name: f"{variant.prefix}{name}"

    def project(name: str, heads: str) -> Array:
        return multiply("bld,dhk->blhk", h, weights, name_of(name), ("embed", heads, "head_dim"))

    def normed(x: Array, name: str) -> Array:
        return x if cfg.qk_norm is None else rms_norm(x, _weight(weights[name_of(name)], cfg), cfg.norm_eps)

    q = project("q", "heads")
    if variant.shared:
        q = normed(plus(q, weights, name_of("q_bias")), "q_norm")
        q = _rotate(q, turned, kind)
        k, v = (None, None) if cache is not None else others
    else:
        k = project("k", "kv_heads")
        v = project("v", "kv_heads") if name_of("v") in weights else k
        q, k, v = (plus(x, weights, name_of(f"{name}_bias")) for x, name in ((q, "q"), (k, "k"), (v, "v")))
        q, k = normed(q, "q_norm"), normed(k, "k_norm")
        if cfg.value_norm:
            v = rms_norm(v, jnp.ones(v.shape[-1], v.dtype), cfg.norm_eps)
        q, k = _rotate(q, turned, kind), _rotate(k, turned, kind)
        # Heads before columns: one head's keys lie together, and a decode step reads them without a copy.
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        if cache is not None:
            start = positions[:, 0]
            turned_keys = cache.layout == "head_dim_major"
            cache = cache.replace(
                k=write(cache.k, k, start, layer, turned_keys), v=write(cache.v, v, start, layer, False)
            )
    pair = (k, v)
    if cache is not None:
        column = jnp.arange(sum(block.shape[-2] for block in cache.v))[None]
        mask = column[:, None] <= positions[:, :, None]
    if kind.windowed is not False:
        keys = column if cache is not None else positions
        if isinstance(segment, Ahead):
            columns = jnp.broadcast_to(jnp.arange(segment.row.shape[1], dtype=keys.dtype), segment.row.shape)
            keys = jnp.concatenate([columns, keys], axis=1)
        near = positions[:, :, None] - keys[:, None, :] < cfg.window
        mask = mask & (near if kind.windowed is True else near | ~kind.windowed)
    sinks = weights.get(name_of("sinks"))
    if cache is not None and q.shape[1] == 1 and cache.layout == "whole":
        out = _by_ragged(q, cache, layer, positions[:, 0], kind.windowed, sinks, cfg)
    elif cache is not None and q.shape[1] == 1:
        out = attend_cached(
            q, cache.k, cache.v, layer, mask,
            turned=cache.layout == "head_dim_major", scale=cfg.query_scale, cap=cfg.attention_cap, sinks=sinks,
        )  # fmt: skip
    else:
        if cache is not None:
            k, v = (of_layer(*blocks, layer) for blocks in (cache.k, cache.v))
        if isinstance(segment, Ahead):
            k, v = (jnp.concatenate([_ahead(x, segment.row), x], axis=2) for x in (k, v))
        if cfg.attention == "splash":
            out = _by_splash(q, k, v, None if cache is not None else segment, kind.windowed, sinks, cfg)
        elif cfg.attention == "cudnn":
            out = cudnn.attend(q, k, v, mask, scale=cfg.query_scale)
        else:
            out = attend(
                q, k, v, mask, scale=cfg.query_scale, cap=cfg.attention_cap, sinks=sinks, block=cfg.attention_block
            )
    if cfg.output_gate:
        out = out * jax.nn.sigmoid(project("q_gate", "heads"))
    out = multiply("blhk,hkd->bld", out, weights, name_of("o"), ("heads", "head_dim", "embed"))
    return plus(out, weights, name_of("o_bias")), cache, pair


def _by_splash(
    q: Array, k: Array, v: Array, segment: Array | None, windowed: bool | Array, sinks: Array | None, cfg: Decoder
) -> Array:
    """Returns attention by the kernel, [B, L, H, K]. Raises ValueError where a token sees a segment beside its own."""
    from jrl.models.attention import splash  # Pallas is half a second of import, for those who ask for it

    if segment is not None and segment.ndim == 3:
        raise ValueError("attention='splash' lets a token see its own segment only; shared prompts need another")

    def within(window: int | None) -> Array:
        return splash.attend(q, k, v, segment, scale=cfg.query_scale, window=window, cap=cfg.attention_cap, sinks=sinks)

    if isinstance(windowed, bool):
        return within(cfg.window if windowed else None)
    return jax.lax.cond(windowed, lambda: within(cfg.window), lambda: within(None))


def _by_ragged(
    q: Array, cache: Cache, layer: Array | None, last: Array, windowed: bool | Array, sinks: Array | None, cfg: Decoder
) -> Array:
    """Returns attention of one token a row, in column `last` [B], by the kernel, [B, 1, H, K]."""
    from jrl.models.attention import ragged  # Pallas is half a second of import, for those who ask for it

    first = jnp.zeros_like(last)
    if windowed is not False:
        near = jnp.maximum(last - cfg.window + 1, 0)
        first = near if windowed is True else jnp.where(windowed, near, first)
    (k,), (v,) = cache.k, cache.v
    return ragged.attend(q, k, v, layer, first, last, scale=cfg.query_scale, cap=cfg.attention_cap, sinks=sinks)


def _turns(positions: Array, cfg: Decoder) -> Turns | None:
    """Returns how far tokens have turned, in the layers that look far and in those that have a window; None where no
    layer rotates."""
    if not any(map(cfg.rotates, range(cfg.layers))):
        return None
    wide, half = jnp.promote_types(jnp.dtype(cfg.dtype), jnp.float32), cfg.rotated // 2
    across = half if cfg.full is None else cfg.full.head_dim // 2  # heads of another shape turn whole
    far = turns(positions, frequencies(cfg.rope_theta, across, wide, cfg.rope), amplitude(cfg.rope))
    if cfg.window_rope_theta is not None:
        return Turns(far, turns(positions, frequencies(cfg.window_rope_theta, half, wide)))
    if cfg.full is None:
        return Turns(far, far)
    return Turns(far, turns(positions, frequencies(cfg.rope_theta, half, wide, cfg.rope), amplitude(cfg.rope)))


def _rotate(x: Array, turned: Turns | None, kind: Kind) -> Array:
    if kind.rotates is False:
        return x
    cos, sin = turned.near if kind.windowed is True else turned.far
    if not isinstance(kind.windowed, bool) and turned.near is not turned.far:
        cos, sin = (jnp.where(kind.windowed, near, far) for near, far in zip(turned.near, turned.far))
    if kind.rotates is not True:  # a turn by 0 is none
        cos, sin = jnp.where(kind.rotates, cos, 1), jnp.where(kind.rotates, sin, 0)
    return rotate(x, cos, sin)


def _norm(x: Array, weights: PyTree, name: str, cfg: Decoder) -> Array:
    if cfg.norm == "layer":
        return layer_norm(x, weights[name], weights[f"{name}_bias"], cfg.norm_eps)
    return rms_norm(x, _weight(weights[name], cfg), cfg.norm_eps)


def _weight(scale: Array, cfg: Decoder) -> Array:
    if cfg.norm != "rms_plus_one":
        return scale
    return 1 + scale.astype(jnp.promote_types(scale.dtype, jnp.float32))


def _sparse(x: Array, h: Array, weights: PyTree, cfg: Decoder) -> tuple[Array, Array]:
    """Returns what a sparse layer's experts make, with the MLP beside them where it has one, and its router's logits.

    Args:
      x: [B, L, D], the stream. h: the same, as the MLP reads it.

    Source: transformers' Gemma 4 (normed, and a router that reads the stream) and Qwen3.5-MoE (gated).
    """
    own, seen = cfg.experts, None
    if own.reads == "stream":
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        seen = rms_norm(wide, weights["router_norm"], cfg.norm_eps) * jnp.asarray(cfg.width**-0.5, wide.dtype)
    read = _norm(x, weights, "expert_norm", cfg) if own.shared_expert == "normed" else h
    y, logits = experts.mix(read, weights, own, ACTIVATIONS[cfg.activation], seen)
    if own.shared_expert is None:
        return y, logits
    z = _mlp(h, weights, cfg)
    if own.shared_expert == "normed":
        return _norm(y, weights, "expert_out_norm", cfg) + _norm(z, weights, "beside_norm", cfg), logits
    return y + z * jax.nn.sigmoid(multiply("bld,do->blo", h, weights, "beside_gate", ("embed", None))), logits


def _mlp(h: Array, weights: PyTree, cfg: Decoder) -> Array:
    activation, prefix = ACTIVATIONS[cfg.activation], "wide_" if "wide_up" in weights else ""
    gate_name, up, down = (f"{prefix}{name}" for name in ("gate", "up", "down"))
    gate = None
    if cfg.mlp == "gated":
        gate = multiply("bld,df->blf", h, weights, gate_name, ("embed", "mlp"))
        gate = activation(plus(gate, weights, "gate_bias"))
    product = plus(multiply("bld,df->blf", h, weights, up, ("embed", "mlp")), weights, "up_bias")
    product = activation(product) if gate is None else gate * product
    return plus(multiply("blf,fd->bld", product, weights, down, ("mlp", "embed")), weights, "down_bias")


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
