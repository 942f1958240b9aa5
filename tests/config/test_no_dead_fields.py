"""Every field that a configuration can set is read somewhere: an option without a reader would be a lie."""

from __future__ import annotations

import ast
from pathlib import Path

import jrl
from jrl.config import all_fields
from jrl.experiment import TABLES, Config, config_classes


def attributes_read(tree: ast.Module) -> set[str]:
    """Returns the names read as `something.name` in a module, leaving out a class's own checks in __post_init__.

    Where a module reads by a name that it holds in a variable (`getattr(shape, axis) for axis in AXES`), the texts it
    spells out count as read.
    """
    checks = {
        node
        for check in ast.walk(tree)
        if isinstance(check, ast.FunctionDef) and check.name == "__post_init__"
        for node in ast.walk(check)
    }
    nodes = [node for node in ast.walk(tree) if node not in checks]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    if any(isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" for node in nodes):
        read |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return read


def test_every_field_is_read_outside_its_own_checks():
    sources = Path(jrl.__file__).parent.rglob("*.py")
    read = set().union(*(attributes_read(ast.parse(source.read_text(encoding="utf-8"))) for source in sources))
    pairs = all_fields(Config, config_classes(TABLES))
    assert len(pairs) > 50
    dead = [f"{cls.__name__}.{field}" for cls, field in pairs if field not in read]
    assert dead == []


def test_a_field_that_only_its_own_checks_mention_is_not_read():
    tree = ast.parse(
        "class A:\n"
        "    def __post_init__(self):\n"
        "        assert self.only_checked\n"
        "def f(a):\n"
        "    a.written = 1\n"
        "    return a.used  # a.commented\n"
    )
    assert attributes_read(tree) == {"used"}


def test_a_field_read_by_a_name_in_a_variable_is_read():
    tree = ast.parse("AXES = ('data', 'fsdp')\ndef f(a):\n    return [getattr(a, axis) for axis in AXES]\n")
    assert attributes_read(tree) == {"data", "fsdp"}
