"""Functions as source: what a notebook's reward function needs comes along, and what cannot is named."""

from __future__ import annotations

import collections
import dataclasses
import enum
import linecache
import math
import re
from fractions import Fraction

import pytest
from verifier_fakes import example

from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers import as_verifier
from jrl.tasks.verifiers.function_source import part_of
from jrl.tasks.verifiers.judge import judge
from jrl.tasks.verifiers.source import PartSource, load_part

LIMIT = 3
WORDS = {"four": 4, "five": 5}
PATTERN = re.compile("[0-9]+", re.IGNORECASE)
THING = object()


class Color(enum.Enum):
    RED = 4


@dataclasses.dataclass(frozen=True)
class Weight:  # without a method of its own
    value: float = 0.5


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


def uses_classes(completion, example):
    return Color.RED.value * Weight().value


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


def test_classes_of_a_file_need_no_methods():
    assert say(part_of({"classes": uses_classes}), "classes", "") == Verdict(Status.CORRECT, 2.0)


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


def cell(source: str) -> dict:
    """Returns what a notebook's cell leaves, its source where a notebook keeps it."""
    name = f"<cell {len(linecache.cache)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space: dict = {"__name__": "__main__"}
    exec(compile(source, name, "exec", dont_inherit=True), space)
    return space


DATACLASS = """
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import ClassVar
class Unknown: pass
@dataclass
class Weights:
    scale: ClassVar[float] = 2.0
    value: float = 1.0
    start: InitVar[float] = 3.0
    _: KW_ONLY
    items: list[Unknown] = field(default_factory=list)
    def __post_init__(self, start): self.value += start
del Unknown
def v(completion, example): return Weights(5.0, 7.0, items=[1]).value * Weights.scale
"""
CONTEXT = """
import contextlib
@contextlib.contextmanager
def quiet():
    yield 4
def v(c, e):
    with quiet() as n: return n
"""
XML = """
import xml.etree.ElementTree
def v(c, e): return len(xml.etree.ElementTree.fromstring('<a><b/></a>'))
"""
SAME_NAME = """
LIMIT = 3
class Own:
    LIMIT = LIMIT
    def get(self): return self.LIMIT
def v(c, e): return Own().get()
"""
CACHED = "import functools\n@functools.lru_cache\ndef size(x): return len(x)\ndef v(c, e): return size('abc')"
ASYNC = "import asyncio\nasync def judged(x): return x + 1\ndef v(c, e): return asyncio.run(judged(2))"
LOOP = "fs = []\nfor k in (1, 2):\n    def v(c, e, k=k): return k\n    fs.append(v)\nv = fs[0]"


@pytest.mark.parametrize(
    ("source", "reward"),
    [
        (DATACLASS, 24),  # (5 + 7) * 2
        (SAME_NAME, 3),
        (XML, 1),
        ("import os\ndef v(c, e): return len(os.path.join('a', c))", 3),
        (CONTEXT, 4),
        (CACHED, 3),
        (ASYNC, 3),
        ("double = lambda x, n=2: n * x\ndef v(c, e): return double(3)", 6),
        ("if True:\n    def v(c, e): return len('''a\n    \nb''')", 8),  # a, a new line, four blanks and another, b
        ("def v(c, e): return len('''a\n    \nb''')", 8),
        ("if True:\n    def v(c, e): return len('''a\nb''')", 3),
        ("n = 1\ndef v(c, e, n=n, *, k=(n, 2)): return 10 * n + k[0]\nn = 5", 11),
        (LOOP, 1),
        ("max = 3\ndef v(c, e): return max", 3),
    ],
)
def test_a_cells_function_means_the_same_there(source, reward):
    v = cell(source)["v"]
    assert v("a", example()) == reward
    assert say(part_of({"v": v}), "v", "a") == Verdict(Status.CORRECT, reward)


CLASH = """
limit = 100
def helper(x): return x < limit
def make(limit):
    def v(c, e): return limit + helper(50)
    return v
v = make(5)
"""
BUILT_IN = """
def low(x): return min(x)
def make(min):
    def v(c, e): return low([1]) + min
    return v
v = make(5)
"""
LOCAL_CLASS = """
def make():
    n = 7
    class Own:
        def get(self): return n
    def v(c, e): return Own().get()
    return v
v = make()
"""
COUNTER = """
def make():
    n = 0
    def v(c, e):
        nonlocal n
        n += 1
        return n
    return v
v = make()
"""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (CLASH, "different things by 'limit'"),
        (BUILT_IN, "different things by 'min'"),
        (LOCAL_CLASS, "'Own' is a class of inside a function"),
        (COUNTER, "'v' assigns a variable of the function around it"),
        ("def v(c, e): return v.weight\nv.weight = 2.0", "'v' has the attribute 'weight'"),
        ("a = object()\ndef v(c, e, a=a): return 1.0\na = object()", "'a' means something else since"),
    ],
)
def test_what_would_mean_something_else_there_is_refused(source, message):
    with pytest.raises(ValueError, match=message):
        part_of({"v": cell(source)["v"]})


def test_an_error_in_a_part_shows_its_own_line():
    part = PartSource("mine.py", "def bad(completion, example):\n    return 1 / 0\nVERIFIERS = {'bad': bad}\n")
    verdict = say(part, "bad", "x")
    assert verdict.status is Status.VERIFIER_ERROR
    assert "ZeroDivisionError" in verdict.detail and "mine.py:2 in bad" in verdict.detail
