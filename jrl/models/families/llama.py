"""Llama 2, 3 and 3.1 to 3.3 (2307.09288, 2407.21783), and what later families share with it."""

from __future__ import annotations

from typing import Any

from jrl.models.families.contract import Family, Keys, Place
from jrl.models.families.rope import read_rope, write_rope
from jrl.models.shape import Decoder

OUT_IN = ((1,), (0,))  # a torch linear layer's [out, in] of a leaf [in, out]
VECTOR = ((0,),)

ATTENTION = {
    "q": Place("model.layers.{}.self_attn.q_proj.weight", ((1, 2), (0,))),
    "k": Place("model.layers.{}.self_attn.k_proj.weight", ((1, 2), (0,))),
    "v": Place("model.layers.{}.self_attn.v_proj.weight", ((1, 2), (0,))),
    "o": Place("model.layers.{}.self_attn.o_proj.weight", ((2,), (0, 1))),
    "q_bias": Place("model.layers.{}.self_attn.q_proj.bias", ((0, 1),)),
    "k_bias": Place("model.layers.{}.self_attn.k_proj.bias", ((0, 1),)),
    "v_bias": Place("model.layers.{}.self_attn.v_proj.bias", ((0, 1),)),
    "o_bias": Place("model.layers.{}.self_attn.o_proj.bias", VECTOR),
}
HEAD_NORMS = {
    "q_norm": Place("model.layers.{}.self_attn.q_norm.weight", VECTOR),
    "k_norm": Place("model.layers.{}.self_attn.k_norm.weight", VECTOR),
}
MLP = {
    "gate": Place("model.layers.{}.mlp.gate_proj.weight", OUT_IN),
    "up": Place("model.layers.{}.mlp.up_proj.weight", OUT_IN),
    "down": Place("model.layers.{}.mlp.down_proj.weight", OUT_IN),
    "gate_bias": Place("model.layers.{}.mlp.gate_proj.bias", VECTOR),
    "up_bias": Place("model.layers.{}.mlp.up_proj.bias", VECTOR),
    "down_bias": Place("model.layers.{}.mlp.down_proj.bias", VECTOR),
}
ENDS = {
    "embed": Place("model.embed_tokens.weight", ((0,), (1,))),
    "final_norm": Place("model.norm.weight", VECTOR),
    "head": Place("lm_head.weight", ((0,), (1,))),
}
PRE_NORMS = {
    "attention_norm": Place("model.layers.{}.input_layernorm.weight", VECTOR),
    "mlp_norm": Place("model.layers.{}.post_attention_layernorm.weight", VECTOR),
}
PLACES = {**ATTENTION, **MLP, **PRE_NORMS, **ENDS}
IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)  # in old files; jrl computes it

SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
         "intermediate_size", "rms_norm_eps", "tie_word_embeddings", "hidden_act")  # fmt: skip
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")


def read_shape(
    keys: Keys,
    *,
    tied: bool = False,
    norm_eps: float = 1e-6,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    rope_theta: float = 10_000.0,
    rope: bool = True,
    mlp_key: str = "intermediate_size",
) -> dict[str, Any]:
    """Returns the Decoder fields that these families share. The arguments are defaults for missing keys.

    Args:
      rope: False if the family reads its rope itself.
      mlp_key: the key of the MLP's width.
    """
    width, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    kv = keys.count("num_key_value_heads", kv_heads or heads)
    if heads % kv:
        raise ValueError(f"{keys.where}: num_key_value_heads = {kv} does not divide num_attention_heads = {heads}")
    declared = keys.take("head_dim", head_dim)
    if declared is None and width % heads:
        raise ValueError(
            f"{keys.where}: num_attention_heads = {heads} does not divide hidden_size = {width}, and there is no "
            "head_dim"
        )
    head_dim = width // heads if declared is None else keys.count("head_dim", head_dim)
    return dict(
        vocab_size=keys.count("vocab_size"),
        layers=keys.count("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=kv,
        head_dim=head_dim,
        mlp_width=keys.count(mlp_key),
        norm_eps=keys.number("rms_norm_eps", norm_eps),
        tied=keys.flag("tie_word_embeddings", tied),
        qk_norm=None,
        **(read_rope(keys, head_dim, theta=rope_theta) if rope else {}),
    )


def write_shape(cfg: Decoder) -> dict[str, Any]:
    """Returns the keys that these families share."""
    return {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.width,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.mlp_width,
        "rms_norm_eps": cfg.norm_eps,
        "tie_word_embeddings": cfg.tied,
        **write_rope(cfg),
    }


def read(keys: Keys) -> Decoder:
    bias = keys.flag("attention_bias", False)
    return Decoder(
        **read_shape(keys),
        activation=keys.one_of("hidden_act", {"silu": "silu"}, "silu"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=keys.flag("mlp_bias", False),
    )


def write(cfg: Decoder) -> dict[str, Any]:
    return {**write_shape(cfg), "hidden_act": "silu", "attention_bias": cfg.qkv_bias, "mlp_bias": cfg.mlp_bias}


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys=(*SHAPE, *ROPE, "attention_bias", "mlp_bias"),
    harmless=("pretraining_tp",),
    read=read,
    write=write,
    places=PLACES,
    ignored=IGNORED,
)
