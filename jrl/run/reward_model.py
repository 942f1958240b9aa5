"""The published reward model of a run, held to what the run began with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import jax
from jax.sharding import Mesh

from jrl import paths
from jrl.device.program_cache import ProgramCache
from jrl.ops.fingerprint import fingerprint
from jrl.rollout.rewards import OpenClassifier, RewardModel, open_classifier
from jrl.run.identity import REWARD, RefusedIdentity
from jrl.tasks.tokenizers.published import HuggingFace
from jrl.tasks.tokenizers.published import build as build_tokenizer


def open_reward_model(
    config: RewardModel, mesh: Mesh, cache: ProgramCache, folder: Path, phase: Callable[[str], None]
) -> OpenClassifier:
    """Returns the run's reward model, its weights on the mesh. Its template sees the day on which the run began.

    Raises: RefusedIdentity where weights, tokenizer, template or config.json are not those that the run began with, or
      the file that says which is gone or incomplete.
    """
    path, record = config.path, folder / REWARD
    resumed = paths.exists(folder / "manifest.json")
    if resumed and not paths.exists(record):
        raise RefusedIdentity(
            f"{record} is missing; it records which reward model the run began with. Restore it, or use another --run"
        )
    began = paths.read_object(record) if resumed else {}
    names = {"fingerprint": "weights", "config.json": "config.json", "tokenizer": "tokenizer or chat template"}
    if resumed and (missing := [repr(key) for key in (*names, "date") if key not in began]):
        raise RefusedIdentity(
            f"{record} has no {' and no '.join(missing)}; it records which reward model the run began with. "
            "Restore it, or use another --run"
        )
    tokenizer = build_tokenizer(HuggingFace(path=path, date=began.get("date")), ())
    on_progress = lambda done, total: phase(f"reading the reward model: {100 * done // total} %")
    classifier = open_classifier(config, mesh, cache.program, on_progress, tokenizer)
    content = {
        "fingerprint": f"{int(jax.jit(fingerprint)(classifier.params)):08x}",  # of the weights
        "config.json": hashlib.sha256(
            paths.read_foreign(Path(path) / "config.json", paths.MOST_OBJECT_BYTES, path)
        ).hexdigest(),
        "tokenizer": tokenizer.fingerprint,  # of its files and its chat template
        "date": tokenizer.chat.date if tokenizer.chat is not None else None,
    }
    if resumed and (strange := [name for key, name in names.items() if began[key] != content[key]]):
        raise RefusedIdentity(
            f"the {' and the '.join(strange)} in {path} are not those that {folder} began with; restore those, or "
            "use another --run"
        )
    if not resumed:
        paths.write_bytes_atomic(record, json.dumps(content).encode() + b"\n")
    return classifier
