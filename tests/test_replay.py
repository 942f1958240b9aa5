"""Updates of the past, repeated from the rollout store: the same bits as the run's own."""

from __future__ import annotations

import numpy as np
import pytest
from short_runs import run
from small_model import PLAIN_DECODER

from jrl import cli
from jrl.resolve import load_config
from jrl.rollout.scoring import HostScores
from jrl.run import replay
from jrl.run.report.rollouts import read_rollouts

SETTINGS = ["Online.prompts=4", "Online.samples=2", "Decoder.layers=1", "Decoder.width=16", "Decoder.heads=2",
            "Decoder.kv_heads=1", "Decoder.head_dim=8", "Decoder.mlp_width=32", "Checkpoint.every=2",
            "Checkpoint.keep=9", *PLAIN_DECODER]  # fmt: skip
COMPONENTS = ["Online.objective=@GDPO()", "Scoring.verifiers=[@Exact(), @Regex()]", "Regex.weight=0.1"]
VARIED = [*COMPONENTS, "Online.lag=1", "Learner.minibatches=2", "Sampler.top_k=40", "Online.steps=4"]
HELD = ("DAPO's refills", ["Online.objective=@DAPO()", "Online.steps=3"]), (
    "two epochs of PPO with a critic",
    ["Online.objective=@PPO()", "Learner.epochs=2", "Online.steps=3", "Online.critic='policy'"],
), ("advantages by task", ["Online.objective=@TaskNormalizedGRPO()", "Online.steps=3"])  # fmt: skip


def test_updates_from_the_store_have_the_bits_of_the_run(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    run([*SETTINGS, *VARIED], folder)
    rows = read_rollouts(folder / "rollouts")
    assert {"outcome", "component.Exact", "component.Regex"} <= rows.keys() and "token_reward" not in rows
    # from checkpoint 2, through step 3, to checkpoint 4
    assert cli.main(["replay", str(folder), "--step", "4"]) == 0
    out = capsys.readouterr().out
    assert "updates 3 to 4 from the rollout store" in out and "all bits match the checkpoint" in out
    stored = replay._rows_of

    def with_another_reward(store, step):
        rows = stored(store, step)
        rows["component.Regex"] = np.where(np.arange(8) == 3, 7, rows["component.Regex"]).astype(np.float32)
        return rows

    monkeypatch.setattr(replay, "_rows_of", with_another_reward)
    different = replay.repeat(folder, 4).different
    assert any("policy/params" in name for name in different)
    monkeypatch.setattr(replay, "_rows_of", lambda store, step: {n: v[:7] for n, v in stored(store, step).items()})
    with pytest.raises(ValueError, match="holds 7 rows of step 3, whose batch has 8 rows"):
        replay.repeat(folder, 4)


def test_a_step_with_nothing_to_begin_with_or_to_compare_is_refused_before_an_update(tmp_path, monkeypatch, capsys):
    run([*SETTINGS, "Online.steps=5"], tmp_path / "run")
    monkeypatch.setattr(replay, "_updated", None)
    for step, message in (
        (2, "no checkpoint before step 2; there are those of steps 2, 4, 5. Steps to repeat: 4, 5"),
        (3, "no checkpoint of step 3 to compare its updates with; there are those of steps 2, 4, 5. Steps to repeat"),
        (6, "has 5 steps; there is no step 6"),
    ):
        assert cli.main(["replay", str(tmp_path / "run"), "--step", str(step)]) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_steps_that_cannot_be_repeated_are_not_offered(tmp_path, monkeypatch, capsys):
    stages = ["Config.stages=[@Offline(), @Online()]", "Offline.source=@Demonstrations()", "Offline.objective=@SFT()",
              "Offline.steps=4", "Offline.batch_size=2", "Online.steps=2"]  # fmt: skip
    run([*SETTINGS, *stages], tmp_path / "run")  # saved after 2, 4 and 6; steps 1 to 4 have no rollouts
    monkeypatch.setattr(replay, "_updated", None)
    for step, message in (
        (4, "step 3 is not of an Online stage: only those have rollouts. Steps to repeat: 6"),
        (5, "there are those of steps 2, 4, 6. Steps to repeat: 6"),
    ):
        assert cli.main(["replay", str(tmp_path / "run"), "--step", str(step)]) == 2
        assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.parametrize("name, settings", HELD, ids=[name for name, _ in HELD])
def test_updates_of_other_objectives_have_the_bits_of_the_run(name, settings, tmp_path):
    run([*SETTINGS, *settings], tmp_path / "run")
    assert replay.repeat(tmp_path / "run", 3) == (2, 3, [])


@pytest.mark.slow
def test_a_store_that_was_begun_without_tasks_is_refused_where_they_are_read(tmp_path, monkeypatch):
    run([*SETTINGS, *HELD[2][1]], tmp_path / "run")
    stored = replay._rows_of
    without = lambda store, step: {name: v for name, v in stored(store, step).items() if name != replay.TASK}
    monkeypatch.setattr(replay, "_rows_of", without)
    with pytest.raises(ValueError, match="stored no task_hash, which TaskNormalizedGRPO reads"):
        replay.repeat(tmp_path / "run", 3)


def scores(**more):
    column = np.array([1, 0], np.float32)
    return HostScores(column, np.array([True, False]), np.zeros(2, np.int8), column, {"A/b": column}, [], 0, **more)


def test_what_a_store_has_no_column_for_is_left_out_and_what_it_lacks_is_nothing():
    task = np.array([5, 0], np.uint32)
    example = np.array([3, -1], np.int32)
    columns = replay.score_columns(scores(), task, example, ("A/b", "C"), of_tokens=True)
    assert list(columns) == ["outcome", "task_hash", "example_index", "component.A%2Fb", "component.C", "token_reward"]
    np.testing.assert_array_equal(columns["component.C"], [np.nan, np.nan])
    assert columns["token_reward"].tolist() == [[0], [0]]
    tokens = np.array([[1, 2], [3, 4]], np.float32)
    with_tokens = replay.score_columns(scores(token_reward=tokens), task, example, (), True)
    assert with_tokens["token_reward"].tolist() == [[1, 2], [0, 0]]
    assert replay.fitting(columns, set()) == columns
    assert replay.fitting(columns, {"tokens", "reward"}) == {}  # begun by an earlier version
    columns = replay.score_columns(scores(), task, example, ("A/b",), False)
    found = replay.fitting(columns, {"outcome", "component.D", "token_reward"})
    assert set(found) == {"outcome", "component.D", "token_reward"} and np.isnan(found["component.D"]).all()


def test_components_of_other_stages_alone_are_no_input_of_an_update():
    bindings = [
        "Config.stages=[@a/Online(), @b/Online()]", "Scoring.verifiers=[@Exact()]", "GDPO.weights=(1.0,)",
        "a/Online.objective=@SCoRe()", "a/Online.strategy=@SelfCorrection()", "b/Online.objective=@GDPO()",
    ]  # fmt: skip
    config, parts = load_config("configs/tiny.gin", bindings)
    rows = dict.fromkeys(["reward", "component.Exact", "component.first_attempt", "component.NamedByAnExample"])
    own = lambda i: set(replay.columns_of_stage(rows, config, parts.tables, i))
    assert own(0) == {*rows} and own(1) == {*rows} - {"component.first_attempt"}
