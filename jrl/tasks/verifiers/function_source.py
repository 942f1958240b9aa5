"""Functions of a notebook's cell or a script as source text, with what they use: how they reach the verifier processes.

The text is run there once, when every name in it means what it means here today. What would mean something else
then is refused, by name.
"""

from __future__ import annotations

import ast
import builtins
import cmath
import copy
import inspect
import linecache
import math
import re
import symtable
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jrl.tasks.verifiers.source import PartSource

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign  # the last binds a lambda
MISSING = object()


class Carried(NamedTuple):
    """A name of the part, and what it means here."""

    value: Any
    text: str  # that gives the name this meaning; "" for a built-in


def part_of(functions: Mapping[str, Callable[..., Any]]) -> PartSource:
    """Returns verifier functions, from a notebook cell or a script, as a part whose VERIFIERS holds them by name.

    What a function uses comes along: modules are imported again, functions and classes of its own module are copied by
    source, numbers, strings and the like are written out, and so are the values of defaults.

    Args:
        functions: name in the table -> function (completion, example) -> float or Verdict.

    Raises:
        ValueError: a function has no source (a lambda, or typed on standard input), or uses an object that cannot be
            written as source, or two of them mean different things by a name; the message names it.
    """
    carried: dict[str, Carried] = {}
    for function in functions.values():
        if not isinstance(function, types.FunctionType):
            raise ValueError(f"a verifier of type {type(function).__name__}; it must be a function defined with `def`")
        _carry_value(function.__name__, function, function, carried)
    rows = ", ".join(f"{name!r}: {function.__name__}" for name, function in functions.items())
    texts = [one.text for one in carried.values() if one.text]
    lines = ["from __future__ import annotations", *texts, f"VERIFIERS = {{{rows}}}"]
    return PartSource(f"<verifiers {', '.join(functions)}>", "\n\n".join(lines) + "\n")


def _carry_value(name: str, value: Any, user: Any, carried: dict[str, Carried]) -> None:
    """Adds one name that a carried function uses, after what this needs itself.

    Raises: ValueError where it cannot be written, or means something else to a function that was carried before.
    """
    literal = _literal(value)
    if name in carried:
        known = carried[name].value
        if known is not value and (literal is None or literal != _literal(known)):
            raise ValueError(
                f"two functions mean different things by {name!r}, which has one meaning in the verifier processes; "
                "rename one of them"
            )
    elif getattr(builtins, name, MISSING) is value:
        carried[name] = Carried(value, "")
    elif isinstance(value, types.ModuleType):
        carried[name] = Carried(value, f"import {value.__name__} as {name}")
    elif isinstance(value, re.Pattern):
        carried[name] = Carried(value, f"{name} = __import__('re').compile({value.pattern!r}, {value.flags})")
    elif isinstance(_undecorated(value), types.FunctionType | type) and value.__module__ == user.__module__:
        _carry_definition(name, value, carried)
    elif (statement := _import(name, value)) is not None:
        carried[name] = Carried(value, statement)
    elif literal is not None:
        carried[name] = Carried(value, f"{name} = {literal}")
    else:
        raise ValueError(
            f"the verifier uses {name!r} of type {type(value).__name__}, which cannot be written as source for the "
            "verifier processes. Build it inside the function, or put both into a file and name that in `parts`"
        )


def _carry_definition(name: str, thing: Any, carried: dict[str, Carried]) -> None:
    """Adds the source of a function or class, after what it uses."""
    definition = _undecorated(thing)
    tree, source = _source(definition, name)
    if isinstance(definition, type) and "<locals>" in definition.__qualname__:
        raise ValueError(f"{name!r} is a class of inside a function, whose variables it may use; define it outside")
    if isinstance(definition, types.FunctionType):
        if attributes := set(vars(definition)) - {"__wrapped__"}:
            raise ValueError(
                f"{name!r} has the attribute {min(attributes)!r}, which does not come along with its source"
            )
        if _write_defaults(tree, definition):
            source = ast.unparse(tree)
    carried[name] = Carried(thing, "")  # it may call itself
    for used, is_needed in _names_used(tree, name):
        value = _meaning(definition, used)
        if value is MISSING and is_needed:
            raise ValueError(f"{name!r} uses {used!r}, which is not defined there")
        is_simple = isinstance(value, types.ModuleType) or (_import(used, value) or _literal(value)) is not None
        if value is not MISSING and (is_needed or is_simple):
            _carry_value(used, value, definition, carried)
    for used, submodules in _submodules(tree, carried):
        lines = dict.fromkeys([carried[used].text, *(f"__import__({module!r})" for module in submodules)])
        carried[used] = Carried(carried[used].value, "\n".join(lines))
    del carried[name]  # to its place after what it uses
    carried[name] = Carried(thing, source)


