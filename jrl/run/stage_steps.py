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


def evaluated_steps(config: Config) -> list[range]:
    """Returns the steps that end with an evaluation of the policy, for every stage; [] if Eval.every asks for none."""
    if config.eval is None or config.eval.every is None:
        return []
    every, spans = config.eval.every, zip(config.stages, starts(config), ends(config))
    return [range(start + every, end + 1, every) if trains_online(stage) else range(0) for stage, start, end in spans]


def evaluates_after(config: Config, step: int) -> bool:
    """Whether a step ends with an evaluation of the policy (Eval.every)."""
    return any(step in steps for steps in evaluated_steps(config))


def can_be_best(config: Config, step: int) -> bool:
    """Whether a step is both evaluated and saved, so that its checkpoint can be the best."""
    return evaluates_after(config, step) and saves_after(config, step)


def can_have_best(config: Config) -> bool:
    """Whether there is a step that can be the best."""
    # The remainders of Checkpoint.every repeat after as many evaluations, so that few of a million are looked at.
    looked_at = lambda steps: itertools.chain(steps[: config.checkpoint.every], steps[-1:])
    return any(saves_after(config, step) for steps in evaluated_steps(config) for step in looked_at(steps))
