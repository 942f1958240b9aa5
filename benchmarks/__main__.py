"""jrl and its peers side by side: the same model, prompts and lengths, one run of each in turn, in one go.

    python -m benchmarks --out FILE.json                     everything; builds the peers' environments when first run
    python -m benchmarks --out FILE.json --only jrl          jrl alone
    python -m benchmarks --out FILE.json --what sampler      one of the parts: sampler, update, step, start, sweeps
    python -m benchmarks --out FILE.json --only jrl --against DIR   this checkout beside another one, "before"

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
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import limits as hardware
from benchmarks import plots, quiet, table
from benchmarks.environments import PEERS, Missing, cache_folder, python_of
from benchmarks.limits import Limits
from benchmarks.shapes import LEARNING, SAMPLING, SHAPES, SWEEPS, UPDATE, Learning, ModelShape
from benchmarks.system import BEFORE, ROOT, System, ask, close, open_system

Rows = Iterator[tuple[str, dict]]  # name of a row, and what was found
WHATS = ("sampler", "update", "step", "start", "sweeps")


class Bench(NamedTuple):
    """What a run of the command measures with."""

    shape: ModelShape
    limits: Limits
    pythons: dict[str, str]  # system -> its interpreter
    missing: dict[str, str]  # peer -> why it is not there
    folder: Path  # the model, and room for what is written
    repeats: int
    in_use: bool  # disturbed runs count
    bindings: list[str]  # of jrl's configuration
    rows: Sequence[str]  # only rows whose name holds one of these
    before: Path = ROOT  # the checkout of the system BEFORE

    def measures(self, row: str) -> bool:
        return any(text in row for text in self.rows)

    def open(self, name: str, environment: dict[str, str] | None = None) -> System:
        root = self.before if name == BEFORE else ROOT
        return open_system(name, self.pythons[name], self.folder, environment, root)

    def settings(self, name: str) -> dict[str, list[str]]:
        """What a system is told besides the case."""
        return {"bindings": self.bindings} if name in ("jrl", BEFORE) else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="JSON file with every figure; one that is there is added to")
    parser.add_argument("--only", choices=("jrl", "peers", *PEERS), nargs="+", default=("jrl", "peers"))
    parser.add_argument("--what", choices=WHATS, nargs="+", default=WHATS)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="cpu", help="of the model")
    parser.add_argument("--rows", nargs="+", default=[""], metavar="TEXT", help="only rows whose name holds it")
    parser.add_argument("--repeats", type=int, default=quiet.REPEATS, help="undisturbed runs of each row")
    parser.add_argument("--bind", action="append", default=[], metavar="NAME=VALUE", help="of jrl's configuration")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout of jrl, in turn with this one")
    parser.add_argument("--cache", help="folder of the peers' environments")
    parser.add_argument("--in-use", action="store_true", help="keep disturbed runs: to try it out, not for a claim")
    args = parser.parse_args()
    if args.against and not (args.against / "benchmarks" / "jrl_side.py").is_file():
        parser.error(f"--against {args.against}: no checkout of jrl, it has no benchmarks/jrl_side.py")
    shape, out = SHAPES[args.shape], Path(args.out)
    results = json.loads(out.read_text()) if out.exists() else {"rows": {}}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        first = open_system("jrl", sys.executable, folder)
        ask(first, "publish", folder=str(folder / "model"), shape=dataclasses.asdict(shape))
        limits = Limits(**ask(first, "measure_limits", dtype=shape.dtype))
        close(first)
        print(table.limits_line(limits), flush=True)
        pythons, missing = interpreters(args.only, cache_folder(args.cache))
        if args.against:
            pythons[BEFORE] = sys.executable
        bench = Bench(
            shape=shape,
            limits=limits,
            pythons=pythons,
            missing=missing,
            folder=folder,
            repeats=args.repeats,
            in_use=args.in_use,
            bindings=args.bind,
            rows=args.rows,
            before=(args.against or ROOT).resolve(),
        )
        measured = False
        for what in args.what:
            for name, row in MEASURES[what](bench):
                measured = True
                results["rows"][name] = {**row, "limits": dataclasses.asdict(limits), "in_use": args.in_use,
                                         "shape": args.shape}  # fmt: skip
                out.write_text(json.dumps(results, indent=2) + "\n")
        if not measured:
            texts = " or ".join(map(repr, args.rows))
            parser.error(f"nothing was measured: no row of {', '.join(args.what)} has {texts} in its name")
        if "sweeps" in args.what:
            plots.draw(results["rows"], out.with_suffix(""))


def interpreters(only: Sequence[str], cache: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Returns (system -> its interpreter, peer -> why it has none)."""
    pythons = {"jrl": sys.executable} if "jrl" in only else {}
    missing = {}
    for name in PEERS:
        if not {"peers", name} & set(only):
            continue
        try:
            pythons[name] = python_of(name, cache)
        except Missing as why:
            missing[name] = str(why)
            print(missing[name], flush=True)
    return pythons, missing


