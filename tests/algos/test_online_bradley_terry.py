"""Bradley-Terry on samples: which of them are a pair, its loss, and whole runs in which the policy stands still."""

from __future__ import annotations

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import PLAIN_DECODER
from test_bradley_terry import pairs

import jrl
from jrl.algos import ALGOS
from jrl.algos.bradley_terry import BradleyTerry
from jrl.algos.conformance import sample_groups
from jrl.algos.contract import Facts
from jrl.algos.online_bradley_terry import OnlineBradleyTerry
from jrl.config import ConfigError
from jrl.run.run_hash import read_step, run_fingerprint

OBJECTIVE = ALGOS["OnlineBradleyTerry"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=6)


def test_the_loss_of_a_pair_by_hand():
    # d = 1 - 0.5 = 0.5, less a margin of 1: log(1 + exp(0.5)) = 0.974077; and 0.01 * (1 + 0.5)^2 = 0.0225
    config = OnlineBradleyTerry(score_margin=1.0, center=0.01)
    loss, metrics = jax.jit(OBJECTIVE.sequence_loss)(config, pairs([1.0, 0.5]), ())
    np.testing.assert_allclose(loss, [0.974077 + 0.0225, 0], atol=1e-6)
    np.testing.assert_array_equal(metrics["reward_model/accuracy"], [1, 0])


def test_it_is_the_loss_of_stored_pairs_with_the_same_gradient():
    sequences = pairs([0.3, -1.2, 0.4, 0.9, 2.0, 1.0], mask=[True, True, True, True, True, False])
    of = lambda objective, config: jax.jit(
        jax.value_and_grad(lambda score: objective.sequence_loss(config, sequences.replace(score=score), ())[0].sum())
    )(sequences.score)
    ours = of(OBJECTIVE, OnlineBradleyTerry(score_margin=0.3, center=0.02))
    np.testing.assert_array_equal(ours[1], of(ALGOS["BradleyTerry"], BradleyTerry(margin=0.3, center=0.02))[1])
    assert ours[0] == of(ALGOS["BradleyTerry"], BradleyTerry(margin=0.3, center=0.02))[0] > 0
    np.testing.assert_array_equal(ours[1][4:], 0)  # a pair without its other answer


def test_pairs_are_made_by_the_reward_or_by_the_outcome():
    groups = sample_groups()  # rewards [1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 0], row 10 without a verdict
    outcome = jnp.array([0, 1, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0], jnp.float32)
    groups = groups.replace(outcome=outcome)

    def units(config):
        found = OBJECTIVE.pairs(config, groups, OBJECTIVE.shape(config, groups))
        return np.asarray(found.unit), np.asarray(found.label)

    unit, label = units(OnlineBradleyTerry())
    np.testing.assert_array_equal(unit, [0, 0, -1, -1, -1, -1, -1, -1, 2, 2, -1, -1])
    np.testing.assert_array_equal(label, [1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0])
    # By the outcome: row 1 is the only right one of the first group, row 5 the only wrong one of the second.
    unit, label = units(OnlineBradleyTerry(ranks_by="outcome"))
    np.testing.assert_array_equal(unit, [0, 0, -1, -1, 1, 1, -1, -1, -1, -1, -1, -1])
    np.testing.assert_array_equal(label, [0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    "config, message",
    [
        (OnlineBradleyTerry(ranks_by="score"), r"OnlineBradleyTerry\.ranks_by = 'score'"),
        (OnlineBradleyTerry(pairing="worst"), r"OnlineBradleyTerry\.pairing = 'worst'"),
        (OnlineBradleyTerry(score_margin=-1.0), r"OnlineBradleyTerry\.score_margin = -1\.0"),
        (OnlineBradleyTerry(center=0.0), r"OnlineBradleyTerry\.center = 0\.0"),
    ],
)
def test_illegal_values_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)
    OBJECTIVE.check(OnlineBradleyTerry(), FACTS)


CONFIG = "configs/rlhf-tiny.gin"
SMALL = ["Config.stages=[@judge/Online(), @Online()]", "judge/Online.objective=@OnlineBradleyTerry()",
         "judge/Online.trains='reward'", "judge/Online.name='judge'", "judge/Online.steps=3", "judge/Online.rewards={}",
         "judge/Online.samples=4", "Online.steps=2", "Online.prompts=8", "Online.samples=2", "Decoder.width=16",
         "Decoder.heads=2", "Decoder.head_dim=8", "Decoder.mlp_width=32", "Decoder.layers=1", *PLAIN_DECODER,
         "Checkpoint.every=1", "Checkpoint.keep=9", "AdamW.learning_rate=1e-2",
         "Regex.pattern='[ -~](.|\\n)*'"]  # fmt: skip


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged") / "run"
    jrl.train(CONFIG, SMALL, run=folder)
    return folder


