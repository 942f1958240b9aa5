"""Members of a sweep that train in one program: what they learn, in what order, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from short_runs import run as train_alone

from jrl import loop
from jrl.config import ConfigError
from jrl.device.sharding import members_mesh
from jrl.learning.nonfinite import Fault
from jrl.rollout.scoring import ScoringStopped, WorkersLost
from jrl.run import population as populations
from jrl.run import records
from jrl.run.best import best_saved
from jrl.run.checkpoints.run_state import list_steps, restore_step
from jrl.run.identity import RefusedIdentity
from jrl.run.population import open_population
from jrl.run.precompile import state_shape
from jrl.run.records import CheckpointsRemoved, Preempted, inputs_of
from jrl.run.report.display import open_display
from jrl.run.report.metrics import read_metrics
from jrl.run.run_hash import run_fingerprint
from jrl.run.trained import open_trained
from jrl.tools.export import export_policy
from jrl.tools.sweep import population as sweep_population
from jrl.tools.sweep import sweeping
from jrl.tools.sweep.launch import ProgressCallbacks, last_words
from jrl.tools.sweep.members import read_sweep
from jrl.tools.sweep.population import check_population, read_configs, train_population

TINY = [
    "Decoder.layers=1", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8",
    "Decoder.mlp_width=32", "Online.prompts=4", "Online.samples=8", "Online.steps=3", "Checkpoint.every=1",
    "Sampler.slots=6", "Learner.micro_batch_tokens=128", "Log.samples=0", "Log.writers=()", "Scoring.workers=1",
]  # fmt: skip
SWEPT = ["AdamW.learning_rate=[1e-3,3e-2]", "Run.seed=[3,5]"]
MEMBERS = ["learning_rate=0.001,seed=3", "learning_rate=0.001,seed=5", "learning_rate=0.03,seed=3",
           "learning_rate=0.03,seed=5"]  # fmt: skip
SILENT = ProgressCallbacks(lambda *_: None, lambda *_: None, lambda *_: None, lambda *_: None, lambda: None)

pytestmark = pytest.mark.usefixtures("frozen_before_the_first_step", "mesh_of_the_runs")


EVALUATED = ["Config.eval=@Eval()", "Eval.prompts=4", "Data.held_out_every=10"]


def configs_of(*bindings):
    return read_configs(read_sweep("configs/tiny.gin", [*TINY, *bindings]))


@contextlib.contextmanager
def opened(folder, names=MEMBERS, stop=None, devices=None, settings=()):
    configs, parts = configs_of(*SWEPT, *settings)
    show = lambda name: lambda ends: open_display(ends, open(folder / f"{name}.log", "w"), live=False)
    folder.mkdir(exist_ok=True)
    chosen = {name: configs[name] for name in names}
    with open_population(chosen, parts, folder, stop or threading.Event(), show, devices) as population:
        yield population


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A sweep that was trained as a population, without a stop."""
    folder = tmp_path_factory.mktemp("population") / "sweep"
    folder.mkdir()
    sweep = read_sweep("configs/tiny.gin", [*TINY, *SWEPT])
    looked, check_end = [], populations.check_end
    with pytest.MonkeyPatch.context() as patch:
        place = lambda population: (population.first.done, max(population.run_state.steps()))
        patch.setattr(populations, "check_end", lambda p, state: looked.append(place(p)) or check_end(p, state))
        ended = train_population(sweep, folder, *read_configs(sweep), threading.Event(), SILENT)
    assert looked == [(3, 2)]  # where the stage ends, before its last step is saved
    assert {name: end.code for name, end in ended.items()} == dict.fromkeys(MEMBERS, 0)
    return folder


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """The same members in another order, stopped after a step, and where that left them; then trained to the end."""
    folder = tmp_path_factory.mktemp("interrupted")
    stop, order = threading.Event(), [MEMBERS[i] for i in (2, 0, 3, 1)]
    with opened(folder, order, stop) as population, pytest.raises(Preempted):
        sweep_population.run(population, stop, stop.set)
    with opened(folder, order) as population:
        states = states_after_a_step(folder, population)
        sweep_population.run(population, threading.Event(), lambda: None)
    return folder, states


def states_after_a_step(folder, population):
    """Returns the state of every member in the checkpoint of the first step."""
    saved = folder / populations.FOLDER / "checkpoints"
    assert list_steps(saved) == [1] and sweep_population.interrupted(folder) == list(population.jobs)
    target = population.members.shapes(state_shape(inputs_of(population.first), 1))
    state = restore_step(saved, {"state": target}, 1, part=True)[1]["state"]
    return dict(zip(population.jobs, population.members.unstack(state)))


