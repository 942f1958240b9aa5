"""Resets to prefixes of the answers in the data (S6).

With `probability`, the completions of a visit continue from the prompt and the first h tokens of the answer, with h
from 1 to all but one of them. The prefix is part of the policy's prompt: it is scored with the whole text, and not
learned from. Prompt and prefix together have at most Data.prompt_length tokens; if they would have more, h is reduced.

Source: DR-PO, 2404.08495, and the code of its authors, which resets every visit. There each rollout has a different
prefix; here the completions of a prompt share one, so that they can be compared. Stop strings are refused: one may
begin in the prefix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jrl.rollout.strategies.contract import Strategy, check_no_stop_strings
from jrl.tasks.data.prompts import Visit
from jrl.tasks.data.stored import LeftOut, Template

RESET = 6  # distinguishes this draw from others of a visit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reset:
    """Completions that begin as the data's answer does."""

    template: str = (
        "{answer}"  # the text to begin with: {answer}, or {solution} and other texts of Example.info by name
    )
    probability: float = 1.0  # share of the visits that are reset

    def __post_init__(self) -> None:
        Template(self.template, "Reset.template")
        if not 0 < self.probability <= 1:
            raise ValueError(f"Reset.probability must be above 0 and at most 1; got {self.probability}")


def check_prompts(config: Reset, visits: Sequence[Visit]) -> None:
    Template(config.template, "Reset.template").check_some(visits)


def prefix(config: Reset, visit: Visit, tokenizer: Any, room: int) -> tuple[int, ...]:
    """Returns S6's tokens after the prompt: () if the visit is not reset, or its example has no such text, or one of
    fewer than 2 tokens. The random draws depend on the visit alone.

    Args:
      room: most tokens to return.
    """
    try:
        ids = tokenizer.encode(Template(config.template, "Reset.template").fill(visit))
    except LeftOut:
        return ()
    draw = np.random.default_rng([*visit.uid, RESET])
    if draw.random() >= config.probability or len(ids) < 2:
        return ()
    return tuple(ids[: min(int(draw.integers(1, len(ids))), room)])


STRATEGY = Strategy(config=Reset, check=check_no_stop_strings, check_prompts=check_prompts, prefix=prefix)
