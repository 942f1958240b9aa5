from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from processes_in_threads import together

from jrl import paths
from jrl.device.processes import HostLost, Processes
from jrl.run.checkpoints import digest, run_state, shards

MANY = 8 if jax.device_count() >= 8 else 1


def mesh_of(devices: int) -> Mesh:
    return jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices], axis_types=(AxisType.Explicit,))


def small_state(devices: int = 1, seed: int = 0):
    """Every kind of leaf a run holds, on a mesh of `devices`."""
    rng = np.random.default_rng(seed)
    mesh = mesh_of(devices)
    rows, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    return {
        "params": {"layers": [jax.device_put(rng.normal(size=(8, 6)).astype(np.float32), rows) for _ in range(2)]},
        "half": jax.device_put(jnp.arange(4, dtype=jnp.bfloat16) / 3, everywhere),
        "mask": jax.device_put(np.array([True, False, True]), everywhere),
        "finish": jax.device_put(np.array([-3, 4], np.int8), everywhere),
        "uid": jax.device_put(np.array([2**32 - 1, 7], np.uint32), everywhere),
        "step": jax.device_put(np.int32(seed), everywhere),
        "baseline": jax.device_put(np.float32(np.nan), everywhere),
        "key": jax.device_put(jax.random.key(seed), everywhere),
        "keys": jax.device_put(jax.random.split(jax.random.key(seed + 1, impl="rbg"), 8), rows),
        "wide": rng.normal(size=5),
        "empty": jax.device_put(np.zeros((0, 3), np.float32), everywhere),
        "nothing": None,
        "pair": (jax.device_put(np.float32(1), everywhere), None),
    }


def abstract(state):
    def leaf(value):
        return (
            jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
            if isinstance(value, jax.Array)
            else value
        )

    return jax.tree.map(leaf, state)


def digests(state):
    return {name: digest.leaf_digest(leaf) for name, leaf in digest.named_leaves(state).items()}


def test_a_folder_named_with_dots_saves_and_restores(tmp_path):
    (tmp_path / "in").mkdir()
    state = small_state()
    saves = run_state.open_run_state(tmp_path / "in" / ".." / "saves", keep=2)
    saves.save(1, state, {})
    for root in (tmp_path / "in" / ".." / "saves", tmp_path / "saves"):
        assert digests(run_state.restore_step(root, abstract(state))[1]) == digests(state)


@pytest.mark.parametrize("name", ["a b#c?d%20e*", "\u03bb|'\"", "[", "]", "a[]b", "trail ", "$HOME;&~"])
def test_a_folder_of_any_other_name_saves_and_restores(tmp_path, name):
    state = small_state()
    saves = run_state.open_run_state(tmp_path / name / "checkpoints", keep=1)
    for step in (1, 2):
        saves.save(step, state, {})
    assert digests(saves.restore(abstract(state))[1]) == digests(state)


@pytest.mark.parametrize("name", ["[1]", "run[ab]", "[!a]", "a\\b"])
def test_a_folder_that_orbax_cannot_write_below_is_refused_before_there_is_anything_to_save(tmp_path, name):
    with pytest.raises(ValueError, match="choose a folder without brackets and backslashes"):
        run_state.open_run_state(tmp_path / name / "checkpoints", keep=1)
    assert not list(tmp_path.iterdir())
    with pytest.raises(run_state.SaveFailed):  # else the refusal is not needed any more
        run_state.save_step(tmp_path / name, 1, {"w": jnp.ones(2)}, {})


def test_a_restored_state_is_the_saved_one_bit_for_bit(tmp_path):
    state, host = small_state(MANY), {"data": {"position": 12, "epochs": [1, 2]}, "metrics": 2**40, "name": "λ"}
    saves = run_state.open_run_state(tmp_path, keep=2)
    saves.save(5, state, host)
    step, restored, restored_host = saves.restore(abstract(state))
    assert (step, restored_host) == (5, host)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert digests(restored) == digests(state)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(restored)):
        assert type(before) is type(after) and before.dtype == after.dtype
        if isinstance(before, jax.Array):
            assert after.sharding == before.sharding
    assert saves.steps()[-1] == step


@pytest.mark.parametrize(("saved_on", "restored_on"), [(8, 1), (1, 8), (8, 4), (2, 8)])
def test_a_state_moves_between_device_counts(tmp_path, saved_on, restored_on):
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    state = small_state(saved_on)
    run_state.save_step(tmp_path, 1, state, {})
    _, restored, _ = run_state.restore_step(tmp_path, abstract(small_state(restored_on, seed=3)))
    assert digests(restored) == digests(state)
    assert len(restored["params"]["layers"][0].devices()) == restored_on


def test_float64_leaves_keep_their_width(tmp_path):
    with jax.enable_x64(True):
        state = {"w": jnp.asarray(np.array([1 / 3, 1e-300]))}
        assert state["w"].dtype == np.float64
        run_state.save_step(tmp_path, 1, state, {})
        _, restored, _ = run_state.restore_step(tmp_path, abstract(state))
        assert restored["w"].dtype == np.float64 and digests(restored) == digests(state)


def test_a_leaf_without_a_sharding_lands_on_the_first_device(tmp_path):
    run_state.save_step(tmp_path, 1, {"w": jnp.ones((2, 2))}, {})
    _, restored, _ = run_state.restore_step(tmp_path, {"w": jax.ShapeDtypeStruct((2, 2), jnp.float32)})
    assert restored["w"].sharding == SingleDeviceSharding(jax.devices()[0])


