"""Published folders out of the golden files, without transformers."""

from __future__ import annotations

import json
import pathlib

import numpy as np
from families.shapes import weight
from safetensors.numpy import save_file

from jrl.models.families import FAMILIES

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "families"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.json"))
FORMS = {"Gemma4Moe": "Gemma4"}  # a further golden file -> its family


def family(name):
    return FAMILIES[FORMS.get(name, name)]


def golden_files(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())


def tensors(name):
    return {label: weight(label, tuple(shape)) for label, shape in golden_files(name)["tensors"].items()}


def write(folder, name="Llama", layout="config5", dtype=np.float32, files=1, **changes):
    """Writes a published folder; `changes` are of its config.json, None leaves a key out. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in (golden_files(name)[layout] | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    rows = [(label, x.astype(dtype)) for label, x in tensors(name).items()]
    if files == 1:
        save_file(dict(rows), folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(files):
        save_file(dict(rows[i::files]), folder / f"model-{i + 1:05d}-of-{files:05d}.safetensors")
        weight_map |= {label: f"model-{i + 1:05d}-of-{files:05d}.safetensors" for label, _ in rows[i::files]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
