"""Saves and restores everything that influences a run: one directory a step, committed by one rename.

    ROOT/00000005/state/...        the array leaves, written by orbax
    ROOT/00000005/unchanged/...    large ones that are as they were at the step before (unchanged.py)
    ROOT/00000005/shards-1.bin     in place of state/, where each process has a folder of its own (shards.py)
    ROOT/00000005/host.json        what is not an array: data position, counters, offsets
    ROOT/00000005/manifest.json    sha256 of every file above, and path, dtype, shape and hash of every leaf
    ROOT/00000005.condemned/       a step that a later one condemned: its updates were not finite. Nothing reads it

Orbax survives a killed save but restores damaged bytes without a word and does not fall back, so the manifest is ours:
it is verified before any byte is used, the leaves are hashed again after they are read, and a damaged step is named and
passed over for the newest intact one. Orbax appears in this file only (arrays.py reads what it has written).

Layout chosen by measurement (2 CPU cores, 8 virtual devices, orbax 0.12.8, 49 leaves of 1 MB together, ms a save):
OCDBT + zarr3 without compression or side files 72, orbax defaults 120, one file a leaf 155 to 180.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import difflib
import fnmatch
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from orbax.checkpoint import v1 as ocp

from jrl import paths
from jrl.device.placement import place_on_mesh, processes_of, without_shards
from jrl.device.processes import ONE, HostLost, OtherProcessFailed, Processes
from jrl.run.checkpoints import digest, unchanged
from jrl.run.checkpoints.arrays import read_arrays
from jrl.run.checkpoints.shards import read_shards, write_shards
from jrl.run.checkpoints.unchanged import Unchanged, find_unchanged, link_files
from jrl.types import PyTree

SHA256, CHECKSUM = "sha256", "checksum"  # of a leaf: of all bytes in order; summed over the shards of processes
FORMAT, SHARDS_FORMAT, UNCHANGED_FORMAT = 1, 2, 3  # arrays by orbax; shards from each process; orbax in two folders
_SAVING, _REPLACED, _REMOVED = (f"{paths.TEMPORARY}{what}-" for what in ("saving", "replaced", "removed"))
CONDEMNED = ".condemned"  # after the name of a step that is set aside
_log = logging.getLogger(__name__)


class SaveFailed(OSError):
    """A step could not be written. The steps that were there are intact and nothing is left over."""


class DamagedStep(ValueError):
    """A step on disk is not what was saved. `step` and `reason` say which and how."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"step {step} is damaged: {reason}")
        self.step, self.reason = step, reason


class NoIntactStep(ValueError):
    """No step can be restored. The message lists every step and what is wrong with it."""


class StateMismatch(ValueError):
    """An intact step holds other leaves than the run asks for: another model, optimizer or configuration."""


@dataclasses.dataclass(frozen=True)
class RunState:
    """A folder of saves. Hold the run's lock while it is used: it sweeps what a killed save left."""

    save: Callable[..., None]
    steps: Callable[[], list[int]]
    condemn: Callable[[int], list[int]]
    condemned: Callable[[], list[int]]
    restore: Callable[..., tuple[int, PyTree, dict[str, Any]]]
    verify: Callable[[int], Any]


