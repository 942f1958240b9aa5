"""Likelihood terms in addition to a policy loss: of right rows (VAPO) or of stored rows (PPO-ptx)."""

from __future__ import annotations

import jax

from jrl.ops import reduce

Array = jax.Array


def positive_nll(logprobs: Array, correct: Array, mask: Array) -> Array:
    """Returns L17's term before its mean: -logprobs on tokens of correct rows, 0 elsewhere.

    The full term is mu * (the mean of this over the tokens of correct rows). In a loss whose denominator is all tokens
    of the step, multiply by `positive_weights`.

    Args:
      logprobs: [...] float, differentiated. correct: same shape, bool, the token's row was right. mask: same, bool.

    Returns:
      [...] float32 or wider.

    Source: Yue et al. 2504.05118 (VAPO), mu = 0.1.
    """
    return -reduce.masked(logprobs, mask & correct)


def pretraining_nll(
    logprobs: Array, mask: Array, *, coefficient: Array, num_tokens: Array, denominator: Array
) -> Array:
    """Returns L17's term of stored rows per token: its sum over the step divided by `denominator` is coefficient *
    (mean of -logprobs over their tokens).

    Args:
      logprobs: [...] float, of stored rows, differentiated. mask: same shape, bool, tokens to imitate.
      coefficient: [] float, above 0.
      num_tokens: [] float, tokens of `mask` in the whole optimizer step, at least 1.
      denominator: [] float, that of the loss to which the term is added.

    Returns:
      [...] float32 or wider, 0 outside the mask.

    Source: Ouyang et al. 2203.02155 eq. 2 (PPO-ptx), a sum over pretraining rows with coefficient 27.8; here it is a
    mean over tokens, as in OpenRLHF, whose coefficient is 0.05.
    """
    return -reduce.masked(logprobs, mask) * (coefficient * denominator / num_tokens)


def positive_weights(correct: Array, loss_mask: Array) -> Array:
    """Returns the weights that turn a mean over all tokens into a mean over the tokens of correct rows (L17): (tokens
    in the loss) / (tokens of correct rows) on the latter, 0 elsewhere. All 0 if no row is correct.

    Args:
      correct: [N] bool. loss_mask: [N, T] bool, of the whole optimizer step.

    Returns:
      [N, T] float32, float64 where it is enabled.
    """
    positive = loss_mask & correct[:, None]
    return reduce.token_weights(positive) * reduce.count_tokens(loss_mask) / reduce.count_tokens(positive)
