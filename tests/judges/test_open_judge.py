"""An open judge: from groups of completions to rewards, with a journal that replays its verdicts."""

from __future__ import annotations

import json
import math
import os
import time

import numpy as np
import pytest
from processes_in_threads import together
from stand_in import Faults, StandIn, draw

import jrl
from jrl.config import to_gin
from jrl.device.processes import ONE
from jrl.experiment import TABLES, config_classes
from jrl.rollout.sources import Completions, judge_source
from jrl.tasks.data.prompts import Visit
from jrl.tasks.example import Example, Message
from jrl.tasks.judges import (
    Gap,
    Grade,
    Group,
    Hindsight,
    Judge,
    JudgeStopped,
    Pairwise,
    Rubric,
    SelfReference,
    gap,
    open_judge,
    self_reference,
)
from jrl.tasks.judges.judge import body_of, limits_of
from jrl.tasks.stopping import StopRequested, never
from jrl.tasks.verdict import Status

EXAMPLES = [Example(f"e{i}", (Message("user", f"{i} + {i}?"),), answer=str(2 * i)) for i in range(4)]


def config(server, **fields):
    quick = {"backoff_seconds": 0.01, "timeout_seconds": 3.0, "concurrency": 8}
    return Judge(address=server.address, model="stand-in", **{**quick, **fields})


def judged(judge_config, folder, groups, stop=never):
    judge = open_judge(judge_config, folder, stop)
    try:
        return judge.collect(judge.submit([Group((i, 7), EXAMPLES[i], texts) for i, texts in enumerate(groups)]))
    finally:
        judge.close()


GROUPS = [["no", "1", "two"], ["3 4", "no", "five"]]


def test_grades_are_scaled_to_rewards_in_the_order_of_the_rows(tmp_path):
    with StandIn() as server:
        found = judged(config(server, name="a", weight=0.5, grading=Grade(low=-1, high=3)), tmp_path, GROUPS)
        expected = [server.grade(text) for group in GROUPS for text in group]
    assert [values for (values,) in found.rows] == pytest.approx(expected, abs=1e-12)
    assert found.names == ("Judge/a",) and found.weights == (0.5,)
    assert found.problems == [""] * 6 and found.statuses == [Status.CORRECT] * 6


def test_a_rubric_is_the_weighted_sum_of_its_items_and_each_is_shown(tmp_path):
    grading = Rubric(items={"It is short.": 3.0, "It is rude.": -1.0})  # item_1 is "It is rude.": by text
    with StandIn() as server:
        found = judged(config(server, grading=grading), tmp_path, GROUPS)
    for (reward, rude, short), text in zip(found.rows, [text for group in GROUPS for text in group]):
        assert rude == (draw("It is rude.", text) < 0.5) and short == (draw("It is short.", text) < 0.5)
        assert reward == (3 * short - rude) / 4
    assert found.names == ("Judge/judge", "Judge/judge/item_1", "Judge/judge/item_2")
    assert found.weights == (1.0, 0.0, 0.0)
    assert len({row[0] for row in found.rows}) > 1


def test_a_rubric_counts_items_that_hold_together_and_stretches_what_is_good(tmp_path):
    items, together = {"It is short.": 3.0, "It is rude.": -1.0}, ("It is short.", "It is rude.", -1.0)
    plain = Rubric(items=items, interactions=(together,))
    with StandIn() as server:
        found = judged(config(server, grading=plain), tmp_path, GROUPS)
        further = Rubric(items=items, interactions=(together,), stretch=2.0)
        stretched = judged(config(server, name="x", grading=further), tmp_path, GROUPS)
    for (reward, rude, short), (other, *_) in zip(found.rows, stretched.rows):
        assert reward == (3 * short - rude - short * rude) / 5
        assert other == pytest.approx(math.expm1(2 * reward) / math.expm1(2) if reward > 0 else reward)
    assert {row[1:] for row in found.rows} >= {(0.0, 1.0), (1.0, 1.0)} or len({row[0] for row in found.rows}) > 1


