"""Reads the TPU compiler's cycle estimates for every instruction of a scheduled program.

The compiler can dump the program into a folder (`*after_codegen.txt`), with `"estimated_cycles"` for each instruction.
A loop costs its body times its trip count. A condition costs one of its branches; both the most expensive one and the
expected mix are computed. The estimates leave out collectives and Pallas kernels: see `jrl.tools.plan.counted`. Work on
the sparse core, such as a scatter, overlaps with the rest and is not counted. All functions here read text as libtpu
0.0.42 writes it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

ITEMSIZE = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4,
            "s64": 8, "u64": 8, "f64": 8, "s4": 0.5, "u4": 0.5}  # fmt: skip
# Passes of the bfloat16 matrix unit for operands of these dtypes at precision 'highest'.
PASSES = {("f32", "f32"): 6, ("bf16", "f32"): 3}

SPARSE_CORE = 'async_execution_thread="sparsecore"'  # of an async-start that overlaps with the core: not counted

_ARRAY = re.compile(r"\b([a-z]+\d+|pred)\[([\d,]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(r"(?:calls|body|to_apply)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRUE_FALSE = re.compile(r"(true|false)_computation=%?([\w.-]+)")


class Shape(NamedTuple):
    """One array: dtype, dimensions, and their order in memory, the fastest-varying first."""

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        return self.size * ITEMSIZE.get(self.dtype, 0)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    result: str  # the text of its type
    op: str  # copy, fusion, while, ...
    arguments: str  # the text in parentheses
    attributes: str  # the text after the parentheses

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple(re.findall(r"%([\w.-]+)", self.arguments))

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        return shapes_of(self.result)

    @property
    def cycles(self) -> int:
        match = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(match[1]) if match else 0

    @property
    def op_name(self) -> str:
        """The instruction's place in the traced program; "" if it has none."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def called(self) -> str | None:
        """The computation that a fusion, a loop or an asynchronous instruction runs."""
        match = _CALLED.search(self.attributes)
        return match[1] if match else None

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations that a condition chooses from; that of index 0, or of false, comes first."""
        if match := _BRANCHES.search(self.attributes):
            return tuple(name.strip().lstrip("%") for name in match[1].split(","))
        named = dict(_TRUE_FALSE.findall(self.attributes))
        return (named["false"], named["true"]) if named else ()


@dataclasses.dataclass(frozen=True)
class HloModule:
    """The computations of a compiled program by name."""

    computations: Mapping[str, Mapping[str, Instruction]]
    entry: str


@dataclasses.dataclass(frozen=True)
class Frequency:
    """What the text does not define, by the name of the scope (`jax.named_scope`) around a loop or a condition."""

    trips: Mapping[str, float] = dataclasses.field(default_factory=dict)  # trip counts of data-dependent loops
    taken: Mapping[str, float] = dataclasses.field(default_factory=dict)  # how often a condition is true, 0 to 1

    def trips_of(self, instruction: Instruction) -> float | None:
        return self.trips.get(scope_of(instruction))


class ExecutionCount(NamedTuple):
    """An instruction, and how often a program runs it."""

    computation: str
    instruction: Instruction
    dearest: float  # if every condition takes its most expensive branch
    likely: float  # with the expected frequency of every branch
    loops: tuple[Instruction, ...]  # the loops around it, the outermost first


def shapes_of(text: str) -> tuple[Shape, ...]:
    """Returns the arrays in the text of a type; of a tuple all of them."""
    ints = lambda numbers: tuple(int(n) for n in numbers.split(",") if n.strip().isdigit())
    return tuple(
        Shape(dtype, ints(dims), ints((layout or "").split(":")[0])) for dtype, dims, layout in _ARRAY.findall(text)
    )


def parse(text: str) -> HloModule:
    """Returns the computations in a compiled program's text. Raises ValueError if it has no entry."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, body = None, None
    for line in _lines(text):
        if line == "}" or line.startswith("}, execution_thread="):  # of another core
            body = None
        elif body is None and line.endswith("{") and (line.startswith("%") or line.startswith("ENTRY")):
            name = line.removeprefix("ENTRY ").split(" ", 1)[0].lstrip("%")
            body = computations[name] = {}
            if line.startswith("ENTRY"):
                entry = name
        elif body is not None and (instruction := parse_instruction(line)) is not None:
            body[instruction.name] = instruction
    if entry is None:
        raise ValueError("the text of a compiled program has no line that begins with ENTRY")
    return HloModule(computations, entry)


