"""Whole runs with a value head: it learns, it is kept and resumed, and no policy that leaves the run has it."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import pytest

import jrl
from jrl.config import ConfigError
from jrl.models.heads import VALUE
from jrl.run import run_hash
from jrl.run.trained import open_trained
from jrl.tools.export import export_policy
from jrl.tools.score import score

pytestmark = pytest.mark.usefixtures("frozen_before_the_first_step", "mesh_of_the_runs")

TINY = [
    "Decoder.layers=1", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8",
    "Decoder.mlp_width=32", "Online.prompts=32", "Online.samples=1", "Online.steps=4", "Checkpoint.every=2",
    "Log.samples=0", "Log.writers=()", "Scoring.workers=1", "Online.objective=@PPO()", "Learner.minibatches=2",
]  # fmt: skip
ROWS = [[1, 2, 3, 40], [9], [5, 6] * 20]


def run(folder, *bindings, stop_after=None, config="configs/tiny.gin", over=TINY):
    """Trains, or trains until a step is done and leaves as a notebook would; returns the steps seen."""
    seen = []
    named = {binding.partition("=")[0]: binding for binding in [*over, *bindings]}
    with contextlib.closing(jrl.steps(str(config), list(named.values()), run=folder)) as steps:
        for step in steps:
            seen.append(step)
            if step.step == stop_after:
                break
    return seen


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "ppo"
    return folder, run(folder, "Checkpoint.every=1", "Checkpoint.keep=9")


def trained_at(folder, step):
    """Returns the policy as it was saved: params, heads, opt_state."""
    return run_hash.read_step(folder, step)[0]["state"]["models"]["policy"]


def test_a_run_that_is_left_and_resumed_holds_the_same_bits(trained_run, tmp_path):
    run(tmp_path, "Checkpoint.every=1", "Checkpoint.keep=9", stop_after=3)
    run(tmp_path, "Checkpoint.every=1", "Checkpoint.keep=9")
    assert run_hash.run_fingerprint(tmp_path, 4) == run_hash.run_fingerprint(trained_run[0], 4)


def test_the_head_is_trained_and_kept_with_the_weights_and_its_optimizer(trained_run):
    first, last = (trained_at(trained_run[0], step)["heads"][VALUE] for step in (1, 4))
    assert first.shape == (1, 16, 1) and np.abs(first).max() > 0 and not np.array_equal(first, last)
    moments = trained_at(trained_run[0], 4)["opt_state"]
    named = [path for path, _ in jax.tree_util.tree_leaves_with_path(moments) if VALUE in jax.tree_util.keystr(path)]
    assert len(named) == 2
    for step in trained_run[1]:
        assert {"value/loss", "value/clipped", "value/mean", "value/return", "value/explained_variance"} <= {
            *step.metrics
        }
    assert trained_run[1][0].metrics["value/explained_variance"] == pytest.approx(
        0, abs=1e-3
    )  # it says 0 of everything


def test_the_first_completions_are_those_without_a_head(trained_run, tmp_path):
    plain = run(tmp_path, "Online.objective=@Reinforce()", "Learner.minibatches=1", "Online.steps=1")[0].rollout
    np.testing.assert_array_equal(trained_run[1][0].rollout["tokens"], plain["tokens"])
    # What the sampler hashes is what it is given: the same weights, without a head among them.
    assert open_trained(tmp_path).params.keys() == open_trained(trained_run[0]).params.keys()


def test_an_exported_run_scores_as_the_run_and_has_no_head(trained_run, tmp_path, caplog):
    expected = score(open_trained(trained_run[0]), ROWS)
    export_policy(trained_run[0], tmp_path / "out")
    assert f"the value head of the role policy is not written: it stays in {trained_run[0]}" in caplog.text
    for a, b in zip(score(open_trained(tmp_path / "out"), ROWS), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_explained_variance_rises(tmp_path):
    """The reward is decided by an answer's first byte: 0 for the value of a token after it is a mistake."""
    steps = run(
        tmp_path, r"Regex.pattern='[ -~](.|\n)*'", "AdamW.learning_rate=1e-2", "PPO.value_coefficient=100.0",
        "PPO.gae_lambda=1.0", "PPO.value_clip=None", "Online.prompts=128", "Online.steps=12", "Learner.epochs=4",
    )  # fmt: skip
    explained = [step.metrics["value/explained_variance"] for step in steps]
    assert abs(explained[0]) < 1e-3 and np.mean(explained[-3:]) > 0.2


