r"""MathEqual: one final answer that means the same as the gold one, exactly.

math-verify reads single expressions; what it would be generous about is refused before it sees any. The form of the
answer (relation, tuple, interval, set, list, matrix) is taken apart here and must be the gold answer's; each piece is
then compared as an exact rational, or to 50 digits, at fixed points of both signs where it has symbols. So `6 = 5`,
`x=4=5`, `4 \lor 5`, `n=n=7`, `3, 3, 3` and `50\%` (for 50 or for 1/2) are not answers, and 1/2004! is not 1/2006!.

Declared, not guessed: a percent sign, a unit, a degree sign, a currency or a \pm counts where the gold answer has the
same; `x = 5` answers 5 only where `symbol` is "x". Needs the [math] extra. It runs in a worker only: an expression
that is slow to evaluate costs its item the deadline.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

from jrl.tasks.example import Example
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers.extract import Extract, extract_answer
from jrl.tasks.verifiers.numeric import read_number

MAX_CHARACTERS = 4096  # of an extracted answer
MAX_DEPTH = 32  # of brackets
MAX_EXPONENT = 1000  # of a literal
MAX_FACTORIAL = 5000
DIGITS = 50  # of an evaluation; two values agree where they differ by less than 1e-40 of the larger
COMMANDS = frozenset(
    "frac dfrac tfrac sqrt pi cdot times div sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp "
    "infty alpha beta gamma delta theta lambda mu phi omega binom".split()
)
RELATIONS = {"\\leq": "\\le", "\\geq": "\\ge", "\\le": "\\le", "\\ge": "\\ge", "\\neq": "\\ne", "\\ne": "\\ne"}
# Signs whose meaning a task must settle: they count where the gold answer ends or begins with the same.
MARKS = (r"\%", r"\$", r"^\circ", r"\pm")


class NoAnswer(ValueError):
    """The text is not one expression of the closed set that is read here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MathEqual:
    weight: float = 1.0  # of this verifier in the reward
    extract: Extract = "boxed"  # the place of the answer: all, answer_tag, boxed, hash (after ####) or last_line
    symbol: str | None = None  # "x": an answer `x = 5` means 5


def preload() -> None:
    """Imports math-verify and warms its grammar, so that workers need not. Raises ImportError naming the extra."""
    _expression("\\frac{1}{2}+x^{2}")


def score(config: MathEqual, completion: str, example: Example) -> Verdict:
    """Returns CORRECT with reward 1, WRONG or UNPARSABLE with reward 0.

    Raises:
        ValueError: the example has no answer, or one that is neither a word nor of the forms read here.
    """
    if example.answer is None or not example.answer.strip():
        raise ValueError(f"example {example.id!r} has no answer; MathEqual needs one")
    answer = extract_answer(completion, config.extract)
    if answer is None:
        return Verdict(Status.UNPARSABLE, 0.0, f"no single answer in {config.extract!r}")
    if len(answer) > MAX_CHARACTERS:
        return Verdict(Status.UNPARSABLE, 0.0, f"{len(answer)} characters; at most {MAX_CHARACTERS} are read")
    gold, given = tidy(example.answer), tidy(answer)
    if given == gold:
        return Verdict(Status.CORRECT, 1.0)
    if re.fullmatch(r"[A-Za-z ]*[A-Za-z]{2,}[A-Za-z ]*|[A-Z]", gold):  # a word or a choice: only itself
        return Verdict(Status.WRONG, 0.0)
    try:
        expected = _form(gold, gold)
    except NoAnswer as error:
        raise ValueError(f"example {example.id!r}: the gold answer {example.answer!r} is not read: {error}") from error
    try:
        if config.symbol is not None and "=" not in gold and given.startswith(f"{config.symbol}="):
            given = given[len(config.symbol) + 1 :]
        return Verdict(Status.CORRECT, 1.0) if _same(expected, _form(given, gold)) else Verdict(Status.WRONG, 0.0)
    except (NoAnswer, RecursionError) as error:
        return Verdict(Status.UNPARSABLE, 0.0, str(error)[:200])


def tidy(text: str) -> str:
    """Returns LaTeX without what does not change its meaning: dollars around it, spacing, sizes, a last full stop."""
    text = text.strip().removesuffix(".").strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)]
            break
    text = re.sub(r"\\(?:left|right|big|Big|bigg|Bigg)(?![A-Za-z])", "", text)
    text = re.sub(r"\\[,;:! ]|\\q?quad(?![A-Za-z])|~", " ", text)
    text = text.replace("{,}", "").replace("−", "-").replace(r"^{\circ}", r"^\circ")
    text = re.sub(r"^\\(?:text|mathrm)\{([^{}]*)\}$", r"\1", text.strip())
    text = re.sub(r"\s+", " ", text)
    # A space between two digits or two letters means something (two numbers, two words); no other does.
    return re.sub(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])", "", text).strip()