def test_a_gap_is_to_the_score_of_the_examples_answer(tmp_path):
    grade = {"0": 0.5, "worse": 0.2, "better": 0.9}.__getitem__
    with StandIn(grade=grade) as server:
        texts = ["better", "0", "worse", "x" * 9]
        found = judged(config(server, grading=Gap(), max_characters=8), tmp_path, [texts])  # e0's answer is "0"
        # The answer itself is asked about once, and is exactly 0; what is too long is masked.
        np.testing.assert_allclose([row[0] for row in found.rows], [0.4, 0, -0.3, math.nan], atol=1e-12)
        assert len(server.asked) == 3 and found.rows[1] == (0.0,)
        server.content = lambda request, out_of_range: "{}"
        judge = config(server, name="x", grading=Gap(), attempts=1, stop_above=1.0)
        found = judged(judge, tmp_path, [["better", "0"]])
        # Without its grade there is nothing to compare with; the answer itself is no better than itself.
        assert math.isnan(found.rows[0][0]) and found.rows[1] == (0.0,) and "has no 'score'" in found.problems[0]
        asked = len(server.asked)
        found = judged(config(server, name="y", grading=Gap(), max_characters=2), tmp_path, [["long", "longer"]])
        # No completion is compared with the answer, which nobody asks about then.
        assert len(server.asked) == asked and np.isnan(found.rows).all()
        assert found.problems[0].endswith("4 characters; Judge.max_characters is 2")
    with pytest.raises(ValueError, match="'e' has no answer; Gap compares with it"):
        gap.questions(Gap(), Example("e", ()), ["4"])
    with pytest.raises(ValueError, match=r"Gap.reference = True shows the judge the very answer that it grades"):
        Gap(reference=True)


def test_in_hindsight_the_judge_says_what_comes_of_an_answer_first(tmp_path):
    tasks = []
    with StandIn() as server:
        said = {"good": '"they are glad", "score": 8', "blank": '" ", "score": 9', "bad": '"they are lost", "score": 1'}

        def content(request, out_of_range):
            tasks.append(request["messages"][0]["content"])
            text = next(name for name in said if f"\n{name}\n" in request["messages"][1]["content"])
            return '{"outcome": ' + said[text] + "}"

        server.content = content
        judge = config(server, grading=Hindsight(), attempts=1, stop_above=1.0)
        found = judged(judge, tmp_path, [["good", "blank", "bad"]])
    np.testing.assert_allclose([row[0] for row in found.rows], [0.8, math.nan, 0.1])
    assert "'outcome' is blank" in found.problems[1] and found.statuses[1] is Status.INFRA_ERROR
    assert all(0 < task.index('"outcome"') < task.index('"score"') for task in tasks) and len(tasks) == 3


def test_pairs_become_the_share_of_comparisons_won(tmp_path):
    grade = {"worst": 0.1, "good": 0.7, "same": 0.7, "8": 1.0, "0": 0.0}.__getitem__
    with StandIn(grade=grade) as server:
        found = judged(config(server, name="a", grading=Pairwise()), tmp_path, [["good", "worst", "same"]])
        # good beats worst and ties with same: (1 + 0.5) / 2
        assert [row[0] for row in found.rows] == [0.75, 0.0, 0.75]
        assert len(server.asked) == 6  # 3 * 2 ordered pairs
        grading = Pairwise(against="answer")  # e0's answer is "0"
        found = judged(config(server, name="b", grading=grading), tmp_path, [["8", "0"]])
        assert [row[0] for row in found.rows] == [1.0, 0.5]


