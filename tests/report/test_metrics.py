from __future__ import annotations

import asyncio
import functools
import json
import math
import random

import jax.numpy as jnp
import numpy as np
import pytest

from jrl.run.report import Log
from jrl.run.report.metrics import FAILURES_IN_A_ROW, Sink, open_metrics, read_metrics, row_line


def test_a_row_is_one_json_object_with_step_first_and_keys_sorted():
    line = row_line({"reward": 0.5, "time/step": 1.25, "b": 2, "step": 7, "a": True, "why": "stop", "none": None})
    assert line == b'{"step": 7, "a": true, "b": 2, "none": null, "reward": 0.5, "time/step": 1.25, "why": "stop"}\n'


def test_numbers_read_back_exactly():
    values = {
        "f32": np.float32(0.1),
        "f64": 0.1,
        "jax": jnp.float32(1 / 3),
        "big": 2**60,
        "i": jnp.int32(-4),
        "flag": np.bool_(False),
    }
    row = json.loads(row_line({"step": 1, **values}))
    assert np.float32(row["f32"]) == np.float32(0.1) and row["f64"] == 0.1
    assert np.float32(row["jax"]) == np.float32(1 / 3)
    assert (row["big"], row["i"], row["flag"]) == (2**60, -4, False) and type(row["i"]) is int


def test_values_that_json_cannot_hold_are_strings_that_float_reads():
    row = json.loads(row_line({"step": 1, "a": math.nan, "b": np.float32(np.inf), "c": -math.inf}))
    assert row == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert math.isnan(float(row["a"])) and float(row["b"]) == math.inf and float(row["c"]) == -math.inf


def test_what_is_no_metric_is_refused_by_name():
    with pytest.raises(TypeError, match=r"metric 'loss' is a ndarray of shape \(2,\)"):
        row_line({"step": 1, "loss": np.zeros(2)})
    with pytest.raises(ValueError, match="integer 'step'"):
        row_line({"loss": 1.0})


def test_committed_rows_are_on_the_disk(tmp_path, synced):
    metrics = open_metrics(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        metrics.append({"step": step})
        assert not synced(tmp_path / "metrics.jsonl")
        metrics.commit()
        assert synced(tmp_path / "metrics.jsonl")
    metrics.close()


def test_a_resumed_table_drops_rows_after_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = open_metrics(path)
    metrics.append({"step": 1, "reward": 0.1})
    committed = metrics.commit()
    metrics.append({"step": 2, "reward": 0.2})
    metrics.close()
    with open(path, "ab") as handle:
        handle.write(b'{"step": 3, "rew')
    metrics = open_metrics(path, committed)
    assert metrics.commit() == committed
    metrics.append({"step": 2, "reward": 0.25})
    assert metrics.commit() == path.stat().st_size
    metrics.close()
    assert list(read_metrics(path)) == [{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.25}]


def test_a_table_that_is_not_the_saved_one_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n')
    with pytest.raises(ValueError, match="committed 40"):
        open_metrics(path, 40)
    with pytest.raises(ValueError, match="no row that ends at byte 5"):
        open_metrics(path, 5)
    assert path.read_bytes() == b'{"step": 1}\n'


def test_a_table_with_other_rows_than_were_saved_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = open_metrics(path)
    for step in (1, 2):
        metrics.append({"step": step, "reward": 0.25})
    saved, digest = metrics.commit(), metrics.sha256()
    metrics.append({"step": 3, "reward": 0.5})
    metrics.close()
    sound = path.read_bytes()
    damaged = sound.replace(b"0.25", b"0.75", 1)
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=f"other rows before byte {saved} than were saved"):
        open_metrics(path, saved, sha256=digest)
    assert path.read_bytes() == damaged
    path.write_bytes(sound)
    resumed = open_metrics(path, saved, sha256=digest)
    resumed.append({"step": 3, "reward": 0.5})
    assert path.read_bytes() == sound
    resumed.commit()
    again = resumed.sha256()
    resumed.close()
    open_metrics(path, len(sound), sha256=again).close()  # the hash goes on where the rows do


