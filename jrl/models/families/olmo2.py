"""OLMo 2 (2501.00656): norms after attention and MLP instead of before, queries and keys normalised as a whole."""

from __future__ import annotations

from typing import Any

from jrl.models.decoder import Decoder
from jrl.models.families.contract import Family, Keys, Place
from jrl.models.families.llama import ATTENTION, ENDS, MLP, ROPE, SHAPE, VECTOR, read_shape, write_shape


def read(keys: Keys) -> Decoder:
    bias = keys.flag("attention_bias", False)
    return Decoder(
        **{**read_shape(keys, norm_eps=1e-5), "qk_norm": "all"},
        norm_place="after",
        activation=keys.one_of("hidden_act", {"silu": "silu"}, "silu"),
        qkv_bias=bias,
        output_bias=bias,
    )


def write(cfg: Decoder) -> dict[str, Any]:
    return {**write_shape(cfg), "hidden_act": "silu", "attention_bias": cfg.qkv_bias}


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    keys=(*SHAPE, *ROPE, "attention_bias"),
    harmless=(),
    read=read,
    write=write,
    places={
        **ATTENTION,
        **MLP,
        **ENDS,
        "q_norm": Place("model.layers.{}.self_attn.q_norm.weight", ((0, 1),)),
        "k_norm": Place("model.layers.{}.self_attn.k_norm.weight", ((0, 1),)),
        "attention_out_norm": Place("model.layers.{}.post_attention_layernorm.weight", VECTOR),
        "mlp_out_norm": Place("model.layers.{}.post_feedforward_layernorm.weight", VECTOR),
    },
)
