"""The exit codes of commands, and what they mean."""

from __future__ import annotations

DONE, UNFORESEEN, REFUSED, OTHER_RUN, STOPPED, NOTHING_TO_DO, CHECKPOINTS_REMOVED = range(7)
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: run it again
LOST = 76
INTERRUPTED = 130  # 128 + SIGINT, as shells report it

MEANINGS = {
    DONE: "done",
    UNFORESEEN: "unexpected internal error",
    REFUSED: "the configuration or an input is refused; the message says where (jrl check: a test failed)",
    OTHER_RUN: "the folder contains another run, or files that are not a run",
    STOPPED: "stopped by an error; fix the cause and rerun to continue from the last checkpoint "
    "(jrl doctor: something is wrong; jrl replay: the result differs)",
    NOTHING_TO_DO: "nothing to do: the run already has all the steps asked for",
    CHECKPOINTS_REMOVED: "the run's checkpoints were removed; nothing was changed",
    PREEMPTED: "stopped on request (SIGTERM, Ctrl-C) and saved; rerun to continue",
    LOST: "a process is gone, does not answer or was aborted; rerun all to continue from the last checkpoint",
    INTERRUPTED: "stopped at once (a second Ctrl-C); rerun to continue from the last checkpoint",
}
EXIT_CODES_HELP = "\n".join(["exit codes:", *(f"  {code:<3} {meaning}" for code, meaning in MEANINGS.items())])
