"""Equality of two terms: exact where a theorem decides, else by intervals at increasing precision.

| terms | decided by |
| --- | --- |
| rational constants | folded, then compared; if too large to fold, modulo PRIMES random primes of 61 bits |
| rational functions | values at random points modulo those primes (Schwartz, Zippel) |
| algebraic constants | intervals, down to the separation bound of Burnikel et al. 2001; beyond 2^-16384 as other ones |
| other constants | intervals, down to 2^-(128 + M (4 + F)), see below |
| other expressions | as constants, at random rational points of both signs; where the first one is real, if it can be |

M is the largest |log2| of the values of the constants' subterms, F the number of their functions and roots. "Unequal"
is always proved, or the answer has no value where the gold answer has one. "Equal" is proved for folded constants and
by the separation bound; modulo primes it is wrong with a probability below 2^-40. No bound is used in the fourth row:
values that agree to so many bits count as equal.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

from jrl.tasks.verifiers.expressions.balls import ZERO as EXACT_ZERO
from jrl.tasks.verifiers.expressions.balls import (
    Complex,
    Undecided,
    WorkBudget,
    evaluate,
    is_below,
    is_nonzero,
    sign,
)
from jrl.tasks.verifiers.expressions.terms import (
    ALGEBRAIC,
    FUNCTIONS,
    MAX_BITS_OF_GOLD,
    RATIONAL,
    NoAnswer,
    Terms,
    separation_bits,
)

PRIMES = 3
FIRST_PRECISION = 96
MAX_PRECISION = 8_192  # with functions
MAX_ALGEBRAIC_PRECISION = 32_768
POINTS = 8  # number of points at which two expressions must agree
FEWEST_POINTS = 4  # enough if TRIES give no more
TRIES = 40  # random points to try
LARGEST_INTEGER = 24  # of a symbol in a factorial


def equal(terms: Terms, gold: int, answer: int, seed: int, work: WorkBudget) -> bool:
    """Returns whether two terms have the same value, or are the same function on the reals.

    Args:
        seed: of the primes and points. It is derived from the two texts, so that no answer can be tuned to them.

    Raises:
        NoAnswer: it cannot be decided within the caps, or one of them has no value.
    """
    if gold == answer:
        return True
    a, b = terms.bounds[gold], terms.bounds[answer]
    if terms.constant(gold) is not None and terms.constant(answer) is not None:
        return False
    draw = random.Random(seed)
    if max(a.kind, b.kind) == RATIONAL:
        return _equal_modulo_primes(terms, gold, answer, draw, work)
    if not a.symbols | b.symbols:
        return _constants_equal(terms, gold, answer, work)
    return _equal_at_points(terms, gold, answer, draw, work)


def proportional(terms: Terms, gold: int, answer: int, seed: int, work: WorkBudget, *, positive: bool) -> bool:
    """Returns whether answer = c * gold for a constant c that is not 0 (with `positive`: above 0). False unless both
    are rational functions and not identically 0."""
    if max(terms.bounds[index].kind for index in (gold, answer)) != RATIONAL:
        return False
    draw = random.Random(seed)
    names = sorted(terms.bounds[gold].symbols | terms.bounds[answer].symbols)
    size = len(terms.reachable(gold, answer))
    for _ in range(TRIES):
        work.spend(4 * size)
        here = Terms(MAX_BITS_OF_GOLD)
        values = {name: Fraction(draw.randrange(-(10**6), 10**6), 1009) for name in names}
        try:
            x, y = (here.constant(index) for index in here.substitute(terms, [gold, answer], values))
        except NoAnswer:
            continue
        if x is None or y is None:
            return False
        if x == 0 or y == 0:
            continue
        ratio = y / x
        if positive and ratio < 0:
            return False
        return equal(terms, terms.multiply(terms.number(ratio), gold), answer, seed, work)
    return False


def within(terms: Terms, gold: Fraction, answer: int, tolerance: Fraction, work: WorkBudget) -> bool:
    """Returns whether |answer - gold| <= tolerance for a real constant `answer`; False if it is not one."""
    if terms.bounds[answer].symbols:
        return False
    margin = terms.subtract(terms.number(tolerance), terms.call("abs", terms.subtract(answer, terms.number(gold))))
    value = terms.constant(margin)
    if value is not None:
        return value >= 0
    for precision in (FIRST_PRECISION, 4 * FIRST_PRECISION):
        try:
            z, _ = evaluate(terms, answer, precision, work)
            if z.imag != EXACT_ZERO:
                return False
            return sign(evaluate(terms, margin, precision, work)[0].real) >= 0
        except Undecided:
            continue
    return False


def _equal_modulo_primes(terms: Terms, gold: int, answer: int, draw: random.Random, work: WorkBudget) -> bool:
    names = sorted(terms.bounds[gold].symbols | terms.bounds[answer].symbols)
    agreed = 0
    for _ in range(4 * PRIMES):
        work.spend(300)
        prime, unit = _prime(draw)
        values = {name: draw.randrange(1, prime) for name in names}
        try:
            x, y = _modulo(terms, (gold, answer), values, prime, unit, work)
        except ZeroDivisionError:
            continue
        if x != y:
            return False
        agreed += 1
        if agreed == PRIMES:
            return True
    raise NoAnswer("a division by 0")


def _modulo(
    terms: Terms, indices: tuple[int, ...], values: dict[str, int], prime: int, unit: int, work: WorkBudget
) -> list[int]:
    """Returns the values of rational terms modulo a prime; `unit` is a square root of -1. Raises ZeroDivisionError."""
    here: dict[int, int] = {}
    for index in terms.reachable(*indices):
        op, args, value = terms.terms[index]
        a = [here[argument] for argument in args]
        work.spend(3)
        match op:
            case "number":
                result = value.numerator * _inverse(value.denominator, prime)  # type: ignore[union-attr]
            case "symbol":
                result = values[value]  # type: ignore[index]
            case "i":
                result = unit
            case "add":
                result = a[0] + a[1]
            case "multiply":
                result = a[0] * a[1]
            case "divide":
                work.spend(10)
                result = a[0] * _inverse(a[1], prime)
            case "power":
                work.spend(20)
                result = pow(a[0] if value > 0 else _inverse(a[0], prime), abs(value), prime)  # type: ignore
            case "factorial":
                result, n = 1, int(terms.constant(args[0]))  # type: ignore[arg-type]
                work.spend(n / 10)
                for factor in range(2, n + 1):
                    result = result * factor % prime
            case "binomial":
                n, k = (int(terms.constant(argument)) for argument in args)  # type: ignore[arg-type]
                work.spend(k)
                top = bottom = 1
                for step in range(k):
                    top, bottom = top * (n - step) % prime, bottom * (step + 1) % prime
                result = top * _inverse(bottom, prime)
            case _:
                raise AssertionError(op)
        here[index] = result % prime
    return [here[index] for index in indices]


def _inverse(a: int, prime: int) -> int:
    if a % prime == 0:
        raise ZeroDivisionError
    return pow(a, -1, prime)


def _prime(draw: random.Random) -> tuple[int, int]:
    """Returns a random prime of 61 bits, 1 modulo 4, and a square root of -1."""
    while True:
        n = (1 << 60) | draw.getrandbits(60) & ~3 | 1
        if pow(2, n - 1, n) == 1 and _is_prime(n):
            while True:
                unit = pow(draw.randrange(2, n), (n - 1) // 4, n)
                if unit * unit % n == n - 1:
                    return n, unit


def _is_prime(n: int) -> bool:
    """Returns whether n is prime, by Miller-Rabin with bases that suffice below 2^64."""
    odd = n - 1
    twos = (odd & -odd).bit_length() - 1
    odd >>= twos
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        x = pow(base, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


def _constants_equal(terms: Terms, gold: int, answer: int, work: WorkBudget, *, is_first: bool = True) -> bool:
    """Returns whether two constants are equal. For constants and at the first point of expressions (`is_first`), they
    must agree to the bits in the module docstring; at further points 2^-(128 + 2 M) suffices, to detect another branch.
    """
    difference = terms.subtract(gold, answer)
    if terms.constant(difference) is not None:
        return terms.constant(difference) == 0
    algebraic = terms.bounds[difference].kind <= ALGEBRAIC
    limit = MAX_ALGEBRAIC_PRECISION if algebraic else MAX_PRECISION
    functions = sum(terms.terms[index].op in (*FUNCTIONS, "raise", "root") for index in terms.reachable(difference))
    precision = FIRST_PRECISION
    while True:
        try:
            z, largest = evaluate(terms, difference, precision, work)
            if is_nonzero(z):
                return False
            bits = separation_bits(terms, difference) if algebraic else float("inf")
            if bits > limit / 2 or not is_first:
                bits = 128 + largest * ((4 + functions) if is_first else 2)
            if is_below(z, bits):
                return True
            step = bits + largest + 64
        except Undecided:
            step = 4 * precision
        if precision >= limit:
            raise NoAnswer("values that are too near each other, or no value")
        precision = int(min(limit, max(2 * precision, step)))


def _equal_at_points(terms: Terms, gold: int, answer: int, draw: random.Random, work: WorkBudget) -> bool:
    names = sorted(terms.bounds[gold].symbols | terms.bounds[answer].symbols)
    naturals = _integer_symbols(terms, gold)
    if terms.bounds[gold].kind == RATIONAL:
        naturals |= _integer_symbols(terms, answer)
    agreed = 0
    size = len(terms.reachable(gold, answer))
    complex_points: list[Callable[[bool], bool]] = []
    for attempt in range(TRIES):
        here = Terms(MAX_BITS_OF_GOLD)
        work.spend(4 * size)
        values = {name: _value(draw, attempt >> index, name in naturals) for index, name in enumerate(names)}
        try:
            (g,) = here.substitute(terms, [gold], values)
            is_real = here.constant(g) is not None or _evaluated(here, g, work).imag == EXACT_ZERO
        except (NoAnswer, Undecided):
            if work.left < 0:
                raise
            continue  # the gold answer has no value here

        def agree(is_first: bool, here: Terms = here, g: int = g, values: dict[str, Fraction] = values) -> bool:
            try:
                (a,) = here.substitute(terms, [answer], values)
                return g == a or _constants_equal(here, g, a, work, is_first=is_first)
            except NoAnswer:
                if work.left < 0:
                    raise
                return False  # the answer has no value where the gold answer has one

        if not is_real:
            complex_points.append(agree)
            continue
        if not agree(agreed == 0):
            return False
        agreed += 1
        if agreed == POINTS:
            return True
    if agreed < FEWEST_POINTS:
        if agreed + len(complex_points) < FEWEST_POINTS:
            raise NoAnswer("an expression without values")
        return all(agree(index == 0) for index, agree in enumerate(complex_points[:POINTS]))
    return True


def _evaluated(terms: Terms, index: int, work: WorkBudget) -> Complex:
    try:
        return evaluate(terms, index, FIRST_PRECISION, work)[0]
    except Undecided:
        return evaluate(terms, index, 8 * FIRST_PRECISION, work)[0]


def _value(draw: random.Random, sign_bit: int, is_integer: bool) -> Fraction:
    """Returns a random value for a symbol, with the sign given by the low bit of `sign_bit`, of several sizes; a
    natural number if it must be an integer."""
    if is_integer:
        return Fraction(draw.randrange(0, LARGEST_INTEGER))
    size = draw.choice((1, 8, 100))
    value = Fraction(draw.randrange(100, 1000 * size), 1009)
    return -value if sign_bit & 1 else value


def _integer_symbols(terms: Terms, index: int) -> set[str]:
    """Returns the symbols in factorials, binomials, or exponents of negative numbers."""
    symbols: set[str] = set()
    for part in terms.reachable(index):
        op, args, _ = terms.terms[part]
        base = terms.constant(args[0]) if op == "raise" else None
        if op in ("factorial", "binomial") or (base is not None and base < 0):
            symbols |= terms.bounds[part].symbols
    return symbols
