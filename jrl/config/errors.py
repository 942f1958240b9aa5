"""The error of the configuration front end, and the search for the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

COMMAND_LINE = "command line"


class ConfigError(Exception):
    """A configuration that is refused.

    `place` is `file:line`, `command line`, or the file where no line can be named; `reason` is the text without it.
    """

    def __init__(self, place: str, reason: str):
        super().__init__(f"{place}: {reason}")
        self.place = place
        self.reason = reason


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Returns the name in `valid` most like `name`, or None where none is similar. Case has little weight."""
    scored = [(_likeness(name, option), option) for option in valid]
    likeness, option = max(scored, key=lambda pair: pair[0], default=(0.0, ""))
    return option if likeness >= 0.6 else None


def suggestion(name: str, valid: Iterable[str], *, kind: str, max_listed: int = 12) -> str:
    """Returns the tail of an error: "; did you mean X? (kind: X, Y, Z)", the list only if it is short."""
    options = sorted(set(valid))
    guess = nearest(name, options)
    text = f"; did you mean {guess}?" if guess else ""
    return f"{text} ({kind}: {', '.join(options)})" if 0 < len(options) <= max_listed else text


def _likeness(name: str, option: str) -> float:
    exact = difflib.SequenceMatcher(None, name, option, autojunk=False).ratio()
    folded = difflib.SequenceMatcher(None, name.casefold(), option.casefold(), autojunk=False).ratio()
    return max(exact, 0.99 * folded)
