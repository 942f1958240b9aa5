"""Converts functions of a notebook cell or a script, with their dependencies, to source for the verifier processes.

The source is generated, run again here, and compared with the original objects. An object that would differ in the
verifier processes raises an error that names it.
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
BUILT_IN = (None, "builtins", "io", "_io", "_sitebuiltins")  # modules of built-ins, to which IPython adds more
OF_IPYTHON = re.compile(r"In|Out|_+\d*|_i{0,3}\d*|_[iod]h")  # names of results and cells
SHARED_PART = "shared_{}_of_"  # prefix of a value's name: an object that occurs several times in the value
CHECKED = -1  # the index of a part that is run here for comparison
MOST_CHARACTERS = 4 << 20  # of a part; all parts are sent to the verifier processes in one message
IN_A_FILE = "put it into a file and name that in `parts`"


class Carried(NamedTuple):
    """The value of a name in the part, and the source that defines it."""

    value: Any
    text: str  # source that defines the name; "" for a built-in


def part_of(functions: Mapping[str, Callable[..., Any]]) -> PartSource:
    """Returns verifier functions from a notebook cell or a script as a part with a VERIFIERS table that lists them.

    The part includes what a function uses: modules are imported again, functions and classes of its module are copied
    as source, and numbers, strings and the like are written as literals, as are default values. Annotations of
    functions are dropped if they name more than built-in types.

    Args:
        functions: name in the table -> function (completion, example) -> float or Verdict.

    Raises:
        ValueError: a function has no source (a lambda, or typed on standard input), or uses an object that cannot be
            written as source or would differ in the verifier processes; the message names it.
    """
    carried: dict[str, Carried] = {}
    try:
        for function in functions.values():
            if not isinstance(function, types.FunctionType):
                raise ValueError(f"a verifier of type {type(function).__name__}; it must be a function made by `def`")
            if function.__name__ == "<lambda>":
                raise ValueError("a lambda has no name that a configuration could give; define the verifier by `def`")
            if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
                raise ValueError(f"{function.__name__!r} is a coroutine or a generator; a verifier returns its reward")
            _carry_value(function.__name__, function, function, carried)
        rows = ", ".join(f"{name!r}: {function.__name__}" for name, function in functions.items())
        if "VERIFIERS" in carried:
            raise ValueError("it uses a variable named 'VERIFIERS', as a part calls its table; rename it")
        texts = [entry.text for entry in carried.values() if entry.text]
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
    """Runs a part and compares it with the original objects. Raises ValueError if one differs."""
    try:
        module = vars(load_module(part, CHECKED))
    except Exception as error:
        raise ValueError(
            f"the source of what it uses cannot be run again ({type(error).__name__}: {error}); {IN_A_FILE}"
        ) from error
    finally:
        sys.modules.pop(f"{PART_MODULE}{CHECKED}", None)
    there = {name: module[name] for name, entry in carried.items() if entry.text}
    if (names := split_object((name, carried[name].value, value) for name, value in there.items())) is not None:
        prefix = re.compile(f"^({SHARED_PART.format('[0-9]+')})+")
        names = dict.fromkeys(prefix.sub("", name) for name in names)  # the user's names
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
    """Adds one name that a carried function uses, with its dependencies.

    Raises: ValueError if it cannot be written as source, or has another meaning in a function that was carried before.
    """
    literal = literal_of(value)
    if name in carried:
        other = carried[name].value
        if other is not value and (literal is None or literal != literal_of(other)):
            raise ValueError(
                f"two functions mean different things by {name!r}, which has one meaning in the verifier processes; "
                "rename one of them"
            )
    elif getattr(builtins, name, MISSING) is value and getattr(value, "__module__", None) in BUILT_IN:
        carried[name] = Carried(value, "")
    elif isinstance(value, types.ModuleType):
        carried[name] = Carried(value, f"import {value.__name__} as {name}")
    elif _is_of(user, value) and (value.__name__ == name or globals_of(user).get(value.__name__) is not value):
        _carry_definition(name, value, carried)  # otherwise it is an alias of a definition under another name
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
    """Returns whether a value is a function or class of the same module as its user."""
    return isinstance(undecorated(value), types.FunctionType | type) and value.__module__ == user.__module__


def _shared_names(value: Any, name: str, user: Any) -> dict[int, str]:
    """Returns {id: name} of mutable objects that a value may share: the first global of its user that is the object, or
    a generated name for an object that occurs several times in the value."""
    named = [(other, item) for other, item in globals_of(user).items() if not OF_IPYTHON.fullmatch(other)]
    counts = collections.Counter(id(part) for part in _parts_of(value) if isinstance(part, CHANGEABLE))
    repeated = [identity for identity, count in counts.items() if count > 1]
    generated = {identity: SHARED_PART.format(number) + name for number, identity in enumerate(repeated)}
    return generated | {id(item): other for other, item in reversed(named) if isinstance(item, CHANGEABLE)}


def _expression(
    value: Any, user: Any, carried: dict[str, Carried], shared: Mapping[int, str], target: str | None = None
) -> str | None:
    """Returns the source of a value, after carrying the names in it; None if it cannot be written.

    Args:
      shared: the result of `_shared_names`: such an object is written as its name, so that it stays one object.
      target: the name that the value is assigned to.
    """
    if (other := shared.get(id(value), target)) != target:
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
    """Yields the elements of a tuple, list or dict at any depth; nothing for any other value."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    for part in parts:
        yield part
        yield from _parts_of(part)


