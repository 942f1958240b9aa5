"""Plants faults in the functions of the parts list, one at a time, and runs each part's own tests: do they notice?

    python -m benchmarks.mutants --out F.json                      one seeded fault in every part
    python -m benchmarks.mutants --out F.json --count 5 --seed 1   up to five
    python -m benchmarks.mutants --out F.json --only L2 A3         of these parts

A fault is a sign, an operator, a bound, a constant, a mask, or a stop-gradient that is changed or dropped. It is killed
where a test that the part lists fails. A survivor is printed with its change: either a test is missing, or the change
makes no difference (say so in the report; nothing is excused here). Everything runs in this process: the code object of
the function is exchanged, and compiled programs are dropped.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import inspect
import io
import json
import random
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

from jrl.algos.parts import PARTS

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
# Calls that hand on their first argument where they are dropped.
DROPPED = ("stop_gradient", "masked", "clip", "clamp", "abs", "sqrt", "log1p", "widen")


def sites(tree: ast.AST) -> list[tuple[str, Callable[[], None]]]:
    """Returns what can be changed in a function's tree: (what the change is, a call that makes it in place)."""
    found: list[tuple[str, Callable[[], None]]] = []

    def add(node: ast.AST, what: str, change: Callable[[], None]) -> None:
        found.append((f"line {node.lineno}: {what}", change))

    def replace(parent: ast.AST, field: str, place: int | None, new: ast.AST) -> Callable[[], None]:
        def change() -> None:
            if place is None:
                setattr(parent, field, new)
            else:
                getattr(parent, field)[place] = new

        return change

    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            for place, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if not isinstance(node, ast.expr) or field in ("annotation", "returns", "decorator_list"):
                    continue
                if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
                    other = OPERATORS[type(node.op)]()
                    new = ast.copy_location(ast.BinOp(node.left, other, node.right), node)
                    add(node, f"{ast.unparse(node)} -> {ast.unparse(new)}", replace(parent, field, place, new))
                elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
                    new = ast.copy_location(
                        ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators), node
                    )
                    add(node, f"{ast.unparse(node)} -> {ast.unparse(new)}", replace(parent, field, place, new))
                elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert):
                    add(
                        node,
                        f"{ast.unparse(node)} -> {ast.unparse(node.operand)}",
                        replace(parent, field, place, node.operand),
                    )
                elif isinstance(node, ast.Constant) and type(node.value) in (int, float) and field != "slice":
                    new = ast.copy_location(ast.Constant(node.value + 1), node)
                    add(node, f"{node.value} -> {node.value + 1}", replace(parent, field, place, new))
                elif isinstance(node, ast.Call):
                    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                    if name in CALLS and isinstance(node.func, ast.Attribute):
                        new = copy.deepcopy(node)
                        new.func.attr = CALLS[name]
                        add(node, f"{ast.unparse(node)} -> {ast.unparse(new)}", replace(parent, field, place, new))
                    elif name in DROPPED and node.args:
                        add(
                            node,
                            f"{ast.unparse(node)} -> {ast.unparse(node.args[0])}",
                            replace(parent, field, place, node.args[0]),
                        )
    return found


def mutants(function: types.FunctionType, count: int, seed: str) -> Iterator[tuple[str, types.CodeType]]:
    """Yields up to `count` faulty code objects of a function, drawn by `seed`, each with what was changed."""
    source = textwrap.dedent(inspect.getsource(function))
    tree = ast.parse(source).body[0]
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    total = len(sites(ast.Module(body, [])))
    for k in random.Random(seed).sample(range(total), min(count, total)):
        tree = ast.parse(source)
        definition = tree.body[0]
        definition.decorator_list = []
        body = definition.body[1:] if ast.get_docstring(definition) is not None else definition.body
        what, change = sites(ast.Module(body, []))[k]
        change()
        space: dict = {}
        exec(
            compile(ast.fix_missing_locations(tree), f"<mutant of {function.__name__}>", "exec"),
            vars(importlib.import_module(function.__module__)) | {},
            space,
        )
        yield what, space[function.__name__].__code__


def noticed(tests: list[str]) -> bool:
    """Returns whether one of the tests fails."""
    jax.clear_caches()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {code!r} on {tests}")
    return code == pytest.ExitCode.TESTS_FAILED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file with every fault and whether it was noticed")
    parser.add_argument("--count", type=int, default=1, help="faults a part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="part ids")
    args = parser.parse_args()
    rows = []
    for part in PARTS:
        if args.only and part["id"] not in args.only:
            continue
        module, name = part["function"].split(":")
        function = inspect.unwrap(vars(importlib.import_module(module))[name])
        original = function.__code__
        if noticed(part["tests"]):
            raise SystemExit(f"{part['id']} {name}: its own tests fail without a fault")
        for what, code in mutants(function, args.count, f"{args.seed} {part['id']} {name}"):
            try:
                function.__code__ = code
                killed = noticed(part["tests"])
            finally:
                function.__code__ = original
            rows.append({"id": part["id"], "function": part["function"], "change": what, "killed": killed})
            print(f"{'killed  ' if killed else 'SURVIVED'} {part['id']:<4} {name}: {what}", flush=True)
            args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    killed = sum(row["killed"] for row in rows)
    print(f"{killed} of {len(rows)} faults killed by the tests that their parts list")


if __name__ == "__main__":
    main()
