"""One task, as data. Host only; converts to and from JSON; never passed to jitted code. No JAX."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

ROLES = ("system", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class Message:
    role: str  # one of ROLES
    content: str


@dataclasses.dataclass(frozen=True)
class Example:
    """One task: the prompt, and the data that verifiers need to score the answer.

    `verifiers` names rows of the verifier table; empty: the run's verifiers (Scoring.verifiers). `info` is JSON and
    reaches verifiers and reports only. `task` labels the example's source in metrics ("chain_sum").
    """

    id: str
    messages: tuple[Message, ...]
    answer: str | None = None
    verifiers: tuple[str, ...] = ()
    task: str = ""
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "messages": [dict(vars(m)) for m in self.messages],
            "verifiers": list(self.verifiers),
            "info": dict(self.info),
        }

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Example:
        return Example(
            id=row["id"],
            messages=tuple(Message(**m) for m in row["messages"]),
            answer=row.get("answer"),
            verifiers=tuple(row.get("verifiers", ())),
            task=row.get("task", ""),
            info=row.get("info", {}),
        )

    def prompt_digest(self) -> bytes:
        """Returns 32 bytes that identify the prompt text, for held-out splits and duplicate checks."""
        text = json.dumps([[m.role, m.content] for m in self.messages], ensure_ascii=False)
        return hashlib.sha256(text.encode()).digest()


def visit_uid(example_id: str, visit: int) -> tuple[int, int]:
    """Returns two uint32 that identify one visit of one example. Every random draw for the visit derives from them."""
    digest = hashlib.sha256(f"{example_id}\x00{visit}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
