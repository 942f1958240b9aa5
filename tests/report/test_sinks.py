from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from jrl.run.report import WRITERS
from jrl.run.report.manifest import write_manifest
from jrl.run.report.metrics import open_metrics
from jrl.run.report.sinks import SINKS, check_writers, open_sinks
from jrl.run.report.tensorboard import numbers


def events(folder):
    """Yields what event files hold: length-framed protocol buffers."""
    from tensorboardX.proto import event_pb2

    for path in sorted(folder.glob("events.*")):
        data, place = path.read_bytes(), 0
        while place < len(data):
            length = int.from_bytes(data[place : place + 8], "little")
            yield event_pb2.Event.FromString(data[place + 12 : place + 12 + length])
            place += 16 + length


def scalars(folder):
    """Returns (tag, step, value) of all points."""
    return [(v.tag, event.step, round(v.simple_value, 6)) for event in events(folder) for v in event.summary.value]


def test_tensorboard_holds_the_numbers_of_every_row(tmp_path):
    pytest.importorskip("tensorboardX")
    metrics = open_metrics(tmp_path / "metrics.jsonl", sinks=open_sinks(("tensorboard",), tmp_path))
    metrics.append({"step": 1, "phase": "rl", "reward/mean": np.float32(0.5), "loss": float("nan")})
    metrics.append({"step": 2, "phase": "rl", "reward/mean": 0.75, "host/peak_bytes": None})
    metrics.close()
    assert scalars(tmp_path / "tensorboard") == [("reward/mean", 1, 0.5), ("reward/mean", 2, 0.75)]


@pytest.mark.parametrize("step", [0, 3])  # 0: a run that was killed before its first checkpoint starts over
def test_tensorboard_purges_the_points_after_the_step_that_a_run_goes_on_from(tmp_path, step):
    pytest.importorskip("tensorboardX")
    (sink,) = open_sinks(("tensorboard",), tmp_path, step=step)
    sink.write({"step": step + 1, "loss": 1.0})
    sink.close()
    purges = [event.step for event in events(tmp_path / "tensorboard") if event.HasField("session_log")]
    assert purges == [step + 1]  # TensorBoard drops points of this step and later ones


@pytest.mark.parametrize("writer", ["wandb", "trackio"])
def test_a_writer_that_is_not_installed_names_its_extra(writer):
    if importlib.util.find_spec(writer) is not None:
        pytest.skip(f"{writer} is installed")
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'jrl-jax\[{writer}\]'"):
        check_writers((writer,))


def test_a_writer_that_is_missing_is_named_before_a_run_opens(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ModuleNotFoundError, match=r"names 'tensorboard', which needs: pip install 'jrl-jax\[log\]'"):
        check_writers(("tensorboard",))
    check_writers(())


def test_text_and_missing_values_are_no_points():
    assert numbers({"step": 1, "phase": "rl", "a": 1, "b": None, "c": float("inf"), "d": 0.5}) == {"a": 1.0, "d": 0.5}


@pytest.mark.parametrize("error", [ConnectionError("down"), SystemExit(1), RuntimeError("no account")])
def test_a_service_that_is_down_stops_no_run_that_goes_on(tmp_path, monkeypatch, caplog, error):
    """Else a run that was preempted at night would not resume."""

    def init(**options):
        raise error

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    write_manifest(tmp_path / "manifest.json", {"format": 1, "identity": {}, "environment": {}})
    with pytest.raises(type(error)):  # where the run begins, somebody is there
        open_sinks(("wandb",), tmp_path)
    metrics = open_metrics(tmp_path / "metrics.jsonl", sinks=open_sinks(("wandb",), tmp_path, step=5))
    for step in range(6, 16):
        metrics.append({"step": step})
    metrics.close()
    assert caplog.text.count(f"metrics writer wandb failed ({type(error).__name__}: {error}") == 1


def test_every_writer_that_a_configuration_may_name_can_be_opened():
    assert set(SINKS) == set(WRITERS)
