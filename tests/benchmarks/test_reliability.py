"""The command that tries the goals of reliability: its table, what it counts, and one goal tried for real."""

from __future__ import annotations

import json
import pathlib
import re
import sys

import pytest

from benchmarks import reliability
from benchmarks.reliability_goals import GOALS, Goal

ROOT = pathlib.Path(__file__).parents[2]


def test_every_release_blocking_goal_is_tried_or_says_why_not():
    assert len(GOALS) == 67
    assert [name for name, goal in GOALS.items() if not goal.tests and not goal.limits] == []
    assert not any(goal.more and not goal.tests for goal in GOALS.values())


@pytest.mark.parametrize("name", GOALS)
def test_the_tests_of_a_goal_are_there(name):
    for node in GOALS[name].nodes("full"):
        file, _, test = node.partition("::")
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {test.partition('[')[0]}\(", source, re.MULTILINE) or not test, node


def test_what_passed_is_counted_and_what_failed_or_is_missing_is_named():
    goal = Goal("p", ("a.py::a", "b.py"), ("c.py::c",))
    record = {"test": "a.py::a[1]", "outcome": "passed", "trials": 30, "seeds": [0], "seconds": 1.25, "message": ""}
    failed = record | {"test": "b.py::b", "outcome": "failed", "trials": 5, "message": "E assert 1 == 2"}
    skipped = record | {"test": "b.py::c", "outcome": "skipped", "message": "needs 8 devices"}
    another = record | {"test": "a.py::ab"}
    result = reliability.outcome(goal, "full", [record, record | {"test": "a.py::a[2]"}, failed, skipped, another])
    assert (result["trials"], result["tests"], result["seeds"], result["seconds"]) == (60, 2, [0], 5.0)
    assert result["failed"] == ["b.py::b: E assert 1 == 2", "c.py::c: no trial took place"]
    assert result["skipped"] == ["b.py::c: needs 8 devices"]


def test_nothing_tried_is_a_failure():
    skipped = {"test": "a.py::a", "outcome": "skipped", "trials": 1, "seeds": [], "seconds": 0.0, "message": "no"}
    assert reliability.outcome(Goal("p", ("a.py",)), "smoke", [skipped])["failed"] == ["every test was skipped"]
    assert reliability.outcome(Goal("p", ("a.py",)), "smoke", [])["failed"] == ["a.py: no trial took place"]


def test_a_goal_is_tried_and_added_to_the_file(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    out.write_text('{"goals": {"R1": {"trials": 1}}}')
    node = "tests/data/test_stream.py::test_five_thousand_random_prompts_are_used_or_counted_and_nothing_else"
    monkeypatch.setitem(GOALS, "C1", Goal("p", (node,)))
    monkeypatch.setattr(sys, "argv", ["reliability", "--out", str(out), "--goal", "C1", "E2"])
    assert reliability.main() == 0
    results = json.loads(out.read_text())["goals"]
    assert results["R1"] == {"trials": 1} and "E2" not in results
    assert (results["C1"]["trials"], results["C1"]["seeds"], results["C1"]["failed"]) == (5000, [3], [])
    assert "C1: 5000 trials, none failed" in capsys.readouterr().out


def test_a_process_that_ends_early_is_a_failure_though_a_test_of_the_goal_has_passed(tmp_path, monkeypatch):
    (tmp_path / "test_ends.py").write_text(
        "import os\n\n\ndef test_one():\n    pass\n\n\ndef test_two():\n    os._exit(70)\n"
    )
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--trials')\n")
    monkeypatch.setattr(reliability, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    records = list(reliability.run(["test_ends.py"], "smoke"))
    result = reliability.outcome(Goal("p", ("test_ends.py",)), "smoke", records)
    assert (result["trials"], result["failed"]) == (1, ["test_ends.py: pytest ended early, with 70"])


def test_an_unknown_goal_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["reliability", "--out", str(tmp_path / "out.json"), "--goal", "C9"])
    with pytest.raises(SystemExit):
        reliability.main()
