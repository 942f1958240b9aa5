"""What a step costs that is guarded, against the same step without guards: how much do the checks of a run take?

    python -m benchmarks.guards --out FILE.json                       tiny and quickstart, 5 pairs of runs of each
    python -m benchmarks.guards --out FILE.json --config tiny --pairs 3
    python -m benchmarks.guards --out FILE.json --without range_of_rewards   this one off against all on

A run with guards and one without them take turns, each a process of its own that trains the configuration's first
steps. Without: the functions of GUARDS are exchanged before anything is compiled. A figure is the median over a run's
steps, without the first six, and then the median over runs; `ratio` is guarded over unguarded. Seconds are measured
by the clock, which other processes disturb, and by the processors that the trainer has used.

Not exchanged, since they are no calls of the trainer: the confinement of workers (a filter of system calls, limits that
the kernel keeps) and checks at a start. A save is part of its step.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# Configuration -> what is trained of it: of the quickstart mostly reinforcement learning.
BINDINGS = {"tiny": [], "quickstart": ["warm/Offline.steps=3"]}
STEPS = 33
FIRST = 6  # steps that are not counted: programs are first called, workers start


class Guard(NamedTuple):
    """A function that checks, and what stands in its place where nothing is checked."""

    what: str
    module: str
    name: str
    instead: Callable[[Any], Any]  # given the module


def _finite(module: Any) -> Any:
    import jax.numpy as jnp

    return types.SimpleNamespace(**{**vars(jnp), "isfinite": lambda x: jnp.full(jnp.shape(x), True)})


def _no_fingerprint(module: Any) -> Any:
    import jax.numpy as jnp

    return lambda tree: jnp.zeros((), jnp.uint32)


class _NoHash:
    """Stands in for hashlib."""

    def sha256(self, data: bytes = b"") -> _NoHash:
        return self

    def update(self, data: Any) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 64


as_it_is = lambda module: lambda value, *rest: value
GUARDS = {
    "weights_of_a_draw": Guard("a hash of the weights at every draw", "jrl.rollout.sampler", "fingerprint",
                               _no_fingerprint),
    "finite_updates": Guard("updates that are not finite change nothing", "jrl.learning.learner", "jnp", _finite),
    "verdicts": Guard("the limits of a verdict, applied again to what a worker says", "jrl.tasks.verifiers.pool",
                      "to_verdict", as_it_is),
    "range_of_rewards": Guard("rewards within float32", "jrl.rollout.sources", "check_range", as_it_is),
    "range_of_spans": Guard("rewards of spans within float32", "jrl.rollout.collect", "check_range", as_it_is),
    "hash_of_metrics": Guard("a hash of all metrics, with every save", "jrl.run.report.metrics", "hashlib",
                             lambda module: _NoHash()),
    "hashes_of_a_save": Guard("hashes of a save's files and leaves, read back", "jrl.run.checkpoints.digest", "hashlib",
                              lambda module: _NoHash()),
}  # fmt: skip


def switch_off(names: list[str]) -> None:
    """Exchanges these guards in this process."""
    import importlib

    for name in names:
        guard = GUARDS[name]
        module = importlib.import_module(guard.module)
        getattr(module, guard.name)  # an AttributeError where the guard has moved
        setattr(module, guard.name, guard.instead(module))


def used() -> float:
    """Returns the seconds of processors that this process has taken."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run(config: str, off: list[str]) -> dict[str, Any]:
    """Trains in this process, and returns the seconds of each step."""
    import jrl

    switch_off(off)
    seconds, processors = [], []
    with tempfile.TemporaryDirectory() as folder:
        before = (time.perf_counter(), used())
        for step in jrl.steps(config, BINDINGS[config], run=Path(folder) / "run"):
            now = (time.perf_counter(), used())
            seconds.append(now[0] - before[0])
            processors.append(now[1] - before[1])
            before = now
            if step.step == STEPS:
                break
    return {"seconds": seconds[FIRST:], "processor_seconds": processors[FIRST:]}


def measure(config: str, off: list[str]) -> dict[str, Any]:
    """Returns what `run` does, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.guards", "--child", config, *off]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def compared(runs: list[dict[str, Any]], unit: str) -> dict[str, float]:
    """Returns the median step with and without guards, and the guarded over the other one."""
    medians = {
        on: statistics.median(statistics.median(each[unit]) for each in runs if each["guarded"] == on)
        for on in (True, False)
    }
    return {"guarded": medians[True], "unguarded": medians[False], "ratio": medians[True] / medians[False]}


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--child"]:
        print(json.dumps(run(argv[1], argv[2:])))
        return 0
    parser = argparse.ArgumentParser(prog="guards.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--out", required=True, type=Path, help="JSON file")
    parser.add_argument("--config", nargs="+", choices=[*BINDINGS], default=[*BINDINGS])
    parser.add_argument("--pairs", type=int, default=5, help="runs with, and as many without")
    parser.add_argument("--without", nargs="+", choices=[*GUARDS], default=[*GUARDS], metavar="GUARD",
                        help=f"guards that are switched off, of {', '.join(GUARDS)}")  # fmt: skip
    args = parser.parse_args(argv)
    results: dict[str, Any] = {}
    for config in args.config:
        runs = []
        for pair in range(args.pairs):
            for guarded in (True, False) if pair % 2 == 0 else (False, True):
                runs.append({"guarded": guarded} | measure(config, [] if guarded else [*args.without]))
                print(f"{config}, pair {pair + 1} of {args.pairs}, {'with' if guarded else 'without'} guards: "
                      f"{statistics.median(runs[-1]['seconds']):.4f} s a step", flush=True)  # fmt: skip
        figures = {unit: compared(runs, unit) for unit in ("seconds", "processor_seconds")}
        for unit, found in figures.items():
            print(f"{config}: {found['guarded']:.4f} with and {found['unguarded']:.4f} {unit} a step without: "
                  f"{100 * (found['ratio'] - 1):+.1f} %", flush=True)  # fmt: skip
        results[config] = figures | {"pairs": args.pairs, "without": args.without}
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
