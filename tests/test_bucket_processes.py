"""A run of several processes in a bucket: what each has written is one commit, or none. The processes are threads."""

import json

import pytest
from bucket_stand_in import ADDRESS, Died, Store, addressed, client, contents, opened
from processes_in_threads import together

from jrl import paths
from jrl.bucket.client import BucketError
from jrl.device.processes import OtherProcessFailed, Processes, ProcessesDisagree
from jrl.run import bucket_run


def write_step(folder, step, index):
    """Writes what a process of two has of a run after a step; process 0 removes the checkpoint before as well."""
    paths.remove_tree(folder / "checkpoints")
    place = folder / "checkpoints" / f"{step:08d}"
    place.mkdir(parents=True)
    (place / f"shards-{index}.bin").write_bytes(bytes([step, index]) * 500)
    if index == 0:
        manifest = {"body": {"step": step, "files": {"shards-0.bin": {}, "shards-1.bin": {}}}}
        (place / "manifest.json").write_text(json.dumps(manifest))
        (folder / "manifest.json").write_text("the run")
        (folder / "metrics.jsonl").write_text("".join(f"row {i}\n" for i in range(step)))
    else:
        (folder / "journal-1.jsonl").write_text("".join(f"verdict {i}\n" for i in range(step)))


def step_of(found, tmp_path):
    """Returns the step that the files of a run are of. They are all of one."""
    step = int(max(name.split("/")[1] for name in found if name.startswith("checkpoints/")))
    expected = tmp_path / f"expected{step}"
    if not expected.exists():
        expected.mkdir()
        alone = tmp_path / f"process1-{step}"
        alone.mkdir()
        write_step(alone, step, 1)
        write_step(expected, step, 0)
        for name in paths.files_below(alone):
            (expected / name).write_bytes((alone / name).read_bytes())
    assert found == contents(expected), f"half of step {step}"
    return step


def assert_nothing_left_over(store):
    """Holds a bucket to the parts of the commit."""
    committed = bucket_run.read_commit(client(store), "run")[0]
    assert {name for _, name in store.objects if "/files/" in name} == {
        f"run/files/{part}" for part in committed.objects()
    }


def train(store, base, steps, victim=None, after=None):
    """Returns what ended each of two processes that write and commit steps: 'died', an error, or None."""

    def act(processes):
        bucket = client(store, after if processes.index == victim else None)
        folder = base / f"machine-{processes.index}"
        try:
            publisher = opened(bucket, folder, processes)
            for step in steps:
                write_step(folder, step, processes.index)
                publisher.publish()
        except Died:
            processes.fail("killed", 76)
            return "died"

    base.mkdir(exist_ok=True)
    return together(2, act)[0]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_after_any_request_leaves_the_step_before_or_the_new_one(tmp_path, victim):
    seen, after = [], 0
    while True:
        store = Store()
        assert train(store, tmp_path / f"run{after}", [1]) == [None, None]
        ended = train(store, tmp_path / f"run{after}", [2], victim, after)
        again = tmp_path / f"again{after}"
        opened(client(store), again)  # by one process, and on another machine
        seen.append(step_of(contents(again), tmp_path))
        assert_nothing_left_over(store)
        if ended == [None, None]:
            break
        assert ended[victim] == "died"
        assert ended[1 - victim] is None or isinstance(ended[1 - victim], OtherProcessFailed)
        after += 1
    assert after > 4 and seen == sorted(seen) and set(seen) == {1, 2}


def test_processes_that_go_on_with_a_run_of_any_count_commit_all_of_it(tmp_path):
    store = Store(fails=0.3, delay_seconds=0)
    assert train(store, tmp_path / "two", [1, 2, 3]) == [None, None]
    store.fails = 0.0
    alone = opened(client(store), tmp_path / "one")
    assert step_of(contents(tmp_path / "one"), tmp_path) == 3
    alone.publish()  # nothing has changed
    assert train(store, tmp_path / "two", [4]) == [None, None]
    assert train(store, tmp_path / "other machines", [5]) == [None, None]
    opened(client(store), tmp_path / "again")
    assert step_of(contents(tmp_path / "again"), tmp_path) == 5
    assert_nothing_left_over(store)


