"""`jrl plan` prints one JSON object that says what its numbers are."""

from __future__ import annotations

import io
import json
import pathlib
import subprocess
import threading
import types

import pytest

from jrl import cli
from jrl.commands import start
from jrl.device.chips import GIB
from jrl.learning.step import StagePrograms
from jrl.resolve import load_config
from jrl.rollout.reward_gate import Gate
from jrl.rollout.rewards import RewardModel
from jrl.tools.plan import budget, compiled, libtpu, planning, report, shapes
from jrl.tools.plan.case import make_case
from jrl.tools.plan.chips import parse_topology
from jrl.tools.plan.compiled import Compiled, hbm_asked


@pytest.fixture
def plan(monkeypatch, capsys):
    """Arguments of `jrl plan` -> what it prints, where libtpu is not installed."""
    monkeypatch.setattr(start, "prepare_jax", lambda args, platform=None: None)
    monkeypatch.setattr(libtpu, "set_environment", lambda: None)
    monkeypatch.setattr(compiled, "libtpu_version", lambda: None)

    def run(*arguments, json_=True):
        assert cli.main(["plan", *arguments, *["--json"] * json_, "--no-collectives"]) == 0
        out = capsys.readouterr().out
        return json.loads(out) if json_ else out

    return run


def test_a_plan_says_what_its_numbers_are(plan):
    printed = plan("configs/plan/8b.gin", "--topology", "v5p:4x4x4")
    assert set(printed) == {"fits", "hbm_gib", "limit_gib", "checkpoint_gib", "host_gib", "step_seconds", "wastes",
                            "least_step_seconds", "publication_gib", "network", "notes", "programs"}  # fmt: skip
    assert printed["checkpoint_gib"] == pytest.approx(8.19e9 * 3 * 4 / 2**30, rel=1e-3)
    assert printed["network"] is None
    assert printed["fits"] and printed["limit_gib"] == 94.75 and printed["wastes"] == []
    assert any("libtpu is not installed: nothing was compiled" in note for note in printed["notes"])
    programs = {program["name"]: program for program in printed["programs"]}
    assert set(programs) == {"init", "restore", "sample", "update"}
    assert [programs[name]["stage"] for name in ("init", "restore", "sample", "update")] == [None, None, "rl", "rl"]
    assert not any(program["compiled"] for program in programs.values())
    assert printed["hbm_gib"] == max(sum(program["hbm"].values()) for program in programs.values())
    assert printed["host_gib"] == {"optimizer": 0, "activations": 0}
    assert programs["update"]["flops"] > 0 and programs["update"]["collectives"] is None


def test_two_slices_have_their_network_apart(plan):
    two = ("configs/plan/0.6b.gin", "--topology", "2xv5e:2x2", "MeshShape.slices=2", "MeshShape.data=2",
           "MeshShape.fsdp=4")  # fmt: skip
    printed = plan(*two)
    programs = {program["name"]: program for program in printed["programs"]}
    network, update = printed["network"], programs["update"]
    assert programs["sample"]["network_bytes"] == 0 and network["bytes"] == update["network_bytes"] > 0
    assert network["seconds"] == network["bytes"] / (25e9 / 8) == update["least_seconds"]
    assert network["bound"] == ["update"] and network["counted_seconds"] is None
    # In micro-batches twice as large the gradients cross half as often.
    larger = plan(*two, "Learner.micro_batch_tokens=32768")
    assert 2 * larger["network"]["bytes"] == network["bytes"] and larger["network"]["bound"] == []
    text = plan(*two, json_=False)
    assert "mesh data 2 x fsdp 4, data over 2 slices" in text and "network s" in text and "not used" not in text
    assert "at 3.125 GB/s; it is the bound of update" in text


def test_a_slice_that_samples_receives_the_weights_over_the_network(plan):
    mesh = ("MeshShape.fsdp=4", "sampler/MeshShape.fsdp=1", "sampler/MeshShape.data=4")
    apart = ("configs/plan/0.6b.gin", "--topology", "2xv5e:2x2", "Online.lag=1", *mesh,
             "Config.sampler_mesh=@sampler/MeshShape()")  # fmt: skip
    printed = plan(*apart)
    network, published = printed["network"], printed["publication_gib"]
    assert network["bytes"] == published["received"] * 2**30 and network["bound"] == []
    assert network["seconds"] == network["bytes"] / (25e9 / 8)
    largest = 4 * 151936 * 1024 / 2**30  # the embedding, which is gathered over fsdp and sent
    assert published["learner"] == published["sampler"] == largest
    assert published["peak"] == pytest.approx(published["weights"] + largest)
    text = plan(*apart, json_=False)
    assert "not used" not in text
    assert "between slices each device receives" in text and "gathered or sent on each device that learns" in text
    assert f", of it {network['bytes'] / 1e9:.3g} GB of published weights, which sampling waits for; it is the" in text


