"""Runs that go on with a change, and runs that begin with another's weights."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from small_model import PLAIN_DECODER

import jrl
from jrl import loop
from jrl.run import job
from jrl.run.checkpoints.run_state import NoIntactStep, StateMismatch
from jrl.run.identity import RefusedIdentity
from jrl.run.run_hash import read_step

TINY = ["Online.steps=2", "Online.prompts=4", "Online.samples=2", "Decoder.layers=1", "Decoder.width=16",
        "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8", "Decoder.mlp_width=32", "Checkpoint.every=1",
        *PLAIN_DECODER]  # fmt: skip
PART = (
    "def says_seven(completion, example):\n    return '7' in completion\n\n\nVERIFIERS = {'says_seven': says_seven}\n"
)


def policy(folder, step):
    return read_step(folder, step)[0]["state"]["models"]["policy"]["params"]


def test_a_comment_in_a_verifier_is_refused_and_can_be_accepted(tmp_path, caplog):
    part, run = tmp_path / "seven.py", tmp_path / "run"
    part.write_text(PART)
    judged = [*TINY[1:], "Scoring.verifiers = [@says_seven()]"]
    train = lambda steps, **how: jrl.train(
        "configs/tiny.gin", [*judged, f"Online.steps={steps}"], run=run, parts=[part], **how
    )
    train(2)
    part.write_text("# judges by one digit\n" + PART)
    with pytest.raises(RefusedIdentity, match=r"restore what has changed, or .*--accept-change") as refused:
        train(3)
    assert "config.gin" not in str(refused.value)  # which names the changed file, and would be refused too
    train(3, accept_change=True)
    manifest = json.loads((run / "manifest.json").read_text())
    # What 'auto' became on CPUs.
    assert manifest["chosen"] == {"Decoder.attention": "reference", "Sampler.attention": "reference",
                                  "Sampler.layers": "unrolled", "Learner.logprobs": "reference"}  # fmt: skip
    assert manifest["history"][0]["after_step"] == 2 and "seven.py" in manifest["history"][0]["changes"][0]
    assert "not guaranteed" in manifest["promise"] and "bit-identity is no longer guaranteed" in caplog.text
    assert "# judges by one digit" in next((run / "parts").glob("*.py")).read_text()
    train(4)  # what was accepted is the run from now on
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_change_that_the_checkpoint_does_not_fit_changes_nothing(tmp_path):
    run = tmp_path / "run"
    jrl.train("configs/tiny.gin", TINY, run=run)
    before = {path: path.read_bytes() for path in run.iterdir() if path.suffix in (".json", ".gin", ".jsonl")}
    warm = ["Config.stages = [@warm/Offline(), @Online()]", "warm/Offline.source = @Demonstrations()",
            "warm/Offline.objective = @SFT()", "warm/Offline.steps = 2"]  # fmt: skip
    critic = ["Online.objective=@PPO()"]
    message = rf"--accept-change cannot continue with this change: .*Nothing was changed in {run}\. .* --from {run} \("
    for change in (["Decoder.tied=False"], ["Online.lag=1"], warm, critic):
        with pytest.raises(StateMismatch, match=message):
            jrl.train("configs/tiny.gin", [*TINY[1:], "Online.steps=3", *change], run=run, accept_change=True)
        assert {path: path.read_bytes() for path in before} == before
    jrl.train("configs/tiny.gin", [*TINY, *critic], run=tmp_path / "critic", begin_from=run)
    jrl.train("configs/tiny.gin", [*TINY[1:], "Online.steps=3"], run=run)


def test_a_change_of_the_evaluation_that_the_data_do_not_fit_changes_nothing(tmp_path):
    """As it is refused for a new run, not at the first step that is evaluated."""
    run, evaluated = tmp_path / "run", ["Config.eval=@Eval()", "Data.held_out_every=10", "Eval.prompts=8"]
    jrl.train("configs/tiny.gin", [*TINY, *evaluated], run=run)
    before = {path: path.read_bytes() for path in run.iterdir() if path.suffix in (".json", ".gin", ".jsonl")}
    more = [*TINY[1:], "Online.steps=4", *evaluated[:2], "Eval.prompts=1000"]
    with pytest.raises(ValueError, match="1000 held-out prompts requested, "):
        jrl.train("configs/tiny.gin", more, run=run, accept_change=True)
    assert {path: path.read_bytes() for path in before} == before


def test_a_new_run_begins_with_the_weights_and_tokenizer_of_another(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    jrl.train("configs/tiny.gin", TINY, run=first)
    still = [*TINY, "AdamW.learning_rate=1e-30", "Run.seed=5"]
    jrl.train("configs/tiny.gin", still, run=second, begin_from=first)
    for name, leaf in policy(first, 2)["layers"].items():
        np.testing.assert_allclose(policy(second, 1)["layers"][name], leaf, atol=1e-20)
    begun = json.loads((second / "manifest.json").read_text())["from"]
    assert (begun["run"], begun["step"]) == (str(first), 2)
    jrl.train("configs/tiny.gin", [*still[1:], "Online.steps=3"], run=second)  # goes on without being told again
    with pytest.raises(RefusedIdentity, match="did not begin with the weights of"):
        jrl.train("configs/tiny.gin", TINY, run=first, begin_from=second)


def test_a_new_run_may_begin_with_an_earlier_step_or_the_best_one(tmp_path):
    first, second, third = tmp_path / "first", tmp_path / "second", tmp_path / "third"
    evaluated = ["Config.eval=@Eval()", "Eval.every=1", "Data.held_out_every=10", "Eval.prompts=8"]
    best = jrl.train("configs/tiny.gin", [*TINY, *evaluated, "Checkpoint.keep=3"], run=first)["best"]["step"]
    still = [*TINY, "AdamW.learning_rate=1e-30"]
    jrl.train("configs/tiny.gin", still, run=second, begin_from=first, begin_from_step=np.int64(1))
    jrl.train("configs/tiny.gin", still, run=third, begin_from=first, begin_from_step="best")
    for begun, step in ((second, 1), (third, best)):
        recorded = json.loads((begun / "manifest.json").read_text())["from"]
        assert (recorded["run"], recorded["step"]) == (str(first), step)
        for name, leaf in policy(first, step)["layers"].items():
            np.testing.assert_allclose(policy(begun, 1)["layers"][name], leaf, atol=1e-20)
    further = [*still[1:], "Online.steps=3"]
    jrl.train("configs/tiny.gin", further, run=second, begin_from=first, begin_from_step=1)
    with pytest.raises(RefusedIdentity, match=r"began with the weights of step 1 of .*first, not 2"):
        jrl.train("configs/tiny.gin", further, run=second, begin_from=first, begin_from_step=2)
    with pytest.raises(ValueError, match="has no checkpoint of step 7; there are 1, 2"):
        jrl.train("configs/tiny.gin", still, run=tmp_path / "fourth", begin_from=first, begin_from_step=7)
    with pytest.raises(ValueError, match="begin_from_step must be a number or 'best'; got '1'"):
        jrl.train("configs/tiny.gin", still, run=tmp_path / "fourth", begin_from=first, begin_from_step="1")
    with pytest.raises(ValueError, match="name the run by --from"):
        jrl.train("configs/tiny.gin", still, run=tmp_path / "fourth", begin_from_step=1)
    assert not (tmp_path / "fourth" / "manifest.json").exists()


def test_a_run_that_starts_over_begins_with_the_same_weights_of_another_or_not_at_all(tmp_path, monkeypatch):
    """Killed before its first save, it reads the other run again, which may have been trained anew meanwhile."""
    first, second = tmp_path / "first", tmp_path / "second"
    jrl.train("configs/tiny.gin", TINY, run=first)
    kept = shutil.copytree(first, tmp_path / "kept")

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "take_step", killed)
        jrl.train("configs/tiny.gin", TINY, run=second, begin_from=first, begin_from_step=2)
    shutil.rmtree(first)
    jrl.train("configs/tiny.gin", [*TINY, "Run.seed=5"], run=first)
    with pytest.raises(RefusedIdentity, match=f"^step 2 of {first} has other weights than those that this run began"):
        jrl.train("configs/tiny.gin", TINY, run=second)
    shutil.rmtree(first / "checkpoints" / "00000002")
    with pytest.raises(NoIntactStep, match=f"^the weights of step 2 of {first}, .* cannot be read: it is gone; "):
        jrl.train("configs/tiny.gin", TINY, run=second)
    shutil.rmtree(first)
    with pytest.raises(NoIntactStep, match="it is gone; there are none"):
        jrl.train("configs/tiny.gin", TINY, run=second)
    kept.rename(first)
    jrl.train("configs/tiny.gin", TINY, run=second)


def test_a_new_run_reads_the_weights_whose_hash_is_in_its_manifest(tmp_path, monkeypatch):
    """They are read once its programs are compiled, minutes later."""
    first, second = tmp_path / "first", tmp_path / "second"
    jrl.train("configs/tiny.gin", TINY, run=first)
    monkeypatch.setattr(job, "check_fits", lambda origin, policy: "that of other weights")
    with pytest.raises(RefusedIdentity, match=f"^step 2 of {first} has other weights than those that this run began"):
        jrl.train("configs/tiny.gin", TINY, run=second, begin_from=first)


def test_new_adapters_begin_on_the_weights_of_another_run(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    jrl.train("configs/tiny.gin", TINY, run=first)
    adapters = [*TINY, "Config.adapter = @LoRA()", "LoRA.rank = 2"]
    jrl.train("configs/tiny.gin", adapters, run=second, begin_from=first)
    frozen = read_step(second, 2)[0]["state"]["models"]["policy"]["frozen"]
    for name, leaf in policy(first, 2)["layers"].items():
        np.testing.assert_array_equal(frozen["layers"][name], leaf)
    with pytest.raises(ValueError, match="trained adapters, and this run has none"):
        jrl.train("configs/tiny.gin", TINY, run=tmp_path / "third", begin_from=second)
    assert not (tmp_path / "third" / "manifest.json").exists()


def test_another_shape_of_model_is_refused_before_the_new_run_is_made(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    jrl.train("configs/tiny.gin", TINY, run=first)
    with pytest.raises(ValueError, match=r"weights of .*first do not fit this model: step 2 holds .*embed as float32"):
        wider = [one.replace("Decoder.width=16", "Decoder.width=24") for one in TINY]
        jrl.train("configs/tiny.gin", wider, run=second, begin_from=first)
    assert not (second / "manifest.json").exists()
    jrl.train("configs/tiny.gin", TINY, run=second, begin_from=first)
