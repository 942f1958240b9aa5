"""Strict parsing of a judge's answer: one JSON object that fits the requested schema, and nothing else but thoughts
before it and a fence around it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from jrl.tasks.judges.failures import Failure, JudgeError

SHOWN = 200  # characters of a bad reply in a message
END = "</think>"  # of a model's thoughts
# Many models fence JSON, whatever is asked for. Nothing may stand outside the fence.
FENCED = re.compile(r"\s*```(?:json)?\s*(\{.*\})\s*```\s*", re.DOTALL | re.IGNORECASE)


def read_answer(content: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `content`, parsed as one JSON object. Its strings may hold line breaks, which small models forget to
    escape.

    Args:
      content: of the judge's message; the object may be fenced as a block of code, and follow a model's thoughts.
      schema: of a JSON object, in the subset that `problem_with` supports.

    Raises: JudgeError if it is not JSON, has text around it, repeats a key, or does not fit the schema.
    """
    try:
        text = after_thoughts(content)
        fenced = FENCED.fullmatch(text)
        answer = json.loads(
            fenced[1] if fenced else text, strict=False, object_pairs_hook=_once, parse_constant=_no_number
        )
    except (ValueError, RecursionError) as error:
        unopened = f" and has a {END} without <think>" if END in content and "<think>" not in content else ""
        problem = f"its answer is not one JSON object ({error}){unopened}: {shown(content)}"
        raise JudgeError(Failure.MALFORMED_ANSWER, problem) from error
    failure, problem = problem_with(answer, schema, "the answer")
    if failure is not None:
        raise JudgeError(failure, f"{problem}: {shown(content)}")
    return answer


def after_thoughts(content: str) -> str:
    """Returns what follows the thoughts of an answer that begins with <think>, as servers without a parser of thoughts
    return them; any other answer as it is. The first </think> ends them: a later one may be a quotation."""
    text = content.lstrip()
    return text.partition(END)[2] if text.startswith("<think>") else content


def problem_with(value: Any, schema: Mapping[str, Any], name: str) -> tuple[Failure | None, str]:
    """Returns why a value does not fit a schema; (None, "") if it does.

    Args:
      schema: a subset of JSON Schema: type object (properties, required; other properties are errors), number (minimum,
        maximum), boolean, or string (enum; minLength, without surrounding whitespace).
    """
    kind, malformed = schema["type"], Failure.MALFORMED_ANSWER
    if kind == "object":
        if not isinstance(value, dict):
            return malformed, f"{name} is not an object"
        if missing := [key for key in schema["required"] if key not in value]:
            return malformed, f"{name} has no {missing[0]!r}"
        if unknown := [key for key in value if key not in schema["properties"]]:
            return malformed, f"{name} has {unknown[0]!r}, which was not asked for"
        problems = [problem_with(item, schema["properties"][key], repr(key)) for key, item in value.items()]
        return next((problem for problem in problems if problem[0] is not None), (None, ""))
    if kind == "number":
        if isinstance(value, bool) or not isinstance(value, int | float):
            return malformed, f"{name} is not a number"
        if not schema["minimum"] <= value <= schema["maximum"]:  # an int of any size can be compared
            return Failure.OUT_OF_RANGE, f"{name} is not in {schema['minimum']:g} to {schema['maximum']:g}"
        return None, ""
    if kind == "boolean":
        return (None, "") if isinstance(value, bool) else (malformed, f"{name} is not true or false")
    if kind == "string":
        if not isinstance(value, str):
            return malformed, f"{name} is not a string"
        if value not in schema.get("enum", [value]):
            return malformed, f"{name} is not one of {', '.join(schema['enum'])}"
        if len(value.strip()) < schema.get("minLength", 0):
            return malformed, f"{name} is blank"
        return None, ""
    raise ValueError(f"the schema of {name} has the type {kind!r}")


def shown(text: str) -> str:
    """Returns the beginning of a text, quoted for a message."""
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the pairs as a dict. Raises ValueError on a repeated key: neither value can be taken as the answer."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a key comes twice")
    return unique


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