def test_a_run_of_two_stages_has_rows_of_both_and_one_can_be_planned_alone(plan, two_stages):
    run = ("configs/tiny.gin", "Decoder.vocab_size=320", "GRPO.kl=0.01", *two_stages, "--topology", "v5e:1x1")
    rows = lambda printed: {(program["stage"], program["name"]) for program in printed["programs"]}
    of_run, both = {(None, "init"), (None, "restore")}, plan(*run)
    sft = {("sft", "update")}
    rl = {("rl", "begin"), ("rl", "sample"), ("rl", "reference"), ("rl", "update")}
    assert rows(both) == of_run | sft | rl
    online, warm = plan(*run, "--stage", "rl"), plan(*run, "--stage", "sft")
    assert rows(online) == of_run | rl and rows(warm) == of_run | sft
    # The time is that of the last Online stage where none is named.
    assert both["step_seconds"] == online["step_seconds"] != warm["step_seconds"] > 0
    assert "rl.update" in plan(*run, json_=False) and "sft.update" not in plan(*run, "--stage", "rl", json_=False)
    alone = plan("configs/tiny.gin", "Decoder.vocab_size=320", "--topology", "v5e:2x2", json_=False)
    assert "; mesh one device; 3 of 4 devices are not used (MeshShape.data, " in alone
    assert "update" in alone and "rl.update" not in alone


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--stage", "dpo"], "unknown stage 'dpo'; available: rl"),
        (["--stage", "rl", "--search"], "leave it out with"),
        (["--out", "plan.txt"], "--out is where --search writes"),
    ],
)
def test_what_a_plan_would_not_read_is_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(start, "prepare_jax", lambda args, platform=None: None)
    monkeypatch.setattr(libtpu, "set_environment", lambda: None)
    monkeypatch.setattr(compiled, "libtpu_version", lambda: None)
    assert cli.main(["plan", "configs/plan/0.6b.gin", "--topology", "v5e:2x4", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_where_no_single_change_is_enough_the_search_is_named(plan):
    small = ("configs/plan/8b.gin", "--topology", "v5e:2x2", "MeshShape.fsdp=1")
    printed = plan(*small, json_=False)
    assert "DOES NOT FIT: update takes" in printed
    assert "no single change is enough: --topology v5e:2x2 --search tries all layouts of this slice, --topology v5e " \
           "--search finds the smallest slice that fits" in printed  # fmt: skip
    assert "no single change" not in plan("configs/plan/8b.gin", "--topology", "v5p:4x4x4", json_=False)


def test_a_shape_that_stands_in_is_named(plan):
    printed = plan("configs/gsm8k/qwen3-0.6b.gin", "--topology", "v5e:2x2")
    assert "models/Qwen3-0.6B does not exist; the plan uses the shape of Qwen3-0.6B as published" in printed["notes"]


def test_models_that_are_read_from_folders_are_counted_where_their_shape_is_known(plan):
    reward = ["Config.reward=@RewardModel()", "RewardModel.path='models/judge'"]
    teacher = [
        "Online.objective=@OnPolicyDistillation()",
        "Config.teacher=@Published()",
        "Published.path='models/master'",
    ]
    both = [*reward, *teacher]
    printed = plan("configs/plan/0.6b.gin", *both, "--topology", "v5e:2x4")
    assert {
        "the memory and time of Config.reward are not counted; the time of Config.teacher is counted as of a model "
        "like the policy; the memory of Config.teacher is not counted"
    } <= set(printed["notes"])
    known = [one.replace("judge", "Qwen3-0.6B").replace("master", "Qwen3-1.7B") for one in both]
    printed = plan("configs/plan/0.6b.gin", *known, "--topology", "v5e:2x4")
    assert "the time and workspace of Config.reward are not counted; the time of Config.teacher is counted as of a " \
        "model like the policy" in printed["notes"]  # fmt: skip


def test_a_gate_has_a_component_for_each_label_that_it_mixes(tmp_path):
    gated = lambda **fields: RewardModel(path=str(tmp_path), gate=Gate(path="gate.safetensors", **fields))
    assert shapes.reward_components(RewardModel(path="a", weights=(1.0, 0.5))) == ("RewardModel/0", "RewardModel/1")
    assert shapes.reward_components(gated()) == ("RewardModel",)
    told = gated(verbosity="long", coefficients=(0.5, 1.0))
    assert shapes.reward_components(told) == ("RewardModel", "RewardModel/0", "RewardModel/1")
    config = {"architectures": ["Qwen2ForSequenceClassification"], "model_type": "qwen2", "vocab_size": 8,
              "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 1, "id2label": {"0": "helpful", "1": "honest", "2": "long"}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    # As rollout.rewards.open_classifier names them, of which Scores has a row each.
    named = ("RewardModel", "RewardModel/helpful", "RewardModel/honest", "RewardModel/long")
    assert shapes.reward_components(gated()) == named


def test_what_the_run_keeps_beside_a_program_counts():
    config, parts = load_config("configs/plan/0.6b.gin")
    resident = budget.resident_memory(make_case(config, parts, 8))
    # Sampling is given the weights alone: the optimizer is on the device all the same.
    actual = Compiled(arguments=resident.weights, temporary=3 * GIB)
    arithmetic = budget.Memory(cache=GIB)
    assert planning.by_kind("rl.sample", actual, arithmetic, resident) == budget.Memory(
        weights=resident.weights, optimizer=resident.optimizer, cache=GIB, temporary=2 * GIB
    )


def test_every_program_that_is_given_weights_is_known_to_hold_them():
    """Else they count twice: as arguments, and as what lies beside the program."""
    without = {"pack", "credit", "finish", "pretraining", "keep", "combine", "before", "mean", "copy"}
    assert without == set(StagePrograms._fields) - planning.HOLDS.keys()


def test_a_program_with_a_text_has_a_count(small, tmp_path):
    text = "\n".join([
        "ENTRY %main (p: f32[8]) -> f32[8] {",
        '  ROOT %copy = f32[8]{0} copy(%p), metadata={op_name="f/sum"}, backend_config={"estimated_cycles":"1750000"}',
        "}",
    ])  # fmt: skip
    case, topology = small(), parse_topology("v5p:1x1x1")
    programs = {"rl.update": Compiled(arguments=1, text=text), "rl.sample": Compiled(arguments=1)}
    rows = {row.name: row for row in planning.rows_of(case, topology, programs, None)}
    update = rows["rl.update"]
    assert update.count.compute == 1e-3 and update.seconds == update.count.seconds >= 1e-3  # at 1.75 GHz
    assert rows["rl.sample"].count is None and rows["rl.sample"].seconds == rows["rl.sample"].estimate.seconds
    plan = planning.Plan(topology, case, list(rows.values()), 2**40, 2.0, 1.0, [], [], [])
    printed = report.time(plan)
    assert "a step takes at least 1 s" in printed and "a step takes about 2 s by the compiler's count" in printed
    assert "0.001 s, 1 times: copy f32[8] (f/sum)" in printed
    of = {program["name"]: program for program in planning.to_json(plan)["programs"]}
    assert of["update"]["count"]["compute"] == 1e-3 and of["sample"]["count"] is None
    # A text is kept beside the report that it belongs to.
    place = tmp_path / "kept.json"
    first = compiled.cached_or(lambda lowered: programs["rl.update"], None, place)
    again = compiled.cached_or(lambda lowered: None, None, place)
    assert first == (programs["rl.update"], False) and again == (programs["rl.update"], True)


def test_programs_that_take_long_to_compile_are_named_meanwhile(monkeypatch):
    class Program(str):
        def as_text(self):
            return self

    announced, waited = threading.Event(), []

    def wait(names, seconds):
        waited.append((names, seconds))
        if len(names) == 2:
            announced.set()

    slowly = lambda program, topology: (announced.wait(60), (Compiled(code=len(program)), False))[1]
    monkeypatch.setattr(compiled, "compile_one", slowly)
    monkeypatch.setattr(compiled, "ANNOUNCE_SECONDS", 0.01)
    lowered, finished = {"c": Program("c"), "a": Program("a" * 3), "b": Program("b" * 2)}, []
    done = compiled.compile_all(lowered, parse_topology("v5e:2x4"), lambda name, *_: finished.append(name), wait)
    assert {name: program.code for name, program in done.items()} == {"c": 1, "a": 3, "b": 2}
    assert sorted(finished) == ["a", "b", "c"]
    names, seconds = next(each for each in waited if len(each[0]) == 2)
    assert names == ["a", "b"] and seconds > 0  # two at a time, the longest first
    assert planning.waiting_text(names, 125.0) == "still compiling a and b (2 min)"


def test_counting_collectives_says_every_minute_that_it_goes_on(monkeypatch):
    class Slow:
        """A process that ends in its third minute."""

        def __init__(self, command, **options):
            self.out, self.stderr, self.minutes = pathlib.Path(command[3]), io.BytesIO(), 0

        def poll(self):
            return None if self.minutes < 3 else 0

        def wait(self, seconds):
            self.minutes += 1
            if self.minutes < 3:
                raise subprocess.TimeoutExpired("collectives", seconds)
            self.out.write_text('{"update": {}}')
            return 0

    monkeypatch.setattr(subprocess, "Popen", Slow)
    said = []
    counting = planning.Counting(["tiny"], types.SimpleNamespace(all_devices=4), None)
    assert counting.result(said.append) == {"update": {}}
    counting.close()
    still = "still counting collectives (0 min); --no-collectives leaves them out"
    assert said == ["counting collectives on virtual CPU devices", still, still]


@pytest.mark.parametrize(
    ("message", "asked"),
    [
        ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Used 18.26G of 15.75G hbm. Exceeded", 18.26 * 2**30),
        ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (16.17G) exceeds "
         "available HBM (15.75G).", 16.17 * 2**30),
        ("INTERNAL: something else", None),
    ],
)  # fmt: skip
def test_a_program_that_does_not_fit_says_what_it_asked_for(message, asked):
    assert hbm_asked(message) == (None if asked is None else int(asked))
