"""config.json of the models that configs/ has recipes for, as published: what decides their shape, and no more.

Source: the config.json in each model's repository, read in 2025.
"""

QWEN3 = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=151936,
             head_dim=128, num_key_value_heads=8, rope_theta=1e6, tie_word_embeddings=True,
             max_position_embeddings=40960)  # fmt: skip
QWEN2 = dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", vocab_size=151936, num_key_value_heads=2,
             rope_theta=1e6, tie_word_embeddings=True, max_position_embeddings=32768)  # fmt: skip
LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=128256, num_key_value_heads=8,
             rope_theta=5e5, rms_norm_eps=1e-5, tie_word_embeddings=True, max_position_embeddings=131072)  # fmt: skip
LLAMA_ROPE = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
OLMO2 = dict(architectures=["Olmo2ForCausalLM"], model_type="olmo2", vocab_size=100352, rope_theta=5e5,
             tie_word_embeddings=False, max_position_embeddings=4096)  # fmt: skip
PYTHIA = dict(architectures=["GPTNeoXForCausalLM"], model_type="gpt_neox", vocab_size=50304, rotary_pct=0.25,
              max_position_embeddings=2048)  # fmt: skip
GEMMA3 = dict(model_type="gemma3_text", head_dim=256, rope_theta=1e6, rope_local_base_freq=1e4,
              query_pre_attn_scalar=256, max_position_embeddings=32768)  # fmt: skip


def _of(family, width, mlp, layers, heads, **more):
    return dict(family, hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
                **more)  # fmt: skip


SHAPES = {
    "qwen3-0.6b": _of(QWEN3, 1024, 3072, 28, 16),
    "qwen3-1.7b": _of(QWEN3, 2048, 6144, 28, 16),
    "qwen3-4b": _of(QWEN3, 2560, 9728, 36, 32),
    "qwen3-8b": _of(QWEN3 | dict(tie_word_embeddings=False), 4096, 12288, 36, 32),
    "qwen2.5-0.5b": _of(QWEN2, 896, 4864, 24, 14),
    "qwen2.5-1.5b": _of(QWEN2, 1536, 8960, 28, 12),
    "qwen2.5-3b": _of(QWEN2, 2048, 11008, 36, 16),
    "qwen2.5-7b": _of(QWEN2 | dict(tie_word_embeddings=False, vocab_size=152064, num_key_value_heads=4), 3584, 18944,
                      28, 28),
    "llama-3.2-1b": _of(LLAMA, 2048, 8192, 16, 32, head_dim=64, rope_scaling=dict(LLAMA_ROPE, factor=32.0)),
    "llama-3.2-3b": _of(LLAMA, 3072, 8192, 28, 24, head_dim=128, rope_scaling=dict(LLAMA_ROPE, factor=32.0)),
    "llama-3.1-8b": _of(LLAMA | dict(tie_word_embeddings=False), 4096, 14336, 32, 32,
                        rope_scaling=dict(LLAMA_ROPE, factor=8.0)),
    "gemma-3-1b": _of(GEMMA3, 1152, 6912, 26, 4, architectures=["Gemma3ForCausalLM"], num_key_value_heads=1,
                      sliding_window=512, sliding_window_pattern=6, vocab_size=262144),
    # The text model is wrapped, and says little of itself.
    "gemma-3-4b": dict(
        architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3", vision_config={},
        mm_tokens_per_image=256, boi_token_index=255999, eoi_token_index=256000, image_token_index=262144,
        text_config=dict(model_type="gemma3_text", hidden_size=2560, intermediate_size=10240, num_hidden_layers=34,
                         rope_scaling=dict(rope_type="linear", factor=8.0), sliding_window=1024),
    ),
    "olmo-2-1b": _of(OLMO2, 2048, 8192, 16, 16),
    "olmo-2-7b": _of(OLMO2, 4096, 11008, 32, 32),
    "pythia-1b": _of(PYTHIA, 2048, 8192, 16, 8),
    "pythia-2.8b": _of(PYTHIA, 2560, 10240, 32, 32),
}  # fmt: skip
BILLIONS = {
    "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.721, "qwen3-4b": 4.022, "qwen3-8b": 8.191,
    "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.544, "qwen2.5-3b": 3.086, "qwen2.5-7b": 7.616,
    "llama-3.2-1b": 1.236, "llama-3.2-3b": 3.213, "llama-3.1-8b": 8.030, "gemma-3-1b": 1.000, "gemma-3-4b": 3.880,
    "olmo-2-1b": 1.485, "olmo-2-7b": 7.299, "pythia-1b": 1.012, "pythia-2.8b": 2.775,
}  # fmt: skip  # as published, to three places