def _undecorated(thing: Any) -> Any:
    """Returns the function that decorators have wrapped, or `thing`."""
    while not isinstance(thing, type) and "__wrapped__" in getattr(thing, "__dict__", ()):
        thing = thing.__dict__["__wrapped__"]
    return thing


def _source(definition: Any, name: str) -> tuple[Definition, str]:
    """Returns the statement that defines a function or class, and its text without indentation."""
    try:
        source = _lines(definition)
        if source[:1].isspace():
            (block,) = ast.parse(f"if True:\n{source}").body
            (tree,) = block.body
            source = ast.unparse(tree)  # cutting blanks off its lines would change strings of several lines
        else:
            (tree,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        raise ValueError(
            f"{name!r} cannot be sent to the verifier processes, because its source cannot be found (standard input "
            "keeps none, and a class of a cell is found by its methods). Put it into a file and name that in `parts`"
        ) from error
    is_lambda = isinstance(tree, ast.Assign) and isinstance(tree.value, ast.Lambda)
    target = tree.targets[0] if is_lambda and len(tree.targets) == 1 else None
    if getattr(tree, "name", None) != name and not (isinstance(target, ast.Name) and target.id == name):
        raise ValueError(
            f"{name!r} must be defined by a `def` of that name of its own, not by a lambda or under another"
        )
    return tree, source.rstrip()


def _lines(definition: Any) -> str:
    """Returns the lines of a function or class as they stand. Raises: what `inspect.getsource` does."""
    # A class does not know in which cell it stands; its methods do.
    for method in _methods(definition) if isinstance(definition, type) else ():
        lines, at = linecache.getlines(method.__code__.co_filename), method.__code__.co_firstlineno
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, ast.ClassDef) and node.name == definition.__name__:
                first = min(part.lineno for part in [node, *node.decorator_list])
                if first <= at <= node.end_lineno:
                    return "".join(lines[first - 1 : node.end_lineno])
    return inspect.getsource(definition)


def _methods(definition: type) -> list[types.FunctionType]:
    """Returns the functions whose code stands in a class, and not those that it was given."""
    own = [method for method in vars(definition).values() if isinstance(method, types.FunctionType)]
    return [method for method in own if method.__code__.co_qualname.startswith(f"{definition.__qualname__}.")]


def _write_defaults(tree: Definition, function: types.FunctionType) -> bool:
    """Writes the values of defaults in place of their expressions, and returns whether any was.

    An expression was evaluated when the function was defined, and would be again, with what its names mean by then.
    Raises: ValueError where a name means something else today and the value cannot be written.
    """
    arguments = tree.value.args if isinstance(tree, ast.Assign) else tree.args
    by_place, by_name = function.__defaults__ or (), function.__kwdefaults__ or {}
    places = [(arguments.defaults, place, value) for place, value in enumerate(by_place)]
    names = [argument.arg for argument in arguments.kwonlyargs]
    places += [(arguments.kw_defaults, names.index(name), value) for name, value in by_name.items()]
    changed = False
    for nodes, place, value in places:
        literal = _literal(value)
        if literal is None:
            if isinstance(nodes[place], ast.Name) and _meaning(function, nodes[place].id) is not value:
                raise ValueError(
                    f"{function.__name__!r} has a default of type {type(value).__name__}, and {nodes[place].id!r} "
                    "means something else since; build it inside the function"
                )
            continue
        written = ast.parse(literal, mode="eval").body
        if ast.dump(written) != ast.dump(nodes[place]):
            nodes[place], changed = written, True
    return changed


