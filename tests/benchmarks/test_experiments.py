"""The table of benchmarks/experiments.py, and what it writes of runs that are not real."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import experiments, shifted_pairs
from benchmarks.experiments import EXPERIMENTS, MARK, Experiment, Variant
from jrl.resolve import load_config
from jrl.tools.sweep.population import unsupported
from jrl.tools.sweep.runs import RunResult

GRID = Experiment(
    "A grid", "toy", (Variant("a", (), 0), Variant("a", (), 2), Variant("b", ("x",), 0), Variant("b", ("x",), 2)),
    ("reward/mean",), axis="lag",
)  # fmt: skip


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_variant_is_a_configuration_that_loads(name, monkeypatch, tmp_path):
    monkeypatch.chdir(experiments.ROOT)
    experiment = EXPERIMENTS[name]
    for variant in experiment.variants:
        config, *bindings = experiments.sweep_of(experiment, variant, 2)
        assert bindings.pop() == "Run.seed=[0..1]"
        loaded, _ = load_config(config, bindings)
        assert (unsupported(loaded) is None) is experiment.population
    names = [experiments.name_of(variant, experiment.axis) for variant in experiment.variants]
    assert len(set(names)) == len(names)
    assert set(experiments.baselines_of(experiment).values()) <= {None, *names}
    folders = {experiments.folder_of(tmp_path, experiment, variant, 3) for variant in experiment.variants}
    assert len(folders) == len(names)


def runs_of(scores):
    """Runs of two steps, one for each score: nothing first, then the score."""
    return [
        RunResult(
            Path(f"{i}"), f"{i}", {}, [{"step": 1, "reward/mean": 0}, {"step": 2, "reward/mean": value}], {}, True
        )
        for i, value in enumerate(scores)
    ]


def test_a_page_keeps_what_stands_above_its_mark(tmp_path, monkeypatch):
    monkeypatch.setitem(EXPERIMENTS, "grid", GRID)
    runs = {variant: runs_of(score) for variant, score in zip(GRID.variants, ([0, 1], [2, 4], [1, 1], [5, 7]))}
    facts = {"seeds": 2, "hardware": "a machine", "versions": "jax 9"}
    experiments.write("grid", experiments.compared(GRID, runs), facts, tmp_path)
    page = tmp_path / "grid.md"
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# A grid\n\n{MARK}\n")
    # [5, 7] - [1, 1] = [4, 6]: mean 5, deviation 2^0.5, over 2^0.5, times 12.706 with one degree of freedom.
    assert "| b, lag 2 | 5 7 | 6 | 5 to 7 | +5.000, -7.706 to +17.706 |" in text
    assert "| b, lag 0 | 1 1 | 1 | 1 to 1 | - |" in text
    assert "| b, lag 0 | `x Online.lag=0` |" not in text and "| b, lag 0 | `x` |" in text
    page.write_text(text.replace("# A grid", "# A grid\n\nBy hand.").replace("b, lag 2", "gone"), encoding="utf-8")
    experiments.write("grid", experiments.compared(GRID, runs), facts, tmp_path)
    assert page.read_text(encoding="utf-8") == text.replace("# A grid", "# A grid\n\nBy hand.")


def test_a_plot_over_an_axis_has_a_line_for_each_label():
    runs = {variant: runs_of(score) for variant, score in zip(GRID.variants, ([0, 1], [2, 4], [1, 1], [5, 7]))}
    rows = experiments.compared(GRID, runs).metrics["reward/mean"]
    lines = experiments.over_axis(rows, GRID.variants)
    assert [line.variant.label for line in lines] == ["a", "b"]
    assert [line.curve.steps.tolist() for line in lines] == [[0, 2]] * 2
    assert [line.curve.mean.tolist() for line in lines] == [[0.5, 3], [1, 6]]
    assert [line.curve.high.tolist() for line in lines] == [[1, 4], [1, 7]]
    assert "b, lag 2: 6 [5, 7]" in experiments.plot("reward/mean", rows, GRID)


def test_a_difference_is_bold_where_its_interval_leaves_out_0():
    # mean 2, deviation 0.1, over 3^0.5, times 4.303
    assert experiments.difference([2.9, 4, 5.1], [1, 2, 3]) == "**+2.000, +1.752 to +2.248**"
    assert experiments.difference([1, 3], [1, None]) == experiments.difference([1], [2]) == "-"


def test_an_evaluation_on_all_prompts_becomes_metrics(tmp_path):
    assert experiments.evaluated(tmp_path) == {}
    content = {"mean": 0.5, "pass_at_k": {"1": {"mean": 0.5}, "8": {"mean": 0.75}}}
    (tmp_path / experiments.EVALUATED).write_text(json.dumps(content), encoding="utf-8")
    assert experiments.evaluated(tmp_path) == {"all/accuracy": 0.5, "all/pass@1": 0.5, "all/pass@8": 0.75}
    (tmp_path / experiments.EVALUATED).write_text(json.dumps(content | {"distinct": {"mean": 3.5}}), encoding="utf-8")
    assert experiments.evaluated(tmp_path)["all/distinct answers"] == 3.5
    (tmp_path / experiments.PAIRS).write_text('{"no shift": 0.9}', encoding="utf-8")
    assert experiments.evaluated(tmp_path)["right answers preferred/no shift"] == 0.9


def test_shifted_pairs_are_of_other_prompts_or_other_mistakes():
    seen, prompts, mistakes = (set(pairs) for pairs in shifted_pairs.SHIFTS.values())
    assert (len(seen), len(prompts)) == (49 * 3, 51 * 3) and not seen & prompts and not seen & mistakes
    assert {pair.prompt for pair in seen} - {pair.prompt for pair in mistakes} == {"0+0="}  # nothing is below 0
    assert ("6+6=", "12", "15") in seen and ("7+0=", "7", "8") in prompts and ("6+6=", "12", "9") in mistakes
    # 3 > 1, 1 < 2, a tie
    assert shifted_pairs.accuracy(np.array([3.0, 1, 2]), np.array([1.0, 2, 2])) == 0.5


@pytest.mark.parametrize("name", sorted(path.stem for path in experiments.PAGES.glob("*.json")))
def test_a_page_is_what_its_results_say(name):
    result = json.loads((experiments.PAGES / f"{name}.json").read_text(encoding="utf-8"))
    text = (experiments.PAGES / f"{name}.md").read_text(encoding="utf-8")
    by_hand, _, written = text.partition(MARK)
    assert written == "\n\n" + experiments.generated(name, EXPERIMENTS[name], result)
    assert len(by_hand) > 300  # what the paper claims, and what came of it
    for metric in EXPERIMENTS[name].metrics:
        assert (experiments.PAGES / experiments.plot_file(name, metric)).exists()