def _carry_definition(name: str, thing: Any, carried: dict[str, Carried]) -> None:
    """Adds the source of a function or class, after what its definition needs and before what only its calls need."""
    definition = undecorated(thing)
    tree, source = _source(definition, name)
    original = ast.dump(tree)
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
    if ast.dump(tree) != original:
        source = ast.unparse(tree)

    outside = _names_outside(name, tree, definition) | _names_in_texts(tree, definition)
    outside.pop(name, None)
    at_once = dict.fromkeys(node.id for node in _evaluated(tree) if isinstance(node, ast.Name))
    for used in (used for used in at_once if used in outside):
        _carry_value(used, outside[used], definition, carried)
    carried.setdefault(name, Carried(thing, source))  # a dependency may have added it already
    for used in outside:
        _carry_value(used, outside[used], definition, carried)
    for used, submodules in _submodules(tree, carried):
        lines = dict.fromkeys([*carried[used].text.split("\n"), *(f"__import__({module!r})" for module in submodules)])
        carried[used] = Carried(carried[used].value, "\n".join(lines))


def _source(definition: Any, name: str) -> tuple[Definition, str]:
    """Returns the statement that defines a function or class, and its text without indentation."""
    try:
        source = source_lines(definition)
        if source[:1].isspace():
            (block,) = ast.parse(f"if True:\n{source}").body
            (tree,) = block.body
            source = ast.unparse(tree)  # dedenting its lines would change multi-line strings
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


def source_lines(definition: Any) -> str:
    """Returns the source lines of a function or class. Raises the exceptions of `inspect.getsource`."""
    if not isinstance(definition, type):
        return inspect.getsource(definition)
    # A class does not record its cell, but its methods do. Without methods, take the last cell that defines the name.
    for method in methods_of(definition):
        if lines := _class_in(method.__code__.co_filename, definition.__name__, method.__code__.co_firstlineno):
            return lines
    main = sys.modules["__main__"]
    if definition.__module__ == "__main__" and not hasattr(main, "__file__"):
        cells = [name for name, entry in linecache.cache.items() if len(entry) > 1 and entry[1] is None]
        return next(filter(None, (_class_in(cell, definition.__name__) for cell in reversed(cells))), "")
    return inspect.getsource(definition)


def _class_in(file: str, name: str, line: int | None = None) -> str:
    """Returns the source lines of a class in a file or cell: the class `name` that contains `line`, or the last one at
    the top level if `line` is None; "" if there is none."""
    lines = linecache.getlines(file)
    tree = ast.parse("".join(lines))
    for node in reversed(tree.body) if line is None else ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            first = min(part.lineno for part in [node, *node.decorator_list])
            if line is None or first <= line <= node.end_lineno:
                return "".join(lines[first - 1 : node.end_lineno])
    return ""


def _write_defaults(tree: Definition, function: types.FunctionType) -> None:
    """Replaces the expressions of defaults by their values. The expressions would be evaluated again, when their names
    may have other values."""
    arguments = tree.value.args if isinstance(tree, ast.Assign) else tree.args
    names = [argument.arg for argument in arguments.kwonlyargs]
    values = [(arguments.defaults, i, value) for i, value in enumerate(function.__defaults__ or ())]
    values += [(arguments.kw_defaults, names.index(name), v) for name, v in (function.__kwdefaults__ or {}).items()]
    for nodes, i, value in values:
        if isinstance(nodes[i], ast.Name) and meaning_of(function, nodes[i].id) is value:
            continue  # the same object, which both may modify
        if (literal := literal_of(value)) is not None:
            nodes[i] = ast.parse(literal, mode="eval").body


def _write_annotations(tree: Definition, definition: Any) -> None:
    """Drops annotations of functions if they name more than built-in types, or if `from __future__ import annotations`
    was in effect. Writes those of classes as strings if it was, or if a name in them is no longer defined."""
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
            for field in (statement for statement in node.body if isinstance(statement, ast.AnnAssign)):
                is_text = isinstance(field.annotation, ast.Constant)
                if not is_text and (are_texts or any(map(is_gone, ast.walk(field.annotation)))):
                    field.annotation = ast.Constant(ast.unparse(field.annotation))


