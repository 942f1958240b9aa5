"""Terms: expressions as a list of operations on earlier ones, without deep trees and with identical terms shared.

Rational constants are folded as they are built, up to FOLD_BITS. Larger ones stay operations, and their size is bounded
before anything is computed: each term has a bound on log2 of its numerator and denominator.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

MAX_TERMS = 2_048
FOLD_BITS = 4_096  # of the numerator and denominator of a constant
MAX_BITS = 32_768  # largest bound of a numerator or denominator in an expression
MAX_BITS_OF_GOLD = 2**45
MAX_EXPONENT = 2**40  # of an integer power
MAX_INDEX = 64  # of a root; a power with a larger denominator is an exponential
MAX_FACTORIAL = 5_000

# The kind of arithmetic that a term needs; each kind includes those before it.
RATIONAL, ALGEBRAIC, ELEMENTARY, COMBINATORIAL = range(4)

FUNCTIONS = frozenset("sin cos arcsin arccos arctan exp ln abs floor ceil".split())  # of one argument
# Functions that are built from these, so that large or small intermediate values are separate terms.
QUOTIENTS = {"tan": ("sin", "cos"), "cot": ("cos", "sin"), "sec": ("", "cos"), "csc": ("", "sin"),
             "tanh": ("sinh", "cosh"), "coth": ("cosh", "sinh")}  # fmt: skip
NAMES = FUNCTIONS | QUOTIENTS.keys() | {"sinh", "cosh"}


class NoAnswer(ValueError):
    """The text is not one answer of a supported form, or is beyond the caps."""


class Term(NamedTuple):
    """op and value: number Fraction, symbol str, i, pi, add, multiply, divide, power int, root int, raise (general
    exponent), factorial, binomial, or a name of FUNCTIONS."""

    op: str
    args: tuple[int, ...] = ()
    value: Fraction | int | str | None = None


class Bound(NamedTuple):
    """Bounds on log2 of a term's numerator and denominator, its kind and symbols. With roots, the bounds are those of
    its conjugates: Burnikel, Funke, Mehlhorn, Schirra and Schmitt, "A separation bound for real algebraic expressions",
    2001."""

    numerator: float
    denominator: float
    kind: int = RATIONAL
    symbols: frozenset[str] = frozenset()


class Terms:
    """Builds terms. The methods return the index of a term, and raise NoAnswer if it has no value or is too large.

    Args:
        max_bits: largest bound on log2 of a term's numerator or denominator.
    """

    def __init__(self, max_bits: float = MAX_BITS):
        self.max_bits = max_bits
        self.terms: list[Term] = []
        self.bounds: list[Bound] = []
        self._indices: dict[Term, int] = {}

    def constant(self, index: int) -> Fraction | None:
        """Returns the value of a term that is a folded number, else None."""
        term = self.terms[index]
        return term.value if term.op == "number" else None  # type: ignore[return-value]

    def number(self, value: Fraction | int) -> int:
        value = Fraction(value)
        return self._put(Term("number", (), value), Bound(_log2(value.numerator), _log2(value.denominator)))

    def symbol(self, name: str) -> int:
        return self._put(Term("symbol", (), name), Bound(2.0, 0.0, RATIONAL, frozenset([name])))

    def named(self, name: str) -> int:
        """Returns the constant i, pi or e, which is exp(1)."""
        if name == "e":
            return self.call("exp", self.number(1))
        return self._put(Term(name), Bound(0.0, 0.0, RATIONAL) if name == "i" else Bound(2.0, 0.0, ELEMENTARY))

    def add(self, a: int, b: int) -> int:
        x, y = self.constant(a), self.constant(b)
        if x is not None and y is not None and _bits(x) + _bits(y) < FOLD_BITS:
            return self.number(x + y)
        if x == 0 or y == 0:
            return b if x == 0 else a
        p, q = self.bounds[a], self.bounds[b]
        left, right = p.numerator + q.denominator, q.numerator + p.denominator
        numerator = max(left, right) + math.log2(1 + 2.0 ** -min(abs(left - right), 64.0))
        bound = self._bound((a, b), numerator, p.denominator + q.denominator)
        return self._put(Term("add", (min(a, b), max(a, b))), bound)

    def multiply(self, a: int, b: int) -> int:
        x, y = self.constant(a), self.constant(b)
        if x is not None and y is not None and _bits(x) + _bits(y) < FOLD_BITS:
            return self.number(x * y)
        if x == 1 or y == 1:
            return b if x == 1 else a
        if self.terms[a].op == "exp" == self.terms[b].op:
            return self.call("exp", self.add(self.terms[a].args[0], self.terms[b].args[0]))
        p, q = self.bounds[a], self.bounds[b]
        return self._put(
            Term("multiply", (min(a, b), max(a, b))),
            self._bound((a, b), p.numerator + q.numerator, p.denominator + q.denominator),
        )

    def negate(self, a: int) -> int:
        return self.multiply(self.number(-1), a)

    def subtract(self, a: int, b: int) -> int:
        return self.number(0) if a == b else self.add(a, self.negate(b))

    def divide(self, a: int, b: int) -> int:
        x, y = self.constant(a), self.constant(b)
        if y == 0:
            raise NoAnswer("a division by 0")
        if x is not None and y is not None and _bits(x) + _bits(y) < FOLD_BITS:
            return self.number(x / y)
        if y == 1:
            return a
        if self.terms[b].op == "exp":
            return self.multiply(a, self.call("exp", self.negate(self.terms[b].args[0])))
        p, q = self.bounds[a], self.bounds[b]
        return self._put(
            Term("divide", (a, b)), self._bound((a, b), p.numerator + q.denominator, p.denominator + q.numerator)
        )

    def raise_to(self, base: int, exponent: int) -> int:
        """Returns base^exponent. A negative base has a real root if the exponent's denominator is odd."""
        power = self.constant(exponent)
        op, args, _ = self.terms[base]
        if op == "exp" and self.constant(args[0]) is not None:  # a positive number
            return self.call("exp", self.multiply(args[0], exponent))
        if power is not None and power.denominator == 1:
            return self.power(base, int(power))
        if power is not None and power.denominator <= MAX_INDEX:
            return self.power(self.root(power.denominator, base), power.numerator)
        if self.constant(base) == 0:
            raise NoAnswer("a power of 0 whose exponent is not a number")
        bound = self.bounds[base].numerator + self.bounds[exponent].numerator
        return self._put(Term("raise", (base, exponent)), self._bound((base, exponent), bound, 0.0, ELEMENTARY))

    def power(self, base: int, exponent: int) -> int:
        """Returns base^exponent for an integer exponent."""
        if abs(exponent) > MAX_EXPONENT:
            raise NoAnswer(f"an exponent above {MAX_EXPONENT}")
        x = self.constant(base)
        if x == 0 and exponent <= 0:
            raise NoAnswer("0 to a power that is not positive")
        if exponent == 1:
            return base
        if x is not None and (x in (0, 1, -1) or _bits(x) * abs(exponent) < FOLD_BITS):
            return self.number(x**exponent if abs(x) != 1 else (1 if exponent % 2 == 0 else x))
        if self.terms[base].op == "exp":
            return self.call("exp", self.multiply(self.number(exponent), self.terms[base].args[0]))
        if self.terms[base].op == "i":
            return (self.number(1), base, self.number(-1), self.negate(base))[exponent % 4]
        numerator, denominator = self.bounds[base][:2]
        if exponent < 0:
            numerator, denominator = denominator, numerator
        size = abs(exponent)
        return self._put(Term("power", (base,), exponent), self._bound((base,), size * numerator, size * denominator))

    def root(self, index: int, base: int) -> int:
        """Returns the root: real for a negative number and an odd index, else the principal one."""
        if not 1 <= index <= MAX_INDEX:
            raise NoAnswer(f"a root of index {index}; at most {MAX_INDEX}")
        if index == 1:
            return base
        x = self.constant(base)
        if x is not None and x < 0 and index == 2:
            return self.multiply(self.named("i"), self.root(2, self.number(-x)))
        if x is not None and (x >= 0 or index % 2):
            top, bottom = _root(abs(x.numerator), index), _root(x.denominator, index)
            if top is not None and bottom is not None:
                return self.number(Fraction(top if x >= 0 else -top, bottom))
        u, l = self.bounds[base][:2]
        if u >= l:
            u = (u + (index - 1) * l) / index
        else:
            l = ((index - 1) * u + l) / index
        return self._put(Term("root", (base,), index), self._bound((base,), u, l, ALGEBRAIC))

    def factorial(self, a: int) -> int:
        n = self.constant(a)
        if n is None:
            if not self.bounds[a].symbols:
                raise NoAnswer("a factorial of something other than a plain number")
            return self._put(Term("factorial", (a,)), self._bound((a,), 64.0, 0.0, COMBINATORIAL))
        if n.denominator != 1 or not 0 <= n <= MAX_FACTORIAL:
            raise NoAnswer(f"a factorial of something other than a whole number from 0 to {MAX_FACTORIAL}")
        bits = math.lgamma(int(n) + 1) / math.log(2) + 1
        if bits < FOLD_BITS:
            return self.number(math.factorial(int(n)))
        return self._put(Term("factorial", (a,)), Bound(bits, 0.0))

    def binomial(self, a: int, b: int) -> int:
        n, k = self.constant(a), self.constant(b)
        if n is None or k is None:
            if not self.bounds[a].symbols | self.bounds[b].symbols:
                raise NoAnswer("a binomial of something other than plain numbers")
            return self._put(Term("binomial", (a, b)), self._bound((a, b), 64.0, 0.0, COMBINATORIAL))
        if n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n:
            raise NoAnswer("a binomial without integers 0 <= k <= n")
        least = int(min(k, n - k))
        if least > MAX_FACTORIAL:
            raise NoAnswer(f"a binomial with k above {MAX_FACTORIAL}")
        bits = least * min(_log2(int(n)), _log2(int(n)) - _log2(max(least, 1)) + 1.5) + 1
        if bits < FOLD_BITS:
            return self.number(math.comb(int(n), least))
        return self._put(Term("binomial", (a, self.number(least))), Bound(bits, 0.0))

    def call(self, name: str, a: int) -> int:
        """Returns a function of NAMES of a term."""
        if name in QUOTIENTS:
            top, bottom = QUOTIENTS[name]
            return self.divide(self.call(top, a) if top else self.number(1), self.call(bottom, a))
        if name in ("sinh", "cosh"):
            up = self.call("exp", a)
            down = self.divide(self.number(1), up)
            both = self.add(up, down) if name == "cosh" else self.subtract(up, down)
            return self.divide(both, self.number(2))
        x = self.constant(a)
        if x is not None:
            if name == "abs":
                return self.number(abs(x))
            if name in ("floor", "ceil"):
                return self.number(math.floor(x) if name == "floor" else math.ceil(x))
            if x == 0 and name != "arccos" and name != "ln":
                return self.number(1 if name in ("cos", "exp") else 0)
            if name == "ln" and x == 0:
                raise NoAnswer("a logarithm of 0")
            if (name, abs(x)) == ("arcsin", 1):
                return self.divide(self.named("pi"), self.number(2 * x))
            if (name, abs(x)) == ("arccos", 1):
                return self.number(0) if x == 1 else self.named("pi")
        return self._put(Term(name, (a,)), self._bound((a,), self.bounds[a].numerator + 8.0, 0.0, ELEMENTARY))

    def reachable(self, *indices: int) -> list[int]:
        """Returns the indices of these terms and all their subterms, each after its arguments."""
        seen, stack = set(), list(indices)
        while stack:
            index = stack.pop()
            if index not in seen:
                seen.add(index)
                stack.extend(self.terms[index].args)
        return sorted(seen)

    def substitute(self, other: Terms, indices: list[int], values: dict[str, Fraction]) -> list[int]:
        """Builds these terms of `other` here, with numbers for symbols; returns their indices here."""
        here: dict[int, int] = {}
        for index in other.reachable(*indices):
            op, args, value = other.terms[index]
            a = [here[argument] for argument in args]
            match op:
                case "number":
                    here[index] = self.number(value)  # type: ignore[arg-type]
                case "symbol":
                    here[index] = self.number(values[value]) if value in values else self.symbol(value)  # type: ignore
                case "i" | "pi":
                    here[index] = self.named(op)
                case "add" | "multiply" | "divide" | "factorial" | "binomial":
                    here[index] = getattr(self, op)(*a)
                case "raise":
                    here[index] = self.raise_to(*a)
                case "power":
                    here[index] = self.power(a[0], value)  # type: ignore[arg-type]
                case "root":
                    here[index] = self.root(value, a[0])  # type: ignore[arg-type]
                case _:
                    here[index] = self.call(op, a[0])
        return [here[index] for index in indices]

    def _bound(self, args: tuple[int, ...], numerator: float, denominator: float, kind: int = RATIONAL) -> Bound:
        parts = [self.bounds[index] for index in args]
        symbols = frozenset().union(*(part.symbols for part in parts))
        return Bound(numerator, denominator, max(kind, *(part.kind for part in parts)), symbols)

    def _put(self, term: Term, bound: Bound) -> int:
        index = self._indices.get(term)
        if index is not None:
            return index
        if max(bound.numerator, bound.denominator) > self.max_bits:
            raise NoAnswer(f"a number of more than {self.max_bits:.0f} bits")
        if len(self.terms) >= MAX_TERMS:
            raise NoAnswer(f"more than {MAX_TERMS} operations")
        self.terms.append(term)
        self.bounds.append(bound)
        self._indices[term] = len(self.terms) - 1
        return len(self.terms) - 1


def separation_bits(terms: Terms, index: int) -> float:
    """Returns b such that an algebraic term is 0 or at least 2^-b: log2 of denominator * numerator^(degree - 1)
    (Burnikel et al. 2001), where the degree is the product of the indices of its distinct roots."""
    degree = 1.0
    for part in terms.reachable(index):
        op, _, value = terms.terms[part]
        degree *= value if op == "root" else 2 if op == "i" else 1  # type: ignore[operator]
    bound = terms.bounds[index]
    return bound.denominator + bound.numerator * (min(degree, 2.0**40) - 1)


def _bits(x: Fraction) -> int:
    return x.numerator.bit_length() + x.denominator.bit_length()


def _log2(n: int) -> float:
    return math.log2(max(abs(n), 1))


def _root(n: int, index: int) -> int | None:
    """Returns the exact root of n >= 0, or None."""
    if index == 2:
        root = math.isqrt(n)
    else:
        root = 1 << -(-n.bit_length() // index)  # at least the root: Newton's iteration decreases to its floor
        while n:
            step = ((index - 1) * root + n // root ** (index - 1)) // index
            if step >= root:
                break
            root = step
        root = root if n else 0
    return root if root**index == n else None
