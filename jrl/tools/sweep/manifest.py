"""sweep.json: a sweep's members, how they ended, and how they compare."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jrl import paths
from jrl.config.errors import ConfigError
from jrl.plugins import PartError
from jrl.run.identity import RefusedIdentity
from jrl.run.report.manifest import read_manifest, without_folders
from jrl.tools.sweep.members import Member, Sweep, parts_now, settings_now
from jrl.tools.sweep.settings import SEED, is_data_file, settings_of_run

FILE = "sweep.json"
FORMAT = 1
LOGS = "logs"


def check_folder(folder: Path, sweep: Sweep) -> None:
    """Raises RefusedIdentity if a folder contains another sweep or anything else. Without a sweep.json it may contain
    members, trained by the commands that --print has printed."""
    if not paths.exists(folder / FILE):
        expected = {"lock", *(member.name for member in sweep.members)}
        names = [name for name in paths.list_dir(folder) if not name.startswith(".") and name not in expected]
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


def check_settings(folder: Path, sweep: Sweep) -> None:
    """Raises RefusedIdentity if a member that has begun has other settings: a command of another sweep trained it, the
    gin file had changed when it started, or it was continued to more steps. Data files may have been moved."""
    for member in sweep.members:
        if not paths.exists(folder / member.name / "config.gin"):
            continue
        seed, settings = settings_of_run(folder / member.name)
        begun, now = {SEED: seed, **settings}, {SEED: member.seed, **member.settings}
        differing = sorted(name for name in {*begun, *now} if begun.get(name) != now.get(name))
        if names := [name for name in differing if not is_data_file(name)]:
            lines = [f"{name}: {begun.get(name, 'nothing')}, now {now.get(name, 'nothing')}" for name in names]
            raise RefusedIdentity(
                f"{folder / member.name} has other settings:\n  " + "\n  ".join(lines) + "\n"
                "Move it away to train this member anew, or choose another --out. `jrl compare` compares runs without "
                "training"
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


def check_unchanged(folder: Path, sweep: Sweep, member: Member, *, accept_change: bool = False) -> None:
    """Raises RefusedIdentity if a member, which reads the gin file and the parts files when it starts, would have
    another configuration than the sweep has read, or, unless `accept_change`, other parts files than those that members
    have begun with."""
    if not accept_change and (now := parts_now(sweep)) != sweep.parts:
        check_parts(folder, sweep._replace(parts=now))
    try:
        changed = settings_now(sweep, member) != (member.seed, member.settings)
    except (ConfigError, PartError, OSError) as error:
        raise RefusedIdentity(f"{member.name} cannot start any more: {error}") from error
    if changed:
        raise RefusedIdentity(
            f"{sweep.config}, a file that it includes or a parts file has changed since the sweep began, so "
            f"{member.name} and all after it do not start. Restore it and run the same command to continue, or choose "
            "another --out"
        )


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
