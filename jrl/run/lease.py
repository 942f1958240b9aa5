"""The lock of a run in a bucket: an object that its holder renews, and that no other process takes meanwhile. No JAX.

The object is only written with a generation precondition, so that of two processes that take it one succeeds. A holder
that has not renewed it for LEASE_SECONDS, by the service's clock, is dead or cut off; if it comes back, its commits are
refused (jrl/run/bucket_run.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from jrl.bucket.client import Bucket, Conflict, Missing, shown
from jrl.run.checkpoints.lock import RunIsHeld

LEASE_SECONDS = 60.0
BEATS = 4  # renewals in LEASE_SECONDS
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Lease:
    lost: Callable[[], bool]  # whether another process has taken it
    release: Callable[[], None]


NO_LEASE = Lease(lost=lambda: False, release=lambda: None)  # of a process whose run another process holds


def take_lease(
    bucket: Bucket, name: str, address: str, copy: str, *, seconds: float = LEASE_SECONDS, sleep: Any = time.sleep
) -> Lease:
    """Takes the lock object for this process until `release`; a thread renews it.

    Args:
      address: of the run, for messages.
      copy: names the file lock that this process holds. A holder with the same one is dead: the kernel has released
        its lock.

    Raises: RunIsHeld if another process renews it.
    """
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    owner = uuid.uuid4().hex
    me = {"pid": os.getpid(), "host": socket.gethostname(), "started": started, "copy": copy, "owner": owner}
    # Conditional writes must all differ.
    content = lambda **more: json.dumps({**me, "nonce": uuid.uuid4().hex, **more}).encode()
    written = None
    while written is None:
        before, generation = _read(bucket, name)
        if before is not None and not before.get("released") and before["copy"] != copy:
            generation = _until_expired(bucket, name, address, before, generation, seconds, sleep)
        with contextlib.suppress(Conflict):
            written = bucket.put(name, content(), if_generation=generation).generation

    lost, ended = threading.Event(), threading.Event()

    def beat() -> None:
        nonlocal written
        while not ended.wait(seconds / BEATS):
            try:
                written = bucket.put(name, content(), if_generation=written).generation
            except Conflict:
                # An earlier renewal that seemed to fail may have been written after all.
                try:
                    current, generation = _read(bucket, name)
                except (OSError, ValueError):  # tried again at the next renewal
                    continue
                if current is None:
                    _log.warning("the lock of %s was removed; it is written again", shown(address))
                elif current["owner"] != owner:
                    lost.set()
                    return
                written = generation
            except OSError as error:
                _log.warning("the lock of %s could not be renewed: %s", shown(address), error)

    thread = threading.Thread(target=beat, name="jrl-lease", daemon=True)
    thread.start()

    def release() -> None:
        if ended.is_set():
            return
        ended.set()
        thread.join()
        if not lost.is_set():
            try:
                bucket.put(name, content(released=True), if_generation=written)
            except OSError as error:
                _log.warning("the lock of %s could not be given back, and ends by itself: %s", shown(address), error)

    return Lease(lost=lost.is_set, release=release)


def holder_in_bucket(bucket: Bucket, name: str) -> dict[str, Any] | None:
    """Returns who holds a run (pid, host, started, seconds since it was renewed), or None if nobody does."""
    holder, _ = _read(bucket, name)
    state = bucket.stat(name)
    if holder is None or state is None or holder.get("released") or state.now - state.updated > LEASE_SECONDS:
        return None
    return {**holder, "seconds": max(state.now - state.updated, 0.0)}


def _until_expired(
    bucket: Bucket, name: str, address: str, holder: dict[str, Any], generation: int, seconds: float, sleep: Any
) -> int:
    """Returns the generation of a lock whose holder does not renew it. Raises RunIsHeld if it does."""
    waiting = False
    while (state := bucket.stat(name)) is not None:
        if state.generation != generation:
            now, generation = _read(bucket, name)
            if now is None or now.get("released"):
                return generation
            raise RunIsHeld(shown(address), {key: now[key] for key in ("pid", "host", "started")})
        if state.now - state.updated > seconds:
            return generation
        if not waiting:
            waiting = True
            _log.warning("%s is held by process %s on %s; waiting at most %.0f s to see whether it lives",
                         shown(address), holder["pid"], holder["host"], seconds)  # fmt: skip
        sleep(min(1.0, seconds / BEATS / 2))
    return 0


def _read(bucket: Bucket, name: str) -> tuple[dict[str, Any] | None, int]:
    """Returns the content of the lock and its generation; (None, 0) if there is none."""
    try:
        data, generation = bucket.get(name)
    except Missing:
        return None, 0
    try:
        content = json.loads(data)
        if not {"owner", "copy", "pid", "host", "started"} <= content.keys():
            raise ValueError("it lacks a field")
        return content, generation
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"gs://{bucket.name}/{name} is not the lock of a run ({error})") from error