def test_a_member_leaves_what_a_run_leaves(trained):
    for name in MEMBERS:
        summary = json.loads((trained / name / "summary.json").read_text())
        assert summary["steps"] == 3 and summary["seconds"]["total"] > 0
        rows = list(read_metrics(trained / name / "metrics.jsonl"))
        assert [row["step"] for row in rows] == [1, 2, 3] and all("reward/mean" in row for row in rows)
        assert list_steps(trained / name / "checkpoints") == [3]
        assert open_trained(trained / name).step == 3
    assert not (trained / populations.FOLDER).exists()
    rates = [json.loads((trained / name / "config.json").read_text()) for name in MEMBERS]
    assert len({json.dumps(rate) for rate in rates}) == 4


def test_order_and_a_stop_change_no_bit(trained, interrupted):
    folder, _ = interrupted
    for name in MEMBERS:
        assert run_fingerprint(folder / name, 3) == run_fingerprint(trained / name, 3), name
    hashes = [run_fingerprint(trained / name, 3)["params"] for name in MEMBERS]
    assert len(set(hashes)) == 4, "members that learn the same are no population"


@pytest.mark.parametrize(("module", "name", "before"), [(populations, "save_members", True),
                                                       (records, "summarize", False)])  # fmt: skip
def test_members_of_a_population_that_was_killed_before_it_ended_have_a_best_step(tmp_path, module, name, before):
    """Killed after the last checkpoint of all members and before those of each, or after the summary of one."""
    called, settings = getattr(module, name), [*EVALUATED, "Eval.every=3"]

    def killed(*args):
        before or called(*args)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, opened(tmp_path, MEMBERS[:2], settings=settings) as population:
        patch.setattr(module, name, killed)
        with pytest.raises(KeyboardInterrupt):
            sweep_population.run(population, threading.Event(), lambda: None)
    with pytest.MonkeyPatch.context() as patch, opened(tmp_path, MEMBERS[:2], settings=settings) as population:
        assert population.run_state.steps()[-1] == 3
        patch.setattr(loop, "precompile", lambda job, done: None)  # nothing is frozen: the evaluation alone is left
        sweep_population.run(population, threading.Event(), lambda: None)
    for name in MEMBERS[:2]:
        row = list(read_metrics(tmp_path / name / "metrics.jsonl"))[-1]
        assert best_saved(tmp_path / name)[:2] == (3, row["eval/mean"])
        assert json.loads((tmp_path / name / "summary.json").read_text())["best"]["step"] == 3


def test_members_of_a_population_that_was_killed_after_a_stage_have_its_checkpoint(tmp_path):
    settings = [*EVALUATED, "Eval.every=1", "Config.stages=[@first/Online(), @Online()]", "first/Online.steps=1",
                "first/Online.objective=@GRPO()", "first/Online.name='first'"]  # fmt: skip
    save = populations.save

    def killed(population, progress):
        save(population, progress)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, opened(tmp_path, MEMBERS[:2], settings=settings) as population:
        patch.setattr(populations, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            sweep_population.run(population, threading.Event(), lambda: None)
    with opened(tmp_path, MEMBERS[:2], settings=settings) as population:
        assert population.run_state.steps() == [1]
        sweep_population.run(population, threading.Event(), lambda: None)
    for name in MEMBERS[:2]:
        means = {row["step"]: row["eval/mean"] for row in read_metrics(tmp_path / name / "metrics.jsonl")}
        assert list_steps(tmp_path / name / "checkpoints") == [1, 4]
        assert best_saved(tmp_path / name).mean == max(means[1], means[4])


def test_a_member_that_cannot_be_scored_fails_alone_and_lost_workers_stop_all_of_them(trained, tmp_path):
    folder = tmp_path / "sweep"
    with opened(folder) as population:
        breaks_at(2, population.jobs[MEMBERS[0]], WorkersLost("no worker is left"))
        with pytest.raises(WorkersLost):
            sweep_population.run(population, threading.Event(), lambda: None)
    assert list_steps(folder / populations.FOLDER / "checkpoints") == [1]
    written = folder / MEMBERS[0] / "manifest.json"
    begun = written.read_text()
    written.write_text(begun.replace('"data": "', '"data": "other '))
    with pytest.raises(RefusedIdentity, match="continue with the change"), opened(folder):  # of the joint checkpoint
        pass
    written.write_text(begun)
    with opened(folder) as population:
        breaks_at(1, population.jobs[MEMBERS[1]], ScoringStopped("the verifier raised"))  # the second step of all
        sweep_population.run(population, threading.Event(), lambda: None)
        assert population.failed == {MEMBERS[1]: "the verifier raised"}
    for name in set(MEMBERS) - {MEMBERS[1]}:
        assert run_fingerprint(folder / name, 3) == run_fingerprint(trained / name, 3), name
    assert not (folder / MEMBERS[1] / "summary.json").exists()
    assert [row["step"] for row in read_metrics(folder / MEMBERS[1] / "metrics.jsonl")] == [1]


def breaks_at(call, job, error):
    """Makes a member's scorer raise from a call on."""
    calls, collect = [], job.scorer.collect

    def broken(*args):
        calls.append(args)
        if len(calls) >= call:
            raise error
        return collect(*args)

    job.scorer.collect = broken


def test_a_population_whose_checkpoints_were_removed_is_refused(tmp_path):
    rows = "".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3))
    with opened(tmp_path / "sweep") as population:
        metrics = tmp_path / "sweep" / MEMBERS[2] / "metrics.jsonl"
        metrics.write_text(rows)
        with pytest.raises(CheckpointsRemoved, match=r"one of the population back under .*population.checkpoints"):
            populations.restore(population)
        assert metrics.read_text() == rows and not (metrics.parent / "metrics.jsonl.1").exists()