def _lines(text: str) -> Iterator[str]:
    """Yields the lines of a program; the several lines of a kernel's metadata are joined to one."""
    pending = ""
    for line in text.splitlines():
        if pending and (not line or line[0] not in " %E}" or line.startswith("}}")):
            pending += line
            continue
        if pending:
            yield pending
        pending = line
    yield pending


def parse_instruction(line: str) -> Instruction | None:
    """Returns the instruction on a line; None if there is none."""
    name, equals, rest = line.strip().removeprefix("ROOT ").partition(" = ")
    if not equals or not name.startswith("%"):
        return None
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    result, rest = rest[:end], rest[end:].strip()
    op, parenthesis, _ = rest.partition("(")
    if not parenthesis:
        return None
    close = _closing(rest, len(op))
    return Instruction(name.lstrip("%"), result, op, rest[len(op) + 1 : close], rest[close + 1 :])


def known_trips(program: HloModule, loop: Instruction) -> int | None:
    """Returns the trip count of a loop that the compiler annotates or that counts up to a constant; None if it depends
    on the data."""
    if match := re.search(r"known_trip_count\W+n\W+(\d+)", loop.attributes):
        return int(match[1])
    condition = program.computations[re.search(r"condition=%?([\w.-]+)", loop.attributes)[1]]
    *_, root = condition.values()
    if root.op != "compare" or "direction=LT" not in root.attributes or len(root.operands) != 2:
        return None
    counter, bound = (condition.get(name) for name in root.operands)
    if counter is None or bound is None or counter.op != "get-tuple-element" or bound.op != "constant":
        return None
    return int(bound.arguments) if bound.arguments.isdigit() else None


def runs(program: HloModule, frequency: Frequency) -> list[ExecutionCount]:
    """Returns every instruction that a program runs and how often, including those in loops and branches."""
    cost = functools.cache(lambda name: _dearest_cycles(program, name, frequency, cost))

    def visit(name: str, dearest: float, likely: float, loops: tuple[Instruction, ...]) -> Iterator[ExecutionCount]:
        for instruction in program.computations[name].values():
            yield ExecutionCount(name, instruction, dearest, likely, loops)
            if instruction.op == "while":
                trips = trips_of(program, instruction, frequency)
                yield from visit(instruction.called, dearest * trips, likely * trips, (*loops, instruction))
            elif instruction.op == "conditional":
                for branch, is_dearest, share in _branch_shares(program, instruction, frequency, cost):
                    yield from visit(branch, dearest * is_dearest, likely * share, loops)
            elif instruction.op in ("call", "async-start") and SPARSE_CORE not in instruction.attributes:
                yield from visit(instruction.called, dearest, likely, loops)

    return list(visit(program.entry, 1.0, 1.0, ()))


def trips_of(program: HloModule, loop: Instruction, frequency: Frequency) -> float:
    """Returns how often a loop runs its body; 1 if neither the text nor `frequency` defines it."""
    trips = known_trips(program, loop)
    if trips is None:
        trips = frequency.trips_of(loop)
    return 1 if trips is None else trips


def _branch_shares(
    program: HloModule, instruction: Instruction, frequency: Frequency, cost: Callable[[str], float]
) -> list[tuple[str, float, float]]:
    """Returns (branch, 1 if it is the most expensive else 0, expected share of executions) for every branch."""
    branches = instruction.branches
    dearest = max(range(len(branches)), key=lambda i: cost(branches[i]))
    taken = frequency.taken.get(condition_scope(program, instruction))
    shares = [float(i == dearest) for i in range(len(branches))]
    if taken is not None and len(branches) == 2:
        shares = [1 - taken, taken]
    return [(branch, float(i == dearest), shares[i]) for i, branch in enumerate(branches)]


