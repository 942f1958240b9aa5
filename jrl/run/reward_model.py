"""The published reward model of a run. A resumed run must have the one that it began with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jrl import paths
from jrl.device.placement import fetch
from jrl.device.processes import ONE, Processes
from jrl.device.program_cache import ProgramCache
from jrl.ops.fingerprint import fingerprint
from jrl.rollout.rewards import OpenClassifier, RewardModel, normalization, normalized, open_classifier, tokenizer_of
from jrl.run.identity import REWARD, RefusedIdentity
from jrl.tasks.example import Message
from jrl.tasks.tokenizers.published import PublishedTokenizer


def open_reward_model(
    config: RewardModel,
    mesh: Mesh,
    cache: ProgramCache,
    folder: Path,
    phase: Callable[[str], None],
    demonstrations: Callable[[int], Sequence[Sequence[Message]]],
    processes: Processes = ONE,
) -> OpenClassifier:
    """Returns the run's reward model, its weights on the mesh. Its chat template sees the date on which the run began.

    Args:
      demonstrations: (count) -> conversations with a good answer, from the run's own data. The scores are normalized on
        them (R10, R11) when the run begins; a resumed run keeps that normalization.
      processes: those of the run, which must have opened the same one; the first writes the record.

    Raises: RefusedIdentity if weights, tokenizer, template or config.json are not those that the run began with, or the
      file that records them is missing or incomplete.
    """
    for published in config.published:
        if not paths.exists(at := paths.readable_without_weights(published.path)):
            raise ValueError(f"Config.reward: {published.path!r} is not there; it must be the folder of a classifier: "
                             "config.json, safetensors and a tokenizer")  # fmt: skip
        if not paths.exists(at / "config.json"):
            raise ValueError(f"Config.reward: {published.path!r} has no config.json; it must be the folder of a "
                             "classifier: config.json, safetensors and a tokenizer")  # fmt: skip
    record = folder / REWARD
    where = ", ".join(published.path for published in config.published)
    resumed = paths.exists(folder / "manifest.json")
    if resumed and not paths.exists(record):
        raise RefusedIdentity(
            f"{record} is missing; it records which reward model the run began with. Restore it, or use another --run"
        )
    began = paths.read_object(record) if resumed else {}
    names = {"fingerprint": "weights", "config.json": "config.json", "tokenizer": "tokenizer or chat template"}
    recorded = (*names, "date", *(("center", "scale") if config.normalize_on is not None else ()))
    if resumed and (missing := [repr(key) for key in recorded if key not in began]):
        raise RefusedIdentity(
            f"{record} has no {' and no '.join(missing)}; it records which reward model the run began with. "
            "Restore it, or use another --run"
        )
    tokenizer = tokenizer_of(config.path, began.get("date"))
    on_progress = lambda done, total: phase(f"reading the reward model: {100 * done // total} %")
    classifier = open_classifier(config, mesh, cache.program, tokenizer, on_progress)
    config_json = lambda published: paths.readable_without_weights(published.path) / "config.json"
    content = {
        "fingerprint": f"{int(fetch(jax.jit(fingerprint)(classifier.params))):08x}",  # of the weights
        "config.json": digest_of([config_json(published) for published in config.published]),
        "tokenizer": tokenizer.fingerprint,  # of its files and its chat template
        "date": tokenizer.chat.date if isinstance(tokenizer, PublishedTokenizer) and tokenizer.chat else None,
    }
    if resumed and (changed := [name for key, name in names.items() if began[key] != content[key]]):
        raise RefusedIdentity(
            f"the {' and the '.join(changed)} in {where} are not those that {folder} began with; restore those, or "
            "use another --run"
        )
    if config.normalize_on is not None:
        if resumed:
            center, scale = np.array(began["center"], np.float32), np.array(began["scale"], np.float32)
        else:
            phase("scoring demonstrations")
            examples = demonstrations(config.normalize_on)
            center, scale = normalization(classifier, examples, unit=bool(config.members))
        content |= {"center": center.tolist(), "scale": scale.tolist()}  # of every member, by label
        classifier = normalized(classifier, center, scale)
    processes.agree("reward model", content)
    if not resumed and processes.writer:
        paths.write_bytes_atomic(record, json.dumps(content).encode() + b"\n")
    return classifier


def digest_of(files: Sequence[Path]) -> str:
    """Returns the SHA-256 of a file, or of the digests of several."""
    read = lambda file: paths.read_foreign(file, paths.MOST_OBJECT_BYTES, file.parent)
    digests = [hashlib.sha256(read(file)) for file in files]
    if len(digests) == 1:
        return digests[0].hexdigest()
    return hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()