def _names_used(tree: Definition, name: str) -> Iterator[tuple[str, bool]]:
    """Yields the names that a definition reads from outside of it, in their order, and whether it cannot do without.

    Annotations are not evaluated; those of a class may still tell it something (dataclasses look for ClassVar), and
    a class looks outside for a name of its own that it has not bound yet.
    Raises: ValueError where it assigns a variable of outside: every process would have its own.
    """
    tree = copy.deepcopy(tree)
    for_classes: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            annotations = [each.annotation for each in node.body if isinstance(each, ast.AnnAssign)]
            for_classes |= {each.id for one in annotations for each in ast.walk(one) if isinstance(each, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
    needed: set[str] = set()
    for scope in _scopes(tree, name):
        for symbol in scope.get_symbols():
            if symbol.is_declared_global() and symbol.is_assigned():
                raise ValueError(_keeps_nothing(name, f"the global {symbol.get_name()!r}"))
            if symbol.is_referenced() and (symbol.is_global() or scope.get_type() == "module"):
                needed.add(symbol.get_name())
            elif symbol.is_referenced() and symbol.is_local() and scope.get_type() == "class":
                for_classes.add(symbol.get_name())
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    yield from ((used, True) for used in dict.fromkeys(names) if used in needed and used != name)
    yield from ((used, False) for used in sorted(for_classes - needed - {name}))


def _scopes(tree: Definition, name: str) -> Iterator[symtable.SymbolTable]:
    try:
        scopes = [symtable.symtable(ast.unparse(tree), name, "exec")]
    except SyntaxError as error:  # of a definition that compiled where it stood: a variable of around it
        raise ValueError(_keeps_nothing(name, "a variable of the function around it")) from error
    for scope in scopes:
        scopes += scope.get_children()
        yield scope


def _keeps_nothing(name: str, variable: str) -> str:
    return (
        f"{name!r} assigns {variable}, of which every verifier process would have its own; a verifier keeps nothing "
        "between calls"
    )


def _submodules(tree: Definition, carried: Mapping[str, Carried]) -> Iterator[tuple[str, list[str]]]:
    """Yields the modules that attributes lead to, of each module that is carried: `xml.etree` after `import xml`."""
    for node in ast.walk(tree):
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        if not attributes or not isinstance(node, ast.Name) or node.id not in carried:
            continue
        module, found = carried[node.id].value, []
        for attribute in attributes if isinstance(module, types.ModuleType) else ():
            inner = getattr(module, attribute, None)
            if not isinstance(inner, types.ModuleType) or inner.__name__ != f"{module.__name__}.{attribute}":
                break
            module = inner
            found.append(module.__name__)
        if found:
            yield node.id, found


def _meaning(definition: Any, name: str) -> Any:
    """Returns what a name of around `definition` means, or MISSING."""
    if isinstance(definition, types.FunctionType):
        if name in definition.__code__.co_freevars:
            return definition.__closure__[definition.__code__.co_freevars.index(name)].cell_contents
        space = definition.__globals__
    else:
        spaces = [method.__globals__ for method in _methods(definition)]
        space = spaces[0] if spaces else vars(sys.modules[definition.__module__])
    return space[name] if name in space else getattr(builtins, name, MISSING)


def _import(name: str, value: Any) -> str | None:
    """Returns the statement that imports an object of a module under a name; None where there is none."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None or module.__name__ == "__main__":
        return None
    for attribute in (getattr(value, "__qualname__", name), name):  # some objects only know their class
        if getattr(module, attribute, MISSING) is value:
            return f"from {module.__name__} import {attribute} as {name}"
    return None


def _literal(value: Any) -> str | None:
    """Returns the source of a number, a string or the like, the same in every process; None for anything else."""
    kind = type(value)
    if kind is float and not math.isfinite(value):
        return f"float({str(value)!r})"
    if value is None or kind in (bool, int, float, str, bytes) or (kind is complex and cmath.isfinite(value)):
        return repr(value)
    if kind not in (tuple, list, set, frozenset, dict):
        return None
    entries = value.items() if kind is dict else [(item,) for item in value]
    items = [[_literal(part) for part in entry] for entry in entries]
    if any(part is None for item in items for part in item):
        return None
    texts = [": ".join(item) for item in items]
    if kind in (set, frozenset):
        return f"{kind.__name__}([{', '.join(sorted(texts))}])"
    left, right = {tuple: "()", list: "[]", dict: "{}"}[kind]
    return f"{left}{', '.join(texts)}{',' * (kind is tuple and len(texts) == 1)}{right}"
