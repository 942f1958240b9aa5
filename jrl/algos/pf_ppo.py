"""PF-PPO: PPO on a few samples of each prompt, chosen by the rank of their rewards.

    trained rows of a group: the best, and the worst or a random one                          F10
    the rest is PPO, over these rows                                                          A13, A23, L2 (L3), V1, G1

A reward model is most reliable at extreme scores; the ones in between are noise. Samples are cheap compared with
updates: draw 5 or more.

Source: PF-PPO, 2409.06957: 5 samples, best and worst; the strategy is selected by the R^2 between the reward model's
scores and the true ones (jrl.ops.filters.score_agreement). verl resamples the batch by |score|^p, another algorithm.
"""

from __future__ import annotations

from typing import Literal

import jax

from jrl.algos import common, contract, ppo
from jrl.algos.contract import Facts, Groups
from jrl.algos.ppo import PPO
from jrl.ops import filters
from jrl.ops import groups as group_ops
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class PFPPO(PPO):
    # Which rows of a group are learned from: its best, and beside it its worst or any other.
    strategy: Literal["best", "best_and_worst", "best_and_random"] = "best_and_worst"


def check(config: PFPPO, facts: Facts) -> None:
    ppo.check(config, facts)
    common.check_sampling(config, facts, grouped=True)
    if config.strategy not in ("best", "best_and_worst", "best_and_random"):
        raise ValueError(f"PFPPO.strategy = {config.strategy!r} must be 'best', 'best_and_worst' or 'best_and_random'.")


def highest(value: Array, groups: Groups, rows: Array) -> Array:
    """Returns the row of each group with the highest value, at ties the first sample in any row order, [N] bool.

    Args:
      value: [N] float. rows: [N] bool, those that count.
    """
    num_groups = groups.num_groups
    highest_value = group_ops.to_rows(group_ops.maximum(value, groups.group, rows, num_groups=num_groups), groups.group)
    return filters.best(-groups.sample, groups.group, rows & (value == highest_value), num_groups=num_groups)


def keep(config: PFPPO, groups: Groups) -> Array:
    rows = contract.eligible(groups)
    best = highest(groups.reward, groups, rows)
    if config.strategy == "best":
        return best
    second_key = -groups.reward if config.strategy == "best_and_worst" else common.row_draws(groups)
    return best | highest(second_key, groups, rows & ~best)


def chosen(config: PFPPO, groups: Groups) -> Groups:
    """Returns the groups with only the trained rows, so that statistics are over these."""
    return groups.replace(valid=keep(config, groups))


def advantages(config: PFPPO, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    token_advantages, state, counters = ppo.advantages(config, chosen(config, groups), reward, state)
    return token_advantages, state, counters | common.count_groups(groups, reward)


OBJECTIVE = ppo.OBJECTIVE._replace(
    config=PFPPO,
    check=check,
    keep=keep,
    advantages=advantages,
    returns=lambda config, groups, reward: ppo.returns(config, chosen(config, groups), reward),
)