def test_the_first_update_is_that_of_the_member_alone(interrupted, tmp_path):
    _, states = interrupted
    name = "learning_rate=0.03,seed=5"
    train_alone(TINY, tmp_path / "alone", "AdamW.learning_rate=3e-2", "Run.seed=5", "Online.steps=1")
    member = states[name]
    alone = restore_step(tmp_path / "alone" / "checkpoints", {"state": abstract(member)}, 1)[1]["state"]
    # After one update AdamW's first moment is (1 - beta) times the gradient.
    ours, theirs = (first_moment(state) for state in (member, alone))
    assert np.linalg.norm(theirs) > 0
    assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)
    other = first_moment(states["learning_rate=0.03,seed=3"])
    assert np.linalg.norm(other - theirs) > 0.1 * np.linalg.norm(theirs)


def test_members_dealt_out_over_devices_learn_what_they_do_on_one_and_go_on_with_other_devices(trained, tmp_path):
    states = []
    for count in (1, 2):
        folder, stop = tmp_path / f"{count}", threading.Event()
        with opened(folder, stop=stop, devices=jax.devices()[:count]) as population, pytest.raises(Preempted):
            sweep_population.run(population, stop, stop.set)
        assert population.members.mesh.size == count
        compiled = [one for program in population.first.program_cache.programs.values()
                    for one in program._compiled.values()]  # fmt: skip
        assert len(compiled) > 5 and not [line for one in compiled for line in collectives(one.as_text())]
        with opened(folder) as population:  # on the four devices that divide the members
            states.append(states_after_a_step(folder, population))
    for one, two in ([states[i][name] for i in (0, 1)] for name in MEMBERS):
        ours, theirs = first_moment(two), first_moment(one)
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)
        np.testing.assert_array_equal(jax.random.key_data(one.key), jax.random.key_data(two.key))
        placed = {x.sharding for x in jax.tree.leaves(two)}
        assert all(sharding.device_set == {jax.devices()[0]} for sharding in placed), "a member is on one device"
    with opened(folder, devices=jax.devices()[:1]) as population:
        sweep_population.run(population, threading.Event(), lambda: None)
    for name in MEMBERS:
        ours, theirs = (list(read_metrics(place / name / "metrics.jsonl")) for place in (folder, trained))
        for metric in ("reward/mean", "grad_norm", "policy/entropy"):
            assert [row[metric] for row in ours] == pytest.approx([row[metric] for row in theirs], rel=1e-4), metric


