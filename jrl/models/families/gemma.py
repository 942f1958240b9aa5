"""Gemma 2 (2408.00118) and the text models of Gemma 3 (2503.19786): norms on both sides counted from 1, a scaled
embedding, tanh-gelu, windowed layers between full ones; caps in Gemma 2, normalized heads and two ropes in Gemma 3."""

from __future__ import annotations

from typing import Any

from jrl.models.families.contract import Family, Keys, Place, Wrapped
from jrl.models.families.llama import ATTENTION, ENDS, HEAD_NORMS, MLP, ROPE, SHAPE, VECTOR, read_shape, write_shape
from jrl.models.families.rope import (
    layer_flags,
    layer_types,
    read_one_of_two,
    read_stretch,
    read_theta,
    write_stretch,
)
from jrl.models.shape import Decoder

PLACES = {
    **ATTENTION,
    **MLP,
    **ENDS,
    "attention_norm": Place("model.layers.{}.input_layernorm.weight", VECTOR),
    "attention_out_norm": Place("model.layers.{}.post_attention_layernorm.weight", VECTOR),
    "mlp_norm": Place("model.layers.{}.pre_feedforward_layernorm.weight", VECTOR),
    "mlp_out_norm": Place("model.layers.{}.post_feedforward_layernorm.weight", VECTOR),
}
SHARED = (*(key for key in SHAPE if key != "hidden_act"), "hidden_activation", "query_pre_attn_scalar",
          "attention_bias", "sliding_window", "layer_types", "attn_logit_softcapping", "final_logit_softcapping",
          "use_bidirectional_attention")  # fmt: skip


def read_shared(keys: Keys, shape: dict[str, Any], flags: tuple[bool, ...]) -> dict[str, Any]:
    """Returns the Decoder fields that both generations share. flags: [layers], windowed by default."""
    keys.expect("use_bidirectional_attention", False)
    bias = keys.flag("attention_bias", False)
    declared = layer_flags(keys, shape["layers"])
    return {
        **shape,
        "norm": "rms_plus_one",
        "norm_place": "both",
        "activation": keys.one_of(
            "hidden_activation", {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}, "gelu_pytorch_tanh"
        ),
        "embed_scale": shape["width"] ** 0.5,
        "query_scale": keys.number("query_pre_attn_scalar", 256) ** -0.5,
        "qkv_bias": bias,
        "output_bias": bias,
        "window": keys.maybe_count("sliding_window", 4096),
        "window_layers": flags if declared is None else declared,
    }


def write_shared(cfg: Decoder) -> dict[str, Any]:
    scalar = (cfg.head_dim**-0.5 if cfg.query_scale is None else cfg.query_scale) ** -2
    activations = {"gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu"}
    return {
        **write_shape(cfg),
        "hidden_activation": activations.get(cfg.activation),
        # Taking a root and squaring it again leaves a rounding error.
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar,
        "attention_bias": cfg.qkv_bias,
        "sliding_window": cfg.window,
        "layer_types": layer_types(cfg),
        "attn_logit_softcapping": cfg.attention_cap,
        "final_logit_softcapping": cfg.logit_cap,
    }


def read_gemma2(keys: Keys) -> Decoder:
    shape = read_shape(keys, tied=True, head_dim=256, kv_heads=4)
    flags = tuple(i % 2 == 0 for i in range(shape["layers"]))
    fields = read_shared(keys, shape, flags)
    keys.expect("sliding_window_size", fields["window"])  # the first files have both names
    return Decoder(
        **fields,
        attention_cap=keys.maybe("attn_logit_softcapping", 50.0),
        logit_cap=keys.maybe("final_logit_softcapping", 30.0),
    )


def read_gemma3(keys: Keys) -> Decoder:
    shape = {
        **read_shape(keys, tied=True, head_dim=256, kv_heads=4, rope=False),
        "qk_norm": "head",
        **read_two_ropes(keys, theta=1_000_000.0, near_theta=10_000.0, near_key="rope_local_base_freq"),
    }
    newer = keys.take("_sliding_window_pattern", 6)  # transformers 5 writes it beside the older key
    period = keys.take("sliding_window_pattern", newer)
    flags = tuple((i + 1) % period != 0 for i in range(shape["layers"]))
    return Decoder(
        **read_shared(keys, shape, flags),
        attention_cap=keys.maybe("attn_logit_softcapping", None),
        logit_cap=keys.maybe("final_logit_softcapping", None),
    )


def read_two_ropes(keys: Keys, *, theta: float, near_theta: float, near_key: str) -> dict[str, Any]:
    """Returns rope_theta, rope and window_rope_theta. Only the rope of full layers is ever stretched.

    Args:
      theta, near_theta: default bases of full and of windowed layers.
      near_key: transformers 4's name for the base of windowed layers.
    """
    scaling, parameters = read_one_of_two(keys)
    theta, near_theta = read_theta(keys, scaling, theta), keys.number(near_key, near_theta)
    if parameters is None:
        return {
            "rope_theta": theta,
            "rope": None if scaling is None else read_stretch(scaling, keys),
            "window_rope_theta": near_theta,
        }
    full, near = parameters.inside("full_attention"), parameters.inside("sliding_attention")
    parameters.close()
    full, near = full or Keys({}), near or Keys({})
    fields = {
        "rope_theta": full.number("rope_theta", theta),
        "window_rope_theta": near.number("rope_theta", near_theta),
    }
    if read_stretch(near, keys) is not None:
        raise ValueError(f"{near.where}: the rope of windowed layers is stretched, which is not supported")
    return {**fields, "rope": read_stretch(full, keys)}


def write_gemma3(cfg: Decoder) -> dict[str, Any]:
    local = cfg.rope_theta if cfg.window_rope_theta is None else cfg.window_rope_theta
    return {
        **write_shared(cfg),
        "rope_theta": cfg.rope_theta,
        "rope_scaling": write_stretch(cfg.rope),
        "rope_local_base_freq": local,
    }


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    keys=(*SHARED, *ROPE, "sliding_window_size"),
    harmless=("hidden_act",),
    read=read_gemma2,
    write=write_shared,
    places=PLACES,
    pad_id=0,
)
GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    keys=(*SHARED, "rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "sliding_window_pattern",
          "_sliding_window_pattern"),
    harmless=("hidden_act",),
    read=read_gemma3,
    write=write_gemma3,
    places={**PLACES, **HEAD_NORMS},
    # Sizes from 4B on are published with a vision tower. Only the text model is read.
    wrapped=Wrapped(
        model_type="gemma3",
        architecture="Gemma3ForConditionalGeneration",
        defaults={"vocab_size": 262_208, "num_attention_heads": 8},
        harmless=("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index",
                  "boi_token_id", "eoi_token_id", "image_token_id", "projector_hidden_act", "tie_word_embeddings"),
        prefixes=("language_model.model.", "model.language_model."),
        ignored=(r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*"),
    ),
    pad_id=0,
)  # fmt: skip
