"""Qwen2 and Qwen2.5 (2407.10671, 2412.15115): biases of q, k and v. Qwen3 dense (2505.09388): normalized heads."""

from __future__ import annotations

from typing import Any

from jrl.models.families.contract import Family, Keys
from jrl.models.families.llama import HEAD_NORMS, IGNORED, PLACES, ROPE, SHAPE, read_shape, write_shape
from jrl.models.families.rope import layer_flags, layer_types
from jrl.models.shape import Decoder

WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


def read_windows(keys: Keys, layers: int) -> dict[str, Any]:
    """Returns the Decoder fields window and window_layers. Without layer_types the first
    max_window_layers layers have no window."""
    used, first = keys.flag("use_sliding_window", False), keys.take("max_window_layers", 28)
    window, flags = read_window(keys, used), layer_flags(keys, layers)
    if window is None:
        if flags is not None and any(flags):
            why = "sliding_window is null" if used else "use_sliding_window is false"
            raise ValueError(f"{keys.where}: layer_types names windowed layers, but {why}")
        return {}
    flags = tuple(i >= first for i in range(layers)) if flags is None else flags
    return {"window": window, "window_layers": flags} if any(flags) else {}


def read_window(keys: Keys, used: bool) -> int | None:
    """Returns the window of windowed layers; None where use_sliding_window is false or sliding_window is null."""
    if not used:
        keys.take("sliding_window", None)  # whatever it is, it has no effect
        return None
    return keys.maybe_count("sliding_window", 4096)


def write_windows(cfg: Decoder) -> dict[str, Any]:
    if cfg.window is None:
        return {"use_sliding_window": False, "sliding_window": None, "max_window_layers": cfg.layers}
    # Older readers support only windows from some layer on; for other patterns layer_types decides.
    first = next((i for i in range(cfg.layers) if cfg.windowed(i)), cfg.layers)
    return {
        "use_sliding_window": True,
        "sliding_window": cfg.window,
        "max_window_layers": first,
        "layer_types": layer_types(cfg),
    }


def read_qwen2(keys: Keys) -> Decoder:
    shape = read_shape(keys, kv_heads=None)
    return Decoder(
        **shape,
        **read_windows(keys, shape["layers"]),
        activation=keys.one_of("hidden_act", {"silu": "silu"}, "silu"),
        qkv_bias=True,
    )


def write_qwen2(cfg: Decoder) -> dict[str, Any]:
    return {**write_shape(cfg), "hidden_act": "silu", **write_windows(cfg)}


def read_qwen3(keys: Keys) -> Decoder:
    shape = read_shape(keys, head_dim=128)
    bias = keys.flag("attention_bias", False)
    return Decoder(
        **{**shape, "qk_norm": "head"},
        **read_windows(keys, shape["layers"]),
        activation=keys.one_of("hidden_act", {"silu": "silu"}, "silu"),
        qkv_bias=bias,
        output_bias=bias,
    )


def write_qwen3(cfg: Decoder) -> dict[str, Any]:
    return {**write_shape(cfg), "hidden_act": "silu", "attention_bias": cfg.qkv_bias, **write_windows(cfg)}


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    keys=(*SHAPE, *ROPE, *WINDOWS),
    harmless=("dual_chunk_attention_config",),  # of Qwen2.5-1M, past 262,144 tokens; transformers does not have it
    read=read_qwen2,
    write=write_qwen2,
    places=PLACES,
    ignored=IGNORED,
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    keys=(*SHAPE, *ROPE, *WINDOWS, "attention_bias"),
    harmless=(),
    read=read_qwen3,
    write=write_qwen3,
    places={**PLACES, **HEAD_NORMS},
    ignored=IGNORED,
)