def test_a_step_of_which_a_file_is_missing_is_not_committed(tmp_path):
    store = Store()

    def act(processes):
        folder = tmp_path / f"machine-{processes.index}"
        publisher = opened(client(store), folder, processes)
        write_step(folder, 1, processes.index)
        (folder / "checkpoints" / "00000001" / "shards-1.bin").unlink(missing_ok=True)
        try:
            publisher.publish()
        except BucketError as error:
            processes.fail(str(error), 4)
            raise

    found, _ = together(2, act)
    assert "step 1 is not committed: no process has shards-1.bin" in str(found[0])
    assert isinstance(found[1], OtherProcessFailed)
    assert bucket_run.read_commit(client(store), "run")[0].files == {}


def test_a_manifest_that_cannot_be_read_is_not_committed(tmp_path):
    place = tmp_path / "checkpoints" / "00000003"
    place.mkdir(parents=True)
    for damaged in ("{", "[]", '{"body": {}}'):
        (place / "manifest.json").write_text(damaged)
        with pytest.raises(BucketError, match="step 3 is not committed: its manifest on this machine cannot be read"):
            bucket_run.check_steps_complete(tmp_path, {"checkpoints/00000003/manifest.json": ()}, Processes(0, 2))


def test_processes_whose_run_was_taken_stop(tmp_path):
    store = Store()

    def act(processes):
        folder = tmp_path / f"machine-{processes.index}"
        publisher = opened(client(store), folder, processes)
        write_step(folder, 1, processes.index)
        if processes.writer:
            opened(client(store), tmp_path / "another")
        try:
            publisher.publish()
        except bucket_run.LeaseLost as error:
            processes.fail(str(error), 4)
            raise

    (first, second), _ = together(2, act)
    assert isinstance(first, bucket_run.LeaseLost) and "another process has taken" in str(second)


@pytest.fixture
def served(tmp_path, monkeypatch):
    with addressed(tmp_path / "copies", monkeypatch) as store:
        yield store


def test_processes_of_one_machine_have_copies_of_their_own_and_one_lease(served, tmp_path):
    def act(processes):
        with bucket_run.open_run_folder(ADDRESS, processes) as folder:
            write_step(folder.path, 1, processes.index)
            folder.publish()
            write_step(folder.path, 2, processes.index)
        return folder

    (first, second), _ = together(2, act)
    assert first.path != second.path and first.path.name == second.path.name  # dashboards know a run by it
    assert not first.shared and second.address == ADDRESS
    assert step_of(contents(bucket_run.readable(ADDRESS)), tmp_path) == 2  # the end commits too
    assert bucket_run.holder_of_run(ADDRESS) == f"no process is training {ADDRESS}"


def test_after_an_error_nothing_more_is_committed(served, tmp_path):
    def act(processes):
        with bucket_run.open_run_folder(ADDRESS, processes) as folder:
            write_step(folder.path, 1, processes.index)
            folder.publish()
            write_step(folder.path, 2, processes.index)
            raise KeyError("of the run itself")

    assert all(isinstance(error, KeyError) for error in together(2, act)[0])
    assert step_of(contents(bucket_run.readable(ADDRESS)), tmp_path) == 1


def test_processes_of_different_addresses_are_refused_before_anything_is_written(served):
    def act(processes):
        with bucket_run.open_run_folder(f"{ADDRESS}-{processes.index}", processes):
            pass

    found, _ = together(2, act)
    assert all("--run: gs://bucket/run-0 in process 0" in str(error) for error in found)
    assert not served.objects


def test_a_process_with_a_local_folder_is_refused_by_name(served, tmp_path):
    def act(processes):
        with bucket_run.open_run_folder(tmp_path / "run" if processes.index else ADDRESS, processes):
            pass

    found, _ = together(2, act)
    assert all(
        isinstance(error, ProcessesDisagree) and "a local folder in process 1 (machine-1)" in str(error)
        for error in found
    )
    assert not served.objects