def _has_annotations_as_text(definition: Any) -> bool:
    """Returns whether `from __future__ import annotations` was in effect where a function or class was defined."""
    methods = methods_of(definition) if isinstance(definition, type) else [definition]
    if methods:
        return any(method.__code__.co_flags & annotations.compiler_flag for method in methods)
    kinds = {type(value) for value in vars(definition).get("__annotations__", {}).values()}
    return kinds == {str}


def _names_outside(name: str, tree: Definition, definition: Any) -> dict[str, Any]:
    """Returns the names that a definition reads from the enclosing scopes, in order, with their values.

    Raises: ValueError for an undefined name.
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
            # symtable takes a function named "top" for the module, whose variables are all global and local.
            is_global = symbol.is_global() and not symbol.is_local()
            if symbol.is_referenced() and (is_global or scope.get_type() == "module"):
                outside.add(symbol.get_name())
            elif symbol.is_referenced() and symbol.is_local() and scope.get_type() == "class":
                perhaps.add(symbol.get_name())  # a class body reads a name from outside until it binds it
    values = {}
    for node in ast.walk(bare):
        if isinstance(node, ast.Name) and node.id in outside | perhaps:
            value = meaning_of(definition, node.id)
            if value is not MISSING:
                values[node.id] = value
            elif node.id in outside:
                raise ValueError(f"{name!r} uses {node.id!r}, which is not defined there")
    return values


def _annotated_variables(node: ast.AST, in_function: bool) -> Iterator[ast.AnnAssign]:
    """Yields the annotated assignments in functions, but not those in classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.AnnAssign) and in_function:
            yield child
        inside = True if isinstance(child, FUNCTIONS) else False if isinstance(child, ast.ClassDef) else in_function
        yield from _annotated_variables(child, inside)


def _names_in_texts(tree: Definition, definition: Any) -> dict[str, Any]:
    """Returns the modules and imported objects named in string annotations of classes. Dataclasses look up ClassVar
    there."""
    values = {}
    for node in ast.walk(tree):
        for field in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(field, ast.AnnAssign) and isinstance(field.annotation, ast.Constant):
                for name in re.findall(r"\w+", str(field.annotation.value)):
                    value = meaning_of(definition, name)
                    if isinstance(value, types.ModuleType) or _import(name, value) is not None:
                        values[name] = value
    return values


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that are evaluated when a definition is executed: everything except function bodies."""
    yield node
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not (isinstance(node, FUNCTIONS) and field == "body"):
                yield from _evaluated(child)


def _check_keeps_nothing(name: str, code: types.CodeType, free: Sequence[str]) -> None:
    """Raises ValueError if a function assigns variables of an enclosing scope: every process would have a copy.

    Args:
      free: the variables of the enclosing function.
    """
    for instruction in dis.get_instructions(code):
        is_global = instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
        if is_global or (instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in free):
            what = "the global" if is_global else "a variable of the function around it,"
            raise ValueError(
                f"{name!r} assigns {what} {instruction.argval!r}, of which every verifier process would have its own; "
                "a verifier keeps nothing between calls"
            )
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            _check_keeps_nothing(name, inner, free)


def _submodules(tree: Definition, carried: Mapping[str, Carried]) -> Iterator[tuple[str, list[str]]]:
    """Yields (name, submodules) for the submodules that are used as attributes of carried modules: `xml.etree` after
    `import xml`."""
    for node in ast.walk(tree):
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        if not attributes or not isinstance(node, ast.Name) or node.id not in carried:
            continue
        module, submodules = carried[node.id].value, []
        for attribute in attributes if isinstance(module, types.ModuleType) else ():
            inner = getattr(module, attribute, None)
            if not isinstance(inner, types.ModuleType) or inner.__name__ != f"{module.__name__}.{attribute}":
                break
            module = inner
            submodules.append(module.__name__)
        if submodules:
            yield node.id, submodules


def _import(name: str, value: Any) -> str | None:
    """Returns the statement that imports an object from its module as `name`; None if there is none."""
    module_name = getattr(value, "__module__", None)
    module = sys.modules.get(module_name) if isinstance(module_name, str) else None
    if module is None or module.__name__ == "__main__":
        return None
    for attribute in (getattr(value, "__qualname__", name), name):  # some objects only know their class
        if isinstance(attribute, str) and getattr(module, attribute, MISSING) is value:
            return f"from {module.__name__} import {attribute} as {name}"
    return None
