from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from jrl.run.report import rollouts
from jrl.run.report.rollouts import (
    LOCK,
    WRITER,
    lost_chunks,
    open_rollouts,
    read_every_chunk,
    read_rollouts,
    snapshot,
    writer_folder,
)


def step_of(number: int, rows: int = 4, width: int = 6):
    """One step: every value says which step and row it is from."""
    rng = np.random.default_rng(number)
    fields = {
        "tokens": rng.integers(0, 99, size=(rows, width)).astype(np.int32),
        "action_mask": rng.random((rows, width)) < 0.5,
        "sampler_logprobs": rng.normal(size=(rows, width)).astype(np.float32),
        "truncated_logprobs": None,
        "finish": np.arange(rows, dtype=np.int8),
        "group": np.arange(rows, dtype=np.int32) // 2,
        "weights_fingerprint": np.uint32(number),
        "reward": rng.random(rows).astype(np.float32),
    }
    prompts = [f"prompt {number} é\n{row}" for row in range(rows)]
    completions = ["" if row == 1 else f"completion {number}.{row} 🙂" * (row + 1) for row in range(rows)]
    ids = [f"example-{number}-{group}" for group in range(rows // 2)]
    uids = np.array([[number, group] for group in range(rows // 2)], np.uint32)
    return number, fields, prompts, completions, ids, uids


def fill(store, *numbers: int) -> None:
    for number in numbers:
        store.append(*step_of(number))


def assert_holds(folder: Path, numbers: list[int]) -> None:
    rows = read_rollouts(folder)
    assert snapshot(folder).rows == len(rows["completion"]) == 4 * len(numbers)
    for place, number in enumerate(numbers):
        cut = slice(4 * place, 4 * place + 4)
        _, fields, prompts, completions, ids, uids = step_of(number)
        assert rows["step"][cut].tolist() == [number] * 4
        for name, value in fields.items():
            if value is not None:
                np.testing.assert_array_equal(rows[name][cut], value)
                assert rows[name].dtype == value.dtype
        assert rows["prompt"][cut] == prompts and rows["completion"][cut] == completions
        assert rows["example_id"][cut] == [ids[0], ids[0], ids[1], ids[1]]
        assert rows["uid"][cut].tolist() == [uids[g].tolist() for g in (0, 0, 1, 1)]
    assert "truncated_logprobs" not in rows


def test_steps_read_back_as_they_were_appended(tmp_path):
    store = open_rollouts(tmp_path, rows=0)
    fill(store, 1, 2)
    assert store.commit() == 8
    fill(store, 3)
    assert snapshot(tmp_path).rows == 8
    store.close()
    store.close()
    assert_holds(tmp_path, [1, 2, 3])
    part = read_rollouts(tmp_path, 3, 6)
    rows = read_rollouts(tmp_path)
    assert part["completion"] == rows["completion"][3:6]
    np.testing.assert_array_equal(part["tokens"], rows["tokens"][3:6])
    assert read_rollouts(tmp_path, 5, 5)["prompt"] == []


def test_a_relative_folder_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = open_rollouts("rollouts", rows=0)
    fill(store, 1)
    store.close()
    assert_holds(Path("rollouts"), [1])


def test_a_folder_named_with_dots_works(tmp_path):
    (tmp_path / "in").mkdir()
    store = open_rollouts(tmp_path / "in" / ".." / "store", rows=0)
    fill(store, 1)
    store.close()
    assert_holds(tmp_path / "in" / ".." / "store", [1])
    assert_holds(tmp_path / "store", [1])


def test_a_resumed_store_drops_what_the_checkpoint_does_not_know(tmp_path):
    store = open_rollouts(tmp_path, rows=0)
    fill(store, 1)
    committed = store.commit()
    fill(store, 2, 3)
    store.close()
    store = open_rollouts(tmp_path, rows=committed)
    assert_holds(tmp_path, [1])
    fill(store, 7, 8)
    store.close()
    assert_holds(tmp_path, [1, 7, 8])


def test_opening_at_zero_starts_over_and_more_than_there_is_is_refused(tmp_path):
    store = open_rollouts(tmp_path, rows=0)
    fill(store, 1)
    store.close()
    with pytest.raises(ValueError, match="holds 4 rollouts but the checkpoint committed 8"):
        open_rollouts(tmp_path, rows=8)
    assert_holds(tmp_path, [1])
    store = open_rollouts(tmp_path, rows=0)
    fill(store, 2)
    store.close()
    assert_holds(tmp_path, [2])


@pytest.mark.parametrize("damage", ["flipped", "cut", "removed"])
def test_damage_to_any_chunk_is_an_error_of_whoever_reads_it(tmp_path, damage):
    store = open_rollouts(tmp_path / "sound", rows=0)
    fill(store, 1, 2)
    store.append(*[*step_of(3)[:1], {**step_of(3)[1], "reward": np.zeros(4, np.float32)}, *step_of(3)[2:]])
    store.close()
    chunks = sorted(path.relative_to(tmp_path / "sound") for path in (tmp_path / "sound").glob("*/c/**/*"))
    chunks = [chunk for chunk in chunks if (tmp_path / "sound" / chunk).is_file()]
    assert len(chunks) == 15  # step, uid, 7 fields, 3 texts and where each of them ends
    for number, chunk in enumerate(chunks):
        folder = shutil.copytree(tmp_path / "sound", tmp_path / str(number))
        data = bytearray((folder / chunk).read_bytes())
        if damage == "flipped":
            data[len(data) // 2] ^= 1
        if damage == "removed":
            (folder / chunk).unlink()
        else:
            (folder / chunk).write_bytes(data if damage == "flipped" else data[:-1])
        with pytest.raises(ValueError, match=f"is damaged: .*{chunk.parts[0]}.*put back good copies") as refused:
            read_rollouts(folder)
        assert "\n" not in str(refused.value)
        count, damaged = read_every_chunk(folder)
        assert count == 15 and len(damaged) == 1 and damaged[0].startswith(f"{chunk} (entries 0 to ")
        assert [lost.split(" ")[0] for lost in lost_chunks(folder)] == [str(chunk)] * (damage == "removed")
        with pytest.raises(ValueError, match="is damaged where the next rollouts are written"):
            open_rollouts(folder, rows=12)
    assert read_every_chunk(tmp_path / "sound") == (15, []) and lost_chunks(tmp_path / "sound") == []


def test_every_chunk_of_a_column_is_looked_for_and_read(tmp_path, monkeypatch):
    for name in ("_CHUNK_ROWS", "_MOST_CHUNK_ROWS"):
        monkeypatch.setattr(rollouts, name, 4)
    store = open_rollouts(tmp_path, rows=0)
    fill(store, 1, 2, 3)
    store.close()
    count, damaged = read_every_chunk(tmp_path)
    assert (count, damaged) == (3 * 12 + 3, [])  # of 9 columns and the ends of 3 texts; and their bytes
    flipped, removed = tmp_path / "reward" / "c" / "1", tmp_path / "tokens" / "c" / "0" / "0"
    data = bytearray(flipped.read_bytes())
    data[5] ^= 16
    flipped.write_bytes(data)
    removed.unlink()
    count, damaged = read_every_chunk(tmp_path)
    assert count == 39 and [text.split(": ")[0] for text in damaged] == [
        "tokens/c/0/0 (entries 0 to 3)",
        "reward/c/1 (entries 4 to 7)",
    ]
    assert "the chunk is missing" in damaged[0] and "Error reading" in damaged[1]
    assert lost_chunks(tmp_path) == ["tokens/c/0/0 (entries 0 to 3)"]
    empty, data = tmp_path / "group" / "c" / "2", (tmp_path / "group" / "c" / "2").read_bytes()
    empty.write_bytes(b"")
    assert {lost.split(" ")[0] for lost in lost_chunks(tmp_path)} == {"tokens/c/0/0", "group/c/2"}
    empty.write_bytes(data)
    open_rollouts(tmp_path, rows=12).close()  # nothing is written there
    (tmp_path / "reward" / "zarr.json").write_bytes(b"{")
    assert any(text.startswith("reward: ") for text in read_every_chunk(tmp_path)[1])


def test_chunks_are_looked_for_by_one_listing_of_each_folder(tmp_path, monkeypatch):
    for name in ("_CHUNK_ROWS", "_MOST_CHUNK_ROWS"):
        monkeypatch.setattr(rollouts, name, 4)
    store = open_rollouts(tmp_path, rows=0)
    fill(store, 1, 2, 3)
    store.close()
    asked, listed, stat, scandir = [], [], os.stat, os.scandir
    monkeypatch.setattr(os, "stat", lambda path, *a, **k: asked.append(str(path)) or stat(path, *a, **k))
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(str(path)) or scandir(path))
    assert lost_chunks(tmp_path) == []
    assert not [path for path in asked if "/c/" in path]
    assert len(listed) == len(set(listed)) and str(tmp_path / "tokens" / "c" / "0") in listed


def test_padding_rows_are_not_kept(tmp_path):
    store = open_rollouts(tmp_path, rows=0)
    number, fields, prompts, completions, ids, uids = step_of(1)
    store.append(number, fields, prompts[:2], completions[:2], ids[:1], uids[:1])
    store.close()
    rows = read_rollouts(tmp_path)
    np.testing.assert_array_equal(rows["tokens"], fields["tokens"][:2])
    assert rows["completion"] == completions[:2]


def test_steps_of_another_width_share_the_columns(tmp_path):
    store = open_rollouts(tmp_path, rows=0)
    store.append(*step_of(1, width=4))
    store.commit()
    store.append(*step_of(2, width=6))
    store.append(*step_of(3, width=2))
    store.close()
    tokens = read_rollouts(tmp_path)["tokens"]
    assert tokens.shape == (12, 6)
    np.testing.assert_array_equal(tokens[:4, :4], step_of(1, width=4)[1]["tokens"])
    np.testing.assert_array_equal(tokens[4:8], step_of(2, width=6)[1]["tokens"])
    np.testing.assert_array_equal(tokens[8:, :2], step_of(3, width=2)[1]["tokens"])
    assert not tokens[:4, 4:].any() and not tokens[8:, 2:].any()


def test_a_step_that_does_not_fit_is_refused_by_name(tmp_path):
    store = open_rollouts(tmp_path, rows=0)
    fill(store, 1)
    number, fields, prompts, completions, ids, uids = step_of(2)
    with pytest.raises(ValueError, match=r"fields of the first; \['reward'\] differ"):
        store.append(number, {**fields, "reward": None}, prompts, completions, ids, uids)
    with pytest.raises(ValueError, match=r"'reward' is float64\[\], the store has float32\[\]"):
        store.append(number, {**fields, "reward": np.ones(4)}, prompts, completions, ids, uids)
    with pytest.raises(ValueError, match="'finish' of a rollout has 3 rows, its texts 4"):
        store.append(number, {**fields, "finish": np.zeros(3, np.int8)}, prompts, completions, ids, uids)
    with pytest.raises(ValueError, match="3 prompts and 4 completions"):
        store.append(number, fields, prompts[:3], completions, ids, uids)
    with pytest.raises(ValueError, match="object array"):
        store.append(number, {**fields, "info": np.array([{}] * 4)}, prompts, completions, ids, uids)
    with pytest.raises(ValueError, match="1 example_ids for 4 rollouts; give one a row or one a prompt"):
        store.append(number, fields, prompts, completions, ids[:1], uids)
    store.append(number, fields, prompts, completions, ids, uids)
    store.close()
    assert_holds(tmp_path, [1, 2])


def test_no_store_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="is not a rollout store"):
        read_rollouts(tmp_path / "none")
    store = open_rollouts(tmp_path, rows=0)
    fill(store, 1)
    store.close()
    with pytest.raises(ValueError, match=r"rows 2 to 9 are not in .*, which holds 4"):
        read_rollouts(tmp_path, 2, 9)


def test_a_lone_surrogate_does_not_lose_the_step(tmp_path):
    store = open_rollouts(tmp_path, rows=0)
    number, fields, prompts, completions, ids, uids = step_of(1)
    store.append(number, fields, prompts, ["a\ud800b", *completions[1:]], ids, uids)
    store.close()
    assert read_rollouts(tmp_path)["completion"][0] == "a?b"


CHILD = textwrap.dedent("""
    import sys
    sys.path.insert(0, sys.argv[2])
    from tests.report.test_rollouts import fill
    from jrl.run.report.rollouts import open_rollouts
    store = open_rollouts(sys.argv[1], rows=0)
    for number in range(1, 10_000):
        fill(store, number)
        print(store.commit(), flush=True)
    """)


@pytest.mark.parametrize("commits", [1, 4])
def test_a_killed_run_leaves_whole_committed_rows(tmp_path, commits):
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path / "run"), str(Path(__file__).parents[2])],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    committed = [int(process.stdout.readline()) for _ in range(commits)][-1]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert snapshot(tmp_path / "run").rows >= committed
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    open_rollouts(tmp_path / "copy", rows=committed).close()
    assert_holds(tmp_path / "copy", list(range(1, commits + 1)))


def test_a_lock_that_a_killed_write_left_does_not_spoil_the_file(tmp_path):
    """TensorStore writes over a lock without cutting it: a shorter file would keep the end of a longer one."""
    store = open_rollouts(tmp_path, rows=0)
    fill(store, 1)
    committed = store.commit()
    fill(store, 2)
    store.close()
    for path in list(tmp_path.rglob("zarr.json")):
        path.with_name(path.name + LOCK).write_bytes(path.read_bytes())  # with the larger shape in it
    open_rollouts(tmp_path, rows=committed).close()
    assert_holds(tmp_path, [1])


def test_a_full_disk_keeps_the_rows_waiting(tmp_path):
    store = open_rollouts(tmp_path, rows=0)
    fill(store, 1)
    store.commit()
    fill(store, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        with pytest.raises(OSError, match="4 rollouts could not be written"):
            store.commit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert snapshot(tmp_path).rows == 4
    assert store.commit() == 8
    store.close()
    assert_holds(tmp_path, [1, 2])


# Several writers

WRITER_STEP = 10_000  # writer w appends steps w * WRITER_STEP + 1, + 2 ...
WRITERS = textwrap.dedent("""
    import sys
    sys.path.insert(0, sys.argv[2])
    from tests.report.test_rollouts import WRITER_STEP, fill, rows_of_writer
    from jrl.run.report.rollouts import open_rollouts
    writer, back = int(sys.argv[3]), int(sys.argv[4])
    rows = max(rows_of_writer(sys.argv[1], writer) - 4 * back, 0)
    store = open_rollouts(sys.argv[1], rows=rows, writer=writer, writers=2)
    for step in range(rows // 4 + 1, WRITER_STEP):
        fill(store, writer * WRITER_STEP + step)
        print(store.commit(), flush=True)
    """)


def rows_of_writer(folder, writer: int) -> int:
    """Returns how many rows a writer's index counts; 0 where it has none."""
    index = writer_folder(folder, writer) / "index.json"
    return json.loads(index.read_text())["rows"] if index.exists() else 0


def assert_rows_of_writers(store) -> int:
    """Checks every row of a snapshot of two writers against what they append, and returns how many there are."""
    rows = store.read()
    place = 0
    for folder, index in store.parts:
        writer = int(folder.name.removeprefix(WRITER)) if folder.name.startswith(WRITER) else 0
        assert index["rows"] % 4 == 0
        for step in range(1, index["rows"] // 4 + 1):
            number, fields, prompts, completions, _, _ = step_of(writer * WRITER_STEP + step)
            cut = slice(place, place + 4)
            assert rows["step"][cut].tolist() == [number] * 4
            for name, value in fields.items():
                if value is not None:
                    np.testing.assert_array_equal(rows[name][cut], value)
            assert rows["prompt"][cut] == prompts and rows["completion"][cut] == completions
            place += 4
    assert place == store.rows == len(rows["completion"])
    return place


def kill_writers(folder: Path, points: int, seed: int) -> int:
    """Has two processes append to one store, killed at random `points` times, and read meanwhile. Returns its rows."""
    draw = random.Random(seed)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    for _ in range(points):
        command = [sys.executable, "-c", WRITERS, str(folder), str(Path(__file__).parents[2])]
        writers = [
            subprocess.Popen([*command, str(writer), str(draw.randrange(3))], stdout=subprocess.PIPE, text=True,
                             env=environment) for writer in (0, 1)
        ]  # fmt: skip
        committed = [int(process.stdout.readline()) for process in writers]
        read = assert_rows_of_writers(snapshot(folder))  # while both append
        assert read >= sum(committed)
        for process in draw.sample(writers, 2):
            time.sleep(draw.random() * 0.1)
            process.send_signal(signal.SIGKILL)
        for writer, process in enumerate(writers):
            lines = process.communicate()[0].split("\n")[:-1]  # the last may be cut
            last = int(lines[-1]) if lines else committed[writer]
            assert rows_of_writer(folder, writer) >= last
        assert assert_rows_of_writers(snapshot(folder)) >= sum(committed)
    return snapshot(folder).rows


def test_two_writers_killed_while_they_append_leave_whole_rows(tmp_path):
    assert kill_writers(tmp_path / "store", points=3, seed=0) > 0


@pytest.mark.slow
def test_two_writers_killed_at_twenty_random_points_leave_whole_rows(tmp_path):
    rows = kill_writers(tmp_path / "store", points=20, seed=1)
    print(f"{rows} rows of two writers after 20 kills, all of them whole")


def test_the_rows_of_writers_are_read_as_one_store(tmp_path):
    first, second = (open_rollouts(tmp_path, rows=0, writer=writer, writers=2) for writer in (0, 1))
    fill(first, 1)
    first.commit()
    before = snapshot(tmp_path)
    second.append(*step_of(WRITER_STEP + 1, width=9))
    second.commit()
    fill(first, 2)
    first.commit()
    assert (before.rows, len(before.read()["prompt"]), snapshot(tmp_path).rows) == (4, 4, 12)
    every = snapshot(tmp_path).read(1, 11)
    for only in (["step"], ["completion", "reward"], []):
        some = snapshot(tmp_path).read(1, 11, only=only)
        assert sorted(some) == sorted(only)
        assert all(np.array_equal(some[name], every[name]) for name in only)
    assert list(snapshot(tmp_path).read(3, 3, only=["prompt"])) == ["prompt"]
    rows = read_rollouts(tmp_path)
    assert rows["step"].tolist() == [1] * 4 + [2] * 4 + [WRITER_STEP + 1] * 4
    assert rows["tokens"].shape == (12, 9) and not rows["tokens"][:8, 6:].any()
    part = read_rollouts(tmp_path, 6, 9)
    assert part["completion"] == rows["completion"][6:9] and part["step"].tolist() == rows["step"][6:9].tolist()
    assert read_rollouts(tmp_path, 12, 12)["prompt"] == []
    # a run of one process drops what it does not go on with, and a writer that starts over touches its own alone
    open_rollouts(tmp_path, rows=0, writer=0, writers=2).close()
    assert snapshot(tmp_path).rows == 4
    open_rollouts(tmp_path, rows=0)
    assert snapshot(tmp_path).rows == 0 and not (tmp_path / "writer-1").exists()
    with pytest.raises(ValueError, match="writer 2 of 2"):
        open_rollouts(tmp_path, rows=0, writer=2, writers=2)


def test_writers_of_other_fields_are_refused(tmp_path):
    for writer, names in ((0, ["reward", "group"]), (1, ["reward"])):
        store = open_rollouts(tmp_path, rows=0, writer=writer, writers=2)
        number, fields, *rest = step_of(1)
        store.append(
            number, {name: fields[name] for name in names}, *rest[:2], rest[2] * 2, np.zeros((4, 2), np.uint32)
        )
        store.close()
    with pytest.raises(ValueError, match="different fields: group"):
        snapshot(tmp_path)
