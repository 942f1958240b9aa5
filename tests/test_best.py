"""The saved step with the highest held-out accuracy stays, and `--step best` opens it."""

import json
import re
import shutil
import types

import pytest
from short_runs import run
from small_model import PLAIN_DECODER

from jrl import cli, loop
from jrl.resolve import load_config
from jrl.run import trained
from jrl.run.best import Best, best_saved, present_best, update_best
from jrl.run.checkpoints.run_state import DamagedStep, NoIntactStep
from jrl.run.identity import eval_identity
from jrl.run.records import evaluations_after
from jrl.run.report.messages import best_line
from jrl.run.run_hash import run_fingerprint, saved_steps
from jrl.run.trained import open_trained

# With so low a learning rate all evaluations agree, so the first evaluated step stays the best.
FLAT = [*PLAIN_DECODER, "Online.prompts=4", "Online.samples=2", "Online.steps=8", "Checkpoint.every=2",
        "Checkpoint.keep=1", "Config.eval=@Eval()", "Eval.prompts=8", "Eval.every=4", "AdamW.learning_rate=1e-30",
        "Data.held_out_every=10", "Scoring.workers=1", "Log.samples=0"]  # fmt: skip


def test_the_best_step_is_the_first_of_the_highest():
    best = None
    for step, mean in [(2, None), (4, 0.25), (6, 0.5), (8, None), (10, 0.5), (12, 0.0)]:
        best = update_best(best, step, mean, "a")
    assert best == Best(6, 0.5, "a") and update_best(None, 3, 0.0, "a") == Best(3, 0.0, "a")
    assert update_best(None, 3, None, "a") is None
    assert best_line("a b", best.step, best.mean) == (
        "best checkpoint: step 6, 50.0 % of held-out prompts; jrl export 'a b' --step best --to DIR writes its policy"
    )


def test_the_best_step_of_another_evaluation_is_replaced():
    best = Best(6, 0.5, "a")
    assert update_best(best, 8, 0.0, "b") == Best(8, 0.0, "b") and update_best(best, 8, None, "b") == best
    of_an_earlier_version = Best(6, 0.5)
    assert update_best(of_an_earlier_version, 8, 0.5, "b") == of_an_earlier_version
    assert update_best(of_an_earlier_version, 8, 0.6, "b") == Best(8, 0.6, "b")


def test_evaluations_differ_by_what_accuracy_depends_on_besides_the_policy():
    manifest_identity = {"data": "d", "parts": {}, "config": "of all fields"}

    def identity(*bindings, **changed):
        named = {binding.partition("=")[0]: binding for binding in [*FLAT, *bindings]}
        config, _ = load_config("configs/tiny.gin", list(named.values()))
        return eval_identity(config, {"identity": {**manifest_identity, **changed}})

    same = ["AdamW.weight_decay=0.1", "Online.objective=@GRPO()", "Eval.every=2", "Eval.batch=8", "Scoring.workers=2",
            "Checkpoint.every=3", "Decoder.layers=3", "Config.adapter=@LoRA()", "LoRA.rank=2", "Sampler.slots=4",
            "Sampler.temperature=0.9", "Sampler.top_k=5", "Sampler.top_p=0.9", "Sampler.min_p=0.1",
            "Sampler.max_batch_compactions=1", "Sampler.kv_layout='head_dim_major'"]  # fmt: skip
    assert identity(*same, config="with other fields") == identity()
    other = ["Eval.prompts=4", "Eval.samples=2", "Eval.temperature=0.5", "Data.held_out_every=5", "Run.seed=1",
             "Sampler.completion_length=5", "Addition.digits=2"]  # fmt: skip
    identities = {identity(data="e"), identity(parts={"part.py": "p"}), *map(identity, other)}
    assert len(identities) == 2 + len(other) and identity() not in identities


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("best") / "run"
    run(FLAT, folder, stop_after=6)
    return folder


@pytest.fixture
def left(original, tmp_path):
    """A run that was left after its sixth step."""
    return shutil.copytree(original, tmp_path / "run")


