"""Plants faults in the functions of the parts list, one at a time, and runs each part's own tests: do they notice?

    python -m benchmarks.mutants --out F.json                      one seeded fault in every part
    python -m benchmarks.mutants --out F.json --count 5 --seed 1   up to five
    python -m benchmarks.mutants --out F.json --only L2 A3         of these parts

A fault is a sign, an operator, a bound, a constant, a mask, a branch, or a stop-gradient that is changed or dropped. It
is killed where a test that the part lists fails. A survivor is printed with its change and the command fails: either a
test is missing, or the change makes no difference and benchmarks/equivalent_mutants.json says why. An entry of that
file whose change is not possible (any more), or is killed, is an error.

Everything runs in one process that collects the tests once: first all of them without a fault, to see how long each
takes and which functions it reaches; then for every fault the part's tests that reach its function, the quickest first,
until one fails. The code object of the function is exchanged, and compiled programs are dropped. Where a function only
calls others, the first of these in which something can be changed is; where it hands a private function on, such as the
body of a scan, that is part of it. 385 faults took five minutes on 2 cores.

Faults in what is around the formulas are a table: `python -m benchmarks.named_mutants`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import faulthandler
import importlib
import inspect
import io
import json
import os
import random
import sys
import textwrap
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

from jrl.algos.parts import PARTS, Part

OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPARISONS = {ast.Gt: ast.Lt, ast.Lt: ast.Gt, ast.GtE: ast.Lt, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
CALLS = {"minimum": "maximum", "maximum": "minimum", "mean": "sum", "sum": "mean", "exp": "expm1", "cumsum": "cumprod"}
BUILTINS = {"all": "any", "any": "all", "min": "max", "max": "min"}
# Calls that hand on their first argument where they are dropped.
DROPPED = ("stop_gradient", "masked", "clip", "clamp", "abs", "sqrt", "log1p", "widen")
# A test that takes longer than this hangs: a fault may make a loop endless. The process ends with its traceback.
HANGS_SECONDS = 240
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")


def sites(tree: ast.AST) -> list[tuple[str, Callable[[], None]]]:
    """Returns what can be changed in a function's tree: (what the change is, a call that makes it in place)."""
    changes: list[tuple[str, Callable[[], None]]] = []
    texts: list[str] = []  # the same change may be possible at several places

    def add(parent: ast.AST, field: str, place: int | None, new: ast.AST) -> None:
        node = getattr(parent, field) if place is None else getattr(parent, field)[place]
        ast.copy_location(new, node)

        def change() -> None:
            if place is None:
                setattr(parent, field, new)
            else:
                getattr(parent, field)[place] = new

        what = f"{ast.unparse(node)} -> {ast.unparse(new)}"
        texts.append(what)
        alike = texts.count(what)
        changes.append((what if alike == 1 else f"{what}, place {alike}", change))

    hints = [node for parent in ast.walk(tree) for node in ast.walk(getattr(parent, "annotation", None) or ast.Pass())]
    for parent in ast.walk(tree):
        if parent in hints:
            continue
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            for place, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
                    add(parent, field, place, ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))
                elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
                    other = COMPARISONS[type(node.ops[0])]()
                    add(parent, field, place, ast.Compare(node.left, [other, *node.ops[1:]], node.comparators))
                elif isinstance(node, ast.BoolOp):
                    other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
                    add(parent, field, place, ast.BoolOp(other, node.values))
                elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert):
                    add(parent, field, place, copy.copy(node.operand))
                elif isinstance(node, ast.Constant) and type(node.value) in (int, float) and field != "slice":
                    add(parent, field, place, ast.Constant(node.value + 1))
                elif isinstance(node, ast.Call):
                    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                    if name in CALLS and isinstance(node.func, ast.Attribute):
                        new = copy.deepcopy(node)
                        new.func.attr = CALLS[name]
                        add(parent, field, place, new)
                    elif name in BUILTINS and isinstance(node.func, ast.Name):
                        new = copy.deepcopy(node)
                        new.func.id = BUILTINS[name]
                        add(parent, field, place, new)
                    elif name in DROPPED and node.args:
                        add(parent, field, place, copy.copy(node.args[0]))
                    elif name == "where" and len(node.args) == 3:
                        add(parent, field, place, copy.copy(node.args[1]))
                        add(parent, field, place, copy.copy(node.args[2]))
    return changes


