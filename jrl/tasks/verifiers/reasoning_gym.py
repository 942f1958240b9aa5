"""ReasoningGymScore: a task of reasoning-gym, scored by its dataset's `score_answer` where that is safe.

Nine of the package's scorers run the answer as Python, two run text of the task, one rewards any text, and one gives
full marks to any prefix of the answer, such as 0 (0.1.25; a test checks the source of all others). For these, `FENCED`
has scorers that run no code; if there is none, the row is FORBIDDEN. See docs/log.md for what was tried.

`example.info` is {"dataset": name, "config": fields of its config, "entry": the dataset's task}, as written by
envs/reasoning_gym.py.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Literal

from jrl.tasks.example import Example
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers.extract import Extract, extract_answer
from jrl.tasks.verifiers.polynomial import NoPolynomial, constant, derivative, read_polynomial

MAX_CHARACTERS = 20_000  # of an extracted answer
MOST_DIGITS = 30  # of a number in an expression; Python refuses to parse 5,000
_NUMBER = re.compile(r"[+-]?[0-9]+(,[0-9]{3})*([.][0-9]+)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningGymScore:
    weight: float = 1.0  # of this verifier in the reward
    extract: Extract = "all"  # where the answer is; answer_line: the last line, after Answer:, hash: after ####
    # "full": 1 if the dataset gives the full score, else 0. "partial": the dataset's score, which in several datasets
    # is above 0 for junk.
    credit: Literal["full", "partial"] = "full"


def preload() -> None:
    """Imports reasoning-gym in the template, which takes seconds, so that workers need not."""
    _factory()


def score(config: ReasoningGymScore, completion: str, example: Example) -> Verdict:
    """Returns CORRECT for the full score, else WRONG, or UNPARSABLE if the answer does not have the form of the
    reference (a number, a list); FORBIDDEN if the dataset cannot be judged safely.

    Raises:
        ValueError: example.info is not a task of reasoning-gym.
        Whatever the dataset's own scorer raises.
    """
    name, entry = example.info.get("dataset"), example.info.get("entry")
    if not isinstance(name, str) or not isinstance(entry, Mapping) or not isinstance(entry.get("metadata"), Mapping):
        raise ValueError(
            f"example {example.id!r}: info must hold the 'dataset' name and the 'entry' of a reasoning-gym task; "
            f"it has {sorted(example.info)}"
        )
    answer = extract_answer(completion, config.extract)
    if answer is None:
        return Verdict(Status.UNPARSABLE, 0.0, f"no single answer in {config.extract!r}")
    if len(answer) > MAX_CHARACTERS:
        return Verdict(Status.FORBIDDEN, None, f"{len(answer)} characters; at most {MAX_CHARACTERS} are scored")
    if entry.get("answer") == "":
        # polynomial_equations without a real solution: its scorer finds no number in junk and counts that as correct
        return Verdict(Status.FORBIDDEN, None, f"a task of {name} whose reference answer is empty")
    if name in FENCED:
        judge = FENCED[name]
        if judge is None:
            return Verdict(Status.FORBIDDEN, None, f"the scorer of {name} runs the answer as a program")
        try:
            return _verdict(1.0 if judge(answer, entry) else 0.0, answer, entry, config)
        except NoPolynomial as error:
            return Verdict(Status.UNPARSABLE, 0.0, str(error)[:200])
    return _dataset_score(config, name, answer, entry, example)


def _dataset_score(
    config: ReasoningGymScore, name: str, answer: str, entry: Mapping[str, Any], example: Example
) -> Verdict:
    """Returns the verdict by the dataset's scorer."""
    dataset = _dataset(name, json.dumps(example.info.get("config") or {}, sort_keys=True))
    task = {**entry, "metadata": {**entry["metadata"]}}
    for field in TUPLES.get(name, ()):
        task["metadata"][field] = _as_tuples(task["metadata"][field])
    if name in FORMS and not FORMS[name].fullmatch(answer.strip()):
        return Verdict(Status.UNPARSABLE, 0.0, "not of the form that the task asks for")
    try:
        task_score = float(dataset.score_answer(answer, task))
    except (OverflowError, *RAISES_ON_JUNK.get(name, ())) as error:  # OverflowError: an integer beyond every float
        return Verdict(Status.UNPARSABLE, 0.0, f"{type(error).__name__}: {error}"[:200])
    if 1 < task_score < 1 + 1e-9:  # spell_backward adds a share for each letter that a longer answer has in common
        task_score = math.nextafter(1, 0)
    if not (math.isfinite(task_score) and 0 <= task_score <= 1):
        raise ValueError(f"the scorer of {name} gave the score {task_score}, which is not in [0, 1]")
    return _verdict(task_score, answer, entry, config)


