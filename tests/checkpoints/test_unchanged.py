"""Large arrays that have not changed since the step before are stored once."""

import errno
import os
import shutil
import threading
import types

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from processes_in_threads import together

from jrl.run.checkpoints import digest, run_state, unchanged
from jrl.run.checkpoints.unchanged import Unchanged, find_unchanged

LARGE = unchanged.LEAST_BYTES // 4  # elements of a float32 leaf that is worth a link


def state_of(step, base=0.0):
    return {
        "base": np.full(LARGE, base, np.float32),
        "adapter": np.full(LARGE, step, np.float32),
        "step": np.int32(step),
    }


def links_of(root, step):
    """Returns {file: inode} of what a step has in common with others."""
    folder = run_state.step_dir(root, step) / unchanged.FOLDER
    return {file.relative_to(folder): file.stat().st_ino for file in folder.rglob("*") if file.is_file()}


def holds(saves, step, state):
    restored = saves.restore(state, step=step)[1]
    return all(np.array_equal(restored[name], state[name]) for name in state)


def test_a_base_is_written_twice_and_then_linked(tmp_path):
    saves = run_state.open_run_state(tmp_path, keep=4)
    for step in (1, 2, 3, 4):
        saves.save(step, state_of(step), {"at": step})
    assert links_of(tmp_path, 1) == {}  # nothing shows yet that it does not change
    assert links_of(tmp_path, 2) == links_of(tmp_path, 3) == links_of(tmp_path, 4) != {}
    formats = [run_state.read_step_manifest(tmp_path, step)["format"] for step in (1, 2, 3, 4)]
    assert formats == [1, 3, 3, 3]  # one that has nothing in common is read by earlier versions too
    assert all(holds(saves, step, state_of(step)) for step in (1, 2, 3, 4))
    for step in (1, 2, 3, 4):
        run_state.verify_step(tmp_path, step)


def test_what_is_linked_outlives_the_step_it_was_written_for(tmp_path):
    saves = run_state.open_run_state(tmp_path, keep=1)
    for step in range(1, 7):
        saves.save(step, state_of(step), {})
    assert saves.steps() == [5, 6] and links_of(tmp_path, 6) == links_of(tmp_path, 5)
    assert holds(saves, 6, state_of(6))
    saves.save(7, state_of(7, base=1.0), {})  # the next stage trains all weights
    assert links_of(tmp_path, 7) == {} and holds(saves, 7, state_of(7, base=1.0)) and holds(saves, 6, state_of(6))


def leaf(hash, length):
    return {"data_shape": [length], "data_dtype": "float32", "sha256": hash}


def test_which_leaves_are_linked_and_which_are_written_again():
    earlier = {"leaves": {"a": leaf("A", LARGE), "b": leaf("B", LARGE), "small": leaf("C", LARGE - 1)}, "files": {}}
    now = {"a": leaf("A", LARGE), "b": leaf("B", LARGE), "small": leaf("C", LARGE - 1)}
    assert find_unchanged(now, earlier) == Unchanged(["a", "b"], {})
    assert find_unchanged(now | {"a": leaf("X", LARGE)}, earlier) == Unchanged(["b"], {})
    assert find_unchanged(now | {"a": leaf("A", 2 * LARGE)}, earlier) == Unchanged(["b"], {})
    assert find_unchanged({"new": leaf("A", LARGE)}, earlier) == Unchanged([], {})
    earlier["unchanged"] = ["b"]
    earlier["files"] = {"unchanged/d/1": {"bytes": 4}, "state/d/1": {"bytes": 4}}
    linked = {"unchanged/d/1": {"bytes": 4}}
    assert find_unchanged(now, earlier) == Unchanged(["a", "b"], {})  # as much again would be written at every step
    shorter = {"a": leaf("A", LARGE)}
    assert find_unchanged(now | {"a": leaf("X", LARGE)}, earlier) == Unchanged(["b"], linked)
    assert find_unchanged(shorter, earlier) == Unchanged(["a"], {})  # b is gone
    for entries in (now, earlier["leaves"]):
        entries["b"] = leaf("B", 2 * LARGE)
    assert find_unchanged(now, earlier) == Unchanged(["b"], linked)  # a alone is written again: it may be a coincidence
    earlier["leaves"]["b"] = leaf("Y", 2 * LARGE)
    assert find_unchanged(now, earlier) == Unchanged(["a"], {})


