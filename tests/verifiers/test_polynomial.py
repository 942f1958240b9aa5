from fractions import Fraction

import pytest

from jrl.tasks.verifiers import polynomial
from jrl.tasks.verifiers.polynomial import NoPolynomial, constant, derivative, read_polynomial


def test_decimals_are_exact():
    assert constant(read_polynomial("0.10000000000000000001")) != Fraction(1, 10)
    assert constant(read_polynomial(" 1.5e-3 + .5 + 2. ")) == Fraction(25015, 10_000)
    assert constant(read_polynomial("1e-400 * 1e400")) == 1
    for text in ("1e401", "1.0e99999", "1" * 600 + "." + "1" * 600):
        with pytest.raises(NoPolynomial, match="beyond the caps"):
            read_polynomial(text)


def test_a_number_is_read_exactly():
    # (0.1 + 2/10) * 3 - 4**2 / -8 = 0.9 + 2 = 29/10, where floats would miss
    assert constant(read_polynomial("(0.1 + 2/10) * 3 - 4**2 / -8")) == Fraction(29, 10)


def test_a_polynomial_does_not_depend_on_how_it_is_written():
    assert read_polynomial("(x + y)**2 - y*y") == read_polynomial("x**2 + 2*y*x") == {
        (("x", 2),): 1,
        (("x", 1), ("y", 1)): 2,
    }  # fmt: skip
    assert read_polynomial("x - x") == {}


def test_the_derivative_treats_other_letters_as_constants():
    # d/dx (3 x**2 y - x/2 + C) = 6 x y - 1/2
    assert derivative(read_polynomial("3*x**2*y - x/2 + C"), "x") == read_polynomial("6*x*y - 1/2")


@pytest.mark.parametrize(
    "text",
    [
        "", "x +", "f(x)", "x.real", "xy", "[1]", "1/0", "1/(x-x)", "x/y", "x**y", "x**-1", "x**0.5", "x**1001",
        "9**9**9**9", "9**999999999", "(10**999)**999", "1//2", "1%2", "1 if 1 else 2", "lambda: 1", "'a'*9",
        "True", "1j", "1_0", "x; y", "x = 1", "x\n+1", "__import__", "(" * 500 + "1" + ")" * 500, "1" * 5000,
        "-" * 3000 + "1", "(a+b+c+d+e+f+g+h)**40", "0" * 20 + "1", "1e401", "\x00", "١",
    ],
)  # fmt: skip
def test_whatever_else_is_refused(text):
    with pytest.raises(NoPolynomial):
        read_polynomial(text)


@pytest.mark.parametrize(
    "text",
    ["(x+1)**999", "+".join(["(x+1)**99"] * 400), "*".join(["(x+1)"] * 600), "(a+b)**500", "(x+y+z)**90"],
)
def test_the_products_of_all_terms_are_bounded_together(text):
    # (x+1)**999 took 4 s of CPU time, and a sum of such powers any number of times that.
    with pytest.raises(NoPolynomial, match="more than 10000 products of terms"):
        read_polynomial(text)


@pytest.mark.parametrize("sign", ["+", "-"])
def test_a_long_sum_does_not_go_through_its_terms_for_each_sign(sign, monkeypatch):
    checked, check = [], polynomial._checked
    monkeypatch.setattr(polynomial, "_checked", lambda terms: checked.append(len(terms)) or check(terms))
    letters = "+".join("abcdefghijklmnopqrstuvwxyz")
    found = read_polynomial(f"({letters})**2*(a+b+c)" + f"{sign}x" * 900)
    assert len(found) == 977 and found[(("x", 1),)] == int(f"{sign}900")
    assert sum(checked) < 10_000  # 900 signs times 977 terms are 879,300


def test_a_power_of_one_term_is_one_step():
    assert read_polynomial("(2*x*y)**3") == {(("x", 3), ("y", 3)): 8}
    assert read_polynomial("(x-x)**9") == {}
    assert read_polynomial("(x-x)**0") == read_polynomial("(x+1)**0") == {(): 1}
    assert constant(read_polynomial("+".join(["9**999"] * 580))) == 580 * 9**999
