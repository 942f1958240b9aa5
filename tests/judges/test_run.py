"""A run of configs/tiny.gin whose reward comes from a judge, left and resumed."""

from __future__ import annotations

import contextlib
import json
import threading
import time

import pytest
from small_model import PLAIN_DECODER
from stand_in import Faults, StandIn, digits
from test_pods import assert_same, train

import jrl
from jrl import cli
from jrl.config import ConfigError
from jrl.run.identity import RefusedIdentity
from jrl.run.records import Preempted
from jrl.run.run_hash import run_fingerprint
from jrl.tasks.judges import JudgeStopped
from jrl.tools import doctor

TINY = [
    "Decoder.layers=1", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8",
    "Decoder.mlp_width=32", "Online.prompts=4", "Online.samples=4", "Online.steps=4", "Checkpoint.every=2",
    "Log.samples=0", "Scoring.workers=1",
    *PLAIN_DECODER,
]  # fmt: skip
JUDGE = ["Config.judges=[@Judge()]", "Judge.model='stand-in'", "Judge.backoff_seconds=0.01", "Judge.weight=2.0"]


def steps(address, folder, *bindings, **settings):
    named = {b.partition("=")[0]: b for b in [*TINY, *JUDGE, f"Judge.address='{address}'", *bindings]}
    return jrl.steps("configs/tiny.gin", list(named.values()), run=folder, **settings)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that nothing interrupted, with a judge that never fails for good; and its steps."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    with StandIn(Faults(errors=0.2, most=2)) as server:
        return folder, list(steps(server.address, folder))


def test_the_reward_is_the_verifiers_and_the_weighted_judges(straight):
    folder, seen = straight
    known = set()
    for row, step in zip(rows(folder), seen):
        assert row["rollout/valid_share"] == 1
        parts = row["reward_component/Regex"] + 2 * row["reward_component/Judge/judge"]
        assert row["reward/mean"] == pytest.approx(parts, rel=1e-5)
        texts = [completion for _, completion in step.texts]
        graded = sum(map(digits, texts)) / len(texts)
        assert row["reward_component/Judge/judge"] == pytest.approx(graded, rel=1e-5)
        # A question that was asked before, in this step or an earlier one, costs nothing.
        counted = [row[f"host/judge/judge/{name}"] for name in ("requests", "cached", "shared")]
        assert sum(counted) == len(texts) and counted[0] == len(set(step.texts) - known)
        known |= set(step.texts)


def test_a_judge_labels_pairs_in_one_stage_and_is_not_asked_in_the_next(tmp_path):
    stages = ["Config.stages=[@label/Online(), @Online()]", "label/Online.objective=@OnlineBradleyTerry()",
              "label/Online.trains='reward'", "label/Online.name='label'", "label/Online.rewards={}",
              "label/Online.judges=('judge',)", "label/Online.steps=2", "Online.steps=3",
              "Online.rewards={'reward': 1.0}", "Online.judges=()", "Regex.weight=0.0"]  # fmt: skip
    with StandIn() as server:
        run = steps(server.address, tmp_path, *stages)
        assert [next(run).step for _ in range(3)] == [1, 2, 3]
        run.close()
    # The stage that asked it is over: the run goes on without a server, and has nothing to do afterwards.
    assert [step.step for step in steps(server.address, tmp_path, *stages)] == [5]
    assert not list(steps(server.address, tmp_path, *stages))
    labeled, learned = rows(tmp_path)[:2], rows(tmp_path)[2:]
    for row in labeled:
        assert row["reward/mean"] == pytest.approx(2 * row["reward_component/Judge/judge"], rel=1e-5)
        assert row["host/judge/judge/requests"] > 0 and row["loss/rows"] > 0
    for row in learned:
        assert row["reward/mean"] == pytest.approx(row["reward_component/role/reward"], rel=1e-5)
        assert not [name for name in row if "judge" in name.lower()]


def test_a_judge_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"Online\.judges names 'other', which is not in .* Available: judge"):
        jrl.load_config(
            "configs/tiny.gin", [*JUDGE, "Judge.address='http://localhost:1/v1'", "Online.judges=('other',)"]
        )


def test_two_policies_are_compared_by_a_judge_from_the_command_line(straight, tmp_path, capsys):
    out, folder = tmp_path / "eval.json", str(straight[0])
    given = ["Data.held_out_every=3", "Config.eval=@Eval()", "Eval.prompts=2", "Eval.batch=8"]
    with StandIn() as server:
        compares = [*JUDGE, f"Judge.address='{server.address}'", "Judge.grading=@Pairwise()"]
        assert cli.main(["eval", folder, folder, *given, *compares, "--out", str(out)]) == 0
    first, second = json.loads(out.read_text())
    # A policy wins half of the time over itself, whatever the judge makes of the order.
    assert first["judged"]["judge"][0] is None and first["judged"]["judge"][1]["mean"] == 0.5
    assert second["judged"]["judge"][0]["n"] == 2 and "judge: wins over" in capsys.readouterr().out
    assert (tmp_path / "eval.judges" / "judge.answers.jsonl").exists()


