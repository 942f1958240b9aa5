"""Data in the columns that GSM8K and MATH publish, and where in a worked solution the answer stands."""

from __future__ import annotations

import json

import pytest

from jrl.tasks.envs.columns import final_answer
from jrl.tasks.envs.jsonl import Jsonl, open_jsonl
from jrl.tasks.example import Message
from jrl.tasks.verdict import Status
from jrl.tasks.verifiers import VERIFIERS, MathEqual, Numeric

GSM = {"prompt": "question"}
MATH = {"prompt": "problem", "answer": "solution", "task": "type"}
WORKED = "She has 16 - 3 - 4 = <<16-3-4=9>>9 eggs left.\nShe earns 9 * 2 = $<<9*2=18>>18.\n#### 18"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def judged(config, completion, example):
    return VERIFIERS[type(config).__name__].score(config, completion, example).status


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (WORKED, "18"),
        ("so 1,234 in all\n#### 1,234", "1,234"),
        ("#### 5 ", "5"),
        ("it is -3\n####-3\n", "-3"),
        ("first #### 1\nthen\n#### 2\nand more", "2"),
        ("no mark", None),
        ("####", None),
        ("#### \n7", None),
    ],
)
def test_what_follows_the_hashes(text, answer):
    assert final_answer(text, "hash") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"Thus $x = \boxed{42}$.", "42"),
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"$\boxed{\{1, 2\}}$ are all", r"\{1, 2\}"),
        (r"$y = \boxed{1}$, so $x = \boxed{2}$", "2"),
        (r"\fbox{C}", "C"),
        (r"$\boxed 5$, as said", "5"),
        (r"$\boxed {6}$", "6"),
        (r"$\boxed{\text{Evelyn}}$", r"\text{Evelyn}"),
        (r"$\boxed{}$", None),
        (r"$\boxed{4", None),
        (r"\boxed", None),
        ("42", None),
    ],
)
def test_what_is_boxed_last(text, answer):
    assert final_answer(text, "boxed") == answer


def test_a_row_of_gsm8k(tmp_path):
    row = {"question": "How much does she earn?", "answer": WORKED}
    config = Jsonl(path=write(tmp_path / "train.jsonl", [row]), columns=GSM, answer_in="hash", task="gsm8k",
                   prompt_form="Question: {prompt}\nAnswer:")  # fmt: skip
    example = open_jsonl(config)[0]
    assert example.messages == (Message("user", "Question: How much does she earn?\nAnswer:"),)
    assert (example.answer, example.task, example.info) == ("18", "gsm8k", {"solution": WORKED})
    numeric = Numeric(extract="hash")
    assert judged(numeric, WORKED, example) == Status.CORRECT
    assert judged(numeric, "That makes\n#### 18.0", example) == Status.CORRECT
    assert judged(numeric, "#### 19", example) == Status.WRONG
    assert judged(numeric, "It is 18.", example) == Status.UNPARSABLE


def test_a_row_of_math(tmp_path):
    row = {"problem": "What is $1/2$ of $x$?", "level": "Level 3", "type": "Algebra",
           "solution": r"Half of it, that is $\boxed{\frac{x}{2}}$."}  # fmt: skip
    example = open_jsonl(Jsonl(path=write(tmp_path / "m.jsonl", [row]), columns=MATH, answer_in="boxed"))[0]
    assert (example.answer, example.task) == (r"\frac{x}{2}", "Algebra")
    assert example.info == {"level": "Level 3", "solution": row["solution"]}
    assert judged(MathEqual(), r"So it is $\boxed{0.5x}$.", example) == Status.CORRECT
    assert judged(MathEqual(), r"\boxed{2x}", example) == Status.WRONG
    assert judged(MathEqual(), "x/2", example) == Status.UNPARSABLE


@pytest.mark.parametrize(
    ("columns", "answer_in", "row", "message"),
    [
        (GSM, "hash", {"question": "q", "answer": "18"}, "'answer' has no #### with an answer after it"),
        (GSM, "hash", {"question": "q", "answer": " "}, "'answer' is missing, null or blank"),
        (GSM, "hash", {"problem": "q", "answer": "#### 1"}, "needs 'question' or 'messages'; it has 'problem'"),
        (MATH, "boxed", {"problem": "q", "solution": "4"}, r"'solution' has no complete \boxed{} with an answer in it"),
        (MATH, "boxed", {"problem": "q", "answer": "4"}, "'solution' is missing"),
        (MATH, "boxed", {"problem": " ", "solution": r"\boxed{4}"}, "has an empty prompt"),
    ],
)
def test_a_row_of_another_form_is_refused_by_file_and_line(tmp_path, columns, answer_in, row, message):
    good = {"question": "q", "problem": "q", "answer": "#### 1", "solution": r"\boxed{1}"}
    path = write(tmp_path / "rows.jsonl", [good, row])
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: the row ") as refused:
        open_jsonl(Jsonl(path=path, columns=columns, answer_in=answer_in, prompt_form="Q: {prompt}"))
    assert message in str(refused.value)


def test_the_form_of_a_prompt_holds_the_prompt_once(tmp_path):
    for form in ("", "{}", "{prompt} {prompt}"):
        with pytest.raises(ValueError, match="prompt_form"):
            Jsonl(path="a.jsonl", prompt_form=form)
    row = {"prompt": r"{prompt} \1 {0}", "answer": "1"}
    example = open_jsonl(Jsonl(path=write(tmp_path / "a.jsonl", [row]), prompt_form="<{prompt}>"))[0]
    assert example.messages[0].content == r"<{prompt} \1 {0}>"


def test_an_answer_that_is_not_there_may_be_let_pass(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "q", "answer": "none"}])
    example = open_jsonl(Jsonl(path=path, columns=GSM, answer_in="hash", needs_answer=False))[0]
    assert (example.answer, example.info) == (None, {"solution": "none"})
