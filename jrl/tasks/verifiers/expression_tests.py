"""ExpressionTests: the completion is an expression in x that must pass tests. It stands in for programs: jrl runs none.

`example.info["tests"]` is a list of [x, value] pairs, numbers as text or whole numbers: [["0", "1"], ["1/2", "2"]].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal

from jrl.tasks.example import Example
from jrl.tasks.rewards.execution import all_passed, share_passed
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers.extract import Extract, extract_answer
from jrl.tasks.verifiers.numeric import read_number
from jrl.tasks.verifiers.polynomial import NoPolynomial, Polynomial, read_polynomial

REWARDS: dict[str, Callable[[Sequence[bool]], float]] = {"all": all_passed, "share": share_passed}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpressionTests:
    """A polynomial in x, written with + - * / ** and brackets, against values at given x (R3)."""

    weight: float = 1.0  # of this verifier in the reward
    extract: Extract = "all"  # the place of the answer: all, answer_tag, boxed, hash (after ####) or last_line
    reward: Literal["all", "share"] = "all"  # 1 where all tests pass, or the share that does


def score(config: ExpressionTests, completion: str, example: Example) -> Verdict:
    """Returns CORRECT where all tests pass and WRONG otherwise, with the reward; UNPARSABLE with 0 for what is no
    polynomial in x.

    Raises:
        ValueError: the example has no tests, or one that is not two numbers.
    """
    tests = tests_of(example)
    answer = extract_answer(completion, config.extract)
    if answer is None:
        return Verdict(Status.UNPARSABLE, 0.0, f"no single answer in {config.extract!r}")
    try:
        polynomial = read_polynomial(answer)
        passed = [value_at(polynomial, x) == value for x, value in tests]
    except NoPolynomial as error:
        return Verdict(Status.UNPARSABLE, 0.0, str(error)[:200])
    return Verdict(Status.CORRECT if all(passed) else Status.WRONG, REWARDS[config.reward](passed))


def tests_of(example: Example) -> list[tuple[Fraction, Fraction]]:
    """Returns the (x, value) pairs of an example."""
    given = example.info.get("tests")
    if not isinstance(given, list | tuple) or not given:
        raise ValueError(f"example {example.id!r} has no info['tests']; ExpressionTests needs a list of [x, value]")
    found = []
    for test in given:
        numbers = [read_number(str(number)) for number in test] if isinstance(test, list | tuple) else []
        if len(numbers) != 2 or None in numbers:
            raise ValueError(f"example {example.id!r} has the test {test!r}; it must be [x, value], two numbers")
        found.append((numbers[0], numbers[1]))
    return found


def value_at(polynomial: Polynomial, x: Fraction) -> Fraction:
    """Returns the value of a polynomial in x. Raises NoPolynomial where it has another variable."""
    total = Fraction(0)
    for monomial, coefficient in polynomial.items():
        for variable, power in monomial:
            if variable != "x":
                raise NoPolynomial(f"the variable {variable}; only x has a value")
            coefficient *= x**power
        total += coefficient
    return total
