"""What objectives of pairs of samples share: which samples of a prompt are compared, and what is refused.

A judge that compares samples with one another (`Judge.grading = @Pairwise()`) gives each its share of wins as a reward,
so that pairs by reward are those of that judge's tournament.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups, Needs, Objective, Pairs, Sequences
from jrl.ops import pairs as pair_ops
from jrl.types import PyTree, traced

Array = jax.Array
PAIRINGS = ("best_worst", "best_random", "best_two", "tournament")


@traced
class Pairing:
    """The options by which samples of a prompt become a pair."""

    margin: float = 0.0  # rewards of a pair differ by more than this
    length_penalty: float | None = None  # subtracted from the reward for each token where pairs are made; None: nothing
    # Which row the best one of a group is preferred to: the lowest, any other, or the second highest. By a tournament:
    # every two rows meet, and the row of the most wins is preferred to that of the fewest; margin is of their shares
    # of wins then, whatever the scale of rewards.
    pairing: Literal["best_worst", "best_random", "best_two", "tournament"] = "best_worst"


def check_pairing(config: Any, facts: Facts) -> None:
    """Raises ValueError where the options of `Pairing` make no sense, or a prompt has no samples to compare."""
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


def shape(config: Any, groups: Groups) -> Array:
    """Returns the reward that pairs are made by, [N]."""
    if config.length_penalty is None:
        return groups.reward
    return groups.reward - config.length_penalty * jnp.sum(groups.action_mask, axis=-1)


def pairs(config: Any, groups: Groups, reward: Array) -> Pairs:
    """Returns one pair of every group whose rewards are apart (F15)."""
    arrays = reward, groups.group, contract.eligible(groups)
    options = {"num_groups": groups.num_groups, "margin": config.margin}
    if config.pairing == "best_worst":
        label, unit = pair_ops.best_against_worst(*arrays, **options)
    elif config.pairing == "best_two":
        label, unit = pair_ops.best_two(*arrays, **options)
    elif config.pairing == "tournament":
        preference = (1 + jnp.sign(reward[:, None] - reward[None, :])) / 2
        label, unit = pair_ops.tournament(preference, *arrays[1:], **options)
    else:
        label, unit = pair_ops.best_against_random(*arrays, common.row_draws(groups), **options)
    return Pairs(label, unit, jnp.ones_like(label))


def sampled_pair_objective(
    config: type,
    sequence_loss: Callable[[Any, Sequences, PyTree], tuple[Array, dict[str, Array]]],
    check: Callable[[Any, Facts], None],
    *,
    reference: bool = True,
) -> Objective:
    """Returns a row of ALGOS that learns from pairs of samples. A loss that compares may be of samples that are several
    versions old.

    Args:
      config: has the options of `Pairing`. reference: as in `pair_objective`.
    """
    return Objective(
        config=config,
        check=check,
        corrects_staleness=lambda config: True,
        needs=lambda config: Needs(reference=reference),
        shape=shape,
        pairs=pairs,
        sequence_loss=sequence_loss,
        unit_size=2,
    )