def _verdict(task_score: float, answer: str, entry: Mapping[str, Any], config: ReasoningGymScore) -> Verdict:
    """Returns the verdict for a score. The score decides correctness; the form only separates WRONG from UNPARSABLE."""
    status = Status.CORRECT if task_score >= 1.0 else Status.WRONG
    reward = task_score if config.credit == "partial" else float(status is Status.CORRECT)
    expected = form_of(str(entry.get("answer")))
    if reward == 0.0 and expected is not None and form_of(answer) != expected:
        return Verdict(Status.UNPARSABLE, 0.0, f"not a {expected}")
    return Verdict(status, reward)


def form_of(text: str) -> str | None:
    """Returns "number" or "list" if the stripped text is exactly that, else None.

    A list is parsed as JSON, with single quotes treated as double quotes.
    """
    text = text.strip()
    if _NUMBER.fullmatch(text):
        return "number"
    if not text.startswith("["):
        return None
    try:
        return "list" if isinstance(json.loads(text.replace("'", '"')), list) else None
    except (ValueError, RecursionError):
        return None


@functools.cache
def _factory() -> Any:
    from reasoning_gym import factory  # takes 2.5 s, so only if one of its tasks is scored

    return factory


@functools.lru_cache(maxsize=64)
def _dataset(name: str, config: str) -> Any:
    factory = _factory()
    if name not in factory.DATASETS or name == "composite":
        raise ValueError(f"reasoning-gym has no dataset {name!r} that scores its own tasks")
    default = factory.DATASETS[name][1]()
    fields = {field: _restored(value, getattr(default, field, None)) for field, value in json.loads(config).items()}
    return factory.create_dataset(name, **{**fields, "size": 1, "seed": 0})


def _restored(value: Any, default: Any) -> Any:
    """Returns a config field converted for its class: JSON has an enum as its value or name, a record as its fields."""
    if isinstance(default, enum.Enum) and isinstance(value, str):
        kind, name = type(default), value.removeprefix(f"{type(default).__name__}.")
        return kind[name] if name in kind.__members__ else kind(value)
    if dataclasses.is_dataclass(default) and isinstance(value, dict):
        return type(default)(**value)
    return value


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


# The scorers below run no code. Each takes (answer, entry) and returns whether the answer is correct.


def _same_lines(answer: str, entry: Mapping[str, Any]) -> bool:
    """Equal to the reference answer, ignoring whitespace at the ends of lines."""
    return _lines(answer) == _lines(entry["answer"])


def _one_of_the_boards(answer: str, entry: Mapping[str, Any]) -> bool:
    return any(_lines(answer) == _lines(board) for board in entry["metadata"]["valid_answers"])


def _uses_numbers_for(answer: str, entry: Mapping[str, Any], target: int) -> bool:
    """An expression of exactly the given numbers, each used once, that evaluates to the target.

    Stricter than puzzle24's scorer, which lets the answer choose its numbers. Digits of two numbers cannot form another
    one, as in 2.5 or 3e2.
    """
    if re.search(r"[.][0-9]|[A-Za-z]", answer):
        return False
    numbers = re.findall("[0-9]+", answer)
    if max(map(len, numbers), default=0) > MOST_DIGITS:
        return False
    if sorted(map(int, numbers)) != sorted(entry["metadata"]["numbers"]):
        return False
    return constant(read_polynomial(answer)) == target


def _countdown(answer: str, entry: Mapping[str, Any]) -> bool:
    return _uses_numbers_for(answer, entry, entry["metadata"]["target"])


def _puzzle24(answer: str, entry: Mapping[str, Any]) -> bool:
    """The task allows + - * / alone; countdown's names no operators."""
    return "**" not in answer and _uses_numbers_for(answer, entry, 24)


