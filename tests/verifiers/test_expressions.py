"""What MathEqual computes with: bounds, intervals, primes, and how much work a comparison may take."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from mpmath import libmp

from benchmarks import math_answers
from jrl.tasks.verifiers.expressions import equality
from jrl.tasks.verifiers.expressions.balls import WORK, Undecided, WorkBudget, evaluate
from jrl.tasks.verifiers.expressions.forms import Reader, read_answer
from jrl.tasks.verifiers.expressions.parser import parse
from jrl.tasks.verifiers.expressions.terms import MAX_TERMS, NoAnswer, Terms, separation_bits
from jrl.tasks.verifiers.expressions.tokens import tokenize


def build(*texts: str) -> tuple[Terms, list[int]]:
    terms = Terms(2.0**45)
    return terms, [parse(tokenize(text), terms, frozenset("abnxyz")) for text in texts]


def test_the_separation_bound_of_a_difference_of_a_root_and_a_number():
    # sqrt(2) - 1 has the conjugate -sqrt(2) - 1: |(sqrt(2) - 1)(-sqrt(2) - 1)| = 1, and so
    # log2(1 / (sqrt(2) - 1)) = log2(sqrt(2) + 1) = 1.27155..., which the bound meets.
    terms, (place,) = build(r"\sqrt{2}-1")
    assert separation_bits(terms, place) == pytest.approx(math.log2(math.sqrt(2) + 1), abs=1e-12)
    # sqrt(3/2) - 1 = (sqrt(6) - 2) / 2 with the conjugate (-sqrt(6) - 2) / 2
    terms, (place,) = build(r"\sqrt{\frac{3}{2}}-1")
    assert separation_bits(terms, place) == pytest.approx(math.log2(2) + math.log2(math.sqrt(6) + 2), abs=1e-12)
    # 1 / 3 - sqrt(2) / 5 = (5 - 3 sqrt(2)) / 15: the conjugate's numerator is at most 5 + 3 sqrt(2), the norm 7 / 225.
    terms, (place,) = build(r"\frac{1}{3}-\frac{\sqrt{2}}{5}")
    assert separation_bits(terms, place) == pytest.approx(math.log2(15) + math.log2(5 + 3 * math.sqrt(2)), abs=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        r"\sqrt{2}+\sqrt{3}-\sqrt{10}",
        r"\sqrt[3]{2}-\frac{63}{50}",
        r"\frac{1}{7}-\frac{\sqrt{5}}{16}",
        r"\sqrt{26}+\sqrt{1000}-\sqrt{1349}",
        r"\sqrt{\sqrt{7}+2}-\frac{155}{72}",
    ],
)
def test_no_algebraic_number_is_nearer_to_0_than_its_separation_bound(text):
    terms, (place,) = build(text)
    z, _ = evaluate(terms, place, 400, WorkBudget())
    assert -separation_bits(terms, place) < math.log2(abs(libmp.to_float(z.real.middle)))


def test_a_ball_holds_the_value():
    draw = random.Random(0)
    checked = 0
    for _ in range(150):
        text = math_answers.constant(draw, 3)
        try:
            terms, (place,) = build(text)
            near, exact = evaluate(terms, place, 40, WorkBudget())[0], evaluate(terms, place, 300, WorkBudget())[0]
        except (NoAnswer, Undecided):
            continue
        for x, y in zip(near, exact):
            assert libmp.mpf_le(libmp.mpf_abs(libmp.mpf_sub(x.middle, y.middle)), x.radius), text
        checked += 1
    assert checked > 100


def test_complex_functions_have_their_principal_values():
    # sqrt(-3 - 4i) = 1 - 2i, (1 + i)^i = e^{-pi/4} (cos(ln(2)/2) + i sin(ln(2)/2)), cos(i) = cosh(1)
    pairs = [
        (r"\sqrt{-3-4i}", "1-2i"),
        ("(1+i)^i", r"e^{-\frac{\pi}{4}}(\cos\frac{\ln 2}{2}+i\sin\frac{\ln 2}{2})"),
        (r"\cos i", r"\cosh 1"),
        (r"\ln(-1-i)", r"\frac{\ln 2}{2}-\frac{3\pi}{4}i"),
        (r"\sin(1+i)", r"\sin 1\cosh 1+i\cos 1\sinh 1"),
    ]
    for a, b in pairs:
        terms, (left, right) = build(a, b)
        assert equality.equal(terms, left, right, 0, WorkBudget()), a
        assert not equality.equal(terms, left, terms.add(right, terms.named("i")), 0, WorkBudget()), a


def test_primes_are_prime_and_have_a_root_of_minus_one():
    # 3215031751 passes the test to the bases 2, 3, 5 and 7; 2^61 - 1 is prime.
    assert not equality._is_prime(3215031751)
    assert equality._is_prime(2**61 - 1)
    prime, unit = equality._prime(random.Random(0))
    assert prime.bit_length() == 61 and equality._is_prime(prime)
    assert unit * unit % prime == prime - 1


def test_roots_are_exact_or_stay_roots():
    terms = Terms()
    for index, base, root in (
        (2, Fraction(9, 4), Fraction(3, 2)),
        (3, -(10**90), -(10**30)),
        (5, 7**50, 7**10),
        (2, 0, 0),
    ):
        assert terms.constant(terms.root(index, terms.number(base))) == root
    assert terms.constant(terms.root(2, terms.number(10**60 + 1))) is None
    assert terms.constant(terms.root(3, terms.number(10**60 - 1))) is None


@pytest.mark.parametrize(
    "text", ["10^{10000}", "3^{40000}", "4000!^{4}", r"\binom{1000000}{5000}", "(10^{999})^{999}", "(x+1)^{10^{9}}"]
)
def test_what_is_too_large_is_refused_before_it_is_built(text):
    with pytest.raises(NoAnswer, match="bits"):
        parse(tokenize(text), Terms(), frozenset("x"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1+" * 600 + "1", "tokens"),
        ("x_{1" + "+1" * 9 + "}", "subscript"),
        (r"5\%\%\%", "units"),
        ("1," * 300 + "1", "elements"),
        ("5" * 5000, "characters"),
        ("1" * 1001, "digits"),
        ("(" * 33 + "1" + ")" * 33, "deep"),
        (r"\sqrt" * 200 + "1", "deep"),
        ("|" * 17 + "1" + "|" * 17, "absolute values"),
    ],
)
def test_a_cap_is_named_in_the_refusal(text, message):
    with pytest.raises(NoAnswer, match=message):
        read_answer(text, Reader(Terms(), frozenset()))


def test_the_number_of_operations_is_bounded():
    terms = Terms()
    with pytest.raises(NoAnswer, match="operations"):
        for k in range(MAX_TERMS + 1):
            terms.symbol(f"x_{k}")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [(r"e^{3}-1", r"\ln 2+\sin 1"), (r"\sin^2 x", r"1-\cos^2 x"), (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}")],
)
def test_work_is_the_same_whenever_it_is_done(gold, answer):
    spent = []
    for _ in range(2):
        terms, (a, b) = build(gold, answer)
        work = WorkBudget()
        equality.equal(terms, a, b, 7, work)
        spent.append(WORK - work.left)
    assert spent[0] == spent[1] > 0


def test_work_that_is_used_up_ends_the_comparison():
    terms, (a, b) = build(r"\sin 1", r"\cos(\frac{\pi}{2}-1)")
    assert equality.equal(terms, a, b, 0, WorkBudget())
    with pytest.raises(NoAnswer, match="too much"):
        equality.equal(terms, a, b, 0, WorkBudget(300))


def test_hostile_text_is_judged_without_an_exception_and_none_is_accepted(trials):
    report = math_answers.measure(trials(450, 100_000, seed=1), seed=1, kinds=list(math_answers.KINDS))
    assert (report["exceptions"], report["wrong"]) == ([], [])
