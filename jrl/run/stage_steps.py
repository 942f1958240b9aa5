"""Which stage a step of a run is in, and what is due at it. Steps are counted from 1 over all stages."""

from __future__ import annotations

import itertools

from jrl.experiment import Config, Online, trains_online


def ends(config: Config) -> list[int]:
    """Returns the last step of every stage."""
    return [*itertools.accumulate(stage.steps for stage in config.stages)]


def starts(config: Config) -> list[int]:
    """Returns the steps done before every stage."""
    return [0, *ends(config)[:-1]]


def stage_at(config: Config, done: int) -> int:
    """Returns the index of the stage that the state belongs to after `done` steps: -1 before the first step."""
    if done == 0:
        return -1
    return next((i for i, end in enumerate(ends(config)) if done <= end), len(config.stages) - 1)


def warms_up(config: Config, step: int) -> bool:
    """Whether only the separate critic learns in a step (Online.critic_warmup)."""
    i = stage_at(config, step)
    stage = config.stages[i]
    return isinstance(stage, Online) and step - starts(config)[i] <= stage.critic_warmup


def saves_after(config: Config, step: int) -> bool:
    """Whether a step ends with a checkpoint (Checkpoint.every). The last of a stage always does."""
    return step % config.checkpoint.every == 0 or step in ends(config)


def can_have_best(config: Config) -> bool:
    """Whether some step is both evaluated and saved, so that a checkpoint is known to be the best."""
    return any(saves_after(config, step) for step in range(1, ends(config)[-1] + 1) if evaluates_after(config, step))


def evaluates_after(config: Config, step: int) -> bool:
    """Whether a step ends with an evaluation of the policy (Eval.every)."""
    i, every = stage_at(config, step), None if config.eval is None else config.eval.every
    return every is not None and trains_online(config.stages[i]) and (step - starts(config)[i]) % every == 0
