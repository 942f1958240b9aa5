"""A judge's reply is read strictly: whatever is not what was asked for is a failure with a name, and no score."""

from __future__ import annotations

import json
import math

import pytest

from jrl.tasks.judges import Gap, Grade, Judge, Pairwise, Rubric
from jrl.tasks.judges.answers import problem_with, read_answer
from jrl.tasks.judges.api import read_completion, retry_after
from jrl.tasks.judges.failures import Failure, JudgeError
from jrl.tasks.judges.judge import numbers_of

GRADE = Judge(address="http://x/v1", model="m", grading=Grade(low=-5, high=15))
RUBRIC = Judge(address="http://x/v1", model="m", grading=Rubric(items={"b": 1.0, "a": 2.0}))
PAIRWISE = Judge(address="http://x/v1", model="m", grading=Pairwise())


@pytest.mark.parametrize(
    ("judge", "content", "numbers"),
    [
        # (10 - -5) / (15 - -5) = 0.75
        (GRADE, '{"score": 10}', (0.75,)),
        (GRADE, ' {"reason": "fine", "score": -5.0}\n', (0.0,)),
        (GRADE, '{"score": 15}', (1.0,)),
        (GRADE, '```json\n{\n  "score": 15\n}\n```', (1.0,)),
        (GRADE, '\n``` \r\n{"score": -5}\r\n  ```\n', (0.0,)),
        (GRADE, '```JSON {"score": 15}```', (1.0,)),
        (GRADE, '<think>Is it {"score": -5}?\n</think>\n\n{"score": 15}', (1.0,)),
        (GRADE, '\n<think></think>```json\n{"score": 15, "reason": "no </think>, no ```"}\n```', (1.0,)),
        (GRADE, '{"reason": "it ends with </think>{", "score": 15}', (1.0,)),
        (GRADE, '{"reason": "two\nlines\tof it", "score": 15}', (1.0,)),
        (GRADE, '```json\n{"reason": "a ` in it", "score": 15}\n```', (1.0,)),
        (RUBRIC, '{"item_2": false, "item_1": true}', (1.0, 0.0)),
        (PAIRWISE, '{"winner": "first"}', (1.0,)),
        (PAIRWISE, '{"winner": "second", "reason": ""}', (0.0,)),
        (PAIRWISE, '{"winner": "tie"}', (0.5,)),
    ],
)
def test_numbers_of_an_answer(judge, content, numbers):
    assert numbers_of(judge, content) == numbers


