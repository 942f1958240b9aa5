"""Shared parts of objectives that weight stored rows by their advantage: trained rows, their numbers, metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.algos.contract import Sequences
from jrl.ops import reduce
from jrl.ops.stored_advantages import better_than_expected, sampling_probabilities

Array = jax.Array

DRAWS = ("in_turn", "proportional")
EXPECTATION = ("the reward", "the expected reward")  # the numbers of a row that A19 reads, in order


def check_some_better(config: Any, value: np.ndarray) -> None:
    """Raises ValueError if no row of a data set has a reward above expectation (A19), so that none has a weight.

    Args:
      value: [n, 2] float, the numbers of EXPECTATION for every row; NaN where the data lack one.
    """
    advantage = value[:, 0] - value[:, 1]
    if not (advantage > 0).any():
        raise ValueError(
            f"{type(config).__name__}: none of the {len(advantage)} stored rows earned more than was expected: "
            "nothing would be learned. Check that both numbers have one scale, and their order in the source's values: "
            f"{' and '.join(EXPECTATION)}; those of the first row are {value[0].tolist() if len(value) else []}"
        )


def check_draw(config: Any) -> None:
    """Raises ValueError for an unknown way to draw rows."""
    if config.draw not in DRAWS:
        raise ValueError(f"{type(config).__name__}.draw = {config.draw!r} is none of {', '.join(map(repr, DRAWS))}")


def draw(config: Any) -> Callable[[np.ndarray], np.ndarray] | None:
    """Returns the function of draw probabilities (A19), `chances`; None: examples are drawn in turn."""
    return chances if config.draw == "proportional" else None


def chances(value: np.ndarray) -> np.ndarray:
    """Returns the probability of drawing each example, [n] float64: in proportion to its reward above expectation.

    Args:
      value: [n, 2] float, the numbers of EXPECTATION; NaN if an example gives no row.

    Raises: ValueError if no row has a reward above expectation.
    """
    advantage = better_than_expected(value[:, 0], value[:, 1], ~np.isnan(value).any(axis=-1))
    probabilities = np.asarray(sampling_probabilities(advantage), np.float64)
    return probabilities / probabilities.sum()


def learned_rows(sequences: Sequences) -> Array:
    """Returns the rows with a trained token and both numbers, [..., S] bool."""
    return sequences.mask & (sequences.length > 0) & ~jnp.isnan(sequences.value).any(-1)


def numbers(sequences: Sequences) -> tuple[Array, Array]:
    """Returns the two numbers of every trained row, [..., S] each, 0 elsewhere."""
    mask = learned_rows(sequences)
    return reduce.masked(sequences.value[..., 0], mask), reduce.masked(sequences.value[..., 1], mask)


def advantage_metrics(sequences: Sequences, advantage: Array, weight: Array) -> dict[str, Array]:
    """Returns the metrics of an advantage-weighted objective, {name: [..., S] float32}.

    advantage/mean: the advantage. advantage/mean_logprob: the mean log-prob of the row's tokens. advantage/logprob:
    their product. Its excess over the product of the two means rises as better rows become likelier than worse ones; it
    also rises if all rows become likelier and most are better. advantage/weight: the row's weight.

    Args:
      advantage: [..., S] float, R - V, of either sign. weight: [..., S] float.
    """
    mask = learned_rows(sequences)
    mean = reduce.masked(sequences.logprob, mask) / jnp.maximum(sequences.length, 1)
    metrics = {
        "advantage/logprob": advantage * mean,
        "advantage/mean": advantage,
        "advantage/mean_logprob": mean,
        "advantage/weight": weight,
    }
    return {
        name: jax.lax.stop_gradient(reduce.masked(value, mask)).astype(jnp.float32) for name, value in metrics.items()
    }
