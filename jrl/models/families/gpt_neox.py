"""GPT-NeoX and Pythia (2204.06745, 2304.01373): layer norm, biases, a part of each head rotated, parallel residual."""

from __future__ import annotations

from typing import Any

from jrl.models.families.contract import Family, Keys, Pick, Place
from jrl.models.families.llama import OUT_IN, VECTOR
from jrl.models.families.rope import read_rope, write_stretch
from jrl.models.shape import Decoder

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
               "relu": "relu"}  # fmt: skip
LAYER = "gpt_neox.layers.{}."


def _fused(index: int) -> dict[str, Place]:
    """q, k and v are adjacent within each head."""
    name = LAYER + "attention.query_key_value"
    leaf = "qkv"[index]
    return {
        leaf: Place(f"{name}.weight", ((1, Pick(index, 3), 2), (0,))),
        f"{leaf}_bias": Place(f"{name}.bias", ((0, Pick(index, 3), 1),)),
    }


def read(keys: Keys) -> Decoder:
    width, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    if width % heads:
        raise ValueError(f"{keys.where}: num_attention_heads = {heads} does not divide hidden_size = {width}")
    rope = read_rope(keys, width // heads, theta_key="rotary_emb_base", share=0.25, share_key="rotary_pct")
    keys.expect("rope_theta", rope["rope_theta"])  # some files have both
    keys.take("partial_rotary_factor", None)
    bias = keys.flag("attention_bias", True)
    return Decoder(
        vocab_size=keys.count("vocab_size"),
        layers=keys.count("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        mlp_width=keys.count("intermediate_size"),
        norm="layer",
        norm_eps=keys.number("layer_norm_eps", 1e-5),
        qk_norm=None,
        qkv_bias=bias,
        output_bias=bias,
        mlp="plain",
        mlp_bias=True,
        activation=keys.one_of("hidden_act", ACTIVATIONS, "gelu"),
        parallel=keys.flag("use_parallel_residual", True),
        tied=keys.flag("tie_word_embeddings", False),
        **rope,
    )


def write(cfg: Decoder) -> dict[str, Any]:
    activations = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}
    return {
        "vocab_size": cfg.vocab_size,
        "num_hidden_layers": cfg.layers,
        "hidden_size": cfg.width,
        "num_attention_heads": cfg.heads,
        "intermediate_size": cfg.mlp_width,
        "layer_norm_eps": cfg.norm_eps,
        "attention_bias": cfg.qkv_bias,
        "hidden_act": activations.get(cfg.activation),
        "use_parallel_residual": cfg.parallel,
        "tie_word_embeddings": cfg.tied,
        "rotary_emb_base": cfg.rope_theta,
        "rotary_pct": cfg.rotated / cfg.head_dim,
        "rope_scaling": write_stretch(cfg.rope),
    }


GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    keys=("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size",
          "layer_norm_eps", "attention_bias", "hidden_act", "use_parallel_residual", "tie_word_embeddings",
          "rotary_emb_base", "rotary_pct", "rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor"),
    harmless=("attention_probs_dropout_prob", "classifier_dropout", "hidden_dropout", "hidden_dropout_prob"),
    read=read,
    write=write,
    places={
        **_fused(0),
        **_fused(1),
        **_fused(2),
        "o": Place(LAYER + "attention.dense.weight", ((2,), (0, 1))),
        "o_bias": Place(LAYER + "attention.dense.bias", VECTOR),
        "up": Place(LAYER + "mlp.dense_h_to_4h.weight", OUT_IN),
        "up_bias": Place(LAYER + "mlp.dense_h_to_4h.bias", VECTOR),
        "down": Place(LAYER + "mlp.dense_4h_to_h.weight", OUT_IN),
        "down_bias": Place(LAYER + "mlp.dense_4h_to_h.bias", VECTOR),
        "attention_norm": Place(LAYER + "input_layernorm.weight", VECTOR),
        "attention_norm_bias": Place(LAYER + "input_layernorm.bias", VECTOR),
        "mlp_norm": Place(LAYER + "post_attention_layernorm.weight", VECTOR),
        "mlp_norm_bias": Place(LAYER + "post_attention_layernorm.bias", VECTOR),
        "embed": Place("gpt_neox.embed_in.weight", ((0,), (1,))),
        "final_norm": Place("gpt_neox.final_layer_norm.weight", VECTOR),
        "final_norm_bias": Place("gpt_neox.final_layer_norm.bias", VECTOR),
        "head": Place("embed_out.weight", ((0,), (1,))),
    },
    ignored=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
)  # fmt: skip
