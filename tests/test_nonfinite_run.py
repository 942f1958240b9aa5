"""A run whose weights stop being finite: it stops, says why and from where to go on, and leaves what replays it."""

import dataclasses
import errno
import json
import random
import re
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from processes_in_threads import together
from short_runs import metrics, run
from small_model import BIGRAM

import jrl
from jrl import cli, loop
from jrl.bucket.client import BucketError
from jrl.device.processes import ONE, OtherProcessFailed
from jrl.device.sharding import BATCH_AXES, MeshShape, make_mesh, replicated, row_sharding
from jrl.learning.step import Learned
from jrl.resolve import load_config
from jrl.run import fault, records
from jrl.run.bucket_run import LeaseLost
from jrl.run.checkpoints.run_state import SaveFailed, condemned_dir, list_condemned, list_steps
from jrl.run.fault import replay
from jrl.run.job import Job
from jrl.run.records import Preempted, StopRun
from jrl.run.report.messages import examples_at_fault
from jrl.tools.doctor import examine, saves
from jrl.types import PackedBatch, Recomputed, SequenceTargets, TrainBatch

TINY = [
    "Decoder.layers=2", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8",
    "Decoder.mlp_width=32", "Online.prompts=4", "Online.samples=4", "Online.steps=12", "Checkpoint.every=2",
    "Checkpoint.keep=1", "Log.samples=0", "Scoring.workers=1",
]  # fmt: skip
FAULTY = 4  # the step whose weights are poisoned before it


def poisoned(monkeypatch, step=FAULTY, name="params/layers/down", place=(1, 0, 0), value=np.nan):
    """A run loses an element of its weights before a step, as on a device with a fault."""
    sound = loop.take_step

    def poison(path, leaf):
        if jax.tree_util.keystr(path, simple=True, separator="/") != name.removeprefix("params/"):
            return leaf
        values = np.array(jax.device_get(leaf))
        values[place] = value
        return jax.device_put(values, leaf.sharding)

    def take_step(job, progress):
        if job.done + 1 == step:
            policy = progress.state.models["policy"]
            policy = policy.replace(params=jax.tree_util.tree_map_with_path(poison, policy.params))
            progress = progress._replace(
                state=progress.state.replace(models={**progress.state.models, "policy": policy})
            )
        return sound(job, progress)

    monkeypatch.setattr(loop, "take_step", take_step)


def test_a_stop_after_a_skipped_step_saves_it(tmp_path, monkeypatch):
    poisoned(monkeypatch)
    faulty = loop.take_step

    def take_step(job, progress):
        if job.done == FAULTY:  # the step after it: that the first was skipped is known one step late
            job.stop.set()
        return faulty(job, progress)

    monkeypatch.setattr(loop, "take_step", take_step)
    settings = [one for one in TINY if not one.startswith("Checkpoint.every")]
    with pytest.raises(Preempted, match=f"step {FAULTY + 1}"):
        run([*settings, "Checkpoint.every=100"], tmp_path / "run")
    assert list_steps(tmp_path / "run" / "checkpoints") == [FAULTY + 1]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["update/skipped_nonfinite"] for row in rows] == [0, 0, 0, 1, 1]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """(the folder of a run that stopped, its message)."""
    folder = tmp_path_factory.mktemp("run") / "run"
    with pytest.MonkeyPatch.context() as patch:
        poisoned(patch)
        with pytest.raises(StopRun) as error:
            run(TINY, folder)
    return folder, str(error.value)


def test_the_last_save_that_a_sound_step_learned_from_is_never_pruned(stopped):
    folder, _ = stopped
    # Steps 4 to 8 were not finite. Checkpoint.keep is 1, and the save of step 6 holds the poisoned weights.
    assert list_steps(folder / "checkpoints") == [2]
    assert list_condemned(folder / "checkpoints") == [6]


