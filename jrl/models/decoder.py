"""One decoder, configured by `shape.Decoder`: attention or linear attention, and an MLP or experts, between norms.

Parameters are a plain tree with stacked layers [num_layers, ...] (jrl/models/leaves.py); the learner scans them.
`unstack` gives the same parameters with layers as a tuple, which a decode loop unrolls. The same functions serve the
learner (under jit, mesh axes explicit) and the sampler (inside shard_map over the batch axes).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jrl.device import row_shares
from jrl.device.sharding import constrain, einsum, gather, per_shard, take_rows
from jrl.models import experts
from jrl.models.attention import cudnn, fused, linear
from jrl.models.attention.cached import attend_cached
from jrl.models.attention.kv_cache import cut_cache, init_cache, of_layer, row_of, stack_of, with_stack, write
from jrl.models.attention.reference import Rows, attend
from jrl.models.contract import Cache, MixedTokens, Model, PrefixSegments, Routes, ShareSegments, State, init
from jrl.models.leaves import prepare_for_decode, some_layers, spec, stretches, unstack
from jrl.models.norm import layer_norm, rms_norm
from jrl.models.product import multiply, plus
from jrl.models.remat import is_narrow, keeping, layer_input, product, stream
from jrl.models.rope import amplitude, cos_sin, frequencies, rotate
from jrl.models.shape import Decoder, LayerVariant
from jrl.ops.router import by_layer, by_token, not_recorded, route_dtype
from jrl.types import Array, PyTree

RouterOutput = Literal["logits", "ids"] | None  # what to return of every router


class Kind(NamedTuple):
    """How a layer differs from the others: a bool where all layers agree, else a traced [] bool."""

    windowed: bool | Array
    rotates: bool | Array


class Rotary(NamedTuple):
    """(cos, sin) of the rotary embedding, [B, L, 1, rotated / 2] each."""

    full: tuple[Array, Array]  # in layers without a window
    windowed: tuple[Array, Array]


class Context(NamedTuple):
    """Inputs shared by all layers: the positions of the tokens, and which tokens each may attend to."""

    positions: Array  # [B, L] int32
    segment: Array | PrefixSegments | ShareSegments | None
    # [B, L, L] bool, or [B, L, P + L]; [B, L / S, L] for a share's tokens; None with a cache, and if attention computes
    # it block by block
    mask: Array | None
    rotary: Rotary | None  # None: no layer rotates


class TokenInput(NamedTuple):
    """A layer's inputs per token, other than the stream. A leading axis of layers may precede [B, L, ...]."""

    embedding: Array | None  # [B, L, E], of Decoder.layer_inputs
    routes: Array | None  # [B, L, k], routes that a sparse layer replays; None: its router decides
    # without a cache: keys and values for a layer that has none of its own, [B, J, L, K] each
    shared_kv: tuple[Array, Array] | None = None


class LayerCache(NamedTuple):
    """The cache that a layer reads and writes: its own, or the stack of its kind of layer and its index there."""

    cache: Cache | State | None  # None: no cache
    index: Array | None  # [] int32; None: the cache is of this layer alone


def forward(
    params: PyTree, tokens: Array, positions: Array, segment: Array | None, cfg: Decoder, cache: Cache | None = None
) -> tuple[Array, Cache | None]:
    """Returns the last hidden states of `tokens`, and the cache with them in it.

    Args:
      params: the tree of `spec`, or of `unstack`.
      tokens, positions: [B, L] int32. Positions count within a token's own sequence.
      segment: [B, L] int32, tokens attend only within their own segment; [B, L, 2] int32, a token's own segment and
        the second one it attends to, or its own twice; PrefixSegments, if rows attend to a prefix in another row;
        ShareSegments, if the tokens are shares of rows (both without linear attention); None: one sequence per row.
      cache: keys and values of M columns. The L tokens of a row are written to columns positions[:, 0] .. + L - 1, and
        a query attends to the columns up to its own position. With a cache `segment` may be [B, L]: 0 for the first
        tokens of a row, which update the states of linear attention, and 1 for the rest, which must not: padding of a
        prompt, and a token that will be passed again. None: all tokens update them.

    Returns:
      hidden: [B, L, D] in cfg.dtype, after the final norm. cache: the updated cache; None without one.
    """
    hidden, cache, _ = _run(params, tokens, positions, segment, cfg, cache)
    return hidden, cache


def routed(
    params: PyTree,
    tokens: Array | MixedTokens,
    positions: Array,
    segment: Array | None,
    cfg: Decoder,
    routes: Array | None = None,
) -> tuple[Array, Array | None]:
    """Returns the last hidden states as `forward` does, and the logits of every router.

    Args:
      routes: [B, L, sparse layers * k], from `record_routes`, which every router replays; None: the routers decide.

    Returns:
      logits: [sparse layers, B, L, experts] float32 or wider; None where no layer is sparse.
    """
    hidden, _, logits = _run(params, tokens, positions, segment, cfg, None, router_output="logits", routes=routes)
    return hidden, logits


