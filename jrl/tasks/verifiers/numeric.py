"""Numeric: the extracted text is one plain number, within a declared tolerance of the example's answer."""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction

from jrl.tasks.example import Example
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers.extract import Extract, extract_answer

MAX_DIGITS = 1000  # characters of a number
MAX_EXPONENT = 400
NUMBER = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.(?P<decimals>[0-9]*))?"
    r"(?:[eE](?P<exponent>[+-]?[0-9]{1,4}))?"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numeric:
    """The answer is correct if |answer - gold| <= max(absolute, relative * |gold|); both 0: equal as rationals."""

    weight: float = 1.0  # of this verifier in the reward
    extract: Extract = "all"  # where the answer is; answer_line: the last line, after Answer:, hash: after ####
    absolute: float = 0.0  # tolerance
    relative: float = 0.0  # tolerance relative to |gold|

    def __post_init__(self):
        for name in ("absolute", "relative"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"Numeric.{name} is {getattr(self, name)}; it must be a finite number of at least 0")


def score(config: Numeric, completion: str, example: Example) -> Verdict:
    """Returns CORRECT with reward 1, WRONG or UNPARSABLE with reward 0. Compares exact rationals, not floats.

    Raises:
        ValueError: the example's answer is missing or is not a number.
    """
    gold = read_number(example.answer or "")
    if gold is None:
        raise ValueError(f"example {example.id!r} has the answer {example.answer!r}; Numeric needs a plain number")
    answer = extract_answer(completion, config.extract)
    number = None if answer is None else read_number(answer)
    if number is None:
        return Verdict(Status.UNPARSABLE, 0.0, f"no single number in {config.extract!r}")
    tolerance = max(Fraction(config.absolute), Fraction(config.relative) * abs(gold))
    if abs(number - gold) <= tolerance:
        return Verdict(Status.CORRECT, 1.0)
    return Verdict(Status.WRONG, 0.0)


def read_number(text: str) -> Fraction | None:
    """Returns the number that the whole of `text` spells, or None.

    Accepts ASCII digits with an optional sign, commas between groups of three digits, decimal point and exponent, or a
    ratio of two such numbers ("-3/4"). No unit, percent sign, name, second number or infinity, at most MAX_DIGITS
    characters, and no exponent beyond MAX_EXPONENT.
    """
    text = text.strip()
    if len(text) > MAX_DIGITS:
        return None
    head, slash, tail = text.partition("/")
    top = _decimal(head.strip())
    if not slash or top is None:
        return top
    bottom = _decimal(tail.strip())
    return top / bottom if bottom else None


def _decimal(text: str) -> Fraction | None:
    match = NUMBER.fullmatch(text)
    if match is None or not (match["whole"] or match["decimals"]):
        return None
    exponent = int(match["exponent"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    decimals = match["decimals"] or ""
    digits = (match["whole"] or "").replace(",", "") + decimals
    value = Fraction(int(digits)) * Fraction(10) ** (exponent - len(decimals))
    return -value if match["sign"] == "-" else value