def test_reading_stops_at_the_step_and_skips_a_torn_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    assert [row["step"] for row in read_metrics(path, 2)] == [1, 2]
    for damaged in (b"broken", b"5", b"null", b"{}", b'{"step": "2"}'):
        path.write_bytes(b'{"step": 1}\n' + damaged + b"\n")
        with pytest.raises(ValueError, match="line 2, is not a metrics row"):
            list(read_metrics(path))
    assert list(read_metrics(tmp_path / "none.jsonl")) == []


def test_a_failing_sink_is_named_once_and_left_alone(tmp_path, caplog):
    calls = []

    def broken(row):
        calls.append(row)
        raise ConnectionError("service is down")

    good = []
    sinks = [Sink("bad", broken, lambda: None), Sink("good", good.append, lambda: None)]
    metrics = open_metrics(tmp_path / "metrics.jsonl", sinks=sinks)
    for step in range(10):
        metrics.append({"step": step})
    metrics.close()
    assert len(calls) == FAILURES_IN_A_ROW and len(good) == 10
    assert len(list(read_metrics(tmp_path / "metrics.jsonl"))) == 10
    assert caplog.text.count("metrics writer bad failed (ConnectionError: service is down)") == 1


ERRORS = (
    ConnectionError("down"), TimeoutError(), OSError(28, "no space"), KeyError("step"), RuntimeError("\x1b[2J"),
    MemoryError(), SystemExit(1), SystemExit(0), asyncio.CancelledError(), AssertionError(), StopIteration(),
)  # fmt: skip


def test_no_order_of_failures_costs_a_row_of_the_table(tmp_path, trials):
    """Up to four writers fail at random rows, from a row on, or when they are closed; the run is left and resumed."""
    draw = random.Random(0)
    for trial in range(trials(20, 300)):
        path, steps = tmp_path / f"{trial}.jsonl", draw.randrange(1, 40)
        chance = [draw.choice([0, 0.1, 0.5, 0.9, 1]) for _ in range(draw.randrange(1, 5))]
        dies = [draw.choice([None, draw.randrange(steps)]) for _ in chance]
        taken = [[] for _ in chance]

        def fails(number, step=None, chance=chance, dies=dies):
            dead = step is not None and dies[number] is not None and step >= dies[number]
            if dead or draw.random() < chance[number]:
                raise draw.choice(ERRORS)

        def write(row, number, taken=taken, fails=fails):
            fails(number, row["step"])
            taken[number].append(dict(row))

        sinks = [
            Sink(f"w{n}", functools.partial(write, number=n), functools.partial(fails, n)) for n in range(len(chance))
        ]
        rows, done, offset = [], 0, 0
        while done < steps:
            metrics = open_metrics(path, offset, sinks=sinks)
            for step in range(done, draw.randrange(done, steps) + 1):
                rows.append({"step": step, "reward/mean": draw.random()})
                metrics.append(rows[-1])
            done, offset = len(rows), metrics.commit()
            metrics.close()
        assert list(read_metrics(path)) == rows
        for number in range(len(chance)):
            assert all(row in rows for row in taken[number])
            if chance[number] == 0 and dies[number] is None:
                assert taken[number] == rows


def test_an_interrupt_during_a_write_is_the_runs(tmp_path):
    def interrupted(row):
        raise KeyboardInterrupt

    metrics = open_metrics(tmp_path / "metrics.jsonl", sinks=[Sink("slow", interrupted, lambda: None)])
    with pytest.raises(KeyboardInterrupt):
        metrics.append({"step": 1})


def test_log_settings_are_checked():
    assert Log().writers == ()
    with pytest.raises(ValueError, match="'tensorbord'; there are tensorboard, wandb, trackio"):
        Log(writers=("tensorbord",))
    with pytest.raises(ValueError, match="twice"):
        Log(writers=("wandb", "wandb"))
    with pytest.raises(ValueError, match="samples is -1"):
        Log(samples=-1)
