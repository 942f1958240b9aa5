"""Runs of several processes on this machine: the same tokens and metrics as one process on the same mesh."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import short_runs
from short_runs import assert_same, metrics
from small_model import BIGRAM, part_in

from jrl.run.checkpoints.lock import hold_run
from jrl.run.checkpoints.run_state import restore_step
from jrl.run.checkpoints.unchanged import LEAST_BYTES
from jrl.run.launch import free_port
from jrl.run.run_hash import run_fingerprint

ONE_SMALL = [
    "Config.mesh=@MeshShape()",
    "MeshShape.data=4",
    "Decoder.layers=1",
    "Decoder.width=16",
    "Decoder.mlp_width=32",
    "Online.prompts=4",
    "Online.samples=4",
    "Online.steps=2",
    "Checkpoint.every=1",
    "Scoring.workers=1",
]


def command(folder, *bindings, processes=2, devices=2, settings=ONE_SMALL, config="configs/tiny.gin"):
    named = {binding.partition("=")[0]: binding for binding in [*settings, *bindings]}
    return [sys.executable, "-m", "jrl.cli", "train", config, *named.values(), "--run", str(folder),
            "--processes", str(processes), "--devices", str(devices)]  # fmt: skip


def train(folder, *bindings, code=0, **options):
    # Compiled as the suite's own runs are; a busy machine starts processes slowly.
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JRL_START_SECONDS": "200"}
    done = subprocess.run(
        command(folder, *bindings, **options), capture_output=True, text=True, timeout=900, env=environment
    )
    assert done.returncode == code, done.stderr
    return done


def test_two_processes_exchange_arrays_and_save_what_one_reads(tmp_path):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    program = [sys.executable, str(Path(__file__).with_name("two_processes.py")), str(free_port())]
    processes = [
        subprocess.Popen([*program, str(i), str(tmp_path)], stdout=subprocess.PIPE, env=environment) for i in (0, 1)
    ]
    found = [json.loads(process.communicate(timeout=600)[0].splitlines()[-1]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    for index, each in enumerate(found):
        assert "rate: 0 in process 0 (" in each["refused"] and "1 in process 1 (" in each["refused"]
        assert each["stops"] == [False, True] and each["steps"] == [1, 2]
        assert each["step"] == 2 and each["host"] == {"done": 2} and each["share"] == [[0, 1], [2, 3, 4]][index]
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    target = {"by_row": np.empty_like(rows), "across": np.empty_like(rows.T), "key": jax.random.key(0)}
    _, state, _ = restore_step(tmp_path, target)
    np.testing.assert_array_equal(state["by_row"], rows)
    np.testing.assert_array_equal(state["across"], rows.T)
    assert jax.random.key_data(state["key"]).tolist() == jax.random.key_data(jax.random.key(3)).tolist()
    with_large = {"large": np.empty(LEAST_BYTES // 4, np.float32), "by_row": np.empty_like(rows)}
    _, state, _ = restore_step(tmp_path / "linked", with_large, 3)
    assert state["large"].all() and np.array_equal(state["by_row"], rows)
    common = [path for path in (tmp_path / "linked/00000003/unchanged").rglob("*") if path.is_file()]
    assert common and all(path.stat().st_nlink == 2 for path in common)
    # Folders of their own: what the two hold together is the step.
    assert sorted(os.listdir(tmp_path / "own-1" / "00000001")) == ["shards-1.bin"]
    (tmp_path / "own-1" / "00000001" / "shards-1.bin").rename(tmp_path / "own-0" / "00000001" / "shards-1.bin")
    _, state, host = restore_step(tmp_path / "own-0", target)
    assert host == {"done": 0} and jax.random.key_data(state["key"])[1] == 3
    np.testing.assert_array_equal(state["by_row"], rows)
    np.testing.assert_array_equal(state["across"], rows.T)


def test_two_processes_train_as_one_does_on_the_same_mesh(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the other processes import small_model too
    part, settings = part_in(tmp_path), [*ONE_SMALL[:2], *ONE_SMALL[5:], BIGRAM, "MeshShape.data=2"]
    train(tmp_path / "two", part, settings=settings, devices=1)
    short_runs.run(settings, tmp_path / "one")
    assert_same(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_two_processes_with_two_devices_each_train_as_one_does(tmp_path):
    train(tmp_path / "two", "Online.steps=3")
    short_runs.run(ONE_SMALL, tmp_path / "one", "Online.steps=3")
    assert_same(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [["MeshShape.data=4"], ["MeshShape.data=2", "MeshShape.fsdp=2"]], ids=" ".join)
def test_two_processes_train_the_quickstart_as_one_does(tmp_path, mesh):
    bindings = ["Config.mesh=@MeshShape()", *mesh, "warm/Offline.steps=2", "Online.steps=2", "Config.eval=None"]
    shared = {"config": "configs/quickstart.gin", "settings": bindings}
    train(tmp_path / "two", **shared)
    train(tmp_path / "one", processes=1, devices=4, **shared)
    assert_same(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(1, 2), (2, 1), (2, 4)])
def test_another_number_of_processes_goes_on_with_a_run(tmp_path, counts):
    first, second = counts
    train(tmp_path / "run", "Checkpoint.every=2", "Online.steps=3", processes=first, devices=4 // first)
    train(tmp_path / "run", "Online.steps=5", processes=second, devices=4 // second)
    train(tmp_path / "whole", "Online.steps=5", processes=1, devices=4)
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_four_processes_with_fsdp_and_tensor_across_them_train_as_one_does(tmp_path):
    mesh = ["MeshShape.data=1", "MeshShape.fsdp=2", "MeshShape.tensor=2"]
    train(tmp_path / "four", *mesh, processes=4, devices=1)
    train(tmp_path / "one", *mesh, processes=1, devices=4)
    assert_same(tmp_path / "four", tmp_path / "one")


@pytest.mark.slow
def test_a_second_launch_on_a_run_is_refused_by_every_process(tmp_path):
    """Process 0 finds the lock. The others end with its message, and not with an abort of JAX's client."""
    lock = hold_run(tmp_path / "run")
    done = train(tmp_path / "run", code=2)
    lock.release()
    assert done.stderr.count("stop it, wait for it, or choose another --run folder") == 2, done.stderr
    assert "jrl, process 0: " in done.stderr and "jrl, process 1: process 0 (" in done.stderr
    assert "Check failure" not in done.stderr and "is gone" not in done.stderr, done.stderr
    assert os.listdir(tmp_path / "run") == ["lock"]


