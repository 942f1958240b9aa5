"""Checked access to the fields of a row: every value is asked for by what it must be, every refusal names its field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jrl.tasks.envs.columns import BadRow, kind

CAUSES = {
    "missing_field": "is missing or null",
    "wrong_type": "has the wrong type",
    "empty": "is empty",
    "out_of_range": "is out of range",
    "unknown_role": "is not a role of this layout",
    "wrong_turn": "is out of turn",
    "no_answer": "does not end with an answer of the assistant",
    "no_shared_prompt": "does not begin with the prompt of the other answer",
    "equal_sides": "is the same as the other answer",
    "contradiction": "contradicts another field",
    "cycle": "is an ancestor of itself",
    "missing_parent": "names a message that is not there",
    "duplicate_message": "is the id of another message, too",
}
LARGEST = 1e9  # of a number whose layout has no range


class BadField(BadRow):
    """Says which of CAUSES a field is, and the particulars."""

    def __init__(self, cause: str, field: Field, particulars: str = "") -> None:
        text = f"field {field.name!r} {CAUSES[cause]}{f': {particulars}' if particulars else ''}"
        ValueError.__init__(self, text)
        self.cause, self.row = cause, field.row


class Field:
    """A value of a row, and its path there: `completions[2].response`."""

    __slots__ = ("name", "row", "value")

    def __init__(self, value: Any, name: str = "", row: int = 0) -> None:
        self.value, self.name = value, name
        self.row = row  # which of the rows that are read together, from 0

    def optional(self, key: str) -> Field | None:
        """Returns the field's own field of that name, None where it is missing or null. Raises: BadField."""
        if not isinstance(self.value, dict):
            raise BadField("wrong_type", self, f"it is {kind(self.value)}, not an object")
        value = self.value.get(key)
        return None if value is None else Field(value, f"{self.name}.{key}" if self.name else key, self.row)

    def __getitem__(self, key: str) -> Field:
        """Returns the field's own field of that name. Raises: BadField where it is missing or null."""
        found = self.optional(key)
        if found is None:
            raise BadField("missing_field", Field(None, f"{self.name}.{key}" if self.name else key, self.row))
        return found

    def text(self) -> str:
        """Returns the text, which is not blank. Raises: BadField."""
        if not isinstance(self.value, str):
            raise BadField("wrong_type", self, f"it is {kind(self.value)}, not text")
        if not self.value.strip():
            raise BadField("empty", self)
        return self.value

    def items(self) -> list[Field]:
        """Returns the fields of a list, which is not empty. Raises: BadField."""
        if not isinstance(self.value, list):
            raise BadField("wrong_type", self, f"it is {kind(self.value)}, not a list")
        if not self.value:
            raise BadField("empty", self)
        return [Field(value, f"{self.name}[{i}]", self.row) for i, value in enumerate(self.value)]

    def number(self, low: float = -LARGEST, high: float = LARGEST) -> float:
        """Returns the number, from `low` to `high`. Raises: BadField."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise BadField("wrong_type", self, f"it is {kind(self.value)}, not a number")
        if not low <= self.value <= high:
            raise BadField("out_of_range", self, f"{_short(self.value)} is not from {low:g} to {high:g}")
        return float(self.value)

    def whole(self, low: int, high: int) -> int:
        """Returns the whole number, from `low` to `high`; 2.0 is one. Raises: BadField."""
        number = self.number(low, high)
        if number != int(number):
            raise BadField("out_of_range", self, f"{_short(self.value)} is not a whole number")
        return int(number)

    def flag(self) -> bool:
        """Returns whether it is true (1) and not false (0). Raises: BadField for anything else."""
        if isinstance(self.value, bool):
            return self.value
        return bool(self.whole(0, 1))

    def one_of(self, values: Sequence[str], cause: str) -> str:
        """Returns the text, one of `values`. Raises: BadField of `cause`."""
        text = self.text()
        if text not in values:
            raise BadField(cause, self, f"{text[:40]!r} is not one of {', '.join(values)}")
        return text

    def same_as(self, other: Field) -> bool:
        """Whether both hold the same value."""
        return self.value == other.value


def texts(row: Field, names: Sequence[str]) -> dict[str, str]:
    """Returns the texts among the row's optional fields of these names: what is worth keeping beside an answer."""
    found = ((name, row.optional(name)) for name in names)
    return {name: field.text() for name, field in found if field is not None}


def _short(value: float) -> str:
    text = str(value) if isinstance(value, float) or abs(value) < 1e18 else "a whole number of many digits"
    return text[:40]
