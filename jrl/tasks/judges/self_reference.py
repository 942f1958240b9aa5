"""Self-reference: the judge answers the prompt itself, and compares two answers with its own as the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jrl.tasks.example import Example
from jrl.tasks.judges import pairwise
from jrl.tasks.judges.pairwise import WINS, Pairwise
from jrl.tasks.judges.questions import Question, object_schema

TASK = "Answer the last message of the conversation yourself. Criticize the two answers with your own as the reference."
REPLY = (
    '{"answer": "<your own answer>", "criticism": "<what each of the two lacks compared with it>", '
    '"winner": <"first", "second" or "tie">}'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfReference(Pairwise):
    """Comparisons of two answers with a third as the reference, which the judge writes first in every reply. Reward and
    requests are those of Pairwise: R20, both orders.

    Source: 2406.11190 (abstract): answer, criticize, decide. The paper adds self-consistency against position bias, and
    preference strengths by semantic perplexity. Here, asking in both orders counters position bias.
    """

    # what is compared, after the judge's own answer
    instructions: str = "Then decide which of the two answers serves the people who asked better."


def schema(cfg: SelfReference) -> dict[str, Any]:
    written = {"type": "string", "minLength": 1}
    return object_schema({"answer": written, "criticism": written, "winner": {"type": "string", "enum": list(WINS)}})


def questions(cfg: SelfReference, example: Example, texts: Sequence[str | None]) -> list[Question]:
    """Returns a question for each ordered pair, as in Pairwise."""
    return pairwise.comparisons(cfg, example, texts, f"{TASK}\n\n{cfg.instructions}", REPLY)