def open_all(bench: Bench) -> dict[str, System]:
    return {name: bench.open(name) for name in bench.pythons}


def prepare(bench: Bench, systems: dict[str, System], do: str, **arguments: Any) -> dict[str, str]:
    """Asks every system for something once. Returns system -> why it could not, and forgets those."""
    failed = {}
    for name in list(systems):
        try:
            ask(systems[name], do, folder=str(bench.folder / "model"), **arguments, **bench.settings(name))
        except RuntimeError as why:
            failed[name] = str(why)
            print(why, file=sys.stderr, flush=True)
            systems.pop(name).process.kill()
    return failed


def side_by_side(bench: Bench, systems: dict[str, System], do: str, **arguments: Any) -> dict[str, dict]:
    """Returns system -> its runs of one row, made in turn. Every run has a seed of its own, the same in each system."""
    answers: dict[str, list[dict]] = {name: [] for name in systems}

    def call(name: str) -> float:
        answers[name].append(ask(systems[name], do, seed=len(answers[name]) + 1, **arguments))
        return answers[name][-1]["seconds"]

    calls = [functools.partial(call, name) for name in systems]
    runs = quiet.in_turn(calls, repeats=bench.repeats, keep_disturbed=bench.in_use)
    return {name: {**answers[name][-1], **run._asdict()} for name, run in zip(systems, runs)}


def absent(reasons: dict[str, str]) -> dict[str, dict]:
    return {name: {"missing": why.strip().splitlines()[-1]} for name, why in reasons.items()}


def agreeing(systems: dict[str, dict], updates: dict[str, dict]) -> dict[str, dict]:
    """Returns the systems of a row, each with whether it did the same work as jrl; jrl itself, and one that was not
    asked, without."""
    has_update = lambda name: name != "jrl" and "jrl" in updates and name in updates
    return {name: {**row, "agrees": table.agrees(updates["jrl"], updates[name])} if has_update(name) else row
            for name, row in systems.items()}  # fmt: skip


def sampler(bench: Bench) -> Rows:
    """Measures every sampling case in every system."""
    systems, failed = open_all(bench), {}
    print(table.SAMPLING_HEAD, flush=True)
    for case in SAMPLING:
        if not bench.measures(case.name):
            continue
        failed |= prepare(bench, systems, "open_sampling", case=case)  # a system that failed is not asked again
        row = {"roofline_seconds": hardware.sampling_seconds(bench.shape, case, bench.limits)}
        row["systems"] = side_by_side(bench, systems, "sample", case=case) | absent(bench.missing | failed)
        print(table.sampling_lines(case.name, row), flush=True)
        yield case.name, row
    for system in systems.values():
        close(system)


def update(bench: Bench) -> Rows:
    """Measures one update in every system, in processes that do nothing else, and the most memory of each."""
    if not bench.measures("update"):
        return
    case, systems = UPDATE, open_all(bench)
    failed = prepare(bench, systems, "open_learning", scratch=str(bench.folder), case=case)
    updates = {name: ask(system, "update", case=case, seed=0) for name, system in systems.items()}
    print(table.equal_work(updates), flush=True)
    row = {
        "roofline_seconds": hardware.update_seconds(bench.shape, case, bench.limits, case.sequences),
        "equal_work": updates,
    }
    runs = side_by_side(bench, systems, "update", case=case)
    for name, system in systems.items():
        runs[name]["peak_bytes"] = ask(system, "peak_bytes")
        close(system)
    row["systems"] = agreeing(runs, updates) | absent(bench.missing | failed)
    print(table.LEARNING_HEAD, table.learning_lines("update", row), sep="\n", flush=True)
    yield "update", row


