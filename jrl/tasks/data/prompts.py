"""The training split, and the checks of an encoded prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from jrl.tasks.example import Example

MOST_TOKENS = 2**24  # of a prompt, or of a completion; more is probably a typo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """How examples become prompts."""

    prompt_length: int  # most tokens of an encoded prompt, role markers included: P of every program
    held_out_every: int | None = 10  # one in this many prompts is held out, by a hash of its text; None: none, 1: all
    on_bad_prompt: Literal["refuse", "drop"] = "refuse"  # empty or longer than prompt_length
    max_dropped_share: float = 0.5  # largest share of the training prompts that may be dropped

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_length <= MOST_TOKENS:
            raise ValueError(f"Data.prompt_length must be 1 to {MOST_TOKENS}; got {self.prompt_length}")
        if self.held_out_every is not None and self.held_out_every < 1:
            raise ValueError(f"Data.held_out_every is {self.held_out_every}: it must be None or at least 1")
        if not 0 <= self.max_dropped_share <= 1:
            raise ValueError(f"Data.max_dropped_share is {self.max_dropped_share}; it is a share, from 0 to 1")


class Visit(NamedTuple):
    """One visit of one example."""

    example: Example
    uid: tuple[int, int]  # two uint32 that identify the visit: jrl.tasks.example.visit_uid(example.id, visit)
    prompt: tuple[int, ...]  # ids, at most Data.prompt_length
    index: int | None = None  # of the example in the run's source; None: held out, or not from the source


def is_held_out(example: Example, config: Data) -> bool:
    """Returns whether the example belongs to the held-out split. It depends only on the prompt's text, so no prompt is
    in both splits, whatever the source, its order and its duplicates."""
    if config.held_out_every is None:
        return False
    return int.from_bytes(example.prompt_digest(), "big") % config.held_out_every == 0


def encode_prompt(example: Example, tokenizer: Any, config: Data) -> tuple[tuple[int, ...], str | None]:
    """Returns the prompt's ids, role markers included, and why it cannot be used: "empty", "too_long", or None if it
    can.

    Raises: ValueError naming the example if its messages do not fit the tokenizer's chat template.
    """
    if not any(message.content.strip() for message in example.messages):
        return (), "empty"
    try:
        ids = tuple(tokenizer.encode_prompt(example.messages))
    except ValueError as error:
        raise ValueError(f"example {example.id!r}: {error}") from error
    return ids, "too_long" if len(ids) > config.prompt_length else None


DROPPED = "Data.on_bad_prompt = 'drop' would drop and count such prompts"
NOT_DROPPED = "a curriculum drops none: remove such prompts from the data"


def refusal(example: Example, cause: str, length: int, config: Data, advice: str = DROPPED) -> ValueError:
    """Returns the error for a prompt that cannot be used. advice: DROPPED or NOT_DROPPED."""
    if cause == "empty":
        problem = "its prompt is empty"
    else:
        problem = f"its prompt has {length} tokens, more than Data.prompt_length = {config.prompt_length}"
    return ValueError(f"example {example.id!r}: {problem}; {advice}")


def dropped_prompts(counts: Mapping[str, int], seen: int, config: Data) -> str:
    """Returns a message with how many of `seen` prompts were skipped and why; "" if none was.

    Args:
        counts: cause -> prompts, as in Stream.counts.
    """
    reasons = {"too_long": f"exceed Data.prompt_length={config.prompt_length}", "empty": "are empty"}
    parts = [f"{counts[cause]} of {seen} prompts {why}" for cause, why in reasons.items() if counts.get(cause)]
    return " and ".join(parts) + " and were skipped" if parts else ""
