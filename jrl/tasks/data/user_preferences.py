"""Preferences of users: pairs of one user, so that what the user prefers can be told from the others of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.stored import (
    LeftOut,
    StoredRows,
    StoredSource,
    Template,
    check_pair,
    completion_of,
    of_visits,
    stack,
)
from jrl.tasks.example import Message

PAIRS = 4  # of a user, in a row of the packer
NONE = -1.0  # label of a row that only fills its unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserPreferences:
    """Users out of the examples of the run's task, on its training split: an example is a pair of a user, and lists at
    most 3 more."""

    chosen: str = "{answer}"  # the preferred answer of its pair: {answer}, or texts of Example.info by name
    rejected: str = "{rejected}"  # the other one
    # the entry of Example.info with a list of the user's other pairs, each {"prompt": .., "chosen": .., "rejected": ..}
    others: str = "others"

    def __post_init__(self) -> None:
        for name in ("chosen", "rejected"):
            Template(getattr(self, name), f"UserPreferences.{name}")


def rows(
    config: UserPreferences, visits: Sequence[Visit], tokenizer: Any, width: int
) -> tuple[StoredRows, dict[str, int]]:
    """Returns P36's eight sequences for every visit that gives a user: of each pair i the preferred answer (label
    2 i + 1) and the other one (2 i), and for pairs that are missing its first two again, as NONE; and how many visits
    gave none.

    Left out are visits whose example lacks an answer ("no_answer", "no_rejected") or a list of at most 3 pairs of three
    texts each ("no_others"), users with a pair twice, which would tell its label ("same_pair"), or with one whose
    answers are the same ("same_answers"), and those with one that does not fit `width` ("too_long").
    """
    templates = [Template(config.chosen, "chosen"), Template(config.rejected, "rejected")]

    def unit(visit: Visit) -> list[tuple[Sequence[int], list[int], float]]:
        texts = [template.fill(visit) for template in templates]
        given = visit.example.info.get(config.others)
        if not (isinstance(given, list | tuple) and len(given) < PAIRS and all(map(is_pair, given))):
            raise LeftOut("no_others")
        pairs, seen = [(visit.prompt, texts)], [(visit.example.messages[-1].content, {*texts})]
        for pair in given:
            seen.append((pair["prompt"], {pair["chosen"], pair["rejected"]}))
            prompt = tuple(tokenizer.encode_prompt((Message("user", pair["prompt"]),)))
            pairs.append((prompt, [pair["chosen"], pair["rejected"]]))
        if any(one in seen[:i] for i, one in enumerate(seen)):
            raise LeftOut("same_pair")
        sequences = []
        for i, (prompt, texts) in enumerate(pairs):
            answers = [completion_of(text, tokenizer) for text in texts]
            check_pair(prompt, answers, width)
            sequences += [(prompt, answers[0], 2.0 * i + 1), (prompt, answers[1], 2.0 * i)]
        return sequences + [(prompt, ids, NONE) for prompt, ids, _ in sequences[:2]] * (PAIRS - len(pairs))

    units, counts = of_visits(unit, visits)
    return stack([sequence for given in units for sequence in given], 2 * PAIRS, tokenizer.pad_id, width), counts


def is_pair(value: Any) -> bool:
    """Whether an entry of a list is a prompt with two answers."""
    return isinstance(value, dict) and all(
        isinstance(value.get(name), str) for name in ("prompt", "chosen", "rejected")
    )


SOURCE = StoredSource(config=UserPreferences, rows=rows, unit_size=2 * PAIRS)
