"""A run that has no gradient any more is told from one that has learned all there is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jrl.resolve import load_config
from jrl.run.records import Step, lost_signal, unmeasured, warn
from jrl.run.report.messages import LostSignal


@pytest.mark.parametrize(
    ("last", "rewards", "lost"),
    [
        ((3, 0.4), (0.5, 0.0, 1.0), (5, 0.4, 0.5)),  # some prompts are always right, others never
        ((3, 0.4), (0.0, 0.0, 0.0), (5, 0.4, 0.0)),  # all wrong alike
        ((3, 0.4), (1.0, 1.0, 1.0), None),  # all is learned
        ((4, 0.4), (0.0, 0.0, 0.0), None),  # four steps
        ((3, 0.4), (None, None, None), None),  # nothing was scored
        (None, (0.0, 0.0, 0.0), None),  # there was no gradient: another warning
    ],
)
def test_a_run_without_gradients_has_lost_its_signal_unless_all_is_learned(last, rewards, lost):
    metrics = dict(zip(("reward/mean", "reward/min", "reward/max"), rewards))
    found = lost_signal(last, Step(8, "rl", metrics, None))
    assert found == (None if lost is None else LostSignal(*lost))


@pytest.mark.parametrize(
    ("bindings", "last", "lost"),
    [
        ([], 31, LostSignal(9, 0.9, 0.2)),
        ([], 30, None),  # the last step of the stage before
        (["Online.critic='policy'", "Online.objective=@PPO()", "Online.critic_warmup=20"], 31, None),  # the critic's
    ],
)
def test_a_signal_is_that_of_the_policy_in_this_stage(bindings, last, lost):
    config, _ = load_config("quickstart", ["warm/Offline.steps=30", *bindings])
    assert len(config.stages) == 2
    warned = {}
    job = SimpleNamespace(
        config=config, without_signal=None, last_signal=(last, 0.9), lost_signal=None,
        display=SimpleNamespace(warn=warned.__setitem__),
    )  # fmt: skip
    metrics = {"rollout/valid_share": 1.0, "grad_norm": 0.0, "reward/mean": 0.2, "reward/min": 0.0, "reward/max": 1.0}
    batch = SimpleNamespace(host_scores=SimpleNamespace(first_problem=""))
    warn(job, Step(40, "rl", metrics, batch))
    assert job.lost_signal == lost and ("collapse" in warned) == (lost is not None)


def test_a_mean_over_no_token_or_no_completion_is_not_one_of_0():
    """A step of DAPO in which no group has a signal learns from nothing: an entropy of 0 would be a collapse, and a
    ratio of 0 a policy that no longer gives what was sampled."""
    metrics = {"rollout/valid_share": 0.5, "update/tokens": 7.0, "reward/mean": 0.0, "policy/entropy": 0.0, "loss": 0.0}
    metrics |= {"mismatch/k1": 0.0, "router/entropy": 0.0, "grad_norm": 0.0, "update/norm": 0.0}
    objectives = {"ratio": 0.0, "clip_fraction_low": 0.0, "value/loss": 0.0, "pairs/accuracy": 0.0}
    metrics |= {**objectives, "reward_model/accuracy": 0.0, "advantage/zero_variance_groups": 1.0}
    assert unmeasured(metrics) == {}
    none = dict.fromkeys(["policy/entropy", "mismatch/k1", "router/entropy", *objectives, "reward_model/accuracy"])
    assert unmeasured(metrics | {"update/tokens": 0.0}) == none
    assert unmeasured(metrics | {"rollout/valid_share": 0.0}) == {"reward/mean": None}


@pytest.mark.parametrize("name", ["lists/accuracy", "pretraining/nll", "critic/router/entropy", "mine/probability"])
def test_no_metric_of_an_objective_or_a_critic_is_a_mean_of_0_over_no_token(name):
    """Groups of metrics are those of any objective, also of a user's."""
    others = ["loss", "critic/loss", "critic/grad_norm", "critic/update/norm", "curriculum/seen", "reward/mean"]
    metrics = {"rollout/valid_share": 0.5, "update/tokens": 0.0, name: 0.0, **dict.fromkeys(others, 0.0)}
    assert unmeasured(metrics) == {name: None}
    assert unmeasured(metrics | {"update/tokens": 1.0}) == {}


def test_the_mean_reward_of_lengths_that_no_completion_has_is_not_0():
    shares = {f"rollout/length_quarter_{i}": share for i, share in enumerate((0.25, 0.0, 0.75, 0.0), start=1)}
    means = {f"reward/length_quarter_{i}": mean for i, mean in enumerate((0.0, 0.0, 0.5, 0.0), start=1)}
    metrics = {"rollout/valid_share": 1.0, "update/tokens": 7.0, **shares, **means}
    assert unmeasured(metrics) == {"reward/length_quarter_2": None, "reward/length_quarter_4": None}
