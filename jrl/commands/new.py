"""`jrl new`: writes a small task to start from."""

from __future__ import annotations

import argparse

from jrl.commands import options
from jrl.commands.contract import Command
from jrl.exit_codes import DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="NAME", type=options.folder, help="the task's name, and a new folder for its files"
    )


def new(args: argparse.Namespace) -> int:
    from jrl.tools.new import create

    commands = create(args.folder)
    print(f"{args.folder}/ contains a configuration, a verifier and ten rows of data. Try:")
    for command in commands:
        print(f"  {command}")
    return DONE


COMMAND = Command(
    "Write a small task to start from: a configuration, a verifier and ten rows of data.",
    "jrl new sums",
    add_arguments,
    new,
)
