"""What a folder is told before a run touches it."""

import dataclasses
import hashlib
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mutated_config import leaves, mutations

import jrl
from jrl.algos.grpo import GRPO
from jrl.config import load, to_gin, to_json
from jrl.experiment import FREE, TABLES, Config, Online, config_classes, configured_curriculum
from jrl.plugins import PartError, load_parts
from jrl.resolve import load_config
from jrl.run.data import data_fingerprint, open_streams, stored_sources
from jrl.run.identity import RefusedIdentity, check_not_foreign, identify, places_of, refuse_another, remove_unbegun
from jrl.run.report.manifest import compare, make_manifest, write_manifest
from jrl.run.report.metrics import row_line
from jrl.run.report.rollouts import open_rollouts
from jrl.run.report.text import printable_lines
from jrl.run.signals import stop_on_signals
from jrl.tasks.data.curricula import HardFocus
from jrl.tasks.data.prompts import Data
from jrl.tasks.envs import ENVS, Generated, open_source
from jrl.tasks.stopping import StopRequested
from jrl.tasks.tokenizers import TOKENIZERS
from jrl.tasks.tokenizers.bytes import Bytes
from jrl.tools.doctor import (
    INDEX_ADVICE,
    ROLLOUTS_ADVICE,
    ending,
    examine,
    identity,
    metrics,
    metrics_rows,
    population_of,
    rollouts,
    run_lines,
    stages,
)
from jrl.tools.sweep.population import write_members

pytestmark = pytest.mark.fast
WARM = ["Config.stages = [@warm/Offline(), @Online()]", "warm/Offline.source = @Demonstrations()",
        "warm/Offline.objective = @SFT()", "warm/AdamW.learning_rate = 0.1"]  # fmt: skip
PARTS = load_parts(())


def test_a_folder_with_files_of_someone_else_is_refused_and_left_alone(tmp_path):
    check_not_foreign(tmp_path / "new")
    (tmp_path / ".hidden").write_text("mine")
    check_not_foreign(tmp_path)
    (tmp_path / "a.md").write_text("mine")
    (tmp_path / "b.md").write_text("mine")
    with pytest.raises(RefusedIdentity, match=r"is not a run directory and already contains a\.md, b\.md; choose an"):
        check_not_foreign(tmp_path)
    for name in "cde":
        (tmp_path / f"{name}.md").write_text("mine")
    with pytest.raises(RefusedIdentity, match=r"contains a\.md, b\.md, c\.md and 2 more; choose"):
        check_not_foreign(tmp_path)
    assert len(list(tmp_path.iterdir())) == 6
    (tmp_path / "lock").touch()  # a run that was killed before it wrote its manifest
    check_not_foreign(tmp_path)


