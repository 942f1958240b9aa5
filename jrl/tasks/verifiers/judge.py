"""Converts the result of a verifier to a verdict: any return value or exception becomes exactly one Status."""

from __future__ import annotations

import dataclasses
import math
import numbers
import traceback
from typing import Any

from jrl.tasks.example import Example
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers.contract import LARGEST_REWARD, SPANS_LIMIT, Limits, Verifier
from jrl.tasks.verifiers.source import is_of_part

DETAIL_LIMIT = 1000  # characters
ALLOWED_STATUSES = (Status.CORRECT, Status.WRONG, Status.UNPARSABLE, Status.FORBIDDEN, Status.VERIFIER_ERROR)


def judge(verifier: Verifier, config: Any, completion: str, example: Example) -> Verdict:
    """Returns the verdict of `verifier`: MEMORY_LIMIT if it raises MemoryError, VERIFIER_ERROR if it raises anything
    else or returns no finite number."""
    try:
        return to_verdict(verifier.score(config, completion, example), verifier.limits(config), len(completion))
    except MemoryError:
        return Verdict(Status.MEMORY_LIMIT, None, "the verifier ran out of its memory")
    except BaseException as error:  # SystemExit and KeyboardInterrupt raised by a verifier are its errors too
        return Verdict(Status.VERIFIER_ERROR, None, describe(error))


def to_verdict(result: Any, limits: Limits, characters: int) -> Verdict:
    """Returns the result of a verifier on a completion of `characters` as a checked Verdict.

    A real number r is CORRECT if r > 0 and WRONG otherwise, with reward r; True counts as 1.0 and False as 0.0. NaN,
    infinities, strings, None and complex numbers are a VERIFIER_ERROR: they are not rewards, and replacing them by 0
    would be wrong. So are rewards outside `limits`, and invalid rewards of spans.
    """
    if isinstance(result, Verdict):
        if result.status not in ALLOWED_STATUSES:
            return _refuse(
                f"returned the status {result.status!r}; allowed are {', '.join(s.name for s in ALLOWED_STATUSES)}"
            )
        if not Status(result.status).scorable:
            return Verdict(Status(result.status), None, str(result.detail)[:DETAIL_LIMIT])
        reward, complaint = _number(result.reward, limits.lowest, limits.highest)
        if complaint:
            return _refuse(f"returned a Verdict whose reward is {complaint}")
        verdict = Verdict(Status(result.status), reward, str(result.detail)[:DETAIL_LIMIT], tuple(result.spans))
        return _with_checked_spans(verdict, limits, characters)
    reward, complaint = _number(result, limits.lowest, limits.highest)
    if complaint:
        return _refuse(f"returned {complaint}; it must return a finite number, a bool or a Verdict")
    return Verdict(Status.CORRECT if reward > 0 else Status.WRONG, reward)


def _with_checked_spans(verdict: Verdict, limits: Limits, characters: int) -> Verdict:
    """Returns the verdict with its span rewards as plain numbers, or a VERIFIER_ERROR if they are invalid."""
    if not verdict.spans:
        return verdict
    if not limits.spans:
        return _refuse("returned rewards of spans, and its row does not say rewards_spans=True")
    if len(verdict.spans) > SPANS_LIMIT:
        return _refuse(f"returned rewards of {len(verdict.spans)} spans; at most {SPANS_LIMIT} are taken")
    before, checked = 0 if characters else -1, []  # in an empty text a span ends at 0
    for span in verdict.spans:
        if not isinstance(span, tuple | list) or len(span) != 2:
            return _refuse(f"returned the span {span!r:.100}; expected (end, reward)")
        end, (reward, complaint) = span[0], _number(span[1])
        if complaint:
            return _refuse(f"returned a span whose reward is {complaint}")
        if not isinstance(end, numbers.Integral) or not before < end <= characters:
            return _refuse(
                f"returned a span that ends at {end!r:.100}; ends are characters of the completion, increasing, at "
                f"most {characters}"
            )
        before = int(end)
        checked.append((before, reward))
    return dataclasses.replace(verdict, spans=tuple(checked))


def describe(error: BaseException) -> str:
    """Returns the error with the last frames of its traceback, the last of the user's own among them, at most
    DETAIL_LIMIT characters."""
    walked = list(traceback.walk_tb(error.__traceback__))
    own = [i for i, (frame, _) in enumerate(walked) if is_of_part(frame.f_globals)][-1:]
    shown = sorted({*own, *range(max(0, len(walked) - 3), len(walked))})
    frames = [f"{walked[i][0].f_code.co_filename}:{walked[i][1]} in {walked[i][0].f_code.co_name}" for i in shown]
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be printed)"
    return f"{type(error).__name__}: {message[: DETAIL_LIMIT // 2]} ({'; '.join(frames)})"[:DETAIL_LIMIT]


def _number(value: Any, lowest: float = -LARGEST_REWARD, highest: float = LARGEST_REWARD) -> tuple[float, str]:
    """Returns (value as a float, "") or (0.0, why it is not a reward)."""
    if not isinstance(value, numbers.Real) and not _is_numpy_bool(value):
        return 0.0, f"a value of type {type(value).__name__}"
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return 0.0, "a number too large"
    if not math.isfinite(number):
        return 0.0, f"{number}, which is not finite"
    if not lowest <= number <= highest:
        return 0.0, f"{number}, which is not in [{lowest:g}, {highest:g}]"
    return number, ""


def _is_numpy_bool(value: Any) -> bool:
    """Returns whether `value` is a numpy bool, without importing numpy into every worker."""
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")


def _refuse(why: str) -> Verdict:
    return Verdict(Status.VERIFIER_ERROR, None, f"the verifier {why}"[:DETAIL_LIMIT])