def _dearest_cycles(program: HloModule, name: str, frequency: Frequency, cost: Callable[[str], float]) -> float:
    """Returns the cycles of a computation if every condition takes its most expensive branch."""
    total = 0.0
    for instruction in program.computations[name].values():
        total += instruction.cycles
        if instruction.op == "while":
            total += trips_of(program, instruction, frequency) * cost(instruction.called)
        elif instruction.op == "conditional":
            total += max(map(cost, instruction.branches))
        elif instruction.op in ("call", "async-start"):
            total += cost(instruction.called)
    return total


class Product(NamedTuple):
    """A matmul: its operations (a multiply-add is two), and the dtypes of its operands."""

    flops: float
    dtypes: tuple[str, str]
    passes: int  # of the bfloat16 matrix unit
    op_name: str


def products(program: HloModule, instruction: Instruction) -> list[Product]:
    """Returns the matmuls in a fusion; [] for any other instruction."""
    if instruction.op != "fusion" or instruction.called not in program.computations:
        return []
    matmuls = []
    inside = program.computations[instruction.called]
    for inner in inside.values():
        if inner.op == "fusion":
            matmuls += products(program, inner)
        elif inner.op == "convolution":
            matmuls.append(product_of(inner, inside))
    return matmuls


def product_of(convolution: Instruction, inside: Mapping[str, Instruction]) -> Product:
    """Returns a matmul, which the TPU compiler writes as a convolution: batch dimensions and heads are spatial
    dimensions of the window. Only window positions that meet an element of the operand count, neither padding nor a gap
    of its dilation."""
    left, right = (inside[name].shapes[0] for name in convolution.operands[:2])
    result = convolution.shapes[0]
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    window = _window(convolution.attributes)
    total = 2 * left.dims[labels[1].index("b")] * right.dims[labels[2].index("i")] * right.dims[labels[2].index("o")]
    for i in range(sum(letter.isdigit() for letter in labels[1])):
        sizes = (left.dims[labels[1].index(str(i))], result.dims[labels[3].index(str(i))])
        total *= _meetings(*sizes, **{name: values[i] for name, values in window.items() if i < len(values)})
    dtypes = tuple(sorted((left.dtype, right.dtype)))
    wide = "highest" in convolution.attributes
    return Product(total, dtypes, PASSES.get(dtypes, 1) if wide else 1, convolution.op_name)


def _window(attributes: str) -> dict[str, list[int]]:
    """Returns size, stride, pad, lhs_dilate and rhs_dilate of a convolution's window, each a list over dimensions."""
    match = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(field.split("=") for field in match[1].split()) if match else {}
    numbers = lambda text: [int(n.split("_")[0]) for n in text.split("x")]
    return {
        name: numbers(fields[name]) for name in ("size", "stride", "pad", "lhs_dilate", "rhs_dilate") if name in fields
    }


def _meetings(
    entries: int, results: int, size: int = 1, stride: int = 1, pad: int = 0, lhs_dilate: int = 1, rhs_dilate: int = 1
) -> int:
    """Returns how many pairs of output position and window position meet an element, along one dimension."""
    positions = (output * stride + step * rhs_dilate - pad for output in range(results) for step in range(size))
    return sum(position % lhs_dilate == 0 and 0 <= position // lhs_dilate < entries for position in positions)


def scope_of(instruction: Instruction) -> str:
    """Returns the innermost scope around an instruction; "" if it has none."""
    *scopes, _ = instruction.op_name.split("/")
    return re.sub(r"\w+\(|\)", "", scopes[-1]) if scopes else ""  # transpose(jvp(chunk)) is the scope `chunk`


def condition_scope(program: HloModule, condition: Instruction) -> str:
    """Returns the innermost scope around a condition; from its branches if the compiler has rewritten it and it has no
    scope of its own."""
    if condition.op_name.endswith("/cond"):
        return scope_of(condition)
    inside = (inner.op_name for branch in condition.branches for inner in program.computations[branch].values())
    places = (re.search(r"(.*/cond)/branch_\d+_fun", name) for name in inside)
    place = next((match[1] for match in places if match), condition.op_name)
    return scope_of(dataclasses.replace(condition, attributes=f'op_name="{place}"'))


def _closing(text: str, start: int) -> int:
    """Returns the index where the parenthesis opened at `start` closes; the length of the text if it does not."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text)
