"""Regex: the extracted text matches a pattern of the configuration. The model never supplies the pattern."""

from __future__ import annotations

import dataclasses
import re

from jrl.tasks.example import Example
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers.extract import Extract, extract_answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regex:
    """`pattern` must match the whole extracted text (write `.*` around it to search). Backtracking patterns can take
    very long: the length of the text is limited, and the worker's deadline ends the match."""

    pattern: str  # Python regular expression
    weight: float = 1.0  # of this verifier in the reward
    extract: Extract = "all"  # where the answer is; answer_line: the last line, after Answer:, hash: after ####
    max_characters: int = 10_000  # a longer text is not scored (FORBIDDEN)

    def __post_init__(self):
        try:
            re.compile(self.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"Regex.pattern {self.pattern!r} is not a regular expression: {error}") from error
        if self.max_characters < 1:
            raise ValueError(f"Regex.max_characters is {self.max_characters}; it must be at least 1")


def score(config: Regex, completion: str, example: Example) -> Verdict:
    """Returns CORRECT with reward 1, WRONG or UNPARSABLE with reward 0; FORBIDDEN above max_characters."""
    answer = extract_answer(completion, config.extract)
    if answer is None:
        return Verdict(Status.UNPARSABLE, 0.0, f"no single answer in {config.extract!r}")
    if len(answer) > config.max_characters:
        return Verdict(Status.FORBIDDEN, None, f"{len(answer)} characters; at most {config.max_characters} are matched")
    if re.fullmatch(config.pattern, answer, flags=re.DOTALL):
        return Verdict(Status.CORRECT, 1.0)
    return Verdict(Status.WRONG, 0.0)