@pytest.mark.parametrize("error", [None, BucketError(errno.EIO, "the bucket is gone"), LeaseLost("taken")])
def test_what_a_stop_sets_aside_is_committed_and_the_diagnosis_is_told_whatever_becomes_of_it(tmp_path, error):
    events = []

    def publish():
        events.append("committed")
        if error is not None:
            raise error

    condemn = lambda first: events.append(f"from {first}") or [6]
    run_state = SimpleNamespace(steps=lambda: [1, 2, 6], condemned=list, condemn=condemn)
    stage = SimpleNamespace(name="rl", config=None, arrays=None, shape=SimpleNamespace(sequences=4))
    job = SimpleNamespace(stages=[stage], unproven=2, skipped=5, processes=ONE, run_state=run_state,
                          display=SimpleNamespace(phase=lambda text: None), policy=None,
                          mesh=SimpleNamespace(shape=dict.fromkeys(BATCH_AXES, 1)), folder=tmp_path,
                          location=tmp_path, publish=publish)  # fmt: skip
    learned = SimpleNamespace(epochs=1, warms_up=False)
    step = SimpleNamespace(step=8, learned=learned, examples=[], batch=None, metrics={"loss": 0.0, "grad_norm": 1.0})
    found = fault.stopped(job, SimpleNamespace(stage=0, state=None), step)
    assert events == ["from 2", "committed"] and isinstance(found, StopRun)
    assert "Last good checkpoint: step 1" in str(found) and "Checkpoints of step 6 are set aside" in str(found)


def test_the_message_names_the_good_step_and_the_cause(stopped):
    folder, message = stopped
    assert "steps 4 to 8 of stage rl" in message
    assert (
        "weights (params/layers/down) of layer 1 of the role policy; no single example: all 16 sequences of the batch"
        in message
    )
    assert "Last good checkpoint: step 2" in message and "Checkpoints of step 6 are set aside" in message
    assert f"jrl replay {folder / 'fault'}" in message


def test_doctor_says_that_the_same_command_meets_the_same_fault(stopped):
    assert any(
        line.text.startswith("each of the last 5 steps skipped updates, since the loss") for line in examine(stopped[0])
    )
    (last,) = [line for line in examine(stopped[0]) if line.text.startswith("not finished")]
    assert last.good is False and "the same command meets the same fault, unless you change what led" in last.text
    assert last.text.endswith("`jrl replay` of its fault/ repeats it")


def test_a_learning_rate_that_loses_the_weights_is_no_single_examples_fault(tmp_path):
    with pytest.raises(StopRun, match=r"role policy; no single example: all 16 sequences of the batch\. "):
        run(TINY, tmp_path / "run", "AdamW.learning_rate=1e30")


def test_a_run_that_ends_before_it_is_stopped_for_weights_that_are_not_finite_is_stopped_at_its_end(
    tmp_path, monkeypatch
):
    poisoned(monkeypatch)
    settings = [one for one in TINY if not one.startswith("Online.steps")]
    with pytest.raises(StopRun) as error:
        run([*settings, "Online.steps=6"], tmp_path / "run")
    weights = "weights (params/layers/down) of layer 1 of the role policy"
    assert f"{weights}. Updates of steps 4 to 6 were skipped" in str(error.value)
    assert "Last good checkpoint: step 2; a rerun continues from it" in str(error.value)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (list_steps(checkpoints), list_condemned(checkpoints)) == ([2], [4])  # the last step is not saved
    assert not (tmp_path / "run" / "summary.json").exists()
    assert any(line.good is False and line.text.startswith("the checkpoints of step 4 are set aside") for line in
               saves(tmp_path / "run", []))  # fmt: skip


