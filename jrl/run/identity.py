"""What identifies a run: its manifest, and what a folder of another run refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jrl import config as gin
from jrl import paths
from jrl.experiment import FREE, ROUNDED, Config, config_classes
from jrl.models.pretrained.published import Published, companions_of
from jrl.plugins import Parts, part_files
from jrl.run.checkpoints.run_state import list_steps
from jrl.run.report.manifest import compare, make_manifest, read_manifest, write_manifest
from jrl.run.stage_steps import ends

_log = logging.getLogger(__name__)

PUBLISHED = "published"  # a copy of the model's configuration, so that a run can be read without that folder
# Besides FREE, what held-out accuracy depends on through the policy alone. Verifiers decide it, not reward models and
# judges.
NOT_OF_EVALUATION = (
    "Config.stages",
    "Config.model",
    "Config.teacher",
    "Config.adapter",
    "Config.reward",
    "Config.judges",
    "Eval.every",
    "Eval.batch",
    "Sampler.temperature",  # held-out prompts are sampled with Eval.temperature, from all tokens
    "Sampler.top_k",
    "Sampler.top_p",
    "Sampler.min_p",
    "Sampler.slots",  # tokens are the same in every layout, to rounding
    "Sampler.kv_layout",
    "Sampler.max_batch_compactions",
)
REWARD = "reward.json"  # which weights, tokenizer and config.json Config.reward began with


class RefusedIdentity(ValueError):
    """The folder belongs to another run. The message lists what differs."""


def with_saved_model(config: Config, folder: Path) -> Config:
    """Returns `config` with a published model's folder replaced by the run's copy of it: all but the weights.

    A folder without a manifest belongs to no run and has no copy.
    """
    if not isinstance(config.model, Published) or not paths.exists(folder / "manifest.json"):
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(folder / PUBLISHED)))


def identify(config: Config, parts: Parts, tokenizer: Any, data: str) -> dict[str, Any]:
    """Returns the manifest: what the run is, and where it runs. data: the fingerprint of its examples."""
    return make_manifest(
        config_identity=gin.identity(without_last_steps(config), FREE),
        config=gin.to_json(config),
        tokenizer=tokenizer.fingerprint,
        data=data,
        parts=parts.hashes,
        seed=config.run.seed,
        mesh=mesh_sizes(config),
    )


def eval_identity(config: Config, manifest: dict[str, Any]) -> str:
    """Returns a hash, in hex, of what a run's held-out accuracy depends on besides the policy: two accuracies compare
    only if it is equal. The data of other stages and the rest of a part count too.

    Args:
      manifest: as `identify` returns it.
    """
    identity = {**manifest["identity"], "config": gin.identity(config, (*FREE, *NOT_OF_EVALUATION))}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def mesh_sizes(config: Config) -> dict[str, Any]:
    """Returns the configured size of every mesh axis, and under "sampler" those of separate sampling devices.

    A single slice is left out, so that runs from before `slices` existed resume without a warning.
    """
    sizes = lambda shape: {name: n for name, n in dataclasses.asdict(shape).items() if (name, n) != ("slices", 1)}
    return {**sizes(config.mesh), **({} if config.sampler_mesh is None else {"sampler": sizes(config.sampler_mesh)})}


def check_not_foreign(folder: Path) -> None:
    """Raises RefusedIdentity for a folder that is not a run's and is not empty; hidden files do not count.

    A run's first file is its lock: a folder with a lock and no manifest was left by a run that ended early.
    """
    names = set(paths.list_dir(folder)) if paths.exists(folder) else set()
    if names & {"manifest.json"}:
        return
    visible = sorted(name for name in names if not name.startswith("."))
    if visible and "lock" not in names:
        rest = f" and {len(visible) - 3} more" if len(visible) > 3 else ""
        raise RefusedIdentity(
            f"{folder} is not a run directory and already contains {', '.join(visible[:3])}{rest}; choose another --run"
        )
    if "checkpoints" in names and list_steps(folder / "checkpoints"):
        raise RefusedIdentity(
            f"{folder} holds checkpoints, but not the manifest.json of their run; restore it, or use another --run"
        )


def remove_unbegun(folder: Path) -> None:
    """Removes a new folder whose run was refused before it had a manifest. Call it with the run's lock held.

    A run that has begun is never removed, even if someone removed its manifest while it went on.
    """
    begun = paths.exists(folder / "metrics.jsonl") or list_steps(folder / "checkpoints")
    if not begun and not paths.exists(folder / "manifest.json"):
        with contextlib.suppress(OSError):  # the user must see why the run was refused, not this
            paths.remove_tree(folder)


def without_last_steps(config: Config) -> Config:
    """Returns the configuration with one step in the last stage, whose number of steps may change on a resume."""
    *before, last = config.stages
    return dataclasses.replace(config, stages=(*before, dataclasses.replace(last, steps=1)))


def places_of(names: Sequence[str], config: Config) -> list[str]:
    """Returns all places in the configuration of named fields ("Online.lag", "AdamW.*"): "stages.1.lag",
    "stages.0.optimizer.*"."""

    def sections(part: Any, place: str) -> Iterator[tuple[str, str]]:
        if isinstance(part, tuple):
            for i, item in enumerate(part):
                yield from sections(item, f"{place}{i}.")
        elif dataclasses.is_dataclass(part):
            yield type(part).__name__, place
            for field in dataclasses.fields(part):
                yield from sections(getattr(part, field.name), f"{place}{field.name}.")

    config_sections = list(sections(config, ""))
    fields = [name.split(".") for name in names]
    return [place + field for section, field in fields for name, place in config_sections if name == section]


def free_places(config: Config) -> list[str]:
    """Returns the places in a configuration that may change on a resume: FREE, and the last stage's steps."""
    return [*places_of(FREE, config), f"stages.{len(config.stages) - 1}.steps"]


