"""Adafactor: second moments of a matrix's rows and columns, instead of one number per weight.

An array of the layers is a stack of matrices, [layers, (experts,) inputs.., outputs..], and each matrix is factored
separately, as optax.scale_by_factored_rms does for a list of 2-D leaves. Given the stack, optax would factor its two
largest axes, whichever they are.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jrl.learning.optimizers.contract import Leaf, Optimizer
from jrl.learning.optimizers.settings import OptimizerSettings, check_rates
from jrl.types import Array, PyTree, traced


@traced
class Adafactor(OptimizerSettings):
    """Adam with a factored second moment and, unless asked, no first (1804.04235); clipped and scheduled as AdamW."""

    learning_rate: float = 1e-4  # peak; absolute, not relative to the size of weights
    exponent: float = 0.8  # the second moment decays by 1 - t^-exponent at update t
    eps: float = 1e-30  # added to squared gradients
    clip_rms: float | None = 1.0  # largest root mean square of a matrix's direction; None: no clipping
    momentum: float | None = None  # decay of an average of directions, as large as the weights; None: none is kept

    def __post_init__(self) -> None:
        positive = lambda x: x > 0
        check_rates(self, exponent=lambda x: 0 < x <= 1, eps=positive, clip_rms=positive, momentum=lambda x: 0 < x < 1)


class SecondMoment(NamedTuple):
    """The second moment of one array: of rows and columns of its matrices, or of every weight. The others are None."""

    rows: Array | None  # shape of the array, with output axes of size 1
    columns: Array | None  # shape of the array, with input axes of size 1
    full: Array | None  # like the array


class AdafactorState(NamedTuple):
    count: Array  # [] int32
    second: PyTree  # SecondMoment of each array
    first: PyTree | None  # like the arrays; None: no momentum


def direction(config: Adafactor, leaves: PyTree) -> optax.GradientTransformation:
    """Returns O1, Adafactor's direction.

    With d = 1 - t^-exponent and s = g^2 + eps: r <- d r + (1 - d) mean over outputs of s; c <- d c + (1 - d) mean over
    inputs of s; u = g / sqrt(r c / mean(r)). For other arrays: v <- d v + (1 - d) s; u = g / sqrt(v). Then
    u / max(1, rms(u) / clip_rms), a matrix (or the vector of a layer) at a time.

    Source: 1804.04235 algorithm 4; optax.scale_by_factored_rms and clip_by_block_rms are the same for 2-D leaves of
    128 or more on both sides, below which they do not factor. The paper's learning rate relative to the size of the
    weights is left out, as in most fine-tuning.
    """
    is_moment = lambda x: isinstance(x, SecondMoment) or x is None

    def init(params: PyTree) -> AdafactorState:
        second = jax.tree.map(_zero_moment, params, leaves)
        first = None if config.momentum is None else jax.tree.map(jnp.zeros_like, params)
        return AdafactorState(jnp.zeros((), jnp.int32), second, first)

    def update(gradient: PyTree, state: AdafactorState, params: PyTree) -> tuple[PyTree, AdafactorState]:
        count = state.count + 1
        decay = 1 - count.astype(jnp.float32) ** -config.exponent
        scale = lambda moment, g, leaf: None if g is None else scaled(g, moment, leaf, decay, config)
        pairs = jax.tree.map(scale, state.second, gradient, leaves, is_leaf=is_moment)
        is_pair = lambda x: x is None or (isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], SecondMoment))
        pick = lambda i: jax.tree.map(lambda pair: None if pair is None else pair[i], pairs, is_leaf=is_pair)
        updates, first = pick(0), None
        if config.momentum is not None:
            first = updates = jax.tree.map(
                lambda m, u: (config.momentum * m + (1 - config.momentum) * u).astype(m.dtype), state.first, updates
            )
        return updates, AdafactorState(count, pick(1), first)

    return optax.GradientTransformation(init, update)


def scaled(g: Array, moment: SecondMoment, leaf: Leaf, decay: Array, config: Adafactor) -> tuple[Array, SecondMoment]:
    """Returns one array's direction and its next second moment."""
    square = g * g + config.eps
    follow = lambda old, new: (decay * old + (1 - decay) * new).astype(old.dtype)
    mean = lambda x, axes: jnp.mean(x, axis=axes, keepdims=True)
    if leaf.inputs is None:
        moment = SecondMoment(None, None, follow(moment.full, square))
        u = g * jax.lax.rsqrt(moment.full)
    else:
        inputs, outputs = leaf.input_axes(), leaf.output_axes(g.ndim)
        rows = follow(moment.rows, mean(square, outputs))
        columns = follow(moment.columns, mean(square, inputs))
        moment = SecondMoment(rows, columns, None)
        u = g * jax.lax.rsqrt(rows / mean(rows, inputs)) * jax.lax.rsqrt(columns)
    if config.clip_rms is not None:
        inner = tuple(range(leaf.stack, g.ndim))
        rms = jnp.sqrt(mean(u * u, inner)) if inner else jnp.abs(u)
        u = u / jnp.maximum(1, rms / config.clip_rms)
    return u.astype(g.dtype), moment


def _zero_moment(x: Array, leaf: Leaf) -> SecondMoment:
    """Returns an array's initial second moment, sharded like the array."""
    zero = lambda axes: jnp.zeros_like(jnp.mean(x, axis=axes, keepdims=True))
    if leaf.inputs is None:
        return SecondMoment(None, None, jnp.zeros_like(x))
    return SecondMoment(zero(leaf.output_axes(x.ndim)), zero(leaf.input_axes()), None)


OPTIMIZER = Optimizer(config=Adafactor, direction=direction)