def record_routes(
    params: PyTree, tokens: Array, positions: Array, segment: Array | None, cfg: Decoder, cache: Cache | None = None
) -> tuple[Array, Cache | None, Array]:
    """Returns what `forward` does, and the experts of every token, [B, L, sparse layers * k] in `route_dtype`."""
    hidden, cache, ids = _run(params, tokens, positions, segment, cfg, cache, router_output="ids")
    return hidden, cache, by_token(ids)


def empty_routes(cfg: Decoder, batch: int, length: int) -> Array:
    """Returns routes that are all marked as not recorded, [batch, length, sparse layers * k]."""
    dtype = route_dtype(cfg.experts.count)
    shape = (batch, length, len(_sparse_layers(cfg)) * cfg.experts.per_token)
    return jnp.full(shape, not_recorded(dtype), dtype)


def _sparse_layers(cfg: Decoder) -> list[int]:
    return [i for i in range(cfg.layers) if cfg.sparse(i)]


def _run(
    params: PyTree,
    tokens: Array | MixedTokens,
    positions: Array,
    segment: Array | None,
    cfg: Decoder,
    cache: Cache | None,
    *,
    router_output: RouterOutput = None,
    routes: Array | None = None,
) -> tuple[Array, Cache | None, Array | None]:
    """Returns hidden states, the cache, and the routers' requested output, [sparse layers, B, L, experts or k]."""
    x = _embedded(params, tokens, positions, cfg)
    needs_mask = cache is None and cfg.attention != "splash" and cfg.attention_block is None
    mask = visible(positions, segment) if needs_mask else None
    rotary = _rotary(positions, cfg)
    inputs = None if cfg.layer_inputs is None else _layer_inputs(params, x, tokens, cfg)
    sparse = _sparse_layers(cfg)
    routes = None if routes is None else by_layer(routes, len(sparse))
    context = Context(positions, segment, mask, rotary)
    shared = {}  # whether the layer is windowed -> keys and values of these tokens, for layers that have none
    shared_kv = lambda kind, variant: shared.get(kind.windowed) if variant.shared else None

    kinds = [Kind(cfg.windowed(i), cfg.rotates(i)) for i in range(cfg.layers)]
    # If the layers of a scan differ in kind, the kind of each is an input of the scan.
    static = ("windowed",) if cfg.variant(0).windowed is not None else ()
    vary = tuple(
        name for name in Kind._fields if name not in static and len({getattr(kind, name) for kind in kinds}) > 1
    )
    flags = {name: jnp.array([getattr(kind, name) for kind in kinds]) for name in vary}

    router_outputs = []  # of each scan, or layer
    if isinstance(params["layers"], tuple):
        for i, weights in enumerate(params["layers"]):
            variant, row = cfg.variant(i), row_of(cfg, i)
            layer_cache = LayerCache(None if cache is None else stack_of(cache, variant)[row], None)
            replayed = None if routes is None or i not in sparse else routes[sparse.index(i)]
            token_input = TokenInput(None if inputs is None else inputs[i], replayed, shared_kv(kinds[i], variant))
            x, new_cache, kv, output = _layer_once(
                x, weights, context, layer_cache, token_input,
                kind=kinds[i], variant=variant, cfg=cfg, router_output=router_output,
            )  # fmt: skip
            if cache is not None and not variant.shared:
                rows = stack_of(cache, variant)
                cache = with_stack(cache, variant, (*rows[:row], new_cache, *rows[row + 1 :]))
            if variant.source:
                shared[kinds[i].windowed] = kv
            router_outputs.append(None if output is None else jnp.expand_dims(output, 0))
    else:
        # The cache is part of the carry and written in place. As an input and output of the scan it would exist twice.
        def step_of(kind: Kind, variant: LayerVariant, start: int) -> Callable[[tuple, tuple], tuple[tuple, tuple]]:
            def step(carry: tuple[Array, Any], xs: tuple) -> tuple[tuple[Array, Any], tuple]:
                ((x, added), cache), (weights, flags, index, layer, token_input) = carry, xs
                x = x if added is None else x + jax.lax.stop_gradient(added)  # see _summed_later
                weights = weights | _in_stack(unsliced, layer, start, sparse)
                layer_cache = LayerCache(None if cache is None else stack_of(cache, variant), index)
                token_input = token_input._replace(shared_kv=shared_kv(kind, variant))
                x, new_cache, kv, output = _layer(
                    x, weights, context, layer_cache, token_input,
                    kind=kind._replace(**flags), variant=variant, cfg=cfg, router_output=router_output,
                    adds=added is None,
                )  # fmt: skip
                if cache is not None and not variant.shared:
                    cache = with_stack(cache, variant, new_cache)
                return (x if added is not None else (x, None), cache), (output, kv)

            return step

        sliced, unsliced = _read_in_stack(params["layers"])
        # The next layer adds a layer's output to the stream, so that the addition is fused with the norm that reads the
        # sum; by itself it would be another pass over both arrays. x + -0 is x.
        defer_sum = cache is None and is_narrow(x.dtype) and cfg.layer_inputs is None and not cfg.layer_scale
        x = (x, jnp.full_like(x, -0.0) if defer_sum else None)
        for start, stop in stretches(cfg):
            variant, row = cfg.variant(start), row_of(cfg, start)
            stretch_flags = {name: flag[start:stop] for name, flag in flags.items()}
            stack = some_layers(sliced, cfg, start, stop)
            rows = jnp.full(stop - start, row) if variant.shared else jnp.arange(row, row + stop - start)
            replayed = None
            if routes is not None and start in sparse:
                first = sparse.index(start)
                replayed = routes[first : first + stop - start]
            token_input = TokenInput(None if inputs is None else inputs[start:stop], replayed)
            (x, cache), (output, kv) = jax.lax.scan(
                step_of(kinds[start], variant, start),
                (x, cache),
                (stack, stretch_flags, rows, jnp.arange(start, stop), token_input),
            )
            if kv is not None:  # of a stretch of one layer
                shared[kinds[start].windowed] = jax.tree.map(lambda leaf: leaf[0], kv)
            router_outputs.append(output)
        x = x[0] + jax.lax.stop_gradient(x[1]) if defer_sum else x[0]
    router_outputs = [output for output in router_outputs if output is not None]
    hidden = _norm(x, params, "final_norm", cfg)
    return hidden, cache, jnp.concatenate(router_outputs) if router_outputs else None


