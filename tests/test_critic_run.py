"""Whole runs with a critic of its own: it learns beside the policy, warms up alone, is kept and resumed."""

from __future__ import annotations

import contextlib
import functools
import re

import jax
import numpy as np
import pytest
import short_runs
from small_model import PLAIN_DECODER

import jrl
from jrl.config import ConfigError
from jrl.models.heads import REWARD, VALUE
from jrl.run import run_hash
from jrl.run.trained import open_trained

pytestmark = pytest.mark.usefixtures("frozen_before_the_first_step", "mesh_of_the_runs")

TINY = [
    "Decoder.layers=1", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8",
    "Decoder.mlp_width=32", "Online.prompts=32", "Online.samples=1", "Online.steps=4", "Checkpoint.every=1",
    "Checkpoint.keep=9", "Log.samples=0", "Log.writers=()", "Scoring.workers=1", "Online.objective=@PPO()",
    "Learner.minibatches=2", "Online.critic='policy'", "Online.critic_optimizer=@critic/AdamW()",
    "critic/AdamW.learning_rate=1e-2",
    *PLAIN_DECODER,
]  # fmt: skip


WARM = ["Online.critic_warmup=2", "Online.pretraining=@PretrainingMix()", "PretrainingMix.source=@Demonstrations()",
        "PretrainingMix.batch_size=8"]  # fmt: skip


run = functools.partial(short_runs.run, TINY)


def models_at(folder, step):
    return run_hash.read_step(folder, step)[0]["state"]["models"]


def same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """Four steps, of which the critic learns two alone; in the others the policy also imitates stored rows."""
    folder = tmp_path_factory.mktemp("runs") / "critic"
    return folder, run(folder, *WARM)


def test_the_policy_keeps_its_bits_while_the_critic_warms_up(warmed):
    one, two, three = (models_at(warmed[0], step) for step in (1, 2, 3))
    assert same_bits(one["policy"]["params"], two["policy"]["params"])
    assert same_bits(one["policy"]["opt_state"], two["policy"]["opt_state"])
    assert not same_bits(two["policy"]["params"], three["policy"]["params"])
    for before, after in ((one, two), (two, three)):
        assert not same_bits(before["critic"]["params"], after["critic"]["params"])
        assert not np.array_equal(before["critic"]["heads"][VALUE], after["critic"]["heads"][VALUE])
    assert int(three["critic"]["version"]) == 3
    assert "heads" not in three["policy"]  # an empty mapping holds no leaf


def test_the_policy_in_a_warm_up_is_the_one_that_the_run_began_with(warmed, tmp_path):
    """Without a warm-up the first update moves it: what the first checkpoint holds is then another policy."""
    assert run(tmp_path, "Online.steps=1")[0].metrics["ratio"] > 0
    start, moved = models_at(warmed[0], 1), models_at(tmp_path, 1)
    assert not same_bits(start["policy"]["params"], moved["policy"]["params"])
    # The critic has seen the same batch either way.
    assert same_bits(start["critic"]["params"], moved["critic"]["params"])


def test_no_stored_rows_pass_by_while_nothing_imitates_them(warmed):
    positions = [run_hash.read_step(warmed[0], step)[1]["data"]["stages"]["rl"]["position"] for step in (1, 2, 3, 4)]
    assert positions == [0, 0, 8, 16]
    assert ["pretraining/nll" in step.metrics for step in warmed[1]] == [False, False, True, True]


def test_both_are_logged_by_name(warmed):
    warm, after = warmed[1][0].metrics, warmed[1][3].metrics
    own = {"critic/loss", "critic/grad_norm", "critic/update/norm", "value/loss", "value/mean", "value/clipped",
           "value/explained_variance", "value/return"}  # fmt: skip
    assert own <= set(warm) and own <= set(after)
    assert "ratio" not in warm and warm["loss"] == warm["critic/loss"] == pytest.approx(warm["value/loss"])
    assert "ratio" in after and after["loss"] != after["critic/loss"]
    assert warm["critic/grad_norm"] > 0 and after["critic/grad_norm"] > 0


@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_run_that_is_left_and_resumed_holds_the_same_bits(warmed, tmp_path, stop_after):
    run(tmp_path, *WARM, stop_after=stop_after)
    run(tmp_path, *WARM)
    assert run_hash.run_fingerprint(tmp_path, 4) == run_hash.run_fingerprint(warmed[0], 4)


def test_a_critic_is_opened_by_its_role_and_the_policy_has_no_head(warmed):
    critic = open_trained(warmed[0], role="critic")
    assert critic.heads.keys() == {VALUE} and not open_trained(warmed[0]).heads
    saved = models_at(warmed[0], 4)["critic"]
    np.testing.assert_array_equal(critic.heads[VALUE], saved["heads"][VALUE])
    np.testing.assert_array_equal(critic.params["embed"], saved["params"]["embed"])


