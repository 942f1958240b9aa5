"""`jrl plan`: predicts a run's memory and step time on a TPU topology."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jrl.commands import options, start
from jrl.commands.contract import Command
from jrl.exit_codes import DONE, REFUSED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="a .gin file, or a name from `jrl list configs`; "
                        "data and tokenizer are not opened")  # fmt: skip
    options.add_bindings(parser, "the file")
    parser.add_argument("--topology", metavar="CHIP:GRID",
                        help="such as v5e:4x8 or v5p:4x4x4, 2xv5p:4x4x4 for two slices; with --search, a chip alone, "
                             "such as v5p, asks for the smallest slice that fits")  # fmt: skip
    parser.add_argument(
        "--stage", metavar="NAME", help="plan this stage only (default: all, with the step time of the last Online one)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; memory in GiB per device")
    parser.add_argument(
        "--search",
        action="store_true",
        help="try meshes, micro-batches, rematerialization and slots; print the best layouts and write the fastest",
    )
    parser.add_argument("--all", metavar="FOLDER", type=Path,
                        help="check every recipe in FOLDER against the topology in its header")  # fmt: skip
    parser.add_argument("--out", metavar="FILE", type=options.out_file,
                        help="where --search writes the best layout (default: CONFIG-CHIP-GRID.gin in this directory), "
                             "and --all its table (default: docs/topologies.md, where docs exists)")  # fmt: skip
    parser.add_argument(
        "--no-collectives",
        action="store_true",
        help="do not count collectives, which takes a second compilation for virtual CPU devices",
    )


def plan(args: argparse.Namespace) -> int:
    from jrl.tools.plan.libtpu import set_environment

    set_environment()
    start.prepare_jax(args, platform="cpu")  # nothing runs
    say = lambda line: print(f"jrl: {line}", file=sys.stderr, flush=True)
    if args.stage is not None and (args.search or args.all is not None):
        raise ValueError("--stage restricts the table of one plan; leave it out with --search and --all")
    if args.all is not None:
        if args.config is not None or args.topology is not None or args.search or args.json:
            raise ValueError("--all checks every recipe of a folder against the topology in its own header; leave "
                             "CONFIG, NAME=VALUE, --topology, --search and --json out")  # fmt: skip
        return plan_all(args, say)
    if args.config is None or args.topology is None:
        raise ValueError("jrl plan takes CONFIG and --topology CHIP:GRID, or --all FOLDER; see `jrl help plan`")
    if args.out is not None and not args.search:
        raise ValueError("--out is where --search writes the best layout, and --all its table; leave it out")
    from jrl.resolve import find_config, load_config
    from jrl.tools.plan import report
    from jrl.tools.plan.chips import parse_topology
    from jrl.tools.plan.planning import make_plan, to_json

    args.config = find_config(args.config)
    config, parts = load_config(args.config, args.bindings)
    if args.search:
        return plan_search(args, config, parts, say)
    topology = parse_topology(args.topology)
    source, count = [args.config, *args.bindings], not args.no_collectives
    run_plan = make_plan(config, parts, topology, source, say, count=count, stage=args.stage)
    print(json.dumps(to_json(run_plan), indent=1) if args.json else report.text(run_plan))
    return DONE


def plan_search(args: argparse.Namespace, config: Any, parts: Any, say: Callable[[str], None]) -> int:
    from jrl import paths
    from jrl.tools.plan import search
    from jrl.tools.plan.chips import parse_chip, parse_topology

    options.check_not_overwriting(args.out, args.config)
    source = [args.config, *args.bindings]
    if ":" in args.topology:
        done = search.search(config, parts, parse_topology(args.topology), source, say)
    else:
        done = search.smallest(config, parts, parse_chip(args.topology), source, say)
    print(json.dumps(search.to_json(done), indent=1) if args.json else search.text(done))
    if done.fitting:
        out = args.out or Path(f"{Path(args.config).stem}-{done.topology.name.replace(':', '-')}.gin")
        paths.write_bytes_atomic(
            out, search.gin_text(done, os.path.relpath(args.config, out.parent), args.bindings).encode()
        )
        say(f"the fastest layout is in {out}; train with it: jrl train {out} --run DIR")
    elif ":" in args.topology:
        say(f"--topology {done.topology.chip.name} --search finds the smallest slice that fits")
    return DONE


def plan_all(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    from jrl import paths
    from jrl.tools.plan import every

    lines = every.check_all(args.all, say)
    for line in lines:
        print("  ".join(filter(None, line[:-1])))
    out = args.out or Path("docs/topologies.md")
    if args.out is not None or out.parent.is_dir():
        paths.write_bytes_atomic(out, every.markdown(lines).encode())
        say(f"the table is in {out}")
    return DONE if all(line.good for line in lines) else REFUSED


COMMAND = Command(
    "Predict whether a run fits a TPU topology, its memory and its step time, without needing the TPU.",
    "jrl plan configs/plan/8b.gin --topology v5p:4x4x4",
    add_arguments,
    plan,
)