def test_a_relative_folder_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saves = run_state.open_run_state("run/checkpoints", keep=1)
    for step in (1, 2):
        saves.save(step, {"w": jnp.full((2,), step)}, {})
    assert saves.restore({"w": jax.ShapeDtypeStruct((2,), jnp.int32)})[1]["w"].tolist() == [2, 2]
    assert sorted(os.listdir("run/checkpoints")) == ["00000001", "00000002"]  # no step has learned from the second yet


def test_the_newest_saves_are_kept_and_older_ones_removed(tmp_path):
    saves = run_state.open_run_state(tmp_path, keep=2)
    for step in (5, 10, 15):
        saves.save(step, {"w": jnp.full((2,), step)}, {"at": step})
    assert saves.steps() == [10, 15]
    step, restored, host = saves.restore({"w": jax.ShapeDtypeStruct((2,), jnp.int32)}, step=10)
    assert (step, host) == (10, {"at": 10}) and restored["w"].tolist() == [10, 10]
    with pytest.raises(run_state.NoIntactStep, match=r"no checkpoint of step 5 .* \[10, 15\]"):
        saves.restore({"w": jax.ShapeDtypeStruct((2,), jnp.int32)}, step=5)


def test_retention_never_removes_the_only_step_that_can_be_restored(trials):
    for trial in range(trials(2_000, 10_000)):
        rng = random.Random(trial)
        keep, intact, damaged, now = rng.randint(1, 4), set(), set(), 0
        for _ in range(30):
            if rng.random() < 0.3 and intact:  # the disk damages one, and the run resumes from what is left
                victim = rng.choice(sorted(intact))
                intact.remove(victim)
                damaged.add(victim)
                now = max(intact, default=0)
            now += rng.randint(1, 5)
            damaged.discard(now)
            intact.add(now)
            removed = set(run_state.superseded(sorted(intact | damaged), now, keep))
            intact, damaged = intact - removed, damaged - removed
            assert max(intact) == now and now not in removed
            assert len(intact | damaged) <= keep and max(intact | damaged) == now


def test_nothing_is_pruned_when_the_new_step_fails(tmp_path, monkeypatch):
    saves = run_state.open_run_state(tmp_path, keep=1)
    saves.save(1, {"w": jnp.ones(2)}, {})

    def differ(*_):
        raise ValueError("leaf w reads back with other values")

    monkeypatch.setattr(run_state, "_read_back", differ)
    with pytest.raises(run_state.SaveFailed, match=r"step 2 could not be saved.*reads back.*Last checkpoint: step 1"):
        saves.save(2, {"w": jnp.ones(2)}, {})
    assert saves.steps() == [1] and os.listdir(tmp_path) == ["00000001"]


def test_a_step_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch, synced):
    rename, renamed = paths.rename, []

    def watched(source, target):
        places = [Path(place) / name for place, _, files in os.walk(source) for name in (".", *files)]
        renamed.append([str(place) for place in places if not synced(place)])
        rename(source, target)

    monkeypatch.setattr(paths, "rename", watched)
    run_state.save_step(tmp_path, 5, {"w": jnp.ones(2)}, {})
    assert renamed == [[]]


def test_a_manifest_that_reads_back_as_another_is_no_step(tmp_path, monkeypatch):
    write = paths.write_bytes_atomic

    def other(path, data):
        is_manifest = Path(path).name == "manifest.json"
        write(path, run_state._seal({"format": 1, "step": 5, "files": {}, "leaves": {}}) if is_manifest else data)

    monkeypatch.setattr(paths, "write_bytes_atomic", other)
    with pytest.raises(run_state.SaveFailed, match=r"manifest\.json reads back with other contents"):
        run_state.save_step(tmp_path, 5, {"w": jnp.ones(2)}, {})
    assert run_state.list_steps(tmp_path) == []


def test_a_leaf_that_is_read_with_other_values_is_damage(tmp_path, monkeypatch):
    """The files are what was saved: a fault of what reads them."""
    run_state.save_step(tmp_path, 5, {"w": jnp.ones(2)}, {})
    load = run_state.ocp.load
    monkeypatch.setattr(run_state.ocp, "load", lambda *args: jax.tree.map(lambda leaf: leaf + 1, load(*args)))
    with pytest.raises(run_state.DamagedStep, match="leaf w was read with other values than were saved"):
        run_state.restore_step(tmp_path, {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}, step=5)


def test_a_step_can_be_saved_again(tmp_path):
    saves = run_state.open_run_state(tmp_path, keep=2)
    saves.save(5, {"w": jnp.zeros(2)}, {})
    saves.save(5, {"w": jnp.ones(2)}, {})
    assert saves.restore({"w": jax.ShapeDtypeStruct((2,), jnp.float32)})[1]["w"].tolist() == [1, 1]
    assert os.listdir(tmp_path) == ["00000005"]


