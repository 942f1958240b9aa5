"""Whole runs of a tiny policy: resume, determinism, own parts, identity."""

import contextlib
import json
import threading
from types import SimpleNamespace

import jax
import pytest
from small_model import PLAIN_DECODER

import jrl
from jrl import config as gin
from jrl.config.errors import ConfigError
from jrl.device.sharding import MeshShape, make_mesh
from jrl.loop import idle_devices
from jrl.plugins import PartError
from jrl.rollout import evaluate
from jrl.run.identity import RefusedIdentity
from jrl.run.records import Preempted
from jrl.run.trained import open_trained

pytestmark = pytest.mark.usefixtures("frozen_before_the_first_step")

TINY = [
    "Decoder.layers=1", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8",
    "Decoder.mlp_width=32", "Online.prompts=8", "Online.samples=4", "Online.steps=6", "Checkpoint.every=2",
    "Log.samples=0", "Scoring.workers=1",
    *PLAIN_DECODER,
]  # fmt: skip


def run(folder, *bindings, stop_after=None, parts=()):
    """Trains, or trains until a step is done and leaves as a notebook would; returns the steps seen."""
    seen = []
    named = {binding.partition("=")[0]: binding for binding in [*TINY, *bindings]}
    with contextlib.closing(jrl.steps("configs/tiny.gin", list(named.values()), run=folder, parts=parts)) as steps:
        for step in steps:
            seen.append(step)
            if step.step == stop_after:
                break
    return seen


def table(folder):
    """Returns the metrics table without what depends on the clock or the machine."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "host/"))} for row in rows]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Runs that nothing interrupted, by lag."""
    folders = {}
    for lag in (0, 1, 3):
        folders[lag] = tmp_path_factory.mktemp(f"lag{lag}")
        run(folders[lag], *with_lag(lag))
    return folders


def with_lag(lag):
    corrected = ["GRPO.importance=@TruncatedImportance()"] if lag > 1 else []
    return [f"Online.lag={lag}", *corrected]


def test_a_stop_while_the_run_is_opened_is_the_stop_that_callers_expect(tmp_path):
    stop = threading.Event()
    stop.set()
    with pytest.raises(Preempted, match="asked to stop while opening data; nothing was changed"):
        jrl.train("configs/tiny.gin", TINY, run=tmp_path / "run", stop=stop)
    assert not (tmp_path / "run").exists()


def test_a_stop_in_an_evaluation_is_heard_between_its_batches(tmp_path, monkeypatch):
    bindings = [*TINY, "Config.eval=@Eval()", "Eval.prompts=16", "Eval.batch=8", "Data.held_out_every=5"]
    bindings[bindings.index("Online.steps=6")] = "Online.steps=1"
    stop, usual = threading.Event(), evaluate.place_prompts
    monkeypatch.setattr(evaluate, "place_prompts", lambda *given: stop.set() or usual(*given))
    with pytest.raises(Preempted, match="stopped during an evaluation"):
        list(jrl.steps("configs/tiny.gin", bindings, run=tmp_path, stop=stop))
    monkeypatch.undo()
    assert [step.step for step in jrl.steps("configs/tiny.gin", bindings, run=tmp_path)] == [1]
    evals = json.loads((tmp_path / "summary.json").read_text())["eval"]
    assert {name: measured["n"] for name, measured in evals.items()} == {"before_rl": 16, "after_rl": 16}
    # A run that has ended has nothing to do, and measures nothing again.
    monkeypatch.setattr(evaluate, "place_prompts", lambda *given: pytest.fail("evaluates again"))
    assert list(jrl.steps("configs/tiny.gin", bindings, run=tmp_path)) == []
    assert json.loads((tmp_path / "summary.json").read_text())["eval"] == evals


# With lag 3, after 3 steps the queue holds draws of the versions 0, 1 and 2.
@pytest.mark.parametrize(("lag", "stop_after"), [(0, 1), (0, 3), (1, 1), (1, 3), (3, 3)])
def test_a_run_that_is_left_and_resumed_has_the_same_metrics_as_one_that_is_not(
    tmp_path, uninterrupted, lag, stop_after
):
    run(tmp_path, *with_lag(lag), stop_after=stop_after)
    run(tmp_path, *with_lag(lag))
    assert table(tmp_path) == table(uninterrupted[lag])
    assert len(table(tmp_path)) == 6


def test_a_run_folder_named_with_dots_is_saved_and_resumed(tmp_path, uninterrupted):
    (tmp_path / "in").mkdir()
    run(tmp_path / "in" / ".." / "run", stop_after=3)
    run(tmp_path / "in" / ".." / "run")
    assert table(tmp_path / "run") == table(uninterrupted[0])


