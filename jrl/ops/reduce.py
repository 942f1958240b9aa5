"""Masked reductions and the weights of tokens in the loss. Numerators and denominators stay separate to the end.

A loss over an optimizer step is `sum(weights * token_loss) / denominator`. Weights and denominators are computed on the
whole step, before it is packed and cut into micro-batches; a mean of means would depend on the cut.

    G1 token-mean                 weight 1          denominator: tokens in the loss
    G2 sequence-mean token-mean   weight 1 / len_i  denominator: sequences with a token in the loss
    G3 sequence-mean token-sum    weight 1          denominator: sequences with a token in the loss
    G4 constant (Dr.GRPO)         weight 1          denominator: configured rows x configured completion length

G5, the mean of the micro-batches' own token means (TRL "bnpo"), changes with the micro-batch size and is not offered.
All of it is float32 or wider. See docs/algorithms.md, G.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

WHITEN_EPSILON = 1e-8  # added to the variance


def widen(x: Array) -> Array:
    """Returns `x` promoted to float32 or wider: float64 is unchanged, integers and bfloat16 become float32."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def masked(x: Array, mask: Array) -> Array:
    """Returns `x` with 0 where `mask` is False, float32 or wider.

    Apply it to the *input* of a function: the gradient of `where(mask, f(x), 0)` is 0 * NaN = NaN where f' is NaN or
    infinite.

    Args:
      x: [...] any real dtype. mask: same shape, bool.
    """
    return jnp.where(mask, widen(x), 0)


def zeros_of_rows(x: Array, dtype: jnp.dtype | None = None) -> Array:
    """Returns a 0 for each row of [..., T], [...], of the dtype of `x` unless given. They are sharded as the rows are,
    which the slice `x[..., 0]` of a single row is not with jax 0.12."""
    zeros = jnp.zeros_like(x, dtype)
    return zeros.sum(axis=-1, dtype=zeros.dtype)


def masked_sum(x: Array, mask: Array) -> Array:
    """Returns sum(x * mask), [] float32 or wider; masked entries may be NaN."""
    return jnp.sum(masked(x, mask))


def masked_mean(x: Array, mask: Array) -> Array:
    """Returns sum(x * mask) / max(sum(mask), 1), [] float32 or wider; 0 for an empty mask."""
    return masked_sum(x, mask) / jnp.maximum(jnp.sum(mask), 1)


def masked_var(x: Array, mask: Array) -> Array:
    """Returns sum((x - mean)^2 * mask) / max(sum(mask) - 1, 1), [] float32 or wider; 0 for at most one element.

    Bessel's correction (TRL, verl; OpenRLHF divides by the count). The mean is subtracted first: E[x^2] - E[x]^2
    cancels in float32.
    """
    deviation = masked(x, mask) - masked_mean(x, mask)
    return masked_sum(deviation * deviation, mask) / jnp.maximum(jnp.sum(mask) - 1, 1)


def whiten(x: Array, mask: Array) -> Array:
    """Returns (x - mean) / sqrt(var + 1e-8) over the masked elements, 0 elsewhere.

    All 0 if the elements are all equal, tested exactly (E1): the rounding error of their mean divided by 1e-4 would
    become a spurious signal. NaN if one of them is.

    Args:
      x: [...] float. mask: same shape, bool.

    Returns:
      [...] float32 or wider.

    Source: as in TRL and verl; OpenRLHF divides the variance by the count.
    """
    x = widen(x)
    high, low = jnp.max(jnp.where(mask, x, -jnp.inf)), jnp.min(jnp.where(mask, x, jnp.inf))
    deviation = masked(x, mask) - masked_mean(x, mask)
    scale = jnp.sqrt(masked_var(x, mask) + WHITEN_EPSILON)
    # not high > low, which would make zeros of NaN, a step that teaches nothing and is not counted as skipped
    return jnp.where(mask & ~(high <= low), deviation / scale, 0)


def token_weights(loss_mask: Array) -> Array:
    """Returns 1 for every token in the loss and 0 elsewhere: the weights of G1, G3 and G4.

    Args:
      loss_mask: [N, T] bool.

    Returns:
      [N, T] float32, float64 where it is enabled.
    """
    return loss_mask.astype(_float())


def inverse_length_weights(loss_mask: Array) -> Array:
    """Returns 1 / (the row's tokens in the loss) for each of them and 0 elsewhere: the weights of G2.

    Args:
      loss_mask: [N, T] bool; all-masked rows get zeros.

    Returns:
      [N, T] float32, float64 where it is enabled.
    """
    length = jnp.sum(loss_mask, axis=-1, keepdims=True)
    return loss_mask.astype(_float()) / jnp.maximum(length, 1)


def count_tokens(loss_mask: Array) -> Array:
    """Returns max(tokens in the loss, 1), [] float32 or wider: the denominator of G1. loss_mask: [N, T] bool."""
    return jnp.maximum(jnp.sum(loss_mask), 1).astype(_float())


def count_sequences(loss_mask: Array) -> Array:
    """Returns max(rows with a token in the loss, 1), [] float32 or wider: the denominator of G2 and G3.

    An all-masked row is not counted (TRL's "grpo" counts it, which dilutes the others). loss_mask: [N, T] bool.
    """
    return jnp.maximum(jnp.sum(jnp.any(loss_mask, axis=-1)), 1).astype(_float())


def constant_count(rows: Array | int, max_completion: int) -> Array:
    """Returns rows * max_completion, at least 1, [] float32 or wider: the denominator of G4.

    Both are the *configured* sizes, not those of the arrays, so masked rows count and padding does not; rows is []
    int32 if the rows of a batch are split over several updates. (verl divided by the padded width until it was fixed.)
    """
    # float before the product: 16384 rows of 131072 tokens overflow int32.
    return jnp.maximum(jnp.asarray(rows, _float()) * max_completion, 1)


def token_mean(loss: Array, mask: Array) -> Array:
    """Returns G1: sum(loss * mask) / max(tokens, 1), []. loss: [N, T] float; mask: [N, T] bool."""
    return aggregate(loss, mask, token_weights(mask), count_tokens(mask))


def sequence_mean_token_mean(loss: Array, mask: Array) -> Array:
    """Returns G2: the mean over rows with a token of their token means, []. loss: [N, T] float; mask: [N, T] bool."""
    return aggregate(loss, mask, inverse_length_weights(mask), count_sequences(mask))


def sequence_mean_token_sum(loss: Array, mask: Array) -> Array:
    """Returns G3: the mean over rows with a token of their token sums, []. loss: [N, T] float; mask: [N, T] bool."""
    return aggregate(loss, mask, token_weights(mask), count_sequences(mask))


def constant_mean(loss: Array, mask: Array, *, rows: int, max_completion: int) -> Array:
    """Returns G4: sum(loss * mask) / (rows * max_completion), []. loss: [N, T] float; mask: [N, T] bool."""
    return aggregate(loss, mask, token_weights(mask), constant_count(rows, max_completion))


def aggregate(loss: Array, mask: Array, weights: Array, denominator: Array) -> Array:
    """Returns sum(weights * loss) / denominator over the mask, [] float32 or wider.

    Args:
      loss: [...] float. mask: same shape, bool. weights: same shape, float. denominator: [] float, at least 1.
    """
    return jnp.sum(weights * masked(loss, mask)) / denominator


def _float() -> jnp.dtype:
    return jnp.zeros(()).dtype  # float32, or float64 where tests enable it
