"""A run that has ended is started again: nothing to do, its checkpoints removed, its metrics damaged."""

import json
import shutil

import pytest
from small_model import BIGRAM, part_in

from jrl import cli, loop
from jrl.commands import start
from jrl.run.report import rollouts

SMALL = [BIGRAM, "Online.prompts=4", "Online.samples=2", "Checkpoint.every=1", "Log.samples=0", "Scoring.workers=1"]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    part = part_in(tmp_path_factory.mktemp("part"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "prepare_jax", lambda args, platform=None: None)

        def train(folder, *more, steps=2):
            named = {text.partition("=")[0]: text for text in [*SMALL, *more, f"Online.steps={steps}"]}
            return cli.main(["train", "configs/tiny.gin", part, *named.values(), "--run", str(folder)])

        yield train


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


def test_a_run_that_goes_on_with_more_steps_is_not_finished_until_it_ends_again(train, copied, monkeypatch):
    """`tpu/resume.sh` and `jrl doctor` take a run with a summary for one that has ended."""
    began = []
    monkeypatch.setattr(loop, "begin_stage", lambda *_: began.append((copied / "summary.json").exists()) or 1 / 0)
    assert train(copied, steps=3) == 1
    assert began == [False]
    monkeypatch.undo()
    assert train(copied, steps=2) == 0  # as before it was asked for more
    assert json.loads((copied / "summary.json").read_text())["steps"] == 2


def test_fewer_steps_than_a_stopped_run_has_are_nothing_to_do_each_time(train, copied, capsys):
    (copied / "summary.json").unlink()  # as a run that was stopped on its way
    for _ in range(2):
        assert train(copied, steps=1) == 5
        assert "already has 2 steps; you asked for 1. Nothing to do." in capsys.readouterr().out
    assert train(copied, steps=3) == 0


def test_a_change_after_which_nothing_would_be_trained_is_refused_and_not_recorded(train, copied, capsys):
    described = lambda: [(copied / name).read_bytes() for name in ("config.gin", "manifest.json", "summary.json")]
    before = described()
    assert train(copied, "Regex.weight=0.5", "--accept-change", steps=1) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "has done 2 steps, and this configuration has 1: nothing would be trained with the change" in said
    assert described() == before
    assert train(copied, "Regex.weight=0.5", "--accept-change", steps=3) == 0


def test_a_run_of_which_only_the_end_is_missing_is_ended(train, copied, capsys):
    (copied / "summary.json").unlink()
    for code, said in ((0, "Resumed after step 2 of 2."), (5, "already has all 2 steps. Nothing to do.")):
        assert train(copied) == code and said in capsys.readouterr().out


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


def test_a_run_that_was_killed_before_its_first_save_may_save_earlier_when_it_starts_over(train, tmp_path, capsys):
    folder = tmp_path / "run"
    assert train(folder, "Checkpoint.every=9") == 0
    shutil.rmtree(folder / "checkpoints")  # as if it was killed in the save of the last step
    (folder / "summary.json").unlink()
    assert train(folder) == 0
    assert "starting over" in capsys.readouterr().out
    shutil.rmtree(folder / "checkpoints")
    (folder / "summary.json").unlink()
    assert train(folder, "Checkpoint.every=9") == 6  # these steps were done by a run that saved after each


def test_damaged_metrics_are_noticed(train, copied, capsys):
    path = copied / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"phase": "rl"', b'"phase": "xx"', 1))
    damaged = path.read_bytes()
    assert train(copied, steps=3) == 2
    assert "has other rows before byte" in capsys.readouterr().err
    assert path.read_bytes() == damaged


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [flip, lambda path: path.unlink()])
def test_damaged_rollouts_are_noticed_where_the_next_are_written(train, copied, capsys, damage):
    damage(copied / "rollouts" / "reward" / "c" / "0")
    assert train(copied, steps=3) == 2
    assert "rollouts/reward is damaged where the next rollouts are written" in capsys.readouterr().err
    assert cli.main(["doctor", str(copied)]) == 4
    shown = capsys.readouterr().out
    assert "!!  rollouts/reward/c/0 (entries 0 to 15): " in shown and "put back a good copy" in shown