@pytest.mark.parametrize(
    ("judge", "content", "failure", "said"),
    [
        (GRADE, "", Failure.MALFORMED_ANSWER, "not one JSON object"),
        (GRADE, "7", Failure.MALFORMED_ANSWER, "is not an object"),
        (GRADE, '[{"score": 7}]', Failure.MALFORMED_ANSWER, "is not an object"),
        (GRADE, '{"score": 7', Failure.MALFORMED_ANSWER, "not one JSON object"),
        (GRADE, '{"score": 7} I hope this helps!', Failure.MALFORMED_ANSWER, "Extra data"),
        (GRADE, 'Sure: {"score": 7}', Failure.MALFORMED_ANSWER, "not one JSON object"),
        (GRADE, 'Sure:\n```json\n{"score": 7}\n```', Failure.MALFORMED_ANSWER, "not one JSON object"),
        (GRADE, '```json\n{"score": 7}\n```\nAll good.', Failure.MALFORMED_ANSWER, "not one JSON object"),
        (GRADE, '```\n{"score": 1}\n```\n```\n{"score": 7}\n```', Failure.MALFORMED_ANSWER, "not one JSON object"),
        (GRADE, 'Sure. <think>a</think>{"score": 7}', Failure.MALFORMED_ANSWER, "not one JSON object"),
        (GRADE, '{"score": 1}</think>{"score": 7}', Failure.MALFORMED_ANSWER, "Extra data"),
        (GRADE, 'It ends with </think>{"score": 7}', Failure.MALFORMED_ANSWER, "not one JSON object"),
        (GRADE, '<think>a</think>{"score": 7}</think>{"score": 1}', Failure.MALFORMED_ANSWER, "Extra data"),
        (GRADE, '<think>{"score": 7}', Failure.MALFORMED_ANSWER, "not one JSON object"),
        (GRADE, '```json\n{"score": 7}', Failure.MALFORMED_ANSWER, "not one JSON object"),
        (GRADE, '```python\n{"score": 7}\n```', Failure.MALFORMED_ANSWER, "not one JSON object"),
        (GRADE, "```json\n" * 100_000, Failure.MALFORMED_ANSWER, "not one JSON object"),
        (GRADE, "\n" * 1_000_000, Failure.MALFORMED_ANSWER, "not one JSON object"),
        (GRADE, '{"score": 1, "score": 10}', Failure.MALFORMED_ANSWER, "a key comes twice"),
        (GRADE, '{"score": NaN}', Failure.MALFORMED_ANSWER, "NaN is not a JSON number"),
        (GRADE, '{"score": Infinity}', Failure.MALFORMED_ANSWER, "Infinity is not a JSON number"),
        (GRADE, '{"score": "10"}', Failure.MALFORMED_ANSWER, "is not a number"),
        (GRADE, '{"score": true}', Failure.MALFORMED_ANSWER, "is not a number"),
        (GRADE, '{"score": null}', Failure.MALFORMED_ANSWER, "is not a number"),
        (GRADE, "{}", Failure.MALFORMED_ANSWER, "has no 'score'"),
        (GRADE, '{"score": 7, "bonus": 3}', Failure.MALFORMED_ANSWER, "'bonus', which was not asked for"),
        (GRADE, '{"score": 7, "reason": 3}', Failure.MALFORMED_ANSWER, "'reason' is not a string"),
        (GRADE, "[" * 100_000, Failure.MALFORMED_ANSWER, "not one JSON object"),
        (GRADE, '{"score": ' + "9" * 5000 + "}", Failure.MALFORMED_ANSWER, "not one JSON object"),
        (GRADE, '{"score": 15.01}', Failure.OUT_OF_RANGE, "is not in -5 to 15"),
        (GRADE, '{"score": -5.01}', Failure.OUT_OF_RANGE, "is not in -5 to 15"),
        (GRADE, '{"score": 1e999}', Failure.OUT_OF_RANGE, "is not in -5 to 15"),
        (RUBRIC, '{"item_1": true}', Failure.MALFORMED_ANSWER, "has no 'item_2'"),
        (RUBRIC, '{"item_1": true, "item_2": 1}', Failure.MALFORMED_ANSWER, "'item_2' is not true or false"),
        (RUBRIC, '{"item_1": true, "item_2": null}', Failure.MALFORMED_ANSWER, "'item_2' is not true or false"),
        (PAIRWISE, '{"winner": "both"}', Failure.MALFORMED_ANSWER, "is not one of first, tie, second"),
        (PAIRWISE, '{"winner": 1}', Failure.MALFORMED_ANSWER, "is not a string"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_fails_by_name(judge, content, failure, said):
    with pytest.raises(JudgeError) as caught:
        numbers_of(judge, content)
    assert caught.value.failure is failure
    assert said in caught.value.detail


def test_a_schema_that_the_reader_does_not_know_is_an_error_of_ours():
    with pytest.raises(ValueError, match="has the type 'array'"):
        problem_with([], {"type": "array"}, "it")
    assert read_answer("{}", {"type": "object", "properties": {}, "required": []}) == {}


def reply(**message):
    return {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": "stop"}]}


def test_a_completion_is_read_from_the_message_only():
    made = reply(content='{"score": 3}')
    made |= {"score": 10, "usage": {"prompt_tokens": 12, "completion_tokens": 5}}
    assert read_completion(json.dumps(made)) == ('{"score": 3}', 12, 5)
    made["usage"] = {"prompt_tokens": -1, "completion_tokens": True}
    assert read_completion(json.dumps(made)) == ('{"score": 3}', 0, 0)
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "3?"}]},
        {"type": "text", "text": '{"score": 3}'},
    ]
    assert read_completion(json.dumps(reply(content=parts))).content == '{"score": 3}'


