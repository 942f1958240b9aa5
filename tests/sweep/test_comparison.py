"""Runs from their folders, grouped into variants and compared; numbers by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from run_folders import rewards, write_run

from jrl.config import ConfigError
from jrl.experiment import config_classes
from jrl.resolve import load_config
from jrl.tools.sweep import comparison
from jrl.tools.sweep.comparison import (
    compare,
    curve_of,
    find_variant,
    group,
    read_baseline,
    table,
    to_json,
    unscoped,
)
from jrl.tools.sweep.runs import default_metrics, find_runs, missing_metrics, read_run, score, series
from jrl.tools.sweep.settings import settings_of_config

RATE, TASK = "AdamW.learning_rate", "Addition.digits"


def runs(folder, *scores, **settings):
    """Runs with seeds 0, 1, ... whose only reward is the score."""
    name = "-".join(f"{name}={value}" for name, value in settings.items())
    bound = {RATE: settings["rate"], **({TASK: settings["digits"]} if "digits" in settings else {})}
    return [
        read_run(write_run(folder / f"{name}-{seed}", rows=rewards(value), seed=seed, settings=bound))
        for seed, value in enumerate(scores)
    ]


@pytest.fixture
def two(tmp_path):
    return [*runs(tmp_path, 2, 2, rate=0.001), *runs(tmp_path, 1, 2, 3, rate=0.003)]


def test_a_run_is_read_from_its_folder(tmp_path):
    folder = write_run(
        tmp_path / "a", rows=rewards(0.1, math.nan, 0.5), seed=7, evals={"before_rl": 0.2, "after_rl": 0.4},
        settings={"Config.objective": "@GRPO()", "MeshShape.data": 2},
    )  # fmt: skip
    run = read_run(folder)
    assert run.seed == "7" and run.finished
    assert run.evals == {"eval/before_rl": 0.2, "eval/after_rl": 0.4}
    assert run.settings[RATE] == "0.001" and run.settings["Config.objective"] == "@GRPO()"
    assert "Run.seed" not in run.settings and "Log.samples" not in run.settings and "MeshShape.data" in run.settings
    steps, values = series(run, "reward/mean")
    assert steps.tolist() == [1, 2, 3] and values[[0, 2]].tolist() == [0.1, 0.5] and math.isnan(values[1])
    assert default_metrics([run]) == ["reward/mean", "eval/after_rl"]


def test_a_config_that_was_edited_by_hand_is_read_and_a_damaged_one_named(tmp_path):
    folder = write_run(tmp_path / "a", rows=rewards(0.5))
    config = folder / "config.gin"
    written = read_run(folder).settings
    config.write_text("# my best\nRun.seed = 3\nAdamW:\n  learning_rate = 1e-3\nLog.samples = 2\n")
    assert (read_run(folder).seed, read_run(folder).settings) == ("3", written)
    for text, message in ((b"Run.seed = 0\nAdamW.learning_rate = \n", "config.gin:2"), (b"\xff", "config.gin' is not")):
        config.write_bytes(text)
        with pytest.raises(ConfigError, match=message):
            read_run(folder)
    config.unlink()
    with pytest.raises(ConfigError, match=r"there is no file .*config\.gin"):
        read_run(folder)


def test_a_score_is_the_mean_over_the_last_tenth_of_what_is_finite(tmp_path):
    values = [0.0] * 18 + [0.4, 0.6, math.nan]  # 21 rows: the last 3, of which 2 count
    run = read_run(write_run(tmp_path / "a", rows=rewards(*values), evals={"after_rl": 0.9}))
    assert score(run, "reward/mean") == pytest.approx(0.5)
    assert score(run, "eval/after_rl") == 0.9
    assert math.isnan(score(run, "loss"))
    few = read_run(write_run(tmp_path / "b", rows=rewards(0.0, 0.8)))  # the last 1 of 2
    assert score(few, "reward/mean") == 0.8


def test_runs_that_differ_only_in_their_seed_are_one_variant(two):
    variants, compared, tasks = group(two)
    assert [(v.label, len(v.runs)) for v in variants] == [("learning_rate=0.001", 2), ("learning_rate=0.003", 3)]
    assert compared == (RATE,) and tasks == ()


def test_the_table_has_value_interval_and_probability_of_improvement(two):
    found = compare(two, ["reward/mean"], baseline="learning_rate=1e-3")
    base, other = found.metrics["reward/mean"]
    assert base.value == (2.0, 2.0, 2.0, 2) and base.better is None
    # M9 of [1, 2, 3] over [2, 2]: (0 + 0 + 1/2 + 1/2 + 1 + 1) / 6
    assert other.better.mean == 0.5 and other.better.low <= 0.5 <= other.better.high
    assert other.value.mean == 2.0 and 1 <= other.value.low < 2 < other.value.high <= 3
    lines = table(found).splitlines()
    assert lines[1].split() == ["variant", "runs", "mean", "95", "%", "interval", "P(higher", "than", "baseline)"]
    assert lines[2].split() == ["learning_rate=0.001", "2", "2", "[2,", "2]", "baseline"]
    assert lines[3].split() == ["learning_rate=0.003", "3", "2", "[1,", "3]", "0.5", "[0,", "1]"]


def test_the_interquartile_mean_takes_the_place_of_the_mean(tmp_path):
    found = compare(runs(tmp_path, 0, 1, 2, 3, 4, 5, 6, 100, rate=1), ["reward/mean"], statistic="iqm")
    assert found.metrics["reward/mean"][0].value.mean == 3.5
    assert "interquartile mean" in table(found)


def test_the_optimality_gap_and_the_profile_of_runs(tmp_path):
    # M10: 1 - mean of 0.2, 0.6 and 1; M8 at 0.5, of a grid from 0.2 to 1.5: two of three
    found = compare(
        [*runs(tmp_path, 0.2, 0.6, 1.5, rate=1), *runs(tmp_path, 1.5, rate=2)], ["reward/mean"], statistic="gap"
    )
    assert found.metrics["reward/mean"][0].value.mean == pytest.approx(0.4)
    assert "optimality gap to 1" in table(found)
    first, second = (row["profile"] for row in to_json(found)["metrics"]["reward/mean"])
    assert first["thresholds"] == second["thresholds"] and first["thresholds"][0] == 0.2
    above = [x > 0.5 for x in first["thresholds"]].index(True)
    assert first["shares"][above] == pytest.approx(2 / 3) and first["shares"][-1] == 0
    assert second["shares"][above] == 1.0


def test_a_task_is_what_differs_beside_the_setting_compared(tmp_path):
    # on one digit the second rate wins always, on two digits never: 1/2, however the tasks' scores differ
    found = [*runs(tmp_path, 1, 2, rate=1, digits=1), *runs(tmp_path, 10, 20, rate=1, digits=2),
             *runs(tmp_path, 3, 4, rate=2, digits=1), *runs(tmp_path, 5, 6, rate=2, digits=2)]  # fmt: skip
    shown = compare(found, ["reward/mean"], by=["learning_rate"], baseline="learning_rate=1")
    assert shown.tasks == (TASK,) and shown.compared == (RATE,)
    second = shown.metrics["reward/mean"][1]
    assert second.better == (0.5, 0.5, 0.5, 4)
    # resampled within tasks: the mean of one of (3, 3.5, 4) and one of (5, 5.5, 6)
    assert second.value == (4.5, 4.0, 5.0, 4)
    assert shown.notes == ("bootstrap intervals of fewer than 5 runs of a task are too narrow; train more seeds",)
    # Each variant has two runs, and no interval: "a variant of one run" would be none of them.
    (note,) = compare([run for run in found if run.seed == "0"], ["reward/mean"], by=["learning_rate"]).notes
    assert note.startswith("a variant with a task of one run has no interval")


def test_variants_with_other_tasks_are_refused(tmp_path):
    found = [*runs(tmp_path, 1, rate=1, digits=1), *runs(tmp_path, 1, rate=2, digits=2)]
    with pytest.raises(ValueError, match=r"learning_rate=1 has no run with Addition\.digits=2"):
        group(found, ["learning_rate"])


def test_settings_that_only_one_method_has_are_left_out_of_labels(tmp_path):
    write = lambda name, **bound: read_run(write_run(tmp_path / name, rows=rewards(0), settings=bound))
    grpo = write("a", **{"Online.objective": "@GRPO()", "GRPO.clip_low": 0.2})
    dapo = write("b", **{"Online.objective": "@DAPO()", "DAPO.clip_low": 0.2})
    assert [v.label for v in group([grpo, dapo])[0]] == ["objective=@GRPO()", "objective=@DAPO()"]
    wider = write("c", **{"Online.objective": "@DAPO()", "DAPO.clip_low": 0.3})
    assert [v.label for v in group([grpo, dapo, wider])[0]] == [
        "objective=@GRPO()", "objective=@DAPO(), clip_low=0.2", "objective=@DAPO(), clip_low=0.3"
    ]  # fmt: skip


TWO_STAGES = ["Config.stages=[@warm/Offline(), @Online()]", "warm/Offline.source=@Demonstrations()",
              "warm/Offline.objective=@SFT()", "warm/Offline.steps=1"]  # fmt: skip


def configured(folder, *bindings):
    """Returns a run of configs/tiny.gin with bindings, with the settings that its config.gin would have."""
    config, parts = load_config("configs/tiny.gin", bindings)
    settings = settings_of_config(config, config_classes(parts.tables))[1]
    return read_run(write_run(folder, rows=rewards(0)))._replace(settings=settings)


@pytest.mark.parametrize("elsewhere", [3e-3, 2e-3, None])
def test_a_rate_that_is_swept_is_one_setting_whatever_another_stage_has(tmp_path, elsewhere):
    """config.gin names equal parts once: of the rates 1e-3 and 3e-3 the second is the warm-up's own, where that has
    3e-3. Where the warm-up has no rate of its own, the sweep sets both."""
    stages = TWO_STAGES + ([] if elsewhere is None else [f"warm/AdamW.learning_rate={elsewhere}"])
    found = [configured(tmp_path / rate, *stages, f"AdamW.learning_rate={rate}") for rate in ("1e-3", "3e-3")]
    variants, compared, tasks = group(found, ["AdamW.learning_rate"], ["AdamW.learning_rate"])
    assert [v.label for v in variants] == ["learning_rate=0.001", "learning_rate=0.003"] and not tasks
    assert [unscoped(name) for name in compared] == ["AdamW.learning_rate"]
    assert group(found) == (variants, compared, tasks)
    assert find_variant(variants, compared, "AdamW.learning_rate=1e-3") is variants[0]


def test_fields_of_one_objective_are_no_tasks_where_objectives_are_compared(tmp_path):
    objective, grpo, dapo = "Online.objective", {"GRPO.kl": 0}, {"DAPO.max_refills": 10, "DAPO.clip_high": 0.28}
    variants = [
        read_run(write_run(tmp_path / f"{name}{rate}", rows=rewards(1), settings={objective: name, RATE: rate, **own}))
        for name, own in (("@GRPO()", grpo), ("@DAPO()", dapo))
        for rate in (0.001, 0.003)
    ]
    found, compared, tasks = group(variants, by=[objective])
    assert compared == (objective,) and tasks == (RATE,)
    assert [[run.name for task in one.tasks for run in task] for one in found] == [
        ["@GRPO()0.001", "@GRPO()0.003"],
        ["@DAPO()0.001", "@DAPO()0.003"],
    ]
    assert find_variant(found, compared, "Online.objective=@GRPO()") is found[0]
    swept = [run._replace(settings={**run.settings, "GRPO.kl": run.settings[RATE]}) for run in variants[:2]]
    with pytest.raises(ValueError, match="compared on the same tasks"):  # a swept field of one of them is a task
        group([*swept, *variants[2:]], by=[objective])
    for one in (variants[:2], variants[2:]):  # a version of jrl with another field of a section that all have
        newer = [run._replace(settings={**run.settings, "Online.new": "1"}) for run in one]
        with pytest.raises(ValueError, match=r"has no run with .*, (Online\.new=1|no Online\.new), which another"):
            group([*newer, *(run for run in variants if run not in one)], by=[objective])


def test_versions_of_a_parts_file_are_noted_whatever_else_differs(tmp_path):
    read = lambda name, rate, **parts: read_run(
        write_run(tmp_path / name, rows=rewards(rate), settings={RATE: rate}, parts=parts)
    )
    note = "mine.py is not the same in all runs"
    first, second = read("a", 0.001, **{"mine.py": "1"}), read("b", 0.003, **{"mine.py": "2", "more.py": "1"})
    (changed,) = [one for one in compare([first, second], ["reward/mean"]).notes if "not the same" in one]
    assert changed.startswith(note)
    same, without = read("c", 0.003, **{"mine.py": "1"}), read("d", 0.01)
    assert not [one for one in compare([first, same, without], ["reward/mean"]).notes if "not the same" in one]


def test_a_run_that_was_continued_with_a_change_is_noted(tmp_path):
    run = write_run(tmp_path / "a", rows=rewards(1, 2))
    written = json.loads((run / "manifest.json").read_text())
    history = [{"after_step": step, "changes": ["parts.mine.py: 1, now 2"]} for step in (0, 1)]  # 0: it began again
    (run / "manifest.json").write_text(json.dumps({**written, "history": history}))
    notes = compare([read_run(run)], ["reward/mean"]).notes
    expected = f"{run} was continued with a change after step 1 (`history` in its manifest.json)"
    assert [note for note in notes if "continued" in note] == [expected]


def test_the_folder_of_a_parts_file_does_not_matter(tmp_path):
    read = lambda name, seed, parts: read_run(write_run(tmp_path / name, rows=rewards(0), seed=seed, parts=parts))
    here, there = read("a", 0, {"mine.py": "1" * 64}), read("b", 1, {"/home/me/mine.py": "1" * 64})
    assert [variant.label for variant in group([here, there])[0]] == ["all runs"]
    other = read("c", 0, {"/home/other/mine.py": "2" * 64})
    assert any(note.startswith("mine.py is not the same") for note in compare([here, other], ["reward/mean"]).notes)
    assert group([here, other])[0][1].label == "parts={'mine.py': '222222222222'}"
    two = read("d", 0, {"b/mine.py": "2", "a/mine.py": "1", "0/more.py": "3"})  # one name twice
    assert list(two.parts.items()) == [("a/mine.py", "1"), ("b/mine.py", "2"), ("more.py", "3")]


def test_a_field_that_one_binding_set_in_two_stages_may_be_named_by_either(tmp_path):
    found = [configured(tmp_path / rate, *TWO_STAGES, f"AdamW.learning_rate={rate}") for rate in ("1e-3", "3e-3")]
    others = [name for name in found[0].settings if unscoped(name) == "AdamW.learning_rate"]
    assert len(others) == 2 and group(found, [others[0]]) == group(found, [others[1]])
    variants, compared, _ = group(found)
    for name in others:
        assert find_variant(variants, compared, f"{name}=3e-3") is variants[1]


def test_a_class_that_is_swept_is_called_what_the_sweep_calls_it(tmp_path):
    found = [configured(tmp_path / one, *TWO_STAGES, f"Online.optimizer=@{one}()") for one in ("AdamW", "Muon")]
    variants, compared, _ = group(found, [], ["Online.optimizer"])
    assert [variant.label for variant in variants] == ["optimizer=@AdamW()", "optimizer=@Muon()"]
    assert find_variant(variants, compared, "Online.optimizer=@AdamW()") is variants[0]


def test_a_rate_of_rl_has_one_name_with_and_without_a_stage_before_it(tmp_path):
    """Both learn with 3e-3 in RL; the table showed learning_rate=1e-05 for the run with a stage before it."""
    warm = [*TWO_STAGES, "warm/Offline.optimizer=@warm/AdamW()", "warm/AdamW.learning_rate=1e-5"]
    found = [configured(tmp_path / str(i), *bindings) for i, bindings in enumerate((warm, []))]
    assert [run.settings[RATE] for run in found] == ["0.003", "0.003"]
    shown = compare(found, ["reward/mean"])
    assert [row.variant.label for row in shown.metrics["reward/mean"]] == [
        "stages=[@Offline(), @Online()]", "stages=[@Online()]"
    ]  # fmt: skip
    (note,) = [note for note in shown.notes if note.startswith("Config.stages")]
    assert note.endswith("a name without a scope is that of the first Online stage, or else of the first")
    same = [configured(tmp_path / rate, *warm, f"{RATE}={rate}") for rate in ("1e-3", "3e-3")]
    assert not any("Config.stages" in note for note in compare(same, ["reward/mean"]).notes)


def test_a_baseline_is_what_the_sweep_calls_it_where_two_stages_have_a_rate(tmp_path):
    """AdamW.learning_rate of the baseline was that of the warm start, where the sweep calls that warm/AdamW's."""
    warm = [*TWO_STAGES, "warm/Offline.optimizer=@warm/AdamW()"]
    rates = [(rl, early) for rl in ("1e-3", "3e-3") for early in ("1e-3", "2e-3")]
    found = [
        configured(tmp_path / f"{rl}-{early}", *warm, f"{RATE}={rl}", f"warm/{RATE}={early}") for rl, early in rates
    ]
    variants, compared, _ = group(found)
    assert find_variant(variants, compared, f"{RATE}=3e-3,optimizer/{RATE}=1e-3") is variants[2]
    assert variants[2].label == f"{RATE}=0.003, optimizer/{RATE}=0.001"  # its own label finds a variant
    assert find_variant(variants, compared, variants[2].label) is variants[2]
    with pytest.raises(ValueError, match=rf"warm/{RATE} may be {RATE} or optimizer/{RATE}; write the full name"):
        find_variant(variants, compared, f"warm/{RATE}=1e-3,{RATE}=3e-3")
    variants, compared, _ = group(found[:2])  # which differ in the rate of the warm start alone
    assert find_variant(variants, compared, f"warm/{RATE}=2e-3") is variants[1]
    with pytest.raises(ValueError, match=r"b1 is the same in all runs; they differ in optimizer/AdamW\.learning_rate"):
        find_variant(variants, compared, "b1=0.9")