def open_run_state(
    root: str | os.PathLike[str],
    *,
    keep: int,
    pinned: Collection[int] = (),
    processes: Processes = ONE,
    shared: bool = True,
) -> RunState:
    """Opens (or makes) a folder of saves and sweeps interrupted ones.

    `save(step, state, host, unproven=None, best=None)` returns when the step is on disk, read back and renamed into
    place; only then are older steps beyond the newest `keep` removed, but for `pinned` ones, `best` and the newest that
    is known to be good, and later ones, which a run that went back has left. `unproven` is the first step of which no
    later one shows that its weights are finite; None: `step` itself. A saved step is known to be good once a later one
    has learned from it.
    `condemn(first)` sets the steps from `first` on aside, where nothing finds them, and returns them; the next save
    removes them. `condemned()` returns those that are set aside.
    `restore(abstract_state, step=None, tell=...)` is `restore_step` below, of this folder. `verify(step)` raises
    DamagedStep in all processes if that step is damaged.
    Of several processes all call all of these: each writes and reads its own shards, and process 0 does the rest.
    shared: whether all processes see the folder. False: each has a folder of its own, which at the opening holds all
      that the others' do; a save is what they then hold together.
    Raises ValueError for keep < 1, and for a path that orbax cannot write below.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least one save must be kept")
    folder, writes = paths.normalize(root), processes.writer or not shared
    # Orbax looks for what it has written by a pattern of the whole path, and takes a backslash for a slash.
    if bad := [part for part in folder.parts if "\\" in part or not fnmatch.fnmatchcase(part, part)]:
        raise ValueError(f"orbax cannot write checkpoints below {bad[0]!r}, which is in the path {str(folder)!r}; "
                         "choose a folder without brackets and backslashes")  # fmt: skip
    if writes:
        paths.make_dir(folder)
        _sweep(folder)
    processes.barrier("swept")

    def save(
        step: int, state: PyTree, host: Mapping[str, Any], unproven: int | None = None, best: int | None = None
    ) -> None:
        save_step(folder, step, state, host, processes, shared=shared)
        if not writes:
            return
        present = list_steps(folder)
        good = known_good(present, step if unproven is None else unproven)
        kept = [other for other in (*pinned, good, best) if other is not None]
        for other in superseded(present, step, keep, kept):
            if other > step:
                _log.warning("removed the save of step %d in %s: step %d was saved after it", other, folder, step)
            _remove(folder, other)
        for other in list_condemned(folder):
            paths.remove_tree(condemned_dir(folder, other))

    def condemn(first: int) -> list[int]:
        bad = [step for step in steps() if step >= first]
        for step in bad if writes else ():
            paths.remove_tree(condemned_dir(folder, step))
            paths.rename(step_dir(folder, step), condemned_dir(folder, step))
        return bad

    def steps() -> list[int]:
        return processes.from_writer("steps", list_steps(folder) if processes.writer else None)

    return RunState(
        save=save,
        steps=steps,
        condemn=condemn,
        condemned=lambda: processes.from_writer("condemned", list_condemned(folder) if processes.writer else None),
        restore=functools.partial(restore_step, folder, processes=processes, shared=shared),
        verify=lambda step: _verify_together(folder, step, processes, shared),
    )


def known_good(present: Collection[int], unproven: int) -> int | None:
    """Returns the newest saved step before `unproven`, the first whose weights may not be finite; None: none is."""
    return max((saved for saved in present if saved < unproven), default=None)


def superseded(present: list[int], saved: int, keep: int, pinned: Collection[int] = ()) -> list[int]:
    """Returns the steps to remove once `saved` is on disk and verified: all but the newest `keep` and the `pinned` ones
    up to it, and all later ones. Those are damaged, or of a future that was left by going back, and a resume must not
    find them."""
    earlier = sorted(step for step in present if step <= saved)
    return sorted({*present} - {*earlier[-keep:]} - ({*earlier} & {*pinned}) - {saved})


def step_dir(root: str | os.PathLike[str], step: int) -> Path:
    return paths.normalize(root) / f"{step:08d}"  # orbax takes absolute paths only


def list_steps(root: str | os.PathLike[str]) -> list[int]:
    """Returns the committed steps, oldest first. Changes nothing, so a reader may call it while a run saves."""
    return sorted(int(name) for name in paths.list_dir(root) if name.isascii() and name.isdigit())


def condemned_dir(root: str | os.PathLike[str], step: int) -> Path:
    return step_dir(root, step).with_name(f"{step:08d}{CONDEMNED}")


def list_condemned(root: str | os.PathLike[str]) -> list[int]:
    """Returns the steps that are set aside, oldest first."""
    names = [name.removesuffix(CONDEMNED) for name in paths.list_dir(root) if name.endswith(CONDEMNED)]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def save_step(
    root: str | os.PathLike[str],
    step: int,
    state: PyTree,
    host: Mapping[str, Any],
    processes: Processes = ONE,
    *,
    shared: bool = True,
) -> None:
    """Writes one step: temporary folder, sync, read back, one rename, sync.

    Args:
      state: pytree of jax or numpy arrays, typed keys included; None is not a leaf.
      host: JSON values, no NaN (write None); process 0's counts.
      processes: those that hold the state; each writes its own shards.
      shared: as in `open_run_state`. False, or where some process has no device of some array: each writes a file of
        its shards.
    Raises: SaveFailed where the disk is full or the bytes read back differ; TypeError or ValueError for a leaf or a
      host value that cannot be saved, before anything is written.
    """
    folder = paths.normalize(root)
    if step < 0:
        raise ValueError(f"step is {step}; steps are counted from 0")
    leaves = digest.named_leaves(state)
    described = {name: _describe(name, leaf) for name, leaf in leaves.items()}
    _hash_leaves(leaves, described, processes, SHA256 if processes.count == 1 else CHECKSUM)
    host_bytes = _host_bytes(host)
    temporary, final = folder / f"{_SAVING}{step:08d}", step_dir(folder, step)
    arrays = {name: _stored(leaf) for name, leaf in leaves.items() if leaf.size}
    writes = processes.writer or not shared
    try:
        if writes:
            paths.remove_tree(temporary)
            paths.make_dir(temporary)
        processes.barrier(f"save {step}")
        if shared and _are_everywhere(arrays.values(), processes):
            _write_together(folder, temporary, step, arrays, described, host_bytes, processes)
        else:
            _write_apart(temporary, step, arrays, described, host_bytes, processes)
        processes.barrier(f"read back {step}")
        if writes:
            _publish(temporary, final)
        processes.barrier(f"published {step}")
    except (OtherProcessFailed, HostLost):
        raise
    except Exception as error:
        # Orbax reports a full disk as ValueError with the system's message inside, so every error is caught here.
        processes.check()  # a process that is gone ends orbax's barriers with an error too
        if writes:
            _discard(temporary)
            _restore_replaced(folder)
        earlier = [old for old in list_steps(folder) if old != step]
        raise SaveFailed(
            f"step {step} could not be saved under {folder}: {paths.cause(error)}. "
            + (f"Last checkpoint: step {earlier[-1]}" if earlier else "There is no earlier checkpoint")
        ) from error


def _write_together(
    folder: Path,
    temporary: Path,
    step: int,
    arrays: Mapping[str, Any],
    described: dict[str, Any],
    host_bytes: bytes,
    processes: Processes,
) -> None:
    """Writes a step into a folder that all processes see, and reads it back."""
    linked = _link_unchanged(folder, temporary, described) if processes.writer else None
    apart = Unchanged(*processes.from_writer(f"unchanged {step}", linked))
    written = _folders(arrays, set(apart.leaves))
    if apart.is_linked:
        del written[unchanged.FOLDER]
    for where, names in written.items():
        with _context(), _without_orbax_logs():
            ocp.save(temporary / where, {name: arrays[name] for name in names})
    processes.barrier(f"saved {step}")
    if processes.writer:
        paths.write_bytes_atomic(temporary / "host.json", host_bytes)
        paths.sync_tree(temporary)
        new = [name for name in paths.files_below(temporary) if name not in apart.files]
        body = {"format": FORMAT, "step": step, "files": digest.tree_digests(temporary, new), "leaves": described}
        if apart.leaves:
            body |= {"format": UNCHANGED_FORMAT, "files": body["files"] | apart.files, unchanged.FOLDER: apart.leaves}
        _write_manifest(temporary, body)
    for where, names in written.items():
        _read_back(temporary / where, {name: described[name] for name in names}, processes)


def _link_unchanged(folder: Path, temporary: Path, described: Mapping[str, Any]) -> Unchanged:
    """Returns which leaves have not changed since the newest step, after linking its files of them if it has some."""
    try:
        newest = max(list_steps(folder))
        earlier = read_step_manifest(folder, newest)
    except ValueError:  # there is none, or it is damaged
        return Unchanged([], {})
    found = find_unchanged(described, earlier)
    if not found.is_linked:
        return found
    try:
        if link_files(found.files, step_dir(folder, newest), temporary):
            return found
        _warn_once(f"files in {folder} cannot be hard-linked: every checkpoint has a copy of what has not changed")
    except ValueError as error:
        _log.warning(
            "what has not changed since step %d is written anew, because its file there is damaged: %s. Earlier steps "
            "that have this file in common are damaged too",
            newest,
            error,
        )
    paths.remove_tree(temporary / unchanged.FOLDER)
    return found._replace(files={})


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning(message)


def _folders(leaves: Collection[str], apart: Collection[str]) -> dict[str, list[str]]:
    """Returns {folder of a step: its leaves} of arrays that orbax writes or has written.

    Args:
      apart: the leaves that are in the folder of what has not changed.
    """
    folder_of = lambda name: unchanged.FOLDER if name in apart else "state"
    folders: dict[str, list[str]] = {}
    for name in leaves:
        folders.setdefault(folder_of(name), []).append(name)
    return folders


def _write_apart(
    temporary: Path,
    step: int,
    arrays: Mapping[str, Any],
    described: dict[str, Any],
    host_bytes: bytes,
    processes: Processes,
) -> None:
    """Writes what this process has of a step into a file of its own, and reads it back."""
    files, placed = write_shards(temporary, arrays, processes.index)
    if processes.writer:
        paths.write_bytes_atomic(temporary / "host.json", host_bytes)
        files["host.json"] = {"sha256": hashlib.sha256(host_bytes).hexdigest(), "bytes": len(host_bytes)}
    if digest.tree_digests(temporary, files) != files:
        raise ValueError("what was written reads back with other bytes")
    every = processes.exchange(f"saved {step}", {"files": files, "placed": placed})
    if processes.writer:
        body = {
            "format": SHARDS_FORMAT,
            "step": step,
            "files": {name: entry for one in every for name, entry in one["files"].items()},
            "leaves": described,
            "shards": {leaf: [shard for one in every for shard in one["placed"].get(leaf, ())] for leaf in arrays},
        }
        _write_manifest(temporary, body)
    paths.sync_dir(temporary)  # files were synced as they were written; those of another process may come and go


def _write_manifest(temporary: Path, body: dict[str, Any]) -> None:
    paths.write_bytes_atomic(temporary / "manifest.json", _seal(body))
    if _unseal(paths.read_bytes(temporary / "manifest.json")) != body:
        raise ValueError("manifest.json reads back with other contents")


def restore_step(
    root: str | os.PathLike[str],
    abstract_state: PyTree,
    step: int | None = None,
    tell: Callable[[str], None] = _log.warning,
    *,
    part: bool = False,
    processes: Processes = ONE,
    shared: bool = True,
) -> tuple[int, PyTree, dict[str, Any]]:
    """Returns (step, state, host) of the newest intact step, or of `step`.

    Args:
      abstract_state: pytree of jax.ShapeDtypeStruct with shardings, on any mesh; numpy arrays ask for numpy arrays.
        A leaf without a sharding lands on the first device.
      tell: takes a message of each damaged step that is passed over, newest first.
      part: `abstract_state` may be a part of what was saved (only the parameters, say); the rest is not read.
      processes: those that read together, each its own shards.
      shared: as in `open_run_state`. False: each verifies all of its own folder.
    Raises: NoIntactStep where none is left; DamagedStep where `step` was asked for and is damaged; StateMismatch where
      an intact step holds other leaves.
    """
    folder = paths.local(root)
    present = list_steps(folder)
    read = lambda step: _read(folder, step, abstract_state, part, processes, shared)
    if step is not None:
        if step not in present:
            raise NoIntactStep(f"there is no checkpoint of step {step} in {folder}; there are {present or 'none'}")
        return step, *read(step)
    if not present:
        raise NoIntactStep(f"there is no checkpoint in {folder}")
    while True:
        try:
            return newest_intact(folder, present, read, tell)
        except NoIntactStep:
            if (later := list_steps(folder)) == present:
                raise
            present = later  # a run in progress has removed what was read, and saved newer ones


def newest_intact(
    where: object,
    steps: Sequence[int],
    read: Callable[[int], tuple[PyTree, dict[str, Any]]],
    tell: Callable[[str], None],
) -> tuple[int, PyTree, dict[str, Any]]:
    """Returns (step, state, host) of the newest of `steps`, oldest first, that `read` does not find damaged.

    Args:
      where: the folder or run, for the message.
      tell: takes a message of each damaged step that is passed over.
    Raises: NoIntactStep where all are damaged.
    """
    damaged = []
    for step in reversed(steps):
        try:
            return step, *read(step)
        except DamagedStep as error:
            tell(f"{error}; trying the one before it" if step != steps[0] else str(error))
            damaged.append(f"step {step}: {error.reason}")
    raise NoIntactStep(f"no checkpoint in {where} is intact ({'; '.join(damaged)})")


def read_step_manifest(root: str | os.PathLike[str], step: int) -> dict[str, Any]:
    """Returns the manifest of a step: what was saved, and the digests of its files, which are not looked at. Raises
    DamagedStep where it is missing or not as it was written."""
    folder = step_dir(root, step)
    try:
        digest.check_plain_file(folder / "manifest.json")
        body = _unseal(paths.read_bytes(folder / "manifest.json"))
        if body["format"] not in (FORMAT, SHARDS_FORMAT, UNCHANGED_FORMAT) or body["step"] != step:
            raise ValueError(f"the manifest is of format {body['format']}, step {body['step']}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedStep(step, _fault(error)) from error
    return body


def read_host(root: str | os.PathLike[str], step: int) -> dict[str, Any]:
    """Returns the host part of a step; its arrays are not looked at. Raises DamagedStep if it is not what was saved."""
    path, body = step_dir(root, step) / "host.json", read_step_manifest(root, step)
    try:
        data = paths.read_bytes(path)
        if hashlib.sha256(data).hexdigest() != body["files"]["host.json"]["sha256"]:
            raise ValueError("host.json has other contents than were saved")
    except (OSError, ValueError, KeyError) as error:
        raise DamagedStep(step, _fault(error)) from error
    return json.loads(data)


def verify_step(root: str | os.PathLike[str], step: int, processes: Processes = ONE) -> dict[str, Any]:
    """Returns the manifest of a step after hashing every file of it. Raises DamagedStep naming the first fault.

    Args:
      processes: those that verify a folder that all of them see: each hashes its share of the files, and does not find
        the faults of the others' shares.
    """
    folder, body = step_dir(root, step), read_step_manifest(root, step)
    try:
        present = set(paths.files_below(folder)) - {"manifest.json"}
        if missing := sorted(body["files"].keys() - present):
            raise ValueError(f"{missing[0]} is missing")
        if extra := sorted(present - body["files"].keys()):
            raise ValueError(f"{extra[0]} is not in the manifest")
        # The largest are dealt out first, so that the shares are about as large.
        by_size = sorted(present, key=lambda name: (-body["files"][name]["bytes"], name))
        for name, actual in digest.tree_digests(folder, by_size[processes.index :: processes.count]).items():
            if actual != body["files"][name]:
                raise ValueError(f"{name} has other bytes than were saved")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedStep(step, _fault(error)) from error
    return body


def _fault(error: Exception) -> str:
    """Returns what is wrong with a step. Of errors that are not ours or the system's the class says more than the
    text."""
    return str(error).split("\n", 1)[0] if type(error) is ValueError else paths.first_line(error)


def _read(
    folder: Path, step: int, abstract_state: PyTree, part: bool, processes: Processes, shared: bool
) -> tuple[PyTree, dict[str, Any]]:
    body = _verify_together(folder, step, processes, shared)
    saved, target = body["leaves"], digest.named_leaves(abstract_state)
    check_leaves(step, saved, target, part=part)
    targets = {name: _target(leaf, saved[name]) for name, leaf in target.items() if leaf.size}

    each_reads_all = body["format"] != SHARDS_FORMAT and not _are_everywhere(targets.values(), processes)

    def load() -> tuple[dict[str, Any], dict[str, int], dict[str, Any]]:
        loaded: dict[str, Any] = {}
        checksums: dict[str, int] = {}
        root = step_dir(folder, step)
        try:
            if body["format"] == SHARDS_FORMAT:
                loaded = read_shards(root, body["shards"], targets, body["files"])
            else:
                for where, names in _folders(targets, set(body.get(unchanged.FOLDER, ()))).items():
                    those = {name: targets[name] for name in names}
                    if each_reads_all:
                        arrays, found = _load_alone(root / where, those, saved)
                        loaded, checksums = loaded | arrays, checksums | found
                    else:
                        with _context():
                            loaded |= ocp.load(root / where, those)
            return loaded, checksums, json.loads(paths.read_bytes(root / "host.json"))
        except Exception as error:
            # The bytes are what was saved and the leaves agree, so what is left is a fault below this file.
            raise DamagedStep(step, f"its arrays could not be read: {_fault(error)}") from error

    loaded, checksums, host = _together(processes, step, f"loaded {step}", load)
    if each_reads_all:  # to hash all bytes in order, leaves would be sent to the processes that have no device of them
        every = processes.exchange(f"checksums {step}", checksums)
        checksums = {name: value for one in every for name, value in one.items()}
        no_hash = lambda entry: {kind: value for kind, value in entry.items() if kind != SHA256}
        saved = {
            name: no_hash(entry) | {CHECKSUM: _checksum_text(checksums.get(name, 0))} for name, entry in saved.items()
        }
    leaves = {name: _returned(leaf, loaded.get(name), saved[name]) for name, leaf in target.items()}

    def compare() -> None:
        read = {name: dict(saved[name]) for name in leaves}
        for kind in (SHA256, CHECKSUM):
            _hash_leaves({name: leaf for name, leaf in leaves.items() if kind in saved[name]}, read, processes, kind)
        for name in leaves:
            if read[name] != saved[name] or not {SHA256, CHECKSUM} & saved[name].keys():
                raise DamagedStep(step, f"leaf {name} was read with other values than were saved")

    _together(processes, step, f"read {step}", compare)
    state = jax.tree_util.tree_map_with_path(lambda path, _: leaves[digest.leaf_path(path)], abstract_state)
    return state, host


def _are_everywhere(arrays: Iterable[Any], processes: Processes) -> bool:
    """Whether every process has a device of every array."""
    shardings = [getattr(array, "sharding", None) for array in arrays]
    meshes = {sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)}
    return processes.count == 1 or all(len(processes_of(mesh)) == processes.count for mesh in meshes)


def _verify_together(folder: Path, step: int, processes: Processes, shared: bool) -> dict[str, Any]:
    """Returns the manifest of a step, as `verify_step`; of a folder that all processes see each hashes a share."""
    return _together(
        processes, step, f"verified {step}", lambda: verify_step(folder, step, processes if shared else ONE)
    )


def _together(processes: Processes, step: int, what: str, read: Callable[[], Any]) -> Any:
    """Returns what `read` does. Raises DamagedStep in all processes where it does in one."""
    try:
        result, reason = read(), None
    except DamagedStep as damage:
        if processes.count == 1:
            raise
        result, reason = None, damage.reason
    for found in processes.exchange(what, reason):
        if found is not None:
            raise DamagedStep(step, found)
    return result


def _hash_leaves(
    leaves: Mapping[str, Any], entries: Mapping[str, dict[str, Any]], processes: Processes, kind: str
) -> None:
    """Sets the hash of every leaf's entry.

    Args:
      kind: CHECKSUM: each process reads its own shards. SHA256: a leaf with shards in several processes is gathered by
        all of them and hashed by one, each in its turn; so a step that one process has saved is read by several.
    """
    hashes: dict[str, Any] = {}
    if kind == CHECKSUM:
        with concurrent.futures.ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            local = lambda data: digest.local_checksum(data, writer=processes.writer)
            hashes = dict(zip(leaves, pool.map(local, map(digest.key_data, leaves.values()))))
        every = processes.exchange("checksums", hashes)
        for name in leaves:
            entries[name][CHECKSUM] = _checksum_text(sum(one[name] for one in every))
        return
    for place, (name, leaf) in enumerate(leaves.items()):
        whole = digest.whole_leaf(leaf)
        if place % processes.count == processes.index:
            hashes[name] = digest.leaf_digest(whole)
        del whole
    for every in processes.exchange("hashes", hashes):
        for name, value in every.items():
            entries[name][SHA256] = value


def _checksum_text(value: int) -> str:
    return f"{value % 2**64:016x}"


def _read_back(written: Path, entries: Mapping[str, dict[str, Any]], processes: Processes) -> None:
    """Raises ValueError unless a folder of a step that is about to be published holds what was in memory. Leaves are
    read in groups, so that the copy on the host stays small; each process reads a share of them."""
    share = dict(list(entries.items())[processes.index :: processes.count])
    for name, data in read_arrays(written, share):
        if not _is_same(data, entries[name]):
            raise ValueError(f"leaf {name} reads back with other values")


def _load_alone(
    state: Path, targets: Mapping[str, Any], entries: Mapping[str, dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Returns what orbax has written as `targets` asks for it, where some process has no device of an array. Orbax
    needs one in every process that reads with others, so each reads by itself: all elements of the leaves that it has a
    device of, whose shards it then places. Also returns the checksums of what it has read.

    Raises: ValueError where a leaf is read with other values than were saved.
    """
    is_here = lambda target: isinstance(target, np.ndarray) or bool(target.sharding.addressable_devices)
    loaded = {name: without_shards(target) for name, target in targets.items() if not is_here(target)}
    checksums: dict[str, int] = {}
    read = {name: entries[name] for name in targets if name not in loaded}
    for name, data in read_arrays(state, read):
        if not _is_same(data, entries[name]):
            raise ValueError(f"leaf {name} was read with other values than were saved")
        checksums[name] = digest.full_checksum(data)
        target = targets[name]
        loaded[name] = data if isinstance(target, np.ndarray) else place_on_mesh(data, target.sharding)
    return loaded, checksums