def refuse_another_model(folder: Path, model: str, location: str | None = None) -> None:
    """Raises RefusedIdentity if the config.json of a published model is not the one that a run began with. A model that
    is gone is accepted: the run has its weights. location: of the run, for messages; None: the folder."""
    current = paths.readable_file(model, "config.json")
    if current is not None and paths.read_bytes(current) != paths.read_bytes(folder / PUBLISHED / "config.json"):
        raise RefusedIdentity(
            f"{model}/config.json differs from what {location or folder} began with (see {folder / PUBLISHED}); "
            "restore it, or use another --run"
        )


def refuse_another(
    folder: Path,
    manifest: dict[str, Any],
    config: Config,
    *,
    accept_change: bool = False,
    location: str | None = None,
    checkpoints: Path | None = None,
) -> list[str]:
    """Raises RefusedIdentity if the folder holds another run, ValueError if an accepted change would train nothing;
    warns about another machine, and about ROUNDED fields.

    Args:
      accept_change: return the differences, a line each, instead of refusing them.
      location: of the run, for messages, if the folder is a local copy of it; None: the folder.
      checkpoints: from which a resume continues; None: the run's.
    """
    if not paths.exists(folder / "manifest.json"):
        return []
    begun = read_manifest(folder / "manifest.json")
    identity, environment = compare(begun, manifest, free_places(config), places_of(ROUNDED, config))
    configured = {**begun["identity"], "config": None} == {**manifest["identity"], "config": None}
    if identity and accept_change:
        check_steps_left(config, checkpoints or folder / "checkpoints", location or folder)
        for line in identity:
            _log.warning("accepted: %s; bit-identity is no longer guaranteed", line)
        return identity
    if identity and configured and all(": not there, now " in line for line in identity):
        raise RefusedIdentity(
            f"{location or folder} was started by a version of jrl that did not have these:\n  "
            + "\n  ".join(identity)
            + "\n"
            "Continue with that version, or use another --run"
        )
    if identity:
        # If the configurations are equal, files that they name have changed, so using the run's would not help.
        same = begun["identity"]["config"] == manifest["identity"]["config"]
        remedy = "restore what has changed" if same else f"its own configuration ({folder / 'config.gin'})"
        accept = (
            "continue with the change: --accept-change (in Python accept_change=True). To start a new run from its "
            "weights: --from (begin_from)"
            if list_steps(checkpoints or folder / "checkpoints")
            else "begin it again with the change, since it has no checkpoint: --accept-change "
            "(in Python accept_change=True)"
        )
        raise RefusedIdentity(
            f"{location or folder} holds another run:\n  " + "\n  ".join(identity) + "\n"
            f"Use another --run, or {remedy}, or {accept}"
        )
    if isinstance(config.model, Published):
        refuse_another_model(folder, config.model.path, location)
    for line in environment:
        _log.warning("changed since it began: %s; bit-identity across this is not guaranteed", line)
    return []


