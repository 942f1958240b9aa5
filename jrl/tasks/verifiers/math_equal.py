r"""MathEqual: one final answer that is exactly equivalent to the gold answer.

The text is parsed by a closed grammar (expressions/) and never run as code. The form of the answer (relation, tuple,
interval, set, list, matrix) must match the gold answer's. Each scalar is then compared exactly, or to so many bits that
no answer of a model agrees by chance (expressions/equality.py). So `6 = 5`, `x=4=5`, `4 \lor 5`, `n=n=7`, `3, 3, 3` and
`50\%` (for 50 or for 1/2) are not answers, and 2^{200}+1 is not 2^{200}.

docs/math-answers.md has the full policy. Nothing is guessed: a percent sign, a unit, a degree sign or a currency must
match the gold answer's (`units`); `x = 5` answers 5 only if `symbol` is "x"; a decimal is exact unless there is a
`decimal_tolerance`. Size and computation are bounded by counts, so a verdict takes milliseconds and does not depend on
the machine.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from jrl.tasks.example import Example
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers.expressions import equality
from jrl.tasks.verifiers.expressions.balls import WorkBudget
from jrl.tasks.verifiers.expressions.forms import Form, Reader, letters_of, phrase, read_answer, word
from jrl.tasks.verifiers.expressions.terms import MAX_BITS, MAX_BITS_OF_GOLD, NoAnswer, Terms
from jrl.tasks.verifiers.expressions.tokens import MAX_CHARACTERS, tokenize
from jrl.tasks.verifiers.extract import Extract, extract_answer

UNORDERED = ("list", "set", "union")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MathEqual:
    weight: float = 1.0  # of this verifier in the reward
    extract: Extract = "boxed"  # where the answer is; answer_line: the last line, after Answer:, hash: after ####
    symbol: str | None = None  # "x": an answer `x = 5` means 5
    units: Literal["same", "optional"] = "same"  # "optional": a unit, %, degree or currency of only one side is ignored
    decimal_tolerance: float = 0.0  # relative to |gold|, if the gold answer is a decimal

    def __post_init__(self):
        if self.units not in ("same", "optional"):
            raise ValueError(f"MathEqual.units is {self.units!r}; it must be 'same' or 'optional'")
        if not 0 <= self.decimal_tolerance < 1:
            raise ValueError(f"MathEqual.decimal_tolerance is {self.decimal_tolerance}; it must be at least 0, below 1")


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """The context of a comparison of two forms."""

    config: MathEqual
    terms: Terms
    seed: int
    work: WorkBudget


def preload() -> None:
    """Imports and warms up mpmath in the template, so that workers need not."""
    compare(MathEqual(), r"\ln(\sqrt{2}+\pi)", r"\arctan(2^{x})")


def score(config: MathEqual, completion: str, example: Example) -> Verdict:
    """Returns CORRECT with reward 1, WRONG or UNPARSABLE with reward 0.

    Raises:
        ValueError: the example has no answer, or one that is neither a word nor a form that can be parsed.
    """
    if example.answer is None or not example.answer.strip():
        raise ValueError(f"example {example.id!r} has no answer; MathEqual needs one")
    answer = extract_answer(completion, config.extract)
    if answer is None:
        return Verdict(Status.UNPARSABLE, 0.0, f"no single answer in {config.extract!r}")
    if len(answer) > MAX_CHARACTERS:
        return Verdict(Status.UNPARSABLE, 0.0, f"{len(answer)} characters; at most {MAX_CHARACTERS} are read")
    try:
        return compare(config, example.answer, answer)
    except NoAnswer as error:
        raise ValueError(f"example {example.id!r}: the gold answer {example.answer!r} is not read: {error}") from error


def compare(config: MathEqual, gold: str, answer: str) -> Verdict:
    """Returns the verdict on an answer. Raises NoAnswer if the gold answer cannot be parsed."""
    gold, answer = (text.strip().removesuffix(".").strip() for text in (gold, answer))
    if gold == answer:
        return Verdict(Status.CORRECT, 1.0)
    gold_word = word(gold)
    if gold_word is not None:
        return _verdict(word(answer) == gold_word)
    terms = Terms(MAX_BITS_OF_GOLD)
    letters = letters_of(tokenize(gold))
    try:
        expected = read_answer(gold, Reader(terms, letters))
    except NoAnswer:
        if re.search(r"(?<![\\A-Za-z])[A-Za-z]{3,}", gold) and not re.search(r"\\(?!text|mathrm|mbox)[A-Za-z]", gold):
            return _verdict(phrase(answer) == phrase(gold))
        raise
    # An answer needs no larger numbers than the gold answer, beyond a usual size.
    terms.max_bits = max(MAX_BITS, 4 * max((max(bound[:2]) for bound in terms.bounds), default=0))
    seed = int.from_bytes(hashlib.blake2b(f"{gold}\0{answer}".encode("utf-8", "replace"), digest_size=8).digest())
    comparison = _Comparison(config, terms, seed, WorkBudget())
    try:
        predicted = _read_for(expected, answer, letters, comparison)
        return _verdict(_answers(expected, predicted, comparison))
    except (NoAnswer, RecursionError) as error:
        return Verdict(Status.UNPARSABLE, 0.0, str(error)[:200])


def _verdict(is_correct: bool) -> Verdict:
    return Verdict(Status.CORRECT, 1.0) if is_correct else Verdict(Status.WRONG, 0.0)


def _read_for(expected: Form, answer: str, letters: frozenset[str], comparison: _Comparison) -> Form:
    """Returns the form of an answer. Commas in numbers separate thousands, or elements if the answer has as many
    elements as the gold list only in that reading."""
    reader = Reader(comparison.terms, letters, expected.label if expected.kind == "labeled" else "")
    predicted = read_answer(answer, reader)
    count = _length(expected)
    if count > 1 and _length(predicted) != count and "," in answer:
        separated = read_answer(answer, dataclasses.replace(reader, commas_separate=True))
        return separated if _length(separated) == count else predicted
    return predicted


def _length(form: Form) -> int:
    form = form.parts[0] if form.kind == "named" else form
    return len(form.parts) if form.kind == "list" else 1


def _answers(gold: Form, predicted: Form, comparison: _Comparison) -> bool:
    """Returns whether `predicted` is the answer `gold`. Either may name the symbol of the value, as in `x = 5`.

    Raises:
        NoAnswer: it is a relation and the gold answer is not, or is another kind of relation; it is a list and the gold
            answer is not; or it has a unit that does not match.
    """
    if predicted.kind in ("named", "member") and gold.kind not in ("named", "member", "relation"):
        if predicted.label != comparison.config.symbol:
            raise NoAnswer("a relation where none was asked for")
        predicted = predicted.parts[0]
    elif gold.kind in ("named", "member") and predicted.kind not in ("named", "member", "relation", "chain"):
        gold = gold.parts[0]
    if predicted.kind in ("relation", "chain") and (gold.kind, gold.label) != (predicted.kind, predicted.label):
        if not (gold.kind == "named" and predicted.label == "="):
            raise NoAnswer("a relation where none, or another one, was asked for")
    if predicted.kind == "list" and gold.kind != "list":
        raise NoAnswer("a list where one answer was expected")
    if predicted.kind == "labeled" and (gold.kind, gold.label) != (predicted.kind, predicted.label):
        if gold.kind == "labeled" or comparison.config.units == "same":
            raise NoAnswer(f"{predicted.label!r}, which the gold answer does not have")
    return _same(gold, predicted, comparison)


def _same(gold: Form, predicted: Form, comparison: _Comparison) -> bool:
    """Returns whether two forms are equivalent."""
    if "labeled" in (gold.kind, predicted.kind):
        if gold.kind != predicted.kind and comparison.config.units == "optional":
            gold, predicted = (form.parts[0] if form.kind == "labeled" else form for form in (gold, predicted))
            return _same(gold, predicted, comparison)
    if gold.kind == "relation" and predicted.kind in ("relation", "named"):
        return _same_relation(gold, predicted, comparison)
    if (gold.kind, gold.label, len(gold.parts)) != (predicted.kind, predicted.label, len(predicted.parts)):
        return False
    if gold.kind == "scalar":
        return _same_scalar(gold, predicted, comparison)
    if gold.kind in UNORDERED:
        return _same_in_some_order(gold.parts, predicted.parts, comparison)
    return all(_same(x, y, comparison) for x, y in zip(gold.parts, predicted.parts))


def _same_in_some_order(gold: tuple[Form, ...], predicted: tuple[Form, ...], comparison: _Comparison) -> bool:
    """Returns whether the elements match one to one: {3, 3} is not {3, 4}. Greedy matching suffices because equality is
    transitive; with a tolerance it is not, so those elements are matched separately."""
    with_tolerance = [comparison.config.decimal_tolerance > 0 and _has_decimal(x) for x in gold]
    left, rest = list(predicted), []
    for x in (x for x, within in zip(gold, with_tolerance) if not within):  # identical terms need no comparison
        if x in left:
            left.remove(x)
        else:
            rest.append(x)
    for x in rest:
        partner = next((i for i, y in enumerate(left) if _same(x, y, comparison)), None)
        if partner is None:
            return False
        del left[partner]
    return _matched([x for x, within in zip(gold, with_tolerance) if within], left, comparison)


def _has_decimal(form: Form) -> bool:
    return form.is_decimal or any(map(_has_decimal, form.parts))


def _matched(gold: Sequence[Form], predicted: Sequence[Form], comparison: _Comparison) -> bool:
    """Returns whether every element of `gold` can be matched with a different equivalent element of `predicted`, by
    augmenting paths."""
    row_of: dict[int, int] = {}  # by column

    @functools.cache
    def fits(row: int, column: int) -> bool:
        return _same(gold[row], predicted[column], comparison)

    def find(row: int, tried: set[int]) -> bool:
        for column in sorted(
            range(len(predicted)), key=lambda column: predicted[column] != gold[row]
        ):  # identical terms first
            if column not in tried and fits(row, column):
                tried.add(column)
                if column not in row_of or find(row_of[column], tried):
                    row_of[column] = row
                    return True
        return False

    return all(find(row, set()) for row in range(len(gold)))


def _same_scalar(gold: Form, predicted: Form, comparison: _Comparison) -> bool:
    terms, config = comparison.terms, comparison.config
    comparison.work.spend(20)
    if gold.is_decimal and config.decimal_tolerance:
        value = terms.constant(gold.term)
        tolerance = Fraction(config.decimal_tolerance) * abs(value)
        return equality.within(terms, value, predicted.term, tolerance, comparison.work)
    return equality.equal(terms, gold.term, predicted.term, comparison.seed, comparison.work)


def _same_relation(gold: Form, predicted: Form, comparison: _Comparison) -> bool:
    """Returns whether two relations hold for the same values: the sides are the same, or left - right is a constant
    multiple (for < and <= a positive one). If the gold relation is solved for a symbol (`x < 3`), only the same sides
    count."""
    terms, sign = comparison.terms, gold.label
    if predicted.kind == "named":
        if sign != "=":
            return False
    elif predicted.label != sign:
        return False
    if predicted.kind == "relation":
        sides = [predicted.parts] if sign in ("<", r"\le") else [predicted.parts, predicted.parts[::-1]]
        if any(all(_same(x, y, comparison) for x, y in zip(gold.parts, pair)) for pair in sides):
            return True
    is_solved = any(part.kind == "scalar" and terms.terms[part.term].op == "symbol" for part in gold.parts)
    if is_solved or gold.term < 0 or predicted.term < 0:
        return False
    positive = sign in ("<", r"\le")
    return equality.proportional(terms, gold.term, predicted.term, comparison.seed, comparison.work, positive=positive)
