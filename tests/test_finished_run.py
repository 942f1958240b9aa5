"""A run that has ended is started again: nothing to do, its checkpoints removed, its metrics damaged."""

import json
import shutil

import pytest
from small_model import BIGRAM, part_in

from jrl import cli

SMALL = [BIGRAM, "Online.prompts=4", "Online.samples=2", "Checkpoint.every=1", "Log.samples=0", "Scoring.workers=1"]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    part = part_in(tmp_path_factory.mktemp("part"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "prepare_jax", lambda args, platform=None: None)
        yield lambda folder, steps=2: cli.main(
            ["train", "configs/tiny.gin", part, *SMALL, f"Online.steps={steps}", "--run", str(folder)]
        )


@pytest.fixture(scope="module")
def finished(tmp_path_factory, train):
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert train(folder) == 0
    return folder


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def test_a_run_is_for_its_owner_only(finished):
    assert finished.stat().st_mode & 0o777 == 0o700


def test_nothing_to_do_has_an_exit_code_of_its_own(train, copied, capsys):
    before = (copied / "metrics.jsonl").read_bytes()
    assert train(copied) == 5
    assert "already has all 2 steps" in capsys.readouterr().out
    assert (copied / "metrics.jsonl").read_bytes() == before
    assert train(copied, steps=3) == 0  # and further steps are something


def test_fewer_steps_than_a_stopped_run_has_are_nothing_to_do_each_time(train, copied, capsys):
    (copied / "summary.json").unlink()  # as a run that was stopped on its way
    for _ in range(2):
        assert train(copied, steps=1) == 5
        assert "already has 2 steps; you asked for 1. Nothing to do." in capsys.readouterr().out
    assert train(copied, steps=3) == 0


def test_a_run_of_which_only_the_end_is_missing_is_ended(train, copied):
    (copied / "summary.json").unlink()
    assert [train(copied), train(copied)] == [0, 5]


def test_removed_checkpoints_have_an_exit_code_of_their_own_and_no_row_is_lost(train, copied, capsys):
    before = (copied / "metrics.jsonl").read_bytes()
    shutil.rmtree(copied / "checkpoints")
    assert train(copied) == 6
    assert "has done 2 steps and holds no checkpoint: they were removed" in capsys.readouterr().err
    (copied / "summary.json").unlink()
    assert train(copied) == 6  # the rows say as much
    assert (copied / "metrics.jsonl").read_bytes() == before


def test_rows_of_steps_that_were_never_saved_are_put_aside(train, copied):
    shutil.rmtree(copied / "checkpoints")
    (copied / "summary.json").unlink()
    rows = (copied / "metrics.jsonl").read_bytes()
    first = rows[: rows.index(b"\n") + 1]
    (copied / "metrics.jsonl").write_bytes(first)  # killed in the first save: its row is written before
    assert train(copied) == 0
    assert (copied / "metrics.jsonl.1").read_bytes() == first
    steps = [json.loads(line)["step"] for line in (copied / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]


def test_damaged_metrics_are_noticed(train, copied, capsys):
    path = copied / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"phase": "rl"', b'"phase": "xx"', 1))
    damaged = path.read_bytes()
    assert train(copied, steps=3) == 2
    assert "has other rows before byte" in capsys.readouterr().err
    assert path.read_bytes() == damaged