def test_damage_to_older_rollouts_is_warned_of_or_found_by_doctor(train, tmp_path, monkeypatch, capsys):
    for name in ("_CHUNK_ROWS", "_MOST_CHUNK_ROWS"):
        monkeypatch.setattr(rollouts, name, 8)  # a step
    run = tmp_path / "run"
    assert train(run) == 0
    flip(run / "rollouts" / "tokens" / "c" / "0" / "0")
    (run / "rollouts" / "reward" / "c" / "0").unlink()
    assert train(run, steps=3) == 0
    shown = capsys.readouterr()
    assert "stored rollouts are lost: reward/c/0 (entries 0 to 7)" in shown.out + shown.err
    assert cli.main(["doctor", str(run)]) == 4
    shown = capsys.readouterr().out
    assert "!!  rollouts/tokens/c/0/0 (entries 0 to 7)" in shown and "!!  rollouts/reward/c/0 (entries 0 to 7)" in shown


def test_doctor_reads_every_chunk(copied, capsys):
    cli.main(["doctor", str(copied)])
    assert "chunks are intact" in capsys.readouterr().out


def test_doctor_compares_files_with_the_checkpoint_that_a_resume_uses(train, copied, capsys):
    older, newer = sorted((copied / "checkpoints").iterdir())
    path, saved = copied / "metrics.jsonl", json.loads((older / "host.json").read_text())["metrics_offset"]
    path.write_bytes(path.read_bytes()[:saved])
    assert cli.main(["doctor", str(copied)]) == 4
    assert f"{path} holds {saved} bytes but the checkpoint committed" in capsys.readouterr().out
    flip(newer / "state" / "_CHECKPOINT_METADATA")
    assert cli.main(["doctor", str(copied)]) == 4
    shown = capsys.readouterr().out
    assert "ok  a resume uses the checkpoint of step 1" in shown and "ok  metrics.jsonl has 1 row" in shown
    assert train(copied, steps=3) == 0


def test_a_weight_that_overflows_the_mean_stops_the_run_and_is_named(train, tmp_path, capsys):
    run = tmp_path / "run"
    assert train(run, "Regex.weight=3.4e38", "Regex.pattern='[^z]*'") == 4
    said = capsys.readouterr().err
    assert "most of it from Regex, whose weight is 3.4e+38" in said and "more than float32 holds" in said
    assert not (run / "metrics.jsonl").exists() or "Infinity" not in (run / "metrics.jsonl").read_text()


def test_a_first_verifier_that_nothing_can_be_correct_by_is_noted(train, tmp_path, capsys):
    said = "Repetition, the first of Scoring.verifiers, says what is correct, and gives no reward above 0"
    for verifiers, notes in (("@Repetition(), @Regex()", 1), ("@Regex(), @Repetition()", 0)):
        assert train(tmp_path / str(notes), f"Scoring.verifiers=[{verifiers}]", steps=1) == 0
        assert " ".join(capsys.readouterr().out.split()).count(said) == notes


def test_a_rate_that_falls_to_0_before_the_end_is_noted(train, tmp_path, capsys):
    said = "the learning rate of the role policy falls to 0 (CosineDecay) after 2 of the 3 updates of stage rl"
    for name, further, notes in (("early", [], 1), ("end", ["CosineDecay.end=0.1"], 0)):
        schedule = [
            "AdamW.schedule=@CosineDecay()",
            "CosineDecay.decay_steps=1",
            "CosineDecay.warmup_steps=1",
            *further,
        ]
        assert train(tmp_path / name, *schedule, steps=3) == 0
        assert " ".join(capsys.readouterr().out.split()).count(said) == notes


def test_a_policy_that_collapses_is_warned_of_and_a_resume_knows_when_it_did(train, tmp_path, capsys):
    collapse = ["AdamW.learning_rate=30.0", "Run.seed=1"]
    train(tmp_path / "run", *collapse, steps=5)
    assert "no learning signal" not in capsys.readouterr().out
    train(tmp_path / "run", *collapse, steps=10)
    out = capsys.readouterr().out
    assert out.count("Warning: no learning signal in the last 5 steps") == 1
    assert "Done: 10 steps" in out and "jrl doctor" in out and "Try the policy" not in out


def test_the_configuration_of_a_run_is_the_one_that_it_continues_with(train, copied):
    configured = lambda: (copied / "config.gin").read_text()
    before, began = configured(), json.loads((copied / "manifest.json").read_text())["identity"]
    assert "steps = 2" in before
    assert train(copied, "Log.rollouts=False", steps=1) == 5 and configured() == before  # nothing to do
    assert train(copied, "Checkpoint.keep=5", steps=3) == 0
    assert configured() == before.replace("steps = 2", "steps = 3").replace("keep = 2", "keep = 5")
    assert json.loads((copied / "config.json").read_text())["stages"][0]["steps"] == 3
    assert json.loads((copied / "manifest.json").read_text())["identity"] == began
