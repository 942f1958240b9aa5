"""Functions as source: what a notebook's reward function needs comes along, and what cannot is named."""

from __future__ import annotations

import builtins
import cmath
import collections
import dataclasses
import enum
import linecache
import math
import re
import sys
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


COUNTS = collections.deque("aab")


def uses_a_queue(completion, example):
    return len(COUNTS)


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


def top(completion, example):
    number = LIMIT
    return float(len(completion) + number)


def test_a_function_may_be_called_top():
    assert load_part(part_of({"top": top}), 0)["top"]("7", example("7")) == 4.0


def test_infinities_and_sets_are_written_as_source():
    part = part_of({"values": uses_values})
    assert say(part, "values", "") == Verdict(Status.CORRECT, 1.0)
    assert "NAMES = set(['a', 'b', 'c'])" in part.source  # in whatever order a process has them


def test_a_class_of_a_cell_without_methods_is_the_last_one_of_its_name(monkeypatch):
    """As in a notebook, whose main module has no file."""
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    for value in (3, 4):
        space = cell(f"class Bare:\n    x = {value}\ndef v(c, e): return Bare.x")
        for name in ("Bare", "v"):
            monkeypatch.setattr(sys.modules["__main__"], name, space[name], raising=False)
    assert say(part_of({"v": space["v"]}), "v", "") == Verdict(Status.CORRECT, 4)


def test_a_function_that_ipython_puts_among_the_built_ins_is_imported(monkeypatch):
    monkeypatch.setattr(builtins, "display", cmath.sqrt, raising=False)
    v = cell("def v(c, e): return display(4).real")["v"]
    part = part_of({"v": v})
    assert "from cmath import sqrt as display" in part.source and say(part, "v", "").reward == 2.0


def test_classes_of_a_file_need_no_methods():
    assert say(part_of({"classes": uses_classes}), "classes", "") == Verdict(Status.CORRECT, 2.0)


def test_the_part_is_the_same_text_every_time():
    assert part_of({"a": uses_everything}) == part_of({"a": uses_everything})


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (uses_thing, "'THING' of type object"),
        (uses_nothing_known, "'missing_name'"),
        (uses_a_queue, "'COUNTS' of type deque"),
        (counts_its_calls, "'counts_its_calls' assigns the global 'CALLS'"),
        (lambda completion, example: 1.0, "a lambda has no name that a configuration could give; define the verifier"),
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
NESTED_TYPES = """
import dataclasses
@dataclasses.dataclass
class Step:
    text: str
    def long(self): return len(self.text)
@dataclasses.dataclass
class Answer:
    steps: list[Step]
    def long(self): return self.steps[0].long()
def v(c, e):
    (field,) = dataclasses.fields(Answer)
    return Answer([Step("abc")]).long() + (field.type == list[Step])
"""
DERIVED = """
class Node:
    def parse(self, text): return Leaf(text)
class Leaf(Node):
    def __init__(self, text): self.text = text
def v(c, e): return len(Node().parse("abc").text)
"""
TABLES = """
import math, re
import numpy as np
from decimal import Decimal
def short(c): return len(c) < 3
RULES = {"short": short, "root": math.sqrt}
PATTERNS = [re.compile("A", re.IGNORECASE), re.compile("b")]
WEIGHTS, HALF, TWO = np.array([1.5, 2.5], np.float32), Decimal("0.5"), np.int64(2)
def v(c, e):
    found = RULES["short"](c) + RULES["root"](4.0) + sum(bool(p.search(c)) for p in PATTERNS)
    return found + float(WEIGHTS.sum()) + float(HALF) + int(TWO) + isinstance(c, KINDS)
KINDS = (str, bytes)
"""
OF_A_FACTORY = """
def double(x): return 2 * x
def make(scale):
    def v(c, e): return scale(3)
    return v
v, alias = make(double), double
"""
SHARED = """
seen = []
def push(x, seen=seen): seen.append(x)
def v(c, e):
    seen.clear()
    push(c)
    push(c)
    return len(seen)
"""
MEMO = """
import functools
def memo(f):
    known = {}
    @functools.wraps(f)
    def w(x):
        if x not in known: known[x] = f(x)
        return known[x]
    return w
@memo
def size(x): return len(x)
def v(c, e): return size("ab")
size("abc")
"""
ANNOTATED = """
def v(c: "Completion", e: Later) -> Later:
    y: Missing = 4
    return y
""".replace("Later", "int")
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
        (NESTED_TYPES, 4),
        (DERIVED, 3),
        (TABLES, 1 + 2 + 1 + 4 + 0.5 + 2 + 1),
        (OF_A_FACTORY, 6),
        (ANNOTATED, 4),
        (MEMO, 2),
        (SHARED, 2),
        ("import numpy as np\nz = np.zeros((0, 3))\ndef v(c, e): return z.shape[1]", 3),
        ("n = 10**5000\ndef v(c, e): return n % 7", 10**5000 % 7),
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