def test_more_steps_go_on_where_fewer_ended(tmp_path, uninterrupted):
    run(tmp_path, "Online.steps=4")
    compiled = lambda: json.loads((tmp_path / "summary.json").read_text())["seconds"]["compile"]
    before = compiled()
    run(tmp_path)
    assert compiled() > before  # of both lives
    assert table(tmp_path) == table(uninterrupted[0])


def test_the_number_of_scoring_workers_changes_nothing(tmp_path, uninterrupted):
    run(tmp_path, "Scoring.workers=3")
    assert table(tmp_path) == table(uninterrupted[0])


@pytest.mark.parametrize(("lag", "versions"), [(1, [0, 0, 1, 2]), (2, [0, 0, 0, 1])])
def test_update_t_learns_from_the_version_that_the_lag_declares(tmp_path, lag, versions):
    steps = run(tmp_path, *with_lag(lag), "Online.steps=4")
    drawn = [{*step.rollout["version"][step.rollout["action_mask"]].tolist()} for step in steps]
    assert drawn == [{version} for version in versions]
    assert [row["rollout/staleness"] for row in table(tmp_path)] == [t - version for t, version in enumerate(versions)]


def test_more_than_one_version_of_lag_needs_a_bound_on_importance_weights(tmp_path):
    with pytest.raises(ConfigError, match=r"Online.lag = 2, and GRPO as configured has no bound on importance weights"):
        run(tmp_path / "unbounded", "Online.lag=2")


def test_refills_resume_too(tmp_path):
    dapo = ["Online.objective=@DAPO()", "DAPO.max_refills=1", "Online.lag=2", "Online.steps=4",
            "DAPO.importance=@TruncatedImportance()"]  # fmt: skip
    uninterrupted, cut = tmp_path / "whole", tmp_path / "cut"
    steps = run(uninterrupted, *dapo)
    assert any(step.metrics["refill/rounds"] > 0 for step in steps[3:])
    # Rows of refills are of the version that the first ones are of.
    versions = [{*step.rollout["version"][step.rollout["action_mask"]].tolist()} for step in steps]
    assert versions == [{0}, {0}, {0}, {1}]
    run(cut, *dapo, stop_after=3)
    run(cut, *dapo)
    assert table(cut) == table(uninterrupted)


def test_another_seed_is_another_run(tmp_path, uninterrupted):
    run(tmp_path, "Run.seed=1", "Online.steps=1")
    assert table(tmp_path)[0]["policy/entropy"] != table(uninterrupted[0])[0]["policy/entropy"]


def test_another_identity_is_refused_with_the_field_that_differs(tmp_path):
    run(tmp_path, "Online.steps=1")
    with pytest.raises(RefusedIdentity, match=r"learning_rate: 0\.003, now 0\.1"):
        run(tmp_path, "AdamW.learning_rate=0.1")


def test_a_three_line_reward_function_judges_in_the_workers(tmp_path):
    def short(completion, example):
        """Rewards completions of few characters."""
        return float(len(completion) < 4)

    steps = run(tmp_path, "Scoring.verifiers=[@short()]", "Online.steps=1", parts=[short])
    rewards = steps[0].rollout["reward"]
    expected = [float(len(completion) < 4) for _, completion in steps[0].texts]
    assert rewards.tolist() == expected
    assert list(json.loads((tmp_path / "manifest.json").read_text())["identity"]["parts"]) == ["short"]


def test_a_part_that_is_no_part_is_refused():
    with pytest.raises(PartError, match="is of type int"):
        run("unused", parts=[3])


def test_an_illegal_combination_fails_before_anything_runs(tmp_path):
    with pytest.raises(gin.ConfigError, match="samples"):
        run(tmp_path / "new", "Online.samples=1")
    assert not (tmp_path / "new").exists()


def test_a_policy_trained_with_parts_as_objects_opens_from_its_folder_alone(tmp_path):
    def short(completion, example):
        return float(len(completion) < 4)

    run(tmp_path, "Scoring.verifiers=[@short()]", "Online.steps=1", parts=[short])
    trained = open_trained(tmp_path)
    assert trained.step == 1 and "short" in trained.policy.parts.tables["verifiers"]


def test_devices_that_no_mesh_uses_are_named():
    devices = jax.devices()
    note = lambda mesh, sampler=None: idle_devices(
        SimpleNamespace(mesh=mesh, policy=SimpleNamespace(sampler_mesh=sampler))
    )
    two = make_mesh(MeshShape(data=2), devices[:2])
    assert note(two) == (
        "the run uses 2 of 8 devices; 'Config.mesh=@MeshShape()' MeshShape.data=-1 divides each batch over all"
    )
    assert note(two, make_mesh(MeshShape(data=4), devices[2:6])) == "the run uses 6 of 8 devices"
    assert note(make_mesh(MeshShape(data=-1))) is None
    assert note(two, make_mesh(MeshShape(data=6), devices[2:])) is None
