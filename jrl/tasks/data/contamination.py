"""Overlap of training examples with evaluation sets and with each other: exact, and by word n-grams."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from jrl.tasks.example import Example

_WORD = re.compile(r"\w+", re.UNICODE)


def words(text: str) -> tuple[str, ...]:
    """Returns F13's normalized text: case-folded words without punctuation."""
    return tuple(_WORD.findall(text.casefold().replace("_", " ")))


class Overlap(NamedTuple):
    """A training example whose prompt overlaps that of an evaluation example."""

    example: str  # its id
    evaluated: str  # the id of the evaluation example; of several, the one with the largest share
    kind: Literal["exact", "ngram"]  # exact: the same words
    share: float  # of the evaluation prompt's words, the share that is in shared n-grams


class EvaluationIndex:
    """An index of the prompts of evaluation sets, to look up overlaps of training prompts."""

    def __init__(self, examples: Iterable[Example], n: int | None) -> None:
        """
        Args:
          n: words of an n-gram, at least 1; None: only prompts with the same words count.
        """
        self._n = n
        self._names: list[str] = []
        self._lengths: list[int] = []
        self._exact: dict[tuple[str, ...], int] = {}
        self._grams: dict[tuple[str, ...], list[tuple[int, int]]] = {}  # -> (prompt, the n-gram's first word in it)
        for index, example in enumerate(examples):
            text = words(prompt_text(example))
            self._names.append(example.id)
            self._lengths.append(len(text))
            if text:
                self._exact.setdefault(text, index)
            for i in range(len(text) - n + 1 if n is not None else 0):
                self._grams.setdefault(text[i : i + n], []).append((index, i))

    def __len__(self) -> int:
        return len(self._names)

    def overlap(self, example: Example) -> Overlap | None:
        """Returns the overlap with the evaluation prompt that has the largest share; None: no overlap."""
        text = words(prompt_text(example))
        if text in self._exact:
            return Overlap(example.id, self._names[self._exact[text]], "exact", 1.0)
        if self._n is None:
            return None
        covered: dict[int, set[int]] = {}
        for gram in {text[i : i + self._n] for i in range(len(text) - self._n + 1)}:
            for index, first in self._grams.get(gram, ()):
                covered.setdefault(index, set()).update(range(first, first + self._n))
        if not covered:
            return None
        shares = {index: len(positions) / self._lengths[index] for index, positions in covered.items()}
        most = min(shares, key=lambda index: (-shares[index], index))
        return Overlap(example.id, self._names[most], "ngram", shares[most])


def prompt_text(example: Example) -> str:
    """Returns the texts of a prompt without system messages, which many prompts share."""
    return " ".join(message.content for message in example.messages if message.role != "system")


def example_digest(example: Example) -> bytes:
    """Returns 16 bytes that two examples share only if they have the same prompt, answer, rejected answer and label."""
    prompt = [[m.role, m.content] for m in example.messages]
    rest = [example.answer, example.info.get("rejected"), example.info.get("label")]
    return hashlib.sha256(json.dumps([prompt, rest], ensure_ascii=False).encode()).digest()[:16]


def repeats(examples: Iterable[Example]) -> list[tuple[int, int]]:
    """Returns (index, index of the first occurrence) of every example that exactly repeats an earlier one."""
    first: dict[bytes, int] = {}
    pairs = []
    for index, example in enumerate(examples):
        earliest = first.setdefault(example_digest(example), index)
        if earliest != index:
            pairs.append((index, earliest))
    return pairs


def described(overlaps: Sequence[Overlap], most: int) -> list[str]:
    """Returns a line for each of the first `most` overlaps, the largest share first."""
    lines = []
    for overlap in sorted(overlaps, key=lambda overlap: -overlap.share)[:most]:
        shared = "is the same prompt as" if overlap.kind == "exact" else f"holds {overlap.share:.0%} of the words of"
        lines.append(f"{overlap.example} {shared} {overlap.evaluated}")
    if len(overlaps) > most:
        lines.append(f"and {len(overlaps) - most} more")
    return lines
