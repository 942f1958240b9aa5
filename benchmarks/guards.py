"""What a step costs that is guarded, against the same step without guards: how much do the checks of a run take?

    python -m benchmarks.guards --out FILE.json                       tiny and quickstart, 3 pairs of runs of each
    python -m benchmarks.guards --out FILE.json --config tiny --pairs 3
    python -m benchmarks.guards --out FILE.json --without range_of_rewards   this one off against all on

Two runs of the same configuration take a step in turn, in one process, so that whatever else the machine does meets
both. Of one the functions of GUARDS are exchanged: before its programs are traced, and for the time of each of its
steps. A figure is the median over all steps of all pairs, without each run's first six; `ratio` is guarded over
unguarded, with a bootstrapped interval (95 %). Seconds are measured by the clock, which other processes disturb, and
by the processors that the trainer has used.

Not exchanged, since they are no calls of the trainer: the confinement of workers (a filter of system calls, limits that
the kernel keeps) and checks at a start. A save is part of its step.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

KINDS, UNITS = ("guarded", "unguarded"), ("seconds", "processor_seconds")

# Configuration -> what is trained of it: of the quickstart mostly reinforcement learning.
BINDINGS = {"tiny": ["Online.steps=66"], "quickstart": ["warm/Offline.steps=3"]}
STEPS = 66
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


@contextlib.contextmanager
def without(names: Sequence[str]) -> Iterator[None]:
    """Within it these guards are exchanged in this process."""
    with contextlib.ExitStack() as stack:
        for name in names:
            guard = GUARDS[name]
            module = importlib.import_module(guard.module)
            # An AttributeError where the guard has moved.
            stack.enter_context(mock.patch.object(module, guard.name, guard.instead(module)))
        yield


def used() -> float:
    """Returns the seconds of processors that this process has taken."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run(config: str, off: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Trains twice in this process, with guards and without, a step of each in turn; returns the seconds of steps."""
    import jax

    import jrl

    spent = {kind: {unit: [] for unit in UNITS} for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        runs = {kind: jrl.steps(config, BINDINGS[config], run=Path(folder) / kind) for kind in KINDS}
        for step in range(STEPS):
            for kind in KINDS if step % 2 == 0 else reversed(KINDS):
                if step == 0:
                    jax.clear_caches()  # or a program would be traced as the other run's was
                with without(off if kind == "unguarded" else ()):
                    before = (time.perf_counter(), used())
                    next(runs[kind])
                    jax.block_until_ready(jax.live_arrays())  # what is under way belongs to this step, not to the next
                    for unit, at, since in zip(UNITS, (time.perf_counter(), used()), before):
                        spent[kind][unit].append(at - since)
        for kind in KINDS:
            runs[kind].close()
    return {kind: {unit: values[FIRST:] for unit, values in units.items()} for kind, units in spent.items()}


def measure(config: str, off: list[str]) -> dict[str, dict[str, list[float]]]:
    """Returns what `run` does, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.guards", "--child", config, *off]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def compared(pairs: Sequence[dict[str, dict[str, list[float]]]], unit: str) -> dict[str, Any]:
    """Returns the median step with and without guards, and the guarded over the other one with its interval."""
    values = np.array([[seconds for pair in pairs for seconds in pair[kind][unit]] for kind in KINDS])
    drawn = np.random.default_rng(0).integers(values.shape[1], size=(1000, values.shape[1]))
    guarded, unguarded = np.median(values, axis=1)
    several = np.median(values[:, drawn], axis=2)  # steps are drawn in pairs, which the machine has met together
    low, high = np.quantile(several[0] / several[1], [0.025, 0.975])
    ratio = {"ratio": guarded / unguarded, "interval": [float(low), float(high)]}
    return {"guarded": float(guarded), "unguarded": float(unguarded)} | ratio


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
    parser.add_argument("--pairs", type=int, default=3, help="processes, each of which trains two runs")
    parser.add_argument("--without", nargs="+", choices=[*GUARDS], default=[*GUARDS], metavar="GUARD",
                        help=f"guards that are switched off, of {', '.join(GUARDS)}")  # fmt: skip
    args = parser.parse_args(argv)
    results: dict[str, Any] = {}
    for config in args.config:
        pairs = []
        for pair in range(args.pairs):
            pairs.append(measure(config, [*args.without]))
            medians = (f"{statistics.median(pairs[-1][kind]['seconds']):.4f}" for kind in KINDS)
            print(f"{config}, pair {pair + 1} of {args.pairs}: {' and '.join(medians)} s a step with guards and "
                  "without", flush=True)  # fmt: skip
        figures = {unit: compared(pairs, unit) for unit in UNITS}
        for unit, found in figures.items():
            low, high = (100 * (end - 1) for end in found["interval"])
            print(f"{config}: {found['guarded']:.4f} with and {found['unguarded']:.4f} {unit} a step without: "
                  f"{100 * (found['ratio'] - 1):+.1f} % ({low:+.1f} to {high:+.1f})", flush=True)  # fmt: skip
        results[config] = figures | {"pairs": args.pairs, "without": args.without}
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
