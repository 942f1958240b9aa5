"""A real run that is stopped and resumed: its times, its goodput and its trace."""

import contextlib
import json
import time

import pytest
from short_runs import run
from small_model import BIGRAM, PARTS

import jrl
from jrl import cli
from jrl.run.clock import RunClock
from jrl.run.profile import Profile, parse_steps, profile_folder
from jrl.run.report.goodput import goodput, read_goodput
from jrl.tools.doctor import ending
from jrl.tools.time_spent import time_lines

TINY = [BIGRAM, "Online.steps=4", "Online.prompts=4", "Online.samples=2", "Checkpoint.every=1", "Log.samples=0",
        "Scoring.workers=1"]  # fmt: skip


def raises(error):
    raise error


def test_a_stopped_and_resumed_run_accounts_for_all_of_its_time(tmp_path):
    folder = tmp_path / "run"
    run(TINY, folder, stop_after=2)
    run(TINY, folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    total = 0.0
    for row in rows:
        parts = {"sample", "score", "prepare", "update", "other", "start", "compile", "save", "wait", "evaluate"}
        spent = [row[name] for part in parts if (name := f"time/{part}_seconds") in row]
        assert min(spent) >= 0
        total += sum(spent)
        assert row["time/update_tokens_per_second"] > 0 and row["time/sample_tokens_per_second"] > 0
        assert not any("mfu" in name or "bandwidth" in name for name in row)  # nobody knows a CPU's peak
    assert total >= sum(row["time/step_seconds"] for row in rows)
    assert ["time/start_seconds" in row for row in rows] == [True, False, True, False]
    summary = json.loads((folder / "summary.json").read_text())
    found = summary["goodput"]
    assert found["starts"] == 2 and found["seconds"]["restart"] > 0 and found["seconds"]["save"] > 0
    assert sum(found["seconds"].values()) == pytest.approx(found["total"]) and found["seconds"]["trace"] == 0
    # The total of a checkpoint is read before it is saved: that of the summary lacks the first process's last save.
    saved = found["seconds"]["save"]
    assert found["total"] == pytest.approx(summary["seconds"]["total"], rel=0.05, abs=saved)
    assert found == goodput(read_goodput(folder))
    assert len(time_lines(rows, read_goodput(folder))) == 4


def test_the_error_that_stops_a_run_is_written_down(tmp_path, monkeypatch):
    run(TINY, tmp_path, stop_after=2)
    assert ending(tmp_path).good
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr("jrl.loop.take_step", lambda job, progress: raises(RuntimeError("no link\x1b[2J\nmore")))
        run(TINY, tmp_path)
    last = read_goodput(tmp_path)[-1]
    assert (last["step"], last["stopped"]) == (2, "RuntimeError: no link\\x1b[2J")
    line = ending(tmp_path)
    assert not line.good and line.text.startswith("not finished: an error stopped it after step 2. Once")
    assert line.text.endswith("--run continues it. The error: RuntimeError: no link\\x1b[2J")
    # In a user's part, before the run's files are open; other errors there change nothing.
    for place, said in ((None, "no link"), ("It was raised by your own part.py", "no shape")):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError):
            patch.setattr("jrl.loop.precompile", lambda job, done: raises(RuntimeError("no shape")))
            patch.setattr("jrl.run.records.part_location", lambda error, place=place: place)
            run(TINY, tmp_path)
        assert read_goodput(tmp_path)[-1]["step"] == 2 and said in ending(tmp_path).text
    run(TINY, tmp_path)
    assert ending(tmp_path).text.startswith("finished: 4 steps")


def test_a_step_does_not_contain_its_evaluation(tmp_path):
    held_out = ["Config.eval=@Eval()", "Eval.every=1", "Eval.prompts=4", "Data.held_out_every=2"]
    run([*TINY, "Online.steps=2", *held_out], tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = json.loads((tmp_path / "run" / "summary.json").read_text())["seconds"]
    assert seconds["eval"] > 0
    assert sum(row["time/step_seconds"] for row in rows) == pytest.approx(seconds["rl"])


def test_a_step_contains_the_wait_for_its_update_which_comes_after_the_next_was_dispatched(tmp_path, monkeypatch):
    def slow(clock, result, wait=RunClock.wait_for):
        time.sleep(0.2)
        return wait(clock, result)

    monkeypatch.setattr(RunClock, "wait_for", slow)
    stored = ["Config.stages=[@warm/Offline()]", "warm/Offline.source=@Demonstrations()", "warm/Offline.steps=3",
              "warm/Offline.objective=@SFT()", "warm/Offline.batch_size=4"]  # fmt: skip
    settings = [setting for setting in TINY if not setting.startswith("Online.")]
    run([*settings[1:], *stored, "Checkpoint.every=9"], tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = json.loads((tmp_path / "run" / "summary.json").read_text())["seconds"]
    assert all(row["time/step_seconds"] >= 0.2 for row in rows)
    assert sum(row["time/step_seconds"] for row in rows) == pytest.approx(seconds["sft"])


@pytest.mark.parametrize("text", ["6:3", "a:b", "3", "0:2", "3:6:9", ""])
def test_steps_to_profile_that_are_none_are_refused(text, capsys):
    assert cli.main(["train", "configs/tiny.gin", f"--profile={text}"]) == 2
    assert "write FIRST:LAST, such as 3:6" in capsys.readouterr().err


def test_steps_from_the_first_to_the_last_are_traced(tmp_path, monkeypatch):
    calls, notes = [], []
    monkeypatch.setattr("jax.profiler.start_trace", lambda folder: calls.append(f"start {folder}"))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls.append("stop"))

    def steps(first, last):
        calls.clear(), notes.clear()
        profile = Profile(parse_steps("3:4"), tmp_path / "profile", notes.append, contextlib.nullcontext)
        seen = []
        for step in range(first, last + 1):
            profile.before(step)
            seen.append(f"step {step} {len(calls)}")
            profile.after(step, None)
        profile.close(last)
        return seen

    assert steps(1, 6) == ["step 1 0", "step 2 0", "step 3 1", "step 4 1", "step 5 2", "step 6 2"]
    assert calls == [f"start {tmp_path / 'profile'}", "stop"] and "of steps 3 to 4 is in" in notes[0]
    steps(4, 6)  # a run that is resumed there
    assert len(calls) == 2 and "The trace of step 4 is in" in notes[0]
    steps(2, 3)  # a run that ends there
    assert len(calls) == 2 and "The trace of step 3 is in" in notes[0]
    steps(5, 6)
    assert not calls and "none of these steps was done" in notes[0] and "ended after step 6" in notes[0]


def test_each_of_several_processes_has_a_folder(tmp_path):
    assert profile_folder(tmp_path, 0, 1) == tmp_path / "profile"
    assert profile_folder(tmp_path, 1, 2) == tmp_path / "profile" / "process-1"


def test_the_time_of_a_trace_is_that_of_no_step(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.profiler.start_trace", lambda folder: None)
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: time.sleep(1.5))
    list(jrl.steps("configs/tiny.gin", TINY, parts=[PARTS], run=tmp_path, profile=parse_steps("2:2")))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("time/trace_seconds", 0.0) for row in rows) >= 1.5
    assert all(row.get("time/other_seconds", 0.0) < 1.5 for row in rows)
    assert goodput(read_goodput(tmp_path))["seconds"]["trace"] >= 1.5