def _form(text: str, gold: str) -> tuple[str, tuple[Any, ...]]:
    """Returns (form, pieces): a form is compared as text, a piece is a form again or a scalar.

    Raises:
        NoAnswer: there is no single reading.
    """
    for mark in MARKS:
        if mark in text:
            if text.count(mark) != 1 or gold.count(mark) != 1:
                raise NoAnswer(f"{mark} has no declared meaning here")
            return f"with {mark}", (_form(text.replace(mark, ""), gold.replace(mark, "")),)
    unit = re.search(r"\\(?:text|mathrm)\{([^{}]*)\}$", text)
    if unit:
        if not gold.endswith(unit[0]):
            raise NoAnswer("text or a unit that the gold answer does not have")
        return f"in {unit[1].strip()}", (_form(text[: unit.start()].strip(), gold[: -len(unit[0])].strip()),)
    relation = re.findall(r"=|<|>|\\(?:leq|geq|le|ge|neq|ne)(?![A-Za-z])", text)
    if relation:
        if len(relation) > 1:
            raise NoAnswer("a chain of relations is not an answer")
        if relation[0] not in gold and RELATIONS.get(relation[0], relation[0]) not in gold:
            raise NoAnswer(f"a relation ({relation[0]}) where none was asked for")
        left, _, right = text.partition(relation[0])
        form = f"{left.strip()} {RELATIONS.get(relation[0], relation[0])}"
        return form, (_form(right.strip(), gold.partition(relation[0])[2] or gold),)
    if r"\cup" in text:
        return "union", tuple(_form(piece.strip(), gold) for piece in text.split(r"\cup"))
    matrix = re.fullmatch(r"\\begin\{([pbv]?matrix)\}(.*)\\end\{\1\}", text)
    if matrix:
        rows = [row.split("&") for row in matrix[2].removesuffix("\\\\").split("\\\\")]
        if len({len(row) for row in rows}) != 1:
            raise NoAnswer("a matrix with rows of different lengths")
        return f"matrix {len(rows)} by {len(rows[0])}", tuple(_scalar(cell, gold) for row in rows for cell in row)
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return "set", tuple(_form(piece, gold) for piece in _pieces(text[2:-2]))
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]":
        pieces = _pieces(text[1:-1])
        if len(pieces) > 1:
            return f"{text[0]}{text[-1]}", tuple(_form(piece, gold) for piece in pieces)
    if re.fullmatch(r"[+-]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?", text):
        return "", (_scalar(text.replace(",", ""), gold),)
    pieces = _pieces(text)
    if len(pieces) > 1:
        if len(_pieces(gold)) < 2:
            raise NoAnswer("a list where one answer was expected")
        return "list", tuple(_form(piece, gold) for piece in pieces)
    return "", (_scalar(text, gold),)


def _pieces(text: str) -> list[str]:
    """Splits at the commas outside brackets. Raises NoAnswer where brackets do not match."""
    pieces, depth, start = [], 0, 0
    for place, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            pieces.append(text[start:place].strip())
            start = place + 1
        if not -1 <= depth <= MAX_DEPTH:
            raise NoAnswer("brackets that do not match or go too deep")
    return [*pieces, text[start:].strip()]


def _scalar(text: str, gold: str) -> Any:
    """Returns an exact rational where the text spells one, else the expression it means.

    Raises:
        NoAnswer: it holds anything outside the closed set of signs, or numbers that are too large to evaluate.
    """
    text = text.strip()
    number = read_number(text)
    if number is not None:
        return number
    known = set(re.sub(r"\\[A-Za-z]+", " ", gold))
    for word in re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", text):
        if not set(word) <= known:
            raise NoAnswer(f"the word {word!r}")
    commands = re.findall(r"\\([A-Za-z]+|.)", text)
    for command in commands:
        if command not in COMMANDS:
            raise NoAnswer(f"\\{command} is not read")
    text = re.sub(r"(?<![\\A-Za-z])[A-Za-z]{2,}", lambda letters: " ".join(letters[0]), text)  # xy is x times y
    bare = re.sub(r"\\[A-Za-z]+", " ", re.sub(r"\\sqrt\[[0-9]{1,2}\]", r"\\sqrt", text))
    if not bare.strip() and not commands:
        raise NoAnswer("nothing where an expression should be")
    if re.search(r"[^0-9A-Za-z+\-*/^_(){}.!| ]", bare):
        raise NoAnswer("a sign that is not read")
    if re.search(r"[0-9] [0-9]|[+-] ?[+-]|\.[^0-9]|\.$|!!|\*\*", bare):
        raise NoAnswer("two numbers, two signs or a loose point")
    _check_size(text)
    return _expression(text)


