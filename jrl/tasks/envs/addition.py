"""Addition of two numbers: the smallest task that a policy can learn from a verifier. No JAX."""

from __future__ import annotations

import dataclasses
import random

from jrl.tasks.envs.contract import Generated, digest_of
from jrl.tasks.example import Example, Message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Addition:
    """Prompts "12+34=" with the sum as the answer, and a wrong one as info["rejected"]. Both numbers have exactly
    `digits` digits (0..9 with one)."""

    digits: int = 2  # of each number
    largest: int | None = None  # of each number; None: the largest with so many digits
    size: int = 100_000  # number of examples; pairs of numbers are drawn with replacement, so prompts may repeat
    seed: int = 0  # of the numbers drawn
    verifiers: tuple[str, ...] = ("Exact",)  # that score the answer; (): the run's, Scoring.verifiers


def open_addition(config: Addition) -> Generated:
    """Returns the source. Raises ValueError for digits or size below 1, or a `largest` without `digits` digits."""
    for name in ("digits", "size"):
        if getattr(config, name) < 1:
            raise ValueError(f"Addition.{name} is {getattr(config, name)}: it must be at least 1")
    low, most = 10 ** (config.digits - 1) if config.digits > 1 else 0, 10**config.digits - 1
    high = most if config.largest is None else config.largest
    if not low <= high <= most:
        raise ValueError(f"Addition.largest is {high}: with {config.digits} digits it must be {low} to {most}, or None")

    def make(index: int) -> Example:
        draw = random.Random(digest_of("addition", config.seed, config.digits, index))
        left, right = (draw.randrange(low, high + 1) for _ in range(2))
        wrong = left + right + draw.choice((1, 2, 3))
        return Example(
            id=f"addition/{config.digits}/{config.seed}/{index}" + ("" if config.largest is None else f"/{high}"),
            messages=(Message("user", f"{left}+{right}="),),
            answer=str(left + right),
            verifiers=config.verifiers,
            task="addition",
            info={"rejected": str(wrong)},
        )

    # 2: the version of this generator.
    return Generated(config.size, make, digest_of(2, config))
