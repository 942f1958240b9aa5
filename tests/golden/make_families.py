"""Writes tests/golden/families: for each family its config.json in both layouts, its tensors' names, and logits.

    pip install 'jrl-jax[reference]' && PYTHONPATH=tests python tests/golden/make_families.py [FAMILY ...]

The weights are in no file: `families.shapes.weight` makes them from their names. transformers says the rest, in
float32, and reads both layouts of config.json to the same logits before they are kept.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
import transformers
from families.shapes import CLASSES, SHAPES
from families.theirs import parameters, random_model

HERE = pathlib.Path(__file__).parent / "families"
LENGTH = 40  # past the windows, and past the original length of stretched ropes


def older(config):
    """Returns a config.json of transformers 5 as version 4 wrote it."""
    config = dict(config)
    if config["model_type"] == "gemma4_text":  # came with version 5: as its own files say it
        full = next(iter(config.pop("per_layer_config").values()))
        config["global_head_dim"] = full["head_dim"]
        if "num_key_value_heads" in full:
            config["num_global_key_value_heads"] = full["num_key_value_heads"]
        return {**config, "torch_dtype": config.pop("dtype")}
    rope = config.pop("rope_parameters", None)
    config["torch_dtype"] = config.pop("dtype")
    types = config.pop("layer_types", None)
    if rope is not None and "full_attention" in rope:  # Gemma 3, OLMo 3
        near, rope = rope["sliding_attention"], rope["full_attention"]
        if config["model_type"] == "gemma3_text":
            config["rope_local_base_freq"] = near["rope_theta"]
    if rope is not None:
        rope = dict(rope)
        neox = config["model_type"] == "gpt_neox"
        config["rotary_emb_base" if neox else "rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            config["rotary_pct" if neox else "partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if config["model_type"] == "gemma3_text":
        config["sliding_window_pattern"] = config.pop("_sliding_window_pattern", types.index("full_attention") + 1)
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    config["transformers_version"] = "4.55.0"
    return config


def main(names):
    for name in names or SHAPES:
        model = random_model(CLASSES[name], SHAPES[name][0], seed=0)
        config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
        config["dtype"] = "float32"
        tokens = np.random.default_rng(0).integers(0, config["vocab_size"], (1, LENGTH))
        with torch.no_grad():
            logits = model(torch.tensor(tokens)).logits.numpy()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            path = pathlib.Path(folder) / "config.json"
            path.write_text(json.dumps(older(config)))
            again = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
            with torch.no_grad():
                assert np.abs(again(torch.tensor(tokens)).logits.numpy() - logits).max() < 1e-6, name
        tensors = {label: list(x.shape) for label, x in parameters(model)}
        files = {"config5": config, "config4": older(config), "tensors": tensors}
        (HERE / f"{name}.json").write_text(json.dumps(files, indent=1) + "\n")
        np.savez_compressed(HERE / f"{name}.npz", tokens=tokens.astype(np.int32), logits=logits[:, ::4])
        print(name, logits.shape, sum(path.stat().st_size for path in HERE.glob(f"{name}.*")), "bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
