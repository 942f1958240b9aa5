"""Functions of a notebook's cell or a script as source text, with what they use: how they reach the verifier processes.

The text is written, run once more here, and compared with what it was written from. What would mean something else in
the verifier processes is refused, by name.
"""

from __future__ import annotations

import ast
import builtins
import collections
import copy
import dis
import inspect
import linecache
import re
import symtable
import sys
import tokenize
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jrl.tasks.verifiers.definitions import (
    MISSING,
    container_of,
    globals_of,
    literal_of,
    meaning_of,
    methods_of,
    undecorated,
)
from jrl.tasks.verifiers.same_definition import CHANGEABLE, difference, split_object
from jrl.tasks.verifiers.source import PART_MODULE, PartSource, load_module

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign  # the last binds a lambda
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
BUILT_IN = (None, "builtins", "io", "_io", "_sitebuiltins")  # modules of built-ins; IPython adds some of its own
OF_IPYTHON = re.compile(r"In|Out|_+\d*|_i{0,3}\d*|_[iod]h")  # names of results and cells
SHARED_PART = "shared_{}_of_"  # before the name of a value: one of its parts that stands in several places of it
CHECKED = -1  # the place of a part that is run here to be compared
MOST_CHARACTERS = 4 << 20  # of a part, which goes to the verifier processes with others in one message
IN_A_FILE = "put it into a file and name that in `parts`"


class Carried(NamedTuple):
    """A name of the part, and what it means here."""

    value: Any
    text: str  # that gives the name this meaning; "" for a built-in


def part_of(functions: Mapping[str, Callable[..., Any]]) -> PartSource:
    """Returns verifier functions, from a notebook cell or a script, as a part whose VERIFIERS holds them by name.

    What a function uses comes along: modules are imported again, functions and classes of its own module are copied by
    source, numbers, strings and the like are written out, and so are the values of defaults. Annotations of functions
    are left out where they name more than built-in types.

    Args:
        functions: name in the table -> function (completion, example) -> float or Verdict.

    Raises:
        ValueError: a function has no source (a lambda, or typed on standard input), or uses an object that cannot be
            written as source, or would not be the same there; the message names it.
    """
    carried: dict[str, Carried] = {}
    try:
        for function in functions.values():
            if not isinstance(function, types.FunctionType):
                raise ValueError(f"a verifier of type {type(function).__name__}; it must be a function made by `def`")
            if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
                raise ValueError(f"{function.__name__!r} is a coroutine or a generator; a verifier returns its reward")
            _carry_value(function.__name__, function, function, carried)
        rows = ", ".join(f"{name!r}: {function.__name__}" for name, function in functions.items())
        if "VERIFIERS" in carried:
            raise ValueError("it uses a variable named 'VERIFIERS', as a part calls its table; rename it")
        texts = [one.text for one in carried.values() if one.text]
        if (size := sum(map(len, texts))) > MOST_CHARACTERS:
            name = max(carried, key=lambda name: len(carried[name].text))
            raise ValueError(f"the source of what it uses takes {size / 1e6:.0f} million characters, most of them for "
                             f"{name!r}; put the function into a file that reads that from another")  # fmt: skip
        text = "\n\n".join([*texts, f"VERIFIERS = {{{rows}}}"])
        part = PartSource(f"<verifiers {', '.join(functions)}>", text + "\n")
        _check_same(part, carried)
    except RecursionError as error:
        raise ValueError(f"what the verifier uses nests too deeply to be written as source; {IN_A_FILE}") from error
    return part


def _check_same(part: PartSource, carried: Mapping[str, Carried]) -> None:
    """Runs a part and compares it with what it was written from. Raises ValueError for what is not the same."""
    try:
        module = vars(load_module(part, CHECKED))
    except Exception as error:
        raise ValueError(
            f"the source of what it uses cannot be run again ({type(error).__name__}: {error}); {IN_A_FILE}"
        ) from error
    finally:
        sys.modules.pop(f"{PART_MODULE}{CHECKED}", None)
    there = {name: module[name] for name, one in carried.items() if one.text}
    if (names := split_object((name, carried[name].value, value) for name, value in there.items())) is not None:
        before = re.compile(f"^({SHARED_PART.format('[0-9]+')})+")
        names = dict.fromkeys(before.sub("", name) for name in names)  # as the user wrote them
        raise ValueError(
            f"an object in {' and in '.join(map(repr, names))} stands in several places here, and in the verifier "
            f"processes each would hold a copy, which does not change with the others. Give it a name of its own, or "
            f"{IN_A_FILE}"
        )
    originals = {id(value): carried[name].value for name, value in there.items()}
    for name, value in there.items():
        if literal_of(value) != literal_of(carried[name].value):
            raise ValueError(f"{name!r} has another value once the source that uses it is run again, since that fills "
                             f"it; {IN_A_FILE}")  # fmt: skip
        if value is not carried[name].value and (what := difference(carried[name].value, value, originals)):
            raise ValueError(
                f"{name!r} would not be the same in the verifier processes, where its source is run again: {what}. "
                f"Define it anew with what it uses today, or {IN_A_FILE}"
            )


