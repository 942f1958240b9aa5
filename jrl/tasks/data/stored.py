"""Stored rows, the training data of an Offline stage. Plain numpy on the host."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.tasks.data.prompts import Visit
from jrl.tasks.example import Message


class StoredRows(NamedTuple):
    """Sequences left-aligned from column 0, prompt then completion. Rows of a comparison are adjacent."""

    tokens: np.ndarray  # [n, T] int32, pad_id beyond length; unused where length is 0
    length: np.ndarray  # [n] int32, prompt and completion; 0: no row
    action_mask: np.ndarray  # [n, T] bool, the completion and its end token
    label: np.ndarray  # [n] float32, 1: preferred, or unpaired; 0: not preferred
    weight: np.ndarray  # [n] float32
    unit: np.ndarray  # [n] int32, the comparison a row is part of
    # [n] float32, the value of a row according to the data, 0 if there is none; or [n, K], K attributes, NaN if missing
    value: np.ndarray


class LeftOut(Exception):
    """A visit gives no rows. The message is the cause, under which such visits are counted."""


class StoredSource(NamedTuple):
    """A row of SOURCES: how examples of the run's task become stored rows."""

    config: type
    # (config, visits, tokenizer, width) -> rows, {cause: number of skipped visits}
    rows: Callable[..., tuple[StoredRows, dict[str, int]]]
    unit_size: int = 1  # rows per visit, which form one unit
    mismatched: bool = False  # the second of two rows is the prompt with another prompt's answer, not an alternative


def of_visits(make: Callable[[Visit], Any], visits: Sequence[Visit]) -> tuple[list[Any], dict[str, int]]:
    """Returns [make(visit)] without the visits for which it raises LeftOut, and their number by cause."""
    results, counts = [], collections.Counter()
    for visit in visits:
        try:
            results.append(make(visit))
        except LeftOut as left_out:
            counts[str(left_out)] += 1
    return results, dict(counts)


def completion_of(text: str, tokenizer: Any) -> list[int]:
    """Returns the ids of an answer and the end token."""
    return [*tokenizer.encode(text), tokenizer.end_id]


def check_fits(prompt: Sequence[int], completion: Sequence[int], width: int) -> None:
    """Raises LeftOut("too_long") if both together have more than `width` tokens."""
    if len(prompt) + len(completion) > width:
        raise LeftOut("too_long")


def check_pair(prompt: Sequence[int], pair: Sequence[Sequence[int]], width: int) -> None:
    """Raises LeftOut if two completions are the same ("same_answers"), or one does not fit ("too_long")."""
    if pair[0] == pair[1]:
        raise LeftOut("same_answers")
    check_fits(prompt, max(pair, key=len), width)


def stack(
    sequences: Sequence[tuple[Sequence[int], Sequence[int], float]], unit_size: int, pad_id: int, width: int
) -> StoredRows:
    """Returns the StoredRows of (prompt ids, completion ids, label) triples. Triples of a unit must be adjacent.

    Args:
      width: T, columns of the arrays; at least the tokens of the longest sequence.

    Raises: ValueError for a longer sequence.
    """
    count = len(sequences)
    tokens = np.full((count, width), pad_id, np.int32)
    length = np.zeros(count, np.int32)
    action_mask = np.zeros((count, width), bool)
    for i, (prompt, completion, _) in enumerate(sequences):
        length[i] = len(prompt) + len(completion)
        if length[i] > width:
            raise ValueError(f"a prompt and its completion have {length[i]} tokens, more than width = {width}; leave "
                             "out such visits, as jrl.tasks.data.stored.check_fits does")  # fmt: skip
        tokens[i, : length[i]] = [*prompt, *completion]
        action_mask[i, len(prompt) : length[i]] = True
    label = np.array([label for _, _, label in sequences], np.float32)
    unit = np.arange(count, dtype=np.int32) // unit_size
    weight, value = np.ones(count, np.float32), np.zeros(count, np.float32)
    return StoredRows(tokens, length, action_mask, label, weight, unit, value)


def padded_rows(rows: StoredRows, count: int) -> StoredRows:
    """Returns the rows padded with empty ones to `count` in all. Empty rows have unit -1."""
    missing = count - len(rows.length)
    zeros = lambda x, fill=0: np.concatenate([x, np.full((missing, *x.shape[1:]), fill, x.dtype)])
    return StoredRows(*(zeros(x) for x in rows))._replace(unit=zeros(rows.unit, -1))


class Template:
    """A text with {placeholders}, filled from an example: {answer}, or a text of its info by name."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where = text, where
        self.names = tuple(re.findall(r"\{(\w+)\}", text))
        if not self.names:
            raise ValueError(f"{where} is {text!r}; it must contain a placeholder such as {{answer}}")

    def fill(self, visit: Visit, *, numbers: bool = False) -> str:
        """Returns the filled text. All placeholders are replaced in one pass, so braces inside a value stay unchanged.
        With `numbers`, numbers of the info may be filled in too. Raises: LeftOut("no_NAME") if the example lacks the
        value of a placeholder."""
        texts = _texts(visit, numbers)
        for name in self.names:
            if name not in texts:
                raise LeftOut(f"no_{name}")
        return re.sub(r"\{(\w+)\}", lambda match: texts[match[1]], self.text)

    def check_some(self, visits: Sequence[Visit], *, numbers: bool = False) -> None:
        """Raises ValueError if none of the visits' examples has the values of all placeholders; `numbers` as in
        `fill`."""
        texts = [_texts(visit, numbers) for visit in visits]
        if not any(text.keys() >= set(self.names) for text in texts):
            raise ValueError(f"{self.where} is {self.text!r}, and none of the first {len(visits)} examples has that; "
                             f"the first one has {', '.join(sorted(texts[0])) or 'no text'}")  # fmt: skip


def _texts(visit: Visit, numbers: bool) -> dict[str, str]:
    """Returns the texts of an example by name, and with `numbers` its numbers as texts."""
    values: dict[str, Any] = {**visit.example.info, "answer": visit.example.answer}
    if numbers:
        is_number = lambda value: isinstance(value, int | float) and not isinstance(value, bool)
        values |= {name: number_text(value) for name, value in values.items() if is_number(value)}
    return {name: value for name, value in values.items() if isinstance(value, str)}


LARGEST_WHOLE = 1e15  # below it float64 holds every whole number, with a digit to spare


def number_text(value: float) -> str:
    """Returns a number as text: a whole number in full, any other with six significant digits."""
    is_whole = isinstance(value, int) or (abs(value) < LARGEST_WHOLE and value == int(value))
    return str(int(value)) if is_whole else f"{value:g}"


def continued(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """Returns a prompt's messages with a text appended to the last one."""
    return (*messages[:-1], Message(messages[-1].role, messages[-1].content + text))


def with_system(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """Returns a prompt's messages with a text as the system message, or appended to an existing one."""
    if messages[0].role != "system":
        return (Message("system", text), *messages)
    return (Message("system", messages[0].content + text), *messages[1:])