def test_a_run_whose_only_update_made_weights_that_are_not_finite_is_stopped(tmp_path):
    settings = [one for one in TINY if not one.startswith("Online.steps")]
    with pytest.raises(StopRun, match="No checkpoint is good; a rerun begins anew") as error:
        run([*settings, "Online.steps=1", "AdamW.learning_rate=3e38", "AdamW.weight_decay=1e3"], tmp_path / "run")
    assert "The stage rl has ended with weights that are not finite" in str(error.value)
    assert "skipped" not in str(error.value)  # the gradient was finite
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (list_steps(checkpoints), list_condemned(checkpoints)) == ([], [1])
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("stops", ["at the end of its stage", "after five steps"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_stops_before_its_first_save_begins_anew(tmp_path, monkeypatch, capsys, stops, fails):
    """Its state is saved and set aside. Where that fails too, the diagnosis is told all the same."""

    def save(job, progress):
        raise SaveFailed("step 3 could not be saved: the disk is full")

    settings = [one for one in TINY if not one.startswith(("Online.steps", "Checkpoint.every"))]
    with monkeypatch.context() as patch:
        too_large(patch, 3) if stops.startswith("at") else poisoned(patch, 1)
        if fails:
            patch.setattr(records, "save", save)
        steps = 3 if stops.startswith("at") else 9
        with pytest.raises(StopRun, match="No checkpoint is good; a rerun begins anew"):
            run([*settings, f"Online.steps={steps}", "Checkpoint.every=100"], tmp_path / "run")
    assert ("the disk is full" in capsys.readouterr().out) == fails
    checkpoints = tmp_path / "run" / "checkpoints"
    done = 3 if stops.startswith("at") else 5
    assert (list_steps(checkpoints), list_condemned(checkpoints)) == ([], [] if fails else [done])
    if not fails:
        again = [*settings, "Online.steps=2", "Checkpoint.every=1"]
        assert jrl.train("configs/tiny.gin", again, run=tmp_path / "run", accept_change=True)["steps"] == 2


def test_a_state_that_was_set_aside_and_put_back_stops_the_run_again_with_its_diagnosis(tmp_path, monkeypatch):
    settings = [*(one for one in TINY if not one.startswith("Checkpoint.every")), "Checkpoint.every=100"]
    with monkeypatch.context() as patch:
        poisoned(patch, 1)
        with pytest.raises(StopRun, match="5 updates in a row were not finite: steps 1 to 5 "):
            run(settings, tmp_path / "run")
    condemned_dir(tmp_path / "run" / "checkpoints", 5).rename(tmp_path / "run" / "checkpoints" / "00000005")
    with pytest.raises(StopRun, match="6 updates in a row were not finite: steps 1 to 6 ") as error:
        run(settings, tmp_path / "run")
    assert "weights (params/layers/down) of layer 1 of the role policy" in str(error.value)
    assert replay(tmp_path / "run" / "fault").recorded["first_skipped"] == 1
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (list_steps(checkpoints), list_condemned(checkpoints)) == ([], [5])


@pytest.mark.parametrize("error", [SaveFailed("step 3 could not be saved: the disk is full"), LeaseLost("taken")])
def test_a_process_of_several_that_cannot_save_what_is_set_aside_ends_all_with_its_error(monkeypatch, error):
    """The others have not failed and wait in the save. Why the run was to stop is told before."""
    notes = []

    def save(job, progress):
        job.processes.barrier("save 3")
        if job.processes.index:
            raise error
        job.processes.barrier("published 3")

    def condemn(processes):
        none = lambda name: lambda: processes.from_writer(name, [] if processes.writer else None)
        run_state = SimpleNamespace(steps=none("steps"), condemned=none("condemned"))
        job = SimpleNamespace(run_state=run_state, processes=processes, unproven=2,
                              display=SimpleNamespace(note=notes.append))  # fmt: skip
        try:
            fault.condemn_unproven(job, None)
        except type(error) as mine:
            processes.fail(str(mine), 4)
            raise

    monkeypatch.setattr(records, "save", save)
    (other, failed), _ = together(2, condemn)
    assert failed is error and isinstance(other, OtherProcessFailed) and str(error) in str(other)
    assert notes == ["The run was to stop: weights may not be finite from step 2 on."]


def test_a_last_update_whose_norm_alone_is_not_finite_is_said(tmp_path, capsys):
    settings = [one for one in TINY if not one.startswith("Online.steps")]
    run([*settings, "Online.steps=1", "AdamW.learning_rate=1e30"], tmp_path / "run")  # squares of weights overflow
    said = "The update of the role policy at step 1 was so large that its norm is not finite. The weights are finite."
    assert said in capsys.readouterr().out
    run([*settings, "Online.steps=1", "AdamW.learning_rate=1e30"], tmp_path / "run")  # nothing to do
    assert said not in capsys.readouterr().out
    assert (tmp_path / "run" / "summary.json").exists()


def filled_with(value, state):
    """Returns the state with a policy of one value."""
    put = lambda x: jax.device_put(np.full(x.shape, value, x.dtype), x.sharding)
    policy = state.models["policy"]
    return state.replace(models={**state.models, "policy": policy.replace(params=jax.tree.map(put, policy.params))})


def too_large(monkeypatch, step, *, lost=True, then=None):
    """The update of a step has a norm that is not finite, and loses the weights.

    Args:
      lost: False: it leaves them as they are. then: metrics of the step after it.
    """
    sound = loop.take_step

    def take_step(job, progress):
        progress, taken = sound(job, progress)
        if job.done + 1 == step:
            taken.metrics["update/norm"] = np.inf
            if lost:
                progress = progress._replace(state=filled_with(np.inf, progress.state))
        elif job.done == step and then is not None:
            taken.metrics |= then
        return progress, taken

    monkeypatch.setattr(loop, "take_step", take_step)


def test_where_the_last_of_several_updates_did_the_save_before_it_is_good(tmp_path, monkeypatch):
    too_large(monkeypatch, 4)
    settings = [one for one in TINY if not one.startswith("Online.steps")]
    with pytest.raises(StopRun, match="Last good checkpoint: step 2; a rerun continues from it"):
        run([*settings, "Online.steps=4"], tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (list_steps(checkpoints), list_condemned(checkpoints)) == ([2], [])


@pytest.mark.parametrize("lost", [True, False])
def test_weights_are_looked_at_where_a_stage_ends_and_found_finite_they_are_in_doubt_no_more(
    tmp_path, monkeypatch, capsys, lost
):
    too_large(monkeypatch, 2, lost=lost)
    stages = ["Config.stages=[@first/Online(), @Online()]", "first/Online.name='first'", "first/Online.steps=2"]
    settings = [*TINY, *stages, "Online.steps=2", "Checkpoint.every=1"]
    if lost:
        with pytest.raises(StopRun, match="The stage first has ended with weights that are not finite") as error:
            run(settings, tmp_path / "run")
        assert "Last good checkpoint: step 1" in str(error.value)
    else:
        assert len(run(settings, tmp_path / "run")) == 4
        said = "The update of the role policy at step 2 was so large that its norm is not finite."
        assert capsys.readouterr().out.count(said) == 1
        kept = list_steps(tmp_path / "run" / "checkpoints")
        assert kept == [2, 3, 4]  # the end of a stage, the newest proven, the newest


@pytest.mark.parametrize("shortened", [False, True])
def test_a_stage_that_was_left_in_its_last_step_is_looked_at_when_the_run_goes_on(tmp_path, monkeypatch, shortened):
    too_large(monkeypatch, 4)
    settings = [one for one in TINY if not one.startswith("Online.steps")]
    assert (
        len(run([*settings, "Online.steps=4"], tmp_path / "run", stop_after=3)) == 3
    )  # the fourth is made by then, and saved
    assert list_steps(tmp_path / "run" / "checkpoints")[-1] == 4
    with pytest.raises(StopRun, match="The stage rl has ended with weights that are not finite"):
        steps = f"Online.steps={2 if shortened else 4}"  # of two, four are more than there are
        jrl.train("configs/tiny.gin", [*settings, steps], run=tmp_path / "run", accept_change=shortened)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (list_steps(checkpoints), list_condemned(checkpoints)) == ([2], [4])


@pytest.mark.parametrize("killed", [False, True])
def test_a_step_without_tokens_does_not_hide_what_the_update_before_it_did(tmp_path, monkeypatch, killed):
    too_large(monkeypatch, 3, then={"update/norm": 0.0, "update/skipped_nonfinite": 0.0})
    settings = [one for one in TINY if not one.startswith(("Online.steps", "Checkpoint.every"))]
    settings += ["Online.steps=4", "Checkpoint.every=1"]
    if killed:
        run(settings, tmp_path / "run", stop_after=2)  # the third is made by then
    with pytest.raises(StopRun, match="Last good checkpoint: step 2; a rerun continues from it"):
        run(settings, tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (list_steps(checkpoints), list_condemned(checkpoints)) == ([2], [3])  # Checkpoint.keep is 1


def test_an_update_that_was_too_large_is_in_doubt_until_its_role_has_had_a_sound_one():
    critic = ["Online.objective=@PPO()", "Online.critic='policy'", "Online.critic_warmup=1"]
    steps = ["warm/Offline.steps=2", "judge/Offline.steps=2", "Online.steps=5"]
    config, _ = load_config("configs/rlhf-tiny.gin", [*steps, *critic])
    assert [stage.trains for stage in config.stages] == ["policy", "reward", "policy"]
    opened = {field.name: None for field in dataclasses.fields(Job) if field.default is dataclasses.MISSING}
    job = Job(**{**opened, "policy": SimpleNamespace(config=config), "overflowed": {}})
    for norm, of_critic, overflowed, unproven in [
        (np.inf, None, {"policy": 1}, 1),
        (0.0, None, {"policy": 1}, 1),  # nothing was learned
        (1.0, None, {"policy": 1}, 1),  # of the reward model
        (np.nan, None, {"policy": 1, "reward": 4}, 1),
        (0.5, 0.5, {"policy": 1, "reward": 4}, 1),  # the critic warms up: both are its norm
        (0.5, np.inf, {"reward": 4, "critic": 6}, 4),
        (np.inf, 0.5, {"reward": 4, "policy": 7}, 4),
        (np.nan, 0.5, {"reward": 4, "policy": 7}, 4),  # the first may be what was wrong already
        (0.5, 0.5, {"reward": 4}, 4),
    ]:
        job.done += 1
        metrics = {"update/norm": norm} | ({} if of_critic is None else {"critic/update/norm": of_critic})
        records.note_overflows(job, SimpleNamespace(step=job.done, metrics=metrics))
        assert (job.overflowed, job.unproven) == (overflowed, unproven), job.done
    job.overflowed, job.skipped = {}, 2
    assert job.unproven == 7


def test_a_run_whose_last_updates_alone_were_not_finite_ends_and_says_so(tmp_path, monkeypatch, capsys):
    sound = loop.take_step

    def skip(job, progress):
        progress, step = sound(job, progress)
        if job.done >= 2:  # the guard has left the weights as they were
            step.metrics["update/skipped_nonfinite"] = 1.0
        return progress, step

    monkeypatch.setattr(loop, "take_step", skip)
    settings = [one for one in TINY if not one.startswith("Online.steps")]
    run([*settings, "Online.steps=4"], tmp_path / "run")
    shown = capsys.readouterr().out
    assert "Updates of steps 3 to 4 were skipped" in shown and "The weights are finite" in shown
    assert shown.splitlines()[-1] == f"Examine the run: jrl doctor {tmp_path / 'run'}"
    assert list_steps(tmp_path / "run" / "checkpoints")[-1] == 4
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    ("sequences", "ids", "said"),
    [
        (None, "abab", "of which examples is not known"),
        ((), "abab", "no single example: all 4 sequences of the batch"),
        ((0, 1, 2, 3), "aabb", "no single example: all 4 sequences of the batch"),
        ((0, 2), "abab", "in rows of the examples 'a'"),
        (range(6), "abcdefgh", "in rows of the examples 'a', 'b', 'c', 'd' and 2 more"),
        ((3,), "", "in sequences of the batch whose examples are not known: 3"),
    ],
)
def test_the_examples_at_fault_are_named_where_some_are(sequences, ids, said):
    assert examples_at_fault(sequences, ids, len(ids) or 4) == said


def test_a_rerun_goes_on_from_the_good_step_and_ends(stopped, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(stopped[0], folder)
    seen = run(TINY, folder)
    assert [step.step for step in seen] == list(range(3, 13))
    assert all(step.metrics["update/skipped_nonfinite"] == 0 for step in seen)
    assert list_condemned(folder / "checkpoints") == []
    rows = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(1, 13))


def test_the_bundle_replays_the_fault_away_from_its_run(stopped, tmp_path, capsys):
    bundle = tmp_path / "elsewhere"
    shutil.copytree(stopped[0] / "fault", bundle)
    replayed = replay(bundle)
    assert (replayed.fault.place, replayed.fault.name, replayed.fault.layer) == ("weights", "params/layers/down", 1)
    assert replayed.role == "policy" and replayed.recorded["last_good_step"] == 2
    assert cli.main(["replay", str(bundle)]) == 0
    assert "weights (params/layers/down) of layer 1 of the role policy" in capsys.readouterr().out


def test_a_bundle_holds_all_arrays_of_rows_by_row(tmp_path):
    """Routes, and values of several attributes, have an axis more than tokens."""
    tokens, places = np.zeros((2, 4, 6), np.int32), np.zeros((2, 4, 3), np.float32)
    packed = PackedBatch(
        tokens=tokens, positions=tokens, segment=tokens, shared_prefix=None, prefix_row=None, action_mask=tokens > 0,
        behaviour_logprobs=None, sampler_logprobs=None, sequence=places, temperature=np.float32(1),
        num_real=np.int32(2), routes=np.zeros((2, 4, 6, 2), np.uint8),
    )  # fmt: skip
    value = np.arange(48, dtype=np.float32).reshape(2, 4, 3, 2)
    targets = SequenceTargets(places > 0, places, places, places, np.float32(1), value=value)
    batch = TrainBatch(
        packed=packed, recomputed=Recomputed(), loss_mask=tokens > 0, loss_weights=tokens.astype(np.float32),
        advantages=None, returns=None, targets=targets, denominator=np.float32(1),
    )  # fmt: skip
    fault._write_batches(tmp_path, Learned([batch], 1, False))
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    (read,) = fault._read_batches(tmp_path, 1, mesh)
    assert jax.tree.structure(read) == jax.tree.structure(batch)
    np.testing.assert_array_equal(read.targets.value, value)
    for leaf in jax.tree.leaves(read):
        assert leaf.sharding == (row_sharding(mesh) if leaf.ndim else replicated(mesh)), leaf.shape


@pytest.mark.slow
def test_a_fault_of_any_weight_at_any_step_stops_the_run_and_is_replayed(tmp_path, trials):
    """And the run goes on from the last good step to its end."""
    draw = random.Random(0)
    shapes = {  # of the weights that every token meets
        "layers/attention_norm": (2, 16), "layers/q": (2, 16, 2, 8), "layers/q_norm": (2, 8), "layers/k": (2, 16, 1, 8),
        "layers/k_norm": (2, 8), "layers/v": (2, 16, 1, 8), "layers/o": (2, 2, 8, 16), "layers/mlp_norm": (2, 16),
        "layers/gate": (2, 16, 32), "layers/up": (2, 16, 32), "layers/down": (2, 32, 16), "final_norm": (16,),
    }  # fmt: skip
    for trial in range(trials(2, 20)):
        folder, name, step = tmp_path / f"run{trial}", draw.choice(list(shapes)), draw.randrange(4, 8)
        place = tuple(draw.randrange(size) for size in shapes[name])
        with pytest.MonkeyPatch.context() as patch:
            poisoned(patch, step, name, place, draw.choice([np.nan, np.inf, -np.inf]))
            with pytest.raises(StopRun, match=f"steps {step} to {step + 4} of stage rl"):
                run(TINY, folder)
        good = (step - 2) // 2 * 2  # the last save that a sound step learned from
        assert list_steps(folder / "checkpoints") == [good], (trial, name)
        bundle = shutil.copytree(folder / "fault", tmp_path / f"bundle{trial}")
        replayed = replay(bundle)
        layer = place[0] if name.startswith("layers") else None
        assert replayed.fault[:3] == ("weights", f"params/{name}", layer), (trial, replayed.fault)
        assert replayed.recorded["last_good_step"] == good
        assert [one.step for one in run(TINY, folder)] == list(range(good + 1, 13))


def test_a_folder_without_a_bundle_is_refused(tmp_path, capsys):
    assert cli.main(["replay", str(tmp_path)]) == 2
    assert "holds no fault.json" in capsys.readouterr().err
    (tmp_path / "fault.json").write_text('{"step": 3}')
    with pytest.raises(ValueError, match=r"fault\.json is damaged: it has no stage, stage_name"):
        replay(tmp_path)


def test_a_run_that_its_objective_stops_has_the_checkpoint_before_and_goes_on_without_the_limit(tmp_path):
    settings = [BIGRAM, "Online.objective=@IcePop()", "Online.lag=1", "IcePop.low=0.99", "IcePop.high=1.01",
                "Checkpoint.every=1", "Online.steps=6", "AdamW.learning_rate=0.03"]  # fmt: skip
    with pytest.raises(StopRun, match=r"^at step [2-6] \d+% of the tokens were rejected") as error:
        run(settings, tmp_path)
    step = int(re.search(r"step (\d)", str(error.value))[1])
    rows = metrics(tmp_path)
    assert len(rows) == step and rows[-1]["rejected"] > 0.5 and all(row["rejected"] <= 0.5 for row in rows[:-1])
    assert list_steps(tmp_path / "checkpoints")[-1] == step - 1
    run([*settings, "IcePop.most_rejected=None"], tmp_path, accept_change=True)
    assert len(metrics(tmp_path)) == 6


def test_an_objective_does_not_stop_a_run_for_an_update_that_was_not_finite(tmp_path, monkeypatch):
    """A weight that is NaN is within no limits, so that all tokens of the step are rejected."""
    poisoned(monkeypatch, name="params/head", place=(5, 0))
    settings = [one for one in TINY if not one.startswith("Decoder.")]
    with pytest.raises(StopRun, match=r"^5 updates in a row were not finite: steps 4 to 8 of stage rl"):
        run([*settings, BIGRAM, "Online.objective=@IcePop()"], tmp_path)
    assert [row["rejected"] for row in metrics(tmp_path)] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert (tmp_path / "fault" / "fault.json").exists()
