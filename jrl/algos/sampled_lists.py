"""What objectives of ranked samples share: all samples of a prompt are one list, read at the place of its best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups, Objective, Pairs, Sequences
from jrl.ops import groups as group_ops
from jrl.ops import reduce
from jrl.types import PyTree

Array = jax.Array


def lists(config: Any, groups: Groups, reward: Array) -> Pairs:
    """Returns every group whose rewards differ as one list: the first of its best rows is preferred, and `value` is
    the reward that ranks it."""
    counts, static = contract.eligible(groups), {"num_groups": groups.num_groups}
    varied = group_ops.to_rows(group_ops.varied(reward, groups.group, counts, **static), groups.group)
    listed = counts & varied
    high = group_ops.to_rows(group_ops.maximum(reward, groups.group, listed, **static), groups.group)
    first = group_ops.to_rows(group_ops.first_row(listed & (reward == high), groups.group, **static), groups.group)
    best = listed & (jnp.arange(reward.shape[0], dtype=jnp.int32) == first)
    label = best.astype(jnp.float32)
    value = reduce.masked(reward, listed).astype(jnp.float32)
    return Pairs(label, jnp.where(listed, groups.group, -1), jnp.ones_like(label), value)


def list_loss(
    ranking: Callable[[Array, Array, Array], Array], nll_weight: Callable[[Any, Array], Array]
) -> Callable[[Any, Sequences, PyTree], tuple[Array, dict[str, Array]]]:
    """Returns the sequence loss of a method: the loss of a ranking, and the NLL of its best answer by mean over tokens.

    Args:
      ranking: (LPbar, rewards, mask), [..., n] each -> [...], as in jrl.ops.listwise.
      nll_weight: (config, answers of the list [..., S]) -> weight of the NLL, [..., S].
    """

    def sequence_loss(config: Any, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
        listed = sequences.mask & (sequences.length > 0)
        length = jnp.where(listed, sequences.length, 1)
        mean_logprob = reduce.masked(sequences.logprob, listed) / length
        reward = reduce.masked(sequences.value, listed)
        same = (
            (sequences.unit[..., :, None] == sequences.unit[..., None, :]) & listed[..., :, None] & listed[..., None, :]
        )
        of_list = lambda x: jnp.broadcast_to(x[..., None, :], same.shape)
        best = listed & (sequences.label > 0.5)
        count = same.sum(-1)
        ranked = ranking(of_list(mean_logprob), of_list(reward), same)
        loss = ranked - nll_weight(config, count.astype(ranked.dtype)) * mean_logprob
        better = (reward[..., :, None] > reward[..., None, :]) & same
        right = jnp.where(better, mean_logprob[..., :, None] > mean_logprob[..., None, :], False)
        inside = lambda x: jnp.sum(jnp.where(same, x.sum(-1)[..., None, :], 0), axis=-1)  # over the list of a place
        metrics = {
            "lists/accuracy": inside(right.astype(ranked.dtype)) / jnp.maximum(inside(better.astype(ranked.dtype)), 1),
            "lists/best": mean_logprob,
        }
        keep = lambda x: jax.lax.stop_gradient(jnp.where(best, x, 0)).astype(jnp.float32)
        return jnp.where(best, loss, 0), {name: keep(value) for name, value in metrics.items()}

    return sequence_loss


def check_lists(config: Any, facts: Facts) -> None:
    """Raises ValueError where a prompt has no samples to rank, or the weight of the NLL is negative."""
    name = type(config).__name__
    common.check_sampling(config, facts, grouped=True)
    if not config.nll >= 0:
        raise ValueError(
            f"{name}.nll = {config.nll} must not be negative: it is the weight of the best answer's negative log-prob"
        )


def list_objective(config: type, sequence_loss: Callable[..., Any]) -> Objective:
    """Returns a row of ALGOS that learns from all samples of a prompt, as their rewards rank them."""
    return Objective(
        config=config,
        check=check_lists,
        corrects_staleness=lambda config: True,
        pairs=lists,
        sequence_loss=sequence_loss,
        unit_size=0,
    )