def parsed(function: types.FunctionType) -> tuple[ast.Module, list[tuple[str, Callable[[], None]]]]:
    """Returns a fresh tree of a function's source, and what can be changed in it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    definition = tree.body[0]
    definition.decorator_list = []
    body = definition.body[1:] if ast.get_docstring(definition) is not None else definition.body
    return tree, sites(ast.Module(body, []))


def mutant(function: types.FunctionType, place: int) -> types.CodeType:
    """Returns the code object of a function with the change at a place of it."""
    tree, changes = parsed(function)
    changes[place][1]()
    space: dict = {}
    source = compile(ast.fix_missing_locations(tree), f"<mutant of {function.__name__}>", "exec")
    exec(source, dict(vars(importlib.import_module(function.__module__))), space)
    return space[function.__name__].__code__


def changeable(function: types.FunctionType) -> types.FunctionType:
    """Returns the function itself, or where it only calls others the first of these with something to change."""
    tree, changes = parsed(function)
    if changes:
        return function
    known = vars(importlib.import_module(function.__module__))
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            called = getattr(known.get(called.value.id), called.attr, None)
        elif isinstance(called, ast.Name):
            called = known.get(called.id)
        if isinstance(called, types.FunctionType) and called.__module__.startswith("jrl."):
            inner = changeable(inspect.unwrap(called))
            if parsed(inner)[1]:
                return inner
    return function


def function_of(part: Part) -> types.FunctionType:
    """Returns the function of a part, without its decorators, or what it calls: where a fault can be planted."""
    module, name = part["function"].split(":")
    return changeable(inspect.unwrap(vars(importlib.import_module(module))[name]))


def bodies_of(function: types.FunctionType) -> list[types.FunctionType]:
    """Returns the private functions of its module that a function hands on, such as the body of a scan: its formula is
    in them too."""
    tree, known = parsed(function)[0], vars(importlib.import_module(function.__module__))
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called]
    handed_on = [known.get(name) for name in dict.fromkeys(names) if name.startswith("_")]
    return [inspect.unwrap(body) for body in handed_on if isinstance(body, types.FunctionType)]


def faults_of(function: types.FunctionType) -> list[tuple[str, types.FunctionType, int]]:
    """Returns (what it is, whose code it is in, its place there) of every fault of a function and of its bodies."""
    own = [(what, function, place) for place, (what, _) in enumerate(parsed(function)[1])]
    return own + [
        (f"{body.__name__}: {what}", body, place)
        for body in bodies_of(function)
        for place, (what, _) in enumerate(parsed(body)[1])
    ]


def equivalent_mutants(path: Path = EQUIVALENT) -> dict[tuple[str, str], str]:
    """Returns {(function, change): why it makes no difference}.

    Raises:
        ValueError: an entry is of no function of the parts list, its change is not possible there, or it has no reason.
    """
    functions = {part["function"]: part for part in PARTS}
    known: dict[tuple[str, str], str] = {}
    for row in json.loads(path.read_text(encoding="utf-8")):
        name, change, reason = row["function"], row["change"], row["reason"]
        if name not in functions:
            raise ValueError(f"{path.name}: {name} is no function of the parts list; drop the entry")
        possible = [what for what, _, _ in faults_of(function_of(functions[name]))]
        if change not in possible:
            raise ValueError(f"{path.name}: {name} has no place for {change!r} (any more); drop or renew the entry")
        if not reason.strip():
            raise ValueError(f"{path.name}: {name}, {change!r}: say why it makes no difference")
        if (name, change) in known:
            raise ValueError(f"{path.name}: {name}, {change!r} stands there twice")
        known[name, change] = reason
    return known


class Trial:
    """A pytest plugin: in place of pytest's loop over the tests it collected, the loop over the faults."""

    def __init__(self, parts: list[Part], count: int, seed: int, report: Callable[[dict], None]) -> None:
        self.parts, self.count, self.seed, self.report = parts, count, seed, report
        self.failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            raise RuntimeError(f"{report.nodeid} cannot be collected: {report.longreprtext}")

    def fails(self, item: pytest.Item) -> bool:
        """Returns whether a test fails now."""
        self.failed = False
        faulthandler.dump_traceback_later(HANGS_SECONDS, exit=True, file=sys.__stderr__)
        try:
            item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        finally:
            faulthandler.cancel_dump_traceback_later()
        return self.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        codes = {function_of(part).__code__ for part in self.parts}
        reached: dict[pytest.Item, set[types.CodeType]] = {}
        seconds: dict[pytest.Item, float] = {}
        for item in session.items:
            jax.clear_caches()
            hits = reached[item] = set()
            began = time.perf_counter()
            with profiled(lambda code, hits=hits: hits.add(code) if code in codes else None):
                if self.fails(item):
                    raise RuntimeError(f"{item.nodeid} fails without a fault")
            seconds[item] = time.perf_counter() - began
        for part in self.parts:
            function = function_of(part)
            original = function.__code__
            own = [
                item
                for item in sorted(session.items, key=seconds.__getitem__)
                if original in reached[item] and any(belongs(item.nodeid, test) for test in part["tests"])
            ]
            if not own:
                raise RuntimeError(f"{part['id']}: none of its tests calls {part['function']}")
            for what, owner, place in self.draw(part, function):
                jax.clear_caches()
                began, without = time.perf_counter(), owner.__code__
                owner.__code__ = mutant(owner, place)
                try:
                    killer = next((item.nodeid for item in own if self.fails(item)), None)
                finally:
                    owner.__code__ = without
                row = {"id": part["id"], "function": part["function"], "change": what, "killed_by": killer}
                self.report(row | {"seconds": round(time.perf_counter() - began, 2)})
        return True

    def draw(self, part: Part, function: types.FunctionType) -> list[tuple[str, types.FunctionType, int]]:
        """Returns up to `count` faults of a part's function, drawn by the seed."""
        faults, order = faults_of(function), random.Random(f"{self.seed} {part['id']} {part['function']}")
        return order.sample(faults, min(self.count, len(faults)))