def test_another_data_set_is_another_variant(tmp_path):
    found = [read_run(write_run(tmp_path / name, rows=rewards(0), data=name)) for name in "ab"]
    assert [v.label for v in group(found)[0]] == ["data=a", "data=b"]


def test_data_files_are_variants_by_their_paths_and_a_file_that_was_moved_is_none(tmp_path):
    def one(name, data, path):
        settings = {"Config.task": "@Jsonl()", "Jsonl.path": repr(path)}
        return read_run(write_run(tmp_path / name, rows=rewards(0), seed=name[-1], data=data, settings=settings))

    moved = [one("a0", "A", "/old/a.jsonl"), one("a1", "A", "/new/a.jsonl")]
    assert [(v.label, len(v.runs)) for v in group(moved)[0]] == [("all runs", 2)]
    variants, compared, _ = group([*moved, one("b0", "B", "/new/b.jsonl"), one("b1", "B", "/old/b.jsonl")])
    assert [(v.label, len(v.runs)) for v in variants] == [("path='/old/a.jsonl'", 2), ("path='/new/b.jsonl'", 2)]
    assert compared == ("Jsonl.path",) and find_variant(variants, compared, "path='/new/b.jsonl'") is variants[1]
    edited = group([moved[0], one("c0", "C", "/old/a.jsonl")])[0]
    assert [v.label for v in edited] == ["data=A", "data=C"]
    equal = group([moved[0], one("d0", "A", "/copy/a.jsonl")])[0]  # of a sweep of two files that are the same
    assert [v.label for v in equal] == ["path='/old/a.jsonl'", "path='/copy/a.jsonl'"]
    again = group([*moved, one("e0", "A", "/copy/a.jsonl")])[0]  # seed 0 once more, from a third place
    assert [(v.label, len(v.runs)) for v in again] == [("path='/old/a.jsonl'", 2), ("path='/copy/a.jsonl'", 1)]
    swept = group(moved, swept=["Jsonl.path"])[0]
    assert [v.label for v in swept] == ["path='/old/a.jsonl'", "path='/new/a.jsonl'"]