def models(folder, step):
    return read_step(folder, step)[0]["state"]["models"]


def same(a, b):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, a["params"], b["params"])))


def test_a_reward_model_learns_from_samples_of_a_policy_that_stands_still(judged):
    first, last, after = (models(judged, step) for step in (1, 3, 5))
    assert same(first["policy"], last["policy"]) and not same(first["reward"], last["reward"])
    assert last["policy"]["version"] == 0 and last["reward"]["version"] == 3
    assert same(last["reward"], after["reward"]) and not same(last["policy"], after["policy"])
    np.testing.assert_array_equal(last["reward"]["heads"]["reward"], after["reward"]["heads"]["reward"])
    rows = [json.loads(line) for line in (judged / "metrics.jsonl").read_text().splitlines()]
    assert [row["phase"] for row in rows] == ["judge"] * 3 + ["rl"] * 2
    assert rows[0]["loss/rows"] >= 2 and rows[0]["grad_norm"] > 0
    assert rows[2]["loss"] < rows[0]["loss"] and rows[2]["reward_model/margin"] > rows[0]["reward_model/margin"]
    assert "reward_component/role/reward" in rows[3]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_that_is_left_inside_the_stage_goes_on_to_the_same_bits(judged, tmp_path, lag):
    """With a lag too: the policy stands still, so that completions drawn ahead are those of lag 0."""
    bindings = [*SMALL, f"judge/Online.lag={lag}"]
    with contextlib.closing(jrl.steps(CONFIG, bindings, run=tmp_path)) as steps:
        for step in steps:
            if step.step == 2:
                break
    jrl.train(CONFIG, bindings, run=tmp_path)
    if lag == 0:
        assert run_fingerprint(tmp_path, 5) == run_fingerprint(judged, 5)
    assert same(models(tmp_path, 3)["reward"], models(judged, 3)["reward"])


@pytest.mark.parametrize(
    "bindings, message",
    [
        (["judge/Online.trains='policy'"], r"OnlineBradleyTerry trains a reward model .* Online\.trains = 'reward'"),
        (
            ["judge/Online.objective=@OnlineDPO()"],
            r"Online\.trains = 'reward': OnlineDPO trains on log-probs",
        ),
        (["judge/Online.trains='reference'"], r"Online\.trains is 'reference'; it must name a role"),
        (["judge/Online.trains='critic'"], r"Online\.trains is 'critic'; it must name a role"),
        (["judge/Online.samples=1"], "OnlineBradleyTerry compares the samples of one prompt"),
        (["judge/Online.objective=@DAPO()"], r"Online\.trains = 'reward': DAPO trains on log-probs of the model"),
        (
            [
                "Config.stages=[@first/Offline(), @judge/Online(), @Online()]",
                "first/Offline.source=@Preferences()",
                "first/Offline.objective=@BradleyTerry()",
                "first/Offline.trains='reward'",
                "judge/Online.rewards={'reward': 1.0}",
            ],
            r"Online\.rewards = \{'reward': 1\.0\} would let 'reward' label the pairs",
        ),
        (
            ["OnlineBradleyTerry.ranks_by='outcome'", "judge/Online.shaping=@Shaping()"],
            r"OnlineBradleyTerry\.ranks_by = 'outcome' takes pairs by the first verifier alone",
        ),
        (
            [
                "OnlineBradleyTerry.ranks_by='outcome'",
                "Config.judges=[@Judge()]",
                "Judge.address='http://localhost:8000/v1'",
                "Judge.model='m'",
                "Judge.grading=@Grade()",
            ],
            r"ranks_by = 'outcome' takes pairs by the first verifier alone, .*judges .*\(Online\.judges = \(\)\)",
        ),
        (
            [
                "judge/Online.strategy=@RollIn()",
                "RollIn.guide='average'",
                "RollIn.tokens=1",
                "judge/Online.optimizer=@judge/AdamW()",
                "judge/AdamW.average=0.9",
            ],
            r"RollIn\.guide names the role 'average', which only a stage that trains the policy with an average has",
        ),
    ],
)
def test_what_cannot_run_is_refused(bindings, message):
    named = {b.partition("=")[0]: b for b in [*SMALL, *bindings]}
    with pytest.raises(ConfigError, match=message):
        jrl.load_config(CONFIG, list(named.values()))


def test_evaluations_are_made_around_stages_that_train_the_policy(tmp_path):
    evaluated = ["Config.eval=@Eval()", "Eval.prompts=2", "Eval.batch=2", "Eval.every=1", "Data.held_out_every=4"]
    summary = jrl.train(CONFIG, [*SMALL, *evaluated], run=tmp_path)
    assert summary["eval"].keys() == {"before_rl", "after_rl"}
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [any(name.startswith("eval/") for name in row) for row in rows] == [False] * 3 + [True] * 2
