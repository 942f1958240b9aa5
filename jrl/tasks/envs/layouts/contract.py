"""The contract of a layout: rows of a published data set become prompts with answers, and these become examples.

    row(s) --Layout.read--> [Prompted] --take--> [Example]

A `Prompted` is a conversation up to an answer of the assistant, with the known answers. `take` selects the examples
made from it:

    each            every answer alone, with its attributes (Demonstrations, Labeled)
    best            the best answer (Demonstrations)
    best_and_worst  one pair: {answer} and {rejected} (Preferences)
    best_and_random one pair: the best answer, and one of the worse answers (Preferences)
    all_pairs       every pair of answers of which one is better (Preferences)
    last_turn       the last answer of a conversation (Demonstrations)
    every_turn      every answer of a conversation, each after the messages before it (Demonstrations)
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from jrl.tasks.envs.layouts.fields import Field
from jrl.tasks.example import Message

Take = Literal["each", "best", "best_and_worst", "best_and_random", "all_pairs", "last_turn", "every_turn"]
PAIR_TAKES: tuple[Take, ...] = ("best_and_worst", "best_and_random", "all_pairs", "best", "each")
TURN_TAKES: tuple[Take, ...] = ("last_turn", "every_turn")


class Answer(NamedTuple):
    """One answer to a prompt. The answer with the higher `order` is better; None: unknown."""

    text: str
    order: float | None = None
    info: dict[str, Any] = {}  # score, label, attributes


class Prompted(NamedTuple):
    """A conversation up to an answer, and the known answers."""

    prompt: tuple[Message, ...]
    answers: tuple[Answer, ...]
    info: dict[str, Any] = {}  # data about the prompt


class Taken(NamedTuple):
    """The content of one example."""

    prompt: tuple[Message, ...]
    answer: str
    info: dict[str, Any]


class Layout(NamedTuple):
    """A row of LAYOUTS."""

    # (row, what answers are ranked by) -> its prompts; for a layout with `group`, (rows, ...)
    read: Callable[[Any, str | None], list[Prompted]]
    takes: tuple[Take, ...]  # the possible values of `take`; the first is the default
    example: list[dict[str, Any]]  # minimal rows
    of: str  # the data sets with this layout
    rank_by: tuple[str, ...] = ()  # what answers may be ranked by; the first is the default
    # Checks a row and returns the key that it shares with the rows that are read together. None: rows are read alone
    group: Callable[[Field], str] | None = None


def taken(prompts: Sequence[Prompted], take: Take, skipped: dict[str, int]) -> list[Taken]:
    """Returns the contents of the examples that `take` makes of the prompts.

    Args:
      skipped: counts of prompts without an example, by cause; those of these prompts are added: "unanswered",
        "single_answer", "unranked" (unknown which of its answers is better), "tied" and "same_answers".
    """
    if take in TURN_TAKES:
        take, prompts = "each", prompts if take == "every_turn" else prompts[-1:]
    examples: list[Taken] = []
    for prompted in prompts:
        if take == "each":
            new = [Taken(prompted.prompt, a.text, {**prompted.info, **a.info}) for a in prompted.answers]
            cause = "unanswered"
        elif take == "best":
            new, cause = _best(prompted)
        else:
            new, cause = _pairs(prompted, take)
        examples += new
        if not new:
            skipped[cause] = skipped.get(cause, 0) + 1
    return examples


def _ranked(prompted: Prompted) -> list[Answer]:
    """Returns the answers with a known order, the best first."""
    return sorted((answer for answer in prompted.answers if answer.order is not None), key=lambda answer: -answer.order)


def _best(prompted: Prompted) -> tuple[list[Taken], str]:
    best = prompted.answers if len(prompted.answers) == 1 else _ranked(prompted)[:1]
    cause = "unranked" if prompted.answers else "unanswered"
    return [Taken(prompted.prompt, answer.text, {**prompted.info, **answer.info}) for answer in best], cause


def _pairs(prompted: Prompted, take: Take) -> tuple[list[Taken], str]:
    ranked = _ranked(prompted)
    if len(prompted.answers) < 2:
        return [], "single_answer" if prompted.answers else "unanswered"
    if len(ranked) < 2:
        return [], "unranked"
    pairs = [(a, b) for a, b in itertools.combinations(ranked, 2) if a.order > b.order]
    if not pairs:
        return [], "tied"
    if take == "best_and_worst":
        pairs = [(ranked[0], ranked[-1])]
    if take == "best_and_random":
        pairs = [best_and_random(prompted)]
    return [
        Taken(prompted.prompt, a.text, {**prompted.info, **_compared(a, b)}) for a, b in pairs if a.text != b.text
    ], "same_answers"


def best_and_random(prompted: Prompted) -> tuple[Answer, Answer]:
    """Returns P27's pair: the best answer and one of the worse ones, chosen by a hash of the prompt and the worse
    answers, so it is deterministic. At least one answer must be worse than the best.

    Source: Zephyr, Tunstall et al. 2310.16944 section 3: one of all that are not the best, for diversity.
    """
    best, *others = _ranked(prompted)
    worse = [answer for answer in others if answer.order < best.order]
    texts = [*(message.content for message in prompted.prompt), *(answer.text for answer in worse)]
    return best, worse[zlib.crc32("\0".join(texts).encode()) % len(worse)]


def _compared(better: Answer, worse: Answer) -> dict[str, Any]:
    """Returns the info of a pair: the rejected answer, and if both have scores, the scores and their difference."""
    info: dict[str, Any] = {"rejected": worse.text}
    if "score" in better.info and "score" in worse.info:
        scores = better.info["score"], worse.info["score"]
        info |= {"score": scores[0], "rejected_score": scores[1], "margin": scores[0] - scores[1]}
    return info
