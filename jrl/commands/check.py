"""`jrl check`: runs the contract tests on your own parts."""

from __future__ import annotations

import argparse
import sys

from jrl.commands import start
from jrl.commands.contract import Command
from jrl.exit_codes import DONE, REFUSED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "parts",
        metavar="PARTS.py",
        nargs="+",
        help="Python files that define ALGOS, OPTIMIZERS, STRATEGIES, CURRICULA, SOURCES, ENVS, VERIFIERS, TOKENIZERS "
        "or MODELS",
    )


def check(args: argparse.Namespace) -> int:
    start.prepare_jax(args, platform="cpu")
    from jrl.tools.check import check_parts, table

    print(f"testing {', '.join(map(str, args.parts))} ...", file=sys.stderr, flush=True)
    findings = check_parts(args.parts)
    print(table(findings))
    return DONE if all(row.problem is None for row in findings) else REFUSED


COMMAND = Command(
    "Run jrl's contract tests on your own objectives, verifiers, environments and other parts.",
    "jrl check my_parts.py",
    add_arguments,
    check,
)
