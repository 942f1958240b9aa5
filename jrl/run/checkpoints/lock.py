"""One process holds a run folder. The kernel releases it when that process dies, however it dies. No JAX."""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import json
import os
import socket
from collections.abc import Callable

from jrl import paths


class RunIsHeld(ValueError):
    """Another living process trains in this folder. `holder` is what it wrote: pid, host, started."""

    def __init__(self, folder: str, holder: dict[str, str | int]) -> None:
        who = holder_text(holder)
        super().__init__(f"{folder} is held by {who}; stop it, wait for it, or choose another --run folder")
        self.holder = holder


def holder_text(holder: dict[str, str | int]) -> str:
    """Returns who holds a run folder, as text."""
    return f"process {holder['pid']} on {holder['host']}, since {holder['started']}" if holder else "another process"


@dataclasses.dataclass(frozen=True)
class RunLock:
    release: Callable[[], None]


def hold_run(folder: str | os.PathLike[str]) -> RunLock:
    """Takes FOLDER/lock for this process until `release` or its death. Raises RunIsHeld where another holds it.

    The file stays when the lock goes: removing it would let two processes lock two files of one name. Only a new run
    that is refused removes its folder; whoever then holds the removed file takes the lock of the new one. A forked
    child does not inherit it, because the descriptor is closed on exec and workers are exec'd.
    """
    path = paths.make_dir(folder) / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        held = isinstance(error, BlockingIOError)
        holder = _holder(os.pread(descriptor, 4096, 0))
        os.close(descriptor)
        if held:
            raise RunIsHeld(str(folder), holder) from error
        raise OSError(error.errno, f"this file system cannot lock files: {error.strerror}", str(path)) from error
    if os.fstat(descriptor).st_nlink == 0:
        os.close(descriptor)
        return hold_run(folder)
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
    try:
        with paths.naming(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
    except OSError:  # a full disk: this process does not hold the folder
        os.close(descriptor)
        raise
    released = False

    def release() -> None:
        nonlocal released
        if not released:
            released = True
            os.close(descriptor)

    return RunLock(release=release)


def holder_of(folder: str | os.PathLike[str]) -> dict[str, str | int] | None:
    """Returns who holds a run folder ({} where it has not said so yet), or None where nobody does.

    Looks by taking the lock shared for an instant: readers do not disturb each other, and a trainer that starts in
    that very instant is refused, so this is for a person who asks and not for a loop.
    """
    try:
        descriptor = os.open(paths.local(folder) / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _holder(os.pread(descriptor, 4096, 0))
    finally:
        os.close(descriptor)


def _holder(data: bytes) -> dict[str, str | int]:
    try:
        holder = json.loads(data)
        return {"pid": holder["pid"], "host": holder["host"], "started": holder["started"]}
    except (ValueError, KeyError, TypeError):
        return {}  # the holder has the lock but has not written its name yet