def test_a_step_whose_second_save_fails_is_as_it_was(tmp_path, monkeypatch):
    saves = run_state.open_run_state(tmp_path, keep=2)
    saves.save(5, {"w": jnp.zeros(2)}, {})
    rename, failures = run_state.paths.rename, iter([OSError(errno.ENOSPC, "full")])

    def fails_once(source, target):
        if Path(target).name == "00000005" and (error := next(failures, None)):
            raise error
        rename(source, target)

    monkeypatch.setattr(run_state.paths, "rename", fails_once)
    with pytest.raises(run_state.SaveFailed, match="step 5"):
        saves.save(5, {"w": jnp.ones(2)}, {})
    assert os.listdir(tmp_path) == ["00000005"]
    assert saves.restore({"w": jax.ShapeDtypeStruct((2,), jnp.float32)})[1]["w"].tolist() == [0, 0]


def test_condemned_steps_are_set_aside_and_removed_by_the_next_save(tmp_path):
    saves = run_state.open_run_state(tmp_path, keep=3)
    for step in (2, 4, 6):
        saves.save(step, {"w": jnp.zeros(2)}, {})
    assert saves.condemn(4) == [4, 6]
    assert (saves.steps(), saves.condemned()) == ([2], [4, 6])
    saves.save(3, {"w": jnp.ones(2)}, {})
    assert (saves.steps(), saves.condemned(), sorted(os.listdir(tmp_path))) == ([2, 3], [], ["00000002", "00000003"])


def test_going_back_leaves_no_later_step_for_a_resume_to_find(tmp_path):
    saves = run_state.open_run_state(tmp_path, keep=3)
    for step in (5, 10, 15):
        saves.save(step, {"w": jnp.zeros(2)}, {})
    saves.restore({"w": jax.ShapeDtypeStruct((2,), jnp.float32)}, step=5)
    saves.save(7, {"w": jnp.ones(2)}, {})
    assert saves.steps() == [5, 7]


OPERATIONS = ("write_bytes_atomic", "sync_tree", "make_dir", "remove_tree", "rename", "sync_dir")


class Died(BaseException):
    """Stands for the death of the process: nothing that catches errors sees it."""


def deadly_call(real, left, *, after: bool):
    def call(*args):
        last = next(left) == 0
        if last and real.__name__ == "remove_tree":  # on its way
            for file in [*Path(args[0]).rglob("*.json")][:1]:
                file.unlink()
            raise Died
        if last and not after:
            raise Died
        result = real(*args)
        if last:
            raise Died
        return result

    return call


@pytest.mark.parametrize("saved_before", [[0, 1], [1, 2]])
def test_death_at_any_file_operation_leaves_the_old_or_the_new_step(tmp_path, monkeypatch, saved_before, trials):
    """`saved_before` with the step itself: a save that replaces one of its own number. The other prunes step 0."""
    calls = OPERATIONS
    real = {name: getattr(run_state.paths, name) for name in calls}
    target = {"w": jax.ShapeDtypeStruct((2,), jnp.int32)}
    for deadly in itertools.count():
        root = tmp_path / str(deadly)
        saves = run_state.open_run_state(root, keep=2 if 2 in saved_before else 1)
        for step in saved_before:
            saves.save(step, {"w": jnp.full((2,), step)}, {"new": False})

        left = itertools.count(-deadly)  # the call that takes 0 from it is the last
        for name in calls:
            monkeypatch.setattr(run_state.paths, name, deadly_call(real[name], left, after=deadly % 2 == 1))
        died = False
        try:
            saves.save(2, {"w": jnp.full((2,), 20)}, {"new": True})
        except Died:
            died = True
        for name in calls:
            monkeypatch.setattr(run_state.paths, name, real[name])
        reopened = run_state.open_run_state(root, keep=2)
        step, state, host = reopened.restore(target)
        assert state["w"].tolist() == [20 if host["new"] else step] * 2
        assert step == 2 if host["new"] else step == max(saved_before)
        assert reopened.steps()[-1] == step and all(name.isdigit() for name in os.listdir(root))
        for one in reopened.steps():
            run_state.verify_step(root, one)
        if not died:
            assert host["new"] and deadly > 8
            trials(deadly)
            break


OTHER_ERRORS = [pytest.param(error, marks=pytest.mark.slow) for error in (errno.EIO, errno.EROFS, errno.ESTALE)]


@pytest.mark.parametrize("error", [errno.ENOSPC, *OTHER_ERRORS], ids=["ENOSPC", "EIO", "EROFS", "ESTALE"])
def test_an_error_at_any_file_operation_is_reported_at_once(tmp_path, monkeypatch, error, trials):
    """The save itself fails, says what is left, and the next save works."""
    real = {name: getattr(run_state.paths, name) for name in OPERATIONS}
    target = {"w": jax.ShapeDtypeStruct((2,), jnp.int32)}
    for failing in itertools.count():
        root = tmp_path / str(failing)
        saves = run_state.open_run_state(root, keep=2)
        saves.save(1, {"w": jnp.full((2,), 1)}, {})
        left = itertools.count(-failing)

        def fails(name, left=left):
            def call(*args):
                if next(left) == 0:
                    raise OSError(error, os.strerror(error))
                return real[name](*args)

            return call

        for name in OPERATIONS:
            monkeypatch.setattr(run_state.paths, name, fails(name))
        reported = None
        try:
            saves.save(2, {"w": jnp.full((2,), 2)}, {})
        except run_state.SaveFailed as failed:
            reported = str(failed)
        for name in OPERATIONS:
            monkeypatch.setattr(run_state.paths, name, real[name])
        if next(left) <= 0:  # so many operations a save does not have
            assert reported is None
            trials(failing)
            break
        assert reported is not None and os.strerror(error) in reported, failing
        step, state, _ = run_state.open_run_state(root, keep=2).restore(target)
        assert step in (1, 2) and state["w"].tolist() == [step, step]
        saves.save(3, {"w": jnp.full((2,), 3)}, {})
        assert saves.restore(target)[0] == 3


