"""Text for a terminal: what a model wrote, made safe to print, and numbers as words and bars. No JAX."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-~=+*#"


def printable(text: str, limit: int = 400) -> str:
    """Returns `text` on one line with nothing in it that a terminal obeys, and at most `limit` characters of it.

    Control characters (so ANSI sequences and newlines), invisible formatting (so text that turns its direction) and
    lone surrogates are written as escapes; what is cut is counted.
    """
    cut = len(text) - limit
    shown = "".join(_visible(character) for character in text[:limit])
    return f"{shown} ... ({cut} more characters)" if cut > 0 else shown


def printable_lines(text: str) -> str:
    """Returns `text` with its lines kept and each of them printable, uncut."""
    return "\n".join(printable(line, len(line)) for line in text.split("\n"))


def _visible(character: str) -> str:
    if character == "\n":
        return "\\n"
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        code = ord(character)
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    return character


def sparkline(values: Sequence[float], width: int = 24, *, ascii_only: bool = False) -> str:
    """Returns the last `width` values as bars between their least and greatest; '' for none."""
    values = list(values)[-width:]
    bars = _ASCII_BARS if ascii_only else _BARS
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((value - low) * scale)] for value in values)


def bar(done: int, total: int) -> str:
    """Returns '[############            ]  50 %'."""
    full = 24 * done // max(total, 1)
    return f"[{'#' * full:24}] {100 * done // max(total, 1):3d} %"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows as lines with aligned columns: the first left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    placed = [[f"{row[0]:<{widths[0]}}", *(f"{x:>{w}}" for x, w in zip(row[1:], widths[1:]))] for row in rows]
    return ["  ".join(cells).rstrip() for cells in placed]


def counted(count: int, noun: str) -> str:
    """Returns '1 row' or '2 rows'; '2 batches' for 'batch'."""
    plural = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{plural}"


def percent(share: float) -> str:
    """Returns '12 %' for 0.12, rounded down, so that only 1 is '100 %'; '<1 %' for less than 0.01 that is not 0."""
    return "<1 %" if 0 < share < 0.01 else f"{math.floor(100 * share + 1e-9)} %"


def duration(seconds: float) -> str:
    """Returns '42 s', '3 min 05 s' or '2 h 07 min'."""
    rounded = round(max(seconds, 0))
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"
