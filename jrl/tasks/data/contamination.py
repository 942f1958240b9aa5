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
        self._shared: dict[bytes, tuple[int, float]] = {}  # digest of a looked-up prompt -> (prompt, share)
        for index, example in enumerate(examples):
            text = words(prompt_text(example))
            self._names.append(example.id)
            self._lengths.append(len(text))
            if not text or self._exact.setdefault(text, index) != index:
                continue  # published sets repeat a prompt for every sample of it
            for i in range(len(text) - n + 1 if n is not None else 0):
                self._grams.setdefault(text[i : i + n], []).append((index, i))

    def __len__(self) -> int:
        return len(self._names)

    def overlap(self, example: Example) -> Overlap | None:
        """Returns the overlap with the evaluation prompt that has the largest share; None: no overlap."""
        if not self._exact:
            return None
        text = words(prompt_text(example))
        if text in self._exact:
            return Overlap(example.id, self._names[self._exact[text]], "exact", 1.0)
        if self._n is None:
            return None
        grams = {text[i : i + self._n] for i in range(len(text) - self._n + 1)}
        known = [self._grams[gram] for gram in grams if gram in self._grams]
        if not known:
            return None
        # Prompts with a template in common share its n-grams with each other: looking up is slow, and published
        # training sets repeat prompts too.
        digest = hashlib.sha256(" ".join(text).encode()).digest()[:16]
        if digest not in self._shared:
            self._shared[digest] = self._most_shared(known)
        most, share = self._shared[digest]
        return Overlap(example.id, self._names[most], "ngram", share)

    def _most_shared(self, known: Sequence[Sequence[tuple[int, int]]]) -> tuple[int, float]:
        """Returns the evaluation prompt with the largest share of its words in these n-grams, and that share."""
        covered: dict[int, int] = {}  # prompt -> its words that are in shared n-grams, as bits
        run = (1 << self._n) - 1
        for places in known:
            for index, first in places:
                covered[index] = covered.get(index, 0) | run << first
        shares = {index: bits.bit_count() / self._lengths[index] for index, bits in covered.items()}
        most = min(shares, key=lambda index: (-shares[index], index))
        return most, shares[most]


def prompt_text(example: Example) -> str:
    """Returns the texts of a prompt without system messages, which many prompts share."""
    return " ".join(message.content for message in example.messages if message.role != "system")


def example_digest(example: Example) -> bytes:
    """Returns 16 bytes that two examples share only if they have the same prompt, answer, rejected answer and label."""
    prompt = [[m.role, m.content] for m in example.messages]
    rest = [example.answer, example.info.get("rejected"), example.info.get("label")]
    return hashlib.sha256(json.dumps([prompt, rest], ensure_ascii=False).encode()).digest()[:16]


def described(overlaps: Sequence[Overlap], most: int) -> list[str]:
    """Returns a line for each of the first `most` overlaps, the largest share first."""
    lines = []
    for overlap in sorted(overlaps, key=lambda overlap: -overlap.share)[:most]:
        shared = "is the same prompt as" if overlap.kind == "exact" else f"holds {overlap.share:.0%} of the words of"
        lines.append(f"{overlap.example} {shared} {overlap.evaluated}")
    if len(overlaps) > most:
        lines.append(f"and {len(overlaps) - most} more")
    return lines
