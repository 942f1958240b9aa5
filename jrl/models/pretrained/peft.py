"""The adapter format of the library PEFT: adapter_config.json and adapter_model.safetensors, read and written.

Each adapted module of a published model has lora_A.weight [r, in], lora_B.weight [out, r] and, with DoRA,
lora_magnitude_vector [out], all under "base_model.model." and the module's own name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jrl import paths
from jrl.models.pretrained.tensors import DTYPES, PICKLED, open_file, write_file

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"

# Keys of adapter_config.json that the tensors imply, that only training reads, or that describe the writer.
HARMLESS = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
        "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config",
        "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "r", "revision",
        "runtime_config", "target_modules",
    }
)  # fmt: skip
READ = frozenset({"peft_type", "task_type", "bias", "init_lora_weights", "lora_alpha", "alpha_pattern", "rank_pattern",
                  "use_rslora", "use_dora"})  # fmt: skip
# Initializations that leave the base unchanged. The others move a part of the base into the adapter.
INITIALIZATIONS = (None, True, False, "gaussian", "orthogonal", "eva")


class Module(NamedTuple):
    """The adapter of one module: W + scale * b a; DoRA rescales each output's row of it to the norm in `magnitude`.
    float32."""

    a: np.ndarray  # [r, in]
    b: np.ndarray  # [out, r]
    magnitude: np.ndarray | None  # [out]
    scale: float


def read(folder: str | Path) -> dict[str, Module]:
    """Returns module name -> adapter of a PEFT folder.

    Raises: ValueError for a folder without an adapter, and for anything in it that would change the computation in an
    unknown way.
    """
    folder = paths.readable(folder)
    config = read_config(folder)
    if not paths.exists(folder / TENSORS):
        pickled = [name for name in paths.list_dir(folder) if name.endswith(PICKLED)]
        hint = f", only {', '.join(pickled)}, and a pickle can run any code when it is read" if pickled else ""
        raise ValueError(f"{folder} has no {TENSORS}{hint}")
    parts: dict[str, dict[str, np.ndarray]] = {}
    with open_file(folder / TENSORS) as tensors:
        for name, shape in tensors.shapes.items():
            match = re.fullmatch(
                rf"{re.escape(PREFIX)}(.+)\.(lora_A\.weight|lora_B\.weight|{MAGNITUDE}(?:\.weight)?)", name
            )
            if match is None:
                raise ValueError(
                    f"{folder / TENSORS} contains {name}; only {A}, {B} and {MAGNITUDE} of modules are supported"
                )
            if tensors.dtypes[name] not in DTYPES:
                raise ValueError(f"{folder / TENSORS}: {name} is {tensors.dtypes[name]}, not floating point")
            kind = match[2] if not match[2].startswith(MAGNITUDE) else MAGNITUDE
            values = tensors.read(name, tuple(slice(0, size) for size in shape))
            parts.setdefault(match[1], {})[kind] = np.asarray(values, np.float32)
    return {name: _module(name, leaves, config, folder) for name, leaves in sorted(parts.items())}


def _module(name: str, leaves: Mapping[str, np.ndarray], config: Mapping[str, Any], folder: Path) -> Module:
    expected = {A: 2, B: 2} | ({MAGNITUDE: 1} if config.get("use_dora") else {})
    if {kind: leaf.ndim for kind, leaf in leaves.items()} != expected or leaves[A].shape[0] != leaves[B].shape[1]:
        present = ", ".join(f"{kind} {list(leaf.shape)}" for kind, leaf in leaves.items())
        raise ValueError(
            f"{folder / TENSORS}: {name} has {present}; an adapter consists of {', '.join(expected)} of one rank"
        )
    rank = leaves[A].shape[0]
    alpha = config.get("lora_alpha", 8)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            alpha = value
            break
    if type(alpha) not in (int, float):
        raise ValueError(f"{folder / CONFIG}: the alpha of {name} is {alpha!r}; it must be a number")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Module(leaves[A], leaves[B], leaves.get(MAGNITUDE), scale)


def read_config(folder: Path) -> dict[str, Any]:
    """Returns adapter_config.json. Raises ValueError for unsupported values in it."""
    path = folder / CONFIG
    if not paths.exists(path):
        raise ValueError(f"{folder} is not an adapter: it has no {CONFIG}")
    config = paths.read_object(path, within=folder)
    allowed = {"peft_type": ("LORA",), "task_type": ("CAUSAL_LM", "SEQ_2_SEQ_LM", None), "bias": ("none", None)}
    for name, values in (allowed | {"init_lora_weights": INITIALIZATIONS}).items():
        if config.get(name) not in values:
            known = ", ".join(repr(value) for value in values if value is not None)
            raise ValueError(f"{path}: {name} is {config.get(name)!r}; this version supports {known}")
    unknown = sorted(name for name, value in config.items() if value and name not in HARMLESS | READ)
    if unknown:
        listed = ", ".join(f"{name} = {str(config[name])[:60]}" for name in unknown)
        raise ValueError(f"{path} has unknown keys that may change the computation: {listed}")
    return config


def write(
    folder: str | Path,
    modules: Mapping[str, Module],
    *,
    base: str,
    rslora: bool,
    transposed: bool,
    dtype: Any,
) -> list[str]:
    """Writes a PEFT folder. Returns the files' names.

    Args:
      modules: module name -> adapter. Those of one kind, in different layers, have one rank and scale.
      base: the folder of the base weights.
      rslora: scales are alpha / sqrt(rank).
      transposed: the published matrices are [in, out].

    Raises: ValueError where the folder is not empty.
    """
    folder = paths.local(folder)
    if paths.exists(folder) and paths.list_dir(folder):
        raise ValueError(f"{folder} already exists and is not empty; choose a new folder with --to")
    kinds: dict[str, Module] = {}
    for name, module in modules.items():
        kinds.setdefault(_kind(name), module)
    alphas = {kind: _number(m.scale * (math.sqrt(len(m.a)) if rslora else len(m.a))) for kind, m in kinds.items()}
    ranks = {kind: len(m.a) for kind, m in kinds.items()}
    rank, alpha = min(ranks.values()), alphas[min(ranks, key=ranks.__getitem__)]
    config = {
        "alpha_pattern": {kind: value for kind, value in alphas.items() if value != alpha},
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {kind: value for kind, value in ranks.items() if value != rank},
        "target_modules": sorted(kinds),
        "task_type": "CAUSAL_LM",
        "use_dora": next(iter(modules.values())).magnitude is not None,
        "use_rslora": rslora,
    }
    tensors = {}
    for name, module in modules.items():
        tensors |= {f"{PREFIX}{name}.{A}": module.a, f"{PREFIX}{name}.{B}": module.b}
        if module.magnitude is not None:
            tensors[f"{PREFIX}{name}.{MAGNITUDE}"] = module.magnitude
    paths.make_dir(folder)
    write_file(folder / TENSORS, {name: tensor.astype(jnp.dtype(dtype)) for name, tensor in tensors.items()})
    paths.write_bytes_atomic(folder / CONFIG, json.dumps(config, indent=2).encode() + b"\n")
    return [CONFIG, TENSORS]


def _kind(name: str) -> str:
    """Returns what comes after the layer's number: "model.layers.0.mlp.up_proj" is an "mlp.up_proj". The last word
    alone would suffice for most families, but GPT-2 has two modules with the same one."""
    return re.split(r"\.\d+\.", name)[-1]


def _number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else float(value)
