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
    """One message of a conversation. Raises TypeError if a field is not a text."""

    role: str  # one of ROLES
    content: str

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, str):
                raise TypeError(f"Message.{name} is of type {type(value).__name__}; it must be a text")


@dataclasses.dataclass(frozen=True)
class Example:
    """One task: the prompt, and the data that verifiers need to score the answer.

    `verifiers` names rows of the verifier table; empty: the run's verifiers (Scoring.verifiers). `info` is JSON and
    reaches verifiers and reports only. `task` labels the example's source in metrics ("chain_sum").

    Raises:
      TypeError: a field is of another type.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str | None = None
    verifiers: tuple[str, ...] = ()
    task: str = ""
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, holds, valid in (
            ("id", isinstance(self.id, str), "a text"),
            ("messages", _is_tuple_of(self.messages, Message), "a tuple of Message"),
            ("answer", self.answer is None or isinstance(self.answer, str), "a text or None"),
            ("verifiers", _is_tuple_of(self.verifiers, str), "a tuple of names"),
            ("task", isinstance(self.task, str), "a text"),
            ("info", isinstance(self.info, Mapping), "a dict of JSON values"),
        ):
            if not holds:
                value = getattr(self, name)
                raise TypeError(
                    f"Example.{name} of example {self.id!r} must be {valid}, but is of type {type(value).__name__}: "
                    f"{value!r:.80}"
                )

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


def _is_tuple_of(value: Any, member: type) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, member) for each in value)


def visit_uid(example_id: str, visit: int) -> tuple[int, int]:
    """Returns two uint32 that identify one visit of one example. Every random draw for the visit derives from them."""
    digest = hashlib.sha256(f"{example_id}\x00{visit}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
