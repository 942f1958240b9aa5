"""Ball arithmetic: interval evaluation of terms over the complex numbers with mpmath's functions at any precision.

A real is a Ball: the value differs from `middle` by at most `radius`. Each operation adds its rounding error. mpmath's
elementary functions are accurate to an ulp at the requested precision; GUARD extra bits are requested.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from mpmath import libmp as mp

from jrl.tasks.verifiers.expressions.terms import NoAnswer, Terms

GUARD = 8
MAX_MAGNITUDE = 2**22  # of |log2| of a value
MAX_ANGLE_BITS = 1_024  # of the integer part of a sine's argument
WORK = 30_000  # budget of a comparison, in units of about a microsecond


class Undecided(ArithmeticError):
    """At this precision a divisor may be 0, or a branch or a floor cannot be determined."""


class WorkBudget:
    """Counts the cost of a comparison by operations and precision instead of time, so that a verdict is the same on a
    busy machine."""

    def __init__(self, budget: float = WORK):
        self.left = budget

    def spend(self, cost: float) -> None:
        self.left -= cost
        if self.left < 0:
            raise NoAnswer("too much to compute")


class Ball(NamedTuple):
    middle: tuple  # mpmath's (sign, mantissa, exponent, bits)
    radius: tuple


class Complex(NamedTuple):
    real: Ball
    imag: Ball


ZERO = Ball(mp.fzero, mp.fzero)
ONE = Ball(mp.fone, mp.fzero)


def evaluate(terms: Terms, index: int, precision: int, work: WorkBudget) -> tuple[Complex, int]:
    """Returns the value of a term without symbols, and the largest |log2| of the values of its subterms.

    Raises:
        Undecided: the precision is too low.
        NoAnswer: the term has no value, or is beyond the caps.
    """
    values: dict[int, Complex] = {}
    largest = 0
    simple, transcendental = 10 + precision / 100, 60 + 2 * (precision / 100) ** 1.9
    for part in terms.reachable(index):
        op, args, value = terms.terms[part]
        a = [values[argument] for argument in args]
        work.spend(transcendental if op in _FUNCTIONS or op in ("raise", "pi") else simple)
        match op:
            case "number":
                result = real(_rational(value, precision))  # type: ignore[arg-type]
            case "i":
                result = Complex(ZERO, ONE)
            case "pi":
                result = real(_pi(precision))
            case "add":
                result = _add(a[0], a[1], precision)
            case "multiply":
                result = _multiply(a[0], a[1], precision)
            case "divide":
                result = _divide(a[0], a[1], precision)
            case "power":
                result = _power(a[0], value, precision, work)  # type: ignore[arg-type]
            case "root":
                work.spend(transcendental if value != 2 or a[0].imag != ZERO else simple)
                result = _root(a[0], value, precision)  # type: ignore[arg-type]
            case "raise":
                result = _exp(_multiply(a[1], _log(a[0], precision), precision), precision)
            case "factorial" | "binomial":
                n = [int(terms.constant(argument)) for argument in args]  # type: ignore[arg-type]
                work.spend(terms.bounds[part].numerator / 10)
                result = real(_rational(Fraction(math.factorial(*n) if len(n) == 1 else math.comb(*n)), precision))
            case _:
                result = _FUNCTIONS[op](a[0], precision)
        values[part] = result
        largest = max(largest, magnitude(result))
        if largest > MAX_MAGNITUDE:
            raise NoAnswer("a number that is too large or too small")
    return values[index], largest


def real(x: Ball) -> Complex:
    return Complex(x, ZERO)


def is_nonzero(z: Complex) -> bool:
    """Returns whether the value is certainly not 0."""
    return any(mp.mpf_gt(mp.mpf_abs(x.middle), x.radius) for x in z)


def is_below(z: Complex, bits: float) -> bool:
    """Returns whether the absolute values of the real and imaginary parts are certainly below 2^-bits."""
    limit = mp.mpf_shift(mp.fone, -math.ceil(bits))
    return all(mp.mpf_lt(_up(mp.mpf_abs(x.middle), x.radius), limit) for x in z)


def sign(x: Ball) -> int:
    """Returns 1 or -1; 0 for an exact 0.

    Raises:
        Undecided: the sign cannot be determined.
    """
    if x == ZERO:
        return 0
    if not mp.mpf_gt(mp.mpf_abs(x.middle), x.radius):
        raise Undecided
    return mp.mpf_sign(x.middle)


def magnitude(z: Complex) -> int:
    """Returns |log2| of the larger part, or 0 if the value may be 0."""
    if not is_nonzero(z):
        return 0
    return abs(max(x.middle[2] + x.middle[3] for x in z if x.middle != mp.fzero))


def _up(*values: tuple) -> tuple:
    total = mp.fzero
    for value in values:
        total = mp.mpf_add(total, value, 32, "u")
    return total


def _times_up(a: tuple, b: tuple) -> tuple:
    return mp.mpf_mul(a, b, 32, "u")


def _rounded(middle: tuple, radius: tuple, precision: int) -> Ball:
    """Returns a Ball for a result whose last bit may be wrong, which is added to `radius`."""
    return Ball(middle, _up(radius, mp.mpf_shift(mp.mpf_abs(middle), -precision)))


def _rational(x: Fraction, precision: int) -> Ball:
    if x == 0:
        return ZERO
    if x.denominator == 1 and x.numerator.bit_length() <= precision:
        return Ball(mp.from_int(x.numerator), mp.fzero)
    return _rounded(mp.from_rational(x.numerator, x.denominator, precision, "n"), mp.fzero, precision)


def _pi(precision: int) -> Ball:
    return _rounded(mp.mpf_pi(precision + GUARD, "n"), mp.fzero, precision)


def _sum(a: Ball, b: Ball, precision: int) -> Ball:
    if a == ZERO or b == ZERO:
        return b if a == ZERO else a
    return _rounded(mp.mpf_add(a.middle, b.middle, precision, "n"), _up(a.radius, b.radius), precision)


def _minus(a: Ball) -> Ball:
    return Ball(mp.mpf_neg(a.middle), a.radius)


def _product(a: Ball, b: Ball, precision: int) -> Ball:
    if a == ZERO or b == ZERO:
        return ZERO
    if ONE in (a, b):
        return b if a == ONE else a
    x, y = mp.mpf_abs(a.middle), mp.mpf_abs(b.middle)
    radius = _up(_times_up(x, b.radius), _times_up(y, a.radius), _times_up(a.radius, b.radius))
    return _rounded(mp.mpf_mul(a.middle, b.middle, precision, "n"), radius, precision)


def _quotient(a: Ball, b: Ball, precision: int) -> Ball:
    """Returns a / b. Bound: |a/b - a'/b'| <= (|a| rb + |b| ra) / (|b| (|b| - rb))."""
    x, y = mp.mpf_abs(a.middle), mp.mpf_abs(b.middle)
    least = mp.mpf_sub(y, b.radius, 32, "d")
    if not mp.mpf_gt(least, mp.fzero):
        raise Undecided
    above = _up(_times_up(x, b.radius), _times_up(y, a.radius))
    radius = mp.mpf_div(above, mp.mpf_mul(y, least, 32, "d"), 32, "u")
    return _rounded(mp.mpf_div(a.middle, b.middle, precision, "n"), radius, precision)


def _square_root(x: Ball, precision: int) -> Ball:
    """Returns the square root of a Ball that is certainly positive. Bound: |sqrt(x) - sqrt(x')| <= r / sqrt(x - r)."""
    least = mp.mpf_sqrt(mp.mpf_sub(x.middle, x.radius, 32, "d"), 32, "d")
    radius = mp.mpf_div(x.radius, least, 32, "u")
    return _rounded(mp.mpf_sqrt(x.middle, precision, "n"), radius, precision)


def _cos_sin(x: Ball, precision: int) -> tuple[Ball, Ball]:
    if x == ZERO:
        return ONE, ZERO
    if x.middle[2] + x.middle[3] > MAX_ANGLE_BITS:
        raise NoAnswer("an angle that is too large")
    return tuple(_rounded(y, x.radius, precision) for y in mp.mpf_cos_sin(x.middle, precision + GUARD, "n"))  # type: ignore


def _exp_real(x: Ball, precision: int) -> Ball:
    """Returns e^x. Bound: |e^x - e^x'| <= 2 r e^x for r <= 1."""
    if x == ZERO:
        return ONE
    if x.middle[2] + x.middle[3] > 21:
        raise NoAnswer("an exponential that is too large or too small")
    if mp.mpf_gt(x.radius, mp.fhalf):
        raise Undecided
    y = mp.mpf_exp(x.middle, precision + GUARD, "n")
    return _rounded(y, mp.mpf_shift(_times_up(y, x.radius), 1), precision)


def _log_real(x: Ball, precision: int) -> Ball:
    """Returns ln x of a positive Ball. Bound: |ln x - ln x'| <= r / (x - r)."""
    if x == ONE:
        return ZERO
    if not mp.mpf_gt(x.middle, x.radius):
        raise Undecided
    radius = mp.mpf_div(x.radius, mp.mpf_sub(x.middle, x.radius, 32, "d"), 32, "u")
    return _rounded(mp.mpf_log(x.middle, precision + GUARD, "n"), radius, precision)


def _arctan_real(x: Ball, precision: int) -> Ball:
    return ZERO if x == ZERO else _rounded(mp.mpf_atan(x.middle, precision + GUARD, "n"), x.radius, precision)


def _add(a: Complex, b: Complex, precision: int) -> Complex:
    return Complex(_sum(a.real, b.real, precision), _sum(a.imag, b.imag, precision))


def _negative(a: Complex) -> Complex:
    return Complex(_minus(a.real), _minus(a.imag))


def _multiply(a: Complex, b: Complex, precision: int) -> Complex:
    (x, y), (u, v) = a, b
    return Complex(
        _sum(_product(x, u, precision), _minus(_product(y, v, precision)), precision),
        _sum(_product(x, v, precision), _product(y, u, precision), precision),
    )


def _divide(a: Complex, b: Complex, precision: int) -> Complex:
    if b.imag == ZERO:
        return Complex(*(ZERO if x == ZERO else _quotient(x, b.real, precision) for x in a))
    norm = _sum(_product(b.real, b.real, precision), _product(b.imag, b.imag, precision), precision)
    return _divide(_multiply(a, Complex(b.real, _minus(b.imag)), precision), real(norm), precision)


def _power(z: Complex, exponent: int, precision: int, work: WorkBudget) -> Complex:
    if exponent < 0:
        return _divide(real(ONE), _power(z, -exponent, precision, work), precision)
    result = real(ONE)
    for bit in bin(exponent)[2:]:
        work.spend(10 + precision / 100)
        result = _multiply(result, result, precision)
        if bit == "1":
            result = _multiply(result, z, precision)
        if magnitude(result) > MAX_MAGNITUDE:
            raise NoAnswer("a number that is too large or too small")
    return result


def _absolute(z: Complex, precision: int) -> Complex:
    if z.imag == ZERO or z.real == ZERO:
        x = z.real if z.imag == ZERO else z.imag
        # If the sign is unknown, the middle's absolute value is as close as the middle.
        return real(Ball(mp.mpf_abs(x.middle), x.radius))
    squares = _sum(_product(z.real, z.real, precision), _product(z.imag, z.imag, precision), precision)
    return _root(real(squares), 2, precision)


def _root(z: Complex, index: int, precision: int) -> Complex:
    """Returns the real root if the value is nonnegative, or real with an odd index; else the principal root."""
    if z.imag == ZERO:
        if z.real == ZERO:
            return z
        try:
            direction = sign(z.real)
        except Undecided:
            # The value is 0 or near 0, and so is each part of the root.
            size = mp.mpf_nthroot(_up(mp.mpf_abs(z.real.middle), z.real.radius), index, 32, "u")
            ball = Ball(mp.fzero, mp.mpf_shift(size, 1))
            return Complex(ball, ZERO if index % 2 else ball)
        positive = z.real if direction > 0 else _minus(z.real)
        if index == 2:
            x = _square_root(positive, precision)
            return real(x) if direction > 0 else Complex(ZERO, x)
        if direction > 0 or index % 2:
            y = mp.mpf_nthroot(positive.middle, index, precision + GUARD, "n")
            least = mp.mpf_sub(positive.middle, positive.radius, 32, "d")
            radius = mp.mpf_div(_times_up(y, positive.radius), least, 32, "u")
            x = _rounded(y, radius, precision)
            return real(x if direction > 0 else _minus(x))
    logarithm = _log(z, precision)
    return _exp(_divide(logarithm, real(Ball(mp.from_int(index), mp.fzero)), precision), precision)


def _exp(z: Complex, precision: int) -> Complex:
    size = real(_exp_real(z.real, precision))
    if z.imag == ZERO:
        return size
    return _multiply(size, Complex(*_cos_sin(z.imag, precision)), precision)


def _log(z: Complex, precision: int) -> Complex:
    """Returns the principal branch: the imaginary part is above -pi and at most pi."""
    x, y = z
    if y == ZERO:
        direction = sign(x)
        if direction == 0:
            raise NoAnswer("a logarithm of 0")
        size = _log_real(x if direction > 0 else _minus(x), precision)
        return Complex(size, ZERO if direction > 0 else _pi(precision))
    size = _log_real(_absolute(z, precision).real, precision)
    if x != ZERO and mp.mpf_gt(x.middle, x.radius):
        return Complex(size, _arctan_real(_quotient(y, x, precision), precision))
    half = _quotient(_pi(precision), Ball(mp.from_int(2), mp.fzero), precision)
    inverse = ZERO if x == ZERO else _arctan_real(_quotient(x, y, precision), precision)
    return Complex(size, _sum(half if sign(y) > 0 else _minus(half), _minus(inverse), precision))


def _cos_and_sin(z: Complex, precision: int) -> tuple[Complex, Complex]:
    cos, sin = _cos_sin(z.real, precision)
    if z.imag == ZERO:
        return real(cos), real(sin)
    up, down = _exp_real(z.imag, precision), _exp_real(_minus(z.imag), precision)
    two = Ball(mp.from_int(2), mp.fzero)
    cosh = _quotient(_sum(up, down, precision), two, precision)
    sinh = _quotient(_sum(up, _minus(down), precision), two, precision)
    return (
        Complex(_product(cos, cosh, precision), _minus(_product(sin, sinh, precision))),
        Complex(_product(sin, cosh, precision), _product(cos, sinh, precision)),
    )


def _arcsin(z: Complex, precision: int) -> Complex:
    """Of a real between -1 and 1: arctan(x / sqrt(1 - x^2))."""
    x = z.real
    rest = _sum(ONE, _minus(_product(x, x, precision)), precision)
    if z.imag != ZERO or sign(rest) < 0:
        raise NoAnswer("an inverse sine of a value that is not between -1 and 1")
    if rest == ZERO:
        raise Undecided
    return real(_arctan_real(_quotient(x, _square_root(rest, precision), precision), precision))


def _arccos(z: Complex, precision: int) -> Complex:
    half = _quotient(_pi(precision), Ball(mp.from_int(2), mp.fzero), precision)
    return _add(real(half), _negative(_arcsin(z, precision)), precision)


def _arctan(z: Complex, precision: int) -> Complex:
    if z.imag != ZERO:
        raise NoAnswer("an inverse tangent of a value that is not real")
    return real(_arctan_real(z.real, precision))


def _floor(z: Complex, precision: int) -> Complex:
    if z.imag != ZERO:
        raise NoAnswer("a floor of a value that is not real")
    low, high = (
        mp.to_int(mp.mpf_floor(step(z.real.middle, z.real.radius)))
        for step in (lambda x, r: mp.mpf_sub(x, r), lambda x, r: mp.mpf_add(x, r))
    )
    if low != high:
        raise Undecided
    return real(_rational(Fraction(low), precision))


_FUNCTIONS = {
    "sin": lambda z, p: _cos_and_sin(z, p)[1],
    "cos": lambda z, p: _cos_and_sin(z, p)[0],
    "arcsin": _arcsin,
    "arccos": _arccos,
    "arctan": _arctan,
    "exp": _exp,
    "ln": _log,
    "abs": _absolute,
    "floor": _floor,
    "ceil": lambda z, p: _negative(_floor(_negative(z), p)),
}