def test_a_saved_state_is_not_touched_by_the_steps_after_it(tmp_path, trials):
    """Each step takes over the buffers of the one before."""
    step_on = jax.jit(lambda state: jax.tree.map(lambda x: x * 3 + 1, state), donate_argnums=0)
    state = {"w": jnp.arange(1000, dtype=jnp.uint32), "v": jnp.ones((64, 64), jnp.uint32)}
    saves, wanted = run_state.open_run_state(tmp_path, keep=1), {}
    for step in range(trials(5, 200)):
        wanted = {name: np.array(leaf) for name, leaf in state.items()}
        saves.save(step, state, {})
        for _ in range(3):
            state = step_on(state)
        restored = saves.restore({name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in wanted.items()})[1]
        assert all(np.array_equal(restored[name], wanted[name]) for name in wanted), step


MESHES = [(8, 1), (4, 2), (2, 4), (1, 8), (4, 1), (2, 1), (1, 1)]


def test_a_state_moves_between_all_meshes(tmp_path, trials):
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")

    def on(shape):
        devices = jax.devices()[: shape[0] * shape[1]]
        mesh = jax.make_mesh(shape, ("fsdp", "tensor"), devices=devices, axis_types=(AxisType.Explicit,) * 2)
        place = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))
        draw = np.random.default_rng(0)
        return {
            "both": jax.device_put(draw.normal(size=(8, 16)).astype(np.float32), place("fsdp", "tensor")),
            "crossed": jax.device_put(draw.normal(size=(8, 8)).astype(np.float32), place("tensor", "fsdp")),
            "together": jax.device_put(jnp.arange(16, dtype=jnp.bfloat16) / 3, place(("fsdp", "tensor"))),
            "everywhere": jax.device_put(np.int32(7), place()),
        }

    pairs = list(itertools.permutations(range(len(MESHES)), 2))
    for place, shape in enumerate(MESHES):
        run_state.save_step(tmp_path / str(place), 1, on(shape), {})
    wanted = digests(on((1, 1)))
    for saved, restored in pairs[: trials(len(pairs))]:
        target = on(MESHES[restored])
        _, state, _ = run_state.restore_step(tmp_path / str(saved), abstract(target))
        assert digests(state) == wanted
        assert all(state[name].sharding == target[name].sharding for name in state)


def test_interrupted_saves_are_swept_and_a_set_aside_step_comes_back(tmp_path):
    run_state.save_step(tmp_path, 5, {"w": jnp.ones(2)}, {})
    os.rename(tmp_path / "00000005", tmp_path / ".jrl-tmp-replaced-00000005")
    (tmp_path / ".jrl-tmp-saving-00000010").mkdir()
    (tmp_path / ".jrl-tmp-saving-00000010" / "half").write_bytes(b"x")
    saves = run_state.open_run_state(tmp_path, keep=1)
    assert os.listdir(tmp_path) == ["00000005"]
    assert saves.restore({"w": jax.ShapeDtypeStruct((2,), jnp.float32)})[0] == 5


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"w": (3, jnp.float32), "b": (2, jnp.float32)}, r"holds w as float32\[2\], this run needs float32\[3\]"),
        ({"w": (2, jnp.bfloat16), "b": (2, jnp.float32)}, r"holds w as float32\[2\], this run needs bfloat16\[2\]"),
        (
            {"w": (2, jnp.float32), "bias": (2, jnp.float32)},
            r"does not hold 1 of the leaves .* 'bias' \(nearest saved: 'b'\)",
        ),
        ({"w": (2, jnp.float32)}, r"holds 1 leaves that this run does not use, first 'b'"),
    ],
)
def test_another_structure_is_refused_in_one_line(tmp_path, leaves, message):
    run_state.save_step(tmp_path, 1, {"w": jnp.ones(2), "b": jnp.ones(2)}, {})
    target = {name: jax.ShapeDtypeStruct((size,), dtype) for name, (size, dtype) in leaves.items()}
    with pytest.raises(run_state.StateMismatch, match=message) as caught:
        run_state.restore_step(tmp_path, target)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_saved_is_named_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match="leaf n of the state is a int"):
        run_state.save_step(tmp_path, 1, {"n": 3}, {})
    with pytest.raises(TypeError, match="object array"):
        run_state.save_step(tmp_path, 1, {"n": np.array([{}])}, {})
    with pytest.raises(TypeError, match="JSON"):
        run_state.save_step(tmp_path, 1, {"n": jnp.ones(1)}, {"reward": float("nan")})
    with pytest.raises(ValueError, match="both named 'a/b'"):
        run_state.save_step(tmp_path, 1, {"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, {})
    assert os.listdir(tmp_path) == []


# Damage


def flip_a_bit(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        data = bytearray(b"x")
    path.write_bytes(bytes(data))


def cut(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))] if data else b"x")


