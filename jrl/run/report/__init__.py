"""What a person sees of a run, and what is kept of it: metrics, rollouts, manifest, display, summary."""

from __future__ import annotations

import dataclasses

WRITERS = ("tensorboard", "wandb", "trackio")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Log:
    """What is written besides metrics.jsonl.

    `writers` are off by default because each needs an extra: ('tensorboard',) needs jrl-jax[log], ('wandb',) and
    ('trackio',) the extras of those names. A writer that is named and not installed is an error.
    """

    writers: tuple[str, ...] = ()  # any of 'tensorboard', 'wandb', 'trackio'
    samples: int = 2  # rollouts printed at a time
    rollouts: bool = True  # keep every rollout in RUN/rollouts

    def __post_init__(self) -> None:
        for writer in self.writers:
            if writer not in WRITERS:
                raise ValueError(f"Log.writers names {writer!r}; there are {', '.join(WRITERS)}")
        if len(set(self.writers)) < len(self.writers):
            raise ValueError(f"Log.writers names one writer twice: {self.writers}")
        if self.samples < 0:
            raise ValueError(f"Log.samples is {self.samples}; it counts rollouts, 0 prints none")
