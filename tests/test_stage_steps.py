"""Stages of 3, 0, 4 and 2 steps: which one a step is in, and what is due at it."""

import dataclasses
import itertools
import time

import pytest

from jrl.experiment import Eval, Offline, Online
from jrl.resolve import load_config
from jrl.run.checkpoints import Checkpoint
from jrl.run.stage_steps import (
    can_be_best,
    can_have_best,
    ends,
    evaluates_after,
    saves_after,
    stage_at,
    starts,
    warms_up,
)


@pytest.fixture(scope="module")
def config():
    """SFT for 3 steps, no step of RL, then 4 whose critic learns alone for 2, SFT for 2."""
    config, _ = load_config("configs/algos/ppo_critic.gin", ["warm/Offline.steps=3", "Online.critic_warmup=2"])
    warm, online = config.stages
    assert isinstance(warm, Offline) and isinstance(online, Online)
    stages = (warm, *(dataclasses.replace(online, steps=steps) for steps in (0, 4)), dataclasses.replace(warm, steps=2))
    return dataclasses.replace(config, stages=stages, eval=Eval(every=2))


def test_stages_begin_where_the_one_before_ends(config):
    assert starts(config) == [0, 3, 3, 7] and ends(config) == [3, 3, 7, 9]


def test_a_step_is_in_the_first_stage_that_has_it(config):
    assert [stage_at(config, done) for done in range(10)] == [-1, 0, 0, 0, 2, 2, 2, 2, 3, 3]
    assert stage_at(config, 12) == 3  # of a run that was given fewer steps than it has done


def test_a_critic_learns_alone_in_the_first_steps_of_its_stage(config):
    assert [step for step in range(1, 10) if warms_up(config, step)] == [4, 5]


def test_every_second_step_of_an_online_stage_that_trains_the_policy_is_evaluated(config):
    assert [step for step in range(1, 10) if evaluates_after(config, step)] == [5, 7]
    assert not any(evaluates_after(dataclasses.replace(config, eval=Eval()), step) for step in range(1, 10))
    assert not any(evaluates_after(dataclasses.replace(config, eval=None), step) for step in range(1, 10))


def test_a_step_is_saved_every_so_often_and_at_the_end_of_its_stage(config):
    saved = lambda every: dataclasses.replace(config, checkpoint=Checkpoint(every=every))
    assert [step for step in range(1, 10) if saves_after(saved(4), step)] == [3, 4, 7, 8, 9]
    assert can_have_best(saved(4))  # step 7
    apart = dataclasses.replace(saved(4), eval=Eval(every=3))  # steps 6, and 4 and 8 are saved
    assert not can_have_best(apart) and not can_have_best(dataclasses.replace(config, eval=None))


def test_whether_a_step_can_be_the_best_is_known_without_trying_them_all(config):
    """A stage of 5 steps and one that is evaluated, compared with a look at every step; and one of ten million."""
    warm, _, online, _ = config.stages
    of = lambda length, evaluated, saved: dataclasses.replace(
        config,
        stages=(dataclasses.replace(warm, steps=5), dataclasses.replace(online, steps=length)),
        eval=Eval(every=evaluated),
        checkpoint=Checkpoint(every=saved),
    )
    answers = set()
    for length, evaluated, saved in itertools.product((11, 12), range(1, 14), range(1, 19)):
        small = of(length, evaluated, saved)
        tried = any(can_be_best(small, step) for step in range(1, length + 6))
        assert can_have_best(small) == tried
        answers.add(tried)
    assert answers == {True, False}
    start = time.monotonic()
    assert can_have_best(of(10**7 + 1, 3, 100)) and not can_have_best(of(10**7 + 1, 200, 100))
    assert time.monotonic() - start < 2
