"""Mixtral (2401.04088): Mistral with experts in every layer, weighted by a softmax over a token's own experts."""

from __future__ import annotations

from typing import Any

from jrl.models.experts import Experts
from jrl.models.families.contract import Family, Keys, Place
from jrl.models.families.llama import ATTENTION, ENDS, OUT_IN, PRE_NORMS, ROPE, SHAPE, read_shape, write_shape
from jrl.models.families.qwen_moe import FUSED, ROUTER, count_experts, experts_of
from jrl.models.shape import Decoder


def read(keys: Keys) -> Decoder:
    keys.expect("router_jitter_noise", 0, 0.0)
    shape = read_shape(keys, norm_eps=1e-5, kv_heads=8, rope_theta=1e6)
    window = keys.take("sliding_window", None)
    return Decoder(
        **shape,
        activation=keys.one_of("hidden_act", {"silu": "silu"}, "silu"),
        window=None if window is None else keys.count("sliding_window"),
        experts=Experts(
            count=count_experts(keys, 8), per_token=keys.count("num_experts_per_tok", 2), width=shape["mlp_width"]
        ),
    )


def write(cfg: Decoder) -> dict[str, Any]:
    experts = experts_of(cfg)
    return {
        **write_shape(cfg),
        "intermediate_size": experts.width,
        "hidden_act": "silu",
        "sliding_window": cfg.window,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
    }


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    keys=(*SHAPE, *ROPE, "sliding_window", "num_experts", "num_local_experts", "num_experts_per_tok",
          "router_jitter_noise"),
    harmless=("output_router_logits", "router_aux_loss_coef"),
    read=read,
    write=write,
    places={
        **ATTENTION,
        **PRE_NORMS,
        **ENDS,
        "router": Place("model.layers.{}.block_sparse_moe.gate.weight", OUT_IN),
        "expert_gate": Place("model.layers.{}.block_sparse_moe.experts.{}.w1.weight", OUT_IN),
        "expert_up": Place("model.layers.{}.block_sparse_moe.experts.{}.w3.weight", OUT_IN),
        "expert_down": Place("model.layers.{}.block_sparse_moe.experts.{}.w2.weight", OUT_IN),
    },
    regrouped={**ROUTER, **FUSED},
)  # fmt: skip
