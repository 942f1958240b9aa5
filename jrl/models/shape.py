"""The shape of a decoder: its sizes, and the options that published families need, each defined once. The defaults are
ours: pre-norm, rotary, normalized heads, gated MLP, tied head."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

from jrl.device.sharding import ACTIVATIONS, TRAIN, axis_fields, mesh_axes, num_shards
from jrl.models.attention.kernels import NO_KERNEL, Attention
from jrl.models.attention.linear import Linear
from jrl.models.experts import Experts
from jrl.models.remat import Remat
from jrl.models.rope import LongRope, Stretch

# Integer fields of Decoder -> the largest valid value, far above any published model: a larger one is a typo, and would
# end in a compiler error.
LARGEST = {
    "vocab_size": 2**24, "layers": 2**12, "width": 2**20, "heads": 2**14, "kv_heads": 2**14, "head_dim": 2**14,
    "mlp_width": 2**24, "shared_mlp_width": 2**24, "learned_positions": 2**30, "window": 2**30, "layer_inputs": 2**20,
    "attention_block": 2**30,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullHeads:
    """The heads of layers without a window, if their shape differs from that of windowed layers."""

    head_dim: int  # must be even
    kv_heads: int  # must divide heads
    keys_are_values: bool = False  # values are the keys, before they are normalized and rotated


class LayerVariant(NamedTuple):
    """The properties that layers of one scan must share: layers that differ in them have different leaves, or a
    different cache."""

    sparse: bool
    linear: bool
    full: bool  # its heads are those of Decoder.full
    windowed: bool | None  # None: layers of one scan may differ in it
    shared: bool  # reads another layer's keys and values
    source: bool  # other layers read its keys and values

    @property
    def prefix(self) -> str:
        """Prefix of the names of its attention leaves."""
        return "full_" if self.full else ""

    @property
    def stack(self) -> str:
        """The field of `Stacks` that holds its cache."""
        return "linear" if self.linear else "full" if self.full else "plain"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """Shape of a decoder. Hashable: the compile key."""

    vocab_size: int | None = None  # rows of the embedding; None: the tokenizer's
    layers: int = 2  # blocks of attention and MLP
    width: int = 128  # of the residual stream
    heads: int = 4  # of queries
    kv_heads: int = 4  # must divide heads
    head_dim: int = 32  # must be even
    mlp_width: int = 384  # hidden units
    rope_theta: float = 10_000.0  # base of the wavelengths
    rope: Stretch | None = None  # how wavelengths are stretched
    rotary_dim: int | None = None  # entries of a head that are rotated, the first ones; 0: none. None: all
    rotary_layers: tuple[bool, ...] = (True,)  # which layers rotate: a cycle
    learned_positions: int | None = None  # rows of a table added to the embedding: the longest sequence; None: no table
    window: int | None = None  # tokens a windowed layer sees, its own included
    window_layers: tuple[bool, ...] = (True,)  # which layers are windowed, where window is given: a cycle
    window_rope_theta: float | None = None  # base in windowed layers, not stretched; None: as in the others
    full: FullHeads | None = None  # heads of layers without a window, if their shape differs; None: it does not
    shared_layers: int = 0  # how many last layers reuse keys and values of the last layer before them with their window
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"  # rms_plus_one: the weight is counted from 1, as in Gemma
    norm_place: Literal["before", "after", "both"] = (
        "before"  # of attention and MLP; after: their outputs, before they are added
    )
    norm_eps: float = 1e-6  # added to the variance
    qk_norm: Literal["head", "all"] | None = "head"  # of queries and keys: each head as Qwen3, or all as OLMo 2
    value_norm: bool = False  # each head of the values is divided by its root mean square
    qkv_bias: bool = False  # of the products that make queries, keys and values
    output_bias: bool = False  # of attention's last product
    query_scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    attention_cap: float | None = None  # scores x become cap * tanh(x / cap)
    sinks: bool = False  # each head has a learned attention sink, a logit without a value, as in gpt-oss
    output_gate: bool = False  # attention's output is multiplied by a sigmoid of the layer's input, as in Qwen3.5
    linear: Linear | None = None  # of layers with linear attention instead of softmax attention; None: no layer
    parallel: bool = False  # attention and MLP read the same input, as in GPT-NeoX
    mlp: Literal["gated", "plain"] = "gated"  # gated: activation(gate) * up, as SwiGLU; plain: activation(up)
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"  # of the MLP
    mlp_bias: bool = False  # of its products
    shared_mlp_width: int | None = None  # of shared_layers; None: mlp_width
    experts: Experts | None = None  # of sparse layers, instead of the MLP or in addition; None: no layer is sparse
    embed_scale: float | None = None  # factor of the input embeddings; None: 1
    layer_inputs: int | None = None  # width of the token embeddings that each layer has, as in Gemma 4; None: none
    layer_scale: bool = False  # a layer's output is multiplied by a constant of that layer, which is not trained
    tied: bool = True  # the head is the embedding
    logit_cap: float | None = None  # logits x become cap * tanh(x / cap)
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # of matmuls and the cache
    param_dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # of the parameters
    remat: Remat = "none"  # saved for the backward pass: all, a layer's input, its products too; its input on the host
    attention: Attention = "auto"  # over full rows: the reference or a kernel; decoding uses Sampler.attention
    attention_block: int | None = None  # queries whose scores exist at once, recomputed in the backward pass; None: all

    def __post_init__(self) -> None:
        for name, largest in LARGEST.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= largest:
                raise ValueError(f"Decoder.{name} must be from 1 to {largest:,}; got {value}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads; got kv_heads={self.kv_heads}, heads={self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding; got {self.head_dim}")
        if not 0 <= self.rotated <= self.head_dim or self.rotated % 2:
            raise ValueError(f"rotary_dim must be even and at most head_dim={self.head_dim}; got {self.rotary_dim}")
        if isinstance(self.rope, LongRope) and len(self.rope.short) != self.rotated // 2:
            raise ValueError(
                f"LongRope.short and long need a number for each of the {self.rotated // 2} pairs that rotate; they "
                f"have {len(self.rope.short)}"
            )
        if self.attention not in NO_KERNEL and self.attention_block is not None:
            raise ValueError(
                f"attention_block needs attention='reference'; {self.attention} has its own blocks. Leave it out"
            )
        if self.attention not in NO_KERNEL and self.dtype == "float64":
            raise ValueError(f"attention={self.attention!r} computes in float32; dtype='float64' needs 'reference'")
        if self.attention == "cudnn" and self.dtype != "bfloat16":
            raise ValueError(f"attention='cudnn' computes in bfloat16; dtype={self.dtype!r} needs 'reference'")
        if self.attention == "cudnn" and (self.attention_cap is not None or self.sinks):
            raise ValueError("attention='cudnn' has neither attention_cap nor sinks; this model needs 'reference'")
        if self.full is not None and (self.heads % self.full.kv_heads or self.full.head_dim % 2):
            raise ValueError(
                f"FullHeads.kv_heads must divide heads={self.heads}, and head_dim be even; got {self.full}"
            )
        if self.full is not None and self.full.keys_are_values and self.qkv_bias:
            raise ValueError("FullHeads.keys_are_values cannot be combined with Decoder.qkv_bias")
        if self.shared_mlp_width is not None and (self.mlp != "gated" or self.mlp_bias):
            raise ValueError("Decoder.shared_mlp_width needs mlp='gated' and mlp_bias=False")
        if not 0 <= self.shared_layers < self.layers:
            raise ValueError(f"shared_layers must be below layers={self.layers}; got {self.shared_layers}")
        if self.shared_layers and not self.shared_from:
            raise ValueError(f"shared_layers = {self.shared_layers} have no layer before them to read keys from")
        if self.linear is not None and (self.full is not None or self.shared_layers):
            raise ValueError("Decoder.linear cannot be combined with full or shared_layers")
        if self.experts is not None and self.experts.shared_expert == "normed" and self.norm == "layer":
            raise ValueError("Experts.shared_expert='normed' cannot be combined with norm='layer'")
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

    def dense(self, layer: int) -> bool:
        """Whether a layer has the MLP, instead of experts or in addition to them."""
        return not self.sparse(layer) or self.experts.shared_expert is not None

    def shared(self, layer: int) -> bool:
        return layer >= self.layers - self.shared_layers

    @property
    def shared_from(self) -> dict[bool, int]:
        """Returns whether a sharing layer is windowed -> the layer whose keys and values it reads. Empty if a kind of
        sharing layer has no layer to read from."""
        unshared = self.layers - self.shared_layers
        last_of_kind = {self.windowed(i): i for i in range(unshared)}
        kinds = {self.windowed(i) for i in range(unshared, self.layers)}
        return {kind: last_of_kind[kind] for kind in kinds} if kinds <= last_of_kind.keys() else {}

    def variant(self, layer: int) -> LayerVariant:
        """Returns the properties that decide a layer's leaves and cache."""
        splits_windows = self.full is not None or self.shared_layers > 0
        return LayerVariant(
            sparse=self.sparse(layer),
            linear=self.linear is not None and self.linear.at(layer),
            full=self.full is not None and not self.windowed(layer),
            windowed=self.windowed(layer) if splits_windows else None,
            shared=self.shared(layer),
            source=self.shared_layers > 0 and layer in self.shared_from.values(),
        )