def _check_size(text: str) -> None:
    """Raises NoAnswer for what would not terminate in time: towers of powers, factorials and literals beyond the
    caps."""
    depth = 0
    for character in text:
        depth += (character in "({") - (character in ")}")
        if not 0 <= depth <= MAX_DEPTH:
            raise NoAnswer("brackets that do not match or go too deep")
    if depth:
        raise NoAnswer("brackets that do not match")
    if any(len(number) > 1000 for number in re.findall("[0-9]+", text)):
        raise NoAnswer("a number of more than 1000 digits")
    if any(int(number) > MAX_EXPONENT for number in re.findall(r"\^ ?\{?-?([0-9]+)", text)):
        raise NoAnswer(f"an exponent above {MAX_EXPONENT}")
    if any(int(number) > MAX_FACTORIAL for number in re.findall(r"([0-9]+) ?!", text)):
        raise NoAnswer(f"a factorial above {MAX_FACTORIAL}!")
    for place in [m.start() for m in re.finditer(r"\^|!", text)]:
        after = _group(text, place + 1) if text[place] == "^" else ""
        before = _group_before(text, place)
        if re.search(r"[\^!]", after + before):
            raise NoAnswer("a tower of powers or factorials")
        if text[place] == "!" and not re.fullmatch(r"[0-9]+|[a-z]", before):
            raise NoAnswer("a factorial of an expression")


def _group(text: str, start: int) -> str:
    """The brace group, or the one character, that follows."""
    if text[start : start + 1] != "{":
        return text[start : start + 1]
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[start : place + 1]
    return text[start:]


def _group_before(text: str, end: int) -> str:
    """The bracket group, the number or the character before `end`."""
    if text[end - 1 : end] in (")", "}"):
        depth = 0
        for place in range(end - 1, -1, -1):
            depth += (text[place] in ")}") - (text[place] in "({")
            if depth == 0:
                return text[place:end]
    number = re.search(r"[0-9]+$", text[:end])
    return number[0] if number else text[max(end - 1, 0) : end]


@functools.lru_cache(maxsize=256)
def _expression(text: str) -> Any:
    """Returns the sympy expression that math-verify reads from LaTeX. Raises NoAnswer where it reads none, or more."""
    parse, configuration, sympy = _math_verify()
    expressions = parse(
        f"\\boxed{{{text}}}",
        extraction_config=[configuration],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,  # its alarm cannot end a long C call; the worker's deadline can
    )
    if len(expressions) != 1 or not isinstance(expressions[0], sympy.Expr) or expressions[0].has(sympy.nan, sympy.zoo):
        raise NoAnswer("no expression is read from it")
    exact = {number: sympy.Rational(str(number)) for number in expressions[0].atoms(sympy.Float)}
    return expressions[0].xreplace(exact)


@functools.cache
def _math_verify() -> tuple[Callable[..., list[Any]], Any, Any]:
    try:
        import sympy
        from math_verify import parse
        from math_verify.parser import LatexExtractionConfig
    except ImportError as error:
        raise ImportError(
            "the verifier MathEqual needs math-verify: install jrl with its [math] extra, `pip install jrl-jax[math]`"
        ) from error
    return parse, LatexExtractionConfig(boxed_match_priority=0), sympy


def _same(a: Any, b: Any) -> bool:
    """Whether two readings mean the same."""
    if isinstance(a, tuple) != isinstance(b, tuple):
        return False
    if isinstance(a, tuple):
        if a[0] != b[0] or len(a[1]) != len(b[1]):
            return False
        if a[0] in ("set", "union", "list"):
            return _same_in_some_order(a[1], b[1])
        return all(_same(x, y) for x, y in zip(a[1], b[1]))
    return _equal(a, b)


def _same_in_some_order(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """A repeated element has no second partner: {3, 3} is not {3, 4}. Equality is transitive, so greedy is enough."""
    left = list(b)
    for x in a:
        partner = next((place for place, y in enumerate(left) if _same(x, y)), None)
        if partner is None:
            return False
        del left[partner]
    return True


def _equal(a: Any, b: Any) -> bool:
    """Whether two scalars are equal: as rationals, else to 50 digits at fixed points."""
    if type(a) is type(b) and a == b:
        return True
    _, _, sympy = _math_verify()
    a, b = _plain(a, sympy), _plain(b, sympy)
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    if not symbols:
        return _agree(a, b, sympy)
    for trial in range(6):
        point = {
            symbol: (-1) ** (trial + place) * sympy.Rational((7919 * (trial + 1) + 104729 * (place + 1)) % 10007, 3571)
            for place, symbol in enumerate(symbols)
        }
        if not _agree(a.xreplace(point), b.xreplace(point), sympy):
            return False
    return True


def _plain(value: Any, sympy: Any) -> Any:
    return value if isinstance(value, sympy.Basic) else sympy.Rational(value.numerator, value.denominator)


def _agree(a: Any, b: Any, sympy: Any) -> bool:
    """Whether two constants agree to 40 of DIGITS digits, relative to the larger. No tolerance around zero."""
    if a == b:
        return True
    if a.has(sympy.nan, sympy.zoo) or b.has(sympy.nan, sympy.zoo):
        return False
    if a.is_Rational and b.is_Rational:
        return False
    x, y = a.evalf(DIGITS), b.evalf(DIGITS)
    if not (x.is_number and y.is_number) or not (x.is_finite and y.is_finite):
        return False
    if x == 0 or y == 0:
        return sympy.simplify(a - b) == 0
    return bool(abs(x - y) <= sympy.Float(10) ** -40 * max(abs(x), abs(y)))