def test_adapters_are_trained_with_a_head_beside_them_at_lag_one_with_groups(tmp_path):
    bindings = ["Config.adapter=@LoRA()", "LoRA.rank=2", "Online.lag=1", "Online.prompts=8",
                "Online.samples=4", "Learner.minibatches=1", "Learner.prefix_sharing='in_row'"]  # fmt: skip
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    steps = run(straight, *bindings)
    assert steps[0].metrics["ratio"] == 1  # of the only update of its batch
    of_weights = lambda step: (step.metrics["mismatch/k3"], step.metrics["mismatch/effective_share"])
    # Step 1 learns from its own weights' samples, the others from those of the weights before.
    assert of_weights(steps[0]) == pytest.approx((0, 1), abs=1e-5)
    assert all(k3 > 1e-5 and share < 1 - 1e-5 for k3, share in map(of_weights, steps[1:]))
    run(cut, *bindings, stop_after=3)
    run(cut, *bindings)
    assert run_hash.run_fingerprint(cut, 4) == run_hash.run_fingerprint(straight, 4)
    assert trained_at(cut, 4)["params"].keys() == {"q", "k", "v", "o", "gate", "up", "down"}
    assert trained_at(cut, 4)["heads"].keys() == {VALUE}
    export_policy(cut, tmp_path / "out")
    for a, b in zip(score(open_trained(tmp_path / "out"), ROWS), score(open_trained(cut), ROWS), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_published_model_begins_with_a_head_of_zeros(trained_run, tmp_path):
    export_policy(trained_run[0], tmp_path / "model")
    start, rest = open("configs/tiny.gin").read().split("Decoder:\n")
    gin = tmp_path / "published.gin"
    gin.write_text(
        f"{start}Config.model = @Published()\nPublished.path = '{tmp_path / 'model'}'\n{rest.split(chr(10) * 2, 1)[1]}"
    )
    over = [binding for binding in TINY if not binding.startswith("Decoder")]
    folder = tmp_path / "run"
    steps = run(folder, "Online.steps=1", "Checkpoint.every=1", config=gin, over=over)
    assert steps[0].metrics["value/explained_variance"] == pytest.approx(0, abs=1e-3)
    assert np.abs(trained_at(folder, 1)["heads"][VALUE]).max() > 0


def test_a_model_of_ones_own_has_no_value_head():
    with pytest.raises(ConfigError, match=r"PPO trains a value head, .* and not those of Small"):
        jrl.load_config("configs/own/linen.gin", ["Online.objective=@PPO()"])


WARM = ["Config.stages=[@warm/Offline(), @Online()]", "warm/Offline.source=@Demonstrations()",
        "warm/Offline.objective=@SFT()", "warm/Offline.steps=2", "warm/Offline.batch_size=4"]  # fmt: skip


def test_a_warm_start_has_no_head_and_rl_begins_with_one_of_zeros_and_moves_it(tmp_path):
    seen = run(tmp_path, *WARM, "Online.steps=1", "Checkpoint.every=1", "Checkpoint.keep=9")
    assert [step.phase for step in seen] == ["sft", "sft", "rl"]
    first, before, after = (trained_at(tmp_path, step) for step in (1, 2, 3))
    assert "heads" not in before
    assert np.abs(before["params"]["embed"] - first["params"]["embed"]).max() > 0
    assert seen[-1].metrics["value/explained_variance"] == pytest.approx(0, abs=1e-3)  # it says 0 of everything
    assert np.abs(after["heads"][VALUE]).max() > 0


def with_kl_in_the_reward(objective):
    return [f"Online.objective=@{objective}()", f"{objective}.kl_in_reward=0.5", "Learner.minibatches=1",
            "AdamW.learning_rate=1e-2", "Online.lag=1"]  # fmt: skip


def moved_from_the_reference(steps):
    """Whether the only ratio of every batch was 1, and the policy left the reference, which is where it began."""
    ratios = {step.metrics["ratio"] for step in steps}
    return ratios == {1} and steps[0].metrics["kl_ref_k1"] == 0 and steps[-1].metrics["kl_ref_k3"] > 1e-4


def test_a_kl_in_the_reward_is_the_same_after_a_resume_and_leaves_the_only_ratio_at_one(tmp_path):
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    bindings = with_kl_in_the_reward("PPO")
    assert moved_from_the_reference(run(straight, *bindings))
    run(cut, *bindings, stop_after=3)
    run(cut, *bindings)
    assert run_hash.run_fingerprint(cut, 4) == run_hash.run_fingerprint(straight, 4)


def test_a_kl_in_the_reward_changes_all_steps_but_the_first(tmp_path):
    bindings = with_kl_in_the_reward("Reinforce")
    steps = run(tmp_path / "with", *bindings)
    assert moved_from_the_reference(steps)
    without = run(tmp_path / "without", *bindings, "Reinforce.kl_in_reward=None")
    assert "kl_ref_k1" not in without[0].metrics
    assert without[0].metrics["loss"] == pytest.approx(steps[0].metrics["loss"], abs=1e-5)
    assert run_hash.run_fingerprint(tmp_path / "without", 4) != run_hash.run_fingerprint(tmp_path / "with", 4)