def test_frozen_weights_that_members_share_are_on_every_device_without_an_axis_of_members(trained, tmp_path):
    export_policy(trained / MEMBERS[0], tmp_path / "base")
    adapted = [binding for binding in TINY if not binding.startswith("Decoder")] + [
        "Config.model=@Published()", f"Published.path={str(tmp_path / 'base')!r}", "Config.adapter=@LoRA()",
        "LoRA.rank=2", "Run.seed=[3,5]",
    ]  # fmt: skip
    configs, parts = read_configs(read_sweep("configs/tiny.gin", adapted))
    show = lambda name: lambda ends: open_display(ends, io.StringIO(), live=False)
    with open_population(configs, parts, tmp_path, threading.Event(), show) as population:
        policy = populations.restore(population).state.models["policy"]
        base, own = jax.tree.leaves(policy.frozen), jax.tree.leaves(policy.params)
        assert all(x.is_fully_replicated and len(x.addressable_shards) == 2 for x in base)
        assert all(x.shape[0] == 2 and x.addressable_shards[0].data.shape[0] == 1 for x in own)
        of_run = jax.tree.leaves(state_shape(inputs_of(population.first), 0).models["policy"].frozen)
        assert [x.shape for x in base] == [x.shape for x in of_run]
        sweep_population.run(population, threading.Event(), lambda: None)
    for name in configs:
        assert open_trained(tmp_path / name).step == 3


def collectives(text):
    """Returns the operations by which devices of a compiled program communicate: groups of more than one."""
    found = re.findall("(?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)[^ ]*\\(.*", text)
    return [line for line in found if not is_of_one_device(line)]


def is_of_one_device(line):
    """Whether each device is a group of its own: a list of groups, or since jax 0.12 a mesh and the axes of a group."""
    by_axes = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line)
    if by_axes is None:
        return re.search(r"replica_groups=\{(\{\d+\},?)+\}", line) is not None
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", by_axes[1]))
    return all(sizes[axis] == "1" for axis in re.findall(r"'(\w+)'", by_axes[2]))


@pytest.mark.parametrize(("members", "present", "used"), [(16, 8, 8), (12, 8, 6), (3, 8, 3), (11, 8, 1), (4, 1, 1)])
def test_as_many_devices_are_used_as_divide_the_members(members, present, used):
    mesh = members_mesh(members, jax.devices()[:present])
    assert mesh.size == mesh.shape["members"] == used


def test_the_sweep_says_how_members_are_dealt_out():
    assert sweep_population.dealt_out(16) == "in one program, 2 on each of 8 devices"
    assert sweep_population.dealt_out(12) == "in one program, 2 on each of 6 devices, which divide them; there are 8"
    assert sweep_population.dealt_out(11) == "in one program, on 1 device of 8: no larger number of them divides 11"


def test_members_of_an_interrupted_population_that_have_ended_train_and_count_with_the_others(tmp_path, monkeypatch):
    sweep = read_sweep("configs/tiny.gin", [*TINY, *SWEPT])
    monkeypatch.setattr(sweeping, "is_finished", lambda folder, member: member.name == MEMBERS[0])

    def begin():
        stream, names = io.StringIO(), []
        sweeping.train_sweep(
            sweep, tmp_path, train=lambda members, progress: names.extend(member.name for member in members),
            jobs=None, how=str, metrics=(), stream=stream, together=sweep_population.interrupted(tmp_path),
        )  # fmt: skip
        return names, stream.getvalue()

    assert begin() == (MEMBERS[1:], f"4 members in {tmp_path}, 1 of them finished before; 3\n")
    sweep_population.write_members(tmp_path, {"members": MEMBERS})
    assert begin() == (MEMBERS, f"4 members in {tmp_path}; 4\n")
    sweep_population.write_members(tmp_path, {"members": MEMBERS[1:], sweep_population.AGAIN: True})
    assert begin() == (MEMBERS[1:], f"4 members in {tmp_path}, 1 of them finished before; 3\n")


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def first_moment(state):
    leaves = jax.tree_util.tree_leaves_with_path(state.models["policy"].opt_state)
    found = [np.asarray(leaf).ravel() for path, leaf in leaves if ".mu" in jax.tree_util.keystr(path)]
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("swept", "field"),
    [
        ("Sampler.completion_length=[3,4]", "Sampler.completion_length"),
        ("Online.objective=[@GRPO(),@DrGRPO()]", "Online.objective"),
        ("AdamW.clip_norm=[None,1.0]", "AdamW.clip_norm"),  # None is another program
        ("Addition.digits=[1,2]", "Addition.digits"),
        ("Regex.weight=[1.0,2.0]", "Regex.weight"),  # a float, but of the host
    ],
)
def test_members_that_differ_in_more_than_floats_are_refused_by_the_fields_name(swept, field):
    configs, parts = configs_of(swept)
    with pytest.raises(ConfigError, match=f"one program, and {field} is part of"):
        check_population(configs, parts.tables, [field])


