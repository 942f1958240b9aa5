"""Phi-3 and Phi-4 (2404.14219, 2412.08905): Llama with fused q, k, v and fused gate and up; LongRoPE in the
long-context models."""

from __future__ import annotations

from typing import Any

from jrl.models.families.contract import Family, Keys, Place
from jrl.models.families.llama import ATTENTION, ENDS, MLP, OUT_IN, PRE_NORMS, ROPE, SHAPE, read_shape, write_shape
from jrl.models.rope import LongRope
from jrl.models.shape import Decoder

QKV = Place("model.layers.{}.self_attn.qkv_proj.weight", ((1, 2), (0,)), join=0)
GATE_UP = Place("model.layers.{}.mlp.gate_up_proj.weight", OUT_IN, join=0)


# They decide the factor of LongRoPE and which of its lists is used. Without a stretched rope they have no effect.
LENGTHS = ("original_max_position_embeddings", "max_position_embeddings")
# Keys of Phi-4-mini, with the only values that are computed.
FIXED = {"attention_bias": False, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}


def read(keys: Keys) -> Decoder:
    for name, value in FIXED.items():
        keys.expect(name, value)
    for name in LENGTHS:
        keys.take(name, None)
    return Decoder(
        **read_shape(keys, norm_eps=1e-5),
        activation=keys.one_of("hidden_act", {"silu": "silu"}, "silu"),
        window=keys.maybe_count("sliding_window", None),
    )


def write(cfg: Decoder) -> dict[str, Any]:
    share = cfg.rotated / cfg.head_dim
    long = {}
    if isinstance(cfg.rope, LongRope):
        # Readers take the factor from the two lengths, and transformers 4 allows no other key in rope_scaling.
        scaling = {"type": "longrope", "short_factor": list(cfg.rope.short), "long_factor": list(cfg.rope.long)}
        if cfg.rope.attention_factor is not None:
            scaling["attention_factor"] = cfg.rope.attention_factor
        long = {
            "rope_scaling": scaling,
            "original_max_position_embeddings": cfg.rope.original_length,
            "max_position_embeddings": round(cfg.rope.factor * cfg.rope.original_length),
        }
    return {
        **write_shape(cfg),
        **long,
        "hidden_act": "silu",
        "sliding_window": cfg.window,
        "partial_rotary_factor": share,
    }


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    keys=(*SHAPE, *ROPE, "sliding_window", *FIXED, *LENGTHS),
    harmless=("embd_pdrop", "resid_pdrop"),
    read=read,
    write=write,
    places={**ATTENTION, "q": QKV, "k": QKV, "v": QKV, **PRE_NORMS, **ENDS, "gate": GATE_UP, "up": GATE_UP,
            "down": MLP["down"]},
    pad_id=32_000,
)  # fmt: skip
