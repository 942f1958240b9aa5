"""The contract of a row of the verifier table, and its wire form between processes."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jrl.tasks.example import Example
from jrl.tasks.verdict import Verdict
from jrl.tasks.wrong_result import WrongResult

Score = Callable[[Any, str, Example], Any]
LARGEST_REWARD = 1e6  # its square, and sums of many, are far below the float32 limit
SPANS_LIMIT = 1000  # most spans of a completion that a verdict rewards


class Limits(NamedTuple):
    """Limits on a verifier's verdicts. The worker checks them, and the trainer checks again what it sends."""

    lowest: float = -LARGEST_REWARD  # reward
    highest: float = LARGEST_REWARD  # reward
    spans: bool = False  # may reward spans of the completion
    single_use: bool = False  # a worker scores one completion


@dataclasses.dataclass(frozen=True)
class Verifier:
    """A row of VERIFIERS. `score` is deterministic, uses no network and imports no JAX.

    Fields:
        config: frozen, keyword-only dataclass of plain values with `weight: float = 1.0`.
        score: (config, completion, example) -> Verdict, or a number r: CORRECT if r > 0, else WRONG, with reward r;
            or a bool, which counts as 1 or 0.
        preload: called once in the template before workers are forked, to import slow modules.
        rewards_spans: its verdicts may contain rewards of spans of the completion (Verdict.spans).
        reward_range: the lowest and the highest reward it gives, or a function of its config that returns these. A
            reward outside is an error of the verifier.
        read_answer: (config, completion) -> the answer that it reads in a completion, or None; None: what the field
            `extract` of its config names, if it has one.
        single_use: a worker scores one completion and is replaced: for a verifier that runs what a model wrote.

    Raises:
        ValueError: reward_range is empty or beyond LARGEST_REWARD.
    """

    config: type
    score: Score
    preload: Callable[[], None] | None = None
    rewards_spans: bool = False
    reward_range: tuple[float, float] | Callable[[Any], tuple[float, float]] = (-LARGEST_REWARD, LARGEST_REWARD)
    read_answer: Callable[[Any, str], str | None] | None = None
    single_use: bool = False

    def __post_init__(self) -> None:
        if not callable(self.reward_range):
            self.limits(None)

    def limits(self, config: Any) -> Limits:
        given = self.reward_range(config) if callable(self.reward_range) else self.reward_range
        try:
            lowest, highest = map(float, given)
        except (TypeError, ValueError, OverflowError):  # no pair of numbers, or 10**400
            lowest = highest = math.nan
        if not -LARGEST_REWARD <= lowest <= highest <= LARGEST_REWARD:
            raise ValueError(
                f"Verifier.reward_range is {given!r} for {self.config.__name__}; it must be the lowest and the "
                f"highest reward, within {LARGEST_REWARD:g} of 0"
            )
        return Limits(lowest, highest, self.rewards_spans, self.single_use)

    def answer_in(self, config: Any, completion: str) -> str | None:
        """Returns what `read_answer` reads. Raises WrongResult if that is neither a text nor None."""
        answer = self.read_answer(config, completion)
        if not isinstance(answer, str | None):
            raise WrongResult(f"Verifier.read_answer for {self.config.__name__} returned {answer!r:.40} for "
                              f"{completion[:40]!r}; it must return a text or None", self.read_answer)  # fmt: skip
        return answer


@dataclasses.dataclass(frozen=True)
class VerifierSpec:
    """The wire form of a verifier of a run: its name in the table and its config's fields."""

    name: str
    fields: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OfFunction:
    """The fields of a verifier that is given as a function."""

    weight: float = 1.0  # of this verifier in the reward


def as_verifier(name: str, entry: Verifier | Callable[[str, Example], float | bool | Verdict]) -> Verifier:
    """Returns the table entry called `name` as a Verifier.

    A bare function `(completion, example) -> float | bool | Verdict` gets a new config class called `name`, with the
    function's docstring and one field: `weight: float = 1.0`.

    Raises:
        ValueError: the entry is neither, or its function does not accept the arguments.
    """
    if isinstance(entry, Verifier):
        _check_arguments(name, entry.score, ("config", "completion", "example"))
        return entry
    if not callable(entry):
        raise ValueError(
            f"VERIFIERS[{name!r}] has type {type(entry).__name__}; it must be a jrl.tasks.verifiers.Verifier or a "
            "function (completion, example) -> float"
        )
    _check_arguments(name, entry, ("completion", "example"))
    function = entry
    while isinstance(function, functools.partial):  # which has the docstring of functools.partial
        function = function.func
    described = {"__doc__": inspect.getdoc(function), "__module__": getattr(function, "__module__", __name__)}
    config = dataclasses.make_dataclass(name, (), bases=(_OfFunction,), namespace=described, frozen=True, kw_only=True)
    return Verifier(config, lambda _config, completion, example: entry(completion, example))


def _check_arguments(name: str, function: Callable[..., Any], expected: tuple[str, ...]) -> None:
    """Raises ValueError if `function` cannot be called with as many positional arguments as `expected` names."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some built-ins have no readable signature
        return
    try:
        signature.bind(*expected)
    except TypeError as error:
        code = getattr(inspect.unwrap(function), "__code__", None)
        location = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
        defined = f"{getattr(function, '__name__', type(function).__name__)}{signature}"
        raise ValueError(
            f"the verifier {name!r} is defined as {defined}{location}, but is called with ({', '.join(expected)}): "
            f"{error}"
        ) from error


def merge(table: Mapping[str, Any], *others: Mapping[str, Any]) -> dict[str, Verifier]:
    """Returns `table` extended by `others`, every entry as a Verifier. Raises ValueError if a name is taken."""
    merged = {name: as_verifier(name, entry) for name, entry in table.items()}
    for other in others:
        for name, entry in other.items():
            if name in merged:
                raise ValueError(f"the verifier name {name!r} is taken; choose another for the one in your parts file")
            merged[name] = as_verifier(name, entry)
    return merged


def look_up(table: Mapping[str, Verifier], name: str, where: str) -> Verifier:
    """Returns the row called `name`. Raises ValueError naming `where` and the nearest existing name."""
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"Unknown verifier {name!r} in {where}.{hint} Available: {', '.join(table)}")


def spec_of(config: Any) -> VerifierSpec:
    """Returns the wire form of a verifier's config object. Raises TypeError for fields that are not plain values."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    for name, value in fields.items():
        if not _is_plain(value):
            raise TypeError(
                f"{type(config).__name__}.{name} has type {type(value).__name__}; a verifier's config crosses to "
                "another process as JSON: use numbers, strings, booleans, None, tuples and dicts of them"
            )
    return VerifierSpec(type(config).__name__, fields)


def config_of(spec: VerifierSpec, verifier: Verifier) -> Any:
    """Returns the config object that `spec` describes."""
    return verifier.config(**{name: _thaw(value) for name, value in spec.fields.items()})


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def _thaw(value: Any) -> Any:
    """Returns `value` with lists as tuples, which JSON does not have."""
    if isinstance(value, list | tuple):
        return tuple(_thaw(v) for v in value)
    if isinstance(value, dict):
        return {k: _thaw(v) for k, v in value.items()}
    return value
