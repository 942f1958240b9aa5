"""`jrl fingerprint`: prints content hashes of a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from jrl.commands import options, start
from jrl.commands.contract import Command
from jrl.exit_codes import DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN", type=Path, help="the folder of a run; it may be running")
    options.add_step(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def fingerprint(args: argparse.Namespace) -> int:
    start.prepare_jax(args, platform="cpu")  # arrays are only hashed, and the run may hold the device
    from jrl.run.bucket_run import readable
    from jrl.run.run_hash import run_fingerprint

    hashes = run_fingerprint(readable(args.source), args.step)
    if args.json:
        print(json.dumps(hashes))
    else:
        for name, value in hashes.items():
            if name != "total":
                print(f"{name:<10} {value}")
        print(hashes["total"])
    return DONE


COMMAND = Command(
    "Print content hashes of a run: equal hashes, equal runs, bit for bit.",
    "jrl fingerprint runs/tiny --step 30",
    add_arguments,
    fingerprint,
)