def test_the_best_step_is_kept_over_a_resume(left, capsys):
    rows = [json.loads(line) for line in (left / "metrics.jsonl").read_text().splitlines()]
    mean = rows[3]["eval/mean"]
    assert [row["step"] for row in rows if "eval/mean" in row] == [4]
    assert best_saved(left)[:2] == (4, mean) and saved_steps(left) == [4, 6]
    run(FLAT, left)
    shown = capsys.readouterr().out
    assert "evaluating after step 8" in shown and "evaluating after rl" not in shown  # the same weights
    assert shown.index("step 8/8") < shown.index("after step 8: ")  # what was measured comes under its step
    summary = json.loads((left / "summary.json").read_text())
    assert summary["best"] == {"step": 4, "mean": mean} and summary["eval"]["after_rl"]["n"] == 8
    assert saved_steps(left) == [4, 6, 8]  # 8 has not shown that its weights are finite, as 6 has
    assert open_trained(left, step="best").step == 4 and open_trained(left).step == 8


def test_the_best_step_does_not_depend_on_where_a_run_was_stopped(tmp_path):
    """Step 5 is evaluated, and saved only because the run is left after it."""
    settings = [*FLAT, "Online.steps=10", "Checkpoint.every=3", "Eval.every=5"]
    run(settings, tmp_path / "whole")
    run(settings, tmp_path / "left", stop_after=4)  # while step 5 runs, which is saved
    assert saved_steps(tmp_path / "left")[-1] == 5
    with pytest.raises(ValueError, match="no saved step was evaluated"):
        best_saved(tmp_path / "left")
    run(settings, tmp_path / "left")
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "left")]
    assert best_saved(tmp_path / "left") == best_saved(tmp_path / "whole") and best_saved(tmp_path / "left").step == 10
    assert summaries[0]["best"] == summaries[1]["best"] and summaries[1]["best"]["step"] == 10
    assert saved_steps(tmp_path / "left") == saved_steps(tmp_path / "whole")
    assert run_fingerprint(tmp_path / "left") == run_fingerprint(tmp_path / "whole")


def test_the_doctor_shows_the_accuracy_of_every_checkpoint(left, capsys):
    assert cli.main(["doctor", str(left)]) == 0
    shown, mean = capsys.readouterr().out, f"{100 * best_saved(left).mean:.1f} % of held-out prompts"
    assert re.search(rf"checkpoint of step 4: intact, .* MB; {mean}\n", shown)
    assert re.search(r"checkpoint of step 6: intact, [0-9.]* MB\n", shown)  # Eval.every = 4
    assert f"ok  best checkpoint (--step best): step 4, {mean}\n" in shown


def test_the_doctor_names_accuracies_of_another_evaluation(left, capsys):
    assert cli.main(["doctor", str(left)]) == 0
    assert "another evaluation" not in capsys.readouterr().out
    run([*FLAT, "Eval.prompts=4", "Checkpoint.keep=4"], left, accept_change=True)
    capsys.readouterr()
    assert saved_steps(left) == [4, 6, 8] and cli.main(["doctor", str(left)]) == 0
    said = "another evaluation than that of step 8, with which they do not compare: the accuracies of step 4\n"
    assert said in capsys.readouterr().out


def test_an_accepted_evaluation_replaces_the_best_step_at_its_first_save(left, capsys):
    """A lower accuracy too, by an easier or harder measure. Until then the step stays, and is not shown."""
    old, settings = best_saved(left), [*FLAT, "Eval.prompts=4", "Eval.temperature=0.01"]
    run(settings, left, "Online.steps=6", accept_change=True)  # has them already
    summary = json.loads((left / "summary.json").read_text())
    assert summary["best"] is None and best_saved(left) == old
    assert summary["eval"].keys() == {"after_rl"} and summary["eval"]["after_rl"]["n"] == 4
    assert "left out of the summary, measured by another evaluation: before rl: " in capsys.readouterr().out
    run(settings, left)
    assert json.loads((left / "summary.json").read_text())["eval"].keys() == {"after_rl"}
    new = best_saved(left)
    assert (old.step, new.step) == (4, 8) and new.mean < old.mean and new.eval_identity != old.eval_identity
    assert json.loads((left / "summary.json").read_text())["best"] == {"step": 8, "mean": new.mean}
    assert "best checkpoint" not in capsys.readouterr().out


def test_a_run_that_ends_before_the_new_evaluation_leaves_the_old_one_out(left, monkeypatch):
    """A kill between the record of the change and what is measured next."""
    settings = [*FLAT, "Online.steps=6"]
    run(settings, left)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "evaluate_once", killed)
        run(settings, left, "Eval.prompts=4", accept_change=True)
    assert not (left / "summary.json").exists()
    run(settings, left, "Eval.prompts=4")
    evals = json.loads((left / "summary.json").read_text())["eval"]
    assert evals.keys() == {"after_rl"} and evals["after_rl"]["n"] == 4


