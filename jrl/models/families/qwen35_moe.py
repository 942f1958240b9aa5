"""The text models of Qwen3.5 with experts, as transformers 5.23 computes them: every layer has a router, its experts,
and a gated shared expert that every token goes through."""

from __future__ import annotations

from typing import Any

from jrl.models.experts import Experts
from jrl.models.families import qwen35
from jrl.models.families.contract import Keys, Place
from jrl.models.families.llama import OUT_IN, read_shape
from jrl.models.families.qwen_moe import EXPERTS, FUSED, experts_of
from jrl.models.shape import Decoder

SHARED_WIDTH = "shared_expert_intermediate_size"


def read(keys: Keys) -> Decoder:
    keys.expect("norm_topk_prob", True)
    keys.expect("decoder_sparse_step", 1)
    shape = read_shape(keys, head_dim=256, kv_heads=2, rope=False, mlp_key=SHARED_WIDTH)
    experts = Experts(
        count=keys.count("num_experts"),
        per_token=keys.count("num_experts_per_tok", 8),
        width=keys.count("moe_intermediate_size"),
        shared_expert="gated",
    )
    return Decoder(**qwen35.read_mixers(keys, shape), experts=experts)


def write(cfg: Decoder) -> dict[str, Any]:
    experts = experts_of(cfg)
    return {
        **{name: value for name, value in qwen35.write(cfg).items() if name != "intermediate_size"},
        SHARED_WIDTH: cfg.mlp_width,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.width,
    }


MLP = "model.layers.{}.mlp."
QWEN35_MOE = qwen35.QWEN35._replace(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    keys=(*(key for key in qwen35.QWEN35.keys if key != "intermediate_size"), SHARED_WIDTH, "norm_topk_prob",
          "decoder_sparse_step", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    harmless=(*qwen35.QWEN35.harmless, "intermediate_size", "output_router_logits", "router_aux_loss_coef"),
    read=read,
    write=write,
    places={
        **qwen35.QWEN35.places,
        **{name: Place(f"{MLP}shared_expert.{name}_proj.weight", OUT_IN) for name in ("gate", "up", "down")},
        "shared_expert_gate": Place(MLP + "shared_expert_gate.weight", OUT_IN),
        "router": EXPERTS["router"],
        **FUSED,  # the published form
    },
    regrouped={name: EXPERTS[name] for name in FUSED},  # the form that transformers 5 writes
    wrapped=qwen35.QWEN35.wrapped._replace(
        model_type="qwen3_5_moe", architecture="Qwen3_5MoeForConditionalGeneration"
    ),
)  # fmt: skip
