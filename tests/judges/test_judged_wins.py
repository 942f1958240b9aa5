"""Win rates of policies by a judge who compares their answers in both orders."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
from stand_in import Faults, StandIn

from jrl import cli
from jrl.tasks.example import Example, Message
from jrl.tasks.judges import Grade, Judge, JudgeStopped, Pairwise
from jrl.tools.judged_wins import comparing, judged_wins, lines, summary

EXAMPLES = [Example(f"e{i}", (Message("user", f"{i} + {i}?"),), answer=str(2 * i)) for i in range(4)]
GRADES = {"bad": 0.1, "good": 0.7, "also good": 0.7, "best": 1.0}


def judge(server, **fields):
    quick = {"backoff_seconds": 0.01, "timeout_seconds": 3.0, "concurrency": 8}
    return Judge(address=server.address, model="stand-in", **{**quick, "grading": Pairwise(), **fields})


def result(source, *texts):
    return {"source": source, "completions": {e.prompt_digest().hex(): text for e, text in zip(EXAMPLES, texts)}}


A = result("a", "best", "good", "bad", "good")
B = result("long/b", "good", "also good", "good", "bad")


def test_a_policy_wins_where_the_judge_prefers_it_in_both_orders(tmp_path):
    with StandIn(grade=lambda text: GRADES.get(text, 0.0)) as server:
        found = judged_wins([judge(server)], [A, B], EXAMPLES, tmp_path)["judge"]
        asked = len(server.answered)
        again = judged_wins([judge(server)], [A, B], EXAMPLES, tmp_path)["judge"]
        assert len(server.answered) == asked == 9  # the preflight's question, and 4 pairs in both orders
    # a wins two, ties one and loses one: (2 + 0.5) / 4
    assert (found[0][1]["mean"], found[1][0]["mean"]) == (0.625, 0.375) and again == found
    assert found[0][0] is found[1][1] is None
    assert (found[0][1]["n"], found[0][1]["failed"]) == (4, 0)
    head, row, other = lines("judge", ["a", "long/b"], found)[1:]
    assert head.split() == ["judge:", "wins", "over", "a", "long/b"]
    assert row.split()[:2] == ["a", "62.5"] and other.split()[:2] == ["long/b", "37.5"] and "|" in row


def test_a_prompt_that_is_there_twice_is_compared_once(tmp_path):
    with StandIn(grade=lambda text: GRADES.get(text, 0.0)) as server:
        found = judged_wins([judge(server)], [A, B], [*EXAMPLES, *EXAMPLES[:2]], tmp_path)["judge"]
    assert found[0][1]["n"] == 4


class FirstWins(StandIn):
    """A judge that prefers what it reads first."""

    def content(self, request, *, out_of_range=False):
        return json.dumps({"reason": "it is the first", "winner": "first"})


def test_a_judge_that_goes_by_the_order_calls_every_prompt_a_tie():
    with FirstWins() as server:
        found = judged_wins([judge(server)], [A, B], EXAMPLES, None)["judge"]
    assert found[0][1]["mean"] == found[1][0]["mean"] == 0.5


class NeverOfBest(StandIn):
    """A judge that gives no answer where `best` is second."""

    def content(self, request, *, out_of_range=False):
        second = request["messages"][1]["content"].rsplit("<second ", 1)[-1]
        return "no JSON" if "best" in second else super().content(request)


def test_a_prompt_that_is_judged_in_one_order_alone_does_not_count(tmp_path):
    with NeverOfBest(grade=lambda text: GRADES.get(text, 0.0)) as server:
        found = judged_wins([judge(server, attempts=1)], [A, B], EXAMPLES, None)["judge"]
        assert (found[0][1]["n"], found[0][1]["failed"]) == (3, 1)
        assert found[0][1]["mean"] == 0.5  # one won, one tied, one lost
        assert lines("judge", ["a", "b"], found)[-1] == "1 comparisons could not be judged"
        judged_wins([judge(server, attempts=1)], [A, B], EXAMPLES, tmp_path)
        with pytest.raises(JudgeStopped, match=r"1 of 8 requests .* failed"):
            judged_wins([judge(server, attempts=1, stop_above=0.1)], [A, B], EXAMPLES, None)
        server.content = functools.partial(StandIn.content, server)  # a better day
        found = judged_wins([judge(server, attempts=1)], [A, B], EXAMPLES, tmp_path)["judge"]
    assert (found[0][1]["n"], found[0][1]["failed"]) == (4, 0)


@pytest.mark.parametrize("same_prompts", [True, False])
def test_what_was_measured_is_written_where_it_is_not_compared(tmp_path, monkeypatch, capsys, same_prompts):
    asked = Judge(address="http://127.0.0.1:9", model="m", grading=Pairwise())  # nobody answers there
    policy = SimpleNamespace(
        config=SimpleNamespace(judges=[asked], eval=object()), program_cache=SimpleNamespace(close=lambda: None)
    )
    digests = ("a", "a" if same_prompts else "b")
    results = iter(
        [{"mean": mean, "prompts_digest": digest, **of} for mean, digest, of in zip((0.25, 0.75), digests, (A, B))]
    )
    monkeypatch.setattr(
        "jrl.tools.evaluate_sources.open_trained", lambda *args, **options: SimpleNamespace(policy=policy)
    )
    monkeypatch.setattr("jrl.tools.evaluation.reevaluate", lambda *args: next(results))
    monkeypatch.setattr("jrl.tools.evaluation.held_out_visits", lambda trained, stop: [])
    if same_prompts:
        monkeypatch.setattr("jrl.tools.evaluation.side_by_side", lambda results: "a table")
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    (tmp_path / "manifest.json").write_text("{}")
    assert cli.main(["eval", str(tmp_path), str(tmp_path), "--out", str(tmp_path / "ab.json")]) == 2
    written = json.loads((tmp_path / "ab.json").read_text())
    assert [result["mean"] for result in written] == [0.25, 0.75] and "judged" not in written[0]
    assert ("is evaluated on other prompts than" in capsys.readouterr().err) is not same_prompts


def test_lengths_are_controlled_with_the_winners_longer():
    # It wins exactly where it is longer: at equal lengths half of the time.
    found = summary(np.array([1.0, 0.0, 1.0, 0.0]), np.array([5.0, -5.0, 5.0, -5.0]))
    assert found["mean"] == 0.5 and found["length_controlled"] == pytest.approx(0.5)
    longer = summary(np.array([1.0, 1.0, 1.0, 0.0]), np.array([5.0, 5.0, 5.0, -5.0]))
    assert longer["mean"] == 0.75 and longer["length_controlled"] < 0.65
    nothing = summary(np.array([np.nan]), np.array([1.0]))
    assert nothing["mean"] is None and (nothing["n"], nothing["failed"]) == (0, 1)
    assert lines("judge", ["a"], [[nothing]])[2].split() == ["a", "-"]


def test_a_single_judged_prompt_has_a_wide_interval():
    one = summary(np.array([1.0, np.nan]), np.array([0.0, 0.0]))
    assert (one["mean"], one["low"], one["n"]) == (1.0, pytest.approx(0.2065, abs=1e-4), 1)
    _, row, _, failed = lines("judge", ["a", "b"], [[None, one], [one, None]])[1:]
    assert row.split() == ["a", "100.0", "[20.7,", "100.0]", "|", f"{100 * one['length_controlled']:.1f}"]
    assert failed == "1 comparisons could not be judged"


def test_only_judges_that_compare_completions_are_asked():
    with StandIn(Faults()) as server:
        judges = [judge(server), judge(server, name="b", grading=Grade()),
                  judge(server, name="c", grading=Pairwise(against="answer"))]  # fmt: skip
    assert [each.name for each in comparing(judges)] == ["judge"]