def check_steps_left(config: Config, checkpoints: Path, location: str | Path) -> None:
    """Raises ValueError if a run to be continued with a change has more steps than the configuration. With as many, its
    last evaluation is measured again. location: of the run, for the message."""
    done, total = max(list_steps(checkpoints), default=0), ends(config)[-1]
    if done > total:
        raise ValueError(
            f"--accept-change: {location} has done {done} steps, and this configuration has {total}: nothing would be "
            f"trained with the change. Set the last stage's steps so that all stages have more than {done}, or leave "
            "the change out"
        )


def record_change(
    config: Config, parts: Parts, folder: Path, manifest: dict[str, Any], changes: Sequence[str], step: int
) -> None:
    """Writes the run's new configuration and manifest. Its history records what changed, and after which step. A run
    that had ended has no summary until it ends again: the old one holds accuracies from before the change."""
    before = read_manifest(folder / "manifest.json")
    history = [*before.get("history", []), {"after_step": step, "changes": list(changes)}]
    carried_over = {name: before[name] for name in ("from", "id") if name in before}
    paths.remove_file(folder / "summary.json")
    write_configuration(config, parts, folder)
    write_manifest(folder / "manifest.json", {**manifest, **carried_over, "history": history, "promise": CHANGED})


CHANGED = "the run was continued with changes (history): bit-identity with an uninterrupted run is not guaranteed"


def write_run_metadata(config: Config, parts: Parts, folder: Path, manifest: dict[str, Any]) -> None:
    """Writes the metadata of a new run into its folder, once everything is open. The manifest is written last."""
    paths.remove_tree(folder / PUBLISHED)  # of an earlier attempt that did not reach its manifest
    if isinstance(config.model, Published):
        source = paths.readable_without_weights(config.model.path)
        config_json = {"config.json": paths.read_foreign(source / "config.json", paths.MOST_OBJECT_BYTES, source)}
        paths.write_files(folder / PUBLISHED, {**config_json, **companions_of(config.model.path)})
    write_configuration(config, parts, folder)
    write_manifest(folder / "manifest.json", manifest | {"id": uuid.uuid4().hex[:8]})


def continue_configuration(config: Config, parts: Parts, folder: Path) -> None:
    """Writes the configuration that a resumed run continues with, if it is another: with more steps, or with a setting
    that may change on a resume. The manifest keeps the one that the run began with. A run that had ended has no summary
    until it ends again."""
    paths.remove_file(folder / "summary.json")
    saved = folder / "config.gin"
    if not paths.exists(saved) or paths.read_bytes(saved) != _gin_text(config, parts):
        write_configuration(config, parts, folder)


def _gin_text(config: Config, parts: Parts) -> bytes:
    return gin.to_gin(config, config_classes(parts.tables)).encode()


def write_configuration(config: Config, parts: Parts, folder: Path) -> None:
    """Writes the resolved configuration and the sources of the run's parts."""
    for name, text in part_files(parts).items():
        paths.make_dir(folder / "parts")
        paths.write_bytes_atomic(folder / "parts" / name, text.encode())
    paths.write_bytes_atomic(folder / "config.gin", _gin_text(config, parts))
    paths.write_bytes_atomic(folder / "config.json", (json.dumps(gin.to_json(config), indent=2) + "\n").encode())
