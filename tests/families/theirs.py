"""Random models of transformers, for trials and for the maker of golden files. Needs the extra `reference`."""

from __future__ import annotations

import copy

import torch
import transformers
from families.shapes import weight
from torch.overrides import TorchFunctionMode

JOINED = ("gpt_oss", "gemma4_text", "qwen3_5_moe_text")  # whose experts are published joined
NORMED_AFTER = ("gemma2", "gemma3_text", "gemma4_text", "olmo2", "olmo3")  # whose layers end in norms


def random_model(name, fields, seed):
    """Returns a model in float32 whose every parameter is random: biases and norms too."""
    config = getattr(transformers, f"{name}Config")(**fields)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for label, tensor in parameters(model):
            tensor.copy_(torch.tensor(weight(label, tuple(tensor.shape), seed)))
    return model


def strengthened(model, gain):
    """Returns a copy of the model whose layers' matrices, and the norms they end in, are `gain` times as large."""
    model = copy.deepcopy(model)
    normed_after = model.config.model_type in NORMED_AFTER
    with torch.no_grad():
        for label, tensor in parameters(model):
            if ".layers." in f".{label}" or ".h." in label:
                tensor.mul_(gain if tensor.ndim > 1 or (normed_after and ".post_" in label) else 1)
    return model


class CastWider(TorchFunctionMode):
    """Where a model casts to float32, to float64 instead."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        widened = lambda x: torch.float64 if x is torch.float32 else x
        return func(*map(widened, args), **{name: widened(x) for name, x in (kwargs or {}).items()})


def wide_logits(model, tokens, **given):
    """Returns the logits of a copy of the model that computes in float64 throughout."""
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")  # the others have no product in float64
    with torch.no_grad(), CastWider():
        return model(torch.tensor(tokens), **given).logits.numpy()


def parameters(model):
    """Yields (published name, tensor); of a tied head and embedding only the embedding. Experts, which transformers 5
    joins while it loads and takes apart while it saves, come one at a time."""
    kind = model.config.model_type
    scales = [pair for pair in model.named_buffers() if pair[0].endswith("layer_scalar")]  # published, not trained
    for label, tensor in [*model.named_parameters(), *scales]:
        if kind == "gpt_neox" and label == "lm_head.weight":
            label = "embed_out.weight"
        if kind == "mixtral":
            label = label.replace(".mlp.", ".block_sparse_moe.")
        if ".experts." not in label or kind in JOINED:
            yield label, tensor
            continue
        place, name = label.split(".experts.")
        gate, up, down = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        for i, expert in enumerate(tensor.data):
            half = len(expert) // 2
            parts = {down: expert} if name == "down_proj" else {gate: expert[:half], up: expert[half:]}
            for part, weights in parts.items():
                yield f"{place}.experts.{i}.{part}.weight", weights
