"""Mistral 7B and its successors (2310.06825), those with a vision tower too: Llama with a window in every layer, or
none."""

from __future__ import annotations

from typing import Any

from jrl.models.families.contract import Family, Keys, Wrapped
from jrl.models.families.llama import IGNORED, PLACES, ROPE, SHAPE, read_shape, write_shape
from jrl.models.shape import Decoder


def read(keys: Keys) -> Decoder:
    keys.expect("model_type", "mistral")  # a larger model may hold another: ministral3 scales its queries
    return Decoder(
        **read_shape(keys, kv_heads=8),
        activation=keys.one_of("hidden_act", {"silu": "silu"}, "silu"),
        window=keys.maybe_count("sliding_window", 4096),
    )


def write(cfg: Decoder) -> dict[str, Any]:
    return {**write_shape(cfg), "hidden_act": "silu", "sliding_window": cfg.window}


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    keys=(*SHAPE, *ROPE, "sliding_window", "model_type"),
    harmless=(),
    read=read,
    write=write,
    places=PLACES,
    ignored=IGNORED,
    # Mistral Small 3.1 and 3.2, and later Magistral: published with a vision tower. Only the text model is read.
    wrapped=Wrapped(
        model_type="mistral3",
        architecture="Mistral3ForConditionalGeneration",
        defaults={},
        # transformers 5 writes tie_word_embeddings = true, its default here, for heads of their own too.
        harmless=("vision_config", "image_token_index", "image_token_id", "multimodal_projector_bias",
                  "projector_hidden_act", "spatial_merge_size", "vision_feature_layer", "tie_word_embeddings"),
        prefixes=("language_model.model.", "model.language_model."),
        ignored=(r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*"),
    ),
)  # fmt: skip