@pytest.mark.parametrize(
    ("binding", "refusal"),
    [("Log.writers=['tensorboard']", r"pip install 'jrl-jax\[log\]'"),
     ("Data.prompt_length=3", "prompt_length|tokens|longer|prompts"),
     ("Jsonl.path='nosuch.jsonl'", "nosuch.jsonl")],
)  # fmt: skip
def test_a_run_that_is_refused_leaves_no_folder(tmp_path, monkeypatch, binding, refusal):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    task = ["Config.task=@Jsonl()"] if "Jsonl" in binding else []
    with pytest.raises((ValueError, OSError, ImportError), match=refusal):
        jrl.train("tiny", [*task, binding], run=tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays_with_a_refused_run(tmp_path):
    with pytest.raises((ValueError, OSError), match="nosuch"):
        jrl.train("tiny", ["Config.task=@Jsonl()", "Jsonl.path='nosuch.jsonl'"], run=tmp_path)
    assert tmp_path.exists()


def test_only_a_run_that_has_not_begun_is_removed(tmp_path):
    names = ("begun", "saved", "trained", "unbegun")
    for name in names:
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    (tmp_path / "begun" / "manifest.json").touch()
    # Someone removed the manifest of these while they went on.
    (tmp_path / "saved" / "checkpoints" / "00000005").mkdir()
    (tmp_path / "trained" / "metrics.jsonl").touch()
    for name in names:
        remove_unbegun(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begun", "saved", "trained"]


def test_checkpoints_without_the_manifest_that_names_their_run_are_refused(tmp_path):
    (tmp_path / "lock").touch()
    (tmp_path / "checkpoints" / "00000005").mkdir(parents=True)
    with pytest.raises(RefusedIdentity, match=r"not the manifest\.json"):
        check_not_foreign(tmp_path)
    (tmp_path / "manifest.json").touch()
    check_not_foreign(tmp_path)


def test_a_run_of_a_version_without_a_setting_is_told_so(tmp_path):
    config = load("configs/tiny.gin", (), Config, config_classes(TABLES))
    say = lambda value, **learner: make_manifest(
        config_identity=value, config={"learner": learner}, tokenizer="t", data="d", parts={}, seed=0
    )
    write_manifest(tmp_path / "manifest.json", say("old", row_length=8))
    with pytest.raises(RefusedIdentity, match="version of jrl that did not have these") as refused:
        refuse_another(tmp_path, say("new", row_length=8, prompts="repeated"), config)
    assert "config.gin" not in str(refused.value)
    with pytest.raises(RefusedIdentity, match="holds another run"):
        refuse_another(tmp_path, say("new", row_length=9, prompts="repeated"), config)
    value = dict(config_identity="old", config={"learner": {"row_length": 8}}, tokenizer="t", data="d", seed=0)
    with pytest.raises(RefusedIdentity, match=r"holds another run:\n  parts\.p\.py: not there, now"):
        refuse_another(tmp_path, make_manifest(**value, parts={"p.py": "1"}), config)


def test_a_refusal_says_whether_accepting_the_change_continues_the_run_or_begins_it_again(tmp_path):
    config = load("configs/tiny.gin", (), Config, config_classes(TABLES))
    say = lambda source: make_manifest(
        config_identity="c", config={}, tokenizer="t", data="d", parts={"p.py": source}, seed=0
    )
    write_manifest(tmp_path / "manifest.json", say("raises"))
    (tmp_path / "metrics.jsonl").write_bytes(row_line({"step": 1}))  # a run that was killed before its first save
    with pytest.raises(RefusedIdentity, match="or begin it again with the change, since it has no checkpoint: --accep"):
        refuse_another(tmp_path, say("mended"), config)
    (tmp_path / "population" / "00000005").mkdir(parents=True)
    with pytest.raises(RefusedIdentity, match="or continue with the change: --accept-change"):
        refuse_another(tmp_path, say("mended"), config, checkpoints=tmp_path / "population")
    (tmp_path / "checkpoints" / "00000005").mkdir(parents=True)
    with pytest.raises(RefusedIdentity, match="or continue with the change: --accept-change"):
        refuse_another(tmp_path, say("mended"), config)


def test_a_refusal_names_only_what_makes_another_run():
    load_ = lambda *bindings: load("configs/tiny.gin", [*WARM, *bindings], Config, config_classes(TABLES))
    free = places_of(FREE, load_())
    moments = {"stages.0.optimizer.memory", "stages.1.optimizer.memory"}
    assert {"checkpoint.*", "mesh.*", "data.on_bad_prompt", "parts", *moments} <= {*free}
    begun = {"identity": {"config": "a"}, "environment": {}, "config": to_json(load_())}
    now = {"identity": {"config": "b"}, "environment": {},
           "config": to_json(load_("Online.lag = 1", "Checkpoint.keep = 7", "AdamW.memory = 'host'"))}  # fmt: skip
    assert compare(begun, now, free)[0] == ["stages.1.lag: 0, now 1"]


def test_the_last_stage_may_go_on_and_no_other(tmp_path):
    load_ = lambda *bindings: load("configs/tiny.gin", [*WARM, *bindings], Config, config_classes(TABLES))
    say = lambda config: identify(config, PARTS, SimpleNamespace(fingerprint="t"), "d")
    write_manifest(tmp_path / "manifest.json", say(load_()))
    refuse_another(tmp_path, say(longer := load_("Online.steps = 31")), longer)
    config = load_("warm/Offline.steps = 2", "Online.steps = 31")
    with pytest.raises(RefusedIdentity) as refused:
        refuse_another(tmp_path, say(config), config)
    assert "stages.0.steps: 100, now 2" in str(refused.value) and "stages.1.steps" not in str(refused.value)


CONFIGS = sorted(Path(__file__).parents[1].glob("configs/**/*.gin"))


def test_any_change_of_a_setting_is_refused_by_its_name_or_is_one_of_those_that_may_change(tmp_path, trials):
    draw, say = random.Random(0), lambda config: identify(config, PARTS, SimpleNamespace(fingerprint="t"), "d")
    accepted = 0
    number = trials(60, 1_000)
    for _ in range(number):
        config, _ = load_config(str(draw.choice(CONFIGS)), [])
        leaf = draw.choice([leaf for leaf in leaves(config) if next(mutations(config, leaf), None)])
        other, value = draw.choice([*mutations(config, leaf)])
        write_manifest(tmp_path / "manifest.json", say(config))
        may_change = {leaf.field, f"{leaf.field.partition('.')[0]}.*"} & {*FREE}
        if may_change or leaf.place == ("stages", len(config.stages) - 1, "steps"):
            refuse_another(tmp_path, say(other), other)
            accepted += 1
            continue
        with pytest.raises(RefusedIdentity) as refused:
            refuse_another(tmp_path, say(other), other)
        assert leaf.name in str(refused.value), (leaf, value, str(refused.value))
    assert 0 < accepted < number / 2


def test_any_change_of_data_or_plugin_is_refused(tmp_path, trials):
    """A character of one of the files is another, gone, or new; or a file has another name."""
    draw = random.Random(1)
    rows = "".join(json.dumps({"prompt": f"{n} + {n}?", "answer": str(2 * n)}) + "\n" for n in range(9))
    plugin = "def says(completion, example):\n    return 1.0\n\n\nVERIFIERS = {'says': says}\n"

    def changed(text):
        at, kept = draw.randrange(len(text)), draw.randrange(2)
        return text[:at] + draw.choice(["", *"019 x"]) + text[at + kept :]

    def written(folder, files):
        folder.mkdir(exist_ok=True)
        paths = [folder / name for name in files]
        for path, text in zip(paths, files.values()):
            path.write_text(text)
        bindings = ["Config.task = @Jsonl()", f"Jsonl.path = '{paths[0]}'", f"parts = ['{paths[1]}']"]
        config, parts = load_config("configs/tiny.gin", bindings)
        data = open_source(config.task, ENVS).fingerprint
        return identify(config, parts, SimpleNamespace(fingerprint="t"), data), config

    usual = {"rows.jsonl": rows, "says.py": plugin}
    write_manifest(tmp_path / "manifest.json", written(tmp_path / "usual", usual)[0])
    tried, number = 0, trials(10, 200, seed=1)
    while tried < number:
        place, renames = draw.choice(list(usual)), draw.random() < 0.2
        text = usual[place] if renames else changed(usual[place])
        files = {(f"{draw.randrange(99)}{name}" if renames else name) if name == place else name:
                 text if name == place else usual[name] for name in usual}  # fmt: skip
        if files == usual:
            continue
        try:
            manifest, config = written(tmp_path / "other", files)
        except (ValueError, PartError):  # what cannot be read is refused before
            continue
        tried += 1
        with pytest.raises(RefusedIdentity, match="data: " if place == "rows.jsonl" else r"parts\."):
            refuse_another(tmp_path, manifest, config)


def test_a_resume_by_another_kernel_is_a_warning(tmp_path, caplog):
    load_ = lambda *bindings: load("configs/tiny.gin", [*WARM, *bindings], Config, config_classes(TABLES))
    say = lambda config: make_manifest(
        config_identity="c", config=to_json(config), tokenizer="t", data="d", parts={}, seed=0
    )
    config = load_()
    write_manifest(tmp_path / "manifest.json", say(config))
    refuse_another(tmp_path, say(config), config)
    assert caplog.text == ""
    other = load_("Sampler.attention = 'ragged'", "warm/AdamW.memory = 'host'")
    refuse_another(tmp_path, say(other), other)
    assert 'sampler.attention: "auto", now "ragged"' in caplog.text
    assert 'stages.0.optimizer.memory: "device", now "host"' in caplog.text and len(caplog.records) == 2


def test_data_may_be_moved_but_not_renamed_or_changed(tmp_path):
    say = lambda path, data="d": identify(config_of(path), PARTS, SimpleNamespace(fingerprint="t"), data)
    config_of = lambda path: load(
        "configs/tiny.gin", ["Config.task = @Jsonl()", f"Jsonl.path = '{path}'"], Config, config_classes(TABLES)
    )
    write_manifest(tmp_path / "manifest.json", say("here/rows.jsonl"))
    refuse_another(tmp_path, say("there/rows.jsonl"), config_of("there/rows.jsonl"))
    with pytest.raises(RefusedIdentity, match='data: "d", now "e"'):  # the fingerprint has the name and the content
        refuse_another(tmp_path, say("there/rows.jsonl", data="e"), config_of("there/rows.jsonl"))


def test_doctor_lists_the_stages_and_the_roles_of_a_run(tmp_path):
    one = load("configs/tiny.gin", (), Config, config_classes(TABLES))
    (tmp_path / "config.gin").write_text(to_gin(one, config_classes(TABLES)))
    assert list(stages(tmp_path)) == []
    pairs = ["Config.stages = [@pairs/Offline(), @Online()]", "pairs/Offline.source = @Preferences()",
             "pairs/Offline.objective = @BradleyTerry()", "pairs/Offline.trains = 'reward'",
             "pairs/Offline.steps = 5", "Online.rewards = {'reward': 1.0}"]  # fmt: skip
    several = load("configs/tiny.gin", pairs, Config, config_classes(TABLES))
    (tmp_path / "config.gin").write_text(to_gin(several, config_classes(TABLES)))
    there = "stages: bradleyterry (5 steps), rl (30 steps)"
    assert [line.text for line in stages(tmp_path)] == [there, "trained roles: policy, reward"]
    for step, name in ((5, "bradleyterry"), (6, "rl")):
        (tmp_path / "checkpoints" / f"{step:08}").mkdir(parents=True)
        assert next(stages(tmp_path)).text == f"{there}; the newest checkpoint is of {name}"


def test_doctor_started_elsewhere_reads_the_runs_own_copy_of_its_parts(tmp_path, monkeypatch):
    """`jrl sample` and `jrl eval` do, too; whether the file has changed is another question."""
    folder = tmp_path / "run"
    (folder / "parts").mkdir(parents=True)
    (folder / "parts" / "0.py").write_text("VERIFIERS = {'mine': lambda completion, example: 1.0}\n")
    (folder / "config.gin").write_text(
        f"include '{os.path.abspath('configs/tiny.gin')}'\nparts = ['mine.py']\nScoring.verifiers = [@mine()]\n"
        "Config.stages = [@warm/Offline(), @Online()]\nwarm/Offline.source = @Demonstrations()\n"
        "warm/Offline.objective = @SFT()\n"
    )
    monkeypatch.chdir(tmp_path)
    assert next(stages(folder)).text.startswith("stages: sft (100 steps), rl (30 steps)")
    line = identity(folder)
    assert line.good is None and line.text.startswith("mine.py: not found from here")
    (tmp_path / "mine.py").write_text("VERIFIERS = {'mine': lambda completion, example: 1.0}\n")
    with open(folder / "config.gin", "a") as file:
        file.write("Config.task = @Jsonl()\nJsonl.path = 'rows.jsonl'\n")
    assert identity(folder) == (None, line.text.replace("mine.py", "rows.jsonl"))


def test_doctor_does_not_call_a_run_of_a_notebooks_function_broken(tmp_path):
    """`config.gin` names no file for it; the run's own copy opens the run, and only a resume can compare."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "0.py").write_text("VERIFIERS = {'mine': lambda completion, example: 1.0}\n")
    tiny = os.path.abspath("configs/tiny.gin")
    (tmp_path / "config.gin").write_text(f"include '{tiny}'\nparts = []\nScoring.verifiers = [@mine()]\n")
    line = identity(tmp_path)
    assert line.good is None and line.text.startswith("the run has parts that were given from Python")


def test_doctor_says_which_population_a_member_trains_in(tmp_path, monkeypatch):
    member = tmp_path / "sweep" / "seed=0"
    member.mkdir(parents=True)
    assert population_of(member) is None
    write_members(tmp_path / "sweep", {"members": ["seed=0", "seed=1"]})
    assert population_of(member) == tmp_path / "sweep" and population_of(tmp_path / "sweep" / "seed=2") is None
    (member / "config.gin").write_text("Config.stages = []\n")
    lines = [line.text for line in run_lines(member)]
    assert "no checkpoint of its own yet" in lines
    assert lines[-1].startswith("not finished; it trains in the population of ") and f"--out {tmp_path}" in lines[-1]
    monkeypatch.chdir(member)
    assert population_of(Path(".")) == tmp_path / "sweep"
    write_members(tmp_path / "sweep", {"members": ["seed=0"], "again": True})  # it has failed, and the others ended
    assert population_of(member) is None
    write_members(tmp_path / "sweep", {"members": ["seed=0", "seed=1"]})
    (member / "summary.json").write_text("{}")
    assert population_of(member) is None


def test_doctor_finds_metrics_that_are_not_those_a_checkpoint_was_saved_with(tmp_path):
    row, file = row_line({"step": 1, "loss": 0.5}), tmp_path / "metrics.jsonl"
    file.write_bytes(row)
    digest = hashlib.sha256(row).hexdigest()
    state = lambda **saved: [(line.good, line.text) for line in metrics(tmp_path, *metrics_rows(tmp_path), saved)]
    sound = [(True, "metrics.jsonl has 1 row")]
    assert state() == state(metrics_offset=len(row)) == state(metrics_offset=len(row), metrics_sha256=digest) == sound
    refused = "A resume is refused: put a good copy back"
    cut = (
        f"{file} holds {{}} bytes but the checkpoint committed {len(row) + 1}; the file was cut or replaced. {refused}"
    )
    assert state(metrics_offset=len(row) + 1) == [(False, cut.format(len(row)))]
    file.write_bytes(row.replace(b"0.5", b"0.7"))
    other = f"{file} has other rows before byte {len(row)} than were saved; it is damaged. {refused}"
    assert state(metrics_offset=len(row), metrics_sha256=digest) == [(False, other)]
    file.unlink()
    assert state(metrics_offset=len(row) + 1) == [(False, cut.format(0))]


def test_doctor_finds_a_store_of_rollouts_that_lacks_rows_of_the_checkpoint(tmp_path):
    assert list(rollouts(tmp_path, {})) == [] and list(rollouts(tmp_path, {"rollout_rows": 0})) == []
    state = lambda rows: [(line.good, line.text) for line in rollouts(tmp_path, {"rollout_rows": rows})]
    ((good, text),) = state(2)
    assert not good and "rollouts is not a rollout store" in text and text.endswith(INDEX_ADVICE)
    store = open_rollouts(tmp_path / "rollouts", rows=0)
    store.append(1, {"reward": np.zeros(2)}, ["p"] * 2, ["c"] * 2, ["i"] * 2, np.zeros((2, 2), np.uint32))
    store.close()
    assert [good for good, _ in state(2)] == [True]
    ((good, text),) = state(3)
    assert not good and "index.json counts 2 rows, and the checkpoint was saved with 3; " in text
    (tmp_path / "rollouts" / "index.json").unlink()
    ((good, text),) = state(0)  # a resume begins the store anew
    assert not good and text.endswith(ROLLOUTS_ADVICE)


@pytest.mark.parametrize(
    ("skips", "finished", "line"),
    [
        ([1, 0], True, None),
        ([0, 1], True, (True, "the last step skipped updates, since")),
        ([0, 1], False, (False, "the last step skipped updates, since")),
        ([1, 1], True, (False, "each of the last 2 steps skipped updates, since")),
        ([0, 0, 1], True, (False, "the last step skipped updates, since")),  # the only one of the second stage
    ],
)
def test_doctor_marks_runs_whose_last_stage_learned_nothing_or_that_stopped_at_skipped_updates(
    tmp_path, skips, finished, line
):
    phase = lambda step: "warm" if step < 3 else "rl"
    rows = [
        {"step": step, "phase": phase(step), "update/skipped_nonfinite": skip} for step, skip in enumerate(skips, 1)
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(map(row_line, rows)))
    if finished:
        (tmp_path / "summary.json").write_text("{}")
    _, *others = metrics(tmp_path, *metrics_rows(tmp_path), {})
    assert [(one.good, one.text.startswith(line[1])) for one in others] == ([] if line is None else [(line[0], True)])


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"steps": 1, "seconds": 2}'])
def test_doctor_finds_a_damaged_summary(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    line = ending(tmp_path)
    assert line.good is False and line.text.startswith(f"{tmp_path / 'summary.json'} is damaged (")


def test_doctor_refuses_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(ValueError, match="is neither a run"):
        examine(tmp_path)
    with pytest.raises(ValueError, match="nowhere does not exist"):
        examine(tmp_path / "nowhere")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="is a PEFT adapter and no model"):
        examine(tmp_path)


def test_a_closed_terminal_asks_the_run_to_save_unless_nohup_has_it_ignored():
    stop = threading.Event()
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with stop_on_signals(stop):
            signal.raise_signal(signal.SIGHUP)
        assert stop.is_set()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with stop_on_signals(threading.Event()):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_error_text_keeps_its_lines_and_nothing_that_a_terminal_obeys():
    assert printable_lines("one\n\x1b[31mtwo" + "x" * 500) == "one\n\\x1b[31mtwo" + "x" * 500


def sources_of(*tasks):
    """A configuration whose Offline stages have these tasks (None: the run's), its sources, and those opened for it."""
    task = lambda size: ENVS["Addition"].config(size=size)
    one = load("configs/tiny.gin", WARM, Config, config_classes(TABLES))
    (warm, *_) = one.stages
    stages = tuple(dataclasses.replace(warm, name=f"s{i}", task=size and task(size)) for i, size in enumerate(tasks))
    config = dataclasses.replace(one, task=task(9), stages=stages)
    opened = []
    open_ = lambda task: opened.append(task.size) or open_source(task, ENVS)
    source = open_source(config.task, ENVS)
    return config, source, stored_sources(config, source, open_), opened


def test_a_stage_learns_from_its_own_examples_or_the_runs():
    config, source, stored, opened = sources_of(None, 5, 9, 5, 4)
    assert opened == [5, 4]  # each task once
    assert [len(one) for one in stored] == [9, 5, 9, 5, 4]
    assert stored[0] is stored[2] is source and stored[1] is stored[3]
    streams = open_streams(config, TABLES, source, stored, TOKENIZERS["Bytes"].build(Bytes(), ()))
    assert [stream.get_state()["size"] for stream in streams] == [9, 9, 5, 9, 5, 4]


def test_what_reads_every_example_does_so_while_the_run_is_opened_and_can_be_stopped():
    """A million examples take minutes: the first step would be silent for so long, and not to be interrupted."""
    config, _, _, _ = sources_of(None)
    online = Online(objective=GRPO(), steps=1, prompts=2, samples=2, curriculum=HardFocus())
    config = dataclasses.replace(config, data=Data(prompt_length=8, held_out_every=3), stages=(online,))
    reads, polls = [], []
    plain = open_source(config.task, ENVS)
    source = Generated(len(plain), lambda i: reads.append(i) or plain[i], "x")
    tokenizer = TOKENIZERS["Bytes"].build(Bytes(), ())
    open_ = lambda stop: open_streams(config, TABLES, source, [], tokenizer, stop)
    stream = open_(lambda: polls.append(1))[0]
    assert reads == [*range(9)] and len(polls) == 9
    assert stream.training_examples(configured_curriculum(online, TABLES)).sum() > 0 and len(reads) == 9
    with pytest.raises(StopRequested, match="reading prompts"):
        open_(lambda: len(reads) == 12)
    assert len(reads) == 12


def test_the_fingerprint_of_the_data_is_the_tasks_where_no_stage_has_its_own():
    fingerprint = lambda *tasks: data_fingerprint(*(found := sources_of(*tasks))[:2], found[2])
    (_, source, _, _) = sources_of(None)
    assert fingerprint(None) == fingerprint(None, None) == source.fingerprint
    others = [fingerprint(5), fingerprint(5, None), fingerprint(None, 5), fingerprint(5, 4), fingerprint(4, 5)]
    assert len({*others, source.fingerprint}) == 5 and others[0] == others[1]
