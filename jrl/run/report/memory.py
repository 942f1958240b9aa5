"""How much memory a run takes, with all its processes. No JAX."""

from __future__ import annotations

import os
import sys
import time

_BETWEEN_SECONDS = 0.5  # reading a large process costs milliseconds, so steps that are faster share a reading
_MOST_SHARE = 0.02  # of the time that readings take


class PeakMemory:
    """The most memory seen so far. Polled at steps: what comes and goes between two readings is not seen."""

    def __init__(self) -> None:
        self.peak: int | None = None
        self._next = 0.0

    def sample(self, *, now: bool = False) -> int | None:
        """Returns the peak in bytes after a new reading, if the last is old or `now`; None off Linux."""
        if now or time.monotonic() >= self._next:
            start = time.monotonic()
            if (seen := tree_pss_bytes(os.getpid())) is not None:
                self.peak = max(self.peak or 0, seen)
            end = time.monotonic()
            self._next = end + max(_BETWEEN_SECONDS, (end - start) / _MOST_SHARE)
        return self.peak


def tree_pss_bytes(pid: int) -> int | None:
    """Returns the proportional set size of a process and all its descendants: shared pages count once. None off Linux.

    A process that ends while it is read, or that belongs to another user, counts as 0.
    """
    if not sys.platform.startswith("linux"):
        return None
    return sum(_pss_bytes(member) for member in _tree(pid))


def _pss_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as lines:
            for line in lines:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


def _tree(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as handle:
                    # The command, in brackets, may hold blanks and brackets of its own; the parent comes after it.
                    parent = int(handle.read().rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            children.setdefault(parent, []).append(int(name))
    members, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        members.append(pid)
        waiting += children.get(pid, [])
    return members
