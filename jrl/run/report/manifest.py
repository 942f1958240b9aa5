"""manifest.json: what a run is (its identity) and where it ran (its environment)."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import json
import os
import platform
from collections.abc import Collection, Mapping
from pathlib import PurePath
from typing import Any

import jax

from jrl import paths

FORMAT = 1
PACKAGES = ("jrl-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "grain", "numpy")
PROMISE = (
    "bit-identity holds for one JAX version, device kind, device count and per-device shape; on others a resumed run "
    "goes on from the same state, and its numbers may differ by rounding"
)


def make_manifest(
    *,
    config_identity: str,
    config: Mapping[str, Any],
    tokenizer: str,
    data: str,
    parts: Mapping[str, str],
    seed: int,
    mesh: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Returns the manifest of a run that starts here.

    Args:
      config_identity: hash of the configuration without what may change on a resume (steps, log, save interval).
      config: the resolved configuration as JSON: what names the difference when the identities differ.
      tokenizer: its fingerprint. data: the source's. parts: path -> sha256 of its source. seed: Run.seed.
      mesh: axis -> size. The environment records it: a run may go on with another one, if not bit for bit.
    """
    return {
        "format": FORMAT,
        "identity": {
            "config": config_identity,
            "tokenizer": tokenizer,
            "data": data,
            "parts": without_folders(parts),
            "seed": seed,
        },
        "config": json.loads(json.dumps(config)),
        "environment": {
            "python": platform.python_version(),
            "packages": installed_packages(),
            "backend": jax.default_backend(),
            "device_kind": jax.devices()[0].device_kind,
            "devices": jax.device_count(),
            "processes": jax.process_count(),
            "machine": platform.machine(),
            "mesh": dict(mesh or {}),
        },
        "promise": PROMISE,
    }


def without_folders(parts: Mapping[str, str]) -> dict[str, str]:
    """Returns {parts file: sha256} without the folders of files whose names differ: a path depends on where the run was
    started."""
    names = [PurePath(path).name for path in parts]
    short = {path: name if names.count(name) == 1 else path for path, name in zip(parts, names)}
    return {short[path]: parts[path] for path in sorted(parts, key=short.__getitem__)}


def installed_packages() -> dict[str, str]:
    """Returns the versions of the libraries that decide a run's numbers."""
    return {name: _version(name) for name in PACKAGES}


def compare(
    old: Mapping[str, Any], new: Mapping[str, Any], free: Collection[str] = (), rounded: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Returns (identity, environment): a line for each difference. Any of the first refuses a resume; the second warn.

    A configuration whose identity differs is explained field by field where the manifests hold it, without the fields
    that `free` names ("loop.steps", "log.*"): they may differ. Those that `rounded` names warn as the environment does.
    """
    line = lambda name, before, after: f"{name}: {_shown(before)}, now {_shown(after)}"
    fields = _differences(old.get("config"), new.get("config"))
    bound = [each for each in fields if not any(fnmatch.fnmatchcase(each[0], pattern) for pattern in free)]
    identity = []
    for each in _differences(old["identity"], new["identity"]):
        identity += [line(*field) for field in (bound if each[0] == "config" else ())] or [line(*each)]
    changed = [each for each in fields if each[0] in rounded and each[1] is not _MISSING]
    return identity, [line(*each) for each in [*_differences(old["environment"], new["environment"]), *changed]]


def dashboard_id(folder: str | os.PathLike[str]) -> str:
    """Returns what a dashboard tells a run from others by, also once it is resumed: the name of its folder, which runs
    in other places may have too, and the id in its manifest. Of a run that an earlier version began: the name alone."""
    manifest = read_manifest(paths.local(folder) / "manifest.json")
    return "-".join([paths.local(folder).resolve().name, *([manifest["id"]] if "id" in manifest else [])])


def write_manifest(path: str | os.PathLike[str], manifest: Mapping[str, Any]) -> None:
    paths.write_bytes_atomic(path, json.dumps(manifest, indent=2, allow_nan=False).encode() + b"\n")


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns a manifest. Raises ValueError naming the file where it is damaged or of another format."""
    try:
        manifest = json.loads(paths.read_bytes(path))
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']}, this version reads {FORMAT}")
        for section in ("identity", "environment"):
            if not isinstance(manifest[section], dict):
                raise ValueError(f"its {section} is not an object")
        # Earlier versions wrote parts with their folders.
        manifest["identity"]["parts"] = without_folders(manifest["identity"].get("parts", {}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not the manifest of a run: {error}") from error
    return manifest


_MISSING = object()


def _differences(old: Any, new: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        lines = []
        for name in sorted({*old, *new}):
            place = f"{prefix}.{name}" if prefix else name
            lines += _differences(old.get(name, _MISSING), new.get(name, _MISSING), place)
        return lines
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and all(map(_is_object, old + new)):
        return _differences(dict(enumerate(old)), dict(enumerate(new)), prefix)
    same = type(old) is type(new) and old == new
    return [] if same else [(prefix or "everything", old, new)]


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _shown(value: Any) -> str:
    if value is _MISSING:
        return "not there"
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 80 else f"{text[:76]} ..."


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # jrl itself, run from a checkout
