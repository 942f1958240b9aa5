"""goodput.jsonl: what every process of a run has spent its time on, and the share of it that the run has kept.

One line at a start (`start`: seconds since 1970; `step`: the checkpoint that it went on from) and one after every step
and save (`step`: steps done; `seconds`: by part since that start). A process that an error stops adds one with its
message (`stopped`). Lines are only ever added, also where metrics.jsonl is cut to a checkpoint: so a process
that was killed has left what it did.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jrl import paths

NAME = "goodput.jsonl"
PARTS = ("compile", "sample", "score", "update", "save", "evaluate", "wait", "restart", "trace", "other")
GOOD = ("sample", "score", "update")
# Parts of the loop's clock that are counted under another name.
COUNTED_AS = {"prepare": "update"}
OF_A_START = ("start", "compile")  # of every process but the first, what the restart has cost


class GoodputFile(NamedTuple):
    """An open goodput.jsonl."""

    append: Callable[[Mapping[str, Any]], None]
    close: Callable[[], None]


def open_goodput(folder: Path) -> GoodputFile:
    """Opens the file after its last complete line: a kill may have cut the next one."""
    path = folder / NAME
    data = paths.read_bytes(path) if paths.exists(path) else b""
    handle = paths.open_append(path, data.rfind(b"\n") + 1)

    def append(record: Mapping[str, Any]) -> None:
        rounded = {part: round(seconds, 4) for part, seconds in record.get("seconds", {}).items()}
        with paths.naming(path):
            handle.write(json.dumps({**record, "seconds": rounded}).encode() + b"\n")
            handle.flush()

    def close() -> None:
        with contextlib.suppress(OSError):  # of a line that `append` has raised it for
            handle.close()

    return GoodputFile(append, close)


def read_goodput(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the records of a run; [] of one that has none. Lines that a loss of power has damaged are left out."""
    path = Path(folder) / NAME
    if not paths.exists(path):
        return []
    records = []
    for line in paths.read_bytes(path).split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def goodput(records: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Returns where the wall time of all processes has gone since the first start; None without a record.

        {"seconds": {part: ...}, "share": {part: ...}, "total": sum, "starts": processes, "goodput": share of GOOD}

    "restart" is what every start after the first has cost until its first step, its compilations, and all time after
    the step that a later start went on from: that work was done again. The time between two processes, and that
    from the last record of a killed one to its end, is not known and not counted.
    """
    lives: list[list[Mapping[str, Any]]] = []
    for record in records:
        if "start" in record:
            lives.append([])
        if lives:
            lives[-1].append(record)
    if not lives:
        return None
    seconds = dict.fromkeys(PARTS, 0.0)
    resumed = [life[0]["step"] for life in lives]
    for i, life in enumerate(lives):
        last = life[-1]["seconds"]
        until = min(resumed[i + 1 :], default=math.inf)
        kept = next((record["seconds"] for record in reversed(life) if record["step"] <= until), {})
        seconds["restart"] += sum(last.values()) - sum(kept.values())
        for part, spent in kept.items():
            if part in OF_A_START and i:
                part = "restart"
            part = COUNTED_AS.get(part, part)
            seconds[part if part in seconds else "other"] += spent
    total = sum(seconds.values())
    share = {part: spent / total if total else 0.0 for part, spent in seconds.items()}
    good = sum(share[part] for part in GOOD)
    return {"seconds": seconds, "share": share, "total": total, "starts": len(lives), "goodput": good}