def _carry_value(name: str, value: Any, user: Any, carried: dict[str, Carried]) -> None:
    """Adds one name that a carried function uses, with what this needs itself.

    Raises: ValueError where it cannot be written, or means something else to a function that was carried before.
    """
    literal = literal_of(value)
    if name in carried:
        known = carried[name].value
        if known is not value and (literal is None or literal != literal_of(known)):
            raise ValueError(
                f"two functions mean different things by {name!r}, which has one meaning in the verifier processes; "
                "rename one of them"
            )
    elif getattr(builtins, name, MISSING) is value and getattr(value, "__module__", None) in BUILT_IN:
        carried[name] = Carried(value, "")
    elif isinstance(value, types.ModuleType):
        carried[name] = Carried(value, f"import {value.__name__} as {name}")
    elif _is_of(user, value) and (value.__name__ == name or globals_of(user).get(value.__name__) is not value):
        _carry_definition(name, value, carried)  # else it is an alias of what has its own name
    elif (statement := _import(name, value)) is not None:
        carried[name] = Carried(value, statement)
    elif (expression := _expression(value, user, carried, _shared_names(value, name, user), name)) is not None:
        carried.setdefault(name, Carried(value, f"{name} = {expression}"))
    else:
        raise ValueError(
            f"the verifier uses {name!r} of type {type(value).__name__}, which cannot be written as source for the "
            f"verifier processes. Build it inside the function, or {IN_A_FILE}"
        )


def _is_of(user: Any, value: Any) -> bool:
    """Whether a value is a function or class of the module that its user is of."""
    return isinstance(undecorated(value), types.FunctionType | type) and value.__module__ == user.__module__


def _shared_names(value: Any, name: str, user: Any) -> dict[int, str]:
    """Returns the names, by identity, of objects that may be changed in place and that a value may have in common with
    others: the first among the globals of its user, and one of its own for what stands in several places of the value.
    """
    named = [(other, one) for other, one in globals_of(user).items() if not OF_IPYTHON.fullmatch(other)]
    times = collections.Counter(id(part) for part in _parts_of(value) if isinstance(part, CHANGEABLE))
    again = [place for place, count in times.items() if count > 1]
    own = {place: SHARED_PART.format(number) + name for number, place in enumerate(again)}
    return own | {id(one): other for other, one in reversed(named) if isinstance(one, CHANGEABLE)}


def _expression(
    value: Any, user: Any, carried: dict[str, Carried], shared: Mapping[int, str], own: str | None = None
) -> str | None:
    """Returns the source of a value, once what it names is carried; None where it cannot be written.

    Args:
      shared: as `_shared_names` returns it: such an object is written by its name, so that it stays one object.
      own: the name that the value is written for.
    """
    if (other := shared.get(id(value), own)) != own:
        _carry_value(other, value, user, carried)
        return other
    if not any(id(part) in shared for part in _parts_of(value)) and (literal := literal_of(value)) is not None:
        return literal
    name = getattr(value, "__name__", None)
    if isinstance(name, str) and getattr(builtins, name, MISSING) is value:
        return name
    if _is_of(user, value) and globals_of(user).get(name) is value:
        _carry_value(name, value, user, carried)
        return name
    if isinstance(name, str) and (statement := _import(name, value)) is not None and statement.startswith("from "):
        _, module, _, attribute, *_ = statement.split()
        return f"__import__({module!r}, fromlist=[{attribute!r}]).{attribute}"
    return container_of(value, lambda part: _expression(part, user, carried, shared))


