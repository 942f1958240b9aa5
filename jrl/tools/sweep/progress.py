"""Shows the progress of a sweep: a line for every member that ends, and a status line, live on a terminal and once a
minute elsewhere."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from jrl import paths
from jrl.exit_codes import DONE, PREEMPTED
from jrl.run.report.text import duration, printable
from jrl.tools.sweep.launch import Ended, ProgressCallbacks, last_words
from jrl.tools.sweep.members import Member
from jrl.tools.sweep.runs import missing_metrics, read_run

TAIL_BYTES = 1 << 16  # of metrics.jsonl, enough for its last row
REFRESH_SECONDS = 1.0  # between updates of the status line on a terminal
REPORT_SECONDS = 60.0  # between status lines elsewhere
MOST_NAMED = 4  # members that such a line names
MOST_SAID = 120  # characters of why a member failed; the sweep says all of it at its end


def open_progress(
    folder: Path, total: int, finished: int, jobs: int | None, metrics: Sequence[str], stream: TextIO
) -> ProgressCallbacks:
    """Returns callbacks that print the progress of a sweep to `stream`.

    Args:
      total: members of the sweep. finished: members that are finished already.
      jobs: members that train at a time, and from whose mean time the time left is estimated; None: all of them train
        together and end at once.
      metrics: what the members will be compared by; each line shows the last value of the first one, or of
        "reward/mean" if there are none. Metrics missing from the first member that is done are reported at once.
    """
    live = stream.isatty()
    metric, unchecked = (metrics or ("reward/mean",))[0], list(metrics)
    seconds: list[float] = []
    num_done, left = finished, total - finished  # members that are finished, and that have yet to end
    refreshed, shown = 0.0 if live else time.monotonic(), ""

    def clear() -> None:
        nonlocal shown
        if live and shown:
            stream.write("\r\x1b[K")
            stream.flush()
            shown = ""

    def line(text: str) -> None:
        clear()
        stream.write(text + "\n")
        stream.flush()

    def began(member: Member) -> None:
        if not live:
            line(f"began  {member.name}")

    def elsewhere(member: Member, holder: Mapping[str, str | int]) -> None:
        who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
        line(f"waiting for {member.name}, which {who} trains")

    def ended(outcome: Ended) -> None:
        nonlocal num_done, left
        member, code = outcome.member, outcome.code
        left -= 1
        if code == DONE:
            num_done += 1
            seconds.append(outcome.seconds)
        row = last_row(folder / member.name)
        eta = time_left(seconds, left, jobs)
        done = f"{member.steps} steps in {duration(outcome.seconds)}"
        value = f"  {metric} {row[metric]:.4g}" if isinstance(row.get(metric), float | int) else ""
        last = f"after step {row['step']}" if "step" in row else "before its first step"
        word = {DONE: f"done   {member.name}  {done}{value}", PREEMPTED: f"stopped {member.name} {last}"}
        failed = f"FAILED {member.name} (exit code {code}): {printable(last_words(folder, outcome), MOST_SAID)}"
        line(f"[{num_done}/{total}] {word.get(code, failed)}{f'  {eta} left' if eta else ''}")
        if code == DONE and left and unchecked:
            try:
                missing = missing_metrics(unchecked, [read_run(folder / member.name)])
            except (OSError, ValueError) as error:  # do not stop the others; the comparison raises it again
                line(f"note: {error}")
                return
            later = "another --metric may be given later, and what is finished stays"
            for name in missing:
                line(f"note: {later}: {member.name} has no {name}")
            unchecked.clear()

    def tick(running: Sequence[Member]) -> None:
        nonlocal refreshed, shown
        now = time.monotonic()
        if now - refreshed < (REFRESH_SECONDS if live else REPORT_SECONDS):
            return
        refreshed = now
        done = {member.name: last_row(folder / member.name).get("step", 0) for member in running}
        steps = "; ".join(f"{member.name} {done[member.name]}/{member.steps}" for member in running)
        if not live and len(running) > MOST_NAMED:
            steps = f"{len(running)} members at steps {min(done.values())} to {max(done.values())}"
        eta = time_left(seconds, left, jobs)
        text = f"{num_done}/{total} done; {steps or 'waiting'}{f'; about {eta} left' if eta else ''}"
        if not live:
            line(text)
            return
        shown = text[: shutil.get_terminal_size().columns - 1]
        stream.write(f"\r\x1b[K{shown}")
        stream.flush()

    return ProgressCallbacks(began, elsewhere, ended, tick, clear)


def time_left(seconds: Sequence[float], left: int, jobs: int | None) -> str:
    """Returns the estimated time for `left` members as text; "" if it is unknown or none are left."""
    known = seconds and left and jobs is not None
    return duration(statistics.mean(seconds) * left / min(jobs, left)) if known else ""


def last_row(folder: Path) -> dict[str, Any]:
    """Returns the last complete row of a run's metrics; {} if there is none yet."""
    path = folder / "metrics.jsonl"
    if not paths.exists(path):
        return {}
    with open(path, "rb") as file:
        file.seek(max(0, paths.size(path) - TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
    try:
        return json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