def test_data_that_differ_with_a_setting_are_no_setting_of_their_own(tmp_path):
    found = [read_run(write_run(tmp_path / f"{digits}{rate}", rows=rewards(0), data=f"of {digits} digits",
                                settings={TASK: digits, RATE: rate}))
             for digits in (1, 2) for rate in (1, 2)]  # fmt: skip
    variants, compared, tasks = group(found, [TASK])
    assert (compared, tasks) == ((TASK,), (RATE,)) and [v.label for v in variants] == ["digits=1", "digits=2"]
    assert group(found)[0][0].label == "learning_rate=1, digits=1"


def test_what_a_sweep_compares_is_named_where_one_variant_is_there(tmp_path):
    found = runs(tmp_path, 1, 2, rate=0.001)
    assert compare(found, ["reward/mean"]).metrics["reward/mean"][0].variant.label == "all runs"
    shown = compare(found, ["reward/mean"], swept=[RATE], baseline="learning_rate=1e-3")
    assert shown.metrics["reward/mean"][0].variant.label == "learning_rate=0.001"


def test_one_run_twice_is_refused(tmp_path, two):
    again = read_run(write_run(tmp_path / "again", rows=rewards(5), seed=0))
    with pytest.raises(ValueError, match="are the same run: one configuration, one seed"):
        group([*two, again])
    with pytest.raises(ValueError, match="given twice"):
        find_runs([two[0].folder, two[0].folder])