def _is_same(data: np.ndarray, entry: Mapping[str, Any]) -> bool:
    """Whether all elements of a leaf are those that were saved."""
    if CHECKSUM in entry:
        return _checksum_text(digest.full_checksum(data)) == entry[CHECKSUM]
    return digest.array_digest(entry["dtype"], tuple(entry["shape"]), data) == entry[SHA256]


def check_leaves(step: int, saved: dict[str, Any], target: dict[str, Any], *, part: bool) -> None:
    """Raises StateMismatch where the leaves of a saved step, as its manifest has them, are not those of `target`, or,
    with `part`, do not include them with their dtypes and shapes."""
    missing, unused = sorted(target.keys() - saved.keys()), sorted(saved.keys() - target.keys())
    if missing:
        near = difflib.get_close_matches(missing[0], unused or saved, n=1, cutoff=0.0)
        raise StateMismatch(
            f"step {step} does not hold {len(missing)} of the leaves that this run needs, first {missing[0]!r}"
            + (f" (nearest saved: {near[0]!r})" if near else "")
        )
    if unused and not part:
        raise StateMismatch(f"step {step} holds {len(unused)} leaves that this run does not use, first {unused[0]!r}")
    for name, leaf in target.items():
        have = (saved[name]["dtype"], tuple(saved[name]["shape"]))
        want = (str(leaf.dtype), tuple(leaf.shape))
        if have != want:
            raise StateMismatch(
                f"step {step} holds {name} as {have[0]}{list(have[1])}, this run needs {want[0]}{list(want[1])}"
            )