@pytest.mark.parametrize("left_after", [1, 2])
def test_a_run_that_is_left_resumes_to_the_same_bits_whatever_the_judge_says_now(straight, tmp_path, left_after):
    with StandIn(Faults(errors=0.2, most=2)) as server:
        with contextlib.closing(steps(server.address, tmp_path)) as seen:
            for step in seen:
                if step.step == left_after:
                    break
        asked = len(server.answered)
        list(steps(server.address, tmp_path))
        times = {body: count for body, count in server.answered.items() if b"2 + 2?" not in body}  # the first question
        assert len(times) + 1 == len(server.answered) > asked and set(times.values()) == {1}
    assert run_fingerprint(tmp_path) == run_fingerprint(straight[0])


def test_a_judge_that_stops_answering_stops_the_run_which_goes_on_when_it_is_back(straight, tmp_path):
    with StandIn() as server:
        with pytest.raises(JudgeStopped, match="requests to the judge 'judge' failed"):
            for step in steps(server.address, tmp_path, "Judge.attempts=2"):
                server.faults = Faults(halves=1.0, most=99) if step.step == 1 else server.faults
        server.faults = Faults()
        list(steps(server.address, tmp_path))  # attempts is free to change
    assert run_fingerprint(tmp_path) == run_fingerprint(straight[0])


def test_a_stop_while_the_judge_hangs_gives_the_step_up_and_saves(tmp_path):
    stop = threading.Event()
    with StandIn(Faults(hang_seconds=60)) as server:
        with pytest.raises(Preempted):
            for step in steps(server.address, tmp_path, stop=stop):
                if step.step == 1:
                    server.faults = Faults(timeouts=1.0, most=99, hang_seconds=60)
                    threading.Timer(0.5, stop.set).start()
                    began = time.monotonic()
        assert time.monotonic() - began < 20
    assert len(rows(tmp_path)) >= 1


def test_a_judge_that_cannot_be_used_is_refused_before_anything_is_written(tmp_path):
    with StandIn(Faults(pages=1.0, most=99)) as server, pytest.raises(ValueError, match=r"cannot be used.*a web page"):
        list(steps(server.address, tmp_path / "page"))
    assert not (tmp_path / "page" / "manifest.json").exists()


def test_what_the_judge_is_asked_is_part_of_the_runs_identity(straight, tmp_path):
    with StandIn() as server:
        list(steps(server.address, tmp_path, "Online.steps=1"))
        with pytest.raises(RefusedIdentity, match=r"judges\.0\.weight"):
            list(steps(server.address, tmp_path, "Online.steps=2", "Judge.weight=1.0"))
        with pytest.raises(RefusedIdentity, match="instructions"):
            list(steps(server.address, tmp_path, "Online.steps=2", "Judge.grading=@Grade()", "Grade.instructions='x'"))


@pytest.mark.parametrize(
    ("bindings", "said"),
    [
        (["Config.judges=[@Judge(), @other/Judge()]"], "two judges have the name 'judge'"),
        (
            ["Judge.grading=@Pairwise()", "Online.samples=1", "Online.objective=@Reinforce()"],
            "Online.samples = 1 gives it one",
        ),
        (["Judge.grading=@Rubric()"], "Rubric.items"),
        (["Judge.wait=3"], "wait"),
        (["Judge.attempts=0"], "Judge.attempts is 0"),
        (["Judge.address='localhost'"], "Judge.address is 'localhost'"),
    ],
)
def test_configurations_that_cannot_run_are_refused(bindings, said, tmp_path):
    with pytest.raises((ConfigError, ValueError), match=said):
        list(steps("http://127.0.0.1:9/v1", tmp_path, *bindings))


def test_doctor_says_whether_a_runs_judge_answers(straight, tmp_path):
    with StandIn() as server:
        list(steps(server.address, tmp_path, "Online.steps=1"))
        lines = [line for line in doctor.run_lines(tmp_path) if "judge 'judge'" in line.text]
        assert [line.good for line in lines] == [True] and "answers as it is asked to" in lines[0].text
    lines = [line for line in doctor.run_lines(tmp_path) if "judge 'judge'" in line.text]
    assert [line.good for line in lines] == [False] and "ConnectionRefused" in lines[0].text


@pytest.mark.slow
def test_two_processes_ask_a_judge_about_their_own_prompts(tmp_path):
    with StandIn() as server:
        judge = ["Config.judges=[@Judge()]", "Judge.model='stand-in'", f"Judge.address='{server.address}'"]
        train(tmp_path / "two", *judge)
        asked = server.asked.total() - 2  # one question each before anything is compiled
        train(tmp_path / "one", *judge, processes=1, devices=4)
        assert asked == server.asked.total() - asked - 3
    assert_same(tmp_path / "two", tmp_path / "one")
