"""Runs of several stages: what each leaves to the next, and that cutting one anywhere changes no bit."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from small_model import PLAIN_DECODER

import jrl
from jrl import cli
from jrl.compatibility import check_stored_rows
from jrl.config import ConfigError
from jrl.device.sharding import MeshShape, make_mesh
from jrl.experiment import TABLES, Offline, stage_names
from jrl.run.programs import packed_shape
from jrl.run.run_hash import read_step, run_fingerprint
from jrl.run.trained import open_trained
from jrl.tools.score import score_rewards

CONFIG = "configs/rlhf-tiny.gin"
SHORT = ["warm/Offline.steps=3", "judge/Offline.steps=3", "Online.steps=3", "Online.prompts=4", "Online.samples=2",
         "warm/Offline.batch_size=8", "judge/Offline.batch_size=8", "Decoder.width=16", "Decoder.heads=2",
         "Decoder.head_dim=8", "Decoder.mlp_width=32", "Decoder.layers=1", *PLAIN_DECODER, "Checkpoint.every=2",
         "Checkpoint.keep=9"]  # fmt: skip
NAMES = ["sft"] * 3 + ["judge"] * 3 + ["rl"] * 3


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def straight_at(tmp_path_factory):
    """Returns lag -> (bindings, folder) of a run that was not cut, made once."""

    @functools.cache
    def made(lag):
        folder = tmp_path_factory.mktemp("straight") / "run"
        bindings = [*SHORT, f"Online.lag={lag}"]
        jrl.train(CONFIG, bindings, run=folder)
        return bindings, folder

    return made


@pytest.fixture(scope="module", params=[0, 1], ids=["lag 0", "lag 1"])
def straight(request, straight_at):
    return straight_at(request.param)


def test_steps_are_counted_over_all_stages_and_carry_their_stage(straight):
    assert [(row["step"], row["phase"]) for row in rows(straight[1])] == list(enumerate(NAMES, start=1))


def test_a_stage_leaves_its_roles_to_the_next_ones(straight):
    folder = straight[1]
    models = lambda step: read_step(folder, step)[0]["state"]["models"]
    assert models(3).keys() == {"policy"} and models(4).keys() == models(9).keys() == {"policy", "reward"}
    same = lambda a, b: all(np.array_equal(a["layers"][name], b["layers"][name]) for name in a["layers"])
    # The stage `judge` trains the reward model alone, which began as the policy; RL trains the policy alone.
    assert same(models(3)["policy"]["params"], models(6)["policy"]["params"])
    assert not same(models(4)["reward"]["params"], models(6)["reward"]["params"])
    assert same(models(6)["reward"]["params"], models(9)["reward"]["params"])
    np.testing.assert_array_equal(models(6)["reward"]["heads"]["reward"], models(9)["reward"]["heads"]["reward"])
    assert not same(models(6)["policy"]["params"], models(9)["policy"]["params"])
    assert "opt_state" not in models(9)["reward"] and "opt_state" not in models(6)["policy"]


def test_the_reward_is_the_verifiers_and_the_weighted_roles(straight):
    for row in rows(straight[1])[6:]:
        if row["rollout/valid_share"] == 1:
            parts = row["reward_component/Regex"] + 0.5 * row["reward_component/role/reward"]
            np.testing.assert_allclose(row["reward/mean"], parts, rtol=1e-5)


# The stages of stored rows end at 3 and 6, and have no lag; with one, samples that wait are kept too.
@pytest.mark.parametrize(("lag", "cut"), [(0, 1), (0, 3), (0, 4), (1, 6), (1, 7)])
def test_a_run_that_is_left_anywhere_goes_on_to_the_same_bits(straight_at, tmp_path, lag, cut):
    bindings, folder = straight_at(lag)
    for step in jrl.steps(CONFIG, bindings, run=tmp_path):
        if step.step == cut:
            break
    jrl.train(CONFIG, bindings, run=tmp_path)
    assert run_fingerprint(tmp_path) == run_fingerprint(folder)


def test_a_role_and_a_stage_of_a_run_can_be_opened(straight):
    folder = straight[1]
    judge = open_trained(folder, stage="judge", role="reward")
    assert judge.step == 6 and judge.heads["reward"].shape == (1, 16, 1)
    assert open_trained(folder).step == 9 and open_trained(folder, stage="sft").step == 3
    with pytest.raises(ValueError, match=r"no stage 'warm'\. Available: sft, judge, rl"):
        open_trained(folder, stage="warm")
    with pytest.raises(ValueError, match=r"no role 'critic'\. Available: policy, reward"):
        open_trained(folder, role="critic")


def test_a_role_keeps_the_heads_that_a_later_stage_does_not_train(tmp_path):
    """The reward model goes on as a language model; its head scores as it did."""
    later = ["Config.stages=[@warm/Offline(), @judge/Offline(), @more/Offline(), @Online()]",
             "more/Offline.source=@Demonstrations()", "more/Offline.objective=@SFT()", "more/Offline.trains='reward'",
             "more/Offline.steps=1", "more/Offline.batch_size=8"]  # fmt: skip
    jrl.train(CONFIG, [*SHORT, *later], run=tmp_path)
    last, first = open_trained(tmp_path, role="reward"), open_trained(tmp_path, stage="judge", role="reward")
    assert (last.step, first.step) == (3 + 3 + 1 + 3, 6)
    np.testing.assert_array_equal(last.heads["reward"], first.heads["reward"])
    with pytest.raises(
        ValueError, match="the role 'reward' is trained from stage 'judge' on, and this checkpoint is of"
    ):
        open_trained(tmp_path, stage="sft", role="reward")


def test_a_plugin_may_have_units_that_no_source_of_jrl_has():
    source = TABLES["sources"]["Preferences"]
    tables = {**TABLES, "sources": {"Preferences": source._replace(unit_size=4)}}
    dpo = TABLES["algos"]["DPO"]
    stage = Offline(source=source.config(), objective=dpo.config())
    with pytest.raises(ValueError, match="DPO takes pairs, and Preferences gives units of 4 rows"):
        check_stored_rows(stage, dpo, tables)


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("Online.rewards={'critic': 1.0}", "names the role 'critic', which no earlier stage trains"),
        ("Online.rewards={'average': 1.0}", "'average', which .* such as BradleyTerry with Offline.trains = 'reward'"),
        ("judge/Offline.objective=@SFT()", "SFT takes single rows, and Preferences gives pairs; see"),
        ("judge/Offline.objective=@KTO()", "KTO learns from single answers, and Preferences gives pairs"),
        ("judge/Offline.source=@Labeled()", "BradleyTerry learns from pairs, and Labeled gives single answers"),
        ("Preferences.strength='sure'", "BradleyTerry treats every preference as certain"),
        ("judge/Offline.objective=@GRPO()", "GRPO learns from sampled rows; use it in an Online stage"),
        ("Online.objective=@BradleyTerry()", "BradleyTerry learns from stored rows"),
        ("judge/Offline.trains='reference'", "Offline.trains is 'reference'"),
        ("judge/Offline.batch_size=0", "Offline.batch_size must be 1 to"),
        ("judge/Offline.name=''", "Offline.name is empty; leave it out for the name of the objective"),
        ("Online.name=''", "Online.name is empty; leave it out for 'rl'"),
        ("Run.seed=-1", r"Run.seed must be in \[0, 4294967295\]"),
        ("Run.seed=4294967296", r"Run.seed must be in \[0, 4294967295\]"),
        ("Sampler.top_k=2147483648", r"Sampler.top_k must be at least 1 and below 2\*\*31"),
        ("Sampler.stop_strings=['\\ud800']", "half of a surrogate pair"),
        ("Online.prompts=100000000", "Online.prompts must be 1 to"),
        ("Sampler.completion_length=2147483648", "Sampler.completion_length must be 1 to 16777216"),
        ("Data.prompt_length=2147483648", "Data.prompt_length must be 1 to 16777216"),
    ],
)
def test_stages_that_cannot_run_are_refused_before_anything_is_made(binding, message):
    with pytest.raises(ConfigError, match=message):
        jrl.load_config(CONFIG, [binding])


@pytest.mark.parametrize("binding, stage", [("Learner.minibatches=3", "sft"), ("judge/Learner.row_length=9", "judge")])
def test_a_batch_that_does_not_fit_its_learner_is_refused_with_the_stage(binding, stage):
    bindings = [*SHORT, "judge/Offline.learner=@judge/Learner()", binding]  # 8 rows do not divide into 3 minibatches
    config, parts = jrl.load_config(CONFIG, bindings)
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    refused = config.stages[stage_names(config.stages).index(stage)]
    with pytest.raises(ValueError, match=f"^stage {stage}: "):
        packed_shape(refused, config, parts.tables, mesh)


def test_a_stage_without_steps_leaves_no_role_to_the_next_ones():
    stages = "Config.stages=[@first/Online(), @Online()]"
    critics = ["first/Online.critic='policy'", "Online.critic='critic'", "Online.objective=@PPO()"]
    with pytest.raises(ConfigError, match="names the role 'critic', which no earlier stage trains"):
        jrl.load_config("configs/tiny.gin", [stages, *critics, "first/Online.steps=0"])
    reward = ["first/Online.trains='reward'", "first/Online.objective=@OnlineBradleyTerry()", "first/Online.rewards={}"]
    bindings = [stages, *reward, "Online.rewards={'reward': 0.5}"]
    jrl.load_config("configs/tiny.gin", bindings)
    with pytest.raises(ConfigError, match="names the role 'reward', which no earlier stage trains"):
        jrl.load_config("configs/tiny.gin", [*bindings, "first/Online.steps=0"])


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ([None, None, "rl", "rl"], ["sft", "sft_2", "rl", "rl_2"]),
        (["rl_2", "rl", "rl"], ["rl_2", "rl", "rl_3"]),
        (["rl", "rl", "rl", "rl_2"], ["rl", "rl_3", "rl_4", "rl_2"]),
        ([None, "sft", None, "sft_2"], ["sft_3", "sft", "sft_4", "sft_2"]),
    ],
    ids=str,
)
def test_names_of_stages_differ(given, names):
    """What an Offline stage was given is its name; others take the next number that is free. Here a stage without a
    name, or with one of two parts, is Offline."""
    config, _ = jrl.load_config(CONFIG, SHORT)
    offline, online = config.stages[0], config.stages[-1]
    is_offline = lambda name: name != "rl"
    stages = [dataclasses.replace(offline if is_offline(name) else online, name=name) for name in given]
    assert list(stage_names(stages)) == names


def test_pairs_that_the_data_do_not_hold_are_refused_at_the_start(tmp_path):
    with pytest.raises(ValueError, match=r"stage judge: none of the first 16 examples gives a row .*no_wrong"):
        jrl.train(CONFIG, [*SHORT, "Preferences.rejected='{wrong}'"], run=tmp_path)
    assert not (tmp_path / "manifest.json").exists()


def test_a_refusal_of_answers_that_are_too_long_names_the_limit(tmp_path):
    # An answer of a digit and the end token, or of two and it, after prompts of 4 bytes and 4 role markers: 10 or more.
    limit = r"16 too_long; .* Data\.prompt_length \+ Sampler\.completion_length = 9 tokens"
    with pytest.raises(ValueError, match=limit):
        jrl.train(CONFIG, [*SHORT, "Sampler.completion_length=1"], run=tmp_path)


def test_a_reward_role_scores_texts_from_the_command_line(straight, tmp_path, capsys):
    rows_file, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows_file.write_text('{"tokens": [49, 43, 50, 61, 51]}\n{"tokens": [49]}\n')
    assert cli.main(["score", str(straight[1]), str(rows_file), "--out", str(out), "--role", "reward"]) == 0
    scored = [json.loads(line) for line in out.read_text().splitlines()]
    assert [len(row["tokens"]) for row in scored] == [5, 1] and all(np.isfinite(row["reward"]) for row in scored)
    alone = score_rewards(open_trained(straight[1], role="reward"), [[49]])
    np.testing.assert_allclose(scored[1]["reward"], alone[0], atol=1e-6)  # its neighbor does not matter
    trained = open_trained(straight[1], role="reward")
    heads = {
        name: np.concatenate([1.0 * head, 2.0 * head, 3.0 * head], axis=-1) for name, head in trained.heads.items()
    }
    of_three = lambda weights: dataclasses.replace(trained, heads=heads, attribute_weights=weights)
    for weights, factor in ((None, 2.0), ((1.0, 1.0, 0.5), 4.5)):  # (1 + 2 + 3) / 3; 1 + 2 + 3 / 2
        np.testing.assert_allclose(score_rewards(of_three(weights), [[49]]), factor * alone, rtol=1e-4, atol=1e-6)
    capsys.readouterr()
