"""Similarity: the character similarity of the extracted text to the example's answer, or to another text of it."""

from __future__ import annotations

import dataclasses

from jrl.tasks.example import Example
from jrl.tasks.rewards.similarity import similarity
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers.extract import Extract, extract_answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Similarity:
    """A reward in [0, 1] (R4), such as for edits that are compared with a known one."""

    weight: float = 1.0  # of this verifier in the reward
    extract: Extract = "all"  # where the answer is; answer_line: the last line, after Answer:, hash: after ####
    info: str | None = None  # entry of Example.info to compare with, such as 'feedback'; None: the example's answer
    unparsable: float = -1.0  # reward if there is no answer there
    max_characters: int = 5_000  # a longer answer is not scored (FORBIDDEN): time is quadratic in the length

    def __post_init__(self) -> None:
        if self.max_characters < 1:
            raise ValueError(f"Similarity.max_characters is {self.max_characters}; it must be at least 1")


def reward_range(config: Similarity) -> tuple[float, float]:
    return min(0.0, config.unparsable), max(1.0, config.unparsable)


def score(config: Similarity, completion: str, example: Example) -> Verdict:
    """Returns CORRECT with the similarity if it is above 0, WRONG if it is 0, UNPARSABLE without an answer.

    Raises:
        ValueError: the example has no text to compare with.
    """
    reference = example.answer if config.info is None else example.info.get(config.info)
    if not isinstance(reference, str):
        what = "answer" if config.info is None else f"text {config.info!r} in its info"
        raise ValueError(f"example {example.id!r} has no {what}; Similarity needs one")
    answer = extract_answer(completion, config.extract)
    if answer is None:
        return Verdict(Status.UNPARSABLE, config.unparsable, f"no single answer in {config.extract!r}")
    if len(answer) > config.max_characters:
        return Verdict(
            Status.FORBIDDEN, None, f"{len(answer)} characters; at most {config.max_characters} are compared"
        )
    reward = similarity(answer, reference.strip())
    return Verdict(Status.CORRECT if reward > 0 else Status.WRONG, reward)
