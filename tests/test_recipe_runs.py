"""The recipes with one update of a batch (tests/recipe_runs.py), and stages with settings of their own."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from recipe_runs import ONE_UPDATE, ROOT, check_that_it_learns_and_writes_its_summary, small
from small_model import PARTS

import jrl
from jrl import compatibility
from jrl.config import ConfigError
from jrl.run.run_hash import read_step, run_fingerprint

pytestmark = pytest.mark.usefixtures("programs_of_many_runs", "mesh_of_the_runs")


@pytest.mark.parametrize("name", ONE_UPDATE)
def test_a_recipe_learns_and_writes_its_summary(name, tmp_path):
    check_that_it_learns_and_writes_its_summary(name, tmp_path / "run")


def test_a_stage_may_have_shorter_completions_and_the_next_one_longer(tmp_path):
    path, bindings = small("staged_length")
    steps = list(jrl.steps(path, bindings, parts=[PARTS], run=tmp_path / "straight"))
    assert [step.batch.rollout.tokens.shape[1] for step in steps[1:]] == [8 + 3] * 2 + [8 + 4] * 2
    for step in jrl.steps(path, bindings, parts=[PARTS], run=tmp_path / "cut"):
        if step.step == 3:  # the last of the first window
            break
    jrl.train(path, bindings, parts=[PARTS], run=tmp_path / "cut")
    assert run_fingerprint(tmp_path / "cut") == run_fingerprint(tmp_path / "straight")


def test_the_optimizer_of_a_longer_window_continues_that_of_the_shorter_one(tmp_path):
    path, bindings = small("staged_length")
    further = ["Checkpoint.every=1", "Checkpoint.keep=9"]
    count_after = lambda run, step: int(
        read_step(run, step)[0]["state"]["models"]["policy"]["opt_state"]["1"]["0"]["count"]
    )
    counts = lambda run: [count_after(run, step) for step in range(1, 6)]
    jrl.train(path, [*bindings, *further], parts=[PARTS], run=tmp_path / "continued")
    assert counts(tmp_path / "continued") == [1, 1, 2, 3, 4]
    jrl.train(path, [*bindings, *further, "long/Online.optimizer_state='new'"], parts=[PARTS], run=tmp_path / "new")
    assert counts(tmp_path / "new") == [1, 1, 2, 1, 2]


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        (["short/Online.optimizer_state='continued'", "Config.stages=[@short/Online(), @long/Online()]"],
         "must train 'policy' too; there is none"),
        (["short/Online.optimizer=@Muon()"], "but for floats, schedule and average; got Muon and then AdamW"),
        (["long/AdamW.moments='bfloat16'"], "got AdamW.moments = None and then 'bfloat16'. Set"),
        (["short/AdamW.memory='host'"], "got AdamW.memory = 'host' and then 'device'. Set"),
        (["AdamW.schedule=@LinearDecay()", "LinearDecay.decay_steps=9"],
         "after its 10 updates LinearDecay is at a rate of 0, which it reaches after 9, and nothing"),
        (["long/Online.objective=@PPO()"], "PPO trains a value head that it did not have"),
    ],
)  # fmt: skip
def test_an_optimizer_that_cannot_be_continued_is_refused(bindings, message):
    jrl.load_config(
        str(ROOT / "configs" / "algos" / "staged_length.gin"),
        ["long/AdamW.learning_rate=3e-4", "long/AdamW.average=0.9", "long/AdamW.schedule=@CosineDecay()",
         "CosineDecay.decay_steps=80"],
    )  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        jrl.load_config(str(ROOT / "configs" / "algos" / "staged_length.gin"), bindings)


def test_updates_that_a_schedule_is_read_at_are_counted_as_they_are_made():
    load = lambda *further: jrl.load_config(
        str(ROOT / "configs" / "algos" / "staged_length.gin"), ["Online.optimizer=@rl/AdamW()",
        "rl/AdamW.schedule=@LinearDecay()", *further])  # fmt: skip
    with pytest.raises(ConfigError, match="after its 20 updates LinearDecay is at a rate of 0"):
        load("short/Learner.epochs=2", "LinearDecay.decay_steps=16")
    # the limit may leave as few as 10 of them
    limited = ["short/Learner.epochs=2", "short/Online.max_kl=0.01", "LinearDecay.decay_steps=16"]
    notes = compatibility.schedule_notes(load(*limited)[0])
    assert ["after 16 of up to 20 updates of stage rl," in note for note in notes] == [True, False]
    assert "after 6 of the 10 updates of stage rl_2," in notes[1]
    with pytest.raises(ConfigError, match="after its 10 updates LinearDecay is at a rate of 0"):
        load(*limited[:2], "LinearDecay.decay_steps=10")
    # a stage of no step learns nothing in any case
    assert compatibility.schedule_notes(load("long/Online.steps=0", "LinearDecay.decay_steps=10")[0]) == []


@pytest.mark.parametrize("name", ["curiosity", "process_rewards"])
def test_what_was_said_before_and_who_judges_steps_are_in_the_checkpoint(name, tmp_path):
    path, bindings = small(name)
    steps = jrl.train(path, bindings, parts=[PARTS], run=tmp_path / "straight")["steps"]
    for step in jrl.steps(path, bindings, parts=[PARTS], run=tmp_path / "cut"):
        if step.step == steps - 1:  # the first of two steps on samples
            break
    jrl.train(path, bindings, parts=[PARTS], run=tmp_path / "cut")
    assert run_fingerprint(tmp_path / "cut") == run_fingerprint(tmp_path / "straight")


def test_the_reference_becomes_the_policy_again_after_so_many_steps(tmp_path):
    path, bindings = small("prorl")
    further = ["Checkpoint.every=1", "Checkpoint.keep=9", "Online.reset_reference_every=2", "Online.steps=4"]
    jrl.train(path, [b for b in bindings if not b.startswith("Online.steps")] + further, parts=[PARTS], run=tmp_path)
    models = [read_step(tmp_path, step)[0]["state"]["models"] for step in range(1, 6)]
    same = lambda a, b: all(map(np.array_equal, jax.tree.leaves(a["params"]), jax.tree.leaves(b["params"])))
    begun, policy = models[0]["policy"], [one["policy"] for one in models[1:]]
    reference = [one["reference"] for one in models[1:]]
    assert not same(policy[0], begun) and not same(policy[3], policy[1])
    assert [same(one, begun) for one in reference] == [True, False, False, False]
    assert same(reference[1], policy[1]) and same(reference[2], policy[1]) and same(reference[3], policy[3])


def test_the_reference_is_a_moving_average_of_the_policy(tmp_path):
    path, bindings = small("prorl")
    further = [
        "Checkpoint.every=1",
        "Checkpoint.keep=9",
        "Online.reset_reference_every=1",
        "Online.reference_decay=0.75",
    ]
    jrl.train(path, [*bindings, *further], parts=[PARTS], run=tmp_path)
    begun, *models = [read_step(tmp_path, step)[0]["state"]["models"] for step in (1, 2, 3)]
    expected = begun["policy"]["params"]
    for one in models:
        expected = jax.tree.map(lambda old, new: 0.75 * old + 0.25 * new, expected, one["policy"]["params"])
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), one["reference"]["params"], expected
        )


def test_a_reference_that_nobody_reads_is_not_reset():
    advice = {
        "grpo": r"set GRPO\.kl = 0\.01, or leave",
        "ppo": r"set PPO\.kl_in_reward = 0\.01, or leave",
        "raft": "leave",
    }
    for recipe, said in advice.items():  # RAFT has no KL to set
        with pytest.raises(ConfigError, match=f"as configured uses no reference; {said} it out"):
            jrl.load_config(str(ROOT / "configs" / "algos" / f"{recipe}.gin"), ["Online.reset_reference_every=5"])
    prorl = str(ROOT / "configs" / "algos" / "prorl.gin")
    with pytest.raises(ConfigError, match=r"Online\.reference_decay needs a reference that moves"):
        jrl.load_config(prorl, ["Online.reference_decay=0.9", "Online.reset_reference_every=None"])
    with pytest.raises(ConfigError, match=r"Online\.reference_decay must be above 0 and below 1, or None; got 1\.0"):
        jrl.load_config(prorl, ["Online.reference_decay=1.0"])


def test_a_kl_limit_that_nothing_measures_is_refused():
    load = lambda recipe, *bindings: jrl.load_config(str(ROOT / "configs" / "algos" / f"{recipe}.gin"), bindings)
    several = ("Learner.epochs=2", "Online.max_kl=0.015")
    load("grpo", *several)
    with pytest.raises(ConfigError, match=r"Learner\.epochs \* Learner\.minibatches is 1"):
        load("grpo", "Online.max_kl=0.015")
    with pytest.raises(ConfigError, match=r"Online\.max_kl must be above 0, or None for no limit; got 0"):
        load("grpo", "Learner.epochs=2", "Online.max_kl=0")
    with pytest.raises(ConfigError, match="OnlineDPO compares no tokens with them"):
        load("online_dpo", *several)


def test_a_stage_cannot_have_longer_completions_than_the_run():
    with pytest.raises(ConfigError, match=r"Online\.completion_length = 5 exceeds Sampler\.completion_length = 4"):
        jrl.load_config(str(ROOT / "configs" / "algos" / "grpo.gin"), ["Online.completion_length=5"])
    with pytest.raises(ConfigError, match=r"Online\.completion_length must be at least 1"):
        jrl.load_config(str(ROOT / "configs" / "algos" / "grpo.gin"), ["Online.completion_length=0"])