def test_in_self_reference_the_judge_answers_itself_before_it_compares(tmp_path):
    tasks, grade = [], {"worst": 0.1, "good": 0.7, "same": 0.7, "0": 0.1}.__getitem__
    with StandIn(grade=grade) as server:
        compare = server.content

        def content(request, out_of_range, answer="mine"):
            tasks.append(request["messages"][0]["content"])
            winner = json.loads(compare(request))["winner"]
            return json.dumps({"answer": answer, "criticism": "by mine", "winner": winner})

        server.content = content
        found = judged(config(server, name="a", grading=SelfReference()), tmp_path, [["good", "worst", "same"]])
        # As Pairwise: good beats worst and ties with same, (1 + 0.5) / 2. No answer of the example is shown.
        assert [row[0] for row in found.rows] == [0.75, 0.0, 0.75] and len(tasks) == 6
        assert not any("<reference" in body["messages"][1]["content"] for body in server.bodies)
        against = SelfReference(against="answer")  # e0's answer is "0"
        assert judged(config(server, name="b", grading=against), tmp_path, [["good", "worst"]]).rows == [(1.0,), (0.5,)]
        quick = dict(grading=SelfReference(), attempts=1, stop_above=1.0)
        # One that always prefers what it reads first says nothing.
        server.content = lambda request, out_of_range: '{"answer": "a", "criticism": "b", "winner": "first"}'
        found = judged(config(server, name="c", **quick), tmp_path, [["good", "worst"]])
        assert [row[0] for row in found.rows] == [0.5, 0.5]
        server.content = lambda request, out_of_range: content(request, out_of_range, answer=" ")
        found = judged(config(server, name="d", **quick), tmp_path, [["good", "worst"]])
        assert np.isnan(found.rows).all() and "'answer' is blank" in found.problems[0]
        # A verdict alone, as a plain comparison has it, does not count.
        server.content = compare
        found = judged(config(server, name="e", **quick), tmp_path, [["good", "worst"]])
        assert np.isnan(found.rows).all() and "has no 'answer'" in found.problems[0]
    first = f"{self_reference.TASK}\n\n{SelfReference().instructions}\n\n"
    assert all(task.startswith(first) for task in tasks) and "Answer the last message" in first
    order = [task.rsplit("Reply with one JSON object", 1)[1] for task in tasks]
    assert all(0 < said.index('"answer"') < said.index('"criticism"') < said.index('"winner"') for said in order)
    with pytest.raises(ValueError, match=r"SelfReference.instructions is empty"):
        SelfReference(instructions=" ")


def test_a_position_bias_is_a_tie(tmp_path):
    with StandIn() as server:
        server.content = lambda request, out_of_range: '{"winner": "first"}'
        found = judged(config(server, grading=Pairwise()), tmp_path, [["a", "b", "c"]])
    assert [row[0] for row in found.rows] == [0.5, 0.5, 0.5]


def broken_texts(server_config, seed, texts, share):
    """Returns which of the texts, each alone in group 0, the stand-in always answers out of range."""
    from jrl.tasks.judges.grade import questions

    asked = questions(server_config.grading, EXAMPLES[0], texts)
    return [draw(seed, body_of(server_config, question.chat), "broken") < share for question in asked]


def test_a_judge_that_fails_masks_the_row_and_never_scores_it_0(tmp_path):
    texts = [f"text {i}" for i in range(20)]
    with StandIn(Faults(broken=0.3), seed=5) as server:
        judge = config(server, attempts=2, stop_above=1.0)
        broken = broken_texts(judge, 5, texts, 0.3)
        found = judged(judge, tmp_path, [texts])
    assert 0 < sum(broken) < 20
    for is_broken, (value,), problem, status in zip(broken, found.rows, found.problems, found.statuses):
        assert math.isnan(value) == is_broken == bool(problem)
        assert status is (Status.INFRA_ERROR if is_broken else Status.CORRECT)
        assert not is_broken or problem.startswith("judge: 'score' is not in 0 to 10")
    assert found.metrics["host/judge/judge/out_of_range"] == 2 * sum(broken)


def test_a_comparison_without_a_verdict_is_left_out_of_the_mean(tmp_path):
    grade = {"a": 0.9, "b": 0.5, "c": 0.1}.__getitem__
    with StandIn(grade=grade) as server:
        known = server.content

        def content(request, out_of_range):
            user = request["messages"][1]["content"]
            return "{}" if "\na\n" in user and "\nc\n" in user else known(request)

        server.content = content
        judge = config(server, grading=Pairwise(), attempts=1, stop_above=1.0)
        found = judged(judge, tmp_path, [["a", "b", "c"]])
        assert [row[0] for row in found.rows] == [1.0, 0.5, 0.0]
        server.content = lambda request, out_of_range: "{}"
        found = judged(config(server, name="x", grading=Pairwise(), attempts=1, stop_above=1.0), tmp_path, [["a", "b"]])
        assert all(math.isnan(row[0]) for row in found.rows) and "has no 'winner'" in found.problems[0]


