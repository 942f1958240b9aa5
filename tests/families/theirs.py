"""Random models of transformers, for trials and for the maker of golden files. Needs the extra `reference`."""

from __future__ import annotations

import torch
import transformers
from families.shapes import weight


def random_model(name, fields, seed):
    """Returns a model in float32 whose every parameter is random: biases and norms too."""
    config = getattr(transformers, f"{name}Config")(**fields)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for label, tensor in parameters(model):
            tensor.copy_(torch.tensor(weight(label, tuple(tensor.shape), seed)))
    return model


def parameters(model):
    """Yields (published name, tensor); of a tied head and embedding only the embedding."""
    neox = model.config.model_type == "gpt_neox"  # renames its head while it loads and saves
    for label, tensor in model.named_parameters():
        yield "embed_out.weight" if neox and label == "lm_head.weight" else label, tensor
