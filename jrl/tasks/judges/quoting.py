"""Text quoted for a judge, so that a completion cannot speak as the rubric."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence


def marker(texts: Sequence[str]) -> str:
    """Returns 16 hex digits that none of `texts` contains, always the same ones for the same texts.

    They are a hash of the texts. A text that is to contain its own marker would have to be found by trying 2^64 of
    them; one that does contain it gets another.
    """
    for salt in range(1000):
        mark = hashlib.sha256(json.dumps([salt, *texts]).encode()).hexdigest()[:16]
        if not any(mark in text for text in texts):
            return mark
    raise ValueError("no marker can be found that these texts do not contain")


def quote(name: str, text: str, mark: str) -> str:
    """Returns `text` between <name mark> and </name mark>, each on its own line."""
    return f"<{name} {mark}>\n{text}\n</{name} {mark}>"
