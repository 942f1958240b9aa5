import hashlib
import json
import os
import resource

import pytest

from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers import VerifierSpec
from jrl.tasks.verifiers.journal import Journal, journal_key, rows_text

LATE = (Verdict(Status.CPU_LIMIT, None, "2.0 s of CPU time"), Verdict(Status.CORRECT, 1.0))
ROWS = [VerifierSpec("Exact", {"weight": 1.0})]


def test_what_is_kept_is_heard_again_after_reopening(tmp_path):
    path = tmp_path / "run" / "journal.jsonl"
    journal = Journal(path)
    assert journal.recall("a") is None
    journal.keep([("a", LATE)])
    journal.keep([("a", LATE), ("b", LATE[:1])])
    journal.close()
    again = Journal(path)
    assert (again.recall("a"), again.recall("b"), again.recall("c")) == (LATE, LATE[:1], None)
    assert len(again) == 2
    again.close()


def test_what_is_kept_is_on_the_disk(tmp_path, synced):
    journal = Journal(tmp_path / "journal.jsonl")
    assert synced(tmp_path)  # the name of a new file
    for key in "ab":
        journal.keep([(key, LATE)])
        assert synced(journal.path)
    journal.close()


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.keep([("a", LATE)])
    before, sync = journal.path.read_bytes(), os.fsync

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        journal.keep([("b", LATE)])
    assert journal.path.read_bytes() == before and journal.recall("b") is None
    monkeypatch.setattr(os, "fsync", sync)
    journal.keep([("b", LATE)])
    journal.close()
    again = Journal(journal.path)
    assert len(again) == 2
    again.close()


def test_a_disk_that_takes_a_part_leaves_whole_lines_also_after_it_has_room_again(tmp_path):
    """A limit of a file's size is a disk that gets full in the middle of a write."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.keep([("a", LATE)])
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            journal.keep([("b", LATE)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    journal.keep([("c", LATE)])
    journal.close()
    again = Journal(path)
    assert [again.recall(key) for key in "abc"] == [LATE, None, LATE]
    again.close()


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_line_cut_short_by_a_kill_is_dropped_and_the_file_goes_on(tmp_path, cut):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.keep([("a", LATE)])
    size = path.stat().st_size
    journal.keep([("b", LATE)])
    journal.close()
    os.truncate(path, path.stat().st_size - cut)
    again = Journal(path)
    assert path.stat().st_size == size
    assert (again.recall("a"), again.recall("b")) == (LATE, None)
    again.keep([("c", LATE)])
    again.close()
    third = Journal(path)
    assert third.recall("c") == LATE
    third.close()


def test_a_line_that_is_no_entry_is_refused_by_its_place(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"key": "a", "verdicts": []}\nnonsense\n')
    with pytest.raises(ValueError, match=r"journal\.jsonl, line 2"):
        Journal(path)


def test_the_key_names_visit_sample_text_example_and_verifiers():
    base = ((1, 2), 0, "text", "example", rows_text(ROWS))
    key = journal_key(*base)
    assert key == journal_key(*base)
    content = json.dumps(["text", "example", [[row.name, row.fields] for row in ROWS]], sort_keys=True)
    assert key == f"0000000100000002/0/{hashlib.sha256(content.encode()).hexdigest()}"  # journals outlive versions
    others = [
        ((1, 3), 0, "text", "example", rows_text(ROWS)),
        ((1, 2), 1, "text", "example", rows_text(ROWS)),
        ((1, 2), 0, "text ", "example", rows_text(ROWS)),
        ((1, 2), 0, "text", "other", rows_text(ROWS)),
        ((1, 2), 0, "text", "example", rows_text([VerifierSpec("Exact", {"weight": 2.0})])),
    ]
    assert len({key, *(journal_key(*other) for other in others)}) == 6
