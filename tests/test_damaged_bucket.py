"""A run in a bucket of which an object is lost goes on from its newest intact step, on a machine that has no copy."""

import copy
import re

import pytest
from bucket_stand_in import addressed, client
from small_model import BIGRAM, part_in

from jrl import cli, loop
from jrl.commands import start

RUN = "gs://bucket/run"
SMALL = [BIGRAM, "Online.prompts=4", "Online.samples=2", "Checkpoint.every=2", "Log.samples=0", "Scoring.workers=1"]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Yields (store, train(steps, machine)) of a run with checkpoints of steps 2 and 4."""
    part, machines = part_in(tmp_path_factory.mktemp("part")), tmp_path_factory.mktemp("machines")
    with pytest.MonkeyPatch.context() as patch, addressed(machines / "first", patch) as store:
        patch.setattr(start, "prepare_jax", lambda args, platform=None: None)

        def train(steps, machine):
            patch.setenv("JRL_BUCKET_COPIES", str(machines / machine))
            return cli.main(["train", "configs/tiny.gin", part, *SMALL, f"Online.steps={steps}", "--run", RUN])

        assert train(4, "first") == 0
        yield store, train


@pytest.fixture
def damaged(train):
    """Yields `lose(pattern)`, which removes objects of the run; they are back afterwards."""
    store, _ = train
    before = copy.deepcopy(store.objects)

    def lose(pattern):
        lost = [key for key in store.objects if re.fullmatch(f"run/files/{pattern}", key[1])]
        assert lost
        for key in lost:
            del store.objects[key]

    yield lose
    store.objects.clear()
    store.objects.update(before)


@pytest.mark.parametrize(
    ("lost", "newest"),
    [("checkpoints/00000004/host.*", 2), ("checkpoints/00000004/.*", 2), ("checkpoints/00000002/manifest.*", 4)],
)
def test_a_run_goes_on_from_its_newest_intact_step(train, damaged, capsys, lost, newest):
    damaged(lost)
    assert train[1](5, f"fresh {newest} {len(lost)}") == 0
    shown = capsys.readouterr()
    assert f"Resumed after step {newest} of 5" in shown.out
    assert ("step 4 is damaged" in shown.out) == (newest == 2)
    assert train[1](6, f"fresh again {newest} {len(lost)}") == 0  # and is whole afterwards
    assert "Resumed after step 5 of 6" in capsys.readouterr().out


def test_a_run_that_goes_on_with_more_steps_commits_at_once_that_it_has_not_ended(train, damaged, monkeypatch):
    """Slices that are lost before the first commit of a checkpoint are made again (tpu/resume.sh)."""
    has_ended = lambda: b'"summary.json"' in client(train[0]).get("run/run.json")[0]
    seen = [has_ended()]
    monkeypatch.setattr(loop, "begin_stage", lambda *_: seen.append(has_ended()) or 1 / 0)
    assert train[1](6, "fresh more") == 1 and seen == [True, False]


def test_a_run_without_an_intact_step_is_refused_and_stays_as_it_is(train, damaged, capsys):
    damaged("checkpoints/.*/manifest.*")
    files = lambda: {key: stored[1] for key, stored in train[0].objects.items() if stored[1] and "/files/" in key[1]}
    before = files()
    assert train[1](5, "fresh none") == 4
    shown = capsys.readouterr().err
    assert "no checkpoint in gs://bucket/run is intact (step 4: " in shown and "); nothing was changed" in shown
    assert files() == before


def test_a_run_whose_commit_is_lost_is_refused_at_its_start(train, damaged, capsys):
    del train[0].objects["bucket", "run/run.json"]
    assert train[1](5, "fresh commit") == 3
    assert "holds files of a run, and run.json, which says what they are, was removed" in capsys.readouterr().err
