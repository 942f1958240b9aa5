"""Answers on disk: what is read is whole, whatever a kill or a full disk left."""

from __future__ import annotations

import hashlib

import pytest

from jrl.tasks.judges.cache import AnswerCache

KEYS = [hashlib.sha256(bytes([i])).hexdigest() for i in range(3)]


@pytest.fixture
def path(tmp_path):
    cache = AnswerCache(tmp_path / "judges" / "answers.jsonl")
    for key, text in zip(KEYS, ["one", "zwei\nü\ud800", "{}" * 999]):
        cache.add(key, text)
    cache.add(KEYS[0], "another")  # the first one stays
    assert cache.recall(KEYS[0]) == "one"
    cache.sync()
    cache.close()
    return cache.path


def test_answers_are_there_when_it_is_opened_again(path):
    cache = AnswerCache(path)
    assert [cache.recall(key) for key in KEYS] == ["one", "zwei\nü\ud800", "{}" * 999]
    assert cache.recall("00" * 32) is None and len(cache) == 3
    cache.close()


@pytest.mark.parametrize("left", [1, 20, -1])
def test_a_last_line_that_was_cut_short_is_dropped_and_overwritten(path, left):
    data = path.read_bytes()
    begins = data[:-1].rfind(b"\n") + 1
    path.write_bytes(data[: begins + left] if left > 0 else data[:left])
    cache = AnswerCache(path)
    assert [cache.recall(key) for key in KEYS] == ["one", "zwei\nü\ud800", None]
    cache.add(KEYS[2], "again")
    cache.close()
    cache = AnswerCache(path)
    assert cache.recall(KEYS[2]) == "again" and path.read_bytes().count(b"\n") == 3
    cache.close()


def test_a_line_that_is_no_answer_is_refused_with_its_number(path):
    path.write_bytes(path.read_bytes().replace(b'"key"', b'"kee"', 2).replace(b'"kee"', b'"key"', 1))
    with pytest.raises(ValueError, match=r"answers.jsonl, line 2: not an answer of a judge.*delete the file"):
        AnswerCache(path)


def test_an_entry_that_the_disk_does_not_take_is_cut_back(path):
    cache = AnswerCache(path)
    whole = path.read_bytes()

    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, line):
            return self.file.write(line[:7])

        def __getattr__(self, name):
            return getattr(self.file, name)

    cache._file = Full(cache._file)
    with pytest.raises(OSError, match="the disk took 7 of"):
        cache.add("00" * 32, "more")
    assert path.read_bytes() == whole and cache.recall("00" * 32) is None
    cache.close()
