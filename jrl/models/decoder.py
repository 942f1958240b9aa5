"""One configurable decoder: grouped-query attention and an MLP between norms, with the options that published
families need, each defined once. The defaults are ours: pre-norm, rotary, normalised heads, gated MLP, tied head.

Parameters are a plain tree with stacked layers [num_layers, ...]; the learner scans them. `unstack` gives the same
parameters with layers as a tuple, which a decode loop unrolls. The same functions serve the learner (under jit, mesh
axes explicit) and the sampler (inside shard_map over the batch axes).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jrl.models import experts, linear
from jrl.models.attention import attend
from jrl.models.cached_attention import attend_cached, edges
from jrl.models.contract import ADAPTER, Cache, Model, ParamSpec, Stacks, State, axes, init
from jrl.models.experts import Experts
from jrl.models.linear import Linear
from jrl.models.rope import LongRope, Stretch, amplitude, frequencies, rotate, turns
from jrl.sharding import TRAIN, constrain, einsum, gather, take_rows
from jrl.types import Array, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullHeads:
    """The heads of layers without a window, where they have another shape than those of windowed layers."""

    head_dim: int  # must be even
    kv_heads: int  # must divide heads
    keys_are_values: bool = False  # values are the keys, before they are normalised and rotated


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
    rope: Stretch | None = None  # how wavelengths are stretched
    rotary_dim: int | None = None  # entries of a head that are rotated, the first ones; 0: none. None: all
    rotary_layers: tuple[bool, ...] = (True,)  # which layers rotate: a cycle
    learned_positions: int | None = None  # rows of a table added to the embedding; no longer sequence can be read
    window: int | None = None  # tokens a windowed layer sees, its own included
    window_layers: tuple[bool, ...] = (True,)  # which layers are windowed, where window is given: a cycle
    window_rope_theta: float | None = None  # base in windowed layers, not stretched; None: as in the others
    full: FullHeads | None = None  # heads of layers without a window, where their shape is another
    shared_layers: int = 0  # the last ones, which read keys and values of the last layer before them with their window
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"  # rms_plus_one: the weight is counted from 1, as in Gemma
    norm_place: Literal["before", "after", "both"] = "before"  # of attention and MLP; after: before it is added
    norm_eps: float = 1e-6
    qk_norm: Literal["head", "all"] | None = "head"  # of queries and keys: each head as Qwen3, or all as OLMo 2
    value_norm: bool = False  # each head of the values is divided by its root mean square
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's last product
    query_scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    attention_cap: float | None = None  # scores x become cap * tanh(x / cap)
    sinks: bool = False  # a learned logit of each head takes a share of attention and gives nothing, as in gpt-oss
    output_gate: bool = False  # what attention gives is multiplied by a sigmoid of the layer's input, as in Qwen3.5
    linear: Linear | None = None  # of layers that have linear attention in place of attention; None: no layer has
    parallel: bool = False  # attention and MLP read the same input, as in GPT-NeoX
    mlp: Literal["gated", "plain"] = "gated"
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    mlp_bias: bool = False
    shared_mlp_width: int | None = None  # of shared_layers; None: mlp_width
    experts: Experts | None = None  # of sparse layers, which have them instead of the MLP; None: no layer is sparse
    embed_scale: float | None = None  # of the embedding, on its way in
    layer_inputs: int | None = None  # entries that a token gives to each layer by itself, as in Gemma 4; None: none
    layer_scale: bool = False  # what a layer gives is multiplied by a number of its own, which is not trained
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
        if isinstance(self.rope, LongRope) and len(self.rope.short) != self.rotated // 2:
            raise ValueError(
                f"LongRope.short and long need a number for each of the {self.rotated // 2} pairs that turn; they have "
                f"{len(self.rope.short)}"
            )
        if self.attention_block is not None and self.attention_block < 1:
            raise ValueError(f"attention_block must be at least 1; got {self.attention_block}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1; got {self.window}")
        if self.full is not None and (self.heads % self.full.kv_heads or self.full.head_dim % 2):
            raise ValueError(
                f"FullHeads.kv_heads must divide heads={self.heads}, and head_dim be even; got {self.full}"
            )
        if not 0 <= self.shared_layers < self.layers:
            raise ValueError(f"shared_layers must be below layers={self.layers}; got {self.shared_layers}")
        if self.shared_layers and not self.shared_from:
            raise ValueError(f"shared_layers = {self.shared_layers} have no layer before them to read keys from")
        if self.linear is not None and (self.full is not None or self.shared_layers or self.experts is not None):
            raise ValueError("Decoder.linear goes with neither full, shared_layers nor experts yet")
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

    def shared(self, layer: int) -> bool:
        return layer >= self.layers - self.shared_layers

    @property
    def shared_from(self) -> dict[bool, int]:
        """Returns whether a layer is windowed -> whose keys and values it reads, where it shares. Empty where a kind of
        the sharing layers has no layer to read from."""
        own = self.layers - self.shared_layers
        found = {self.windowed(i): i for i in range(own)}
        kinds = {self.windowed(i) for i in range(own, self.layers)}
        return {kind: found[kind] for kind in kinds} if kinds <= found.keys() else {}

    def variant(self, layer: int) -> Variant:
        """Returns what decides which leaves a layer has."""
        apart = self.full is not None or self.shared_layers > 0
        return Variant(
            sparse=self.sparse(layer),
            linear=self.linear is not None and self.linear.at(layer),
            full=self.full is not None and not self.windowed(layer),
            windowed=self.windowed(layer) if apart else None,
            shared=self.shared(layer),
            source=self.shared_layers > 0 and layer in self.shared_from.values(),
        )


class Variant(NamedTuple):
    """What sets layers apart that no scan can run over together: they have other leaves, or another place to put what
    they keep."""

    sparse: bool
    linear: bool
    full: bool  # heads as Decoder.full says
    windowed: bool | None  # None: it decides nothing that a scan cannot carry
    shared: bool  # reads another layer's keys and values
    source: bool  # is read by others

    @property
    def prefix(self) -> str:
        """Of the leaves of its attention."""
        return "full_" if self.full else ""

    @property
    def stack(self) -> str:
        """Which of `Stacks` it keeps its own in."""
        return "linear" if self.linear else "full" if self.full else "plain"


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

    block = {}
    attending = len(layers_of(cfg, "q"))
    if attending:
        shape = (cfg.kv_heads, cfg.head_dim, False)
        block |= _attention_spec(cfg, stacked, "", shape, attending, len(layers_of(cfg, "k")))
    if attending < layers and cfg.full is not None:
        shape = (cfg.full.kv_heads, cfg.full.head_dim, cfg.full.keys_are_values)
        block |= _attention_spec(cfg, stacked, "full_", shape, layers - attending, len(layers_of(cfg, "full_k")))
    if cfg.linear is not None:
        count = len(layers_of(cfg, "linear_q"))
        for name, (shape, names) in linear.leaves(cfg.linear, width).items():
            fan_in = {"linear_o": math.prod(shape[:-1]), "linear_norm": None, "linear_decay": 0, "linear_step_bias": 0}
            fan = fan_in.get(name, shape[-1] if name.startswith("conv") else width)
            scale = fan if not fan else fan**-0.5 * (added if name == "linear_o" else 1)
            block[name] = stacked(shape, names, scale, count)
    sparse = sum(map(cfg.sparse, range(layers)))
    if dense := len(layers_of(cfg, "up")):
        block["up"] = stacked((width, cfg.mlp_width), ("embed", "mlp"), inward, dense)
        block["down"] = stacked((cfg.mlp_width, width), ("mlp", "embed"), cfg.mlp_width**-0.5 * added, dense)
        if cfg.mlp == "gated":
            block["gate"] = stacked((width, cfg.mlp_width), ("embed", "mlp"), inward, dense)
        if cfg.mlp_bias:
            for name in ("gate", "up") if cfg.mlp == "gated" else ("up",):
                block[f"{name}_bias"] = stacked((cfg.mlp_width,), ("mlp",), 0.0, dense)
            block["down_bias"] = stacked((width,), ("norm",), 0.0, dense)
    if wide := len(layers_of(cfg, "wide_up")):
        own = cfg.shared_mlp_width
        block["wide_gate"] = stacked((width, own), ("embed", "mlp"), inward, wide)
        block["wide_up"] = stacked((width, own), ("embed", "mlp"), inward, wide)
        block["wide_down"] = stacked((own, width), ("mlp", "embed"), own**-0.5 * added, wide)
    if sparse:
        count, own = cfg.experts.count, cfg.experts.width
        block["router"] = stacked((width, count), ("embed", "experts"), inward, sparse)
        for name in ("expert_gate", "expert_up"):
            block[name] = stacked((count, width, own), ("experts", "embed", "mlp"), inward, sparse)
        block["expert_down"] = stacked((count, own, width), ("experts", "mlp", "embed"), own**-0.5 * added, sparse)
        if cfg.experts.bias:
            block["router_bias"] = stacked((count,), ("experts",), 0.0, sparse)
            for name in ("expert_gate_bias", "expert_up_bias"):
                block[name] = stacked((count, own), ("experts", "mlp"), 0.0, sparse)
            block["expert_down_bias"] = stacked((count, width), ("experts", "norm"), 0.0, sparse)
    identity = 0.0 if cfg.norm == "rms_plus_one" else None
    for name in norms(cfg):
        block[name] = stacked((width,), ("norm",), identity)
        if cfg.norm == "layer":
            block[f"{name}_bias"] = stacked((width,), ("norm",), 0.0)
    if cfg.layer_inputs is not None:
        block["input_gate"] = stacked((width, cfg.layer_inputs), ("embed", None), inward)
        block["input_out"] = stacked((cfg.layer_inputs, width), (None, "embed"), cfg.layer_inputs**-0.5 * added)
        block["input_norm"] = stacked((width,), ("norm",), identity)
    if cfg.layer_scale:
        block["layer_scale"] = stacked((1,), (None,), None)
    tree = {
        "embed": ParamSpec((cfg.vocab_size, width), dtype, ("vocab", "embed"), inward),
        "layers": block,
        "final_norm": ParamSpec((width,), dtype, ("norm",), identity),
    }
    if cfg.norm == "layer":
        tree["final_norm_bias"] = ParamSpec((width,), dtype, ("norm",), 0.0)
    if cfg.learned_positions is not None:
        tree["positions"] = ParamSpec((cfg.learned_positions, width), dtype, (None, "embed"), inward)
    if cfg.layer_inputs is not None:
        every = layers * cfg.layer_inputs
        tree["layer_embed"] = ParamSpec((cfg.vocab_size, every), dtype, ("vocab", "embed"), every**-0.5)
        tree["layer_project"] = ParamSpec((width, every), dtype, ("embed", None), inward)
        tree["layer_norm"] = ParamSpec((cfg.layer_inputs,), dtype, ("norm",), identity)
    if not cfg.tied:
        tree["head"] = ParamSpec((cfg.vocab_size, width), dtype, ("vocab", "embed"), inward)
    return tree


def _attention_spec(
    cfg: Decoder, stacked: Callable[..., ParamSpec], prefix: str, shape: tuple[int, int, bool], count: int, own: int
) -> dict[str, ParamSpec]:
    """Returns the leaves of attention in `count` layers, of which `own` have keys and values."""
    (kv_heads, head_dim, same), heads, width = shape, cfg.heads, cfg.width
    identity = 0.0 if cfg.norm == "rms_plus_one" else None
    inward, added = width**-0.5, (2 * cfg.layers) ** -0.5
    query, kv = ("embed", "heads", "head_dim"), ("embed", "kv_heads", "head_dim")
    found = {
        "q": stacked((width, heads, head_dim), query, inward, count),
        "k": stacked((width, kv_heads, head_dim), kv, inward, own),
        "v": stacked((width, kv_heads, head_dim), kv, inward, own),
        "o": stacked(
            (heads, head_dim, width), ("heads", "head_dim", "embed"), (heads * head_dim) ** -0.5 * added, count
        ),
    }
    if cfg.output_gate:
        found["q_gate"] = stacked((width, heads, head_dim), query, inward, count)
    if cfg.qk_norm == "head":
        found["q_norm"] = stacked((head_dim,), ("head_dim",), identity, count)
        found["k_norm"] = stacked((head_dim,), ("head_dim",), identity, own)
    elif cfg.qk_norm == "all":
        found["q_norm"] = stacked((heads, head_dim), ("heads", "head_dim"), identity, count)
        found["k_norm"] = stacked((kv_heads, head_dim), ("kv_heads", "head_dim"), identity, own)
    if cfg.qkv_bias:
        found["q_bias"] = stacked((heads, head_dim), ("heads", "head_dim"), 0.0, count)
        found["k_bias"] = stacked((kv_heads, head_dim), ("kv_heads", "head_dim"), 0.0, own)
        found["v_bias"] = stacked((kv_heads, head_dim), ("kv_heads", "head_dim"), 0.0, own)
    if cfg.sinks:
        found["sinks"] = stacked((heads,), ("heads",), 0.0, count)
    if cfg.output_bias:
        found["o_bias"] = stacked((width,), ("norm",), 0.0, count)
    left_out = {"v", "v_bias"} if same else set()
    return {f"{prefix}{name}": leaf for name, leaf in found.items() if name not in left_out}


MLP_LEAVES = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")  # of a layer that is not sparse
WIDE_LEAVES = ("wide_gate", "wide_up", "wide_down")  # of a shared layer whose MLP has a width of its own
KEY_LEAVES = ("k", "v", "k_norm", "k_bias", "v_bias")  # of a layer with keys and values of its own
ATTENTION_LEAVES = (*KEY_LEAVES, "q", "o", "q_gate", "q_norm", "q_bias", "o_bias", "sinks")


def layers_of(cfg: Decoder, name: str) -> tuple[int, ...]:
    """Returns which layers have a leaf of that name: what its first dimension counts."""
    every = [cfg.variant(i) for i in range(cfg.layers)]
    full, bare = name.startswith("full_"), name.removeprefix("full_")
    if name in experts.LEAVES:
        has = lambda v: v.sparse
    elif name in linear.LEAVES:
        has = lambda v: v.linear
    elif name in MLP_LEAVES:
        has = lambda v: not v.sparse and not (v.shared and cfg.shared_mlp_width is not None)
    elif name in WIDE_LEAVES:
        has = lambda v: v.shared and cfg.shared_mlp_width is not None
    elif bare in ATTENTION_LEAVES:
        has = lambda v: v.full == full and not v.linear and not (v.shared and bare in KEY_LEAVES)
    else:
        has = lambda v: True
    return tuple(i for i, v in enumerate(every) if has(v))


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
    shared = {}  # is the layer windowed? -> keys and values of these tokens, for layers that have none

    def block(
        kind: Kind,
        variant: Variant,
        x: Array,
        weights: PyTree,
        own: Cache | State | None = None,
        at: Array | None = None,
        given: Array | None = None,
    ) -> tuple[Array, Cache | State | None, tuple[Array, Array] | None, Array | None]:
        before, after = cfg.norm_place != "after", cfg.norm_place != "before"
        h = _norm(x, weights, "attention_norm", cfg) if before else x
        pair = None
        if variant.linear:
            y, own = _linear(h, weights, positions, segment, mask, own, at, cfg)
        else:
            others = shared.get(kind.windowed) if variant.shared else None
            y, own, pair = _attention(h, weights, kind, variant, positions, turned, mask, own, at, others, cfg)
        between = x if cfg.parallel else x + (_norm(y, weights, "attention_out_norm", cfg) if after else y)
        h = _norm(between, weights, "mlp_norm", cfg) if before else between
        if "router" in weights:
            z, logits = experts.mix(h, weights, cfg.experts, ACTIVATIONS[cfg.activation])
        else:
            z, logits = _mlp(h, weights, cfg), None
        if cfg.parallel:
            between = x + (_norm(y, weights, "attention_out_norm", cfg) if after else y)
        x = between + (_norm(z, weights, "mlp_out_norm", cfg) if after else z)
        if given is not None:
            x = x + _norm(_from_input(x, weights, given, cfg), weights, "input_norm", cfg)
        if cfg.layer_scale:
            x = x * jax.lax.stop_gradient(weights["layer_scale"][0]).astype(x.dtype)
        return x, own, pair if variant.source else None, logits if routed else None

    kinds = [Kind(cfg.windowed(i), cfg.rotates(i)) for i in range(cfg.layers)]
    # Where layers of a scan differ it carries along which kind each is.
    apart = ("windowed",) if cfg.variant(0).windowed is not None else ()
    vary = tuple(
        name for name in Kind._fields if name not in apart and len({getattr(kind, name) for kind in kinds}) > 1
    )
    flags = {name: jnp.array([getattr(kind, name) for kind in kinds]) for name in vary}

    def layer(kind: Kind, variant: Variant) -> Callable[..., tuple]:
        run = functools.partial(block, kind, variant)
        return jax.checkpoint(run) if cfg.remat == "layer" and cache is None else run

    found = []  # of each scan, or layer
    if isinstance(params["layers"], tuple):
        for i, weights in enumerate(params["layers"]):
            variant, row = cfg.variant(i), _row(cfg, i)
            own = None if cache is None else _stack(cache, variant)[row]
            given = None if inputs is None else inputs[i]
            x, own, pair, logits = layer(kinds[i], variant)(x, weights, own, None, given)
            if cache is not None and not variant.shared:
                rows = _stack(cache, variant)
                cache = _with_stack(cache, variant, (*rows[:row], own, *rows[row + 1 :]))
            if variant.source:
                shared[kinds[i].windowed] = pair
            found.append(None if logits is None else jnp.expand_dims(logits, 0))
    else:
        # The cache is carried and written in place. As inputs and outputs of the scan there would be two of it.
        def step_of(kind: Kind, variant: Variant) -> Callable[[tuple, tuple], tuple[tuple, tuple]]:
            def step(carry: tuple[Array, Any], xs: tuple) -> tuple[tuple[Array, Any], tuple]:
                (x, cache), (weights, flags, i, given) = carry, xs
                own = None if cache is None else _stack(cache, variant)
                x, own, pair, logits = layer(kind._replace(**flags), variant)(x, weights, own, i, given)
                if cache is not None and not variant.shared:
                    cache = _with_stack(cache, variant, own)
                return (x, cache), (logits, pair)

            return step

        for start, stop in _stretches(cfg):
            variant, row = cfg.variant(start), _row(cfg, start)
            some = {name: flag[start:stop] for name, flag in flags.items()}
            stack = _some_layers(params["layers"], cfg, start, stop)
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


def _row(cfg: Decoder, layer: int) -> int:
    """Returns where in its stack of the cache lies what a layer reads: its own, or another's."""
    variant = cfg.variant(layer)
    if variant.shared:
        layer = cfg.shared_from[cfg.windowed(layer)]
    return layers_of(cfg, {"plain": "k", "full": "full_k", "linear": "linear_q"}[variant.stack]).index(layer)


