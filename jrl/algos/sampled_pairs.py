"""Shared parts of objectives on pairs of samples: which samples of a prompt are compared, and checks of the options.

A judge that compares samples with each other (`Judge.grading = @Pairwise()`) gives each its share of wins as a reward,
so pairs by reward are those of the judge's tournament. A pair model (`Online.pair_model`) also gives the strength of
each preference, and its preferences need not be consistent with any reward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups, Needs, Objective, Pairs, Sequences
from jrl.ops import groups as group_ops
from jrl.ops import pairs as pair_ops
from jrl.ops.preferences import pair_strength
from jrl.ops.win_rate import win_probability
from jrl.types import PyTree, traced

Array = jax.Array
PAIRINGS = ("best_worst", "best_random", "best_two", "tournament")
PREFERENCES = ("reward", "pair_model")


@traced
class Pairing:
    """The options by which samples of a prompt become a pair."""

    margin: float = 0.0  # rewards of a pair differ by more than this
    length_penalty: float | None = None  # subtracted from the reward for each token where pairs are made; None: nothing
    # Which row the best one of a group is preferred to: the lowest, any other, or the second highest. By a tournament:
    # every two rows meet, and the row of the most wins is preferred to that of the fewest; margin is of their shares
    # of wins then, whatever the scale of rewards.
    pairing: Literal["best_worst", "best_random", "best_two", "tournament"] = "best_worst"
    # Who wins: the row of the higher reward, or the one that Online.pair_model prefers. Then a tournament is of its
    # preferences, and no pair is made against them.
    preference: Literal["reward", "pair_model"] = "reward"


def check_pairing(config: Any, facts: Facts) -> None:
    """Raises ValueError if the options of `Pairing` make no sense, or a prompt has no samples to compare."""
    name = type(config).__name__
    common.check_sampling(config, facts, grouped=True)
    if not config.margin >= 0:
        raise ValueError(f"{name}.margin = {config.margin} must not be negative: pairs of equal rewards would count.")
    if config.length_penalty is not None and not config.length_penalty > 0:
        raise ValueError(f"{name}.length_penalty = {config.length_penalty} must be above 0, or None for no penalty.")
    if config.pairing not in PAIRINGS:
        listed = ", ".join(map(repr, PAIRINGS))
        raise ValueError(f"{name}.pairing = {config.pairing!r} must be one of {listed}.")
    if config.pairing == "tournament" and not config.margin < 1:
        raise ValueError(f"{name}.margin = {config.margin} must be below 1: of a tournament it is a share of wins.")
    check_preference(config, facts)
    if config.pairing == "tournament" and config.preference == "pair_model":
        common.check_unshaped(config, facts, reads="the preferences of Online.pair_model")
        if config.length_penalty is not None:
            raise ValueError(f"{name}.length_penalty = {config.length_penalty} lowers rewards, and a tournament of "
                             f"the pair model's preferences reads none; set it to None, or {name}.pairing = "
                             "'best_worst'")  # fmt: skip


def check_preference(config: Any, facts: Facts) -> None:
    """Raises ValueError for an unknown `preference`, or if the stage has no pair model for it."""
    name = type(config).__name__
    if config.preference not in PREFERENCES:
        raise ValueError(f"{name}.preference = {config.preference!r} must be 'reward' or 'pair_model'.")
    if config.preference == "pair_model" and not facts.pair_model:
        raise ValueError(f"{name}.preference = 'pair_model', and the stage has none; set Online.pair_model = "
                         "@PairModel(), or leave it out")  # fmt: skip


def shape(config: Any, groups: Groups) -> Array:
    """Returns the reward that ranks samples for pairs, [N]."""
    if config.length_penalty is None:
        return groups.reward
    return groups.reward - config.length_penalty * jnp.sum(groups.action_mask, axis=-1)


def pairs(config: Any, groups: Groups, reward: Array) -> Pairs:
    """Returns one pair of every group whose rewards differ enough (F15), the preferred row labeled 1."""
    by_rank = _pairs(config, groups, reward)
    if config.preference == "reward":
        return by_rank
    strength = _strengths(by_rank, groups)
    preferred = by_rank.label > 0.5
    agreed = group_ops.count(groups.group, preferred & (strength > 0.5), num_groups=groups.num_groups) > 0
    agreed = group_ops.to_rows(agreed, groups.group)
    return by_rank._replace(label=jnp.where(agreed, by_rank.label, 0), unit=jnp.where(agreed, by_rank.unit, -1))


def strong_pairs(config: Any, groups: Groups, reward: Array) -> Pairs:
    """Returns `pairs` with strengths as labels: the pair model's preference for each of the two rows, or 1 and 0 by
    reward."""
    hard_pairs = pairs(config, groups, reward)
    if config.preference == "reward":
        return hard_pairs
    label = jnp.where(hard_pairs.unit >= 0, _strengths(hard_pairs, groups), 0)
    return hard_pairs._replace(label=label.astype(hard_pairs.label.dtype))


def _strengths(hard_pairs: Pairs, groups: Groups) -> Array:
    """Returns the preference for each row over the other row of its pair, [N] float32; NaN where there is none."""
    preference = contract.preferences(groups)
    return pair_strength(preference, groups.group, groups.sample, hard_pairs.unit >= 0, num_groups=groups.num_groups)


def _pairs(config: Any, groups: Groups, reward: Array) -> Pairs:
    """Returns the pairs, whether or not a pair model agrees with them."""
    group, valid = groups.group, contract.eligible(groups)
    options = {"num_groups": groups.num_groups, "margin": config.margin}
    if config.pairing == "best_worst":
        label, unit = pair_ops.best_against_worst(reward, group, valid, **options)
    elif config.pairing == "best_two":
        label, unit = pair_ops.best_two(reward, group, valid, **options)
    elif config.pairing == "tournament":
        label, unit = _tournament(config, groups, reward, valid)
    else:
        label, unit = pair_ops.best_against_random(reward, group, valid, common.row_draws(groups), **options)
    return Pairs(label, unit, jnp.ones_like(label))


def _tournament(config: Any, groups: Groups, reward: Array, valid: Array) -> tuple[Array, Array]:
    group, options = groups.group, {"num_groups": groups.num_groups, "margin": config.margin}
    if config.preference == "pair_model":
        return pair_ops.tournament(contract.preferences(groups), group, groups.sample, valid, **options)
    wins = win_probability(reward, group, valid, valid, num_groups=groups.num_groups)
    return pair_ops.best_against_worst(wins, group, valid, **options)


def sampled_pair_objective(
    config: type,
    sequence_loss: Callable[[Any, Sequences, PyTree], tuple[Array, dict[str, Array]]],
    check: Callable[[Any, Facts], None],
    *,
    reference: bool = True,
    strengths: bool = False,
) -> Objective:
    """Returns an objective on pairs of samples. A comparison needs no importance weights, so samples may be several
    versions old.

    Args:
      config: has the options of `Pairing`. reference: as in `pair_objective`.
      strengths: the loss reads the strength of the pair model's preference (Pair.preference).
    """
    return Objective(
        config=config,
        check=check,
        corrects_staleness=lambda config: True,
        needs=lambda config: Needs(reference=reference),
        shape=shape,
        pairs=strong_pairs if strengths else pairs,
        sequence_loss=sequence_loss,
        unit_size=2,
        strengths=strengths,
    )