def test_members_with_other_data_files_are_refused():
    other_data = read_sweep("tiny", ["Config.task=@Jsonl()", "Jsonl.path=['a','b']", "S=[1,2]", "Run.seed=%S"], "pairs")
    configs, parts = read_configs(other_data)
    with pytest.raises(ConfigError, match=r"Jsonl\.path is part of the program or of the data: 'a' in "):
        check_population(configs, parts.tables)


@pytest.mark.parametrize(
    "swept", ["AdamW.weight_decay=[0.0,0.1]", "Sampler.temperature=[0.7,1.0]", "GRPO.clip_low=[0.1,0.2]"]
)
def test_floats_of_programs_may_differ(swept):
    configs, parts = configs_of(swept, "Run.seed=[0,1]")
    check_population(configs, parts.tables)


def test_the_weight_of_stored_rows_the_decay_of_a_reference_and_a_kl_limit_may_differ():
    configs, parts = configs_of(
        "Online.pretraining=@PretrainingMix()", "PretrainingMix.source=@Demonstrations()", "GRPO.kl=0.1",
        "Online.reset_reference_every=1", "PretrainingMix.coefficient=[0.1,0.2]", "Online.reference_decay=[0.5,0.9]",
    )  # fmt: skip
    assert len(configs) == 4
    check_population(configs, parts.tables)
    configs, parts = configs_of("Learner.epochs=2", "Online.max_kl=[0.01,0.02]")
    check_population(configs, parts.tables)
    configs, parts = configs_of(
        "Online.pretraining=@PretrainingMix()", "PretrainingMix.source=@Demonstrations()",
        "PretrainingMix.batch_size=[8,16]",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"one program, and PretrainingMix\.batch_size is part of"):
        check_population(configs, parts.tables)


@pytest.mark.parametrize(
    ("binding", "what"),
    [("MeshShape.data=2", "several devices for one member"), ("AdamW.memory='host'", "AdamW.memory")],
)
def test_what_no_population_has_is_refused_by_name(binding, what):
    configs, parts = configs_of("Run.seed=[0,1]", binding)
    with pytest.raises(ConfigError, match=what):
        check_population(configs, parts.tables)


def test_a_member_with_checkpoints_of_its_own_is_refused(tmp_path):
    sweep = read_sweep("configs/tiny.gin", [*TINY, *SWEPT])
    (tmp_path / MEMBERS[0] / "checkpoints" / "00000005").mkdir(parents=True)
    with pytest.raises(ConfigError, match="checkpoints of its own"):
        sweep_population.begin_together(tmp_path, {member.name: member for member in sweep.members})


def test_a_population_that_is_refused_before_it_trains_does_not_hold_its_folder(tmp_path):
    """Without --population it was refused then, as one that was interrupted."""
    missing = ["Config.task=@Jsonl()", f"Jsonl.path='{tmp_path}/none.jsonl'"]
    sweep = read_sweep("configs/tiny.gin", [*TINY, *SWEPT, *missing])
    with pytest.raises((ValueError, OSError), match=r"none\.jsonl"):
        train_population(sweep, tmp_path / "sweep", *read_configs(sweep), threading.Event(), SILENT)
    assert sweep_population.interrupted(tmp_path / "sweep") == []


def test_members_that_failed_begin_again_when_the_sweep_is_called_again(tmp_path):
    sweep = read_sweep("configs/tiny.gin", [*TINY, *SWEPT])
    members = {member.name: member for member in sweep.members}
    assert sweep_population.begin_together(tmp_path, members) == (sorted(MEMBERS), False)
    sweep_population.write_members(tmp_path, {"members": MEMBERS[:1], sweep_population.AGAIN: True})
    ended = tmp_path / populations.FOLDER / "checkpoints"  # of all members: killed before it was removed
    (ended / "00000003").mkdir(parents=True)
    assert sweep_population.begin_together(tmp_path, members) == (MEMBERS[:1], True)
    assert not ended.exists()
    own = tmp_path / MEMBERS[0] / "checkpoints" / "00000002"  # of a stage before it failed, or trained alone since
    own.mkdir(parents=True)
    with pytest.raises(ConfigError, match="checkpoints of its own"):
        sweep_population.begin_together(tmp_path, members)
    assert own.exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep_population, "is_finished", lambda folder, member: member.name == MEMBERS[0])
        assert sweep_population.begin_together(tmp_path, members) == ([], True)
    assert own.exists()