def flip_last_bit(path):
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


DAMAGES = {
    "other bytes": "has other bytes than were saved",
    "missing": "FileNotFoundError: ",
    "a link": " is not a plain file",
    "a file for its folder": "NotADirectoryError: ",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_not_linked_but_written_anew_with_a_warning(tmp_path, damage, caplog):
    saves = run_state.open_run_state(tmp_path, keep=4)
    for step in (1, 2):
        saves.save(step, state_of(step), {})
    victim = max((tmp_path / "00000002" / unchanged.FOLDER).rglob("*"), key=lambda path: path.stat().st_size)
    if damage == "other bytes":
        flip_last_bit(victim)
    elif damage == "a file for its folder":
        shutil.rmtree(victim.parent)
        victim.parent.write_bytes(b"")
    else:
        shutil.move(victim, tmp_path / "00000001")
        if damage == "a link":
            victim.symlink_to(tmp_path / "00000001" / victim.name)
    saves.save(3, state_of(3), {})
    (warning,) = [record.getMessage() for record in caplog.records if record.name == run_state.__name__]
    assert warning.startswith("what has not changed since step 2 is written anew, because its file there is damaged: ")
    assert DAMAGES[damage] in warning
    assert warning.endswith(". Earlier steps that have this file in common are damaged too")
    with pytest.raises(run_state.DamagedStep, match="step 2 is damaged"):
        saves.restore(state_of(2), step=2)
    assert holds(saves, 3, state_of(3)) and not {*links_of(tmp_path, 3).values()} & {*links_of(tmp_path, 2).values()}
    caplog.clear()
    saves.save(4, state_of(4), {})
    assert links_of(tmp_path, 4) == links_of(tmp_path, 3) and not caplog.records


def test_a_manifest_that_names_files_outside_its_step_links_none(tmp_path):
    for name in ("source/unchanged", "target"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "source" / "secret").write_bytes(b"x")
    files = {"unchanged/../secret": digest.file_digest(tmp_path / "source" / "secret")}
    with pytest.raises(ValueError, match=r"unchanged/\.\./secret is not a file of a step"):
        unchanged.link_files(files, tmp_path / "source", tmp_path / "target")
    assert os.listdir(tmp_path / "target") == []


def test_a_file_that_cannot_be_read_is_written_anew_with_a_warning(tmp_path, monkeypatch, caplog):
    saves = run_state.open_run_state(tmp_path, keep=4)
    for step in (1, 2):
        saves.save(step, state_of(step), {})

    def unreadable(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(unchanged, "digest", types.SimpleNamespace(tree_digests=unreadable))
        saves.save(3, state_of(3), {})
    assert "damaged: OSError: [Errno 5] Input/output error. Earlier steps" in caplog.text
    assert holds(saves, 3, state_of(3))


def test_damage_to_common_files_is_named_in_every_step(tmp_path):
    saves = run_state.open_run_state(tmp_path, keep=4)
    for step in (1, 2, 3):
        saves.save(step, state_of(step), {})
    victim = max((tmp_path / "00000003" / unchanged.FOLDER).rglob("*"), key=lambda path: path.stat().st_size)
    flip_last_bit(victim)
    told = []
    step, restored, _ = saves.restore(state_of(1), tell=told.append)
    assert step == 1 and np.array_equal(restored["base"], state_of(1)["base"])
    assert [text.partition(" is damaged")[0] for text in told] == ["step 3", "step 2"]


@pytest.mark.parametrize("error", [errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK])
def test_a_file_system_without_hard_links_gets_another_copy_and_one_warning(tmp_path, monkeypatch, error, caplog):
    def refuse(*args, **kwargs):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "link", refuse)
    saves = run_state.open_run_state(tmp_path, keep=4)
    for step in (1, 2, 3, 4):
        saves.save(step, state_of(step), {})
    assert {*links_of(tmp_path, 3)} and not {*links_of(tmp_path, 3).values()} & {*links_of(tmp_path, 2).values()}
    assert holds(saves, 3, state_of(3))
    assert [record.getMessage() for record in caplog.records if record.name == run_state.__name__] == [
        f"files in {tmp_path} cannot be hard-linked: every checkpoint has a copy of what has not changed"
    ]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_fails_while_files_are_linked_fails_the_save(tmp_path, monkeypatch, error):
    saves = run_state.open_run_state(tmp_path, keep=4)
    for step in (1, 2):
        saves.save(step, state_of(step), {})

    def full(*args, **kwargs):
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full)
        why = rf"step 3 could not be saved.*{os.strerror(error)}.*checkpoint: step 2"
        with pytest.raises(run_state.SaveFailed, match=why):
            saves.save(3, state_of(3), {})
    assert saves.steps() == [1, 2] and holds(saves, 2, state_of(2))