def test_a_completion_above_the_limit_is_masked_and_not_sent(tmp_path):
    with StandIn() as server:
        found = judged(config(server, max_characters=5), tmp_path, [["12345", "123456"]])
        assert len(server.asked) == 1
        assert found.statuses == [Status.CORRECT, Status.FORBIDDEN] and math.isnan(found.rows[1][0])
        assert found.problems[1] == "judge: 6 characters; Judge.max_characters is 5"
        found = judged(config(server, name="x", max_characters=5, grading=Pairwise()), tmp_path, [["1", "123456"]])
        assert len(server.asked) == 1 and found.statuses == [Status.INFRA_ERROR, Status.FORBIDDEN]
        assert "no other completion to compare with" in found.problems[0]


def test_too_many_failures_stop_the_run_and_nothing_is_journaled(tmp_path):
    texts = [f"text {i}" for i in range(20)]
    with StandIn(Faults(broken=0.3), seed=5) as server:
        judge = config(server, attempts=1)
        lost = sum(broken_texts(judge, 5, texts, 0.3))
        assert lost > 0.25 * 20
        with pytest.raises(
            JudgeStopped, match=rf"{lost} of 20 requests to the judge 'judge' failed .*score. is not in"
        ):
            judged(judge, tmp_path, [texts])
    assert (tmp_path / "judge.journal.jsonl").read_text() == ""
    with StandIn(seed=5) as server:  # a better one: those that failed are asked again
        found = judged(config(server), tmp_path, [texts])
        assert found.problems == [""] * 20


def test_verdicts_are_replayed_failures_too_whoever_answers_now(tmp_path):
    texts = [f"text {i}" for i in range(20)]
    with StandIn(Faults(broken=0.3, errors=0.3), seed=5) as server:
        first = judged(config(server, attempts=5, stop_above=1.0), tmp_path, [texts, texts])
        judge = config(server, attempts=5, stop_above=1.0)
    with StandIn(grade=lambda text: 0.123) as server:
        again = judged(config(server, stop_above=1.0), tmp_path, [texts, texts])
        assert not server.asked
        # Another visit of the same prompt is another verdict; what the first judge said is in the cache by address.
        moved = open_judge(config(server), tmp_path)
        other = moved.collect(moved.submit([Group((9, 9), EXAMPLES[0], texts)]))
        moved.close()
    assert repr(again[:5]) == repr(first[:5]) and any(first.problems)
    assert [row[0] for row in other.rows] == pytest.approx([0.123] * 20)
    assert judge.stop_above == 1.0
    lines = [json.loads(line) for line in (tmp_path / "judge.journal.jsonl").read_text().splitlines()]
    assert len(lines) == len({line["key"] for line in lines}) == 60


def test_another_question_is_not_replayed(tmp_path):
    with StandIn() as server:
        judged(config(server), tmp_path, [["a"]])
        for other in (config(server, temperature=1.0), config(server, grading=Grade(instructions="Be kind."))):
            before = sum(server.asked.values())
            judged(other, tmp_path, [["a"]])
            assert sum(server.asked.values()) == before + 1


def test_a_journal_cut_short_loses_only_its_last_entry(tmp_path):
    with StandIn() as server:
        judged(config(server), tmp_path, [["a", "b"]])
        journal = tmp_path / "judge.journal.jsonl"
        journal.write_bytes(journal.read_bytes()[:-9])
        (tmp_path / "judge.answers.jsonl").write_bytes(b"")
        judged(config(server), tmp_path, [["a", "b"]])
        assert sorted(server.asked.values()) == [1, 2]
    assert len(journal.read_text().splitlines()) == 2