def check_length(cfg: Decoder, length: int) -> None:
    """Raises ValueError if a sequence of `length` tokens is longer than the table of positions, or than the length that
    its rope was chosen for."""
    if cfg.learned_positions is not None and length > cfg.learned_positions:
        raise ValueError(f"{length} tokens are more than the {cfg.learned_positions} positions that this model learned")
    if isinstance(cfg.rope, LongRope) and length > cfg.rope.original_length >= (cfg.rope.longest or 0):
        raise ValueError(
            f"{length} tokens are more than the {cfg.rope.original_length} that LongRope.short is for; "
            "shape.for_length chooses the other list"
        )


def for_length(cfg: Decoder, length: int) -> Decoder:
    """Returns the decoder for sequences of up to `length` tokens, or of its current length if that is longer. Only
    LongRope depends on it."""
    if not isinstance(cfg.rope, LongRope):
        return cfg
    return dataclasses.replace(cfg, rope=dataclasses.replace(cfg.rope, longest=max(length, cfg.rope.longest or 0)))


def check_divides(cfg: Decoder, mesh: Any) -> None:
    """Raises ValueError naming the field of Decoder that does not divide over the mesh."""
    train = lambda name: mesh_axes(name, TRAIN, mesh.shape)
    fields = {"heads": "heads", "kv_heads": "kv_heads", "mlp": "mlp_width", "vocab": "vocab_size", "embed": "width"}
    sizes = [(train(name), f"Decoder.{field}", getattr(cfg, field)) for name, field in fields.items()]
    # Mesh axes that the width of a table and of the rows looked up in it is sharded over.
    lookup_axes = mesh_axes("embed_shard", ACTIVATIONS, mesh.shape)
    sizes.append((lookup_axes, "Decoder.width", cfg.width))
    if cfg.experts is not None:
        sizes.append((train("mlp"), "Experts.width", cfg.experts.width))
        sizes.append((train("experts"), "Experts.count", cfg.experts.count))
    if cfg.full is not None:
        sizes.append((train("kv_heads"), "FullHeads.kv_heads", cfg.full.kv_heads))
    if cfg.linear is not None:
        sizes.append((train("kv_heads"), "Linear.key_heads", cfg.linear.key_heads))
    if cfg.shared_mlp_width is not None:
        sizes.append((train("mlp"), "Decoder.shared_mlp_width", cfg.shared_mlp_width))
    if cfg.layer_inputs is not None:
        total = cfg.layers * cfg.layer_inputs
        sizes += [(axes, "Decoder.layers * layer_inputs", total) for axes in (train("embed"), lookup_axes)]
    for axes, field, size in sizes:
        if size % num_shards(axes, mesh.shape):
            raise ValueError(f"{field} = {size} does not divide over {axis_fields(axes, mesh.shape)}")
