"""Shared parts of objectives on ranked samples: all samples of a prompt are one list, with the loss at its best one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups, Objective, Pairs, Sequences
from jrl.ops import groups as group_ops
from jrl.ops import reduce
from jrl.ops.segments import same_unit
from jrl.types import PyTree

Array = jax.Array


def lists(config: Any, groups: Groups, reward: Array) -> Pairs:
    """Returns every group whose rewards differ as one list: the first of its best rows is preferred, and `value` is
    the reward that ranks a row."""
    counts, num_groups = contract.eligible(groups), groups.num_groups
    varied = group_ops.to_rows(group_ops.varied(reward, groups.group, counts, num_groups=num_groups), groups.group)
    listed = counts & varied
    high = group_ops.to_rows(group_ops.maximum(reward, groups.group, listed, num_groups=num_groups), groups.group)
    best_rows = listed & (reward == high)
    first = group_ops.to_rows(group_ops.first_row(best_rows, groups.group, num_groups=num_groups), groups.group)
    best = listed & (jnp.arange(reward.shape[0], dtype=jnp.int32) == first)
    label = best.astype(jnp.float32)
    value = reduce.masked(reward, listed).astype(jnp.float32)
    return Pairs(label, jnp.where(listed, groups.group, -1), jnp.ones_like(label), value)


def list_loss(
    ranking: Callable[[Array, Array, Array], Array], nll_weight: Callable[[Any, Array], Array]
) -> Callable[[Any, Sequences, PyTree], tuple[Array, dict[str, Array]]]:
    """Returns a sequence loss: the loss of a ranking, plus the NLL of its best answer, averaged over tokens.

    Args:
      ranking: (LPbar, rewards, mask), [..., n] each -> [...], as in jrl.ops.listwise.
      nll_weight: (config, answers of the list [..., S]) -> weight of the NLL, [..., S].
    """

    def sequence_loss(config: Any, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
        listed = sequences.mask & (sequences.length > 0)
        length = jnp.where(listed, sequences.length, 1)
        mean_logprob = reduce.masked(sequences.logprob, listed) / length
        reward = reduce.masked(sequences.value, listed)
        same_list = same_unit(sequences.unit, listed)
        by_list = lambda x: jnp.broadcast_to(x[..., None, :], same_list.shape)
        best = listed & (sequences.label > 0.5)
        count = same_list.sum(-1)
        ranked = ranking(by_list(mean_logprob), by_list(reward), same_list)
        loss = ranked - nll_weight(config, count.astype(ranked.dtype)) * mean_logprob
        better = (reward[..., :, None] > reward[..., None, :]) & same_list
        right = jnp.where(better, mean_logprob[..., :, None] > mean_logprob[..., None, :], False)
        # [..., S, S] -> [..., S], summed over the list that each place belongs to
        list_sum = lambda x: jnp.sum(jnp.where(same_list, x.sum(-1)[..., None, :], 0), axis=-1)
        num_right, num_pairs = list_sum(right.astype(ranked.dtype)), list_sum(better.astype(ranked.dtype))
        metrics = {"lists/accuracy": num_right / jnp.maximum(num_pairs, 1), "lists/best": mean_logprob}
        logged = lambda x: jax.lax.stop_gradient(jnp.where(best, x, 0)).astype(jnp.float32)
        return jnp.where(best, loss, 0), {name: logged(value) for name, value in metrics.items()}

    return sequence_loss


def check_lists(config: Any, facts: Facts) -> None:
    """Raises ValueError if a prompt has no samples to rank, or the weight of the NLL is negative."""
    name = type(config).__name__
    common.check_sampling(config, facts, grouped=True)
    if not config.nll >= 0:
        raise ValueError(
            f"{name}.nll = {config.nll} must not be negative: it is the weight of the best answer's negative log-prob"
        )


def list_objective(config: type, sequence_loss: Callable[..., Any]) -> Objective:
    """Returns an objective on all samples of a prompt, ranked by their rewards."""
    return Objective(
        config=config,
        check=check_lists,
        corrects_staleness=lambda config: True,
        pairs=lists,
        sequence_loss=sequence_loss,
        unit_size=0,
    )
