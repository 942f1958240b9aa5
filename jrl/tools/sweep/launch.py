"""Trains the members of a sweep as child processes, a few at a time. A failed member does not stop the others."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jrl import paths
from jrl.exit_codes import DONE
from jrl.run.checkpoints.lock import holder_of
from jrl.run.identity import RefusedIdentity
from jrl.run.report.summary import read_summary
from jrl.run.report.text import printable
from jrl.tools.sweep.manifest import LOGS
from jrl.tools.sweep.members import Member

JRL = (sys.executable, "-P", "-m", "jrl.cli")
POLL_SECONDS = 0.2
RECHECK_SECONDS = 2.0  # between checks of a member that another process trains
KILL_AFTER_SECONDS = 10.0  # that a child has to exit after a second Ctrl-C, before it is killed


class Ended(NamedTuple):
    """A member that trained, failed or was stopped. `code` is its exit code, or minus the signal that ended it."""

    member: Member
    code: int
    seconds: float
    why: str = ""  # a member of a population failed; of a process the log says it


@dataclasses.dataclass(frozen=True)
class ProgressCallbacks:
    """Callbacks while members train, all called from one thread."""

    began: Callable[[Member], None]
    elsewhere: Callable[[Member, Mapping[str, str | int]], None]  # another process trains it, and is waited for
    ended: Callable[[Ended], None]
    tick: Callable[[Sequence[Member]], None]  # the members that are training; called often
    close: Callable[[], None]  # the last call


def is_finished(folder: Path, member: Member) -> bool:
    """Returns whether a member has a summary of all its steps."""
    summary = folder / member.name / "summary.json"
    return paths.exists(summary) and read_summary(summary)["steps"] == member.steps


def train_members(
    members: Sequence[Member],
    commands: Mapping[str, Sequence[str]],
    folder: Path,
    jobs: int,
    stop: threading.Event,
    progress: ProgressCallbacks,
    program: Sequence[str] = JRL,
    check: Callable[[Member], None] = lambda member: None,
) -> dict[str, Ended]:
    """Trains members and returns {name: how it ended} for each that began.

    Args:
      members: the unfinished ones, in the order in which they start.
      commands: {member name: arguments of `jrl`}.
      folder: of the sweep. The output of a member goes to FOLDER/logs/MEMBER.log.
      jobs: members that train at a time.
      program: the command that takes the arguments.
      stop: once set, no member starts, and those that train are asked to save and stop.
      check: called with a member before it starts. Once it raises RefusedIdentity, no member starts, and the error is
        raised when those that train have ended.

    If another process trains a member, such as a child of a killed sweep, this waits for it. KeyboardInterrupt (a
    second Ctrl-C) ends all children at once and is raised again.
    """
    waiting, ended = deque(members), {}
    running: dict[str, tuple[Member, subprocess.Popen[bytes], float]] = {}
    elsewhere: dict[str, tuple[Member, float]] = {}  # member, last check
    stopping, refused = False, None
    paths.make_dir(folder / LOGS)

    def end(member: Member, code: int, seconds: float) -> None:
        ended[member.name] = Ended(member, code, seconds)
        progress.ended(ended[member.name])

    try:
        while running or ((waiting or elsewhere) and not stop.is_set()):
            now = time.monotonic()
            for name, (member, checked) in list(elsewhere.items()):
                if now - checked < RECHECK_SECONDS:
                    continue
                elsewhere[name] = (member, now)
                if holder_of(folder / name) is None:
                    del elsewhere[name]
                    if is_finished(folder, member):
                        end(member, DONE, read_summary(folder / name / "summary.json")["seconds"]["total"])
                    else:
                        waiting.appendleft(member)
            while waiting and len(running) + len(elsewhere) < jobs and not stop.is_set():
                try:
                    check(waiting[0])
                except RefusedIdentity as error:
                    refused = error
                    waiting.clear()
                    break
                member = waiting.popleft()
                holder = holder_of(folder / member.name)
                if holder is not None:
                    elsewhere[member.name] = (member, now)
                    progress.elsewhere(member, holder)
                    continue
                running[member.name] = (member, _start([*program, *commands[member.name]], folder, member), now)
                progress.began(member)
            for name, (member, child, began) in list(running.items()):
                if child.poll() is not None:
                    del running[name]
                    end(member, child.returncode, time.monotonic() - began)
            if stop.is_set() and not stopping:
                stopping = True
                for _, child, _ in running.values():
                    child.send_signal(signal.SIGTERM)
            progress.tick([member for member, *_ in running.values()])
            if running or elsewhere:
                stop.wait(POLL_SECONDS) if not stopping else time.sleep(POLL_SECONDS)
    except BaseException:
        _end_children([child for _, child, _ in running.values()])
        raise
    finally:
        progress.close()
    if refused is not None:
        raise refused
    return ended


def last_words(folder: Path, ended: Ended) -> str:
    """Returns why a member ended, on one line: `ended.why`, or else from the end of its log; "" if that is missing or
    empty. This is jrl's last message, with the lines after it unless a signal ended the member, or the last line if jrl
    wrote none."""
    if ended.why:
        return printable(" ".join(ended.why.split()), 1000)
    log = folder / LOGS / f"{ended.member.name}.log"
    if not paths.exists(log):
        return ""
    lines = [line for line in paths.read_bytes(log)[-65536:].decode(errors="replace").splitlines() if line.strip()]
    messages = [i for i, line in enumerate(lines) if line.startswith("jrl: ")]
    message = lines[messages[-1] :] if messages else lines[-1:]
    message = message if ended.code > 0 else message[:1]
    return printable(" ".join(line.strip() for line in message).removeprefix("jrl: "), 1000)


def _start(command: Sequence[str], folder: Path, member: Member) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if os.path.isabs(entry))}
    with open(folder / LOGS / f"{member.name}.log", "wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # the sweep handles Ctrl-C at the terminal
        )


def _end_children(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends children at once: a run exits at the second signal, or else is killed."""
    for number in (signal.SIGTERM, signal.SIGINT):
        for child in children:
            child.send_signal(number)
        time.sleep(POLL_SECONDS)
    deadline = time.monotonic() + KILL_AFTER_SECONDS
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
