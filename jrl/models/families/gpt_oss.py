"""gpt-oss (2508.10925): attention sinks, windows in every second layer, experts with biases and a clamped gate."""

from __future__ import annotations

from typing import Any

from jrl.models.experts import GAIN, Experts
from jrl.models.families.contract import Family, Keys, Pick, Place
from jrl.models.families.llama import ATTENTION, ENDS, OUT_IN, PRE_NORMS, ROPE, SHAPE, VECTOR, read_shape, write_shape
from jrl.models.families.qwen_moe import count_experts, experts_of
from jrl.models.families.rope import layer_flags, layer_types, write_stretch
from jrl.models.rope import YarnRope
from jrl.models.shape import Decoder

LIMIT = 7.0  # default of the clamp
EXPERTS = "model.layers.{}.mlp.experts."


def read(keys: Keys) -> Decoder:
    quantized = keys.take("quantization_config", None)
    if quantized is not None:
        raise ValueError(
            f"{keys.where}: the weights are quantized ({str(quantized)[:80]}), and this version reads only "
            "floating-point weights: dequantize them with the tool that quantized them (transformers: "
            "Mxfp4Config(dequantize=True), then save_pretrained)"
        )
    keys.expect("swiglu_alpha", GAIN)
    shape = read_shape(keys, norm_eps=1e-5, head_dim=64, kv_heads=8, rope_theta=150_000.0)
    if keys.take("rope_scaling", None) is None and keys.take("rope_parameters", None) is None:
        shape["rope"] = YarnRope(factor=32.0, original_length=4096, truncate=False)
    flags = layer_flags(keys, shape["layers"])
    per_token = keys.count("num_experts_per_tok", 4)
    keys.expect("experts_per_token", per_token)
    bias = keys.flag("attention_bias", True)
    return Decoder(
        **shape,
        activation=keys.one_of("hidden_act", {"silu": "silu"}, "silu"),
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
        window=keys.maybe_count("sliding_window", 128),
        window_layers=(True, False) if flags is None else flags,
        experts=Experts(
            count=count_experts(keys, 128),
            per_token=per_token,
            width=shape["mlp_width"],
            bias=True,
            clamp=keys.number("swiglu_limit", LIMIT),
        ),
    )


def write(cfg: Decoder) -> dict[str, Any]:
    experts = experts_of(cfg)
    return {
        **write_shape(cfg),
        # Without rope_scaling, readers use that of the published models.
        "rope_scaling": write_stretch(cfg.rope) or {"rope_type": "default"},
        "intermediate_size": experts.width,
        "hidden_act": "silu",
        "attention_bias": cfg.qkv_bias,
        "sliding_window": cfg.window,
        "layer_types": layer_types(cfg),
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "swiglu_limit": LIMIT if experts.clamp is None else experts.clamp,
    }


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    keys=(*SHAPE, *ROPE, "attention_bias", "sliding_window", "layer_types", "num_experts", "num_local_experts",
          "num_experts_per_tok", "experts_per_token", "swiglu_alpha", "swiglu_limit", "quantization_config"),
    harmless=("initial_context_length", "output_router_logits", "router_aux_loss_coef"),
    read=read,
    write=write,
    places={
        **ATTENTION,
        **PRE_NORMS,
        **ENDS,
        "sinks": Place("model.layers.{}.self_attn.sinks", VECTOR),
        "router": Place("model.layers.{}.mlp.router.weight", OUT_IN),
        "router_bias": Place("model.layers.{}.mlp.router.bias", VECTOR),
        # Columns of gate and up are interleaved.
        "expert_gate": Place(EXPERTS + "gate_up_proj", ((0,), (1,), (2, Pick(0, 2)))),
        "expert_up": Place(EXPERTS + "gate_up_proj", ((0,), (1,), (2, Pick(1, 2)))),
        "expert_down": Place(EXPERTS + "down_proj", ((0,), (1,), (2,))),
        "expert_gate_bias": Place(EXPERTS + "gate_up_proj_bias", ((0,), (1, Pick(0, 2)))),
        "expert_up_bias": Place(EXPERTS + "gate_up_proj_bias", ((0,), (1, Pick(1, 2)))),
        "expert_down_bias": Place(EXPERTS + "down_proj_bias", ((0,), (1,))),
    },
)  # fmt: skip
