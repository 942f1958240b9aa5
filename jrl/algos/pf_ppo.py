"""PF-PPO: PPO on a few samples of each prompt, chosen by the rank of their rewards.

    rows of a group that are learned from: the best, and the worst or one other               F10
    the rest is PPO, over these rows                                                          A13, A23, L2 (L3), V1, G1

A reward model is most reliable where its scores are extreme: what lies between is noise. Samples cost little beside
updates: draw 5 or more.

Source: PF-PPO, 2409.06957: 5 samples, best and worst, chosen among the strategies by the R^2 between the reward model's
scores and true ones (jrl.ops.filters.score_agreement). verl draws the batch again by |score|^p: another algorithm.
"""

from __future__ import annotations

from typing import Literal

import jax

from jrl.algos import common, contract, ppo
from jrl.algos.contract import Facts, Groups
from jrl.algos.ppo import PPO
from jrl.ops import filters
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


def keep(config: PFPPO, groups: Groups) -> Array:
    arrays, static = (groups.reward, groups.group, contract.eligible(groups)), {"num_groups": groups.num_groups}
    if config.strategy == "best":
        return filters.best(*arrays, **static)
    if config.strategy == "best_and_worst":
        return filters.best_and_worst(*arrays, **static)
    return filters.best_and_random(*arrays, common.row_draws(groups), **static)


def chosen(config: PFPPO, groups: Groups) -> Groups:
    """Returns the groups with only the rows that are learned from: statistics are of these."""
    return groups.replace(valid=keep(config, groups))


def advantages(config: PFPPO, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    found, state, _ = ppo.advantages(config, chosen(config, groups), reward, state)
    return found, state, common.count_groups(groups, reward)


OBJECTIVE = ppo.OBJECTIVE._replace(
    config=PFPPO,
    check=check,
    keep=keep,
    advantages=advantages,
    returns=lambda config, groups, reward: ppo.returns(config, chosen(config, groups), reward),
)
