"""What a layout is: how rows of a published kind of data set become prompts with their answers, and these, examples.

    row(s) --Layout.read--> [Prompted] --take--> [Example]

A `Prompted` is one conversation up to an answer of the assistant, and the answers that are known. What an example is
made of them is `take`:

    each            every answer alone, with its attributes (Demonstrations, Labeled)
    best            the best answer (Demonstrations)
    best_and_worst  one pair: {answer} and {rejected} (Preferences)
    best_and_random one pair: the best, and any of the answers that are worse (Preferences)
    all_pairs       every two answers of which one is better (Preferences)
    last_turn       the last answer of a conversation (Demonstrations)
    every_turn      every answer of a conversation, each after what was said before it (Demonstrations)
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
    """One answer to a prompt. Of two, the one of higher `order` is better; None: nothing says."""

    text: str
    order: float | None = None
    info: dict[str, Any] = {}  # what is known of it: score, label, attributes


class Prompted(NamedTuple):
    """A conversation up to an answer, and the answers that are known."""

    prompt: tuple[Message, ...]
    answers: tuple[Answer, ...]
    info: dict[str, Any] = {}  # what is known of the prompt


class Taken(NamedTuple):
    """What becomes an example."""

    prompt: tuple[Message, ...]
    answer: str
    info: dict[str, Any]


class Layout(NamedTuple):
    """A row of LAYOUTS."""

    # (row, what answers are ranked by) -> its prompts; of a layout with `group`, (rows, ...)
    read: Callable[[Any, str | None], list[Prompted]]
    takes: tuple[Take, ...]  # what examples may be made of it; the first where none is asked for
    example: list[dict[str, Any]]  # rows, as small as they can be
    of: str  # the data sets that have it
    rank_by: tuple[str, ...] = ()  # what answers may be ranked by; the first where nothing is asked for
    # Checks a row and returns the key that it shares with the rows it is read with. None: it is read alone
    group: Callable[[Field], str] | None = None


def taken(prompts: Sequence[Prompted], take: Take, skipped: dict[str, int]) -> list[Taken]:
    """Returns what examples are made of.

    Args:
      skipped: counts of prompts without an example, by cause, to which those of these prompts are added:
        "unanswered", "single_answer", "unranked" (nothing says which of its answers is better), "tied" and
        "same_answers".
    """
    if take in TURN_TAKES:
        take, prompts = "each", prompts if take == "every_turn" else prompts[-1:]
    found: list[Taken] = []
    for one in prompts:
        if take == "each":
            of_one = [Taken(one.prompt, a.text, {**one.info, **a.info}) for a in one.answers]
            cause = "unanswered"
        elif take == "best":
            of_one, cause = _best(one)
        else:
            of_one, cause = _pairs(one, take)
        found += of_one
        if not of_one:
            skipped[cause] = skipped.get(cause, 0) + 1
    return found


def _ranked(one: Prompted) -> list[Answer]:
    """Returns the answers of which it is known how good they are, the best first."""
    return sorted((answer for answer in one.answers if answer.order is not None), key=lambda answer: -answer.order)


def _best(one: Prompted) -> tuple[list[Taken], str]:
    best = one.answers if len(one.answers) == 1 else _ranked(one)[:1]
    cause = "unranked" if one.answers else "unanswered"
    return [Taken(one.prompt, answer.text, {**one.info, **answer.info}) for answer in best], cause


def _pairs(one: Prompted, take: Take) -> tuple[list[Taken], str]:
    ranked = _ranked(one)
    if len(one.answers) < 2:
        return [], "single_answer" if one.answers else "unanswered"
    if len(ranked) < 2:
        return [], "unranked"
    pairs = [(a, b) for a, b in itertools.combinations(ranked, 2) if a.order > b.order]
    if not pairs:
        return [], "tied"
    if take == "best_and_worst":
        pairs = [(ranked[0], ranked[-1])]
    if take == "best_and_random":
        pairs = [best_and_random(one)]
    return [
        Taken(one.prompt, a.text, {**one.info, **_compared(a, b)}) for a, b in pairs if a.text != b.text
    ], "same_answers"


def best_and_random(one: Prompted) -> tuple[Answer, Answer]:
    """Returns P27's pair of a prompt with answers of which one is better than another: the best, and one of those that
    are worse, by a hash of the prompt and them; always the same one of the same prompt.

    Source: Zephyr, Tunstall et al. 2310.16944 section 3: one of all that are not the best, for diversity.
    """
    best, *others = _ranked(one)
    worse = [answer for answer in others if answer.order < best.order]
    texts = [*(message.content for message in one.prompt), *(answer.text for answer in worse)]
    return best, worse[zlib.crc32("\0".join(texts).encode()) % len(worse)]


def _compared(better: Answer, worse: Answer) -> dict[str, Any]:
    """Returns what is known of a pair: the worse answer, and where both have scores these and their difference."""
    info: dict[str, Any] = {"rejected": worse.text}
    if "score" in better.info and "score" in worse.info:
        scores = better.info["score"], worse.info["score"]
        info |= {"score": scores[0], "rejected_score": scores[1], "margin": scores[0] - scores[1]}
    return info
