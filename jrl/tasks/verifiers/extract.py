"""Extracts the answer from where the configuration says; several answers there count as none."""

from __future__ import annotations

from typing import Literal, get_args

Extract = Literal["all", "answer_line", "answer_tag", "boxed", "hash", "last_line"]


def extract_answer(completion: str, extract: Extract) -> str | None:
    """Returns the only answer where `extract` says, stripped; None if there is none, or more than one.

    Args:
        completion: the model's text.
        extract: "all": the whole text; "answer_line": after `Answer:`, with which the last line that is not blank
            begins; "answer_tag": between <answer> and </answer>; "boxed": in \\boxed{...}; "hash": after #### to the
            end of its line; "last_line": the last line that is not blank.
    """
    match extract:
        case "all":
            answer = completion
        case "answer_line":
            line = _last_line(completion)
            answer = line.removeprefix("Answer:") if line.startswith("Answer:") else None
        case "answer_tag":
            answer = _between(completion, "<answer>", "</answer>")
        case "boxed":
            answer = _boxed(completion)
        case "hash":
            answer = _after_hash(completion)
        case "last_line":
            answer = _last_line(completion)
        case _:
            raise ValueError(f"extract is {extract!r}; it must be one of {', '.join(map(repr, get_args(Extract)))}")
    answer = answer.strip() if answer is not None else ""
    return answer or None


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _between(text: str, opening: str, closing: str) -> str | None:
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    start, end = text.index(opening) + len(opening), text.index(closing)
    return text[start:end] if start <= end else None


def _boxed(text: str) -> str | None:
    r"""Returns the contents of the only \boxed{...}, with balanced braces (escaped \{ and \} do not count); None if
    there is none, or more than one."""
    opening = r"\boxed{"
    if text.count(r"\boxed") != 1 or r"\fbox" in text or opening not in text:
        return None
    start = text.index(opening) + len(opening)
    depth, i = 1, start
    while i < len(text):
        match text[i]:
            case "\\":
                i += 1
            case "{":
                depth += 1
            case "}":
                depth -= 1
                if depth == 0:
                    return text[start:i]
        i += 1
    return None


def _after_hash(text: str) -> str | None:
    if text.count("####") != 1:
        return None
    return text.split("####")[1].split("\n")[0]