def test_notes_say_what_a_reader_would_not_see(tmp_path):
    found = [read_run(write_run(tmp_path / "a", rows=rewards(1, 2), finished=False)),
             read_run(write_run(tmp_path / "b", rows=rewards(math.nan), seed=1))]  # fmt: skip
    shown = compare(found, ["reward/mean"])
    assert shown.notes[0].endswith("a is not finished; its last step is 2")
    assert shown.notes[1].endswith("b has no reward/mean, and is left out of it")
    (row,) = shown.metrics["reward/mean"]
    assert row.value.n == 1 and row.value.mean == 2 and math.isnan(row.value.low)


def test_runs_that_differ_in_much_are_called_by_their_names(tmp_path):
    """A label of all that differs would be wider than a terminal; the notes have it."""
    names = ("width", "mlp_width", "layers", "heads", "kv_heads", "head_dim", "experts", "window", "sinks", "rotary")
    settings = lambda value: {f"Decoder.{name}": value for name in names}
    write = lambda name, score, value: read_run(
        write_run(tmp_path / name, rows=rewards(score), settings=settings(value))
    )
    found = [write("one", 0, 16), write("two", 1, 32)]
    shown = compare(found, ["reward/mean"], baseline="width=32")
    one, two = shown.metrics["reward/mean"]
    assert [row.variant.label for row in (one, two)] == [run.source for run in found]
    assert shown.baseline == two.variant.label
    assert one.better.mean == 0 and two.better is None
    assert shown.notes[0].startswith(f"{found[0].source} has width=16, mlp_width=16, layers=16")
    (alike,) = compare(found[:1], ["reward/mean"]).metrics["reward/mean"]
    assert alike.variant.label != found[0].source


