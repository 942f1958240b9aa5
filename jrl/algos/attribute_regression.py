"""Attribute regression: a reward model with one output per rated attribute, such as helpfulness.

    o_k = output k of the reward head at the last token of a sequence, y_k the rating of attribute k
    l   = sum_k mask_k (o_k - y_k)^2 / sum_k mask_k, mask_k: the attribute was rated                        P3
    L   = mean over the rated sequences of the step

A later stage that uses the model combines its outputs into one score with Online.attribute_weights.

Source: HelpSteer2, Wang et al. 2406.08673 section 4, whose five attributes from 0 to 4 are the default; ArmoRM, Wang et
al. 2406.12845, also leaves attributes that a data set lacks out of the mean.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos.contract import Facts, Needs, Objective, Sequences
from jrl.ops import reduce
from jrl.ops.reward_regression import attribute_error
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class AttributeRegression:
    attributes: int = 5  # outputs of the reward head, one for each entry of Rated.values, in their order


def check(config: AttributeRegression, facts: Facts) -> None:
    if not 1 <= config.attributes <= 1024:
        raise ValueError(f"AttributeRegression.attributes = {config.attributes} must be 1 to 1024; HelpSteer2 has 5")


def sequence_loss(config: AttributeRegression, sequences: Sequences, state: PyTree) -> tuple[Array, dict[str, Array]]:
    """Returns P3 at every sequence with a rating and a token, 0 elsewhere, [..., S] float32; and its metrics."""
    mask = sequences.mask & (sequences.length > 0)
    by_attribute = lambda x: jnp.where(mask[..., None], x.reshape(*mask.shape, -1), 0)
    score, rating = by_attribute(sequences.score), by_attribute(sequences.value)
    loss = reduce.masked(attribute_error(score, rating, ~jnp.isnan(rating)), mask)
    return loss, {"reward_model/error": jax.lax.stop_gradient(loss).astype(jnp.float32)}


OBJECTIVE = Objective(
    config=AttributeRegression,
    check=check,
    needs=lambda config: Needs(logprobs=False, score=True, score_outputs=config.attributes, row_values=True),
    sequence_loss=sequence_loss,
)
