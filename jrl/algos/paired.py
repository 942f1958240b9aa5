"""Shared parts of objectives on pairs: the record of a pair, its loss as a sequence loss, its metrics, and checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jrl.algos.contract import Facts, Needs, Objective, Sequences, other_of_pair
from jrl.ops import reduce
from jrl.types import PyTree

Array = jax.Array


@struct.dataclass
class Pair:
    """The pairs of packed rows, each at the place of its preferred answer (w); elsewhere `mask` is False, numbers are 0
    and lengths 1. Only the policy's log-probs carry a gradient."""

    logprob: Array  # [..., S] float32, LP_w
    other_logprob: Array  # [..., S] float32, LP_l
    gain: Array  # [..., S] float32, u_w = LP_w - LP_ref_w; LP_w without a reference
    other_gain: Array  # [..., S] float32, u_l
    length: Array  # [..., S] float32, tokens of the preferred answer, at least 1
    other_length: Array  # [..., S] float32
    preference: Array  # [..., S] float32, the label: probability that the preferred answer is the better one
    mask: Array  # [..., S] bool
    log_sum_squared: Array | None = None  # [..., S] float32, of the preferred answer, with Needs.log_sum_squared
    other_log_sum_squared: Array | None = None  # [..., S] float32

    @property
    def margin(self) -> Array:
        """D = u_w - u_l, [..., S]."""
        return self.gain - self.other_gain

    @property
    def mean_logprob(self) -> Array:
        """LPbar_w, the mean over the preferred answer's tokens, [..., S]."""
        return self.logprob / self.length

    @property
    def other_mean_logprob(self) -> Array:
        """LPbar_l, [..., S]."""
        return self.other_logprob / self.other_length


def gains(sequences: Sequences) -> Array:
    """Returns u = LP - LP_ref of every sequence (P0), or LP without a reference, [..., S]."""
    clean = lambda x: reduce.masked(x, sequences.mask)
    logprob = clean(sequences.logprob)
    return logprob if sequences.ref_logprob is None else logprob - clean(sequences.ref_logprob)


def preferred_of(sequences: Sequences) -> Array:
    """Returns the places of the pairs' preferred sequences, [..., S] bool (P0): the label is above 0.5, and both
    sequences of the pair are present, with a token each."""
    other_length = other_of_pair(sequences.length, sequences)
    return sequences.mask & (sequences.label > 0.5) & (sequences.length > 0) & (other_length > 0)


def pairs_of(sequences: Sequences) -> Pair:
    """Returns the pairs, each at the place of its preferred sequence."""
    clean = lambda x: reduce.masked(x, sequences.mask)
    logprob, gain = clean(sequences.logprob), gains(sequences)
    length = clean(sequences.length).astype(logprob.dtype)
    other_length = other_of_pair(length, sequences)
    mask = preferred_of(sequences)
    here = lambda x, fill=0.0: jnp.where(mask, x, fill)
    optional = {}
    if sequences.log_sum_squared is not None:
        log_sum_squared = clean(sequences.log_sum_squared)
        optional = {
            "log_sum_squared": here(log_sum_squared),
            "other_log_sum_squared": here(other_of_pair(log_sum_squared, sequences)),
        }
    return Pair(
        logprob=here(logprob),
        other_logprob=here(other_of_pair(logprob, sequences)),
        gain=here(gain),
        other_gain=here(other_of_pair(gain, sequences)),
        length=here(length, 1.0),
        other_length=here(other_length, 1.0),
        preference=here(sequences.label, 1.0),
        mask=mask,
        **optional,
    )


def pair_loss(loss: Callable[[Any, Pair], Array]) -> Callable[[Any, Sequences, PyTree], tuple[Array, dict[str, Array]]]:
    """Returns the sequence loss of an objective from its loss of a pair: (config, pair) -> [..., S]."""

    def sequence_loss(config: Any, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
        pair = pairs_of(sequences)
        return reduce.masked(loss(config, pair), pair.mask), pair_metrics(pair)

    sequence_loss.__doc__ = loss.__doc__
    return sequence_loss


def pair_metrics(pair: Pair) -> dict[str, Array]:
    """Returns the metrics of every pair (P0), [..., S] float32: accuracy (the margin is above 0; a tie is half), the
    margin D of sums over tokens (without beta, whatever the loss uses), both gains, and the preferred answer's mean NLL
    per token."""
    values = {
        "pairs/accuracy": 0.5 * (1 + jnp.sign(pair.margin)),
        "pairs/margin": pair.margin,
        "pairs/preferred": pair.gain,
        "pairs/other": pair.other_gain,
        "pairs/nll": -pair.mean_logprob,
    }
    return of_pairs(values, pair)


def of_pairs(values: dict[str, Array], pair: Pair) -> dict[str, Array]:
    """Returns metrics of pairs without a gradient, [..., S] float32, 0 where there is no pair."""
    return {
        name: jax.lax.stop_gradient(reduce.masked(value, pair.mask)).astype(jnp.float32)
        for name, value in values.items()
    }


def pair_objective(
    config: type,
    loss: Callable[[Any, Pair], Array],
    check: Callable[[Any, Facts], None],
    *,
    reference: bool = True,
    log_sum_squared: bool = False,
) -> Objective:
    """Returns an objective on stored pairs from its loss of a pair.

    Args:
      reference: gains are relative to the role `reference`; False: Pair.gain is the log-prob.
      log_sum_squared: the loss reads Pair.log_sum_squared.
    """
    return Objective(
        config=config,
        check=check,
        needs=lambda config: Needs(reference=reference, log_sum_squared=log_sum_squared),
        sequence_loss=pair_loss(loss),
        unit_size=2,
    )


def positive(name: str, value: float, usual: float) -> None:
    """Raises ValueError unless a coefficient is above 0 and finite, with its name and a usual value."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} = {value} must be above 0 and finite: at 0 the loss is constant. {usual} is usual.")


def share(name: str, value: float, usual: float, below: float = 0.5) -> None:
    """Raises ValueError unless a share of wrong labels is in [0, below)."""
    if not 0 <= value < below:
        raise ValueError(f"{name} = {value} must be at least 0 and below {below}; {usual} is usual.")