def _polynomial_multiplication(answer: str, entry: Mapping[str, Any]) -> bool:
    """The same polynomial without parentheses, as the task asks; the factors are not an answer."""
    return "(" not in answer and read_polynomial(answer) == read_polynomial(entry["answer"])


def _simple_integration(answer: str, entry: Mapping[str, Any]) -> bool:
    """A polynomial with the integrand as its derivative; C counts as a constant."""
    variable = entry["metadata"]["variable"]
    return derivative(read_polynomial(answer), variable) == read_polynomial(entry["metadata"]["integrand"])


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _sorted_numbers(answer: str, entry: Mapping[str, Any]) -> bool:
    """The reference list as JSON, each number within 0.001. The dataset's scorer executes a non-JSON reference."""
    try:
        given, expected = (json.loads(text.replace("'", '"')) for text in (answer, entry["answer"]))
        if not isinstance(given, list) or any(isinstance(number, bool) for number in given):
            raise NoPolynomial("not a list of numbers")
        numbers = [float(number) for number in given]
        return len(numbers) == len(expected) and all(abs(x - float(y)) <= 1e-3 for x, y in zip(numbers, expected))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise NoPolynomial("not a list of numbers") from error


def _same_integer(answer: str, entry: Mapping[str, Any]) -> bool:
    """The reference integer, in Python's notation of any base. The dataset's scorer runs the entry's problem text."""
    if not re.fullmatch(r"-?(0x[0-9a-fA-F]{1,1000}|0b[01]{1,1000}|0o[0-7]{1,1000}|0|[1-9][0-9]{0,1000})", answer):
        raise NoPolynomial("not an integer")
    return int(answer, 0) == int(entry["answer"], 0)


def _probability(answer: str, entry: Mapping[str, Any]) -> bool:
    """A decimal or a fraction within 0.0001 of the probability and within a thousandth of its value.

    The dataset's scorer gives full marks to any prefix of the reference answer, such as 0.
    """
    form = re.fullmatch(r"([0-9]{0,30}[.])?[0-9]{1,30}|([0-9]{1,30}) */ *([0-9]{1,30})", answer.strip())
    if form is None or (form[3] is not None and int(form[3]) == 0):
        raise NoPolynomial("neither a decimal nor a fraction")
    rational = entry["metadata"]["rational"]
    expected = Fraction(int(rational["numerator"]), int(rational["denominator"]))
    given = Fraction(int(form[2]), int(form[3])) if form[3] else Fraction(form[0])
    return abs(given - expected) <= min(Fraction(1, 10_000), expected / 1000)


FENCED: dict[str, Callable[[str, Mapping[str, Any]], bool] | None] = {
    "countdown": _countdown,
    "puzzle24": _puzzle24,
    "simple_integration": _simple_integration,
    "intermediate_integration": None,  # any antiderivative is correct; no comparison that runs no code covers them all
    "polynomial_multiplication": _polynomial_multiplication,
    "string_insertion": _same_lines,
    "spiral_matrix": _same_lines,
    "binary_matrix": _same_lines,
    "n_queens": _one_of_the_boards,
    "game_of_life_halting": _same_lines,
    "number_sorting": _sorted_numbers,
    "bitwise_arithmetic": _same_integer,
    "coin_flip": _probability,
}
# The form that an answer needs before the dataset's scorer gets it: complex_arithmetic's gives full marks to nan, and
# gsm_symbolic's to -25 if the answer is 25.
FORMS = {
    "complex_arithmetic": re.compile(r"[0-9+\-.ij() ]{1,200}", re.IGNORECASE),
    "gsm_symbolic": re.compile(r"(?:[^0-9-]|-(?![0-9]))*[0-9].*", re.DOTALL),
}
# What a dataset's scorer raises on an answer of another form than the task asks for.
RAISES_ON_JUNK: dict[str, tuple[type[Exception], ...]] = {
    "prime_factorization": (ValueError,),
    "game_of_life": (KeyError,),  # an object instead of a list
    "boxnet": (AttributeError, IndexError, KeyError, TypeError),  # not a list of objects, or a move out of the grid
}
# Metadata that the scorer compares as tuples; JSON turned them into lists.
TUPLES = {"arc_agi": ("output",), "rearc": ("output",)}
