"""Mistral 7B and its successors (2310.06825): Llama with a window in every layer, or none."""

from __future__ import annotations

from typing import Any

from jrl.models.families.contract import Family, Keys
from jrl.models.families.llama import IGNORED, PLACES, ROPE, SHAPE, read_shape, write_shape
from jrl.models.shape import Decoder


def read(keys: Keys) -> Decoder:
    window = keys.maybe("sliding_window", 4096)
    return Decoder(
        **read_shape(keys, kv_heads=8),
        activation=keys.one_of("hidden_act", {"silu": "silu"}, "silu"),
        window=None if window is None else keys.count("sliding_window", 4096),
    )


def write(cfg: Decoder) -> dict[str, Any]:
    return {**write_shape(cfg), "hidden_act": "silu", "sliding_window": cfg.window}


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    keys=(*SHAPE, *ROPE, "sliding_window"),
    harmless=(),
    read=read,
    write=write,
    places=PLACES,
    ignored=IGNORED,
)