def test_a_member_that_ends_with_weights_that_are_not_finite_fails_alone(trained, tmp_path):
    folder = tmp_path / "sweep"
    with opened(folder) as population:
        for name, job in population.jobs.items():
            job.skipped = 2 * (name == MEMBERS[2])  # as if its last updates had not been finite
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(populations.fault, "bad_weights", lambda state, cfg: (Fault("weights", "embed"), "policy"))
            populations.check_end(population, population.members.stack([{"w": jax.numpy.zeros(2)}] * 4))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(populations.records, "to_save", lambda job, waiting: ({}, {}))
            patch.setattr(populations, "draws_of_members", lambda population, progress: [()] * 4)
            for place, job in enumerate(population.jobs.values()):
                job.done, job.overflowed = 9, {"policy": 4 + place}
            population.jobs[MEMBERS[2]].overflowed = {"policy": 2}  # it has failed
            first = []
            run_state = SimpleNamespace(save=lambda *_, unproven: first.append(unproven))
            populations.save(dataclasses.replace(population, run_state=run_state), SimpleNamespace(state=None))
        assert first == [4]  # of members that have not failed
    assert list(population.failed) == [MEMBERS[2]]
    assert population.failed[MEMBERS[2]] == (
        "after step 0 its weights are not finite: weights (embed) of the role policy. "
        "Train it alone to look into them, or lower its learning rate"
    )


@pytest.mark.slow
def test_members_refill_and_sample_ahead_each_as_alone(tmp_path):
    harder = [binding for binding in TINY if not binding.startswith(("Online.steps", "Checkpoint"))] + [
        "Online.steps=4", "Checkpoint.every=2", "Online.lag=1", "Online.objective=@DAPO()", "Regex.pattern='.*[0-3].*'",
    ]  # fmt: skip
    sweep = read_sweep("configs/tiny.gin", [*harder, "Run.seed=[0,1,2]"])
    folder = tmp_path / "sweep"
    folder.mkdir()
    ended = train_population(sweep, folder, *read_configs(sweep), threading.Event(), SILENT)
    assert {end.code for end in ended.values()} == {0}
    train_alone(harder, tmp_path / "alone", "Run.seed=1")
    alone = list(read_metrics(tmp_path / "alone" / "metrics.jsonl"))
    rows = {name: list(read_metrics(folder / name / "metrics.jsonl")) for name in ended}
    for ours, theirs in zip(rows["seed=1"], alone, strict=True):
        for metric in ("refill/rounds", "refill/groups_drawn", "reward/mean", "loss/rows", "grad_norm"):
            np.testing.assert_allclose(ours[metric], theirs[metric], rtol=1e-4, err_msg=f"{metric} at {ours['step']}")
    rounds = [tuple(row["refill/rounds"] for row in of_member) for of_member in rows.values()]
    assert sum(map(sum, rounds)) > 0 and len(set(rounds)) > 1


@pytest.mark.slow
def test_a_member_that_diverges_fails_and_the_others_go_on(tmp_path):
    longer = [binding for binding in TINY if not binding.startswith("Online.steps")] + ["Online.steps=8"]
    sweep = read_sweep("configs/tiny.gin", [*longer, "AdamW.learning_rate=[1e-3,1e30]"])
    (tmp_path / "sweep").mkdir()
    ended = train_population(sweep, tmp_path / "sweep", *read_configs(sweep), threading.Event(), SILENT)
    assert {name: end.code for name, end in ended.items()} == {"learning_rate=0.001": 0, "learning_rate=1e+30": 4}
    log = (tmp_path / "sweep" / "logs" / "learning_rate=1e+30.log").read_text()
    assert "5 updates in a row were not finite" in log
    # A step was under way when the updates before it were found not to be finite: its lines come last in the log.
    words = last_words(tmp_path / "sweep", ended["learning_rate=1e+30"])
    assert words.startswith("5 updates in a row were not finite, ") and words.endswith("or lower its learning rate")
    assert not (tmp_path / "sweep" / "learning_rate=1e+30" / "summary.json").exists()
    record = json.loads((tmp_path / "sweep" / populations.FOLDER / "members.json").read_text())
    assert record == {"members": ["learning_rate=1e+30"], "again": True}
