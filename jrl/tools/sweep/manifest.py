"""sweep.json: a sweep's members, how they ended, and how they compare."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jrl import paths
from jrl.run.identity import RefusedIdentity
from jrl.run.report.manifest import read_manifest, without_folders
from jrl.tools.sweep.members import Sweep, parts_now

FILE = "sweep.json"
FORMAT = 1
LOGS = "logs"


def check_folder(folder: Path, sweep: Sweep) -> None:
    """Raises RefusedIdentity if a folder contains another sweep or anything else."""
    if not paths.exists(folder / FILE):
        names = [name for name in paths.list_dir(folder) if not name.startswith(".") and name != "lock"]
        if names:
            what = "is a run, not a sweep" if "manifest.json" in names else f"is not a sweep and contains {names[0]}"
            raise RefusedIdentity(f"{folder} {what}; choose another --out")
        return
    before = read(folder)
    if {m["name"]: m["identity"] for m in before["members"]} == {m.name: m.identity for m in sweep.members}:
        return
    lines = _differences(before, describe(sweep))
    raise RefusedIdentity(
        f"{folder} holds another sweep:\n  " + "\n  ".join(lines) + "\n"
        "Choose another --out. `jrl compare` compares the runs of several sweeps"
    )


def check_parts(folder: Path, sweep: Sweep) -> None:
    """Raises RefusedIdentity if members have begun with other versions of the sweep's parts files, or with others:
    the rest would not be comparable with them."""
    for member in sweep.members:
        path = folder / member.name / "manifest.json"
        if not paths.exists(path):
            continue
        begun, now = read_manifest(path)["identity"]["parts"], without_folders(sweep.parts)
        names = sorted(name for name in {*begun, *now} if begun.get(name) != now.get(name))
        if names:
            raise RefusedIdentity(
                f"the parts files differ from those that {folder / member.name} began with: {', '.join(names)}. "
                "Restore them, or choose another --out. --accept-change trains the members that are left with these, "
                "beside those that are finished. `jrl compare` compares those without training"
            )


def check_parts_now(folder: Path, sweep: Sweep) -> None:
    """Raises RefusedIdentity as `check_parts` if parts files have changed since the sweep was read: members read them
    when they start."""
    if (now := parts_now(sweep)) != sweep.parts:
        check_parts(folder, sweep._replace(parts=now))


def describe(sweep: Sweep) -> dict[str, Any]:
    """Returns the content of sweep.json before the sweep runs."""
    return {
        "format": FORMAT,
        "config": sweep.config,
        "bindings": list(sweep.bindings),
        "axes": {axis.name: list(axis.values) for axis in sweep.axes},
        "members": [
            {
                "name": member.name,
                "bindings": list(member.bindings),
                "fixed": list(member.fixed),
                "identity": member.identity,
            }
            for member in sweep.members
        ],
    }


def write(folder: Path, content: Mapping[str, Any]) -> None:
    paths.write_bytes_atomic(folder / FILE, json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")


def read(folder: Path) -> dict[str, Any]:
    """Returns the content of a sweep.json. Raises ValueError naming the file if it is damaged or has another format."""
    path = folder / FILE
    content = paths.read_object(path)
    members = content.get("members")
    if content.get("format") != FORMAT or not isinstance(members, list):
        raise ValueError(f"{path} is not the manifest of a sweep in format {FORMAT}")
    for member in members:
        if not isinstance(member, dict) or not {"name", "bindings", "identity"} <= member.keys():
            raise ValueError(f"{path} is damaged: a member has no name, bindings or identity")
    return content


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    show = lambda value: "nothing" if value in (None, []) else value if isinstance(value, str) else ", ".join(value)
    lines = [
        f"{name}: {show(before.get(name))}, now {show(now[name])}"
        for name in ("config", "bindings")
        if before.get(name) != now[name]
    ]
    old, new = before.get("axes", {}), now["axes"]
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            lines.append(f"{name}: {show(old.get(name))}, now {show(new.get(name))}")
    if not lines and {m["name"] for m in before["members"]} != {m["name"] for m in now["members"]}:
        lines.append("the same lists, combined otherwise (--how, --count, --seed)")
    return lines or [f"{now['config']} has changed since that sweep began"]