def test_a_run_that_went_on_after_its_summary_is_not_finished(tmp_path):
    folder = write_run(tmp_path / "a", rows=rewards(1, 2))
    (folder / "summary.json").write_text(json.dumps({"steps": 1, "seconds": {"total": 1.0}, "eval": {}}))
    assert not read_run(folder).finished


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"baseline": "learning_rate=5"}, r"fits no variant: learning_rate=0\.001; learning_rate=0\.003"),
        ({"baseline": "learning_rat=1"}, "did you mean learning_rate"),
        ({"baseline": "digits"}, "a baseline is NAME=VALUE"),
        ({"baseline": "learning_rate="}, "a baseline is NAME=VALUE"),
        ({"by": ["learning_rat"]}, "did you mean learning_rate"),
        ({"by": ["seed"]}, r"Run\.seed is not compared"),
        ({"by": ["Run.seed"]}, r"Run\.seed is not compared"),
        ({"by": ["tokenizer"]}, "do not differ in 'tokenizer'; they differ in AdamW.learning_rate"),
    ],
)
def test_names_that_nothing_fits_are_refused(two, given, message):
    with pytest.raises(ValueError, match=message):
        compare(two, ["reward/mean"], **given)


def test_a_metric_that_no_run_has_is_told_with_the_nearest(two):
    (missing,) = missing_metrics(["reward/maen", "reward/mean"], two)
    assert missing.startswith("metric 'reward/maen'; did you mean reward/mean?")
    named = two[0]._replace(rows=[{"step": 1, "phase": "rl"}])
    assert missing_metrics(["phase"], [named]) and missing_metrics(["step"], [named]) == []


