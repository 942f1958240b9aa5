"""Exact: the extracted text equals the example's answer character for character, after stripping both."""

from __future__ import annotations

import dataclasses

from jrl.tasks.example import Example
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers.extract import Extract, extract_answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exact:
    weight: float = 1.0  # of this verifier in the reward
    extract: Extract = "all"  # where the answer is; answer_line: the last line, after Answer:, hash: after ####


def score(config: Exact, completion: str, example: Example) -> Verdict:
    """Returns CORRECT with reward 1, WRONG or UNPARSABLE with reward 0.

    Raises:
        ValueError: the example has no answer to compare with.
    """
    if example.answer is None:
        raise ValueError(f"example {example.id!r} has no answer; Exact needs one")
    answer = extract_answer(completion, config.extract)
    if answer is None:
        return Verdict(Status.UNPARSABLE, 0.0, f"no single answer in {config.extract!r}")
    if answer == example.answer.strip():
        return Verdict(Status.CORRECT, 1.0)
    return Verdict(Status.WRONG, 0.0)
