"""What a judge answered, read strictly: one JSON object of the schema that it was asked for, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jrl.tasks.judges.failures import Failure, JudgeError

SHOWN = 200  # characters of a bad reply in a message


def read_answer(content: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the object that `content` is, all of it.

    Args:
      content: of the judge's message. schema: of a JSON object, as `problem_with` knows it.

    Raises: JudgeError where it is no JSON, has text around it, names a key twice, or does not fit the schema.
    """
    try:
        answer = json.loads(content, object_pairs_hook=_once, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        problem = f"its answer is not one JSON object ({error}): {shown(content)}"
        raise JudgeError(Failure.MALFORMED_ANSWER, problem) from error
    failure, problem = problem_with(answer, schema, "the answer")
    if failure is not None:
        raise JudgeError(failure, f"{problem}: {shown(content)}")
    return answer


def problem_with(value: Any, schema: Mapping[str, Any], place: str) -> tuple[Failure | None, str]:
    """Returns why a value does not fit a schema, (None, "") where it does.

    Args:
      schema: a part of JSON Schema: type object (properties, required; others are refused), number (minimum, maximum),
        boolean, or string (enum; minLength, of what is not blank).
    """
    kind, malformed = schema["type"], Failure.MALFORMED_ANSWER
    if kind == "object":
        if not isinstance(value, dict):
            return malformed, f"{place} is not an object"
        if missing := [key for key in schema["required"] if key not in value]:
            return malformed, f"{place} has no {missing[0]!r}"
        if unknown := [key for key in value if key not in schema["properties"]]:
            return malformed, f"{place} has {unknown[0]!r}, which was not asked for"
        found = [problem_with(item, schema["properties"][key], repr(key)) for key, item in value.items()]
        return next((problem for problem in found if problem[0] is not None), (None, ""))
    if kind == "number":
        if isinstance(value, bool) or not isinstance(value, int | float):
            return malformed, f"{place} is not a number"
        if not schema["minimum"] <= value <= schema["maximum"]:  # an int of any size can be compared
            return Failure.OUT_OF_RANGE, f"{place} is not in {schema['minimum']:g} to {schema['maximum']:g}"
        return None, ""
    if kind == "boolean":
        return (None, "") if isinstance(value, bool) else (malformed, f"{place} is not true or false")
    if kind == "string":
        if not isinstance(value, str):
            return malformed, f"{place} is not a string"
        if value not in schema.get("enum", [value]):
            return malformed, f"{place} is none of {', '.join(schema['enum'])}"
        if len(value.strip()) < schema.get("minLength", 0):
            return malformed, f"{place} is blank"
        return None, ""
    raise ValueError(f"the schema of {place} has the type {kind!r}")


def shown(text: str) -> str:
    """Returns the beginning of a text as a message shows it."""
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A key that comes twice has two values, of which neither is the answer."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
