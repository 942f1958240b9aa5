"""ExpressionTests: the completion is an expression in x that must pass tests. A stand-in for programs: jrl runs none.

`example.info["tests"]` is a list of [x, value] pairs, numbers as text or whole numbers: [["0", "1"], ["1/2", "2"]].
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal

from jrl.tasks.example import Example
from jrl.tasks.rewards.execution import all_passed, share_passed, speed, staged
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers.extract import Extract, extract_answer
from jrl.tasks.verifiers.numeric import read_number
from jrl.tasks.verifiers.polynomial import NoPolynomial, Polynomial, read_polynomial

# (passed, by test; the completion's expression; the example) -> reward
REWARDS: dict[str, Callable[[Sequence[bool], str, Example], float]] = {
    "all": lambda passed, answer, example: all_passed(passed),
    "share": lambda passed, answer, example: share_passed(passed),
    "staged": lambda passed, answer, example: staged(True, passed),
    "speed": lambda passed, answer, example: speed(passed, operations(answer), reference_operations(example)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpressionTests:
    """Checks a polynomial in x, written with + - * / ** and parentheses, against values at given x (R3)."""

    weight: float = 1.0  # of this verifier in the reward
    extract: Extract = "all"  # where the answer is; answer_line: the last line, after Answer:, hash: after ####
    # all: 1 if all tests pass; share: the share that passes; staged: part for an expression that parses, more if it has
    # values, 1 if all pass; speed: if all pass, the share of operations saved relative to the example's answer
    reward: Literal["all", "share", "staged", "speed"] = "all"


def score(config: ExpressionTests, completion: str, example: Example) -> Verdict:
    """Returns CORRECT if all tests pass, else WRONG, with the reward. UNPARSABLE with 0 if there is no answer or
    it is not a polynomial. UNPARSABLE too for a polynomial with another variable than x: with 0, or under `staged` with
    the reward for parsing.

    Raises:
        ValueError: the example has no tests, or one that is not two numbers; or for `speed` no answer with operations.
    """
    tests = tests_of(example)
    answer = extract_answer(completion, config.extract)
    if answer is None:
        return Verdict(Status.UNPARSABLE, 0.0, f"no single answer in {config.extract!r}")
    try:
        polynomial = read_polynomial(answer)
    except NoPolynomial as error:
        return Verdict(Status.UNPARSABLE, 0.0, str(error)[:200])
    try:
        passed = [value_at(polynomial, x) == value for x, value in tests]
    except NoPolynomial as error:
        reward = staged(False, [False] * len(tests)) if config.reward == "staged" else 0.0
        return Verdict(Status.UNPARSABLE, reward, str(error)[:200])
    reward = REWARDS[config.reward](passed, answer, example)
    return Verdict(Status.CORRECT if all(passed) else Status.WRONG, reward)


def operations(expression: str) -> int:
    """Returns the number of operators in an expression, as the cost of its evaluation."""
    return len(re.findall(r"\*\*|[-+*/]", expression))


def reference_operations(example: Example) -> int:
    """Returns the number of operators in an example's answer. Raises ValueError if there are none."""
    count = 0 if example.answer is None else operations(example.answer)
    if not count:
        raise ValueError(f"example {example.id!r} has the answer {example.answer!r}; ExpressionTests.reward = 'speed' "
                         "needs an expression with an operation")  # fmt: skip
    return count


def tests_of(example: Example) -> list[tuple[Fraction, Fraction]]:
    """Returns the (x, value) pairs of an example."""
    pairs = example.info.get("tests")
    if not isinstance(pairs, list | tuple) or not pairs:
        raise ValueError(f"example {example.id!r} has no info['tests']; ExpressionTests needs a list of [x, value]")
    tests = []
    for test in pairs:
        numbers = [read_number(str(number)) for number in test] if isinstance(test, list | tuple) else []
        if len(numbers) != 2 or None in numbers:
            raise ValueError(f"example {example.id!r} has the test {test!r}; it must be [x, value], two numbers")
        tests.append((numbers[0], numbers[1]))
    return tests


def value_at(polynomial: Polynomial, x: Fraction) -> Fraction:
    """Returns the value of a polynomial in x. Raises NoPolynomial if it has another variable."""
    total = Fraction(0)
    for monomial, coefficient in polynomial.items():
        for variable, power in monomial:
            if variable != "x":
                raise NoPolynomial(f"the variable {variable}; only x has a value")
            coefficient *= x**power
        total += coefficient
    return total