def test_all_processes_exchange_evaluations_where_one_has_an_accepted_change(tmp_path):
    """Process 0 alone has the change: one that skipped the exchange would leave the others waiting in it."""
    summary = {"steps": 6, "seconds": {"total": 1.0}, "eval": {"after_rl": {"mean": 0.5}}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    exchanged = []
    processes = types.SimpleNamespace(writer=True, from_writer=lambda what, value: exchanged.append(value) or value)
    job = types.SimpleNamespace(folder=tmp_path, processes=processes, done=6, record_change=lambda step: None)
    assert evaluations_after(job) == {} and exchanged == [None]
    job.record_change = None
    assert evaluations_after(job) == {"after_rl": {"mean": 0.5}} and len(exchanged) == 2


def test_an_accepted_learning_rate_keeps_the_best_step(left):
    old = best_saved(left)
    run([*FLAT, "AdamW.learning_rate=2e-30"], left, accept_change=True)
    assert best_saved(left) == old and json.loads((left / "summary.json").read_text())["best"]["step"] == old.step


def test_a_best_step_that_is_gone_is_best_no_more(left):
    """A better one took its place, and was then set aside or damaged."""
    shutil.rmtree(left / "checkpoints/00000004")
    with pytest.raises(ValueError, match=r"has no best checkpoint: .*or the best one is gone\. .* of a step: 6$"):
        open_trained(left, step="best")
    run(FLAT, left, "Online.steps=12")
    assert best_saved(left).step == 8 and saved_steps(left)[-1] == 12
    assert present_best({"best": [4, 0.5]}, [4, 6]) == Best(4, 0.5) and present_best({"best": [4, 0.5]}, [6]) is None
    assert present_best({"best": None}, [4]) is None and present_best({}, [4]) is None  # of an earlier version


def test_a_damaged_best_step_is_best_no_more(left, capsys):
    """Else it would stay the best for ever, since the steps after it are not more accurate."""
    (left / "checkpoints/00000004/host.json").write_text("{}")
    assert best_saved(left).step == 4  # a reader is told that it is damaged
    with pytest.raises(DamagedStep, match=r"step 4 is damaged: host\.json"):
        open_trained(left, step="best")
    run(FLAT, left)
    assert "step 4 is damaged: host.json has other bytes than were saved; it was the best ch" in capsys.readouterr().out
    assert json.loads((left / "summary.json").read_text())["best"]["step"] == 8
    assert open_trained(left, step="best").step == 8 and saved_steps(left) == [6, 8]


def test_the_best_step_of_an_intact_save_before_a_damaged_one(left):
    (left / "checkpoints/00000006/host.json").write_text("{}")
    assert best_saved(left).step == 4


def test_only_a_step_older_than_the_newest_is_said_to_be_read(left, monkeypatch, caplog):
    restore_step = trained.restore_step

    def while_the_run_saves(*args, **options):
        result = restore_step(*args, **options)
        shutil.copytree(left / "checkpoints/00000006", left / "checkpoints/00000008", dirs_exist_ok=True)
        return result

    monkeypatch.setattr(trained, "restore_step", while_the_run_saves)
    assert open_trained(left).step == 6 and not caplog.messages
    assert open_trained(left).step == 6  # the copy is of another step
    assert caplog.messages[-1] == "using the weights of step 6"


def test_a_run_without_evaluated_saves_has_no_best_step(tmp_path, capsys):
    run(FLAT, tmp_path / "run", "Eval.every=3", "Online.steps=2")
    assert "no step is both evaluated (Eval.every) and saved (Checkpoint.every)" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no saved step was evaluated on held-out prompts"):
        open_trained(tmp_path / "run", step="best")
    (tmp_path / "run/checkpoints/00000002/host.json").write_text("{}")
    with pytest.raises(NoIntactStep, match=r"host\.json has other contents than were saved"):
        best_saved(tmp_path / "run")


def test_a_step_is_a_number_or_best(left, tmp_path, capsys):
    assert cli.main(["export", str(left), "--step", "last", "--to", str(tmp_path / "out")]) == 2
    assert "argument --step: 'last' is not a step; give its number, or best" in capsys.readouterr().err
