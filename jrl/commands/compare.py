"""`jrl compare`: compares runs in a table and on a page."""

from __future__ import annotations

import argparse
import json

from jrl.commands import options, start
from jrl.commands.contract import Command
from jrl.exit_codes import DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", type=options.folder,
                        help="folders or gs:// addresses of runs, folders of sweeps for all their members")  # fmt: skip
    options.add_comparison(parser)
    parser.add_argument(
        "--out", metavar="DIR", type=options.folder, help="write report.html, charts and comparison.json here"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def compare(args: argparse.Namespace) -> int:
    start.prepare_jax(args, platform="cpu")  # nothing runs
    from jrl import paths
    from jrl.tools.sweep import comparison, page, sweeping

    options = sweeping.ComparisonOptions(tuple(args.metric), tuple(args.by), args.baseline, args.statistic)
    result = sweeping.compare_folders(args.runs, options)
    if args.out is not None:
        page.write_page(args.out, result, "Comparison of runs", " ".join(["jrl compare", *map(str, args.runs)]))
        content = json.dumps(comparison.to_json(result), indent=1, allow_nan=False)
        paths.write_bytes_atomic(args.out / "comparison.json", content.encode() + b"\n")
    print(json.dumps(comparison.to_json(result), indent=1) if args.json else comparison.table(result))
    if args.out is not None and not args.json:
        print(f"\nThe report is in {args.out / page.PAGE}")
    return DONE


COMMAND = Command(
    "Compare runs: a table with intervals over seeds, learning curves, a page to read offline.",
    "jrl compare runs/a runs/b --baseline AdamW.learning_rate=1e-3 --out comparison",
    add_arguments,
    compare,
)
