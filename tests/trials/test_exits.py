"""Runs that are started again when they have ended, or asked to stop anywhere: with which code they exit, and what they
leave. In one process, with signals of its own; tests/trials/test_kill.py kills processes.

pytest -m slow tests/trials/test_exits.py
"""

import errno
import json
import os
import random
import shutil
import signal

import pytest
from small_model import BIGRAM, part_in

from jrl import cli, loop
from jrl.commands import start
from jrl.device import program_cache
from jrl.rollout import evaluate, scoring
from jrl.run import records
from jrl.run.checkpoints import run_state
from jrl.run.run_hash import run_fingerprint

pytestmark = pytest.mark.slow

SMALL = [
    BIGRAM, "Online.prompts=2", "Online.samples=2", "Sampler.completion_length=4", "Log.samples=0",
    "Scoring.workers=1",
]  # fmt: skip
WARM = ["Config.stages=[@warm/Offline(), @Online()]", "warm/Offline.source=@Demonstrations()",
        "warm/Offline.objective=@SFT()", "warm/Offline.batch_size=2"]  # fmt: skip
EVAL = ["Config.eval=@Eval()", "Eval.prompts=4", "Eval.batch=4", "Data.held_out_every=5"]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Returns what runs `jrl train` with a small model and returns its exit code."""
    part = part_in(tmp_path_factory.mktemp("part"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "prepare_jax", lambda args, platform=None: None)
        yield lambda folder, *bindings: cli.main(
            ["train", "configs/tiny.gin", part, *SMALL, *bindings, "--run", str(folder)]
        )


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def table(folder):
    return [{name: x for name, x in row.items() if not name.startswith(("time/", "host/"))} for row in rows(folder)]


def at_call(monkeypatch, owner, name, times, act, *, after=False):
    """Has `act` called at a call of a function, before it or after."""
    usual, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(name)
        if len(calls) == times and not after:
            act()
        result = usual(*args, **kwargs)
        if len(calls) == times and after:
            act()
        return result

    monkeypatch.setattr(owner, name, call)


def fail():
    raise OSError(errno.EIO, "the disk is gone")


def test_every_end_has_its_exit_code_whatever_the_steps_epochs_and_saves(tmp_path, train, capsys, trials):
    """A run to its end, or to a stop or an error on the way and then to its end; and again, with as many steps, fewer
    or more, or without its checkpoints."""
    draw = random.Random(0)
    for trial in range(trials(200)):
        folder, steps, every = tmp_path / f"run{trial}", draw.randrange(1, 5), draw.randrange(1, 6)
        warm = draw.choice([0, 0, 1, 2])
        data = [f"Addition.size={draw.choice([1, 2, 3, 100])}", "Data.held_out_every=None"]  # of two visited a step
        bindings = [*data, f"Checkpoint.every={every}", *([*WARM, f"warm/Offline.steps={warm}"] if warm else [])]
        life = lambda asked, at=folder, same=tuple(bindings): train(at, *same, f"Online.steps={asked}")
        total, ends = warm + steps, draw.choice(["whole", "stop", "error"])
        if ends != "whole":
            act = fail if ends == "error" else lambda: signal.raise_signal(signal.SIGTERM)
            with pytest.MonkeyPatch.context() as patch:
                last = draw.randrange(1, total + 1)
                at_call(patch, loop, "take_step", last, act, after=ends == "stop")
                code = life(steps)
            done = len(rows(folder)) if (folder / "metrics.jsonl").exists() else 0
            if ends == "stop":
                # A stop in the last step ends a run that has done all.
                assert (code, done) == ((75 if last < total else 0), last), trial
            else:
                assert code == 4 and done <= last - 1, trial
        finished = ends == "stop" and last == total
        assert life(steps) == (5 if finished else 0), trial
        assert [row["step"] for row in rows(folder)] == list(range(1, total + 1))
        capsys.readouterr()
        again = draw.choice(["as many", "fewer", "more", "removed"])
        before = (folder / "metrics.jsonl").read_bytes()
        if again == "removed":
            shutil.rmtree(folder / "checkpoints")
            assert life(steps) == 6, trial
            assert "holds no checkpoint: they were removed" in capsys.readouterr().err
        elif again == "more":
            assert life(steps + 2) == 0
            assert [row["step"] for row in rows(folder)] == list(range(1, total + 3))
            continue
        else:
            asked = steps if again == "as many" else draw.randrange(1, steps + 1)
            assert life(asked) == 5, trial
            assert f"already has all {total} steps" in capsys.readouterr().out or asked < steps
        assert (folder / "metrics.jsonl").read_bytes() == before
        shutil.rmtree(folder)


# What a run does, and how often in the run below.
PLACES = [
    (loop, "take_step", 8), (records, "save", 4), (records, "emit", 8), (run_state, "verify_step", 4),
    (scoring.Scorer, "collect", 14), (loop, "draw", 3), (evaluate, "place_prompts", 3), (loop, "begin_stage", 8),
    (program_cache.Program, "__call__", 40), (program_cache.Program, "_executable", 40), (loop, "evaluate_once", 3),
    (records, "open_files", 1), (loop, "precompile", 1), (records, "restore", 1),
]  # fmt: skip


def test_a_run_that_is_asked_to_stop_anywhere_exits_with_its_code_and_ends_with_the_same_bits(tmp_path, train, trials):
    draw = random.Random(0)
    settings = [*WARM, *EVAL, "warm/Offline.steps=3", "Online.steps=5", "Checkpoint.every=2", "Online.lag=1"]
    assert train(tmp_path / "whole", *settings) == 0
    expected, hashes = table(tmp_path / "whole"), run_fingerprint(tmp_path / "whole")
    codes = []
    for trial in range(trials(60)):
        folder = tmp_path / f"run{trial}"
        for _ in range(draw.randrange(1, 3)):
            owner, name, most = draw.choice(PLACES)
            stop = lambda: os.kill(os.getpid(), signal.SIGTERM)
            with pytest.MonkeyPatch.context() as patch:
                at_call(patch, owner, name, draw.randrange(1, most + 1), stop, after=draw.random() < 0.5)
                codes.append(train(folder, *settings))
            done = len(rows(folder)) if (folder / "metrics.jsonl").exists() else 0
            ended = (folder / "summary.json").exists()
            assert codes[-1] in ((0, 5) if ended else (75,)), (trial, name, codes[-1])
            assert ended <= (done == 8) and table(folder)[:done] == expected[:done] if done else not ended, (
                trial,
                name,
            )
        code = train(folder, *settings)
        assert code == (5 if (ended and codes[-1] in (0, 5)) else 0), (trial, name, code)
        assert table(folder) == expected and run_fingerprint(folder) == hashes, (trial, name)
        shutil.rmtree(folder)
    assert codes.count(75) > len(codes) / 2
