import dataclasses
import re

import pytest

from jrl.experiment import Data, Eval, Online
from jrl.learning.layout import Learner
from jrl.models.pretrained.published import Published
from jrl.models.shape import Decoder
from jrl.rollout.sampler import Sampler
from jrl.rollout.scoring import Scoring
from jrl.run.checkpoints import Checkpoint
from jrl.run.report import Log
from jrl.tasks.judges.config import Judge
from jrl.tools.time_spent import ADVICE, NAMED, time_lines


def row(step, **seconds):
    parts = {"sample": 1.0, "score": 0.5, "prepare": 0.1, "update": 1.0, "other": 0.1, **seconds}
    return {"step": step, **{f"time/{part}_seconds": s for part, s in parts.items()}}


FIRST = row(1, start=5.0, compile=90.0)


@pytest.mark.parametrize(
    "part, waits, field",
    [
        ("sample", "for completions", "Sampler.slots"),
        ("score", "for the verifiers", "Scoring.workers"),
        ("update", "for the update", "Decoder.remat"),
        ("save", "for checkpoints", "Checkpoint.every"),
    ],
)
def test_the_run_waits_for_its_largest_part(part, waits, field):
    shares, waited, tried = time_lines([FIRST, row(2, **{part: 7.0}), row(3, **{part: 9.0})], [])
    usual = {"sample": 1.0, "score": 0.5, "update": 1.0}
    total = 16.0 + 2 * (0.2 + sum(s for name, s in usual.items() if name != part))  # of two rows; the first is left out
    assert f"mean of 2: {total / 2:.3g} s: {NAMED[part]} {int(1600 / total)} %" in shares and "compiling" not in shares
    assert waits in waited and f"{int(1600 / total)} % of a step" in waited and field in tried


def test_a_run_of_one_step_is_judged_without_its_compilation():
    assert "for the update" in time_lines([row(1, start=5.0, compile=90.0, update=2.0)], [])[1]


def test_writing_a_trace_is_no_part_of_a_step():
    rows = [FIRST, row(2, update=2.0), row(3, update=2.0, trace=50.0)]
    shares, waited, _ = time_lines(rows, [])
    assert shares.startswith("time of a step, mean of 2: 3.7 s: ") and "for the update" in waited
    records = [{"start": 0.0, "step": 0, "seconds": {}}, {"step": 1, "seconds": {"update": 30.0, "trace": 10.0}}]
    assert time_lines([], records)[0].endswith("updates; the trace of --profile 25 %")


def test_goodput_is_said_behind_the_three_lines():
    records = [{"start": 0.0, "step": 0, "seconds": {}}, {"step": 2, "seconds": {"update": 90.0, "save": 30.0}}]
    assert time_lines([], records) == [
        "goodput since the first start: 75 % of 2 min 00 s in 1 start were sampling, scoring and updates; saving 25 %"
    ]
    assert time_lines([{"step": 1, "time/step_seconds": 1.0}], []) == []  # a run of an older version


def test_every_part_has_advice_that_names_fields_that_exist():
    assert set(ADVICE) == set(NAMED) - {"restart", "trace"}
    classes = (Data, Eval, Online, Learner, Decoder, Published, Sampler, Scoring, Judge, Checkpoint, Log)
    sections = {section.__name__: section for section in classes}
    named = [pair for _, tried in ADVICE.values() for pair in re.findall(r"([A-Z]\w+)\.(\w+)", tried)]
    assert named and all(name in {f.name for f in dataclasses.fields(sections[section])} for section, name in named)