def step(bench: Bench) -> Rows:
    """Measures whole steps of GRPO in every system."""
    print(table.LEARNING_HEAD, flush=True)
    for case in LEARNING:
        if not bench.measures(f"step, {case.name}"):
            continue
        systems = open_all(bench)
        failed = prepare(bench, systems, "open_learning", scratch=str(bench.folder), case=case)
        updates = {name: ask(system, "update", case=case, seed=0) for name, system in systems.items()}
        print(table.equal_work(updates), flush=True)
        for system in systems.values():
            ask(system, "step", case=case, seed=0)
        row = {"roofline_seconds": hardware.step_seconds(bench.shape, case, bench.limits), "equal_work": updates}
        runs = side_by_side(bench, systems, "step", case=case)
        if "jrl" in systems:
            runs["jrl"]["parts"] = ask(systems["jrl"], "parts", case=case)
        for name, system in systems.items():
            runs[name]["peak_bytes"] = ask(system, "peak_bytes")
            close(system)
        row["systems"] = agreeing(runs, updates) | absent(bench.missing | failed)
        print(table.learning_lines(f"step, {case.name}", row), flush=True)
        if "jrl" in systems:
            print(table.parts_line(runs["jrl"]["parts"]), flush=True)
        yield f"step, {case.name}", row


def start(bench: Bench) -> Rows:
    """Measures from the start of a process to the end of its first step: nothing compiled before, and then from the
    compilation cache that jrl and Tunix fill on the way. TRL compiles nothing."""
    case, caches = LEARNING[0], {name: bench.folder / f"compiled-{name}" for name in bench.pythons}

    def first_step(name: str, cached: bool) -> float:
        environment = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        if cached:
            environment = {
                "JAX_COMPILATION_CACHE_DIR": str(caches[name]),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
        begun = time.monotonic()
        system = bench.open(name, environment)
        model, scratch = str(bench.folder / "model"), str(bench.folder)
        ask(system, "open_learning", folder=model, scratch=scratch, case=case, **bench.settings(name))
        ask(system, "step", case=case, seed=0)
        seconds = time.monotonic() - begun
        close(system)  # with the workers that it started, which else would disturb the next run
        return seconds

    print(table.START_HEAD, flush=True)
    for cached, title in ((False, "start, cold"), (True, "start, from the cache")):
        if not bench.measures(title):
            continue
        names = [name for name in bench.pythons if not cached or name != "trl"]
        if cached:
            for name in names:
                first_step(name, cached)
        calls = [functools.partial(first_step, name, cached) for name in names]
        runs = quiet.in_turn(calls, repeats=bench.repeats, keep_disturbed=bench.in_use)
        row = {"systems": {name: run._asdict() for name, run in zip(names, runs)} | absent(bench.missing)}
        print(table.start_lines(title, row), flush=True)
        yield title, row


def sweeps(bench: Bench) -> Rows:
    """Measures jrl's step against sequences, length, vocabulary and layers, one at a time."""
    for title, points in SWEEPS.items():
        if not bench.measures(f"sweep, {title}"):
            continue
        rows = []
        for value, change in points:
            shape = dataclasses.replace(bench.shape, **change.shape)
            case = Learning("sweep")._replace(**change.case)
            folder = bench.folder / "model"
            if change.shape:
                folder = bench.folder / f"{title}-{value}"
            system = open_system("jrl", sys.executable, bench.folder)
            if change.shape:
                ask(system, "publish", folder=str(folder), shape=dataclasses.asdict(shape))
            ask(system, "open_learning", folder=str(folder), scratch=str(bench.folder), case=case,
                bindings=bench.bindings)  # fmt: skip
            ask(system, "step", case=case, seed=0)
            row = side_by_side(bench, {"jrl": system}, "step", case=case)["jrl"]
            peak = ask(system, "peak_bytes")
            close(system)
            least = hardware.step_seconds(shape, case, bench.limits)
            rows.append({"value": value, **row, "peak_bytes": peak, "roofline_seconds": least})
            print(table.sweep_line(title, rows[-1]), flush=True)
        yield f"sweep, {title}", {"points": rows}


MEASURES = {"sampler": sampler, "update": update, "step": step, "start": start, "sweeps": sweeps}

if __name__ == "__main__":
    main()
