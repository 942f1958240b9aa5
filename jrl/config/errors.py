"""ConfigError, and the search for the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

COMMAND_LINE = "command line"
MOST_LISTED = 12  # names in a message


class ConfigError(Exception):
    """An invalid configuration.

    `location` is where the error is, such as `file:line`, `command line`, or the file if no line applies; `reason` is
    the message without it.
    """

    def __init__(self, location: str, reason: str):
        super().__init__(f"{location}: {reason}")
        self.location = location
        self.reason = reason


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Returns the name in `valid` most similar to `name`, or None if none is similar. Case has little weight."""
    scored = [(_similarity(name, option), option) for option in valid]
    similarity, option = max(scored, key=lambda pair: pair[0], default=(0.0, ""))
    return option if similarity >= 0.6 else None


def suggestion(name: str, valid: Iterable[str], *, kind: str, max_listed: int = MOST_LISTED) -> str:
    """Returns the tail of an error message: "; did you mean X? (kind: X, Y, Z)", with the list only if it is short."""
    options = sorted(set(valid))
    guess = nearest(name, options)
    text = f"; did you mean {guess}?" if guess else ""
    return f"{text} ({kind}: {', '.join(options)})" if 0 < len(options) <= max_listed else text


def _similarity(name: str, option: str) -> float:
    exact = difflib.SequenceMatcher(None, name, option, autojunk=False).ratio()
    folded = difflib.SequenceMatcher(None, name.casefold(), option.casefold(), autojunk=False).ratio()
    return max(exact, 0.99 * folded)
