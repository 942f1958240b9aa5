"""FormatTags: the completion is one section after another, each tag exactly once, in the declared order."""

from __future__ import annotations

import dataclasses
import re

from jrl.tasks.example import Example
from jrl.tasks.verdict import Status, Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormatTags:
    """`tags` in order: ("think", "answer") requires <think>...</think><answer>...</answer>, and only blanks around."""

    weight: float = 1.0  # of this verifier in the reward
    tags: tuple[str, ...] = ("think", "answer")  # their names, in order

    def __post_init__(self):
        if not self.tags or len(set(self.tags)) != len(self.tags):
            raise ValueError(f"FormatTags.tags is {self.tags}; it must name at least one tag, each once")
        for tag in self.tags:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", tag):
                raise ValueError(f"FormatTags.tags has {tag!r}; a tag is a name, written without its brackets")


def score(config: FormatTags, completion: str, example: Example) -> Verdict:
    """Returns CORRECT with reward 1 or WRONG with reward 0; an empty completion is UNPARSABLE."""
    if not completion.strip():
        return Verdict(Status.UNPARSABLE, 0.0, "an empty completion")
    rest = completion
    for tag in config.tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if completion.count(opening) != 1 or completion.count(closing) != 1:
            return Verdict(Status.WRONG, 0.0, f"{opening} and {closing} must each occur exactly once")
        rest = rest.lstrip()
        if not rest.startswith(opening) or closing not in rest:
            return Verdict(Status.WRONG, 0.0, f"{opening} is out of order")
        content, _, rest = rest[len(opening) :].partition(closing)
        if any(f"<{other}>" in content or f"</{other}>" in content for other in config.tags):
            return Verdict(Status.WRONG, 0.0, f"a tag occurs inside {opening}")
        if not content.strip():
            return Verdict(Status.WRONG, 0.0, f"{opening} is empty")
    if rest.strip():
        return Verdict(Status.WRONG, 0.0, "text after the last tag")
    return Verdict(Status.CORRECT, 1.0)