def _read_in_stack(layers: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the leaves of stacked layers that a scan slices, and those that a kernel reads from the stack of all
    layers: slicing them would copy their matrices."""
    unsliced = {name: layers[name] for name in (fused.ATTENTION, fused.MLP, experts.KERNEL) if name in layers}
    return {name: leaf for name, leaf in layers.items() if name not in unsliced}, unsliced


def _in_stack(unsliced: PyTree, layer: Array, start: int, sparse: Sequence[int]) -> PyTree:
    """Returns the stacked leaves that kernels read in a layer of the stretch from `start`, and its index in the stacks.

    Args:
      sparse: the layers with experts, which have a separate stack.
    """
    num_dense = start - sparse.index(start) if start in sparse else None  # layers without experts before the stretch
    leaves_read = {name: leaves for name, leaves in unsliced.items() if name != experts.KERNEL or num_dense is not None}
    row = lambda name: layer - num_dense if name == experts.KERNEL and num_dense else layer
    return {name: fused.Stacked(leaves, row(name)) for name, leaves in leaves_read.items()}


def _embedded(params: PyTree, tokens: Array | MixedTokens, positions: Array, cfg: Decoder) -> Array:
    """Returns the input of the first layer, [B, L, D]: scaled embeddings, with learned positions if there are any."""
    dtype = jnp.dtype(cfg.dtype)
    # A lookup needs complete rows of the table: exchange its vocabulary shards for shards of the width.
    table = constrain(params["embed"].astype(dtype), None, "embed_shard")
    x = _rows_of(table, tokens)
    if cfg.embed_scale is not None:
        x = x * jnp.asarray(cfg.embed_scale, dtype)
    if cfg.learned_positions is not None:
        table = constrain(params["positions"].astype(dtype), None, "embed_shard")
        x = x + constrain(take_rows(table, positions, ("batch", None, "embed_shard")), "batch", None, None)
    return x


def _layer(
    x: Array,
    weights: PyTree,
    context: Context,
    layer_cache: LayerCache,
    token_input: TokenInput,
    *,
    kind: Kind,
    variant: LayerVariant,
    cfg: Decoder,
    router_output: RouterOutput,
    adds: bool = True,
) -> tuple[Array | tuple[Array, Array], Cache | State | None, tuple[Array, Array] | None, Array | None]:
    """Returns the residual stream after a layer, its cache with these tokens in it, the keys and values that later
    layers share, and the requested output of its router.

    Args:
      x: [B, L, D]. weights: the layer's.
      adds: False: the stream is returned as two arrays, whose sum it is.
    """

    def block(x: Array, weights: PyTree, token_input: TokenInput) -> tuple:
        x = layer_input(x)
        before, after = cfg.norm_place != "after", cfg.norm_place != "before"
        weights = fused.with_sliced(weights, x, cfg)
        h = _norm(x, weights, "attention_norm", cfg) if before and fused.ATTENTION not in weights else x
        if variant.linear:
            y, new_cache = _linear(h, weights, context, layer_cache, cfg)
            kv = None
        else:
            y, new_cache, kv = _attention(h, weights, kind, variant, context, layer_cache, token_input.shared_kv, cfg)
        between = x if cfg.parallel else stream(x + (_norm(y, weights, "attention_out_norm", cfg) if after else y))
        if fused.MLP in weights:
            z, routing = _by_fused_mlp(between, weights[fused.MLP], cfg), None
        else:
            h = _norm(between, weights, "mlp_norm", cfg) if before else between
            if "router" in weights:
                z, routing = _sparse(between, h, weights, token_input.routes, cfg)
            else:
                z, routing = _mlp(h, weights, cfg), None
        output = _router_output(routing, router_output, cfg)
        if cfg.parallel:
            between = x + (_norm(y, weights, "attention_out_norm", cfg) if after else y)
        z = _norm(z, weights, "mlp_out_norm", cfg) if after else z
        if not adds:
            return _summed_later(between, z), new_cache, kv if variant.source else None, output
        x = between + z
        if token_input.embedding is not None:
            x = x + _norm(_from_input(x, weights, token_input.embedding, cfg), weights, "input_norm", cfg)
        if cfg.layer_scale:
            x = x * weights["layer_scale"][0].astype(x.dtype)
        return x, new_cache, kv if variant.source else None, output

    run = keeping(cfg.remat, block) if layer_cache.cache is None else block
    return run(x, weights, token_input)


def _router_output(routing: experts.Routing | None, router_output: RouterOutput, cfg: Decoder) -> Array | None:
    """Returns the requested output of a layer's router; None if the layer has no router."""
    if routing is None or router_output is None:
        return None
    return routing.logits if router_output == "logits" else routing.ids.astype(route_dtype(cfg.experts.count))


@jax.custom_vjp
def _summed_later(x: Array, y: Array) -> tuple[Array, Array]:
    """Returns x and y, of which only the sum x + stop_gradient(y) may be read. The gradient of x is then that of both;
    as two arrays of gradients the same numbers would be carried, and copied, twice."""
    return x, y


_summed_later.defvjp(lambda x, y: ((x, y), None), lambda _, gradients: (gradients[0], gradients[0]))


# Equal layers are traced and lowered once per program.
_layer_once = jax.jit(_layer, static_argnames=("kind", "variant", "cfg", "router_output", "adds"))


def _linear(
    h: Array, weights: PyTree, context: Context, layer_cache: LayerCache, cfg: Decoder
) -> tuple[Array, State | None]:
    """Returns linear attention's output and `layer_cache.cache` with the updated state."""
    cache, index = layer_cache
    state = None if cache is None else jax.tree.leaves(jax.tree.map(lambda x: of_layer(x, index), cache))
    token_mask = None if cache is None or context.segment is None else context.segment == 0
    y, state = linear.attend(
        h, weights, cfg.linear, cfg.norm_eps, segment=None if cache is not None else context.segment, state=state,
        token_mask=token_mask,
    )  # fmt: skip
    if cache is None:
        return y, None
    if index is None:
        return y, State(*state)
    write_layer = lambda stack, new: jax.lax.dynamic_update_index_in_dim(stack, new, index, 0)
    return y, jax.tree.map(write_layer, cache, State(*state))


def _rows_of(table: Array, tokens: Array | MixedTokens) -> Array:
    """Returns the table's rows for tokens, [B, L, ...], or mixtures of rows."""
    if isinstance(tokens, MixedTokens):
        rows, others = (_rows_of(table, ids) for ids in (tokens.tokens, tokens.others))
        return rows + jnp.asarray(tokens.share, rows.dtype) * (others - rows)
    return constrain(take_rows(table, tokens, ("batch", None, "embed_shard")), "batch", None, None)


def _layer_inputs(params: PyTree, x: Array, tokens: Array | MixedTokens, cfg: Decoder) -> Array:
    """Returns every token's input to each layer, [layers, B, L, E], computed from a table and from x [B, L, D], the
    embedding that the first layer reads.

    Source: transformers' Gemma 4, as Gemma 3n before it (per-layer embeddings).
    """
    size, dtype = cfg.layer_inputs, x.dtype
    table = constrain(params["layer_embed"].astype(dtype), None, "embed_shard")
    from_table = _rows_of(table, tokens)
    project = gather(params["layer_project"].astype(dtype), "embed", None)
    from_embedding = einsum("bld,de->ble", x, project, ("batch", None, None)) * jnp.asarray(cfg.width**-0.5, dtype)
    from_table, from_embedding = (y.reshape(*x.shape[:2], cfg.layers, size) for y in (from_table, from_embedding))
    from_embedding = rms_norm(from_embedding, _weight(params["layer_norm"], cfg), cfg.norm_eps)
    combined = (from_embedding + from_table * jnp.asarray(size**0.5, dtype)) * jnp.asarray(2**-0.5, dtype)
    return jnp.moveaxis(combined, 2, 0)


def _from_input(x: Array, weights: PyTree, per_layer_input: Array, cfg: Decoder) -> Array:
    """Returns the contribution of `per_layer_input` [B, L, E] to the stream, [B, L, D], before its norm."""
    gate = ACTIVATIONS[cfg.activation](multiply("bld,de->ble", x, weights, "input_gate", ("embed", None)))
    return multiply("ble,ed->bld", gate * per_layer_input, weights, "input_out", (None, "embed"))


def unembed(params: PyTree, hidden: Array, cfg: Decoder) -> Array:
    """Returns logits [B, L, V], float32 or wider, of hidden [B, L, D]."""
    head = gather(params["embed" if cfg.tied else "head"].astype(hidden.dtype), "vocab", "embed")
    # Accumulate in float32, not widen afterwards: logits rounded to bfloat16 move log-probs by about 1e-2.
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = einsum("bld,vd->blv", hidden, head, ("batch", None, "vocab"), wide)
    return logits if cfg.logit_cap is None else cfg.logit_cap * jnp.tanh(logits / cfg.logit_cap)


def visible(
    positions: Array, segment: Array | PrefixSegments | ShareSegments | None, rows: Rows = lambda x: x
) -> Array:
    """Returns which tokens of its row each token attends to, [B, L, L] bool: itself and those before it in its
    sequence. With a prefix from another row, [B, L, P + L]: the prefix first. For a share's tokens, [B, L / S, L].

    Args:
      rows: selects the queries from arrays [B, L, ...]; the mask of the other queries is never computed.
    """
    if isinstance(segment, ShareSegments):
        column = jnp.arange(segment.row_segment.shape[1])[None]
        causal = rows(segment.column)[:, :, None] >= column[:, None, :]
        return causal & _same_segment(segment.segment, segment.row_segment, rows)
    column = jnp.arange(positions.shape[1])[None]
    causal = rows(column)[:, :, None] >= column[:, None, :]
    if segment is None:
        return constrain(jnp.broadcast_to(causal, (positions.shape[0], *causal.shape[1:])), "batch", None, None)
    if isinstance(segment, PrefixSegments):
        prefix = rows(segment.continuation)[:, :, None] & (segment.prefix_row >= 0)[:, None, :]
        return jnp.concatenate([prefix, visible(positions, segment.segment, rows)], axis=-1)
    return causal & _same_segment(segment, segment, rows)


def _same_segment(segment: Array, row_segment: Array, rows: Rows) -> Array:
    """Returns which tokens of its row are in a segment that each token attends to, [B, Q, L] bool.

    Args:
      segment: [B, Q], or [B, Q, 2]. row_segment: [B, L], or [B, L, 2]. rows: as in `visible`.
    """
    if segment.ndim == 2:
        return rows(segment)[:, :, None] == row_segment[:, None, :]
    sequence, seen_prefix = segment[..., 0], segment[..., 1]
    row_sequence = sequence if row_segment is segment else row_segment[..., 0]
    same = rows(sequence)[:, :, None] == row_sequence[:, None, :]
    return same | (rows(seen_prefix)[:, :, None] == row_sequence[:, None, :])


def _share_of(segment: Array | PrefixSegments | ShareSegments | None) -> ShareSegments | None:
    """Returns the ShareSegments; None if rows are not divided."""
    inner = segment.segment if isinstance(segment, PrefixSegments) else segment
    return inner if isinstance(inner, ShareSegments) else None


def _prefix(x: Array, prefix_row: Array) -> Array:
    """Returns the keys or values of each row's prefix, [B, J, P, K], within a batch shard.

    Args:
      x: [B, J, L, K], keys or values of all rows.
      prefix_row: [B, P] int32, as in PrefixSegments. Unused columns are undefined.
    """
    take = lambda x, row: (x[jnp.maximum(row.max(axis=1), 0), :, : row.shape[1]],)
    heads = ("batch", "kv_heads", None, None)
    return per_shard(take, (x, prefix_row), (heads, ("batch", None)), (heads,))[0]


def _attention(
    h: Array,
    weights: PyTree,
    kind: Kind,
    variant: LayerVariant,
    context: Context,
    layer_cache: LayerCache,
    shared_kv: tuple[Array, Array] | None,
    cfg: Decoder,
) -> tuple[Array, Cache | None, tuple[Array, Array] | None]:
    """Returns attention's output, `layer_cache.cache` with the new keys and values in it, and these keys and values,
    [B, J, L, K].

    Args:
      layer_cache: for a layer that shares keys and values, the one it reads.
      shared_kv: without a cache: keys and values for a layer that has none of its own.
    """
    positions, segment, mask, rotary = context
    cache, layer = layer_cache
    q, k, v = _projected(h, weights, kind, variant, rotary, shared_kv if cache is None else (None, None), cfg)
    if not variant.shared:
        # Heads before columns, so that a head's keys are contiguous and a decode step reads them without a copy.
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        if cache is not None:
            start = positions[:, 0]
            transposed = cache.layout == "head_dim_major"
            cache = cache.replace(
                k=write(cache.k, k, start, layer, transposed), v=write(cache.v, v, start, layer, False)
            )
    kv, share = (k, v), _share_of(segment)
    column = None if cache is None else jnp.arange(sum(block.shape[-2] for block in cache.v))[None]

    def mask_of(rows: Rows = lambda x: x) -> Array:
        if cache is not None:
            seen = column[:, None] <= rows(positions)[:, :, None]
        else:
            seen = visible(positions, segment, rows) if mask is None else rows(mask)
        if kind.windowed is False:
            return seen
        keys = column if cache is not None else positions if share is None else share.row_positions
        if isinstance(segment, PrefixSegments):
            columns = jnp.broadcast_to(
                jnp.arange(segment.prefix_row.shape[1], dtype=keys.dtype), segment.prefix_row.shape
            )
            keys = jnp.concatenate([columns, keys], axis=1)
        near = rows(positions)[:, :, None] - keys[:, None, :] < cfg.window
        return seen & (near if kind.windowed is True else near | ~kind.windowed)

    sinks = weights.get(f"{variant.prefix}sinks")
    if cache is not None and q.shape[1] == 1 and cache.layout == "single_block":
        out = _by_ragged(q, cache, layer, positions[:, 0], kind.windowed, sinks, cfg)
    elif cache is not None and q.shape[1] == 1:
        out = attend_cached(
            q, cache.k, cache.v, layer, mask_of(),
            transposed=cache.layout == "head_dim_major", scale=cfg.query_scale, cap=cfg.attention_cap, sinks=sinks,
        )  # fmt: skip
    else:
        if cache is not None:
            k, v = (of_layer(*blocks, layer) for blocks in (cache.k, cache.v))
        if share is not None:
            k, v = (row_shares.gathered(product(x)) for x in (k, v))
        if isinstance(segment, PrefixSegments):
            k, v = (jnp.concatenate([_prefix(x, segment.prefix_row), x], axis=2) for x in (k, v))
        if cfg.attention == "splash":
            start = None if cache is None or k.shape[2] == q.shape[1] else positions[:, 0]
            out = _by_splash(q, k, v, None if cache is not None else segment, start, kind.windowed, sinks, cfg)
        elif cfg.attention == "cudnn":
            out = cudnn.attend(q, k, v, mask_of(), scale=cfg.query_scale)
        else:
            out = attend(
                q, k, v, mask_of, scale=cfg.query_scale, cap=cfg.attention_cap, sinks=sinks, block=cfg.attention_block
            )
    return _output(out, h, weights, variant, cfg), cache, kv


def _projected(
    h: Array,
    weights: PyTree,
    kind: Kind,
    variant: LayerVariant,
    rotary: Rotary | None,
    shared_kv: tuple[Array | None, Array | None] | None,
    cfg: Decoder,
) -> tuple[Array, Array | None, Array | None]:
    """Returns queries [B, L, H, K], rotated, and keys, rotated, and values [B, L, J, K]; for a layer without its own
    keys and values, `shared_kv`."""
    name_of = lambda name: f"{variant.prefix}{name}"
    project = functools.partial(_project, h, weights, variant)

    def normed(x: Array, name: str) -> Array:
        return x if cfg.qk_norm is None else rms_norm(x, _weight(weights[name_of(name)], cfg), cfg.norm_eps)

    if fused.ATTENTION in weights:
        return _by_fused_qkv(h, weights[fused.ATTENTION], rotary, kind, cfg)
    if fused.QKV in weights:
        scale = _weight(weights[fused.QK_NORM], cfg) if fused.QK_NORM in weights else None
        qk, v = fused.project(h, weights, cfg, scale)
        return *fused.split(_rotate(qk, rotary, kind), weights, cfg), v
    q = project("q", "heads")
    if variant.shared:
        q = normed(plus(q, weights, name_of("q_bias")), "q_norm")
        return _rotate(q, rotary, kind), *shared_kv
    k = project("k", "kv_heads")
    v = project("v", "kv_heads") if name_of("v") in weights else k
    q, k, v = (plus(x, weights, name_of(f"{name}_bias")) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    q, k = normed(q, "q_norm"), normed(k, "k_norm")
    if cfg.value_norm:
        v = rms_norm(v, jnp.ones(v.shape[-1], v.dtype), cfg.norm_eps)
    return _rotate(q, rotary, kind), _rotate(k, rotary, kind), v


def _project(h: Array, weights: PyTree, variant: LayerVariant, name: str, heads: str) -> Array:
    """Returns h [B, L, D] times one of a layer's projections, [B, L, heads, K]."""
    return multiply("bld,dhk->blhk", h, weights, f"{variant.prefix}{name}", ("embed", heads, "head_dim"))


def _output(out: Array, h: Array, weights: PyTree, variant: LayerVariant, cfg: Decoder) -> Array:
    """Returns what attention adds to the stream, [B, L, D], from its heads' outputs, [B, L, H, K]."""
    if cfg.output_gate:
        out = out * jax.nn.sigmoid(_project(h, weights, variant, "q_gate", "heads"))
    out = multiply("blhk,hkd->bld", out, weights, f"{variant.prefix}o", ("heads", "head_dim", "embed"))
    return plus(out, weights, f"{variant.prefix}o_bias")


def _by_splash(
    q: Array,
    k: Array,
    v: Array,
    segment: Array | ShareSegments | None,
    start: Array | None,
    windowed: bool | Array,
    sinks: Array | None,
    cfg: Decoder,
) -> Array:
    """Returns attention by the kernel, [B, L, H, K]. If there are more columns than tokens, the tokens begin at columns
    `start` [B]. Raises ValueError if a token attends to a second segment."""
    from jrl.models.attention import splash  # here, since importing Pallas takes half a second

    row = segment.row_segment if isinstance(segment, ShareSegments) else segment
    if row is not None and row.ndim == 3:
        raise ValueError("attention='splash' lets a token see its own segment only, which excludes shared prompts")

    def within(window: int | None) -> Array:
        return splash.attend(
            q, k, v, segment, start=start, scale=cfg.query_scale, window=window, cap=cfg.attention_cap, sinks=sinks
        )

    if isinstance(windowed, bool):
        return within(cfg.window if windowed else None)
    return jax.lax.cond(windowed, lambda: within(cfg.window), lambda: within(None))


def _by_ragged(
    q: Array, cache: Cache, layer: Array | None, last: Array, windowed: bool | Array, sinks: Array | None, cfg: Decoder
) -> Array:
    """Returns attention of one token per row, in column `last` [B], by the kernel, [B, 1, H, K]."""
    from jrl.models.attention import ragged  # here, since importing Pallas takes half a second

    first = jnp.zeros_like(last)
    if windowed is not False:
        near = jnp.maximum(last - cfg.window + 1, 0)
        first = near if windowed is True else jnp.where(windowed, near, first)
    (k,), (v,) = cache.k, cache.v
    return ragged.attend(q, k, v, layer, first, last, scale=cfg.query_scale, cap=cfg.attention_cap, sinks=sinks)


def _by_fused_qkv(x: Array, weights: PyTree, rotary: Rotary, kind: Kind, cfg: Decoder) -> tuple[Array, Array, Array]:
    """Returns queries, keys and values of the residual stream of one token per row by the kernel, norm included."""
    from jrl.models.attention import fused_qkv  # here, since importing Pallas takes half a second

    cos, sin = _angles(rotary, kind)
    if kind.rotates is False:
        cos, sin = jnp.ones_like(cos), jnp.zeros_like(sin)
    return fused_qkv.project(x, fused.stacked(weights), cos, sin, cfg)


def _by_fused_mlp(x: Array, weights: PyTree, cfg: Decoder) -> Array:
    """Returns the MLP of the residual stream of one token per row, [B, 1, D], by the kernel, norm included."""
    from jrl.models import fused_mlp  # here, since importing Pallas takes half a second

    return fused_mlp.mlp(
        x, fused.stacked(weights), activation=ACTIVATIONS[cfg.activation], eps=cfg.norm_eps,
        plus_one=cfg.norm == "rms_plus_one",
    )  # fmt: skip


def _by_fused_experts(weights: PyTree, cfg: Decoder, h: Array, share: Array, ids: Array) -> Array:
    """Returns the output of an `experts.Kernel` for one token per row."""
    from jrl.models import fused_experts  # here, since importing Pallas takes half a second

    return fused_experts.mix(
        h, share, ids, fused.stacked(weights), activation=ACTIVATIONS[cfg.activation], clamp=cfg.experts.clamp
    )


def _rotary(positions: Array, cfg: Decoder) -> Rotary | None:
    """Returns the rotary embedding of layers without and with a window; None if no layer rotates."""
    if not any(map(cfg.rotates, range(cfg.layers))):
        return None
    wide, half = jnp.promote_types(jnp.dtype(cfg.dtype), jnp.float32), cfg.rotated // 2
    # The heads of `cfg.full` rotate all their pairs.
    full_half = half if cfg.full is None else cfg.full.head_dim // 2
    full = cos_sin(positions, frequencies(cfg.rope_theta, full_half, wide, cfg.rope), amplitude(cfg.rope))
    if cfg.window_rope_theta is not None:
        return Rotary(full, cos_sin(positions, frequencies(cfg.window_rope_theta, half, wide)))
    if cfg.full is None:
        return Rotary(full, full)
    return Rotary(full, cos_sin(positions, frequencies(cfg.rope_theta, half, wide, cfg.rope), amplitude(cfg.rope)))


def _rotate(x: Array, rotary: Rotary | None, kind: Kind) -> Array:
    return x if kind.rotates is False else rotate(x, *_angles(rotary, kind))


def _angles(rotary: Rotary, kind: Kind) -> tuple[Array, Array]:
    """Returns (cos, sin) for a layer of a kind that rotates or may rotate."""
    cos, sin = rotary.windowed if kind.windowed is True else rotary.full
    if not isinstance(kind.windowed, bool) and rotary.windowed is not rotary.full:
        cos, sin = (jnp.where(kind.windowed, near, far) for near, far in zip(rotary.windowed, rotary.full))
    if not isinstance(kind.rotates, bool):  # no rotation: an angle of 0
        cos, sin = jnp.where(kind.rotates, cos, 1), jnp.where(kind.rotates, sin, 0)
    return cos, sin


def _norm(x: Array, weights: PyTree, name: str, cfg: Decoder) -> Array:
    if cfg.norm == "layer":
        return layer_norm(x, weights[name], weights[f"{name}_bias"], cfg.norm_eps)
    return rms_norm(x, _weight(weights[name], cfg), cfg.norm_eps)


def _weight(scale: Array, cfg: Decoder) -> Array:
    if cfg.norm != "rms_plus_one":
        return scale
    return 1 + scale.astype(jnp.promote_types(scale.dtype, jnp.float32))


def _sparse(x: Array, h: Array, weights: PyTree, routes: Array | None, cfg: Decoder) -> tuple[Array, experts.Routing]:
    """Returns the output of a sparse layer's experts, including the shared expert's, and its routing.

    Args:
      x: [B, L, D], the residual stream. h: the same, as the MLP reads it. routes: [B, L, k], replayed; None: computed.

    Source: transformers' Gemma 4 (normed, and a router that reads the stream) and Qwen3.5-MoE (gated).
    """
    sparse, router_input = cfg.experts, None
    if sparse.reads == "stream":
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        router_input = rms_norm(wide, weights["router_norm"], cfg.norm_eps) * jnp.asarray(cfg.width**-0.5, wide.dtype)
    expert_input = _norm(x, weights, "expert_norm", cfg) if sparse.shared_expert == "normed" else h
    kernel = functools.partial(_by_fused_experts, weights[experts.KERNEL], cfg) if experts.KERNEL in weights else None
    y, routing = experts.mix(expert_input, weights, sparse, ACTIVATIONS[cfg.activation], router_input, routes, kernel)
    if sparse.shared_expert is None:
        return y, routing
    z = _mlp(h, weights, cfg)
    if sparse.shared_expert == "normed":
        return _norm(y, weights, "expert_out_norm", cfg) + _norm(z, weights, "shared_expert_norm", cfg), routing
    return y + z * jax.nn.sigmoid(multiply("bld,do->blo", h, weights, "shared_expert_gate", ("embed", None))), routing


def _mlp(h: Array, weights: PyTree, cfg: Decoder) -> Array:
    activation, prefix = ACTIVATIONS[cfg.activation], "shared_mlp_" if "shared_mlp_up" in weights else ""
    gate_name, up, down = (f"{prefix}{name}" for name in ("gate", "up", "down"))
    gate = None
    if cfg.mlp == "gated":
        gate = multiply("bld,df->blf", h, weights, gate_name, ("embed", "mlp"))
        gate = activation(plus(gate, weights, "gate_bias"))
    hidden = plus(multiply("bld,df->blf", h, weights, up, ("embed", "mlp")), weights, "up_bias")
    hidden = activation(hidden) if gate is None else gate * hidden
    return plus(multiply("blf,fd->bld", hidden, weights, down, ("mlp", "embed")), weights, "down_bias")


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
    prepare_for_decode=prepare_for_decode,
    routes=Routes(empty=empty_routes, record=record_routes),
)
