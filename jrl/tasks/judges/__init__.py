"""Judges: language models behind an HTTP API that score completions. Imports no JAX."""

from __future__ import annotations

from jrl.tasks.judges.config import Judge
from jrl.tasks.judges.failures import JudgeStopped
from jrl.tasks.judges.gap import Gap
from jrl.tasks.judges.grade import Grade
from jrl.tasks.judges.hindsight import Hindsight
from jrl.tasks.judges.judge import (
    Group,
    OpenJudge,
    open_client,
    open_judge,
    open_judges,
    preflight,
    score_names,
)
from jrl.tasks.judges.pairwise import Pairwise
from jrl.tasks.judges.rubric import Rubric
from jrl.tasks.judges.self_reference import SelfReference

__all__ = ["Gap", "Grade", "Group", "Hindsight", "Judge", "JudgeStopped", "OpenJudge", "Pairwise", "Rubric",
           "SelfReference", "open_client", "open_judge", "open_judges", "preflight", "score_names"]  # fmt: skip
