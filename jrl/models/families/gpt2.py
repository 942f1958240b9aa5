"""GPT-2: layer norm, biases, learned positions, linear layers stored [in, out], a tied head."""

from __future__ import annotations

from typing import Any

from jrl.models.families.contract import Family, Keys, Pick, Place
from jrl.models.families.llama import VECTOR
from jrl.models.shape import Decoder

ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
LAYER = "transformer.h.{}."
IN_OUT = ((0,), (1,))


def _fused(index: int) -> dict[str, Place]:
    leaf = "qkv"[index]
    return {
        leaf: Place(LAYER + "attn.c_attn.weight", ((0,), (Pick(index, 3), 1, 2))),
        f"{leaf}_bias": Place(LAYER + "attn.c_attn.bias", ((Pick(index, 3), 0, 1),)),
    }


def read(keys: Keys) -> Decoder:
    width, heads = keys.count("n_embd"), keys.count("n_head")
    if width % heads:
        raise ValueError(f"{keys.where}: n_head = {heads} does not divide n_embd = {width}")
    keys.expect("scale_attn_by_inverse_layer_idx", False)
    return Decoder(
        vocab_size=keys.count("vocab_size"),
        layers=keys.count("n_layer"),
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        mlp_width=keys.count("n_inner", 4 * width),
        norm="layer",
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        qk_norm=None,
        qkv_bias=True,
        output_bias=True,
        query_scale=None if keys.flag("scale_attn_weights", True) else 1.0,
        mlp="plain",
        mlp_bias=True,
        activation=keys.one_of("activation_function", ACTIVATIONS, "gelu_new"),
        rotary_dim=0,
        learned_positions=keys.count("n_positions", 1024),
        tied=keys.flag("tie_word_embeddings", True),
    )


def write(cfg: Decoder) -> dict[str, Any]:
    activations = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}
    return {
        "vocab_size": cfg.vocab_size,
        "n_layer": cfg.layers,
        "n_embd": cfg.width,
        "n_head": cfg.heads,
        "n_inner": cfg.mlp_width,
        "n_positions": cfg.learned_positions,
        "layer_norm_epsilon": cfg.norm_eps,
        "scale_attn_weights": cfg.query_scale != 1.0,
        "activation_function": activations.get(cfg.activation),
        "tie_word_embeddings": cfg.tied,
    }


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    keys=("vocab_size", "n_layer", "n_embd", "n_head", "n_inner", "n_positions", "layer_norm_epsilon",
          "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "activation_function", "tie_word_embeddings"),
    harmless=("_num_labels", "attn_pdrop", "embd_pdrop", "n_ctx", "n_special", "output_past", "predict_special_tokens",
              "reorder_and_upcast_attn", "resid_pdrop", "summary_activation", "summary_first_dropout",
              "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    read=read,
    write=write,
    places={
        **_fused(0),
        **_fused(1),
        **_fused(2),
        "o": Place(LAYER + "attn.c_proj.weight", ((0, 1), (2,))),
        "o_bias": Place(LAYER + "attn.c_proj.bias", VECTOR),
        "up": Place(LAYER + "mlp.c_fc.weight", IN_OUT),
        "up_bias": Place(LAYER + "mlp.c_fc.bias", VECTOR),
        "down": Place(LAYER + "mlp.c_proj.weight", IN_OUT),
        "down_bias": Place(LAYER + "mlp.c_proj.bias", VECTOR),
        "attention_norm": Place(LAYER + "ln_1.weight", VECTOR),
        "attention_norm_bias": Place(LAYER + "ln_1.bias", VECTOR),
        "mlp_norm": Place(LAYER + "ln_2.weight", VECTOR),
        "mlp_norm_bias": Place(LAYER + "ln_2.bias", VECTOR),
        "embed": Place("transformer.wte.weight", IN_OUT),
        "positions": Place("transformer.wpe.weight", IN_OUT),
        "final_norm": Place("transformer.ln_f.weight", VECTOR),
        "final_norm_bias": Place("transformer.ln_f.bias", VECTOR),
        "head": Place("lm_head.weight", IN_OUT),
    },
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
)  # fmt: skip