def test_a_message_without_text_is_shown_with_what_it_has_in_its_place():
    for content in (None, 3):
        made = reply(content=content, refusal="I cannot") | {"id": "x" * 500}
        with pytest.raises(JudgeError, match=r"has no text \(finish_reason 'stop'\): .*I cannot"):
            read_completion(json.dumps(made))


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        (json.dumps(reply(content="{}"))[:40], Failure.MALFORMED_REPLY),
        ("[]", Failure.MALFORMED_REPLY),
        ("3", Failure.MALFORMED_REPLY),
        ('{"choices": []}', Failure.MALFORMED_REPLY),
        ('{"choices": [3]}', Failure.MALFORMED_REPLY),
        ('{"error": {"message": "no"}}', Failure.MALFORMED_REPLY),
        (json.dumps({"choices": [*reply(content="a")["choices"], *reply(content="b")["choices"]]}),
         Failure.MALFORMED_REPLY),
        (json.dumps(reply(content=None, refusal="I cannot")), Failure.MALFORMED_REPLY),
        (json.dumps(reply(content=[{"type": "text"}])), Failure.MALFORMED_REPLY),
        (json.dumps(reply(content=[3])), Failure.MALFORMED_REPLY),
        ('{"error": {"message": "slow down", "code": 429}}', Failure.RATE_LIMIT),
        ('{"error": {"message": "overloaded", "code": 503}}', Failure.SERVER_ERROR),
        ('{"error": {"message": "slow down", "code": "429"}}', Failure.RATE_LIMIT),
        ('{"error": {"message": "no", "code": "bad_request"}}', Failure.MALFORMED_REPLY),
        (json.dumps({"error": {"code": "9" * 5000}}), Failure.MALFORMED_REPLY),
        ('{"error": {"code": "٤٢٩"}}', Failure.MALFORMED_REPLY),
        ('{"error": {"code": 5000}}', Failure.MALFORMED_REPLY),
        ('{"error": {"code": true}}', Failure.MALFORMED_REPLY),
        (json.dumps({"choices": [{"message": {"content": "{}"}, "finish_reason": "error"}]}), Failure.SERVER_ERROR),
        (json.dumps(reply()), Failure.MALFORMED_REPLY),
        (json.dumps({"choices": [{"message": {"content": '{"score'}, "finish_reason": "length"}]}), Failure.TRUNCATED),
    ],
)  # fmt: skip
def test_a_reply_that_is_no_chat_completion_fails_by_name(text, failure):
    with pytest.raises(JudgeError) as caught:
        read_completion(text)
    assert caught.value.failure is failure


def test_retry_after_is_seconds_or_a_date():
    assert retry_after("12", 0.0) == 12.0
    assert retry_after("0.25", 0.0) == 0.25
    assert retry_after("-3", 0.0) == 0.0
    assert retry_after("Mon, 01 Jan 99999999999999999999 00:00:00 GMT", 0.0) is None
    # 1994-11-06 08:49:37 UTC is 784111777 seconds after the epoch.
    assert retry_after("Sun, 06 Nov 1994 08:49:37 GMT", 784111770.0) == 7.0
    assert retry_after("Sun, 06 Nov 1994 08:49:37 GMT", 784111999.0) == 0.0
    for text in (None, "soon", "inf", "nan", ""):
        assert retry_after(text, 0.0) is None


def test_configurations_that_cannot_judge_are_refused():
    with pytest.raises(ValueError, match="low must be below high"):
        Grade(low=3, high=3)
    with pytest.raises(ValueError, match="low must be below high, by a finite number"):
        Gap(high=math.inf)
    endless = {"items": {"a": 1.0, "b": 1.0}, "interactions": (("a", "b", -math.inf),)}
    for fields in ({"items": {"a": 1.0, "b": math.nan}}, endless):
        with pytest.raises(ValueError, match=r"has the weight (nan|-inf); it must be finite"):
            Rubric(**fields)
    with pytest.raises(ValueError, match="at least one item whose weight is not 0"):
        Rubric(items={"a": 0.0})
    with pytest.raises(ValueError, match=r"Rubric.critical has 'c', which is not in"):
        Rubric(items={"a": 1.0}, critical=("c",))
    with pytest.raises(ValueError, match=r"Rubric.interactions has \('a', 'a', 1.0\); each is two different items"):
        Rubric(items={"a": 1.0}, interactions=(("a", "a", 1.0),))
    for field in ("saturation", "stretch"):
        with pytest.raises(ValueError, match=rf"Rubric.{field} = 0.0 must be above 0 and at most 100"):
            Rubric(items={"a": 1.0}, **{field: 0.0})
    with pytest.raises(ValueError, match=r"Pairwise.instructions is empty"):
        Pairwise(instructions=" ")
    for fields, said in [
        ({"name": "a/b"}, "it names files"),
        ({"model": ""}, "Judge.model is empty"),
        ({"attempts": 0}, "Judge.attempts is 0; it must be above 0"),
        ({"requests_per_second": 0.0}, "must be above 0"),
        ({"concurrency": 10_000}, "at most 512"),
        ({"weight": math.nan}, "Judge.weight is nan; it must be finite"),
        ({"weight": 1e39}, "in float32 too"),
        ({"timeout_seconds": 1e10}, "at most 9.22337e\\+09 seconds"),
        ({"temperature": -1.0}, "at least 0"),
        ({"temperature": math.nan}, "at least 0"),
        ({"stop_above": 1.5}, "a share, from 0 to 1"),
    ]:
        with pytest.raises(ValueError, match=said):
            Judge(**{"address": "http://x/v1", "model": "m", **fields})
    assert math.isclose(Judge(address="http://x/v1", model="m").weight, 1.0)