def blank_a_page(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = rng.randrange(max(1, len(data)))
    data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    path.write_bytes(bytes(data) if bytes(data) != path.read_bytes() else bytes(data) + b"\0")


def delete(path: Path, rng: random.Random) -> None:
    path.unlink()


def link_elsewhere(path: Path, rng: random.Random) -> None:
    shutil.move(path, path.parent.parent / f"moved-{path.name}")
    path.symlink_to(path.parent.parent / f"moved-{path.name}")


def put_a_pipe(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


FAULTS = (put_a_pipe, flip_a_bit, flip_a_bit, flip_a_bit, cut, blank_a_page, delete, link_elsewhere)


def one_damaged(told: list[str], step: int) -> bool:
    return [text.split(" is damaged: ")[0] for text in told] == [f"step {step}"]


def faults_restored_silently(folder: Path, trials: int) -> list[str]:
    """Damages the newer of two steps in a copy, `trials` times, and returns what was not noticed by name."""
    old, new = small_state(seed=1), small_state(seed=2)
    run_state.save_step(folder / "good", 5, old, {"at": 5})
    run_state.save_step(folder / "good", 10, new, {"at": 10})
    files = sorted(path for path in (folder / "good" / "00000010").rglob("*") if path.is_file())
    target, want, unnoticed = abstract(old), digests(old), []
    for trial in range(trials):
        rng = random.Random(trial)
        fault = rng.choice(FAULTS)
        shutil.rmtree(folder / "bad", ignore_errors=True)
        shutil.copytree(folder / "good", folder / "bad")
        by_size = rng.choices(files, [path.stat().st_size + 1 for path in files])[0]
        victim = folder / "bad" / (by_size if rng.random() < 0.5 else rng.choice(files)).relative_to(folder / "good")
        fault(victim, rng)
        told: list[str] = []
        step, restored, host = run_state.restore_step(folder / "bad", target, tell=told.append)
        if step != 5 or host != {"at": 5} or digests(restored) != want or not one_damaged(told, 10):
            unnoticed.append(f"trial {trial}: {fault.__name__} on {victim.name}")
    return unnoticed


def test_a_damaged_newest_step_is_named_and_the_one_before_is_used(tmp_path, trials):
    assert faults_restored_silently(tmp_path, trials(30, 1_000)) == []


def test_files_of_another_step_and_other_names_are_damage(tmp_path):
    for step in (5, 10):
        run_state.save_step(tmp_path, step, {"w": jnp.full((2,), step)}, {"at": step})
    shutil.copy(tmp_path / "00000005" / "host.json", tmp_path / "00000010" / "host.json")
    with pytest.raises(run_state.DamagedStep, match=r"step 10 is damaged: .*host.json has other bytes"):
        run_state.verify_step(tmp_path, 10)
    (tmp_path / "00000005" / "extra").write_bytes(b"")
    with pytest.raises(run_state.DamagedStep, match="extra is not in the manifest"):
        run_state.verify_step(tmp_path, 5)
    (tmp_path / "00000005" / "extra").unlink()
    shutil.copytree(tmp_path / "00000005", tmp_path / "00000007")
    with pytest.raises(run_state.DamagedStep, match="the manifest is of format 1, step 5"):
        run_state.verify_step(tmp_path, 7)


def test_a_manifest_with_another_number_is_damage_although_every_file_is_as_it_was(tmp_path):
    run_state.save_step(tmp_path, 5, {"w": jnp.arange(4.0)}, {"at": 5})
    path = tmp_path / "00000005" / "manifest.json"
    sealed = json.loads(path.read_bytes())
    sealed["body"]["format"] = {1: 2, 2: 1}[sealed["body"]["format"]]  # the other one that there is
    path.write_text(json.dumps(sealed))
    with pytest.raises(run_state.DamagedStep, match=r"manifest\.json has other contents than were saved"):
        run_state.verify_step(tmp_path, 5)


def test_processes_that_verify_together_hash_each_file_once(tmp_path):
    run_state.save_step(tmp_path, 5, {"w": jnp.arange(4.0)}, {"at": 5})
    folder = tmp_path / "00000005"
    for name in sorted({*paths.files_below(folder)} - {"manifest.json"}):
        before, found = (folder / name).read_bytes(), []
        (folder / name).write_bytes(before[:-1] + bytes([before[-1] ^ 1]) if before else b"more")
        for index in range(3):
            try:
                run_state.verify_step(tmp_path, 5, Processes(index, 3))
            except run_state.DamagedStep as error:
                found.append(str(error))
        assert len(found) == 1 and f"{name} has other bytes" in found[0]
        (folder / name).write_bytes(before)


def test_a_damaged_step_that_was_asked_for_is_not_replaced_by_another(tmp_path):
    for step in (5, 10):
        run_state.save_step(tmp_path, step, {"w": jnp.ones(2)}, {})
    (tmp_path / "00000010" / "manifest.json").unlink()
    with pytest.raises(run_state.DamagedStep, match="step 10"):
        run_state.restore_step(tmp_path, {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}, step=10)


def test_a_reader_goes_on_with_what_a_run_has_saved_while_it_read(tmp_path):
    target = {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}
    run_state.save_step(tmp_path, 5, {"w": jnp.ones(2)}, {})
    (tmp_path / "00000005" / "host.json").unlink()  # as the run removes it
    told = []

    def tell(text):
        told.append(text)
        run_state.save_step(tmp_path, 10, {"w": jnp.zeros(2)}, {})
        shutil.rmtree(tmp_path / "00000005")

    assert run_state.restore_step(tmp_path, target, tell=tell)[0] == 10
    assert told == ["step 5 is damaged: host.json is missing"]


def test_no_intact_step_is_a_refusal_that_lists_them(tmp_path):
    target = {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}
    with pytest.raises(run_state.NoIntactStep, match="there is no checkpoint in"):
        run_state.restore_step(tmp_path, target)
    for step in (5, 10):
        run_state.save_step(tmp_path, step, {"w": jnp.ones(2)}, {})
        (tmp_path / f"{step:08d}" / "host.json").write_bytes(b"[]")
    with pytest.raises(run_state.NoIntactStep, match=r"step 10: .*host\.json.*; step 5: .*host\.json"):
        run_state.restore_step(tmp_path, target)


# Death and full disks, in processes of their own

CHILD = textwrap.dedent("""
    import os, resource, sys
    import jax.numpy as jnp, numpy as np
    from jrl.run.checkpoints import run_state

    def state(step):
        return {"w": jnp.asarray(np.random.default_rng(step).normal(size=(256, 256)).astype(np.float32)),
                "b": [jnp.full((8,), step, jnp.int32) for _ in range(4)]}
    """)

SAVES_FOR_EVER = CHILD + textwrap.dedent("""
    saves = run_state.open_run_state(sys.argv[1], keep=2)
    for step in range(1, 10_000):
        print("saving", step, flush=True)
        saves.save(step, state(step), {"at": step})
        print("saved", step, flush=True)
    """)

FULL_DISK = CHILD + textwrap.dedent("""
    folder, shared, *limits = sys.argv[1:]
    saves = run_state.open_run_state(folder, keep=1, shared=shared == "shared")
    saves.save(1, state(1), {"at": 1})
    for limit in map(int, limits):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            saves.save(2, state(2), {"at": 2})
        except run_state.SaveFailed as error:
            print("failed", error, flush=True)
        else:
            print("no error", limit, flush=True)
        print("left", *sorted(os.listdir(folder)), flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    saves.save(3, state(3), {"at": 3})
    """)


def child(source: str, folder: Path, *arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        [sys.executable, "-c", source, str(folder), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def expected(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(256, 256)).astype(np.float32)


def kill_while_saving(folder: Path, delay_seconds: float, after: int) -> None:
    process = child(SAVES_FOR_EVER, folder)
    for line in process.stdout:
        if line.strip() == f"saving {after}":
            break
    time.sleep(delay_seconds)
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split("\n")
    process.stderr.close()
    assert process.wait() == -signal.SIGKILL
    finished = [int(line.split()[1]) for line in rest if line.startswith("saved ")]
    saves = run_state.open_run_state(folder, keep=2)
    target = {"w": jax.ShapeDtypeStruct((256, 256), jnp.float32), "b": [jax.ShapeDtypeStruct((8,), jnp.int32)] * 4}
    step, state, host = saves.restore(target)
    assert step >= max(finished, default=after - 1) and host == {"at": step} and saves.steps()[-1] == step
    np.testing.assert_array_equal(state["w"], expected(step))
    assert all(name.isdigit() for name in os.listdir(folder))


@pytest.mark.parametrize("delay_seconds", [0.005, 0.04, 0.09])
def test_a_save_killed_on_the_way_leaves_a_good_step(tmp_path, delay_seconds):
    kill_while_saving(tmp_path, delay_seconds, after=2)


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(40))
def test_saves_killed_at_many_points_leave_a_good_step(tmp_path, trial):
    kill_while_saving(tmp_path, 0.004 * trial, after=2 + trial % 2)


def save_on_a_full_disk(folder: Path, shared: str, limits: Sequence[int]) -> str:
    """Has a step saved where no file may be longer than each of the limits, and another where it may. Returns what
    the failures say."""
    process = child(FULL_DISK, folder, shared, *limits)
    out, err = process.communicate(timeout=60 + len(limits))
    assert process.returncode == 0, err
    failures = [line for line in out.splitlines() if line.startswith("failed")]
    assert len(failures) == len(limits) and "no error" not in out
    assert all("step 2 could not be saved" in line and line.endswith("Last checkpoint: step 1") for line in failures)
    assert [line for line in out.splitlines() if line.startswith("left")] == ["left 00000001"] * len(limits)
    assert "Traceback" not in err
    assert sorted(os.listdir(folder)) == ["00000001", "00000003"]
    return "\n".join(failures)


def test_a_full_disk_is_reported_and_the_earlier_step_stays(tmp_path):
    assert "File too large" in save_on_a_full_disk(tmp_path, "shared", (0, 50, 500, 5_000, 200_000))


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["shared", "apart"])
def test_a_disk_that_is_full_at_any_byte_is_reported_and_the_earlier_step_stays(tmp_path, shared, trials):
    draw = random.Random(shared)
    limits = [int(10 ** draw.uniform(0, 5.3)) for _ in range(trials(30))]
    save_on_a_full_disk(tmp_path, shared, limits)


def test_a_step_of_shards_moves_between_device_counts_and_names_its_damage(tmp_path):
    """As processes without a common folder save it; here one process writes all shards."""
    state = small_state(MANY)
    saves = run_state.open_run_state(tmp_path, keep=2, shared=False)
    saves.save(1, state, {"n": 1})
    saves.save(2, state, {"n": 2})
    assert sorted(os.listdir(tmp_path / "00000002")) == ["host.json", "manifest.json", "shards-0.bin"]
    placed = run_state.verify_step(tmp_path, 2)["shards"].values()
    assert {offset % 64 for shards in placed for _, offset, _ in shards} == {0}
    for devices in (1, MANY // 2 or 1, MANY):
        step, restored, host = run_state.restore_step(tmp_path, abstract(small_state(devices, seed=3)))
        assert (step, host) == (2, {"n": 2}) and digests(restored) == digests(state)
    assert [a.sharding for a in jax.tree.leaves(restored["params"])] == [
        a.sharding for a in jax.tree.leaves(state["params"])
    ]
    with open(tmp_path / "00000002" / "shards-0.bin", "r+b") as file:
        file.truncate(100)
    told: list[str] = []
    assert saves.restore(abstract(state), tell=told.append)[0] == 1
    assert one_damaged(told, 2)


def test_a_checksum_is_the_sum_over_shards():
    # Elements 1 and 2 of float32 are the words 0x3f800000 and 0x40000000. In Python's own integers:
    def mixed(word, place):
        x = (place + 1) * 0x9E3779B97F4A7C15 % 2**64 ^ word
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = (x ^ x >> 33) * factor % 2**64
        return x ^ x >> 33

    two = np.array([1.0, 2.0], np.float32)
    assert digest.full_checksum(two) == (mixed(0x3F800000, 0) + mixed(0x40000000, 1)) % 2**64 == 0x9DC551BBB1C650FD
    assert digest.full_checksum(two[::-1]) != digest.full_checksum(two)
    rng = np.random.default_rng(0)
    for shape in ((8, 3, 4), (4, 70_000), (70_000, 2), (), (0, 3), (3, 0), (0,)):
        array = rng.normal(size=shape).astype(np.float32)
        parts = [(slice(None),) * len(shape)]
        if array.ndim > 1 and array.size:
            middle = (slice(None),) * (array.ndim - 2)
            halves = lambda n: (slice(0, n // 2), slice(n // 2, n))
            parts = [(i, *middle, j) for i in halves(shape[0]) for j in halves(shape[-1])]
        bounds = lambda index, shape: [part.indices(n)[:2] for part, n in zip(index, shape)]
        total = sum(digest.checksum(array[index], bounds(index, array.shape), array.shape) for index in parts)
        assert total % 2**64 == digest.full_checksum(array)
        assert array.size == 0 or digest.full_checksum(array + 1) != digest.full_checksum(array)


def test_a_save_in_which_another_process_is_lost_says_that(tmp_path):
    class Alone(Processes):
        def barrier(self, what):
            raise HostLost("process 0 is gone or does not answer")

    with pytest.raises(HostLost, match="process 0 is gone"):
        run_state.save_step(tmp_path, 1, {"x": np.zeros(2)}, {}, Alone())


def test_what_several_processes_save_is_verified_by_checksums_without_a_gather(tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "whole_leaf", None)  # nothing is gathered
    state = {"w": np.arange(4.0), "step": np.int32(7)}

    def save(processes):
        run_state.save_step(tmp_path / str(processes.index), 1, state, {}, processes, shared=False)

    assert together(2, save)[0] == [None, None]
    shutil.copy(tmp_path / "1" / "00000001" / "shards-1.bin", tmp_path / "0" / "00000001")
    entries = run_state.verify_step(tmp_path / "0", 1)["leaves"]
    assert entries["w"]["checksum"] == f"{digest.full_checksum(state['w']):016x}" and "sha256" not in entries["w"]
    _, restored, _ = run_state.restore_step(tmp_path / "0", state)
    np.testing.assert_array_equal(restored["w"], state["w"])
    monkeypatch.setattr(run_state, "read_shards", lambda *args: shards.read_shards(*args) | {"w": np.ones(4)})
    with pytest.raises(run_state.NoIntactStep, match="leaf w was read with other values than were saved"):
        run_state.restore_step(tmp_path / "0", state)


@pytest.mark.parametrize("kind", [run_state.SHA256, run_state.CHECKSUM])  # as one process saves, and several
def test_what_orbax_wrote_is_read_where_a_process_has_no_device_of_it(tmp_path, monkeypatch, kind):
    """Here process 1 has none: both are threads of one process, whose devices are those of process 0."""
    state = small_state(MANY)
    with monkeypatch.context() as patch:
        patch.setattr(run_state, "SHA256", kind)
        run_state.save_step(tmp_path, 1, state, {"n": 1})
    assert kind in run_state.verify_step(tmp_path, 1)["leaves"]["step"]
    assert "state" in os.listdir(tmp_path / "00000001")
    monkeypatch.setattr(digest, "whole_leaf", None)  # nothing is gathered or sent
    read = lambda processes: run_state.restore_step(tmp_path, abstract(state), processes=processes)
    for step, restored, host in together(2, read)[0]:
        assert (step, host) == (1, {"n": 1}) and digests(restored) == digests(state)
        assert restored["params"]["layers"][0].sharding == state["params"]["layers"][0].sharding
    load = run_state.read_arrays

    def altered(folder, entries):
        return ((name, x + 1 if name == "step" else x) for name, x in load(folder, entries))

    monkeypatch.setattr(run_state, "read_arrays", altered)
    for error in together(2, read)[0]:
        assert isinstance(error, run_state.NoIntactStep) and "leaf step was read with other values" in str(error)
    monkeypatch.setattr(run_state, "read_arrays", load)
    place = run_state.place_on_mesh
    zeros = lambda x: np.zeros_like(x) if isinstance(x, np.ndarray) else x
    monkeypatch.setattr(run_state, "place_on_mesh", lambda x, where: place(zeros(x), where))
    for error in together(2, read)[0]:  # right on the host, and other values on the devices
        assert isinstance(error, run_state.NoIntactStep) and "was read with other values" in str(error)


def test_a_process_that_writes_its_shards_opens_no_file_of_another(tmp_path):
    """While it syncs its own, process 0 may replace the manifest: a file that was listed is gone."""

    def exchange(what, own):
        (tmp_path / ".jrl-tmp-manifest.json-1-1").symlink_to("gone")
        return [{"files": {}, "placed": {}}, own]

    processes = types.SimpleNamespace(index=1, writer=False, exchange=exchange)
    run_state._write_apart(tmp_path, 1, {"w": np.arange(4.0)}, {}, b"{}", processes)
    assert (tmp_path / "shards-1.bin").exists()


@pytest.mark.parametrize("is_lost", [True, False])
def test_where_orbax_fails_since_a_process_is_gone_that_is_said(tmp_path, monkeypatch, is_lost):
    def check():
        if is_lost:
            raise HostLost("process 0 is gone")

    def fail(*arguments):
        raise TimeoutError("Timeout waiting at barrier")

    monkeypatch.setattr(run_state, "_write_together", fail)
    monkeypatch.setattr(run_state, "_write_apart", fail)
    same = lambda what, value: [value, value]
    here = dict(index=1, count=2, writer=False, exchange=same, barrier=lambda what: None, check=check)
    with pytest.raises(HostLost if is_lost else run_state.SaveFailed, match=r"is gone|could not be saved"):
        run_state.save_step(tmp_path, 1, {"w": np.arange(4.0)}, {}, types.SimpleNamespace(**here))


def test_processes_without_a_common_folder_verify_all_of_their_own(tmp_path):
    def opened(processes):
        return run_state.open_run_state(tmp_path / str(processes.index), keep=2, processes=processes, shared=False)

    def save(processes):
        saves = opened(processes)
        for step in (1, 2):
            saves.save(step, {"w": np.arange(4.0)}, {"at": step})

    assert together(2, save)[0] == [None, None]
    for step, one, other in itertools.product(("00000001", "00000002"), "01", "01"):
        for name in os.listdir(tmp_path / one / step):
            if not (tmp_path / other / step / name).exists():
                shutil.copy(tmp_path / one / step / name, tmp_path / other / step / name)
    for name in ("host.json", "shards-0.bin", "shards-1.bin"):
        path = tmp_path / "1" / "00000002" / name
        before = path.read_bytes()
        path.write_bytes(before + b" ")
        found, _ = together(2, lambda processes: opened(processes).restore({"w": np.zeros(4)}))
        assert [(step, host) for step, _, host in found] == [(1, {"at": 1})] * 2
        path.write_bytes(before)


def test_what_a_process_writes_of_its_shards_is_read_back(tmp_path, monkeypatch):
    write = run_state.write_shards

    def torn(folder, arrays, process):
        files, placed = write(folder, arrays, process)
        os.truncate(folder / "shards-0.bin", 10)
        return files, placed

    monkeypatch.setattr(run_state, "write_shards", torn)
    saves = run_state.open_run_state(tmp_path, keep=2, shared=False)
    with pytest.raises(run_state.SaveFailed, match="what was written reads back with other bytes"):
        saves.save(1, {"w": np.arange(4.0)}, {})
    assert run_state.list_steps(tmp_path) == []


def test_shards_that_leave_a_gap_are_refused(tmp_path):
    mesh = mesh_of(MANY)
    rows = jax.device_put(np.arange(24.0, dtype=np.float32).reshape(8, 3), NamedSharding(mesh, PartitionSpec("data")))
    files, placed = shards.write_shards(tmp_path, {"rows": rows, "host": np.arange(3)}, 0)
    assert files == digest.tree_digests(tmp_path, files)
    target = {"rows": np.empty((8, 3), np.float32)}
    np.testing.assert_array_equal(shards.read_shards(tmp_path, placed, target, files)["rows"], rows)
    first, second, *others = placed["rows"]
    for wrong, message in [
        ([second, *others], "the shards of leaf rows have 21 elements, and it has 24"),
        ([second, second, *others], "a shard of leaf rows is there twice"),
        ([["shards-0.bin", 0, [[0, 2], [0, 2]]], *others], "the shards of leaf rows have 22 elements"),
        ([["../elsewhere", *first[1:]], second, *others], r"at 0 of '../elsewhere', which the step does not hold"),
        ([[first[0], files[first[0]]["bytes"], first[2]], second, *others], "which the step does not hold"),
        ([[*first[:2], [[0, 1], [-3, 0]]], second, *others], "which the step does not hold"),
        ([[*first[:2], [[0, 1]]], second, *others], "which the step does not hold"),
    ]:
        with pytest.raises(ValueError, match=message):
            shards.read_shards(tmp_path, {"rows": wrong}, target, files)
    _, of_another = shards.write_shards(tmp_path, {"host": np.arange(3)}, 1)
    assert of_another == {}  # process 0 writes what all hold
