"""Likelihood of the rows that were right, as a term beside a policy loss (VAPO)."""

from __future__ import annotations

import jax

from jrl.ops import reduce

Array = jax.Array


def positive_nll(logprobs: Array, correct: Array, mask: Array) -> Array:
    """Returns L17's term before its mean: -logprobs on tokens of correct rows, 0 elsewhere.

    The term is mu * (its mean over the tokens of correct rows). In a loss whose denominator is all tokens of the step,
    multiply by `positive_weights`.

    Args:
      logprobs: [...] float, differentiated. correct: same shape, bool, the token's row was right. mask: same, bool.

    Returns:
      [...] float32 or wider.

    Source: Yue et al. 2504.05118 (VAPO), mu = 0.1.
    """
    return -reduce.masked(logprobs, mask & correct)


def positive_weights(correct: Array, loss_mask: Array) -> Array:
    """Returns what turns a sum over all tokens into a mean over those of correct rows (L17): tokens of the loss /
    tokens of correct rows on the latter, 0 elsewhere. All 0 where no row is correct.

    Args:
      correct: [N] bool. loss_mask: [N, T] bool, of the whole optimizer step.

    Returns:
      [N, T] float32, float64 where it is enabled.
    """
    positive = loss_mask & correct[:, None]
    return reduce.token_weights(positive) * reduce.count_tokens(loss_mask) / reduce.count_tokens(positive)
