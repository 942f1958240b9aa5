"""OLMo 2 (2501.00656): norms after attention and MLP instead of before, queries and keys normalized over all heads.
OLMo 3 (2512.13961): windowed layers between full ones; only the rope of full layers is ever stretched."""

from __future__ import annotations

from typing import Any

from jrl.models.families.contract import Family, Keys, Place
from jrl.models.families.gemma import read_two_ropes
from jrl.models.families.llama import ATTENTION, ENDS, MLP, ROPE, SHAPE, VECTOR, read_shape, write_shape
from jrl.models.families.rope import layer_flags, layer_types, write_stretch
from jrl.models.shape import Decoder

THETA = 500_000.0  # default of OLMo 3


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


def read_olmo3(keys: Keys) -> Decoder:
    shape = read_shape(keys, norm_eps=1e-5, rope=False)
    ropes = read_two_ropes(keys, theta=THETA, near_theta=THETA, near_key="rope_theta")
    bias, declared = keys.flag("attention_bias", False), layer_flags(keys, shape["layers"])
    return Decoder(
        **{**shape, "qk_norm": "all", **ropes},
        norm_place="after",
        activation=keys.one_of("hidden_act", {"silu": "silu"}, "silu"),
        qkv_bias=bias,
        output_bias=bias,
        window=keys.count("sliding_window", 4096),
        window_layers=tuple((i + 1) % 4 != 0 for i in range(shape["layers"])) if declared is None else declared,
    )


def write_olmo3(cfg: Decoder) -> dict[str, Any]:
    near = cfg.rope_theta if cfg.window_rope_theta is None else cfg.window_rope_theta
    config = {**write(cfg), "sliding_window": cfg.window, "layer_types": layer_types(cfg)}
    if cfg.rope_theta == near == THETA:
        return config
    # rope_theta alone is read there as the base of full layers only.
    del config["rope_theta"], config["rope_scaling"]
    full = {"rope_type": "default", **(write_stretch(cfg.rope) or {}), "rope_theta": cfg.rope_theta}
    return {**config, "rope_parameters": {
        "full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": near}
    }}  # fmt: skip


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
    pad_id=1,
)
OLMO3 = OLMO2._replace(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    keys=(*SHAPE, "rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "sliding_window", "layer_types"),
    read=read_olmo3,
    write=write_olmo3,
)
