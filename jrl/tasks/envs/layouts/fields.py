"""Checked access to the fields of a row: every access states the expected type, and every error names the field."""

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
    "missing_parent": "names a message that does not exist",
    "several_answers": "lists several answers",
    "duplicate_message": "is the id of another message, too",
}
LARGEST = 1e9  # bound on numbers without a range in the layout


class BadField(BadRow):
    """A field that cannot be used. The message is the text of one of CAUSES, with details."""

    def __init__(self, cause: str, field: Field, details: str = "") -> None:
        text = f"field {field.name!r} {CAUSES[cause]}{f': {details}' if details else ''}"
        ValueError.__init__(self, text)
        self.cause, self.row = cause, field.row


class Field:
    """A value of a row with its path, such as `completions[2].response`."""

    __slots__ = ("name", "row", "value")

    def __init__(self, value: Any, name: str = "", row: int = 0) -> None:
        self.value, self.name = value, name
        self.row = row  # the index of the row among those read together

    def optional(self, key: str) -> Field | None:
        """Returns the subfield `key`; None if it is missing or null. Raises: BadField if this is not an object."""
        if not isinstance(self.value, dict):
            raise BadField("wrong_type", self, f"it is {kind(self.value)}, not an object")
        value = self.value.get(key)
        return None if value is None else Field(value, f"{self.name}.{key}" if self.name else key, self.row)

    def __getitem__(self, key: str) -> Field:
        """Returns the subfield `key`. Raises: BadField if it is missing or null, or this is not an object."""
        field = self.optional(key)
        if field is None:
            raise BadField("missing_field", Field(None, f"{self.name}.{key}" if self.name else key, self.row))
        return field

    def text(self) -> str:
        """Returns the text. Raises: BadField if it is not text, or blank."""
        if not isinstance(self.value, str):
            raise BadField("wrong_type", self, f"it is {kind(self.value)}, not text")
        if not self.value.strip():
            raise BadField("empty", self)
        return self.value

    def items(self) -> list[Field]:
        """Returns the fields of a list. Raises: BadField if it is not a list, or empty."""
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
        """Returns the whole number, from `low` to `high`; 2.0 counts as one. Raises: BadField."""
        number = self.number(low, high)
        if number != int(number):
            raise BadField("out_of_range", self, f"{_short(self.value)} is not a whole number")
        return int(number)

    def flag(self) -> bool:
        """Returns true or 1 as True, false or 0 as False. Raises: BadField for anything else."""
        if isinstance(self.value, bool):
            return self.value
        return bool(self.whole(0, 1))

    def one_of(self, values: Sequence[str], cause: str) -> str:
        """Returns the text, which must be one of `values`. Raises: BadField with `cause` if it is not."""
        text = self.text()
        if text not in values:
            raise BadField(cause, self, f"{text[:40]!r} is not one of {', '.join(values)}")
        return text

    def same_as(self, other: Field) -> bool:
        """Returns whether both have the same value."""
        return self.value == other.value


def texts(row: Field, names: Sequence[str]) -> dict[str, str]:
    """Returns the texts of the row's optional fields `names` that are present, for the `info` of an example."""
    fields = ((name, row.optional(name)) for name in names)
    return {name: field.text() for name, field in fields if field is not None}


def present(row: Field, names: Sequence[str]) -> dict[str, Any]:
    """Returns the values of the row's fields `names` that are not missing or null, of any type, for the `info` of an
    example: data sets of many kinds share a layout."""
    fields = ((name, row.optional(name)) for name in names)
    return {name: field.value for name, field in fields if field is not None}


def _short(value: float) -> str:
    text = str(value) if isinstance(value, float) or abs(value) < 1e18 else "a whole number of many digits"
    return text[:40]
