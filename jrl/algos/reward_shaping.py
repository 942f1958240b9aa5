"""Reward shaping of a stage, before the objective reads the rewards, in this order:

    constraints     R = infeasible_reward where a component is below `least`                            R13
    exploration     R = share * R + (1 - share) * exploration                                           R22
    group_length    R = R + weight * (reward for a short completion, relative to its group)             R6, R8
    length_penalty  R = R - weight * max(0, length - target) / target                                   R8
    missing_stop    R replaced, lowered or scaled if the completion did not end by itself               R9

and, independently of R, of the rewards of tokens:

    potential       r_t = discount * Phi(s_{t+1}) - Phi(s_t), Phi(s_t) the sum of those before t        R27

The objective's own shaping comes after this: PPO's reward_clip, DAPO's overlong_buffer, a KL in the reward. DAPO's and
SELF's filters read the outcome, which is not shaped; those of AWR and PFPPO compare shaped rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jrl.algos import contract
from jrl.algos.contract import Groups
from jrl.ops import constraints, length_rewards, missing_stop, reduce, shaping
from jrl.types import Finish, traced

Array = jax.Array


@traced
class Constraints:
    """R13: rows that fail a judge get another reward. A row without a verdict of one of them is masked."""

    components: tuple[str, ...]  # names as in the metrics reward_component/NAME; all of them must hold
    least: float = 0.5  # smallest value with which one holds
    # of a row that fails one; None: as it was, for an objective that reads which rows fail: CRPG, CODPO, CRRAFT; with
    # others the constraints then only mask rows without a verdict
    infeasible_reward: float | None = 0.0


@traced
class ExplorationMix:
    """R22: a share of the reward is for exploring."""

    share: float = 0.8  # of the reward as it was; the rest is that of exploration
    # what measures exploration, limited to [0, 1]; None: the share of the tokens that a completion may have
    component: str | None = None


@traced
class GroupLength:
    """R6: a reward from -0.5 to 0.5 for being short among the completions of a prompt. A wrong one, which was truncated
    or got 0 or less from the first verifier, gets at most 0."""

    weight: float = 0.1  # of it in the reward
    among: Literal["all", "correct"] = "all"  # completions that are compared: all, or the correct ones alone (R8)


@traced
class LengthPenalty:
    """R8: a penalty for every token above a target."""

    target: float  # tokens up to which a completion is free
    weight: float = 1.0  # penalty of a completion of twice the target


@traced
class MissingStop:
    """R9: the reward of a completion that was cut, without a stop token or a stop string."""

    how: Literal["replace", "subtract", "scale"] = "replace"  # what `value` does to its reward
    value: float = -1.0  # the reward in its place, what is subtracted, or the factor


@traced
class Potential:
    """R27: rewards of tokens say when a reward comes and not how much a completion earns. The potential of a state is
    the sum of the rewards before it, and 0 at the end: they are paid back with the last token, and no policy becomes
    better than another by them."""

    discount: float = 1.0  # by sampled token, as in the objective's returns


@traced
class Shaping:
    """What is done to the reward of a row before the objective sees it, in the order of the fields."""

    constraints: Constraints | None = None  # components that must hold; None: none
    exploration: ExplorationMix | None = None  # None: none is rewarded
    group_length: GroupLength | None = None  # None: length does not matter
    length_penalty: LengthPenalty | None = None  # None: likewise
    missing_stop: MissingStop | None = None  # None: it is scored as it is
    potential: Potential | None = None  # of rewards of tokens; None: they add up to what a completion earns


def check_shaping(config: Shaping) -> None:
    """Raises ValueError for a number that makes no sense."""
    options = {name: getattr(config, name) for name in ORDER}
    for option in filter(None, options.values()):
        for name, value in vars(option).items():
            is_compared = name == "least"  # a threshold, so it needs no bound
            if isinstance(value, float) and not is_compared and not abs(value) <= LARGEST:
                raise ValueError(f"{type(option).__name__}.{name} = {value} is no number within +-{LARGEST:g}")
    constraints, exploration, stop = config.constraints, config.exploration, config.missing_stop
    if constraints is not None and not constraints.components:
        raise ValueError("Constraints.components is empty; name what must hold, such as ['Regex'], or set "
                         "Shaping.constraints = None")  # fmt: skip
    if exploration is not None and not 0 <= exploration.share <= 1:
        raise ValueError(f"ExplorationMix.share = {exploration.share} must lie in [0, 1]; 0.8 is usual")
    if config.group_length is not None and not config.group_length.weight > 0:
        raise ValueError(f"GroupLength.weight = {config.group_length.weight} must be above 0: short completions are "
                         "rewarded. None switches Shaping.group_length off")  # fmt: skip
    length = config.length_penalty
    if length is not None and not (length.target >= 1 and length.weight > 0):
        raise ValueError(f"LengthPenalty.target = {length.target} must be at least 1 token, and weight = "
                         f"{length.weight} above 0")  # fmt: skip
    if config.potential is not None and not 0 < config.potential.discount <= 1:
        raise ValueError(f"Potential.discount = {config.potential.discount} must lie in (0, 1]; use the objective's, "
                         "1.0 is usual")  # fmt: skip
    if stop is not None and stop.how == "subtract" and not stop.value > 0:
        raise ValueError(f"MissingStop.value = {stop.value} is subtracted, which would reward what was cut; use a "
                         "value above 0, such as 1.0, or MissingStop.how = 'replace'")  # fmt: skip
    if stop is not None and stop.how == "scale" and not 0 <= stop.value <= 1:
        raise ValueError(f"MissingStop.value = {stop.value} is the factor of the reward of what was cut; it must lie "
                         "in [0, 1], such as 0.5")  # fmt: skip


def replaces_infeasible(config: Shaping | None) -> bool:
    """Returns whether rows that fail a constraint get another reward."""
    return config is not None and config.constraints is not None and config.constraints.infeasible_reward is not None


def changes_rewards(config: Shaping | None) -> bool:
    """Returns whether the reward of a row is changed."""
    by_option = config is not None and any(getattr(config, name) is not None for name in ORDER if name != "constraints")
    return by_option or replaces_infeasible(config)


def below_zero(config: Shaping | None) -> tuple[str, ...]:
    """Returns the options that can make a reward negative which is not."""
    if config is None:
        return ()
    constraints, stop = config.constraints, config.missing_stop
    can = {
        "constraints": constraints is not None and (constraints.infeasible_reward or 0) < 0,
        "group_length": config.group_length is not None,
        "length_penalty": config.length_penalty is not None,
        "missing_stop": stop is not None and (stop.how == "subtract" or (stop.how == "replace" and stop.value < 0)),
    }
    return tuple(f"Shaping.{name}" for name, lowers in can.items() if lowers)


def components_read(config: Shaping | None) -> tuple[str, ...]:
    """Returns the names of the components of the reward that shaping reads."""
    if config is None:
        return ()
    constrained = () if config.constraints is None else config.constraints.components
    exploration = config.exploration is not None and config.exploration.component
    return (*constrained, *([exploration] if exploration else []))


def shaped(config: Shaping, groups: Groups) -> Groups:
    """Returns the rows with shaped rewards. A row becomes invalid if a component that shaping reads is missing.

    Raises: KeyError for an unknown component.
    """
    present = [~jnp.isnan(groups.components[name]) for name in components_read(config)]
    valid = jnp.all(jnp.array([groups.valid, *present]), axis=0)
    groups = groups.replace(valid=valid, reward=jnp.where(valid, groups.reward, 0))
    if config.constraints is not None:
        groups = groups.replace(feasible=valid & _feasible(config.constraints, groups))
    for name, shape in ORDER.items():
        if getattr(config, name) is not None:
            reward = shape(getattr(config, name), groups)
            groups = groups.replace(reward=jnp.where(valid, reward, 0).astype(groups.reward.dtype))
    if config.potential is not None:
        groups = groups.replace(token_reward=_potential(config.potential, groups))
    return groups


def _potential(config: Potential, groups: Groups) -> Array:
    rewards = reduce.masked(groups.token_reward, groups.action_mask)
    before = jnp.cumsum(rewards, axis=-1) - rewards
    return shaping.potential_shaping(jnp.zeros_like(rewards), before, groups.action_mask, discount=config.discount)


def _feasible(config: Constraints, groups: Groups) -> Array:
    values = jnp.stack([groups.components[name] for name in config.components])
    return constraints.satisfied(values, least=config.least)


def _constraints(config: Constraints, groups: Groups) -> Array:
    if config.infeasible_reward is None:
        return groups.reward
    return constraints.constrained_reward(groups.reward, groups.feasible, infeasible_reward=config.infeasible_reward)


def _exploration(config: ExplorationMix, groups: Groups) -> Array:
    if config.component is None:
        exploration = groups.action_mask.sum(-1) / groups.max_completion
    else:
        exploration = groups.components[config.component]
    return shaping.exploration_mix(groups.reward, exploration, share=config.share)


def _group_length(config: GroupLength, groups: Groups) -> Array:
    reward_fn = length_rewards.group_length_reward if config.among == "all" else length_rewards.conciseness_reward
    length_reward = reward_fn(
        groups.action_mask.sum(-1),
        (groups.outcome > 0) & stopped(groups),
        groups.group,
        contract.eligible(groups),
        num_groups=groups.num_groups,
    )
    return groups.reward + config.weight * length_reward


def _length_penalty(config: LengthPenalty, groups: Groups) -> Array:
    penalty = length_rewards.length_penalty(groups.action_mask.sum(-1), target=config.target)
    return groups.reward + config.weight * penalty


def _missing_stop(config: MissingStop, groups: Groups) -> Array:
    if config.how == "replace":
        return missing_stop.replace_reward(groups.reward, stopped(groups), value=config.value)
    if config.how == "subtract":
        return missing_stop.subtract_penalty(groups.reward, stopped(groups), penalty=config.value)
    return missing_stop.scale_reward(groups.reward, stopped(groups), factor=config.value)


def stopped(groups: Groups) -> Array:
    """Returns the rows that ended by themselves, [N] bool: with a stop token or a stop string."""
    return (groups.finish == jnp.int8(Finish.STOP_TOKEN)) | (groups.finish == jnp.int8(Finish.STOP_STRING))


LARGEST = 1e6  # as for a verifier's reward: squares, and sums of many rows, stay well within float32
ORDER: dict[str, Callable[..., Array]] = {
    "constraints": _constraints,
    "exploration": _exploration,
    "group_length": _group_length,
    "length_penalty": _length_penalty,
    "missing_stop": _missing_stop,
}