def test_a_baseline_is_read_as_gin():
    assert read_baseline("a.b=1e-3, c=[1, 2],d=@X(),e='x,y=1'") == [
        ("a.b", "0.001"), ("c", "[1, 2]"), ("d", "@X()"), ("e", "'x,y=1'"),
    ]  # fmt: skip
    with pytest.raises((ValueError, ConfigError)):
        read_baseline("a=[1")


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        find_runs([tmp_path / "none"])
    with pytest.raises(ValueError, match=r"no manifest\.json and no sweep\.json"):
        find_runs([tmp_path])


def test_a_curve_is_the_mean_over_runs_with_a_band_over_runs(tmp_path):
    first = write_run(tmp_path / "a", rows=rewards(0, 2, math.nan, 5))
    second = write_run(tmp_path / "b", rows=rewards(0, 4, 6), seed=1)
    (variant,) = group([read_run(first), read_run(second)])[0]
    curve = curve_of(variant, "reward/mean")
    assert curve.steps.tolist() == [1, 2, 3]  # step 4 is not of both
    assert curve.mean.tolist() == [0, 3, 6]  # NaN does not count
    # of two runs 1/4 of the resamples are twice the first, 1/4 twice the second: the 95 % interval is all of it
    assert curve.low.tolist() == [0, 2, 6] and curve.high.tolist() == [0, 4, 6]
    assert len(curve_of(variant, "none").steps) == 0


