"""Quoting of text for a judge: a completion cannot pose as the rubric."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence


def marker(texts: Sequence[str]) -> str:
    """Returns 16 hex digits that none of `texts` contains; deterministic.

    The digits are a hash of the texts. Finding a text that contains its own marker takes about 2^64 tries, and such a
    text gets another marker.
    """
    for salt in range(1000):
        mark = hashlib.sha256(json.dumps([salt, *texts]).encode()).hexdigest()[:16]
        if not any(mark in text for text in texts):
            return mark
    raise ValueError("no marker can be found that these texts do not contain")


def quote(name: str, text: str, mark: str) -> str:
    """Returns `text` between <name mark> and </name mark>, each on its own line."""
    return f"<{name} {mark}>\n{text}\n</{name} {mark}>"
