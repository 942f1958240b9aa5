"""A small configuration tree in the shape of the real one, for the tests of the reader."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Run:
    seed: int = 0  # root of every random draw
    name: str = "run"
    parts: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Loop:
    """How long the run is."""

    steps: int  # updates
    lag: int = 0  # 0 or 1
    eval_every: int | None = None
    stop_at: float | None = None

    def __post_init__(self):
        if self.lag not in (0, 1):
            raise ValueError(f"lag must be 0 or 1, not {self.lag}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    kind: Literal["constant", "cosine"] = "constant"
    warmup: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
    learning_rate: float = 1e-3  # step size
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: Schedule  # how the step size changes


@dataclasses.dataclass(frozen=True)
class SFT:
    steps: int = 10
    batch: int = 8


@dataclasses.dataclass(frozen=True)
class GRPO:
    clip_low: float = 0.2
    kl_coefficient: float | None = None


@dataclasses.dataclass(frozen=True)
class DAPO:
    clip_low: float = 0.2
    clip_high: float = 0.28
    refill: int | None = 4


@dataclasses.dataclass(frozen=True)
class Exact:
    weight: float = 1.0
    strip: bool = True


@dataclasses.dataclass(frozen=True)
class Length:
    weight: float = 1.0
    target: int | float = 100


@dataclasses.dataclass(frozen=True)
class Sum:
    digits: tuple[int, ...] = (1, 2)


@dataclasses.dataclass(frozen=True)
class Mixture:
    parts: dict[str, Any] = dataclasses.field(default_factory=dict, metadata={"table": "envs"})
    weights: dict[str, float | int | str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Scoring:
    verifiers: tuple[Any, ...] = dataclasses.field(default=(Exact(),), metadata={"table": "verifiers"})
    workers: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    task: Any = dataclasses.field(metadata={"table": "envs"})
    algo: Any = dataclasses.field(metadata={"table": "algos"})
    run: Run
    loop: Loop
    optimizer: AdamW
    sft: SFT | None = None
    scoring: Scoring = dataclasses.field(default_factory=Scoring)
    parts: tuple[str, ...] = ()


TABLES = {
    "envs": {"Sum": Sum, "Mixture": Mixture},
    "algos": {"GRPO": GRPO, "DAPO": DAPO},
    "verifiers": {"Exact": Exact, "Length": Length},
}