def test_a_stop_ends_waiting_and_what_came_is_not_paid_for_twice(tmp_path):
    texts = [f"text {i}" for i in range(8)]
    faults = Faults(timeouts=0.5, most=99, hang_seconds=60)
    with StandIn(faults, seed=2) as server:
        began = time.monotonic()
        stop = lambda: time.monotonic() - began > 1.0
        with pytest.raises(StopRequested, match="answers of judge were missing"):
            judged(config(server, timeout_seconds=60.0), tmp_path, [texts], stop)
        assert time.monotonic() - began < 5
        answered = sum(server.answered.values())
        assert 0 < answered < 8 and (tmp_path / "judge.journal.jsonl").read_text() == ""
        server.faults = Faults()
        judged(config(server), tmp_path, [texts])
        assert sum(server.answered.values()) == 8 and set(server.answered.values()) == {1}


def test_the_cost_is_counted_by_batch(tmp_path):
    with StandIn(Faults(errors=0.5, most=1)) as server:
        judge = open_judge(config(server, input_price=2.0, output_price=10.0), tmp_path)
        batches = [Group((1, i), EXAMPLES[0], [f"{i} a", f"{i} b", f"{i} a"]) for i in range(2)]
        for batch in batches:
            said = judge.collect(judge.submit([batch])).metrics
            place = "host/judge/judge/"
            assert said[place + "requests"] == 2 and said[place + "shared"] == 1
            assert said[place + "attempts"] == 2 + said[place + "retries"] == 2 + said[place + "server_error"]
            tokens = said[place + "prompt_tokens"], said[place + "completion_tokens"]
            assert min(tokens) > 0
            assert said[place + "cost"] == pytest.approx((2 * tokens[0] + 10 * tokens[1]) / 1e6)
            assert said["time/judge/judge/wait_seconds"] >= 0
        judge.close()
        assert all(name.startswith(("host/", "time/")) for name in said)  # no part of a run's contents


def test_what_the_server_is_told_to_enforce(tmp_path):
    with StandIn() as server:
        judged(config(server, name="a"), tmp_path, [["a"]])
        judged(config(server, name="b", response_format="json_object"), tmp_path, [["a"]])
        judged(config(server, name="c", response_format="json_schema", max_tokens=9), tmp_path, [["a"]])
        plain, told, schema = server.bodies
    assert "response_format" not in plain and plain["model"] == "stand-in" and plain["temperature"] == 0.0
    assert told["response_format"] == {"type": "json_object"}
    assert schema["response_format"]["json_schema"]["schema"]["properties"]["score"] == {
        "type": "number", "minimum": 0.0, "maximum": 10.0}  # fmt: skip
    assert schema["max_tokens"] == 9


def test_a_request_has_more_fields_and_leaves_some_out(tmp_path):
    off = {"max_tokens": None, "max_completion_tokens": 99, "chat_template_kwargs": {"enable_thinking": False}}
    with StandIn() as server:
        judged(config(server, extra_body=off), tmp_path, [["a"]])
        (body,) = server.bodies
    assert body.keys() == {"model", "messages", "temperature", "max_completion_tokens", "chat_template_kwargs"}
    assert body["max_completion_tokens"] == 99 and body["chat_template_kwargs"] == {"enable_thinking": False}
    told = lambda **body: limits_of(config(server, max_tokens=7, extra_body=body)).max_tokens
    assert told() == told(max_tokens=None) == 7 and told(max_tokens=98) == told(max_tokens=98, seed=1) == 98
    assert told(**off) == told(max_tokens=98, max_completion_tokens=99) == 99
    for value in ("99", -5, 0, True, 9.0, {"a": 1}):
        for field in ("max_tokens", "max_completion_tokens"):
            with pytest.raises(ValueError, match=rf"extra_body\['{field}'\] is {value!r}; it is None or a number"):
                config(server, extra_body={field: value})
    with pytest.raises(ValueError, match=r"Judge.extra_body has what JSON does not have: Out of range float"):
        config(server, extra_body={"top_p": float("nan")})
    with pytest.raises(ValueError, match=r"Judge.extra_body has what JSON does not have: .*set is not JSON"):
        config(server, extra_body={"stop": {"a"}})
    with pytest.raises(ValueError, match=r"Judge.extra_body has 'messages', which jrl sets or needs as it is"):
        config(server, extra_body={"messages": []})


