"""OLMoE (2409.02060): experts in every layer, weighted by a softmax over all; q and k normalized over all heads."""

from __future__ import annotations

from typing import Any

from jrl.models.experts import Experts
from jrl.models.families.contract import Family, Keys, Place
from jrl.models.families.llama import ATTENTION, ENDS, PRE_NORMS, ROPE, SHAPE, read_shape, write_shape
from jrl.models.families.qwen_moe import EXPERTS, FUSED, count_experts, experts_of
from jrl.models.shape import Decoder


def read(keys: Keys) -> Decoder:
    keys.expect("clip_qkv")
    bias, shape = keys.flag("attention_bias", False), read_shape(keys, norm_eps=1e-5)
    return Decoder(
        **{**shape, "qk_norm": "all"},
        activation=keys.one_of("hidden_act", {"silu": "silu"}, "silu"),
        qkv_bias=bias,
        output_bias=bias,
        experts=Experts(
            count=count_experts(keys, 64),
            per_token=keys.count("num_experts_per_tok", 8),
            width=shape["mlp_width"],
            softmax="chosen" if keys.flag("norm_topk_prob", False) else "all",
        ),
    )


def write(cfg: Decoder) -> dict[str, Any]:
    experts = experts_of(cfg)
    return {
        **write_shape(cfg),
        "intermediate_size": experts.width,
        "hidden_act": "silu",
        "attention_bias": cfg.qkv_bias,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "norm_topk_prob": experts.softmax == "chosen",
    }


OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    keys=(*SHAPE, *ROPE, "attention_bias", "clip_qkv", "num_experts", "num_local_experts", "num_experts_per_tok",
          "norm_topk_prob"),
    harmless=("output_router_logits", "router_aux_loss_coef"),
    read=read,
    write=write,
    places={
        **ATTENTION,
        **PRE_NORMS,
        **ENDS,
        **EXPERTS,
        "q_norm": Place("model.layers.{}.self_attn.q_norm.weight", ((0, 1),)),
        "k_norm": Place("model.layers.{}.self_attn.k_norm.weight", ((0, 1),)),
    },
    regrouped=FUSED,
    pad_id=1,
)  # fmt: skip