def _parts_of(value: Any) -> Iterator[Any]:
    """Yields what a tuple, list or dict holds, at any depth; of any other value nothing."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    for part in parts:
        yield part
        yield from _parts_of(part)


def _carry_definition(name: str, thing: Any, carried: dict[str, Carried]) -> None:
    """Adds the source of a function or class: after what defining it needs, before what only calling it needs."""
    definition = undecorated(thing)
    tree, source = _source(definition, name)
    as_found = ast.dump(tree)
    if isinstance(definition, type):
        if "<locals>" in definition.__qualname__:
            raise ValueError(
                f"{name!r} is a class made inside a function, whose variables it may use; define it outside"
            )
        codes = [method.__code__ for method in methods_of(definition)]
    else:
        codes = [definition.__code__]
        _write_defaults(tree, definition)
    for code in codes:
        _check_keeps_nothing(name, code, code.co_freevars)
    _write_annotations(tree, definition)
    if ast.dump(tree) != as_found:
        source = ast.unparse(tree)

    outside = _names_outside(name, tree, definition) | _names_in_texts(tree, definition)
    outside.pop(name, None)
    at_once = dict.fromkeys(node.id for node in _evaluated(tree) if isinstance(node, ast.Name))
    for used in (used for used in at_once if used in outside):
        _carry_value(used, outside[used], definition, carried)
    carried.setdefault(name, Carried(thing, source))  # what it needs may have needed it
    for used in outside:
        _carry_value(used, outside[used], definition, carried)
    for used, submodules in _submodules(tree, carried):
        lines = dict.fromkeys([*carried[used].text.split("\n"), *(f"__import__({module!r})" for module in submodules)])
        carried[used] = Carried(carried[used].value, "\n".join(lines))


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
    except (OSError, TypeError, SyntaxError, ValueError, tokenize.TokenError) as error:
        raise ValueError(
            f"{name!r} cannot be sent to the verifier processes, because its source cannot be found: standard input "
            f"keeps none, nor does a cell that begins with a magic such as %%time; {IN_A_FILE}"
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
    if not isinstance(definition, type):
        return inspect.getsource(definition)
    # A class does not know in which cell it stands. Its methods do; else it is in the last cell that has one.
    for method in methods_of(definition):
        if found := _class_in(method.__code__.co_filename, definition.__name__, method.__code__.co_firstlineno):
            return found
    main = sys.modules["__main__"]
    if definition.__module__ == "__main__" and not hasattr(main, "__file__"):
        cells = [name for name, entry in linecache.cache.items() if len(entry) > 1 and entry[1] is None]
        return next(filter(None, (_class_in(cell, definition.__name__) for cell in reversed(cells))), "")
    return inspect.getsource(definition)


def _class_in(file: str, name: str, line: int | None = None) -> str:
    """Returns the lines of a class in a file or cell: of the one that has a line, else of the last. "" where there is
    none."""
    lines = linecache.getlines(file)
    tree = ast.parse("".join(lines))
    for node in reversed(tree.body) if line is None else ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            first = min(part.lineno for part in [node, *node.decorator_list])
            if line is None or first <= line <= node.end_lineno:
                return "".join(lines[first - 1 : node.end_lineno])
    return ""


def _write_defaults(tree: Definition, function: types.FunctionType) -> None:
    """Writes the values of defaults in place of their expressions, which would be evaluated again, with what names mean
    by then."""
    arguments = tree.value.args if isinstance(tree, ast.Assign) else tree.args
    names = [argument.arg for argument in arguments.kwonlyargs]
    values = [(arguments.defaults, place, value) for place, value in enumerate(function.__defaults__ or ())]
    values += [(arguments.kw_defaults, names.index(name), v) for name, v in (function.__kwdefaults__ or {}).items()]
    for nodes, place, value in values:
        if isinstance(nodes[place], ast.Name) and meaning_of(function, nodes[place].id) is value:
            continue  # the same object, which both may change
        if (literal := literal_of(value)) is not None:
            nodes[place] = ast.parse(literal, mode="eval").body


def _write_annotations(tree: Definition, definition: Any) -> None:
    """Leaves annotations of functions out, where they name more than built-in types. Writes those of classes as text,
    where that is what they are, or where a name of theirs is gone."""
    is_gone = lambda node: isinstance(node, ast.Name) and meaning_of(definition, node.id) is MISSING
    is_more = lambda node: (
        isinstance(node, ast.Name) and meaning_of(definition, node.id) is not getattr(builtins, node.id, MISSING)
    )
    are_texts = _has_annotations_as_text(definition)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.arg)
            and node.annotation
            and (are_texts or any(map(is_more, ast.walk(node.annotation))))
        ):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns:
            if are_texts or any(map(is_more, ast.walk(node.returns))):
                node.returns = None
        elif isinstance(node, ast.ClassDef):
            for field in (one for one in node.body if isinstance(one, ast.AnnAssign)):
                is_text = isinstance(field.annotation, ast.Constant)
                if not is_text and (are_texts or any(map(is_gone, ast.walk(field.annotation)))):
                    field.annotation = ast.Constant(ast.unparse(field.annotation))


def _has_annotations_as_text(definition: Any) -> bool:
    """Whether `from __future__ import annotations` held where a function or class was defined."""
    methods = methods_of(definition) if isinstance(definition, type) else [definition]
    if methods:
        return any(method.__code__.co_flags & annotations.compiler_flag for method in methods)
    kinds = {type(value) for value in vars(definition).get("__annotations__", {}).values()}
    return kinds == {str}


def _names_outside(name: str, tree: Definition, definition: Any) -> dict[str, Any]:
    """Returns the names that a definition reads from outside of it, in their order, and what they mean.

    Raises: ValueError for a name that means nothing.
    """
    bare = copy.deepcopy(tree)
    for variable in _annotated_variables(bare, isinstance(bare, FUNCTIONS)):
        variable.annotation = ast.Constant(None)  # it is not evaluated
    outside, perhaps = set(), set()
    try:
        scopes = [symtable.symtable(ast.unparse(bare), "<definition>", "exec")]
    except SyntaxError as error:
        raise ValueError(f"{name!r} cannot stand outside of the function around it ({error.msg})") from error
    for scope in scopes:
        scopes += scope.get_children()
        for symbol in scope.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or scope.get_type() == "module"):
                outside.add(symbol.get_name())
            elif symbol.is_referenced() and symbol.is_local() and scope.get_type() == "class":
                perhaps.add(symbol.get_name())  # a class looks outside for a name that it has not bound yet
    found = {}
    for node in ast.walk(bare):
        if isinstance(node, ast.Name) and node.id in outside | perhaps:
            value = meaning_of(definition, node.id)
            if value is not MISSING:
                found[node.id] = value
            elif node.id in outside:
                raise ValueError(f"{name!r} uses {node.id!r}, which is not defined there")
    return found


def _annotated_variables(node: ast.AST, in_function: bool) -> Iterator[ast.AnnAssign]:
    """Yields the annotated assignments of functions, and not those of classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.AnnAssign) and in_function:
            yield child
        inside = True if isinstance(child, FUNCTIONS) else False if isinstance(child, ast.ClassDef) else in_function
        yield from _annotated_variables(child, inside)


