"""What methods share that learn from stored rows by their advantage: which rows, of which numbers, and metrics."""

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
    """Raises ValueError where no row of a data set earned more than was expected (A19): nothing would be learned.

    Args:
      value: [n, 2] float, the numbers of EXPECTATION of every row; NaN where the data lack one.
    """
    advantage = value[:, 0] - value[:, 1]
    if not (advantage > 0).any():
        raise ValueError(
            f"{type(config).__name__}: none of the {len(advantage)} stored rows earned more than was expected: "
            "nothing would be learned. Check that both numbers have one scale, and their order in the source's values: "
            f"{' and '.join(EXPECTATION)}; those of the first row are {value[0].tolist() if len(value) else []}"
        )


def check_draw(config: Any) -> None:
    """Raises ValueError for a way to draw rows that there is not."""
    if config.draw not in DRAWS:
        raise ValueError(f"{type(config).__name__}.draw = {config.draw!r} is none of {', '.join(map(repr, DRAWS))}")


def draw(config: Any) -> Callable[[np.ndarray], np.ndarray] | None:
    """Returns how examples of a data set are drawn (A19): `chances`, or None, in turn."""
    return chances if config.draw == "proportional" else None


def chances(value: np.ndarray) -> np.ndarray:
    """Returns how likely every example is to be drawn, [n] float64: in proportion to what its row earned above what was
    expected.

    Args:
      value: [n, 2] float, the numbers of EXPECTATION; NaN where an example gives no row.

    Raises: ValueError where no row earned more than was expected.
    """
    better = better_than_expected(value[:, 0], value[:, 1], ~np.isnan(value).any(axis=-1))
    wide = np.asarray(sampling_probabilities(better), np.float64)
    return wide / wide.sum()


def learned_rows(sequences: Sequences) -> Array:
    """Returns the rows with a token to learn from, of which the data say both numbers, [..., S] bool."""
    return sequences.mask & (sequences.length > 0) & ~jnp.isnan(sequences.value).any(-1)


def numbers(sequences: Sequences) -> tuple[Array, Array]:
    """Returns the two numbers that the data say of every row that is learned from, [..., S] each, 0 elsewhere."""
    mask = learned_rows(sequences)
    return reduce.masked(sequences.value[..., 0], mask), reduce.masked(sequences.value[..., 1], mask)


def advantage_metrics(sequences: Sequences, advantage: Array, weight: Array) -> dict[str, Array]:
    """Returns the metrics of such a method, {name: [..., S] float32}.

    advantage/mean: the advantage. advantage/mean_logprob: the mean log-prob of the row's tokens. advantage/logprob:
    their product. What of it exceeds the product of the two means rises as what is better than expected grows likelier
    than what is worse; it rises too where all rows grow likelier and most are better. advantage/weight: what the row is
    imitated with.

    Args:
      advantage: [..., S] float, R - V of whatever sign. weight: [..., S] float.
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
