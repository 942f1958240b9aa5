"""The measurement of the rollout store: every writer commits as often, and no folder of the user's is removed."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from benchmarks import rollout_store


def test_every_writer_commits_after_as_many_steps_as_the_others(tmp_path, monkeypatch):
    commits, opens = {0: 0, 1: 0}, rollout_store.open_rollouts

    def counting(folder, *, rows, writer, writers):
        store = opens(folder, rows=rows, writer=writer, writers=writers)

        def commit():
            commits[writer] += 1
            return store.commit()

        return dataclasses.replace(store, commit=commit)

    monkeypatch.setattr(rollout_store, "open_rollouts", counting)
    monkeypatch.setattr(rollout_store, "COMMIT", 2)
    # Two writers of 4 steps each: 2 commits of 2 steps each.
    rows = 8 * rollout_store.ROWS
    command = ["rollout_store", "--rows", str(rows), "--writers", "2", "--width", "8"]
    monkeypatch.setattr(sys, "argv", [*command, "--folder", str(tmp_path / "new")])
    rollout_store.main()
    assert commits == {0: 2, 1: 2}


def test_a_folder_that_exists_is_not_removed(tmp_path, monkeypatch):
    (tmp_path / "mine").write_text("kept")
    monkeypatch.setattr(sys, "argv", ["rollout_store", "--rows", "1", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit):
        rollout_store.main()
    assert (tmp_path / "mine").read_text() == "kept"