def test_a_file_that_another_process_removed_is_committed_with_parts_that_are_there(tmp_path, monkeypatch):
    """Process 0 knows the parts of its copy; process 1 supersedes them, and removes its own."""
    monkeypatch.setattr(bucket_run, "FRESH_SECONDS", -1.0)  # no file is so new that it is read again
    store = Store()
    before = opened(client(store), tmp_path / "before")
    (tmp_path / "before" / "notes.txt").write_text("as it was")
    before.publish()

    def act(processes):
        folder = tmp_path / f"machine-{processes.index}"
        publisher = opened(client(store), folder, processes)
        (folder / f"new-{processes.index}").write_text("new")
        publisher.publish()
        if not processes.writer:
            (folder / "notes.txt").write_text("of process 1")
        publisher.publish()
        if not processes.writer:
            (folder / "notes.txt").unlink()
        publisher.publish()

    assert together(2, act)[0] == [None, None]
    opened(client(store), tmp_path / "again")
    assert contents(tmp_path / "again") == {"new-0": b"new", "new-1": b"new", "notes.txt": b"as it was"}


@pytest.mark.parametrize("has_copy", [None, 1])  # the process whose machine still has the file; None: none of them
def test_a_step_that_has_lost_an_object_is_damaged_for_all_and_is_whole_once_it_is_saved_again(tmp_path, has_copy):
    store = Store()
    assert train(store, tmp_path / "machines", (1, 2)) == [None, None]
    lost = next(key for key in store.objects if "/files/checkpoints/00000002/shards-1.bin" in key[1])
    del store.objects[lost]
    base = tmp_path / "fresh"
    base.mkdir()
    if has_copy is not None:
        (tmp_path / "machines" / f"machine-{has_copy}").rename(base / f"machine-{has_copy}")

    def act(processes):
        folder = base / f"machine-{processes.index}"
        publisher = opened(client(store), folder, processes)
        held = (folder / "checkpoints" / "00000002" / "shards-1.bin").exists()
        (folder / f"seen-{processes.index}").write_text("a file of this process")
        publisher.publish()
        named = publisher._commit.files["checkpoints/00000002/shards-1.bin"]
        write_step(folder, 2, processes.index)  # as a run that went back does, with the same bytes
        publisher.publish()
        return held, len(named)

    assert together(2, act)[0] == [(False, 1), (has_copy == 1, 1)]
    opened(client(store), tmp_path / "reader")
    found = contents(tmp_path / "reader")
    assert step_of({name: data for name, data in found.items() if not name.startswith("seen")}, tmp_path) == 2
    assert_nothing_left_over(store)


def test_a_step_that_has_lost_its_manifest_does_not_keep_others_from_being_committed(tmp_path):
    store = Store()
    assert train(store, tmp_path / "machines", (2,)) == [None, None]
    lost = next(key for key in store.objects if "/files/checkpoints/00000002/manifest.json" in key[1])
    object_before = store.objects.pop(lost)

    def act(processes):
        folder = tmp_path / f"fresh-{processes.index}"
        publisher = opened(client(store), folder, processes)
        kept, aside = folder / "checkpoints" / "00000002", folder / "aside"
        kept.rename(aside)
        write_step(folder, 6, processes.index)  # which removes the others, and here the last two are kept
        aside.rename(kept)
        try:
            publisher.publish()
        except BucketError as error:
            processes.fail(str(error), 4)
            raise
        return publisher.steps()

    assert together(2, act)[0] == [[2, 6], [2, 6]]
    store.objects[lost] = object_before  # as from a bucket that keeps versions
    opened(client(store), tmp_path / "again")
    assert step_of({n: b for n, b in contents(tmp_path / "again").items() if "00000002" not in n}, tmp_path) == 6
    assert (tmp_path / "again" / "checkpoints" / "00000002" / "manifest.json").read_bytes() == object_before[1]
