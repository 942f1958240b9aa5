"""R12: objectives of a multi-objective reward model, decorrelated from length and mixed by a prompt-conditioned gate.

    o'_k = o_k - lam_k * o_verbosity;    g = softmax(gate(h_prompt) / temperature);    R = sum_k g_k o'_k

Source: ArmoRM, 2406.12845 section 3, and its code.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import reduce

Array = jax.Array


def ridge_head(hidden: Array, labels: Array, *, penalty: float) -> tuple[Array, Array]:
    """Returns weights [D, K] and biases [K] of R12's objectives: ridge regression of every label on the hidden state.

    Minimizes sum_n (h_n . w_k + b_k - label_nk)^2 + penalty * |w_k|^2 over the rows that have the label; the bias is
    not penalized.

    Args:
      hidden: [N, D] float. labels: [N, K] float, NaN where a row lacks the label: it is left out of that objective.
    """
    x, known = reduce.widen(hidden), ~jnp.isnan(labels)

    def fit(label: Array, counts: Array) -> tuple[Array, Array]:
        rows = jnp.maximum(counts.sum(), 1)
        y = reduce.masked(label, counts)
        mean_x, mean_y = jnp.where(counts[:, None], x, 0).sum(0) / rows, y.sum() / rows
        centered = jnp.where(counts[:, None], x - mean_x[None], 0)
        gram = centered.T @ centered + penalty * jnp.eye(x.shape[1], dtype=x.dtype)
        w = jnp.linalg.solve(gram, centered.T @ y)
        return w, mean_y - mean_x @ w

    w, b = jax.vmap(fit, in_axes=1)(labels, known)
    return w.T, b


def spearman(a: Array, b: Array) -> Array:
    """Returns the rank correlation of two columns, [N] each -> [], ties at their mean rank; 0 where one is constant.

    R12 measures an objective's bias toward length by it.
    """

    def ranks(x: Array) -> Array:
        """Returns the number of smaller entries minus that of larger ones, 2 * (rank - mean rank)."""
        return jnp.sign(reduce.widen(x)[:, None] - reduce.widen(x)[None, :]).sum(1)

    x, y = ranks(a), ranks(b)
    norm = jnp.sqrt((x * x).sum() * (y * y).sum())
    return jnp.where(norm == 0, 0, (x * y).sum() / norm)  # NaN inputs give NaN, which is below no threshold


def verbosity_coefficients(objectives: Array, candidates: Array, *, verbosity: int, threshold: float) -> Array:
    """Returns R12's lam_k: the smallest candidate with spearman(o_k - lam_k * o_verbosity, o_verbosity) <= threshold.

    1 if no candidate qualifies, and for the verbosity objective itself, which becomes 0.

    Args:
      objectives: [N, K] float, of reference texts. candidates: [C] float, ascending. verbosity: the column.

    Returns: [K]. 0.028 is ArmoRM's threshold.
    """
    of_length = objectives[:, verbosity]
    correlation = jax.vmap(
        lambda lam: jax.vmap(lambda o: spearman(o - lam * of_length, of_length), in_axes=1)(objectives)
    )(candidates)
    fits = correlation <= threshold
    lam = jnp.where(fits.any(0), candidates[jnp.argmax(fits, axis=0)], 1)
    return lam.at[verbosity].set(1)


def decorrelated(objectives: Array, coefficients: Array, *, verbosity: int) -> Array:
    """Returns R12's o'_k = o_k - lam_k * o_verbosity, [N, K] float32 or wider.

    Args:
      objectives: [N, K] float. coefficients: [K] float, lam. verbosity: the column.
    """
    o = reduce.widen(objectives)
    return o - coefficients[None, :] * o[:, verbosity, None]


def gate_weights(logits: Array, *, temperature: float) -> Array:
    """Returns R12's gate, softmax(logits / temperature) over objectives. [N, K] -> [N, K] float32 or wider.

    Source: ArmoRM divides by 10.
    """
    return jax.nn.softmax(reduce.widen(logits) / temperature, axis=1)


def gated_reward(objectives: Array, gate: Array) -> Array:
    """Returns R12's reward, the sum of objectives times their gate. [N, K], [N, K] -> [N] float32 or wider."""
    return jnp.sum(reduce.widen(objectives) * gate, axis=1)
