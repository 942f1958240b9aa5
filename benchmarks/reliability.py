"""What jrl promises to runs that last for weeks, goal by goal, and what each goal's trials find.

    python -m benchmarks.reliability --out F.json                  every goal, with the small number of trials
    python -m benchmarks.reliability --out F.json --trials full    with the large one: a night on 2 cores
    python -m benchmarks.reliability --out F.json --goal K1 N5     of these goals

A trial is a test of the suite, or one of the cases that a test counts (`trials` in tests/conftest.py). The goals are
the release-blocking ones (P0) that one host can show; for the others the reason is given. One that is in F.json already
is replaced, the others stay. The command fails where a trial does. docs/generate.py makes docs/reliability.md from
docs/reliability.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
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
    for place, name in enumerate(args.goal):
        goal = GOALS[name]
        if not goal.tests:
            results["goals"].pop(name, None)
            continue
        start = time.monotonic()
        result = outcome(goal, list(run(goal.nodes(args.trials), args.trials)))
        result |= {
            "size": args.trials,
            "seconds": round(time.monotonic() - start, 1),
            "date": str(datetime.date.today()),
        }
        results["goals"][name] = result
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        failed += [f"{name}: {one}" for one in result["failed"]]
        print(f"[{place + 1}/{len(args.goal)}] {line_of(name, goal, result)}", flush=True)
    print(*failed, sep="\n")
    return 1 if failed else 0


def hardware() -> str:
    return f"{os.cpu_count()} processors ({platform.machine()}), {jax.devices()[0].platform}"


def line_of(name: str, goal: Goal, result: dict[str, Any]) -> str:
    skipped = f", {len(result['skipped'])} tests skipped" if result["skipped"] else ""
    verdict = f"{len(result['failed'])} FAILED" if result["failed"] else "none failed"
    return f"{name}: {result['trials']} trials, {verdict}{skipped}, {result['seconds']} s: {goal.promise}"


def run(nodes: list[str], size: str) -> Iterator[dict[str, Any]]:
    """Runs tests in a process of their own; yields a record of each. A process that dies is a failed trial."""
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
    records = [json.loads(row) for row in rows]
    yield from records
    if done.returncode not in (0, 1) or not records:  # 1: tests failed, and are among the records
        last = (done.stdout + done.stderr).strip().splitlines()[-3:]
        yield {"test": "pytest", "outcome": "failed", "trials": 0, "seeds": [], "message": " ".join(last)}


def outcome(goal: Goal, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what the records of a goal's tests come to: trials, seeds, what failed and what was skipped."""
    passed = [record for record in records if record["outcome"] == "passed"]
    told = lambda kind: [f"{r['test']}: {r['message']}" for r in records if r["outcome"] == kind]
    result = {
        "promise": goal.promise,
        "trials": sum(record["trials"] for record in passed),
        "tests": len(passed),
        "seeds": sorted({seed for record in passed for seed in record["seeds"]}),
        "failed": told("failed"),
        "skipped": told("skipped"),
    }
    if not passed and not result["failed"]:
        result["failed"] = ["no trial took place"]
    return result


def pytest_runtest_logreport(report: Any) -> None:
    """Writes a line for each test: its outcome, the trials and seeds that it counted, and what went wrong."""
    if (path := os.environ.get(REPORT)) is None or (report.when != "call" and report.outcome == "passed"):
        return
    message = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    lines = [line for line in message.splitlines() if line.strip()]
    record = {
        "test": report.nodeid,
        "outcome": report.outcome,
        "trials": sum(value for name, value in report.user_properties if name == "trials") or 1,
        "seeds": [value for name, value in report.user_properties if name == "seed"],
        "message": " ".join(lines[-3:])[:500],
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    sys.exit(main())