APART = ["MeshShape.data=2", "Config.sampler_mesh=@sample/MeshShape()", "sample/MeshShape.data=2", "Online.lag=1"]


@pytest.mark.slow
def test_two_processes_sample_on_devices_of_their_own_as_one_does(tmp_path):
    """Each has a device of both meshes. Drawn in turn by the same processes, the same bits; by one process the same
    tokens, and sums that round otherwise."""
    train(tmp_path / "apart", *APART, "Online.steps=2")
    train(tmp_path / "apart", *APART, "Online.steps=4")  # the draw under way was saved
    train(tmp_path / "in_turn", "MeshShape.data=2", "Online.lag=1", "Online.steps=4", devices=1)
    assert metrics(tmp_path / "apart") == metrics(tmp_path / "in_turn")
    short_runs.run(ONE_SMALL, tmp_path / "one", *APART, "Online.steps=4")
    assert_same(tmp_path / "apart", tmp_path / "one")


@pytest.mark.slow
def test_other_cuts_of_the_weights_sample_the_same_tokens(tmp_path):
    """The learner cuts weights over both processes, and each samples with all of them."""
    cut = ["MeshShape.data=1", "MeshShape.fsdp=2", *APART[1:], "sample/MeshShape.fsdp=1"]
    train(tmp_path / "two", *cut)
    short_runs.run(ONE_SMALL, tmp_path / "one", *cut)
    assert_same(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_processes_stand_in_for_slices(tmp_path):
    mesh = ["MeshShape.data=2", "MeshShape.fsdp=2"]
    train(tmp_path / "slices", *mesh, "MeshShape.slices=2")
    train(tmp_path / "mesh", *mesh)
    assert metrics(tmp_path / "slices") == metrics(tmp_path / "mesh")


SLICES = ["MeshShape.data=2", "MeshShape.slices=2", *APART[1:], "sample/MeshShape.data=1", "sample/MeshShape.slices=1"]


@pytest.mark.slow
def test_processes_that_only_sample_draw_what_one_process_does(tmp_path):
    """Two of three learn, each for a slice, and the third samples. A draw under way is saved; by one process, and in
    turn, the run goes on from that."""
    train(tmp_path / "three", *SLICES, "Online.steps=2", processes=3, devices=1)
    shutil.copytree(tmp_path / "three", tmp_path / "alone")
    train(tmp_path / "three", *SLICES, "Online.steps=4", processes=3, devices=1)
    again = train(tmp_path / "again", *SLICES, "Online.steps=4", processes=3, devices=1)
    assert metrics(tmp_path / "three") == metrics(tmp_path / "again")
    assert "sampling on devices of its own" in again.stdout + again.stderr
    short_runs.run(ONE_SMALL, tmp_path / "one", *SLICES, "Online.steps=4")
    assert_same(tmp_path / "three", tmp_path / "one")
    short_runs.run(ONE_SMALL, tmp_path / "alone", *SLICES, "Online.steps=4")
    assert_same(tmp_path / "alone", tmp_path / "one")


# Of two processes with two devices each, as four slices, one learns and one samples.
ONE_SAMPLES = ["MeshShape.data=2", "MeshShape.slices=2", *APART[1:], "sample/MeshShape.slices=2"]


@pytest.mark.slow
def test_a_run_goes_on_where_processes_only_sample_and_back(tmp_path):
    """A checkpoint of one process, then one of shards, then one of two processes that both learn."""
    in_turn = ["MeshShape.data=2", "Online.lag=1"]
    short_runs.run(ONE_SMALL, tmp_path / "run", *in_turn, "Online.steps=2")
    train(tmp_path / "run", *ONE_SAMPLES, "Online.steps=3")
    train(tmp_path / "run", *in_turn, "Online.steps=4", devices=1)
    train(tmp_path / "run", *ONE_SAMPLES, "Online.steps=5")
    short_runs.run(ONE_SMALL, tmp_path / "one", *in_turn, "Online.steps=5")
    assert_same(tmp_path / "run", tmp_path / "one")


EVAL = ["Config.eval=@Eval()", "Eval.prompts=6", "Eval.batch=4", "Eval.every=2", "Data.held_out_every=4"]


@pytest.mark.slow
def test_evaluations_while_a_process_only_samples_are_those_of_one_process(tmp_path):
    """The learner's process samples them, and each scores its share."""
    train(tmp_path / "two", *ONE_SAMPLES, *EVAL, "Online.steps=3")
    train(tmp_path / "two", *ONE_SAMPLES, *EVAL, "Online.steps=4")
    train(tmp_path / "one", *ONE_SAMPLES, *EVAL, "Online.steps=4", processes=1, devices=4)
    assert_same(tmp_path / "two", tmp_path / "one")
    assert ["eval/mean" in row for row in metrics(tmp_path / "two")] == [False, True, False, True]
    reports = [json.loads((tmp_path / name / "summary.json").read_text())["eval"] for name in ("two", "one")]
    for report in reports:
        del report["after_rl"]["weights_fingerprint"]  # sums may round otherwise
    assert reports[0] == reports[1]


@pytest.mark.slow
def test_more_lag_with_two_processes_that_only_sample(tmp_path):
    """Three draws are under way over both of them: what is fetched of one must not wait for another, nor change it."""
    lag = ["Online.lag=3", "GRPO.importance=@TruncatedImportance()"]
    more = [*SLICES[:3], *lag, "sample/MeshShape.data=2", "sample/MeshShape.slices=2"]
    train(tmp_path / "four", *more, "Online.steps=3", processes=4, devices=1)
    train(tmp_path / "four", *more, "Online.steps=6", processes=4, devices=1)
    train(tmp_path / "again", *more, "Online.steps=6", processes=4, devices=1)
    assert metrics(tmp_path / "four") == metrics(tmp_path / "again")
    short_runs.run(ONE_SMALL, tmp_path / "one", *more, "Online.steps=6")
    assert_same(tmp_path / "four", tmp_path / "one")


@pytest.mark.slow
def test_a_second_start_finds_no_programs_that_the_other_process_lacks(tmp_path, monkeypatch):
    """Of a reward model's updates a loaded and a compiled program did not meet in their collectives."""
    for name in [name for name in os.environ if name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT", "XLA_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    judge = [
        "Config.mesh=@MeshShape()",
        "MeshShape.data=-1",
        "Config.stages=[@judge/Offline()]",
        "judge/Offline.steps=3",
    ]
    for run in ("first", "second"):  # compiled as shipped
        asked = command(tmp_path / run, settings=judge, config="configs/rlhf-tiny.gin", devices=1)
        done = subprocess.run(asked, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
    assert run_fingerprint(tmp_path / "first") == run_fingerprint(tmp_path / "second")
