"""Data: from a source of examples to prompts, training rows and held-out sets."""

from __future__ import annotations

from jrl.data.held_out import held_out
from jrl.data.prompts import Data, Visit
from jrl.data.stream import Stream, open_stream

__all__ = ["Data", "Stream", "Visit", "held_out", "open_stream"]