def test_a_step_in_which_one_run_measured_nothing_stays_in_the_curve(tmp_path):
    """As the policy's entropy where no group of DAPO has a signal; with several seeds hardly a step has them all."""
    first = write_run(tmp_path / "a", rows=rewards(None, 2, None, 5))
    second = write_run(tmp_path / "b", rows=rewards(4, None, None, 7), seed=1)
    (variant,) = group([read_run(first), read_run(second)])[0]
    curve = curve_of(variant, "reward/mean")
    assert curve.steps.tolist() == [1, 2, 4] and curve.mean.tolist() == [4, 2, 6]  # none of both has step 3
    assert [score(run, "reward/mean") for run in variant.runs] == [5, 7]  # the last 1 of 2 numbers


def test_a_long_curve_shows_means_of_stretches(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "CURVE_POINTS", 2)
    (variant,) = group([read_run(write_run(tmp_path / "a", rows=rewards(1, 2, 3, 4, 8)))])[0]
    curve = curve_of(variant, "reward/mean")
    assert curve.steps.tolist() == [2, 4.5] and curve.mean.tolist() == [2, 6]  # (1 + 2 + 3) / 3, (4 + 8) / 2
    assert np.isnan(curve.low).all()


def test_a_comparison_as_json_has_no_number_that_json_lacks(two, tmp_path):
    alone = read_run(write_run(tmp_path / "x", rows=rewards(math.nan), settings={RATE: 9}))
    found = json.loads(json.dumps(to_json(compare([*two, alone], ["reward/mean"])), allow_nan=False))
    rows = found["metrics"]["reward/mean"]
    assert rows[0]["settings"] == {RATE: "0.001"} and rows[0]["interval"] == [2.0, 2.0]
    assert rows[2]["value"] is None and rows[2]["interval"] == [None, None]
    assert [run["score"] for run in rows[1]["runs"]] == [1.0, 2.0, 3.0]
