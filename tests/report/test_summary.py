from __future__ import annotations

import json
import math

import pytest

from jrl.run.report.summary import read_summary, write_summary

INTERVAL = {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 500}


def test_a_summary_has_exactly_the_keys_that_checks_read(tmp_path):
    summary = write_summary(
        tmp_path / "summary.json",
        steps=30,
        seconds={"total": 12.5, "sampling": 3.0},
        evals={"before_rl": INTERVAL, "after_rl": {**INTERVAL, "mean": math.nan}},
        tokens_per_second=1234.5,
        peak_bytes=2**30,
    )
    read = json.loads((tmp_path / "summary.json").read_text())
    names = ["steps", "seconds", "eval", "tokens_per_second", "peak_bytes", "goodput", "best"]
    assert read == summary and list(read) == names
    assert read["seconds"]["total"] == 12.5 and read["eval"]["before_rl"] == INTERVAL
    assert read["eval"]["after_rl"]["mean"] is None


def test_a_summary_without_a_key_is_refused(tmp_path):
    values = {"steps": 1, "tokens_per_second": None, "peak_bytes": None}
    with pytest.raises(ValueError, match="lack 'total'"):
        write_summary(tmp_path / "s.json", seconds={}, evals={}, **values)
    with pytest.raises(ValueError, match="summary evaluation 'after_rl' lacks high, n"):
        write_summary(tmp_path / "s.json", seconds={"total": 1.0}, evals={"after_rl": {"mean": 1, "low": 1}}, **values)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"steps": 1, "seconds": 2, "eval": {}}', '{"steps": null, "seconds": {"total": 1}, "eval": {}}']
    + [f'{{"steps": 1, "seconds": {{"total": 1}}, "eval": {evals}}}' for evals in (
        "null", "[1]", '{"after_rl": 0.5}', '{"after_rl": {}}', '{"after_rl": {"mean": "0.5"}}')],
)  # fmt: skip
def test_a_summary_that_was_edited_is_refused_by_name(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(ValueError, match=r"summary\.json is damaged \(.*remove it: `jrl train`"):
        read_summary(tmp_path / "summary.json")


def test_a_summary_is_read_as_it_was_written(tmp_path):
    evals = {"before_rl": INTERVAL, "after_rl": {**INTERVAL, "mean": math.nan}}  # NaN: nothing could be scored
    values = {"steps": 30, "seconds": {"total": 1.0}, "tokens_per_second": None, "peak_bytes": None}
    summary = write_summary(tmp_path / "summary.json", evals=evals, **values)
    assert read_summary(tmp_path / "summary.json") == summary
