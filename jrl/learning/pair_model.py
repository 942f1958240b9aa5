"""A pair model's preference: the probability of one of two verdict tokens after a question with two answers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jrl.device.sharding import constrain
from jrl.learning.learner import Weights
from jrl.models.contract import Model
from jrl.types import Array


def first_preferred(
    weights: Weights, tokens: Array, length: Array, verdicts: Array, *, model: Model, cfg: Any
) -> Array:
    """Returns P17's preference, the probability that the first of two answers is better, [N] float32:

        p(first) / (p(first) + p(second)) = sigmoid(z_first - z_second),  z the logits after the question

    Args:
      tokens: [N, W] int32, questions. length: [N] int32, tokens of each, at least 1.
      verdicts: [2] int32, the tokens for "the first" and "the second".

    Source: RLHF Workflow, 2405.07863 section 2.2.
    """
    columns = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    columns = constrain(columns, "batch", None)
    hidden = model.forward(weights.params, tokens, columns, None, cfg)[0]
    last = jnp.where((columns == length[:, None] - 1)[..., None], hidden, 0).sum(1, keepdims=True)
    logits = model.unembed(weights.params, last, cfg)[:, 0]
    logits = logits.astype(jnp.promote_types(jnp.float32, logits.dtype))
    vocabulary = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    sign = (vocabulary == verdicts[0]).astype(logits.dtype) - (vocabulary == verdicts[1])
    # A padded vocabulary may have -inf where there is no token.
    return jax.nn.sigmoid(jnp.where(sign[None] != 0, logits * sign[None], 0).sum(-1))