def _describe(name: str, leaf: Any) -> dict[str, Any]:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"leaf {name} of the state is a {type(leaf).__name__}; arrays only, the rest belongs in host")
    if leaf.dtype == object:
        raise TypeError(f"leaf {name} of the state is an object array; only numbers can be saved")
    data = digest.key_data(leaf)
    entry = {
        "dtype": str(leaf.dtype),
        "shape": list(leaf.shape),
        "data_dtype": str(data.dtype),
        "data_shape": list(data.shape),
    }
    return entry | ({"impl": str(jax.random.key_impl(leaf))} if digest.is_key(leaf) else {})


def _stored(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, np.generic) else digest.key_data(leaf)


def _target(leaf: Any, saved: dict[str, Any]) -> Any:
    """What orbax is asked for. Keys travel as their data: one more trailing axis, never sharded.

    64-bit leaves come as numpy: orbax reads in threads that do not see `jax.enable_x64`, and would narrow them.
    """
    shape, dtype = tuple(saved["data_shape"]), np.dtype(saved["data_dtype"])
    if isinstance(leaf, np.ndarray | np.generic) or dtype.itemsize > 4:
        return np.empty(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=_sharding(leaf))


def _returned(leaf: Any, loaded: Any, saved: dict[str, Any]) -> Any:
    if loaded is None:  # a leaf with no elements has no file
        loaded = np.empty(tuple(saved["data_shape"]), np.dtype(saved["data_dtype"]))
    if isinstance(leaf, np.ndarray | np.generic):
        return np.asarray(loaded)
    if digest.is_key(leaf):
        loaded = jax.random.wrap_key_data(loaded, impl=saved["impl"])
    return place_on_mesh(loaded, _sharding(leaf))


