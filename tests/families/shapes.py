"""Differently shaped random models of every family, in the words of transformers: what golden files and trials use.

The first of each family is its golden file. Names are those of the classes without "Config".
"""

import zlib

import numpy as np

BASE = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64)  # fmt: skip
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=1000000.0, factor=4.0, original_max_position_embeddings=32)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=2.0)
NEOX = {name: value for name, value in BASE.items() if name != "num_key_value_heads"}
QWEN35_MOE = {name: value for name, value in BASE.items() if name != "intermediate_size"}
GPT2 = dict(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=80, bos_token_id=0, eos_token_id=0)

SHAPES = {
    "Llama": [
        BASE | dict(rope_parameters=LLAMA3, tie_word_embeddings=True),
        BASE | dict(num_key_value_heads=4, rms_norm_eps=1e-5, attention_bias=True, mlp_bias=True),
        BASE | dict(hidden_size=48, head_dim=16, num_key_value_heads=1, num_hidden_layers=3, rope_parameters=LINEAR),
        BASE | dict(rope_parameters=YARN | dict(beta_fast=16.0, attention_factor=1.25)),
    ],
    "Qwen2": [
        BASE | dict(rope_parameters=dict(rope_type="default", rope_theta=1000000.0), tie_word_embeddings=True),
        BASE | dict(num_hidden_layers=4, use_sliding_window=True, sliding_window=5, max_window_layers=2),
        BASE | dict(num_key_value_heads=1, intermediate_size=80, rope_parameters=YARN),
    ],
    "Qwen3": [
        BASE | dict(head_dim=16, tie_word_embeddings=True),
        BASE | dict(head_dim=8, num_key_value_heads=4, attention_bias=True, rope_parameters=YARN),
        BASE | dict(head_dim=10, hidden_size=40, num_hidden_layers=3, use_sliding_window=True, sliding_window=4,
                    max_window_layers=1),
    ],
    "Mistral": [
        BASE | dict(sliding_window=6),
        BASE | dict(sliding_window=None, head_dim=16, rope_parameters=dict(rope_type="default", rope_theta=1000000.0)),
        BASE | dict(sliding_window=3, num_key_value_heads=1, num_hidden_layers=3, vocab_size=131),
    ],
    "OLMo2": [
        BASE | dict(num_key_value_heads=2, rope_parameters=dict(rope_type="default", rope_theta=500000.0)),
        BASE | dict(attention_bias=True, tie_word_embeddings=True, num_hidden_layers=3),
        BASE | dict(num_key_value_heads=1, hidden_size=64, rope_parameters=YARN),
    ],
    "OLMo3": [
        BASE | dict(sliding_window=5, num_hidden_layers=5, rope_parameters=dict(
                    full_attention=YARN | dict(rope_theta=500000.0, attention_factor=1.2),
                    sliding_attention=dict(rope_type="default", rope_theta=500000.0))),
        BASE | dict(sliding_window=4, attention_bias=True, tie_word_embeddings=True, num_hidden_layers=4,
                    layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"]),
        BASE | dict(sliding_window=7, num_key_value_heads=1, hidden_size=64, num_hidden_layers=4, rope_parameters=dict(
                    full_attention=YARN, sliding_attention=dict(rope_type="default", rope_theta=20000.0))),
    ],
    "SmolLM3": [
        BASE | dict(num_hidden_layers=4, pad_token_id=0),
        BASE | dict(no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=5, pad_token_id=None),
        BASE | dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=False, pad_token_id=None,
                    rope_parameters=YARN),
    ],
    "Gemma2": [
        BASE | dict(head_dim=16, sliding_window=6, query_pre_attn_scalar=12, num_hidden_layers=3),
        BASE | dict(head_dim=8, sliding_window=4, attn_logit_softcapping=None, final_logit_softcapping=5.0,
                    num_hidden_layers=4, query_pre_attn_scalar=144),
        BASE | dict(head_dim=12, attention_bias=True, num_key_value_heads=1, attn_logit_softcapping=2.0),
    ],
    "Gemma3": [
        BASE | dict(head_dim=16, sliding_window=6, query_pre_attn_scalar=12, num_hidden_layers=7),
        BASE | dict(head_dim=8, sliding_window=4, num_hidden_layers=3, layer_types=["full_attention",
                    "sliding_attention", "full_attention"], final_logit_softcapping=4.0),
        BASE | dict(head_dim=8, sliding_window=5, num_hidden_layers=6, rope_parameters=dict(
                    full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1000000.0),
                    sliding_attention=dict(rope_type="default", rope_theta=10000.0))),
    ],
    "Phi3": [
        BASE | dict(pad_token_id=0, sliding_window=6),
        BASE | dict(pad_token_id=0, num_key_value_heads=4, tie_word_embeddings=True),
        BASE | dict(pad_token_id=0, hidden_size=64, num_key_value_heads=1,
                    rope_parameters=dict(rope_type="default", rope_theta=5000.0, partial_rotary_factor=0.75)),
        BASE | dict(pad_token_id=0, original_max_position_embeddings=32, max_position_embeddings=128,
                    rope_parameters=dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0, 1.1, 1.3, 1.8],
                                         long_factor=[1.2, 2.0, 3.5, 4.0])),
        BASE | dict(pad_token_id=0, hidden_size=64, original_max_position_embeddings=96, max_position_embeddings=384,
                    rope_parameters=dict(rope_type="longrope", rope_theta=5000.0, partial_rotary_factor=0.5,
                                         short_factor=[1.0, 1.2, 1.5, 2.0], long_factor=[1.5, 2.5, 3.0, 4.0])),
    ],
    "GPTNeoX": [
        NEOX,
        NEOX | dict(use_parallel_residual=False, num_attention_heads=2, tie_word_embeddings=True),
        NEOX | dict(attention_bias=False, hidden_act="gelu_new", num_hidden_layers=3,
                    rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=5000.0, partial_rotary_factor=1.0)),
    ],
    "Qwen3Moe": [
        BASE | dict(head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True),
        BASE | dict(head_dim=8, num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[3], num_experts=5,
                    num_experts_per_tok=3, moe_intermediate_size=20, tie_word_embeddings=True),
        BASE | dict(head_dim=8, attention_bias=True, num_experts=3, num_experts_per_tok=1, moe_intermediate_size=16,
                    use_sliding_window=True, sliding_window=5, norm_topk_prob=True, rope_parameters=YARN),
    ],
    "Mixtral": [
        BASE | dict(num_local_experts=4),
        BASE | dict(num_local_experts=7, num_experts_per_tok=3, sliding_window=5, tie_word_embeddings=True),
        BASE | dict(num_local_experts=3, num_experts_per_tok=1, num_hidden_layers=3, head_dim=16,
                    rope_parameters=dict(rope_type="default", rope_theta=5000.0)),
    ],
    "OLMoE": [
        BASE | dict(num_experts=6, num_experts_per_tok=2, pad_token_id=0, eos_token_id=1),
        BASE | dict(num_experts=8, num_experts_per_tok=8, norm_topk_prob=True, pad_token_id=0, eos_token_id=1),
        BASE | dict(num_experts=4, num_experts_per_tok=3, attention_bias=True, num_key_value_heads=4,
                    num_hidden_layers=3, pad_token_id=0, eos_token_id=1),
    ],
    "GptOss": [
        BASE | dict(head_dim=8, num_local_experts=5, num_experts_per_tok=2, sliding_window=6, num_hidden_layers=3,
                    rope_parameters=YARN | dict(truncate=False), swiglu_limit=0.7),
        BASE | dict(head_dim=16, num_local_experts=4, num_experts_per_tok=3, sliding_window=4, attention_bias=False,
                    layer_types=["full_attention", "sliding_attention"], tie_word_embeddings=True,
                    rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
        BASE | dict(head_dim=8, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=1,
                    rope_parameters=YARN | dict(truncate=False, factor=8.0)),
    ],
    "Gemma4": [
        BASE | dict(num_hidden_layers=6, head_dim=8, global_head_dim=16, vocab_size_per_layer_input=96,
                    hidden_size_per_layer_input=8, num_kv_shared_layers=2, use_double_wide_mlp=True, sliding_window=6,
                    final_logit_softcapping=5.0, layer_types=["sliding_attention", "sliding_attention",
                    "full_attention"] * 2),
        BASE | dict(num_hidden_layers=6, head_dim=8, global_head_dim=16, num_global_key_value_heads=1,
                    attention_k_eq_v=True, hidden_size_per_layer_input=0, sliding_window=4),
        BASE | dict(num_hidden_layers=4, head_dim=12, global_head_dim=8, num_key_value_heads=1, num_kv_shared_layers=2,
                    vocab_size_per_layer_input=96, hidden_size_per_layer_input=6, sliding_window=5,
                    layer_types=["full_attention", "sliding_attention"] * 2, rope_parameters=dict(
                    full_attention=dict(rope_type="proportional", partial_rotary_factor=0.5, rope_theta=5000.0,
                                        factor=2.0),
                    sliding_attention=dict(rope_type="default", rope_theta=20000.0))),
    ],
    "Gemma4Moe": [
        BASE | dict(num_hidden_layers=6, head_dim=8, global_head_dim=16, num_global_key_value_heads=1,
                    attention_k_eq_v=True, hidden_size_per_layer_input=0, sliding_window=6, enable_moe_block=True,
                    num_experts=6, top_k_experts=2, moe_intermediate_size=20, final_logit_softcapping=5.0),
        BASE | dict(num_hidden_layers=4, head_dim=12, global_head_dim=8, num_key_value_heads=1, num_kv_shared_layers=2,
                    use_double_wide_mlp=True, vocab_size_per_layer_input=96, hidden_size_per_layer_input=6,
                    sliding_window=5, layer_types=["full_attention", "sliding_attention"] * 2, enable_moe_block=True,
                    num_experts=4, top_k_experts=3, moe_intermediate_size=24),
        BASE | dict(num_hidden_layers=3, hidden_size=48, head_dim=16, global_head_dim=16, sliding_window=4,
                    tie_word_embeddings=False, hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=5,
                    top_k_experts=1, moe_intermediate_size=16, layer_types=["sliding_attention", "sliding_attention",
                    "full_attention"], rope_parameters=dict(
                    full_attention=dict(rope_type="proportional", partial_rotary_factor=0.5, rope_theta=5000.0),
                    sliding_attention=dict(rope_type="default", rope_theta=20000.0))),
    ],
    "Qwen3.5": [
        BASE | dict(num_hidden_layers=4, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
                    linear_key_head_dim=8, linear_value_head_dim=6),
        BASE | dict(num_hidden_layers=5, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2,
                    linear_key_head_dim=6, linear_value_head_dim=8, linear_conv_kernel_dim=3, tie_word_embeddings=True,
                    layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention",
                                 "linear_attention"],
                    rope_parameters=dict(rope_type="default", rope_theta=5000.0, partial_rotary_factor=0.5)),
        BASE | dict(num_hidden_layers=2, head_dim=16, num_key_value_heads=1, linear_num_key_heads=1,
                    linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=4,
                    layer_types=["linear_attention", "full_attention"],
                    rope_parameters=YARN | dict(partial_rotary_factor=0.5)),
    ],
    "Qwen3.5Moe": [
        QWEN35_MOE | dict(num_hidden_layers=4, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
                          linear_key_head_dim=8, linear_value_head_dim=6, num_experts=6, num_experts_per_tok=2,
                          moe_intermediate_size=20, shared_expert_intermediate_size=24),
        QWEN35_MOE | dict(num_hidden_layers=5, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2,
                          linear_key_head_dim=6, linear_value_head_dim=8, linear_conv_kernel_dim=3,
                          tie_word_embeddings=True, num_experts=4, num_experts_per_tok=3, moe_intermediate_size=16,
                          shared_expert_intermediate_size=48, layer_types=["full_attention", "linear_attention",
                          "linear_attention", "full_attention", "linear_attention"],
                          rope_parameters=dict(rope_type="default", rope_theta=5000.0, partial_rotary_factor=0.5)),
        QWEN35_MOE | dict(num_hidden_layers=2, head_dim=16, num_key_value_heads=1, linear_num_key_heads=1,
                          linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=4, num_experts=5,
                          num_experts_per_tok=1, moe_intermediate_size=28, shared_expert_intermediate_size=12,
                          layer_types=["linear_attention", "full_attention"],
                          rope_parameters=YARN | dict(partial_rotary_factor=0.5)),
    ],
    "GPT2": [
        GPT2,
        GPT2 | dict(n_inner=40, n_head=2, activation_function="gelu", tie_word_embeddings=False),
        GPT2 | dict(scale_attn_weights=False, n_layer=3, n_embd=48),
    ],
}  # fmt: skip

CLASSES = {name: name for name in SHAPES} | {
    "Gemma3": "Gemma3Text", "Gemma4": "Gemma4Text", "Gemma4Moe": "Gemma4Text", "OLMo2": "Olmo2", "OLMo3": "Olmo3",
    "OLMoE": "Olmoe", "Qwen3.5": "Qwen3_5Text", "Qwen3.5Moe": "Qwen3_5MoeText",
}  # fmt: skip

# Where one token may amplify float32's rounding to more than the tolerance: these are compared in float64.
AMPLIFIED = ("Qwen3.5", "Qwen3.5Moe")


def weight(name, shape, seed=0):
    """Returns a published tensor, float32, that its name, its shape and `seed` decide: no file has to hold it."""
    draws = np.random.default_rng([zlib.crc32(name.encode()), seed]).standard_normal(shape)
    if name.endswith(("router.scale", "per_expert_scale")):
        return np.float32(1 + 0.3 * draws)
    if name.endswith("layer_scalar"):
        return np.float32(0.8 + 0.1 * draws)
    if len(shape) == 1:
        return np.float32(0.3 * draws + (0.5 if "norm" in name or ".ln_" in name else 0))
    return np.float32(1.5 * shape[-1] ** -0.5 * draws)
