"""Qwen3 with experts (2505.09388): normalized heads, and in sparse layers a router over gated MLPs."""

from __future__ import annotations

from typing import Any

from jrl.models.experts import Experts
from jrl.models.families.contract import Family, Keys, Place
from jrl.models.families.llama import HEAD_NORMS, IGNORED, OUT_IN, PLACES, ROPE, SHAPE, read_shape, write_shape
from jrl.models.families.qwen import read_window
from jrl.models.shape import Decoder

ROUTER = {"router": Place("model.layers.{}.mlp.gate.weight", OUT_IN)}
EXPERTS = {
    **ROUTER,
    "expert_gate": Place("model.layers.{}.mlp.experts.{}.gate_proj.weight", OUT_IN),
    "expert_up": Place("model.layers.{}.mlp.experts.{}.up_proj.weight", OUT_IN),
    "expert_down": Place("model.layers.{}.mlp.experts.{}.down_proj.weight", OUT_IN),
}
# As transformers 5 stores them, and writes them unless it keeps the published form.
GATE_UP = Place("model.layers.{}.mlp.experts.gate_up_proj", ((0,), (2,), (1,)), join=1)
FUSED = {
    "expert_gate": GATE_UP,
    "expert_up": GATE_UP,
    "expert_down": Place("model.layers.{}.mlp.experts.down_proj", ((0,), (2,), (1,))),
}


def count_experts(keys: Keys, default: int | None = None) -> int:
    """Returns the number of experts, whose key has two names."""
    name = "num_local_experts" if keys.take("num_local_experts", None) is not None else "num_experts"
    keys.take("num_experts", None)
    return keys.count(name) if default is None else keys.count(name, default)


def experts_of(cfg: Decoder) -> Experts:
    """Returns the experts of `cfg`; if it has none, a placeholder of one expert, so that reading the config back shows
    the difference."""
    return cfg.experts or Experts(count=1, per_token=1, width=cfg.mlp_width)


# Keys of Qwen3-Coder, with the only values that are computed.
FIXED = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}


def read(keys: Keys) -> Decoder:
    for name, value in FIXED.items():
        keys.expect(name, value)
    shape = read_shape(keys, kv_heads=4)
    layers, bias = range(shape["layers"]), keys.flag("attention_bias", False)
    dense, step = keys.take("mlp_only_layers", []), keys.count("decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise ValueError(f"{keys.where}: mlp_only_layers is {dense!r:.200}; it must be a list of layer indices")
    return Decoder(
        **{**shape, "qk_norm": "head"},
        activation=keys.one_of("hidden_act", {"silu": "silu"}, "silu"),
        qkv_bias=bias,
        output_bias=bias,
        window=read_window(keys, keys.flag("use_sliding_window", False)),
        experts=Experts(
            count=count_experts(keys),
            per_token=keys.count("num_experts_per_tok", 8),
            width=keys.count("moe_intermediate_size"),
            softmax="chosen" if keys.flag("norm_topk_prob", False) else "all",
            layers=tuple(i not in dense and (i + 1) % step == 0 for i in layers),
        ),
    )


def write(cfg: Decoder) -> dict[str, Any]:
    experts = experts_of(cfg)
    return {
        **write_shape(cfg),
        "hidden_act": "silu",
        "attention_bias": cfg.qkv_bias,
        "use_sliding_window": cfg.window is not None,
        "sliding_window": cfg.window,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.width,
        "norm_topk_prob": experts.softmax == "chosen",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(cfg.layers) if not cfg.sparse(i)],
    }


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys=(*SHAPE, *ROPE, "attention_bias", "use_sliding_window", "sliding_window", "mlp_only_layers",
          "decoder_sparse_step", "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
          "norm_topk_prob", *FIXED),
    harmless=("max_window_layers", "output_router_logits", "router_aux_loss_coef"),
    read=read,
    write=write,
    places={**PLACES, **HEAD_NORMS, **EXPERTS},
    ignored=IGNORED,
    regrouped=FUSED,
)  # fmt: skip
