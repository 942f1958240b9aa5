"""Whole runs whose tracker fails: no step is lost, and the metrics are those of a run without one.

pytest -m slow tests/trials/test_trackers.py
"""

import asyncio
import json
import random
import sys
from types import SimpleNamespace

import pytest
from short_runs import metrics, run
from small_model import BIGRAM

pytestmark = pytest.mark.slow

SMALL = [
    BIGRAM, "Online.prompts=2", "Online.samples=2", "Sampler.completion_length=4", "Online.steps=8",
    "Checkpoint.every=3", "Log.samples=0", "Scoring.workers=1",
]  # fmt: skip
ERRORS = (ConnectionError("down"), TimeoutError("no answer"), SystemExit(1), asyncio.CancelledError(), KeyError("run"))


def tracker(draw, taken):
    """Returns a module like wandb. Each of its calls fails now and then, always, or from some row on; the first `init`
    does not: a new run is refused by a tracker that does not open."""
    chance, opened = {call: draw.choice([0, 0.3, 1]) for call in ("init", "log", "finish")}, []
    dies = draw.choice([99, draw.randrange(8)])

    def fails(call, step=0):
        if step > dies or draw.random() < chance[call]:
            raise draw.choice(ERRORS)

    def log(numbers, step):
        fails("log", step)
        taken.append(step)

    def init(**options):
        opened.append(options["name"])
        if len(opened) > 1:
            fails("init")
        return SimpleNamespace(log=log, finish=lambda: fails("finish"))

    return SimpleNamespace(init=init)


def test_a_tracker_that_fails_costs_no_step_of_a_run(tmp_path, monkeypatch, trials):
    run(SMALL, tmp_path / "plain")
    draw = random.Random(0)
    for trial in range(trials(2, 30)):
        folder, taken = tmp_path / f"run{trial}", []
        monkeypatch.setitem(sys.modules, "wandb", tracker(draw, taken))
        run(SMALL, folder, "Log.writers=['wandb']", stop_after=draw.randrange(1, 8))
        run(SMALL, folder, "Log.writers=['wandb']")
        assert metrics(folder) == metrics(tmp_path / "plain"), trial
        assert json.loads((folder / "summary.json").read_text())["steps"] == 8
        assert set(taken) <= {*range(1, 9)}
