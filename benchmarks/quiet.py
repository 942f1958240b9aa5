"""A machine to ourselves: what other processes used of the CPU while something ran.

/proc/stat counts the time that all processors were busy, /proc/PID/stat what each process used. What is busy and not
ours was somebody else's: a run disturbed so is thrown away and counted.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
SHARE = 0.02  # of all processors' time, that others may use in a run
TICKS = 6  # and so many clock ticks more: the kernel counts in hundredths of a second, on each processor
REPEATS = 7  # a row is the median of so many runs
MOST_DISTURBED = 14  # so many thrown away end a row with what there is


class Usage(NamedTuple):
    """Processor time so far, in clock ticks."""

    busy: int  # all processes and the hypervisor's other guests
    own: int  # this process and its descendants


def usage(proc: Path = PROC) -> Usage:
    """Returns what has been used since the machine, or each process, started."""
    fields = [int(x) for x in (proc / "stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _, _, irq, softirq, steal = fields[:8]
    return Usage(user + nice + system + irq + softirq + steal, own(os.getpid(), stats(proc)))


def stats(proc: Path) -> dict[int, tuple[int, int]]:
    """Returns process -> (its parent, ticks used by it and by those of its children that have ended)."""
    processes = {}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text()
        except OSError:  # it ended meanwhile
            continue
        after_name = text.rpartition(")")[2].split()
        processes[int(entry.name)] = int(after_name[1]), sum(map(int, after_name[11:15]))
    return processes


def own(root: int, processes: dict[int, tuple[int, int]]) -> int:
    """Returns the ticks of `root` and of all that descend from it."""
    children: dict[int, list[int]] = {}
    for process, (parent, _) in processes.items():
        children.setdefault(parent, []).append(process)
    total, waiting = 0, [root]
    while waiting:
        process = waiting.pop()
        total += processes[process][1] if process in processes else 0
        waiting += children.get(process, [])
    return total


def disturbed(before: Usage, after: Usage, seconds: float, processors: int, ticks_a_second: int) -> bool:
    """Returns whether others used more of the CPU between two readings than SHARE and TICKS allow."""
    others = (after.busy - before.busy) - (after.own - before.own)
    return others > SHARE * seconds * processors * ticks_a_second + TICKS


class Runs(NamedTuple):
    """The runs of one row in one system."""

    seconds: list[float]
    disturbed: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def in_turn(
    calls: Sequence[Callable[[], float]],
    *,
    repeats: int = REPEATS,
    most_disturbed: int = MOST_DISTURBED,
    keep_disturbed: bool = False,
    watch: Callable[[Callable[[], float]], tuple[float, bool]] | None = None,
) -> list[Runs]:
    """Returns the runs of every call, one of each in turn, until each has `repeats` that nobody disturbed.

    A call that was disturbed more than `most_disturbed` times is asked no more, and has fewer runs.

    Args:
      calls: each does its work once and returns the seconds that it took.
      keep_disturbed: a disturbed run counts like any other, and is counted beside: for trying the command out.
      watch: makes a call, and says whether it was disturbed.
    """
    watch = watched if watch is None else watch
    runs = [Runs([], 0) for _ in calls]
    waiting = range(len(calls))
    while waiting := [i for i in waiting if len(runs[i].seconds) < repeats and runs[i].disturbed <= most_disturbed]:
        for i in waiting:
            seconds, disturbed = watch(calls[i])
            undisturbed = runs[i]
            counted = [*undisturbed.seconds, seconds] if keep_disturbed or not disturbed else undisturbed.seconds
            runs[i] = Runs(counted, undisturbed.disturbed + disturbed)
    return runs


def watched(call: Callable[[], float]) -> tuple[float, bool]:
    """Returns (the seconds that `call` says it took, whether somebody else used the CPU meanwhile)."""
    before, start = usage(), time.monotonic()
    seconds = call()
    wall, after = time.monotonic() - start, usage()
    return seconds, disturbed(before, after, wall, os.cpu_count() or 1, os.sysconf("SC_CLK_TCK"))
