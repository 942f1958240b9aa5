"""The text models of Qwen3.5, as transformers 5.23 computes them: three layers of linear attention for each layer of
softmax attention, which has an output gate."""

from __future__ import annotations

from typing import Any

from jrl.models.attention.linear import Linear
from jrl.models.families.contract import Family, Keys, Pick, Place, Wrapped
from jrl.models.families.llama import HEAD_NORMS, OUT_IN, PLACES, ROPE, SHAPE, VECTOR, read_shape, write_shape
from jrl.models.families.rope import layer_flags, read_rope
from jrl.models.shape import Decoder

GRIDS = ("mrope_section", "mrope_interleaved")  # keys of rope for images; no effect on text


def read(keys: Keys) -> Decoder:
    return Decoder(**read_mixers(keys, read_shape(keys, head_dim=256, kv_heads=4, rope=False)))


def read_mixers(keys: Keys, shape: dict[str, Any]) -> dict[str, Any]:
    """Returns the Decoder fields that do not depend on experts. shape: those of `read_shape`."""
    keys.expect("attention_bias", False)
    keys.expect("attn_output_gate", True)
    keys.expect("output_gate_type", "silu", "swish")  # two names of one function
    keys.expect("mlp_only_layers", [])
    period, layers = keys.count("full_attention_interval", 4), range(shape["layers"])
    flags = layer_flags(keys, shape["layers"], "linear_attention")
    return {
        **shape,
        **read_rope(keys, shape["head_dim"], share=0.25, harmless=GRIDS),
        "qk_norm": "head",
        "norm": "rms_plus_one",
        "activation": keys.one_of("hidden_act", {"silu": "silu"}, "silu"),
        "output_gate": True,
        "linear": Linear(
            key_heads=keys.count("linear_num_key_heads", 16),
            value_heads=keys.count("linear_num_value_heads", 32),
            key_dim=keys.count("linear_key_head_dim", 128),
            value_dim=keys.count("linear_value_head_dim", 128),
            taps=keys.count("linear_conv_kernel_dim", 4),
            layers=tuple((i + 1) % period != 0 for i in layers) if flags is None else flags,
        ),
    }


def write(cfg: Decoder) -> dict[str, Any]:
    # A decoder without linear attention gets a placeholder, so that reading the config back shows the difference.
    linear = cfg.linear or Linear(key_heads=1, value_heads=1, key_dim=2, value_dim=2, layers=(True, False))
    kinds = ["linear_attention" if linear.at(i) else "full_attention" for i in range(cfg.layers)]
    return {
        **write_shape(cfg),
        "hidden_act": "silu",
        "partial_rotary_factor": cfg.rotated / cfg.head_dim,
        "layer_types": kinds,
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.value_heads,
        "linear_key_head_dim": linear.key_dim,
        "linear_value_head_dim": linear.value_dim,
        "linear_conv_kernel_dim": linear.taps,
    }


LAYER = "model.layers.{}.linear_attn."
QKV = Place(LAYER + "in_proj_qkv.weight", ((1, 2), (0,)), join=0)
CONV = Place(LAYER + "conv1d.weight", ((0, 1), (Pick(0, 1),), (2,)), join=0)
QUERY = "model.layers.{}.self_attn.q_proj.weight"  # for each head the query, then the gate
QWEN35 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    keys=(*SHAPE, *ROPE, "attention_bias", "attn_output_gate", "output_gate_type", "mlp_only_layers", "layer_types",
          "full_attention_interval", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
          "linear_value_head_dim", "linear_conv_kernel_dim"),
    harmless=("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    read=read,
    write=write,
    places={
        **{name: place for name, place in PLACES.items() if not name.endswith("_bias")},
        **HEAD_NORMS,
        "q": Place(QUERY, ((1, Pick(0, 2), 2), (0,))),
        "q_gate": Place(QUERY, ((1, Pick(1, 2), 2), (0,))),
        "linear_q": QKV,
        "linear_k": QKV,
        "linear_v": QKV,
        "conv_q": CONV,
        "conv_k": CONV,
        "conv_v": CONV,
        "linear_gate": Place(LAYER + "in_proj_z.weight", ((1, 2), (0,))),
        "linear_beta": Place(LAYER + "in_proj_b.weight", OUT_IN),
        "linear_step": Place(LAYER + "in_proj_a.weight", OUT_IN),
        "linear_step_bias": Place(LAYER + "dt_bias", VECTOR),
        "linear_decay": Place(LAYER + "A_log", VECTOR),
        "linear_norm": Place(LAYER + "norm.weight", VECTOR),
        "linear_o": Place(LAYER + "out_proj.weight", ((2,), (0, 1))),
    },
    ignored=(r"mtp\..*",),  # heads of multi-token prediction
    wrapped=Wrapped(
        model_type="qwen3_5",
        architecture="Qwen3_5ForConditionalGeneration",
        defaults={},
        harmless=("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
                  "language_model_only"),
        prefixes=("model.language_model.",),
        ignored=(r"(model\.)?visual\..*",),
        inherited=("tie_word_embeddings",),
    ),
)  # fmt: skip