def _stack(cache: Any, variant: Variant) -> Any:
    """Returns the stack of a cache, or the tuple of layers, that a layer's is in."""
    return getattr(cache, variant.stack) if isinstance(cache, Stacks) else cache


def _with_stack(cache: Any, variant: Variant, stack: Any) -> Any:
    return cache.replace(**{variant.stack: stack}) if isinstance(cache, Stacks) else stack


def _linear(
    h: Array,
    weights: PyTree,
    positions: Array,
    segment: Array | None,
    mask: Array | None,
    own: State | None,
    layer: Array | None,
    cfg: Decoder,
) -> tuple[Array, State | None]:
    """Returns linear attention's output and the state after it: of this layer alone, or of all linear ones where
    `layer` says which this is."""
    kept = None if own is None else jax.tree.leaves(jax.tree.map(lambda x: _of_layer(x, layer), own))
    counted = None if own is None or segment is None else segment == 0
    y, kept = linear.attend(
        h, weights, cfg.linear, cfg.norm_eps, positions=positions, segment=None if own is not None else segment,
        mask=mask, kept=kept, counted=counted,
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
    gate = ACTIVATIONS[cfg.activation](_multiply("bld,de->ble", x, weights, "input_gate", ("embed", None)))
    return _multiply("ble,ed->bld", gate * given, weights, "input_out", (None, "embed"))


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
    made, stacks = {}, {}
    for stack, leaves in cache_shapes(cfg, batch, length).items():
        stacks[stack] = {}
        for name, what in leaves.items():
            if what not in made:
                shape, dtype, names = what
                made[what] = constrain(jnp.zeros(shape, dtype), *names)
            stacks[stack][name] = made[what]
    of = lambda name: Cache(**{x: (leaf,) for x, leaf in stacks[name].items()}) if name in stacks else None
    if cfg.full is None and cfg.linear is None:
        return of("plain")
    return Stacks(plain=of("plain"), full=of("full"), linear=State(**stacks["linear"]) if "linear" in stacks else None)


def cache_shapes(
    cfg: Decoder, batch: int, length: int
) -> dict[str, dict[str, tuple[tuple[int, ...], Any, tuple[str | None, ...]]]]:
    """Returns stack of a cache -> its fields -> (shape, dtype, logical axes)."""
    found, dtype = {}, jnp.dtype(cfg.dtype)
    for stack, prefix, heads in (("plain", "", cfg), ("full", "full_", cfg.full)):
        if layers := len(layers_of(cfg, f"{prefix}k")):
            what = (
                (layers, batch, heads.kv_heads, length, heads.head_dim),
                dtype,
                (None, "batch", "kv_heads", None, None),
            )
            found[stack] = {"k": what, "v": what}
    if cfg.linear is not None:
        layers, wide = len(layers_of(cfg, "linear_q")), jnp.promote_types(dtype, jnp.float32)
        found["linear"] = {
            name: ((layers, *shape), wide if name == "matrix" else dtype, (None, *names))
            for name, (shape, names) in linear.state_shapes(cfg.linear, batch).items()
        }
    return found


def cut_cache(cache: Cache | Stacks, length: int) -> Cache | Stacks:
    """Returns a stacked cache of one block in the blocks that `length` columns have; some of them are empty where it
    has fewer."""
    if isinstance(cache, Stacks):
        return cache.replace(plain=cache.plain and cut_cache(cache.plain, length),
                             full=cache.full and cut_cache(cache.full, length))  # fmt: skip
    starts = (0, *edges(length)[:-1])
    cut = lambda whole: tuple(whole[..., a:b, :] for a, b in zip(starts, edges(length)))
    return Cache(k=cut(*cache.k), v=cut(*cache.v))


def check_length(cfg: Decoder, length: int) -> None:
    """Raises ValueError where a sequence of `length` tokens is longer than the table of positions, or than what its
    rope was chosen for."""
    if cfg.learned_positions is not None and length > cfg.learned_positions:
        raise ValueError(f"{length} tokens are more than the {cfg.learned_positions} positions that this model learned")
    if isinstance(cfg.rope, LongRope) and length > cfg.rope.original_length >= (cfg.rope.longest or 0):
        raise ValueError(
            f"{length} tokens are more than the {cfg.rope.original_length} that LongRope.short is for; "
            "decoder.for_length chooses the other list"
        )


def for_length(cfg: Decoder, length: int) -> Decoder:
    """Returns the decoder of sequences of up to `length` tokens, or more where it is already for more. Only LongRope
    asks."""
    if not isinstance(cfg.rope, LongRope):
        return cfg
    return dataclasses.replace(cfg, rope=dataclasses.replace(cfg.rope, longest=max(length, cfg.rope.longest or 0)))


def check_divides(cfg: Decoder, mesh: Any) -> None:
    """Raises ValueError naming the field of Decoder that does not divide over the mesh."""
    fields = {"heads": "heads", "kv_heads": "kv_heads", "mlp": "mlp_width", "vocab": "vocab_size", "embed": "width"}
    sizes = [(name, f"Decoder.{field}", getattr(cfg, field)) for name, field in fields.items()]
    if cfg.experts is not None:
        sizes.append(("mlp", "Experts.width", cfg.experts.width))
    if cfg.full is not None:
        sizes.append(("kv_heads", "FullHeads.kv_heads", cfg.full.kv_heads))
    if cfg.linear is not None:
        sizes.append(("kv_heads", "Linear.key_heads", cfg.linear.key_heads))
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
    return {
        **narrow(params, ("embed", "positions", "head", "layer_embed", "layer_project")),
        "layers": narrow(params["layers"], MATRICES),
    }, axes(spec(cfg))


MATRICES = ("q", "k", "v", "o", "q_gate", "full_q", "full_k", "full_v", "full_o", "gate", "up", "down", *WIDE_LEAVES,
            "expert_gate", "expert_up", "expert_down", "input_gate", "input_out", *linear.MATRICES)  # fmt: skip


def _stretches(cfg: Decoder) -> list[tuple[int, int]]:
    """Returns (first, last + 1) of every stretch of layers with the same leaves: what one scan runs over."""
    ends = [i for i in range(1, cfg.layers) if cfg.variant(i) != cfg.variant(i - 1)]
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
    variant: Variant,
    positions: Array,
    turned: Turns | None,
    mask: Array | None,
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
    name_of = lambda name: f"{variant.prefix}{name}"

    def project(name: str, heads: str) -> Array:
        return _multiply("bld,dhk->blhk", h, weights, name_of(name), ("embed", heads, "head_dim"))

    def normed(x: Array, name: str) -> Array:
        if cfg.qk_norm == "head":
            return rms_norm(x, _weight(weights[name_of(name)], cfg), cfg.norm_eps)
        if cfg.qk_norm == "all":
            return _norm_all(x, _weight(weights[name_of(name)], cfg), cfg.norm_eps)
        return x

    q = project("q", "heads")
    if variant.shared:
        q = normed(_plus(q, weights, name_of("q_bias")), "q_norm")
        q = _rotate(q, turned, kind)
        k, v = (None, None) if cache is not None else others
    else:
        k = project("k", "kv_heads")
        v = project("v", "kv_heads") if name_of("v") in weights else k
        q, k, v = (_plus(x, weights, name_of(f"{name}_bias")) for x, name in ((q, "q"), (k, "k"), (v, "v")))
        q, k = normed(q, "q_norm"), normed(k, "k_norm")
        if cfg.value_norm:
            v = rms_norm(v, jnp.ones(v.shape[-1], v.dtype), cfg.norm_eps)
        q, k = _rotate(q, turned, kind), _rotate(k, turned, kind)
        # Heads before columns: one head's keys lie together, and a decode step reads them without a copy.
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        if cache is not None:
            cache = Cache(k=_write(cache.k, k, positions[:, 0], layer), v=_write(cache.v, v, positions[:, 0], layer))
    pair = (k, v)
    if cache is not None:
        column = jnp.arange(sum(block.shape[-2] for block in cache.k))[None]
        mask = column[:, None] <= positions[:, :, None]
    if kind.windowed is not False:
        near = positions[:, :, None] - (positions if cache is None else column)[:, None, :] < cfg.window
        mask = mask & (near if kind.windowed is True else near | ~kind.windowed)
    sinks = weights.get(name_of("sinks"))
    if cache is not None and q.shape[1] == 1:
        out = attend_cached(q, cache.k, cache.v, layer, mask, scale=cfg.query_scale, cap=cfg.attention_cap, sinks=sinks)
    else:
        if cache is not None:
            k, v = (_of_layer(*blocks, layer) for blocks in (cache.k, cache.v))
        out = attend(
            q, k, v, mask, scale=cfg.query_scale, cap=cfg.attention_cap, sinks=sinks, block=cfg.attention_block
        )
    if cfg.output_gate:
        out = out * jax.nn.sigmoid(project("q_gate", "heads"))
    out = _multiply("blhk,hkd->bld", out, weights, name_of("o"), ("heads", "head_dim", "embed"))
    return _plus(out, weights, name_of("o_bias")), cache, pair


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
    activation, prefix = ACTIVATIONS[cfg.activation], "wide_" if "wide_up" in weights else ""
    gate_name, up, down = (f"{prefix}{name}" for name in ("gate", "up", "down"))
    gate = None
    if cfg.mlp == "gated":
        gate = _multiply("bld,df->blf", h, weights, gate_name, ("embed", "mlp"))
        gate = activation(_plus(gate, weights, "gate_bias"))
    product = _plus(_multiply("bld,df->blf", h, weights, up, ("embed", "mlp")), weights, "up_bias")
    product = activation(product) if gate is None else gate * product
    return _plus(_multiply("blf,fd->bld", product, weights, down, ("mlp", "embed")), weights, "down_bias")


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
