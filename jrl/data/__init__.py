"""Data: from a source of examples to prompts, training rows and held-out sets."""

from __future__ import annotations

from jrl.data.batch import prompt_batch
from jrl.data.held_out import held_out
from jrl.data.packing import Plan, most_rows, padding_share, plan_rows
from jrl.data.prompts import Data, Visit
from jrl.data.stream import Stream, open_stream
from jrl.data.supervised import Supervised, supervise
from jrl.data.survey import survey, texts_of

__all__ = [
    "Data",
    "Plan",
    "Stream",
    "Supervised",
    "Visit",
    "held_out",
    "most_rows",
    "open_stream",
    "padding_share",
    "plan_rows",
    "prompt_batch",
    "supervise",
    "survey",
    "texts_of",
]
