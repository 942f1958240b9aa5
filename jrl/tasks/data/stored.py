"""Stored rows, from which an Offline stage learns. Plain numpy on the host."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.tasks.data.prompts import Visit
from jrl.tasks.example import Message


class StoredRows(NamedTuple):
    """Sequences left-aligned from column 0, prompt then completion. Rows that are compared are adjacent."""

    tokens: np.ndarray  # [n, T] int32, pad_id beyond length
    length: np.ndarray  # [n] int32, prompt and completion; 0: no row
    action_mask: np.ndarray  # [n, T] bool, the completion and its end token
    label: np.ndarray  # [n] float32, 1: preferred, or alone; 0: not preferred
    weight: np.ndarray  # [n] float32
    unit: np.ndarray  # [n] int32, the comparison a row is part of
    # [n] float32, what the data say that a row is worth; 0 where they do not; [n, K] of K attributes, NaN where missing
    value: np.ndarray


class LeftOut(Exception):
    """A visit gives no rows. Its text is the cause, by which such visits are counted."""


class StoredSource(NamedTuple):
    """A row of SOURCES: how examples of the run's task become stored rows."""

    config: type
    # (config, visits, tokenizer, width) -> rows, {cause: how many visits gave none}
    rows: Callable[..., tuple[StoredRows, dict[str, int]]]
    unit_size: int = 1  # rows that a visit gives, to be compared
    mismatched: bool = False  # the second of two is the prompt with another prompt's answer, not one to compare with


def of_visits(make: Callable[[Visit], Any], visits: Sequence[Visit]) -> tuple[list[Any], dict[str, int]]:
    """Returns what `make` gives for every visit, without those that it raises LeftOut for, and {cause: how many}."""
    made, counts = [], collections.Counter()
    for visit in visits:
        try:
            made.append(make(visit))
        except LeftOut as left_out:
            counts[str(left_out)] += 1
    return made, dict(counts)


def completion_of(text: str, tokenizer: Any) -> list[int]:
    """Returns the ids of an answer and the end token."""
    return [*tokenizer.encode(text), tokenizer.end_id]


def check_fits(prompt: Sequence[int], completion: Sequence[int], width: int) -> None:
    """Raises LeftOut("too_long") where both together have more than `width` tokens."""
    if len(prompt) + len(completion) > width:
        raise LeftOut("too_long")


def check_pair(prompt: Sequence[int], pair: Sequence[Sequence[int]], width: int) -> None:
    """Raises LeftOut where two completions are the same ("same_answers"), or one does not fit ("too_long")."""
    if pair[0] == pair[1]:
        raise LeftOut("same_answers")
    check_fits(prompt, max(pair, key=len), width)


def stack(sequences: Sequence[tuple[Sequence[int], Sequence[int], float]], unit_size: int, pad_id: int, width: int):
    """Returns StoredRows of (prompt ids, completion ids, label) triples, those of a comparison adjacent.

    Args:
      width: T, at least as many columns as the longest sequence has tokens.
    """
    count = len(sequences)
    tokens = np.full((count, width), pad_id, np.int32)
    length = np.zeros(count, np.int32)
    action_mask = np.zeros((count, width), bool)
    for i, (prompt, completion, _) in enumerate(sequences):
        length[i] = len(prompt) + len(completion)
        tokens[i, : length[i]] = [*prompt, *completion]
        action_mask[i, len(prompt) : length[i]] = True
    label = np.array([label for _, _, label in sequences], np.float32)
    unit = np.arange(count, dtype=np.int32) // unit_size
    weight, value = np.ones(count, np.float32), np.zeros(count, np.float32)
    return StoredRows(tokens, length, action_mask, label, weight, unit, value)


def padded_rows(rows: StoredRows, count: int) -> StoredRows:
    """Returns the rows followed by empty ones, `count` in all. Empty rows are part of no comparison."""
    missing = count - len(rows.length)
    zeros = lambda x, fill=0: np.concatenate([x, np.full((missing, *x.shape[1:]), fill, x.dtype)])
    return StoredRows(*(zeros(x) for x in rows))._replace(unit=zeros(rows.unit, -1))


class Template:
    """A text with {places} to be filled from an example: {answer}, or a text of its info by name."""

    def __init__(self, text: str, where: str) -> None:
        self.text = text
        self.names = tuple(re.findall(r"\{(\w+)\}", text))
        if not self.names:
            raise ValueError(f"{where} is {text!r}; it must hold a place such as {{answer}}")

    def fill(self, visit: Visit, *, numbers: bool = False) -> str:
        """Returns the text. Every place is filled at once: what is inside a value stays text. With `numbers` these may
        be filled in too. Raises: LeftOut("no_NAME") where the example lacks what a place asks for."""
        values: dict[str, Any] = {**visit.example.info, "answer": visit.example.answer}
        if numbers:
            is_number = lambda value: isinstance(value, int | float) and not isinstance(value, bool)
            values |= {name: f"{value:g}" for name, value in values.items() if is_number(value)}
        for name in self.names:
            if not isinstance(values.get(name), str):
                raise LeftOut(f"no_{name}")
        return re.sub(r"\{(\w+)\}", lambda match: values[match[1]], self.text)


def continued(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """Returns a prompt's messages with a text after the last one's."""
    return (*messages[:-1], Message(messages[-1].role, messages[-1].content + text))


def with_system(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """Returns a prompt's messages with a text as the system message, or after the one that they have."""
    if messages[0].role != "system":
        return (Message("system", text), *messages)
    return (Message("system", messages[0].content + text), *messages[1:])