def _names_in_texts(tree: Definition, definition: Any) -> dict[str, Any]:
    """Returns the modules and what is imported from them that annotations of classes name which are text: dataclasses
    look for ClassVar there."""
    found = {}
    for node in ast.walk(tree):
        for field in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(field, ast.AnnAssign) and isinstance(field.annotation, ast.Constant):
                for name in re.findall(r"\w+", str(field.annotation.value)):
                    value = meaning_of(definition, name)
                    if isinstance(value, types.ModuleType) or _import(name, value) is not None:
                        found[name] = value
    return found


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what is evaluated where a definition stands: of functions all but their bodies."""
    yield node
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not (isinstance(node, FUNCTIONS) and field == "body"):
                yield from _evaluated(child)


def _check_keeps_nothing(name: str, code: types.CodeType, free: Sequence[str]) -> None:
    """Raises ValueError where a function assigns variables of outside: every process would have its own.

    Args:
      free: those of the function around it.
    """
    for one in dis.get_instructions(code):
        is_global = one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
        if is_global or (one.opname in ("STORE_DEREF", "DELETE_DEREF") and one.argval in free):
            what = "the global" if is_global else "a variable of the function around it,"
            raise ValueError(
                f"{name!r} assigns {what} {one.argval!r}, of which every verifier process would have its own; a "
                "verifier keeps nothing between calls"
            )
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            _check_keeps_nothing(name, inner, free)


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


def _import(name: str, value: Any) -> str | None:
    """Returns the statement that imports an object of a module under a name; None where there is none."""
    place = getattr(value, "__module__", None)
    module = sys.modules.get(place) if isinstance(place, str) else None
    if module is None or module.__name__ == "__main__":
        return None
    for attribute in (getattr(value, "__qualname__", name), name):  # some objects only know their class
        if isinstance(attribute, str) and getattr(module, attribute, MISSING) is value:
            return f"from {module.__name__} import {attribute} as {name}"
    return None
