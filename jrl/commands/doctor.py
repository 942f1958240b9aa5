"""`jrl doctor`: checks an installation, a run or a published model."""

from __future__ import annotations

import argparse
from pathlib import Path

from jrl.commands import options, start
from jrl.commands.contract import Command
from jrl.commands.rows import counted_rows
from jrl.exit_codes import DONE, STOPPED

MARKS = {True: "ok", False: "!!", None: "--"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="SOURCE", nargs="?", type=Path,
                        help="the folder of a run, or of a published model, to check as well")  # fmt: skip
    options.add_devices(parser)


def doctor(args: argparse.Namespace) -> int:
    start.prepare_jax(args)
    from jrl.run.bucket_run import holder_of_run, readable
    from jrl.tools.doctor import Line, examine

    holder = None if args.run is None else holder_of_run(args.run)
    with counted_rows() as counted:
        lines = examine(None if args.run is None else readable(args.run), counted)
    if holder is not None:
        lines.append(Line(True, holder))
    for line in lines:
        print(f"{MARKS[line.good]}  {line.text}")
    return STOPPED if any(line.good is False for line in lines) else DONE


COMMAND = Command(
    "Check this installation, and a run or a published model, and say what to fix.",
    "jrl doctor runs/tiny",
    add_arguments,
    doctor,
)
