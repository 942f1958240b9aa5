"""StepMatch: every line of a completion is compared with the same line of a worked solution and rewarded separately.

It stands in for learned segment rewards: factuality of each segment, and completeness of the answer.
"""

from __future__ import annotations

import dataclasses
import itertools

from jrl.tasks.example import Example
from jrl.tasks.rewards.segments import segment_rewards
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers.contract import SPANS_LIMIT


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMatch:
    """Non-blank lines are segments; the k-th one is right if it equals the k-th step of the example (R16)."""

    weight: float = 1.0  # of this verifier in the reward
    steps: str = "steps"  # the entry of Example.info with the texts of the steps
    factuality: float = 0.3  # reward of a right segment, and minus that of a wrong one, on the token that ends it
    completeness: float = 0.3  # reward of the row, times the share of the steps that are right


def score(config: StepMatch, completion: str, example: Example) -> Verdict:
    """Returns CORRECT if the segments are exactly the steps, else WRONG, with the reward of the row and those of the
    segments; UNPARSABLE without segments, FORBIDDEN with more than SPANS_LIMIT.

    Raises:
        ValueError: the example has no such steps.
    """
    steps = example.info.get(config.steps)
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) for step in steps):
        raise ValueError(f"example {example.id!r} has no texts in info[{config.steps!r}]; StepMatch needs its steps")
    lines, ends = completion.split("\n"), itertools.accumulate(len(line) + 1 for line in completion.split("\n"))
    segments = [(line.strip(), end - 1) for line, end in zip(lines, ends) if line.strip()]
    if not segments:
        return Verdict(Status.UNPARSABLE, 0.0, "no line has text")
    if len(segments) > SPANS_LIMIT:
        return Verdict(Status.FORBIDDEN, None, f"{len(segments)} segments; at most {SPANS_LIMIT} are rewarded")
    right = [k < len(steps) and text == steps[k].strip() for k, (text, _) in enumerate(segments)]
    rewards, complete = segment_rewards(
        right, len(steps), factuality=config.factuality, completeness=config.completeness
    )
    status = Status.CORRECT if all(right) and len(segments) == len(steps) else Status.WRONG
    return Verdict(status, complete, "", tuple(zip((end for _, end in segments), rewards)))
