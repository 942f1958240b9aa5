"""Parses arithmetic and polynomials without running them: Python's grammar, a closed set of nodes, hard caps."""

from __future__ import annotations

import ast
import dataclasses
import re
from fractions import Fraction

from jrl.tasks.verifiers.numeric import read_number

MAX_CHARACTERS = 4096
MAX_BITS = 20_000  # of a numerator or denominator
MAX_PRODUCTS = 10_000  # of two terms, in the whole expression
MAX_POWER = 1_000

Monomial = tuple[tuple[str, int], ...]  # (variable, power above 0), sorted by variable
Polynomial = dict[Monomial, Fraction]  # no zero coefficients; {} is 0


class NoPolynomial(ValueError):
    """The text is not a supported expression, or is beyond the caps."""


def read_polynomial(text: str) -> Polynomial:
    """Returns the polynomial written in `text` with + - * / ** and parentheses; a number has no variables.

    Raises:
        NoPolynomial: for anything else: calls, attributes, names longer than a letter, division by anything except a
            nonzero number, powers that are not integers from 0 to MAX_POWER, results beyond the caps.
    """
    if len(text) > MAX_CHARACTERS:
        raise NoPolynomial(f"{len(text)} characters; at most {MAX_CHARACTERS} are read")
    if not re.fullmatch(r"[0-9A-Za-z+\-*/(). ]+", text):
        raise NoPolynomial("a sign that is not read")
    try:
        text = text.strip()
        return _value(ast.parse(text, mode="eval").body, _Reading(text))
    except NoPolynomial:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NoPolynomial(f"not an expression: {error}") from error


def derivative(polynomial: Polynomial, variable: str) -> Polynomial:
    """Returns d polynomial / d variable."""
    result: Polynomial = {}
    for monomial, coefficient in polynomial.items():
        powers = dict(monomial)
        power = powers.pop(variable, 0)
        if power:
            if power > 1:
                powers[variable] = power - 1
            result[tuple(sorted(powers.items()))] = coefficient * power
    return result


def constant(polynomial: Polynomial) -> Fraction:
    """Returns the value of a polynomial without variables. Raises NoPolynomial if it has one."""
    if any(monomial for monomial in polynomial):
        raise NoPolynomial("a variable where a number should be")
    return polynomial.get((), Fraction(0))


@dataclasses.dataclass
class _Reading:
    """An expression that is being read."""

    text: str
    products: int = 0  # of two terms, so far

    def spend(self, products: int) -> None:
        self.products += products
        if self.products > MAX_PRODUCTS:
            raise NoPolynomial(f"more than {MAX_PRODUCTS} products of terms")


def _value(node: ast.expr, reading: _Reading) -> Polynomial:
    match node:
        case ast.Constant(value=int(value)) if type(value) is int:
            return _checked({(): Fraction(value)})
        case ast.Constant(value=float()):
            # exact, where a float would be rounded
            number = read_number(reading.text[node.col_offset : node.end_col_offset])
            if number is None:
                raise NoPolynomial("a number beyond the caps")
            return _checked({(): number})
        case ast.Name(id=name) if len(name) == 1:
            return {((name, 1),): Fraction(1)}
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, reading)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _times(_value(operand, reading), {(): Fraction(-1)}, reading)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _plus(_value(left, reading), _value(right, reading))
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _plus(_value(left, reading), _times(_value(right, reading), {(): Fraction(-1)}, reading))
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _times(_value(left, reading), _value(right, reading), reading)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            divisor = constant(_value(right, reading))
            if divisor == 0:
                raise NoPolynomial("a division by 0")
            return _times(_value(left, reading), {(): 1 / divisor}, reading)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left, reading), constant(_value(right, reading)), reading)
    raise NoPolynomial(f"{type(node).__name__} is not read")


def _plus(a: Polynomial, b: Polynomial) -> Polynomial:
    """Returns a + b. The shorter one is added to the longer one in place: a sign costs no pass over a long sum."""
    shorter, longer = sorted((a, b), key=len)
    longer.update(_checked({x: longer.pop(x, 0) + coefficient for x, coefficient in shorter.items()}))
    return longer


def _times(a: Polynomial, b: Polynomial, reading: _Reading) -> Polynomial:
    reading.spend(len(a) * len(b))
    result: Polynomial = {}
    for x, p in a.items():
        for y, q in b.items():
            powers = dict(x)
            for variable, power in y:
                powers[variable] = powers.get(variable, 0) + power
            monomial = tuple(sorted(powers.items()))
            result[monomial] = result.get(monomial, Fraction(0)) + p * q
    return _checked(result)


def _power(base: Polynomial, exponent: Fraction, reading: _Reading) -> Polynomial:
    if exponent.denominator != 1 or not 0 <= exponent <= MAX_POWER:
        raise NoPolynomial(f"the power {exponent}")
    count = int(exponent)
    if count == 0:
        return {(): Fraction(1)}
    if len(base) > 1:
        result = base
        for _ in range(count - 1):
            result = _times(result, base, reading)
        return result
    for coefficient in base.values():  # check the size before computing it
        largest = max(coefficient.numerator.bit_length(), coefficient.denominator.bit_length())
        if largest * count > 2 * MAX_BITS:
            raise NoPolynomial(f"a number of more than {MAX_BITS} bits")
    powers = lambda monomial: tuple((variable, power * count) for variable, power in monomial)
    return _checked({powers(monomial): coefficient**count for monomial, coefficient in base.items()})


def _checked(polynomial: Polynomial) -> Polynomial:
    """Returns the polynomial without zero terms. Raises NoPolynomial if a number or a power is beyond the caps."""
    nonzero = {monomial: coefficient for monomial, coefficient in polynomial.items() if coefficient}
    for monomial, coefficient in nonzero.items():
        if max(coefficient.numerator.bit_length(), coefficient.denominator.bit_length()) > MAX_BITS:
            raise NoPolynomial(f"a number of more than {MAX_BITS} bits")
        if any(power > MAX_POWER for _, power in monomial):
            raise NoPolynomial(f"a power above {MAX_POWER}")
    return nonzero
