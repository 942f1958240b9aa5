"""What training examples share with evaluation sets, and with each other: exactly, and by n-grams of words."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from jrl.tasks.example import Example

_WORD = re.compile(r"\w+", re.UNICODE)


def words(text: str) -> tuple[str, ...]:
    """Returns F13's normalized text: words in small letters, without punctuation."""
    return tuple(_WORD.findall(text.casefold().replace("_", " ")))


class Overlap(NamedTuple):
    """A training example whose prompt holds one of an evaluation set."""

    example: str  # its id
    evaluated: str  # the id of the evaluation example; of several, the one that it holds most of
    kind: Literal["exact", "ngram"]  # exact: the same words
    share: float  # of the evaluation prompt's words, those in shared n-grams


class EvaluationIndex:
    """The prompts of evaluation sets, to be compared with one training prompt after another."""

    def __init__(self, examples: Iterable[Example], n: int | None) -> None:
        """
        Args:
          n: words of an n-gram, at least 1; None: only prompts of the same words are found.
        """
        self._n = n
        self._names: list[str] = []
        self._lengths: list[int] = []
        self._exact: dict[tuple[str, ...], int] = {}
        self._grams: dict[tuple[str, ...], list[tuple[int, int]]] = {}  # -> (prompt, the gram's first word in it)
        for place, example in enumerate(examples):
            text = words(prompt_text(example))
            self._names.append(example.id)
            self._lengths.append(len(text))
            if text:
                self._exact.setdefault(text, place)
            for i in range(len(text) - n + 1 if n is not None else 0):
                self._grams.setdefault(text[i : i + n], []).append((place, i))

    def __len__(self) -> int:
        return len(self._names)

    def overlap(self, example: Example) -> Overlap | None:
        """Returns what the example's prompt shares with the evaluation prompt that it holds most of; None: nothing."""
        text = words(prompt_text(example))
        if text in self._exact:
            return Overlap(example.id, self._names[self._exact[text]], "exact", 1.0)
        if self._n is None:
            return None
        covered: dict[int, set[int]] = {}
        for gram in {text[i : i + self._n] for i in range(len(text) - self._n + 1)}:
            for place, first in self._grams.get(gram, ()):
                covered.setdefault(place, set()).update(range(first, first + self._n))
        if not covered:
            return None
        shares = {place: len(found) / self._lengths[place] for place, found in covered.items()}
        most = min(shares, key=lambda place: (-shares[place], place))
        return Overlap(example.id, self._names[most], "ngram", shares[most])


def prompt_text(example: Example) -> str:
    """Returns the texts of a prompt, but for system messages, which many prompts share."""
    return " ".join(message.content for message in example.messages if message.role != "system")


def example_digest(example: Example) -> bytes:
    """Returns 16 bytes that two examples share only if they have the same prompt, answer, rejected answer and label."""
    said = [[m.role, m.content] for m in example.messages]
    rest = [example.answer, example.info.get("rejected"), example.info.get("label")]
    return hashlib.sha256(json.dumps([said, rest], ensure_ascii=False).encode()).digest()[:16]


def repeats(examples: Iterable[Example]) -> list[tuple[int, int]]:
    """Returns (place, place of the first) of every example that repeats an earlier one, exactly."""
    first: dict[bytes, int] = {}
    found = []
    for place, example in enumerate(examples):
        before = first.setdefault(example_digest(example), place)
        if before != place:
            found.append((place, before))
    return found


def described(overlaps: Sequence[Overlap], most: int) -> list[str]:
    """Returns a line for each of the first `most` overlaps, the largest share first."""
    lines = []
    for one in sorted(overlaps, key=lambda overlap: -overlap.share)[:most]:
        shared = "is the same prompt as" if one.kind == "exact" else f"holds {one.share:.0%} of the words of"
        lines.append(f"{one.example} {shared} {one.evaluated}")
    if len(overlaps) > most:
        lines.append(f"and {len(overlaps) - most} more")
    return lines
