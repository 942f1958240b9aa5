"""Functions as source: what a notebook's reward function needs comes along, and what cannot is named."""

from __future__ import annotations

import collections
import math
import re
from fractions import Fraction

import pytest
from verifier_fakes import example

from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers import as_verifier
from jrl.tasks.verifiers.judge import judge
from jrl.tasks.verifiers.source import PartSource, load_part, part_of

LIMIT = 3
WORDS = {"four": 4, "five": 5}
PATTERN = re.compile("[0-9]+", re.IGNORECASE)
THING = object()


class Half:
    value = Fraction(1, 2)


def root(x):
    return math.sqrt(x) if x > 1 else root(x + LIMIT)


def uses_everything(completion: str, example: Undefined) -> float:  # noqa: F821  annotations do not come along
    number = WORDS.get(completion) or int(PATTERN.search(completion)[0])
    squares = [number * number for number in (number,)]
    return root(squares[0]) * float(Half.value)


def says_verdict(completion, example):
    return Verdict(Status.CORRECT if completion == example.answer else Status.WRONG, 0.5)


def uses_names_of_its_own(completion, example):
    import json
    from math import isqrt

    def twice(x):
        return 2 * x

    class Own:
        value: int = 1

        def most(self, pairs: list) -> int:
            return max(pairs, key=lambda pair: pair[1])[0]

    if completion == "most":
        return Own().most([(1, 2), (3, 4)])
    try:
        number = json.loads(completion)
    except ValueError as error:
        return float(len(str(error)) > 0)
    match number:
        case [first, *rest]:
            return twice(first) + len(rest)
        case {"a": a, **others}:
            return a + len(others)
        case other:
            return isqrt(other) + sum(k for k in range(3)) + k * Own.value


k = 10
LARGEST, EDGES, NAMES = float("inf"), [float("-inf"), 1.5], {"b", "a", "c"}


def uses_values(completion, example):
    return float(LARGEST > EDGES[1] > EDGES[0] and NAMES == {"a", "b", "c"})


COUNTS = collections.Counter("aab")


def uses_a_counter(completion, example):
    return COUNTS["a"]


CALLS = 0


def counts_its_calls(completion, example):
    global CALLS
    CALLS += 1
    return CALLS


def uses_thing(completion, example):
    return float(THING is None)


def uses_nothing_known(completion, example):
    return missing_name  # noqa: F821


def closing_over(bonus):
    def closed(completion, example):
        return bonus + 1.0

    return closed


def say(part: PartSource, name: str, completion: str) -> Verdict:
    verifier = as_verifier(name, load_part(part, 99)[name])
    return judge(verifier, verifier.config(), completion, example())


def test_what_a_function_uses_comes_along():
    part = part_of({"uses_everything": uses_everything, "verdict": says_verdict})
    # "four" -> 4, squared 16, root 4, halved 2
    assert say(part, "uses_everything", "four") == Verdict(Status.CORRECT, 2.0)
    assert say(part, "verdict", "4") == Verdict(Status.CORRECT, 0.5)


def test_an_enclosed_number_comes_along():
    assert say(part_of({"closed": closing_over(0.5)}), "closed", "") == Verdict(Status.CORRECT, 1.5)


@pytest.mark.parametrize(
    ("completion", "reward"), [("[3, 4, 5]", 8), ('{"a": 3, "b": 4}', 4), ("9", 16), ("x", 1), ("most", 3)]
)
def test_names_of_a_functions_own_are_not_looked_for_outside(completion, reward):
    # 2 * 3 + 2; 3 + 1; 3 + (0 + 1 + 2) + 10 * 1
    part = part_of({"own": uses_names_of_its_own})
    assert say(part, "own", completion) == Verdict(Status.CORRECT, reward) and "import json as" not in part.source


def test_infinities_and_sets_are_written_as_source():
    part = part_of({"values": uses_values})
    assert say(part, "values", "") == Verdict(Status.CORRECT, 1.0)
    assert "NAMES = set(['a', 'b', 'c'])" in part.source  # in whatever order a process has them


def test_the_part_is_the_same_text_every_time():
    assert part_of({"a": uses_everything}) == part_of({"a": uses_everything})


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (uses_thing, "'THING' of type object"),
        (uses_nothing_known, "'missing_name'"),
        (uses_a_counter, "'COUNTS' of type Counter"),
        (counts_its_calls, "'counts_its_calls' assigns the global 'CALLS'"),
        (lambda completion, example: 1.0, "lambda"),
        (len, "builtin_function"),
    ],
)
def test_what_cannot_be_sent_is_named(thing, message):
    with pytest.raises(ValueError, match=message):
        part_of({"thing": thing})


def test_an_error_in_a_part_shows_its_own_line():
    part = PartSource("mine.py", "def bad(completion, example):\n    return 1 / 0\nVERIFIERS = {'bad': bad}\n")
    verdict = say(part, "bad", "x")
    assert verdict.status is Status.VERIFIER_ERROR
    assert "ZeroDivisionError" in verdict.detail and "mine.py:2 in bad" in verdict.detail