WRAPPED = """
import functools
def v(c, e): return 1
def tenfold(f):
    @functools.wraps(f)
    def w(c, e): return 10 * f(c, e)
    return w
v = tenfold(v)
"""
REBOUND = "W = 1\nclass Own:\n    w = W\n    def f(self): return self.w\nW = 2\ndef v(c, e): return Own().f()"
REDEFINED = """
class A:
    def f(self): return 1
class B(A):
    def g(self): return self.f()
class A:
    def f(self): return 100
def v(c, e): return B().g()
"""
DECORATED = """
import functools
def at_most(limit):
    def decorate(f):
        @functools.wraps(f)
        def w(*a): return min(limit, f(*a))
        return w
    return decorate
LIMIT = 1
@at_most(LIMIT)
def v(c, e): return 7
LIMIT = 3
"""
FILLED = """
NAMES = []
def named(f):
    NAMES.append(f.__name__)
    return f
@named
def v(c, e): return len(NAMES)
"""
PATCHED = """
class A:
    def f(self): return 1
    def g(self): return self.f()
A.f = lambda self: 2
def v(c, e): return A().g()
"""
DECORATOR = """
import functools
def more(f):
    @functools.wraps(f)
    def w(*a): return f(*a) + 1
    return w
@more
def v(c, e): return 1
def more(f):
    @functools.wraps(f)
    def w(*a): return f(*a) + 100
    return w
"""
DEFAULT = """
class Box:
    def __init__(self, x): self.x = x
W = 1
def v(c, e, box=Box(W)): return box.x
W = 2
"""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (CLASH, "different things by 'limit'"),
        (BUILT_IN, "different things by 'min'"),
        (LOCAL_CLASS, "'Own' is a class made inside a function"),
        (COUNTER, "'v' assigns a variable of the function around it, 'n'"),
        (WRAPPED, "'v' would not be the same .*: it is wrapped"),
        (REBOUND, "'Own' would not be the same .*: its attribute 'w' has another value"),
        (REDEFINED, "'B' would not be the same .*: a class that it is derived from was defined again"),
        (DECORATED, "'v' would not be the same .*: a decorator has another argument"),
        (DEFAULT, "'v' would not be the same .*: a default has another value"),
        (PATCHED, "'A' would not be the same .*: its attribute 'f' has another value"),
        (FILLED, "'NAMES' has another value once the source that uses it is run again"),
        (DECORATOR, "'v' would not be the same .*: a decorator was defined again"),
        ("BIG = 'a' * (5 << 20)\ndef v(c, e): return len(BIG)", "5 million characters, most of them for 'BIG'"),
        ("async def v(c, e): return 1.0", "'v' is a coroutine"),
        ("VERIFIERS = 1\ndef v(c, e): return VERIFIERS", "named 'VERIFIERS'"),
        ("a = []\na.append(a)\ndef v(c, e): return len(a)", "nests too deeply"),
        ("def v(c, e): return v.weight\nv.weight = 2.0", "its attribute 'weight' is not part of its source"),
        ("a = object()\ndef v(c, e, a=a): return 1.0\na = object()", "'a' of type object"),
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


def test_annotations_of_a_parts_file_are_what_it_says():
    part = PartSource("mine.py", "def f(a: int): pass\nVERIFIERS = {'f': f}\n")
    assert load_part(part, 99)["f"].__annotations__ == {"a": int}


@pytest.mark.parametrize(
    "source",
    [
        "A = []\nB = A\ndef grows(c, e):\n    A.append(c)\n    return len(B)\n",
        "A = []\nB = {'a': (1, [A])}\ndef grows(c, e):\n    A.append(c)\n    return len(B['a'][1][0])\n",
        "import numpy as np\nA = np.zeros(2)\nB = [A]\ndef grows(c, e):\n    A[:] += 1\n    return B[0][1]\n",
        "A = []\nB = A\ndef push(c, a=A): a.append(c)\ndef grows(c, e):\n    push(c)\n    return len(B)\n",
        "GRID = [[0] * 2] * 3\ndef grows(c, e):\n    GRID[0][1] += 1\n    return GRID[2][1]\n",
        "D = dict.fromkeys('xy', [])\ndef grows(c, e):\n    D['x'].append(c)\n    return len(D['y'])\n",
    ],
)
def test_an_object_of_several_names_is_one_object_there(source):
    grows = cell(source)["grows"]
    part = part_of({"grows": grows})
    assert [say(part, "grows", "a").reward, grows("a", None)] == [1, 1]


def test_classes_of_one_part_share_nothing_and_what_is_unlike_is_said_as_before():
    """Attributes are compared one by one: a table made to compare them would have an identity that is used again."""
    classes = "".join(f"class K{i}:\n    table = [{i}]\n    def f(self): return self.table\n" for i in range(40))
    uses = "def v(c, e): return sum(k().f()[0] for k in (" + ", ".join(f"K{i}" for i in range(40)) + "))\n"
    for _ in range(20):
        assert say(part_of({"v": cell(classes + uses)["v"]}), "v", "a").reward == sum(range(40))
    unlike = (
        "class K:\n    table = None\n    def f(self): return self.table\nK.table = {}\ndef v(c, e): return len(K().f())"
    )
    with pytest.raises(ValueError, match="its attribute 'table' has another value"):
        part_of({"v": cell(unlike)["v"]})
    private = "_A = [1]\n_B = _A\ndef v(c, e):\n    _A.append(c)\n    return len(_B)\n"
    assert say(part_of({"v": cell(private)["v"]}), "v", "a").reward == 2


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("D = {'seen': []}\ndef push(c, a=D['seen']): a.append(c)\n", "'push' and in 'D'"),
        ("x = []\nD = {'a': x, 'b': x}\ndel x\ndef push(c, a=D['a']): a.append(c)\n", "'push' and in 'D'"),
        ("a = []\ndef push(c, *, a=a): a.append(c)\nD = {'a': a}\ndel a\n", "'push' and in 'D'"),
        ("class K:\n    a = b = []\n    def f(self): pass\ndef push(c): K.a.append(c)\nD = K.b\n", "'K' and in 'D'"),
    ],
)
def test_an_object_that_would_be_copied_is_refused(source, names):
    grows = cell(source + "def grows(c, e):\n    push(c)\n    return len(D)\n")["grows"]
    with pytest.raises(ValueError, match=f"an object in {names} stands in several places here"):
        part_of({"grows": grows})
