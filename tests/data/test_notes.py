"""What a run says of its examples."""

from __future__ import annotations

import jrl
from jrl.run.data import RunData, note_counts, showing_rows


class Counted:
    def __init__(self, **counts):
        self.counts = counts

    def __len__(self):
        return 300


def test_examples_that_are_kept_are_told_from_those_that_are_dropped():
    config, _ = jrl.load_config("configs/tiny.gin")

    def notes(**counts):
        said = []
        note_counts(config, RunData(Counted(**counts), []), said.append)
        return said

    assert notes() == []
    assert notes(duplicate_prompt=100) == ["300 examples; 100 of them repeat the prompt of another and are kept"]
    assert notes(tied=2, blank=3) == ["300 examples; dropped or noticed: 3 blank, 2 tied"]
    both = "300 examples; 1 of them repeats the prompt of another and is kept; dropped or noticed: 3 blank"
    assert notes(duplicate_prompt=1, blank=3) == [both]


def test_rows_are_counted_while_they_are_read():
    shown, asked = [], iter([False] * 250 + [True])
    poll = showing_rows(lambda: next(asked), lambda name, done: shown.append((name, done)))
    assert [poll() for _ in range(251)] == [False] * 250 + [True]
    assert shown == [("data", 100), ("data", 200)]
