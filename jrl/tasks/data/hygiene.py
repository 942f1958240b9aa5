"""Cleaning of training data: drops duplicates, evaluation prompts, and examples that cannot be judged well."""

from __future__ import annotations

import array
import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from jrl.tasks.data.contamination import EvaluationIndex, words
from jrl.tasks.example import Example

_CHOICE = re.compile(r"(?m)^[^\S\n]*\(?([A-D])[).:]\s")  # a line that begins with "A) " or "(B) "
_PROOF = re.compile(r"\b(?:prove|show) that\b", re.IGNORECASE)
YES_NO = frozenset(("yes", "no", "true", "false"))


class CleanResult(NamedTuple):
    indices: list[int]  # indices of the remaining examples, in order
    counts: dict[str, int]  # rule -> examples that it dropped; an example is counted once, by the first rule


def answer_type(example: Example) -> str | None:
    """Returns the F13 rule by which an example is dropped because its answer cannot be judged well: "no_answer",
    "yes_no" (a guess is right half of the time), "multiple_choice" or "proof"; None: no rule applies."""
    text = example.messages[-1].content
    if example.answer is None or not example.answer.strip():
        return "no_answer"
    if words(example.answer) and words(example.answer)[0] in YES_NO and len(words(example.answer)) == 1:
        return "yes_no"
    if {"A", "B"} <= set(_CHOICE.findall(text)):
        return "multiple_choice"
    return "proof" if _PROOF.search(text) else None


def clean(
    examples: Iterable[Example], evaluation: Iterable[Example], *, n: int = 10, most_words: int | None = None
) -> CleanResult:
    """Returns F13: the remaining examples, and how many each rule dropped.

    The rules, in order: "disagreement" (a prompt has different answers: all of its examples are dropped), "duplicate"
    (the prompt of an earlier example), "contaminated", "too_long", then those of `answer_type`. Prompts are the same if
    they differ only in case, spacing and final punctuation (except a "!" right after a digit or ")", as of a
    factorial); answers, if only in case, spaces and a final period. "contaminated" ignores system messages;
    `answer_type` reads the last message only. The examples are read once, and none is kept.

    Args:
      evaluation: examples of the evaluation sets. n: words of a shared n-gram; a prompt with fewer words must match as
        a whole. most_words: of a prompt; None: any number.

    Source: Big-Math, 2502.17387 section 3; DeepMath, 2504.11456 section 2.
    """
    index = EvaluationIndex(evaluation, n)
    first_with: dict[bytes, int] = {}  # digest of a prompt -> its first example
    first, answers, rules = array.array("Q"), array.array("Q"), []  # of every example; a rule only of a first one
    disagreeing: set[int] = set()
    for i, example in enumerate(examples):
        prompt = [(message.role, _normalized(message.content)) for message in example.messages]
        first.append(first_with.setdefault(_digest(prompt)[:16], i))
        answer = "".join((example.answer or "").casefold().split()).removesuffix(".")
        answers.append(int.from_bytes(_digest(answer)[:8], "little"))
        if answers[first[i]] != answers[i]:
            disagreeing.add(first[i])
        is_first = first[i] == i
        if is_first and index.overlap(example) is not None:
            rules.append("contaminated")
        elif is_first and most_words is not None and sum(len(words(text)) for _, text in prompt) > most_words:
            rules.append("too_long")
        else:
            rules.append(answer_type(example) if is_first else None)
    indices, counts = [], {}
    for i, (earliest, rule) in enumerate(zip(first, rules)):
        if earliest in disagreeing:
            rule = "disagreement"
        elif earliest != i:
            rule = "duplicate"
        if rule is None:
            indices.append(i)
        else:
            counts[rule] = counts.get(rule, 0) + 1
    return CleanResult(indices, counts)


def _digest(value: Any) -> bytes:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).digest()


def _normalized(text: str) -> str:
    """Returns a text in lower case with single spaces, without final punctuation. Signs stay: 1+2 is not 1-2, and
    5! is not 5, nor (n+1)! n+1."""
    text = " ".join(text.casefold().split())
    body = text.rstrip(" .,;:?!")
    marks = text[len(body) :]
    is_factorial = body[-1:].isdigit() or body.endswith(")")
    return body + "!" * (len(marks) - len(marks.lstrip("!"))) if is_factorial else body