def test_the_value_loss_falls_while_the_policy_stands_still(tmp_path):
    """The reward is decided by an answer's first byte; the same policy draws the answers of every step."""
    steps = run(
        tmp_path, r"Regex.pattern='[ -~](.|\n)*'", "PPO.gae_lambda=1.0", "PPO.value_clip=None", "Online.prompts=128",
        "Online.steps=12", "Online.critic_warmup=12", "Learner.epochs=4", "Checkpoint.every=100",
    )  # fmt: skip
    loss = [step.metrics["value/loss"] for step in steps]
    explained = [step.metrics["value/explained_variance"] for step in steps]
    assert np.mean(loss[-3:]) < 0.7 * loss[0]
    assert np.mean(explained[-3:]) > 0.05 > np.mean(explained[:3]) and abs(explained[0]) < 1e-3


def test_adapters_at_lag_one_and_a_second_stage_that_goes_on_with_the_critic(tmp_path):
    bindings = ["Config.adapter=@LoRA()", "LoRA.rank=2", "Online.lag=1", "Online.critic_warmup=1",
                "Config.stages=[@Online(), @more/Online()]", "more/Online.critic='critic'", "Online.steps=2",
                "more/Online.critic_optimizer=@still/AdamW()", "still/AdamW.learning_rate=1e-9"]  # fmt: skip
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    run(straight, *bindings)
    run(cut, *bindings, stop_after=2)
    run(cut, *bindings)
    assert run_hash.run_fingerprint(cut, 4) == run_hash.run_fingerprint(straight, 4)
    first, second, third = (models_at(straight, step) for step in (1, 2, 3))
    assert "frozen" not in first["critic"] and first["critic"]["params"].keys() == first["policy"]["params"].keys()
    assert same_bits(first["policy"]["frozen"], third["policy"]["frozen"])
    # The second stage's critic hardly moves: it is where the first stage's ended, which is not where the policy is.
    for before, after in zip(jax.tree.leaves(second["critic"]["params"]), jax.tree.leaves(third["critic"]["params"])):
        np.testing.assert_allclose(after, before, atol=1e-7)
    np.testing.assert_allclose(third["critic"]["heads"][VALUE], second["critic"]["heads"][VALUE], atol=1e-7)
    assert not same_bits(third["critic"]["params"], third["policy"]["params"])


def test_a_critic_begins_with_the_reward_model_and_its_head(tmp_path):
    rows = "configs/rlhf-tiny.gin"
    bindings = ["Online.objective=@PPO()", "Online.critic='reward'", "Online.steps=1", "Online.prompts=8",
                "Online.samples=1", "Checkpoint.every=1", "Checkpoint.keep=99", "Log.samples=0", "Log.writers=()",
                "Scoring.workers=1", "warm/Offline.steps=1", "judge/Offline.steps=1", "Online.critic_warmup=1",
                "Online.optimizer=@critic/AdamW()", "critic/AdamW.learning_rate=1e-9", "Config.eval=None"]  # fmt: skip
    with contextlib.closing(jrl.steps(rows, bindings, run=tmp_path)) as steps:
        last = list(steps)[-1]
    models = models_at(tmp_path, last.step)
    np.testing.assert_allclose(models["critic"]["params"]["embed"], models["reward"]["params"]["embed"], atol=1e-7)
    np.testing.assert_allclose(models["critic"]["heads"][VALUE], models["reward"]["heads"][REWARD], atol=1e-7)
    assert np.abs(models["critic"]["heads"][VALUE]).max() > 1e-3
    assert not np.allclose(models["critic"]["params"]["embed"], models["policy"]["params"]["embed"], atol=1e-7)


@pytest.mark.parametrize(
    "bindings, message",
    [
        (["Online.objective=@GRPO()", "Online.samples=4"], "Online.critic = 'policy', and GRPO reads no values"),
        (
            ["Online.critic='reward'"],
            "Online.critic names the role 'reward', which no earlier stage trains. Available: policy",
        ),
        (["Online.critic=None"], "Online.critic_optimizer needs a separate critic"),
        (
            ["Online.critic=None", "Online.critic_optimizer=None", "Online.critic_warmup=1"],
            "Online.critic_warmup needs a separate critic",
        ),
        (["Online.critic_warmup=-1"], "Online.critic_warmup must be 0 to"),
    ],
)
def test_what_cannot_be_is_refused(bindings, message):
    named = {binding.partition("=")[0]: binding for binding in [*TINY, *bindings]}
    with pytest.raises((ConfigError, ValueError), match=re.escape(message)):
        jrl.load_config("configs/tiny.gin", list(named.values()))
