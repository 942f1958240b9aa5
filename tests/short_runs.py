"""Short runs of a tiny policy, to the end or left on the way."""

import contextlib
import json

import numpy as np
import pytest
from small_model import BIGRAM, PARTS

import jrl
from jrl.run.report.rollouts import read_rollouts


def run(settings, folder, *bindings, stop_after=None, accept_change=False):
    """Trains configs/tiny.gin with settings that bindings may replace, or trains until a step is done and leaves as a
    notebook would; returns the steps seen."""
    seen = []
    named = {binding.partition("=")[0]: binding for binding in [*settings, *bindings]}
    parts = [PARTS] if BIGRAM in named.values() else []
    how = dict(parts=parts, run=folder, accept_change=accept_change)
    with contextlib.closing(jrl.steps("configs/tiny.gin", list(named.values()), **how)) as steps:
        for step in steps:
            seen.append(step)
            if step.step == stop_after:
                break
    return seen


def metrics(folder):
    """Returns the metrics of a run without what depends on the clock or the machine."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in row.items() if not name.startswith(("time/", "host/"))} for row in rows]


def assert_same(folder, other):
    """Holds two runs to the same tokens, and to metrics that differ by rounding."""
    ours, theirs = read_rollouts(folder / "rollouts"), read_rollouts(other / "rollouts")
    for name in ("tokens", "length", "reward", "uid"):
        np.testing.assert_array_equal(ours[name], theirs[name])
    assert ours["completion"] == theirs["completion"]
    assert len(metrics(folder)) == len(metrics(other))
    for a, b in zip(metrics(folder), metrics(other)):
        assert a.keys() == b.keys()
        numbers = [name for name in a if isinstance(a[name], float)]
        assert {name: a[name] for name in a.keys() - numbers} == {name: b[name] for name in a.keys() - numbers}
        for name in numbers:
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-6), (a["step"], name)
