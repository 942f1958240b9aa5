"""jrl and its peers side by side: the same model, prompts and lengths, one run of each in turn, in one go.

    python -m benchmarks --out FILE.json                     everything; builds the peers' environments when first run
    python -m benchmarks --out FILE.json --only jrl          jrl alone
    python -m benchmarks --out FILE.json --what sampler      one of the parts

Prints medians, ratios and the share of what the hardware could do, measured in the same run. A run that other
processes disturbed is thrown away and counted. Use it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import limits as hardware
from benchmarks import quiet, table
from benchmarks.limits import Limits
from benchmarks.shapes import SAMPLING, SHAPES, ModelShape
from benchmarks.system import System, ask, close, open_jrl

WHATS = ("sampler", "update", "step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="JSON file with every figure")
    parser.add_argument("--only", choices=("jrl", "peers"))
    parser.add_argument("--what", choices=WHATS)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="cpu", help="of the model")
    parser.add_argument("--rows", help="only rows whose name holds this text")
    parser.add_argument("--repeats", type=int, default=quiet.REPEATS, help="undisturbed runs of each row")
    parser.add_argument("--bind", action="append", default=[], metavar="NAME=VALUE", help="of jrl's configuration")
    parser.add_argument(
        "--in-use", action="store_true", help="keep disturbed runs: to try it out, not to claim anything"
    )
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    results: dict = {"in_use": args.in_use, "shape": dataclasses.asdict(shape), "rows": {}}
    with tempfile.TemporaryDirectory() as scratch:
        model = str(Path(scratch) / "model")
        first = open_jrl()
        ask(first, "publish", folder=model, shape=dataclasses.asdict(shape))
        limits = Limits(**ask(first, "measure_limits", dtype=shape.dtype))
        close(first)
        results["limits"] = dataclasses.asdict(limits)
        print(table.limits_line(limits), flush=True)
        if args.what in (None, "sampler"):
            sampler(args, shape, limits, model, results)
            save(args.out, results)


def sampler(args: argparse.Namespace, shape: ModelShape, limits: Limits, model: str, results: dict) -> None:
    """Measures every sampling case in every system."""
    systems: dict[str, System] = {"jrl": open_jrl()}
    print(table.SAMPLING_HEAD, flush=True)
    for case in SAMPLING:
        if args.rows is not None and args.rows not in case.name:
            continue
        ask(systems["jrl"], "open_sampling", folder=model, case=case, bindings=args.bind)
        row = {"roofline_seconds": hardware.sampling_seconds(shape, case, limits)}
        results["rows"][case.name] = row | side_by_side(args, systems, "sample", case=case)
        print(table.sampling_line(case.name, results["rows"][case.name]), flush=True)
    for system in systems.values():
        close(system)


def side_by_side(args: argparse.Namespace, systems: dict[str, System], do: str, **arguments: Any) -> dict[str, dict]:
    """Returns system -> its runs of one row, made in turn. Every run has a seed of its own, the same in each system."""
    answers: dict[str, list[dict]] = {name: [] for name in systems}

    def call(name: str) -> float:
        answers[name].append(ask(systems[name], do, seed=len(answers[name]) + 1, **arguments))
        return answers[name][-1]["seconds"]

    runs = quiet.in_turn(
        [functools.partial(call, name) for name in systems],
        repeats=args.repeats,
        watch=quiet.unwatched if args.in_use else quiet.watched,
    )
    return {name: {**answers[name][-1], **run._asdict()} for name, run in zip(systems, runs)}


def save(out: str, results: dict) -> None:
    Path(out).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
