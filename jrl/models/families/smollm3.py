"""SmolLM 3: Llama with some layers without RoPE (NoPE, 2305.19466)."""

from __future__ import annotations

from typing import Any

from jrl.models.families.contract import Family, Keys
from jrl.models.families.llama import PLACES, ROPE, SHAPE, read_shape, write_shape
from jrl.models.families.rope import layer_flags, layer_types
from jrl.models.shape import Decoder


def read(keys: Keys) -> Decoder:
    shape = read_shape(keys, tied=True, kv_heads=4, rope_theta=2_000_000.0)
    layers = shape["layers"]
    interval, declared = keys.count("no_rope_layer_interval", 4), keys.take("no_rope_layers", None)
    if declared is not None and (
        not isinstance(declared, list) or len(declared) != layers or not set(declared) <= {0, 1}
    ):
        raise ValueError(
            f"{keys.where}: no_rope_layers must be a 0 or a 1 for each of the {layers} layers; got {declared!r:.200}"
        )
    # Despite its name, 1 means a layer with RoPE.
    rotates = tuple((i + 1) % interval != 0 for i in range(layers)) if declared is None else tuple(map(bool, declared))
    used, flags = keys.flag("use_sliding_window", False), layer_flags(keys, layers)
    window = keys.maybe_count("sliding_window", None) if used else keys.take("sliding_window", None)
    if not used and flags is not None and any(flags):
        raise ValueError(f"{keys.where}: layer_types names windowed layers, but use_sliding_window is false")
    if flags is None:
        flags = tuple(used and window is not None and not rotated for rotated in rotates)
    bias = keys.flag("attention_bias", False)
    return Decoder(
        **shape,
        activation=keys.one_of("hidden_act", {"silu": "silu"}, "silu"),
        rotary_layers=rotates,
        window=window if any(flags) else None,
        window_layers=flags if any(flags) else (True,),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=keys.flag("mlp_bias", False),
    )


def write(cfg: Decoder) -> dict[str, Any]:
    return {
        **write_shape(cfg),
        "hidden_act": "silu",
        "no_rope_layers": [int(cfg.rotates(i)) for i in range(cfg.layers)],
        "use_sliding_window": cfg.window is not None,
        "sliding_window": cfg.window,
        "layer_types": layer_types(cfg),
        "attention_bias": cfg.qkv_bias,
        "mlp_bias": cfg.mlp_bias,
    }


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    keys=(*SHAPE, *ROPE, "no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window",
          "layer_types", "attention_bias", "mlp_bias"),
    harmless=("max_window_layers", "pretraining_tp"),
    read=read,
    write=write,
    places=PLACES,
    pad_id=128_004,
)  # fmt: skip
