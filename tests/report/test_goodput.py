import os

import pytest

from jrl.run.report.goodput import PARTS, goodput, open_goodput, read_goodput


def record(step, **seconds):
    return {"step": step, "seconds": seconds}


def start(step, **seconds):
    return {"start": 1.0, **record(step, **seconds)}


def test_lost_work_and_later_starts_are_restart():
    # First process: killed after step 5 (30 s), the second went on from step 4 (22 s): 8 s were lost.
    # Second process: 3 s to open, 2 s of compiling, 10 s of work to step 6; stopped cleanly.
    # Third process: damaged checkpoints, from step 4 again: all work of the second after its start is lost, 10 s.
    # It takes 1 s to open, then 7 s.
    records = [
        start(0, start=2.0, compile=3.0),
        record(4, start=2.0, compile=5.0, sample=6.0, prepare=1.0, update=7.0),
        record(4, start=2.0, compile=5.0, sample=6.0, prepare=1.0, update=7.0, save=1.0),
        record(5, start=2.0, compile=5.0, sample=9.0, prepare=2.0, update=11.0, save=1.0),
        start(4, start=3.0, compile=2.0),
        record(6, start=3.0, compile=2.0, sample=4.0, update=6.0),
        start(4, start=1.0),
        record(6, start=1.0, sample=2.0, score=1.0, update=2.0, evaluate=0.5, wait=0.5, other=1.0),
    ]
    found = goodput(records)
    assert found["seconds"] == {
        "compile": 5.0,
        "sample": 6.0 + 2.0,
        "score": 1.0,
        "update": 1.0 + 7.0 + 2.0,  # packing is part of it
        "save": 1.0,
        "evaluate": 0.5,
        "wait": 0.5,
        "restart": 8.0 + (3.0 + 2.0 + 10.0) + 1.0,
        "trace": 0.0,
        "other": 2.0 + 1.0,  # opening the first time
    }
    assert found["total"] == 30.0 + 15.0 + 8.0 == sum(found["seconds"].values()) and found["starts"] == 3
    assert found["goodput"] == pytest.approx(19.0 / 53.0) and sum(found["share"].values()) == pytest.approx(1.0)
    assert tuple(found["seconds"]) == tuple(found["share"]) == PARTS


def test_a_process_that_began_anew_loses_all_of_the_one_before():
    found = goodput([start(0, start=1.0), record(3, start=1.0, update=5.0), start(0, start=2.0)])
    # Of the first process its own start is kept, and 5 s are lost; the second has cost 2 s so far.
    assert found["seconds"]["other"] == 1.0 and found["seconds"]["restart"] == 7.0 and found["total"] == 8.0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has one")
def test_a_line_that_a_full_disk_refuses_is_told_once(tmp_path, monkeypatch):
    monkeypatch.setattr("jrl.paths.open_append", lambda path, size: open("/dev/full", "ab"))
    written = open_goodput(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        written.append(start(0, start=1.0))
    written.close()


def test_no_record_has_no_goodput(tmp_path):
    assert goodput(read_goodput(tmp_path)) is None


def test_a_line_that_a_kill_has_cut_is_dropped(tmp_path):
    written = open_goodput(tmp_path)
    written.append(start(0, start=1.0))
    written.close()
    with open(tmp_path / "goodput.jsonl", "ab") as file:
        file.write(b'\0\0\0\n{"step": 1, "sec')  # and one that a loss of power has damaged
    assert read_goodput(tmp_path) == [start(0, start=1.0)]
    written = open_goodput(tmp_path)
    written.append(record(2, update=0.123456))
    written.close()
    assert read_goodput(tmp_path) == [start(0, start=1.0), record(2, update=0.1235)]
