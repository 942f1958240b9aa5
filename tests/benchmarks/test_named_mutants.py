"""The table of faults in what is around the formulas. Which of them tests notice, `benchmarks.named_mutants` tries."""

from __future__ import annotations

import json

import pytest

from benchmarks import named_mutants


def test_every_fault_of_the_table_can_be_planted():
    assert len(named_mutants.named_mutants()) >= 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": "not there"}, "stands 0 times in .*renew the entry"),
        ({"tests": []}, "needs file, name, replacement, tests, text"),
        ({"tests": ["tests/nothing.py"]}, "there is no tests/nothing.py"),
        ({"tests": ["tests/ops/test_keys.py::test_nothing"]}, "there is no tests/ops/test_keys.py::test_nothing"),
        ({"equivalent": " "}, "say why it makes no difference"),
    ],
)
def test_a_stale_entry_is_refused(tmp_path, change, message):
    row = json.loads(named_mutants.TABLE.read_text(encoding="utf-8"))[0] | change
    path = tmp_path / "faults.json"
    path.write_text(json.dumps([row]))
    with pytest.raises(ValueError, match=message):
        named_mutants.named_mutants(path)
    path.write_text(json.dumps([row, row]))
    with pytest.raises(ValueError):
        named_mutants.named_mutants(path)


def test_a_fault_that_tests_notice_is_told_from_one_that_they_do_not(tmp_path):
    """In a project of one file."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "jrl").mkdir()
    (tmp_path / "jrl" / "__init__.py").touch()
    (tmp_path / "jrl" / "half.py").write_text("def half(x):\n    return x // 2\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow: none\n")
    test = "from jrl.half import half\n\n\ndef test_half():\n    assert half(4) == 2\n"
    (tmp_path / "tests" / "test_half.py").write_text(test)
    entry = {"file": "jrl/half.py", "text": "x // 2", "tests": ["tests/test_half.py"]}
    rows = [{**entry, "name": name, "replacement": new} for name, new in (("a", "x // 3"), ("b", "x / 2"))]
    out = tmp_path / "out.json"
    found = named_mutants.try_mutants(rows, out, tmp_path)
    assert [row["killed_by"] for row in found] == ["tests/test_half.py::test_half", None]
    assert json.loads(out.read_text()) == found
    assert named_mutants.try_mutants(rows, out, tmp_path / "gone") == found  # nothing is planted again
