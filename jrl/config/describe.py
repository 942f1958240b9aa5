"""Help text for every configurable field, generated from the config classes and their comments."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import textwrap
import tokenize
from collections.abc import Mapping
from typing import Any

from jrl.config.errors import ConfigError, nearest
from jrl.config.schema import Field, Tables, fields_of, schema_of
from jrl.config.typed import show_resolved, type_name


def describe(root: type, tables: Tables) -> str:
    """Returns one section of text for each config class: its fields with type, default and comment.

    The root and the classes that are not rows of a table come first, then the rows of each table under its name.
    """
    schema = schema_of(root, tables)
    row_tables = {cls: table for table, rows in tables.items() for cls in rows.values()}
    fixed = [cls for cls in schema.sections.values() if cls not in row_tables]
    parts = [_section(cls, tables) for cls in fixed]
    for table, rows in tables.items():
        parts.append(_heading(table, rows))
        parts.extend(_section(cls, tables) for cls in rows.values())
    return "\n".join(parts)


def describe_section(root: type, tables: Tables, name: str) -> str:
    """Returns the help text of one config class, or of a table and its rows.

    Raises: ConfigError with the nearest name if `name` is neither.
    """
    sections = schema_of(root, tables).sections
    if name in sections:
        return _section(sections[name], tables)
    if name in tables:
        return "\n".join([_heading(name, tables[name]), *(_section(cls, tables) for cls in tables[name].values())])
    guess = nearest(name, [*sections, *tables])
    hint = f"; did you mean {guess}?" if guess else "."
    raise ConfigError("help config", f"there is no section {name!r}{hint} `jrl help config` prints them all")


@functools.cache
def field_docs(cls: type) -> Mapping[str, str]:
    """Returns field name -> its comment in the source: the trailing one, else the comment lines above the field.

    Inherited fields are included. A class whose source cannot be read adds none of its own.
    """
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[1:]):
        docs.update(field_docs(base) if base is not object else {})
    try:
        source = textwrap.dedent(inspect.getsource(cls))
        tree = ast.parse(source)
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return docs
    comments = {token.start[0]: token.string.lstrip("# ").strip() for token in tokens if token.type == tokenize.COMMENT}
    own_line = {token.start[0] for token in tokens if token.type == tokenize.COMMENT and token.line.lstrip()[0] == "#"}
    for node in tree.body[0].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            trailing = [comments[line] for line in range(node.lineno, node.end_lineno + 1) if line in comments]
            if trailing or node.lineno - 1 in own_line:
                docs[node.target.id] = trailing[-1] if trailing else _block_above(node.lineno, comments, own_line)
    return docs


def _block_above(line: int, comments: Mapping[int, str], own_line: set[int]) -> str:
    """Returns the comment lines directly above a line, joined by spaces."""
    first = line
    while first - 1 in own_line:
        first -= 1
    return " ".join(comments[number] for number in range(first, line))


def _heading(table: str, rows: Mapping[str, type]) -> str:
    return f"# {table}: " + ", ".join(f"@{name}()" for name in rows) + "\n"


def _section(cls: type, tables: Tables) -> str:
    docs = field_docs(cls)
    heading = inspect.getdoc(cls) or ""
    generated = heading.startswith(f"{cls.__name__}(")  # the docstring that dataclasses generate
    sentence = " ".join(heading.split("\n\n")[0].split()).split(". ")[0]
    first = "" if generated or not sentence else f"  {sentence}"
    rows = [(name, _kind(field, tables), docs.get(name, "")) for name, field in fields_of(cls).items()]
    width = max((len(f"{name}: {kind}") for name, kind, _ in rows), default=0)
    lines = [f"  {f'{name}: {kind}':<{min(width, 56)}}  {doc}".rstrip() for name, kind, doc in rows]
    return "\n".join([f"{cls.__name__}{first}", *lines]) + "\n"


def _kind(field: Field, tables: Tables) -> str:
    rows: Mapping[str, type] = {} if field.table is None else tables[field.table]
    kind = f"a row of {field.table}" if len(rows) > 3 and field.hint is Any else type_name(field.hint, rows)
    return kind if field.default is None else f"{kind} = {show_resolved(field.default())}"
