r"""MathEqual on labeled pairs. Each label holds under the module's policy: exact, one answer, units as in gold."""

import pytest
from verifier_fakes import example

from jrl.tasks.verdict import Status
from jrl.tasks.verifiers import math_equal
from jrl.tasks.verifiers.math_equal import MathEqual

EQUAL = [
    ("5", "5"), ("5", "5."), ("-5", "-5.0"), ("1,000", "1000"), ("1000", "1{,}000"), ("1000", "1e3"),
    ("0.5", r"\frac{1}{2}"), (r"\frac12", "0.5"), (r"1\frac{1}{2}", "3/2"), (r"$\frac{3}{4}$", "0.75"),
    (r"-\frac{1}{3}", r"\frac{-1}{3}"), (r"\dfrac{7}{2}", "3.5"), ("1/3", r"\frac{2}{6}"), ("2", r"\sqrt{4}"),
    ("2^{10}", "1024"), ("5!", "120"), (r"\binom{5}{2}", "10"), (r"2\sqrt{2}", r"\sqrt{8}"), (r"\sqrt[3]{8}", "2"),
    (r"\frac{1}{\sqrt2}", r"\frac{\sqrt{2}}{2}"), (r"2\pi", r"\pi\cdot 2"), (r"\sin(\pi/6)", "0.5"),
    ("0", r"\sin(\pi)"),
    (r"\ln(e^2)", "2"), ("x^2-1", "(x-1)(x+1)"), (r"\frac{x+1}{2}", "0.5x+0.5"), (r"\sin^2 x+\cos^2 x", "1"),
    ("(1, 2)", "(1,2)"), (r"\left(1, 2\right)", "(1,2)"), (r"\{2,1\}", r"\{1, 2\}"), ("[0,1)", "[0, 1)"),
    (r"(-\infty, 2] \cup (3, 4)", r"(3,4)\cup(-\infty,2]"), ("3, 4", "4,3"), ("(0.5, 1)", r"(\frac12, 1)"),
    (r"x \le 3", r"x\leq 3"), ("y=2x+1", "y = 1+2x"), (r"50\%", r"50\%"), (r"\pm 3", r"\pm 3"),
    (r"5\text{ cm}", r"5\text{ cm}"), (r"90^\circ", r"90^{\circ}"), ("Monday", r"\text{Monday}"), ("A", "A"),
    (r"\begin{pmatrix}1&0.5\\3&4\end{pmatrix}", r"\begin{pmatrix}1&\frac12\\3&4\end{pmatrix}"),
    (r"\frac{1}{2004!}", r"\frac{1}{2004!}"), ("|x|", r"\sqrt{x^2}"), ("e^{2}", "e^2"), (r"\infty", r"\infty"),
]  # fmt: skip
DIFFERENT = [
    ("5", "6"), ("1/3", "0.333"), ("1/3", "0.33333333333333333"), ("3.14159", r"\pi"), ("x^2", "x^3"), ("x", "y"),
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}"), (r"\frac{1}{200!}", r"\frac{1}{206!}"), ("0", r"\frac{1}{2004!}"),
    ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), (r"\{1,2\}", r"\{1,2,2\}"), ("1,2", "1,2,3"), ("(1,2)", "(1,2,3)"),
    ("y=2x+1", "y=3x+5"), (r"x \le 3", r"y \le 3"), ("A", "B"), ("x+1", "1"), (r"\sqrt{x^2}", "x"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"), ("Monday", "Tuesday"),
    (r"50\%", "0.5"), (r"50\%", "50"), (r"\pm 2021", "2021"), (r"90^\circ", "90"),
]  # fmt: skip
NO_ANSWER = [
    ("5", "6 = 5"), ("5", "x=4=5"), ("5", r"4 \lor 5"), ("7", "n=n=7"), ("3", "3, 3, 3"), ("50", r"50\%"),
    ("0.5", r"50\%"), ("2021", r"\pm 2021"), ("5", "2 3"), ("5", "--5"), ("5", "5 or 6"), ("5", r"5\text{ or }6"),
    ("5", "x=5"), ("5", "5,"), ("5", "{5"), ("5", ""), ("5", "nan"), ("5", r"\boxed{5}"), ("5", r"\text{five}"),
    ("5", r"5\text{ cm}"), (r"5\text{ cm}", r"5\text{ m}"), ("5", "5=5"), ("5", r"5 \approx 5"), ("5", r"5 \vee 5"),
    ("5", r"5 \text{ and } 5"), ("5", "5;6"), ("5", "9^{9^{9^9}}"), ("5", "((9^{999})^{999})^{999}"), ("5", "99999!"),
    ("5", "(5!)!"), ("5", "10^{10000}"), ("5", "(" * 300 + "5" + ")" * 300), ("5", "5" * 5000), ("5", "1" * 2000),
    ("5", "__import__('os').system('id')"), ("5", "eval(5)"), ("5", "lambda:5"), ("5", "5; 5"), ("5", "5\\\\5"),
    ("5", "５"), ("5", "5\u200b"), ("5", "\u202e5"), ("5", r"\input{/etc/passwd}"), ("5", r"\frac{5}{0}"), ("5", "+"),
    ("5", r"\in 5"), ("x \\le 3", "x < 3"),
]  # fmt: skip


def score(gold: str, answer: str, **fields):
    return math_equal.score(MathEqual(**fields), f"so \\boxed{{{answer}}}", example(gold))


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_what_means_the_same_is_correct_both_ways_round(gold, answer):
    assert score(gold, answer).status is Status.CORRECT
    assert score(answer, gold).status is Status.CORRECT


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_what_means_something_else_is_never_correct(gold, answer):
    assert score(gold, answer).status is Status.WRONG


@pytest.mark.parametrize(("gold", "answer"), NO_ANSWER)
def test_what_is_no_single_answer_is_unparsable(gold, answer):
    verdict = score(gold, answer)
    assert verdict.status is Status.UNPARSABLE
    assert verdict.reward == 0.0


@pytest.mark.parametrize("text", ["5", r"\boxed{5} \boxed{5}", r"\boxed{5", "the answer is 5", r"\boxed{} 5"])
def test_only_a_single_box_holds_an_answer(text):
    assert math_equal.score(MathEqual(), text, example("5")).status is Status.UNPARSABLE


def test_an_equation_answers_where_its_symbol_is_declared():
    assert score("5", "x = 5", symbol="x").status is Status.CORRECT
    assert score("5", "y = 5", symbol="x").status is Status.UNPARSABLE
    assert score("5", "x = 4 = 5", symbol="x").status is Status.UNPARSABLE
    assert score("5", "x = 6", symbol="x").status is Status.WRONG


@pytest.mark.parametrize("gold", [None, "", r"\foo{5}", "5 6"])
def test_a_gold_answer_that_cannot_be_read_is_an_error_of_the_data(gold):
    with pytest.raises(ValueError, match="example 'e'"):
        math_equal.score(MathEqual(), r"\boxed{7}", example(gold))