def test_a_step_of_links_moves_between_meshes(tmp_path):
    def on(devices, step):
        mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices], axis_types=(AxisType.Explicit,))
        rows = NamedSharding(mesh, PartitionSpec("data"))
        draw = np.random.default_rng(0).normal(size=(8, LARGE // 8)).astype(np.float32)
        return {"base": jax.device_put(draw, rows), "adapter": jax.device_put(np.full(8, step, np.float32), rows)}

    abstract = lambda state: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    for step, devices in enumerate([8, 2, 1, 4]):
        run_state.save_step(tmp_path, step, on(devices, step), {})
    assert links_of(tmp_path, 3) == links_of(tmp_path, 1) != {}
    for step, devices in [(3, 1), (3, 8), (1, 4)]:
        target = on(devices, step)
        _, restored, _ = run_state.restore_step(tmp_path, abstract(target), step)
        assert {name: digest.leaf_digest(x) for name, x in restored.items()} == {
            name: digest.leaf_digest(x) for name, x in target.items()
        }
        assert all(restored[name].sharding == target[name].sharding for name in target)
    part = abstract({"base": on(2, 3)["base"]})  # as export reads the policy alone
    _, restored, _ = run_state.restore_step(tmp_path, part, 3, part=True)
    np.testing.assert_array_equal(restored["base"], on(2, 3)["base"])


def test_processes_agree_on_what_is_linked(tmp_path, monkeypatch):
    """Both are threads of one process, so orbax, which would wait for the other, writes for the first alone."""
    saved, writers, chosen = run_state.ocp.save, set(), {0: [], 1: []}
    writes = lambda: threading.get_ident() in writers
    monkeypatch.setattr(run_state, "_are_everywhere", lambda arrays, processes: True)
    monkeypatch.setattr(run_state.ocp, "save", lambda where, arrays: saved(where, arrays) if writes() else None)
    monkeypatch.setattr(run_state, "_read_back", lambda folder, entries, one: chosen[one.index].append(folder.name))

    def save(processes):
        if processes.writer:
            writers.add(threading.get_ident())
        for step in (1, 2, 3):
            run_state.save_step(tmp_path, step, state_of(step), {}, processes)

    assert together(2, save)[0] == [None, None]
    assert chosen[0] == chosen[1] == ["state", "state", "unchanged", "state"]
    assert links_of(tmp_path, 3) == links_of(tmp_path, 2) != {}


class Died(BaseException):
    pass


def test_death_on_the_way_leaves_the_old_or_the_new_step(tmp_path, monkeypatch):
    """At the link of every file and at every operation around it."""
    operations = [(os, "link"), (run_state.paths, "make_dir"), (run_state.paths, "sync_tree"),
                  (run_state.paths, "rename"), (run_state.paths, "remove_tree")]  # fmt: skip
    real = {name: getattr(module, name) for module, name in operations}
    before = run_state.open_run_state(tmp_path / "before", keep=1)
    for step in (1, 2, 3):
        before.save(step, state_of(step), {})
    for deadly in range(100):
        root, left = tmp_path / str(deadly), [deadly]
        shutil.copytree(tmp_path / "before", root, copy_function=os.link)  # no file of a step is ever changed
        saves = run_state.open_run_state(root, keep=1)

        def dies(name, left=left):
            def call(*args, **kwargs):
                left[0] -= 1
                if left[0] < 0:
                    raise Died
                return real[name](*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for module, name in operations:
                patch.setattr(module, name, dies(name))
            died = False
            try:
                saves.save(4, state_of(4), {})
            except Died:
                died = True
        reopened = run_state.open_run_state(root, keep=1)
        newest = reopened.steps()[-1]
        assert newest in (3, 4) and holds(reopened, newest, state_of(newest))
        for step in reopened.steps():
            run_state.verify_step(root, step)
        shutil.rmtree(root)
        if not died:
            assert deadly > 8
            return
    pytest.fail("the save never ended")