def _sharding(leaf: Any) -> jax.sharding.Sharding:
    return leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _context() -> ocp.Context:
    """Returns orbax's settings."""
    context = ocp.Context()
    saving = context.array.saving
    saving.use_ocdbt = True
    saving.use_zarr3 = True
    saving.use_compression = False
    saving.use_replica_parallel = False
    saving.enable_write_sharding_file = False
    saving.enable_post_merge_validation = False
    saving.array_metadata_store = None
    context.pytree.loading.partial_load = True  # leaf names are compared by us, with a readable error
    return context


def _host_bytes(host: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(dict(host), allow_nan=False, indent=1, sort_keys=True).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(f"the host part of a save must be JSON without NaN or infinity: {error}") from error


def _seal(body: dict[str, Any]) -> bytes:
    return json.dumps({"body": body, "sha256": _body_digest(body)}, indent=1).encode()


def _unseal(data: bytes) -> dict[str, Any]:
    sealed = json.loads(data)
    if sealed["sha256"] != _body_digest(sealed["body"]):
        raise ValueError("manifest.json has other contents than were saved")
    return sealed["body"]


def _body_digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _publish(temporary: Path, final: Path) -> None:
    """Renames a finished step into place. A step of that number (damaged, or before a replay) is set aside first, so
    that at every instant one of the two is whole; `_sweep` settles the case where the process dies in between."""
    aside = final.with_name(f"{_REPLACED}{final.name}")
    if final.exists():
        paths.rename(final, aside)
    paths.rename(temporary, final)
    paths.remove_tree(aside)


def _restore_replaced(folder: Path) -> None:
    for name in paths.list_dir(folder):
        if name.startswith(_REPLACED):
            final = folder / name.removeprefix(_REPLACED)
            if not final.exists():
                paths.rename(folder / name, final)


def _sweep(folder: Path) -> None:
    _restore_replaced(folder)
    for name in paths.list_dir(folder):
        if name.startswith(paths.TEMPORARY):
            _log.warning("removed %s, left by a save that did not finish", folder / name)
            _discard(folder / name)


def _remove(folder: Path, step: int) -> None:
    """Removes a step so that a death on the way leaves no half of it under its name."""
    doomed = folder / f"{_REMOVED}{step:08d}"
    _discard(doomed)
    paths.rename(step_dir(folder, step), doomed)
    paths.remove_tree(doomed)


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        paths.remove_tree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _without_orbax_logs() -> Iterator[None]:
    """Inside, orbax's threads log no tracebacks of their own: what they raise is raised to the caller as well."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