def belongs(nodeid: str, test: str) -> bool:
    """Returns whether a collected test is the one that a part names, or one of its cases."""
    return nodeid == test or nodeid.startswith(test + "[")


@contextlib.contextmanager
def profiled(called: Callable[[types.CodeType], None]) -> Iterator[None]:
    """Calls `called` with the code object of every Python function that this thread enters."""
    sys.setprofile(lambda frame, event, _: called(frame.f_code) if event == "call" else None)
    try:
        yield
    finally:
        sys.setprofile(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file: every fault and the test that noticed")
    parser.add_argument("--count", type=int, default=1, help="faults a function")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="part ids")
    args = parser.parse_args()
    unknown = set(args.only or ()) - {part["id"] for part in PARTS}
    if unknown:
        raise SystemExit(f"no part has the id {', '.join(sorted(unknown))}: see `jrl list parts`")
    parts = [part for part in PARTS if not args.only or part["id"] in args.only]
    equivalent = equivalent_mutants()
    terminal = os.fdopen(os.dup(1), "w", encoding="utf-8")
    rows: list[dict] = []

    def report(row: dict) -> None:
        row["equivalent"] = equivalent.get((row["function"], row["change"]))
        rows.append(row)
        verdict = "killed    " if row["killed_by"] else "equivalent" if row["equivalent"] else "SURVIVED  "
        name = row["function"].rpartition(":")[2]
        print(f"{verdict} {row['id']:<4} {name}: {row['change']}", file=terminal, flush=True)
        args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")

    trial = Trial(parts, args.count, args.seed, report)
    tests = sorted({test for part in parts for test in part["tests"]})
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = pytest.main(["-qq", "-p", "no:cacheprovider", *tests], plugins=[trial])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"{printed.getvalue()[-3000:]}\npytest ended with {code!r}")
    functions = {part["function"] for part in parts}
    without = sorted(functions - {row["function"] for row in rows})
    stale = [row for row in rows if row["killed_by"] and row["equivalent"]]
    survivors = [row for row in rows if not row["killed_by"] and not row["equivalent"]]
    killed = sum(row["killed_by"] is not None for row in rows)
    print(f"{len(rows)} faults in {len(functions)} functions: {killed} killed by the tests that their parts list,")
    print(f"{len(rows) - killed - len(survivors)} equivalent, {len(survivors)} survived")
    if without:
        print(f"nothing to change in {', '.join(without)}: each only calls others")
    for row in stale:
        print(
            f"{row['function']}: {row['change']!r} is killed, so it is not equivalent: drop it from {EQUIVALENT.name}"
        )
    if stale or survivors:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
