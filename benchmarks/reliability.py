"""What jrl promises to runs that last for weeks, goal by goal, and what each goal's trials find.

    python -m benchmarks.reliability --out F.json                  every goal, with the small number of trials
    python -m benchmarks.reliability --out F.json --trials full    with the large one: a night on 2 cores
    python -m benchmarks.reliability --out F.json --goal K1 N5     of these goals

A trial is a test of the suite, or one of the cases that a test counts (`trials` in tests/conftest.py). The goals are
the release-blocking ones (P0) that one host can show; for the others the reason is given. The tests of the goals of one
letter run in one process. A goal that is in F.json already is replaced, the others stay. The command fails where a
trial does. docs/generate.py makes docs/reliability.md from docs/reliability.json.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import itertools
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks.reliability_goals import GOALS, Goal

ROOT = Path(__file__).parents[1]
REPORT = "JRL_RELIABILITY_REPORT"  # names the file that this module writes to as a plugin of pytest
SIZES = ("smoke", "full")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="JSON file with every result; one that is there is added to")
    parser.add_argument("--goal", nargs="+", choices=tuple(GOALS), default=tuple(GOALS), metavar="ID")
    parser.add_argument("--trials", choices=SIZES, default="smoke")
    args = parser.parse_args()
    out = Path(args.out)
    results = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"goals": {}}
    results |= {"hardware": hardware(), "versions": f"jax {jax.__version__}, Python {platform.python_version()}"}
    failed = []
    for area, names in itertools.groupby(sorted(args.goal, key=list(GOALS).index), key=lambda name: name[0]):
        goals = {name: GOALS[name] for name in names if GOALS[name].tests}
        if not goals:
            continue
        nodes = dict.fromkeys(node for goal in goals.values() for node in goal.nodes(args.trials))
        start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        records = list(run(list(nodes), args.trials))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        for name, goal in goals.items():
            result = outcome(goal, args.trials, records) | {"date": str(datetime.date.today())}
            results["goals"][name] = result
            failed += [f"{name}: {one}" for one in result["failed"]]
            print(line_of(name, goal, result), flush=True)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"{area}: {time.monotonic() - start:.0f} s, {used:.0f} s of processors", flush=True)
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(*failed, sep="\n")
    return 1 if failed else 0


def hardware() -> str:
    return f"{os.cpu_count()} processors ({platform.machine()}), {jax.devices()[0].platform}"


def line_of(name: str, goal: Goal, result: dict[str, Any]) -> str:
    skipped = f", {len(result['skipped'])} tests skipped" if result["skipped"] else ""
    verdict = f"{len(result['failed'])} FAILED" if result["failed"] else "none failed"
    return f"{name}: {result['trials']} trials, {verdict}{skipped}, {result['seconds']} s: {goal.promise}"


def run(nodes: list[str], size: str) -> Iterator[dict[str, Any]]:
    """Runs tests in a process of their own; yields a record of each. Of one that ends early it prints the last words,
    and every node has failed: which of its tests did not take place is unknown."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.jsonl")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "benchmarks.reliability", "--trials", size]
        done = subprocess.run(
            [*command, *nodes],
            cwd=ROOT,
            env={**os.environ, REPORT: str(report)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        rows = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    yield from map(json.loads, rows)
    if done.returncode not in (0, 1):  # 1: tests failed, and are among the records
        ended = {"outcome": "failed", "trials": 0, "seeds": [], "seconds": 0.0,
                 "message": f"pytest ended early, with {done.returncode}"}  # fmt: skip
        yield from ({"test": node, **ended} for node in nodes)
        print(*(done.stdout + done.stderr).strip().splitlines()[-10:], sep="\n", flush=True)


def outcome(goal: Goal, size: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what the records of a goal's tests come to: trials, seeds, what failed and what was skipped.

    A test of the goal that has no record did not take place, and that is a failure.
    """
    own, missing = [], []
    for node in goal.nodes(size):
        of_node = [
            record
            for record in records
            if record["test"] == node or record["test"].startswith((f"{node}[", f"{node}::"))
        ]
        missing += [] if of_node else [f"{node}: no trial took place"]
        own += of_node
    passed = [record for record in own if record["outcome"] == "passed"]
    told = lambda kind: [f"{record['test']}: {record['message']}" for record in own if record["outcome"] == kind]
    if not passed and not missing:
        missing = ["every test was skipped"]
    return {
        "promise": goal.promise,
        "size": size,
        "trials": sum(record["trials"] for record in passed),
        "tests": len(passed),
        "seeds": sorted({seed for record in passed for seed in record["seeds"]}),
        "seconds": round(sum(record["seconds"] for record in own), 1),
        "failed": told("failed") + missing,
        "skipped": told("skipped"),
    }


_seconds: dict[str, float] = collections.defaultdict(float)


def pytest_runtest_logreport(report: Any) -> None:
    """Writes a line for each test: its outcome, the trials and seeds that it counted, and what went wrong."""
    _seconds[report.nodeid] += report.duration
    if (path := os.environ.get(REPORT)) is None or (report.when != "call" and report.outcome == "passed"):
        return
    message = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    lines = [line for line in message.splitlines() if line.strip()]
    record = {
        "test": report.nodeid,
        "outcome": report.outcome,
        "trials": sum(value for name, value in report.user_properties if name == "trials") or 1,
        "seeds": [value for name, value in report.user_properties if name == "seed"],
        "seconds": _seconds[report.nodeid],
        "message": " ".join(lines[-3:])[:500],
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    sys.exit(main())
