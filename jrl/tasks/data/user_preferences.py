"""Preferences of users: several pairs of one user, so that a model can infer the user's taste from the other pairs."""

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

PAIRS = 4  # of a user at most; a unit has two rows for each
NONE = -1.0  # label of a row that only fills its unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserPreferences:
    """Users from the training split of the run's task. An example is one pair of a user, and lists at most 3 more."""

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
    """Returns P36's eight sequences for every usable visit: for each pair i the preferred answer (label 2 i + 1) and
    the other one (2 i); for missing pairs the first two sequences again, as NONE. Also returns the number of skipped
    visits by cause.

    A visit is skipped if its example lacks an answer ("no_answer", "no_rejected") or a list of at most 3 pairs of three
    texts each ("no_others"), if a pair occurs twice, which would leak its label ("same_pair"), if the answers of a pair
    are the same ("same_answers"), or if one does not fit `width` ("too_long").
    """
    templates = [Template(config.chosen, "chosen"), Template(config.rejected, "rejected")]

    def unit(visit: Visit) -> list[tuple[Sequence[int], list[int], float]]:
        texts = [template.fill(visit) for template in templates]
        others = visit.example.info.get(config.others)
        if not (isinstance(others, list | tuple) and len(others) < PAIRS and all(map(is_pair, others))):
            raise LeftOut("no_others")
        pairs, seen = [(visit.prompt, texts)], [(visit.example.messages[-1].content, {*texts})]
        for pair in others:
            seen.append((pair["prompt"], {pair["chosen"], pair["rejected"]}))
            prompt = tuple(tokenizer.encode_prompt((Message("user", pair["prompt"]),)))
            pairs.append((prompt, [pair["chosen"], pair["rejected"]]))
        if any(pair in seen[:i] for i, pair in enumerate(seen)):
            raise LeftOut("same_pair")
        sequences = []
        for i, (prompt, texts) in enumerate(pairs):
            answers = [completion_of(text, tokenizer) for text in texts]
            check_pair(prompt, answers, width)
            sequences += [(prompt, answers[0], 2.0 * i + 1), (prompt, answers[1], 2.0 * i)]
        return sequences + [(prompt, ids, NONE) for prompt, ids, _ in sequences[:2]] * (PAIRS - len(pairs))

    units, counts = of_visits(unit, visits)
    return stack([sequence for unit in units for sequence in unit], 2 * PAIRS, tokenizer.pad_id, width), counts


def is_pair(value: Any) -> bool:
    """Returns whether an entry of a list is a prompt with two answers."""
    return isinstance(value, dict) and all(
        isinstance(value.get(name), str) for name in ("prompt", "chosen", "rejected")
    )


SOURCE = StoredSource(config=UserPreferences, rows=rows, unit_size=2 * PAIRS)