def test_lists_in_a_request_come_from_a_configuration_and_back(tmp_path):
    wanted = "{'stop': ['a', 'b'], 'provider': {'order': ['x'], 'allow_fallbacks': False}, 'top_k': 5}"
    loaded, _ = jrl.load_config("configs/judge-tiny.gin", [f"Judge.extra_body = {wanted}"])
    (tmp_path / "again.gin").write_text(to_gin(loaded, config_classes(TABLES)))
    for judge in (loaded.judges[0], jrl.load_config(tmp_path / "again.gin", [])[0].judges[0]):
        body = json.loads(body_of(judge, []))
        assert body["stop"] == ["a", "b"] and body["provider"] == {"order": ["x"], "allow_fallbacks": False}
        assert body["top_k"] == 5


def test_files_hold_no_key(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-verysecret123")
    with StandIn(key="sk-verysecret123") as server:
        judged(config(server, api_key_env="JUDGE_KEY"), tmp_path, GROUPS)
    for file in os.listdir(tmp_path):
        assert "verysecret" not in (tmp_path / file).read_text()


def test_processes_share_the_prompts_and_all_get_the_scores_of_all(tmp_path):
    texts = ["no", "1", "x" * 60, "two", "3 4", "five"]
    visits = [Visit(EXAMPLES[i], (i, 7), (1, 2)) for i in range(3)]
    batch = Completions(visits, texts, 2, {}, None, None)

    def scores(processes, folder):
        limits = dict(index=processes.index, count=processes.count)
        judge = open_judge(config(server, max_characters=50), folder, **limits)
        try:
            source = judge_source(judge, processes)
            return source.collect(source.submit(batch))
        finally:
            judge.close()

    with StandIn() as server:
        alone = scores(ONE, tmp_path / "one")
        several, _ = together(2, lambda processes: scores(processes, tmp_path / "two"))
        asked = server.asked.total()
        again = scores(ONE, tmp_path / "two")
        assert server.asked.total() == asked  # the journals of both are read
    for found in (*several, again):
        np.testing.assert_array_equal(found.values, alone.values)
        assert found.problems == alone.problems and found.lost == alone.lost == {2: Status.FORBIDDEN}
    for found in several:
        assert found.metrics["host/judge/judge/requests"] == alone.metrics["host/judge/judge/requests"] == 5


def test_the_share_of_lost_requests_is_of_all_processes(tmp_path):
    """Process 1 loses one of its two requests: one of six, and half of its own."""
    texts = {0: ["no", "1", "two", "3"], 1: ["four", "lost"]}

    def failed(processes, stop_above, folder):
        judge = open_judge(config(server, attempts=1, stop_above=stop_above), folder, index=processes.index, count=2)
        try:
            ticket = judge.submit([Group((processes.index, 7), EXAMPLES[0], texts[processes.index])])
            return sum(not status.scorable for status in judge.collect(ticket, processes).statuses)
        finally:
            judge.close()

    with StandIn(grade=lambda text: 9.0 if text == "lost" else 0.5) as server:  # 90 of 10
        some, _ = together(2, lambda processes: failed(processes, 0.2, tmp_path / "some"))
        assert some == [0, 1]
        many, _ = together(2, lambda processes: failed(processes, 0.1, tmp_path / "many"))
        assert all(isinstance(error, JudgeStopped) and "1 of 6 requests" in str(error) for error in many)


@pytest.mark.parametrize(("concurrency", "threads"), [(16, 4), (9, 2), (3, 1)])
def test_the_limits_of_a_judge_are_those_of_all_processes(tmp_path, concurrency, threads):
    limits = dict(requests_per_second=8.0, tokens_per_minute=600, concurrency=concurrency)
    with StandIn() as server:
        opened = open_judge(config(server, **limits), tmp_path, index=1, count=4)
        try:
            assert opened.client._limit._spacing == 1 / 2 and opened.client._limit._per_second == 600 / 60 / 4
            assert len(opened.client._threads) == threads
        finally:
            opened.close()
