"""Log-probs and entropies with the vocabulary sharded over tensor, for accelerators: the head is gathered once in the
forward and once in the backward pass, its gradient is reduced once, and fully masked chunks are skipped.

    z = h W^T / T       norm = log sum_v exp z_v       log p_t = z_t - norm       H = norm - sum_v p_v z_v

Each device computes the logits of its share of the vocabulary; the highest score and the three sums are reduced over
tensor. The backward pass is written out, since JAX's would gather the head, and reduce its gradient, once per chunk.
`jrl.ops.logprobs` is the reference, and computes the same to rounding. In bfloat16 the gradient of the logits is
rounded to bfloat16 before its two products, which are summed in float32; the head's gradient is rounded once per
micro-batch, before devices sum it, like those of all other matrices.

Source: Megatron-LM (1909.08053), section 3, for the sharded cross-entropy; the derivatives are those of
`jrl.ops.categorical`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jrl.device.sharding import ACTIVATIONS, TRAIN, batch_axes, mesh_axes, spec
from jrl.models.contract import Adapted
from jrl.models.shape import Decoder
from jrl.ops.logprobs import before, permute
from jrl.types import Array, PyTree

CHUNKS = "chunks"  # scope of the loops over filled chunks, and of the condition that there are several
MIDDLE = "middle_chunks"  # scope of the backward loop over all chunks but the first and the last


class OutputHead(NamedTuple):
    """The matrix from hidden states to logits, as it is stored."""

    matrix: Array  # [V, D]
    cap: float | None  # logits x become cap * tanh(x / cap)


class _Axes(NamedTuple):
    """Mesh axes; () without a mesh."""

    batch: tuple[str, ...]
    gathered: tuple[str, ...]  # that the head's width is sharded over
    vocab: tuple[str, ...]

    @property
    def copies(self) -> tuple[str, ...]:
        """Batch axes that hold copies of the head."""
        return tuple(axis for axis in self.batch if axis not in self.gathered)


class _Static(NamedTuple):
    axes: _Axes
    chunk: int
    cap: float | None


def output_head(params: PyTree, cfg: Decoder) -> OutputHead:
    """Returns the head of a decoder's parameters, with or without adapters."""
    base = params.base if isinstance(params, Adapted) else params
    return OutputHead(base["embed" if cfg.tied else "head"], cfg.logit_cap)


def token_logprobs(
    hidden: Array,
    tokens: Array,
    mask: Array,
    head: OutputHead,
    *,
    temperature: Array,
    chunk: int,
    predictor: Callable[[Array], Array] = before,
) -> tuple[Array, Array]:
    """Returns what `jrl.ops.logprobs.token_logprobs` does, to rounding, [R, L] each, float32 or wider.

    Args:
      hidden: [R, L, D]. tokens: [R, L] int32. mask: [R, L] bool. temperature: [] float32.
      chunk: positions of a row whose logits exist at once.
      predictor: as in `jrl.ops.logprobs.token_logprobs`.
    """
    matrix = head.matrix.astype(hidden.dtype)  # before it is gathered
    mesh = jax.sharding.get_abstract_mesh()
    axes = (
        _Axes((), (), ()) if mesh.empty else _Axes(batch_axes(), mesh_axes("embed", TRAIN), mesh_axes("vocab", TRAIN))
    )
    static = _Static(axes, min(chunk, hidden.shape[1]), head.cap)
    shard = functools.partial(_shard, static=static, predictor=predictor)
    arrays = (hidden, tokens, mask, matrix, temperature)
    if mesh.empty:
        return shard(*arrays)
    row = spec(("batch", None), ACTIVATIONS)
    ins = (spec(("batch", None, None), ACTIVATIONS), row, row, spec(("vocab", "embed"), TRAIN), PartitionSpec())
    arrays = tuple(jax.sharding.reshard(x, where) for x, where in zip(arrays, ins, strict=True))
    names = set(mesh.axis_names) - set(mesh.manual_axes)
    return jax.shard_map(shard, in_specs=ins, out_specs=(row, row), axis_names=names)(*arrays)


def _shard(
    hidden: Array,
    tokens: Array,
    mask: Array,
    matrix: Array,
    temperature: Array,
    *,
    static: _Static,
    predictor: Callable[[Array], Array],
) -> tuple[Array, Array]:
    """Returns the log-probs and entropies of one batch shard's rows."""
    length = hidden.shape[1]
    padding = -length % static.chunk
    order = jnp.argsort(~mask, axis=1, stable=True)  # masked-in positions first
    back = jnp.argsort(order, axis=1)
    states = jnp.pad(permute(predictor(hidden), order, back), ((0, 0), (0, padding), (0, 0)))
    targets = jnp.pad(jnp.take_along_axis(tokens, order, axis=1), ((0, 0), (0, padding)))
    filled = -(-mask.sum(axis=1).max() // static.chunk)
    results = _filled_chunks(static, states, targets, filled, matrix, temperature)
    return tuple(jnp.where(mask, permute(x[:, :length], back, order), 0) for x in results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _filled_chunks(
    static: _Static, hidden: Array, targets: Array, filled: Array, matrix: Array, temperature: Array
) -> tuple[Array, Array]:
    """Returns log-prob and entropy of the first `filled` chunks of each row, [R, M] each; 0 in the others."""
    return _forward(static, hidden, targets, filled, matrix, temperature)[0]


def _forward(
    static: _Static, hidden: Array, targets: Array, filled: Array, matrix: Array, temperature: Array
) -> tuple[tuple[Array, Array], tuple]:
    axes = static.axes
    head = _gathered(matrix, axes)
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    total = functools.partial(_summed, names=axes.vocab)

    def add(i: Array, out: tuple[Array, ...]) -> tuple[Array, ...]:
        z = _logits(static, _at(static, hidden, i), head)[0] / temperature.astype(wide)
        top = z.max(axis=-1)
        top = jax.lax.pmax(top, axes.vocab) if axes.vocab else top
        weight = jnp.exp(z - top[..., None])
        chosen = total(jnp.where(_matches(static, _at(static, targets, i), z), z, 0).sum(axis=-1))
        # All three sums in one pass over the logits: p = weight / sum of weights.
        weights, scores = total(weight.sum(axis=-1)), total((weight * z).sum(axis=-1))
        norm = top + jnp.log(weights)
        entropy = norm - scores / weights
        results = (chosen - norm, entropy, norm)
        return tuple(jax.lax.dynamic_update_slice_in_dim(x, new, i * static.chunk, 1) for x, new in zip(out, results))

    empty = _varying(jnp.zeros(targets.shape, wide), axes.batch)
    with jax.named_scope(CHUNKS):
        logprobs, entropy, norm = jax.lax.fori_loop(0, filled, add, (empty,) * 3)
    return (logprobs, entropy), (hidden, targets, filled, matrix, temperature, norm, entropy)


def _backward(static: _Static, residuals: tuple, gradient: tuple[Array, Array]) -> tuple[Any, ...]:
    hidden, targets, filled, matrix, temperature, norms, entropies = residuals
    axes = static.axes
    head = _gathered(matrix, axes)
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    heat = temperature.astype(wide)

    def chunk_gradients(i: Array | int) -> tuple[Array, Array, Array]:
        """Returns this device's gradients of a chunk's hidden states, of the head and of the temperature."""
        at = lambda x: _at(static, x, i)
        h = at(hidden)
        logits, slope = _logits(static, h, head)
        z = logits / heat
        log_p = z - at(norms)[..., None]
        p = jnp.exp(log_p)
        grad_logprob, grad_entropy = (at(g)[..., None] for g in gradient)
        grad_z = grad_logprob * (_matches(static, at(targets), z) - p)
        grad_z = grad_z - grad_entropy * p * (log_p + at(entropies)[..., None])
        grad_z = jnp.where(i < filled, grad_z, 0)  # a shard without a chunk computes one too
        grad_logits = (grad_z / heat * slope).astype(h.dtype)
        grad_h = jnp.einsum("rcv,vd->rcd", grad_logits, head, preferred_element_type=wide).astype(h.dtype)
        grad_head = jnp.einsum("rcv,rcd->vd", grad_logits, h, preferred_element_type=wide)
        return grad_h, grad_head, -(grad_z * z).sum() / heat

    everywhere = (*axes.batch, *axes.vocab)
    put = lambda x, new, i: jax.lax.dynamic_update_slice_in_dim(x, new, i * static.chunk, 1)
    empty = _varying(jnp.zeros(hidden.shape, hidden.dtype), everywhere)

    def add(i: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        grad_h, grad_head, grad_heat = chunk_gradients(i)
        return put(sums[0], grad_h, i), sums[1] + grad_head, sums[2] + grad_heat

    def single_chunk() -> tuple[Array, Array, Array]:
        grad_h, grad_head, grad_heat = chunk_gradients(0)
        return put(empty, grad_h, 0), grad_head.astype(matrix.dtype), grad_heat

    def several_chunks() -> tuple[Array, Array, Array]:
        # The first and the last chunk are outside of the loop. Zero-filling the sum and rounding it would otherwise be
        # separate passes over a float32 array of the head's size.
        grad_h, *rest = chunk_gradients(0)
        with jax.named_scope(MIDDLE):
            sums = jax.lax.fori_loop(1, filled - 1, add, (put(empty, grad_h, 0), *rest))
        grad_h, grad_head, grad_heat = add(filled - 1, sums)
        return grad_h, grad_head.astype(matrix.dtype), grad_heat

    # Most often one chunk is enough, and a float32 sum over chunks takes twice the memory of the head.
    with jax.named_scope(CHUNKS):
        grad_hidden, grad_head, grad_heat = jax.lax.cond(filled <= 1, single_chunk, several_chunks)
    if axes.gathered:
        grad_head = jax.lax.psum_scatter(grad_head, axes.gathered, scatter_dimension=1, tiled=True)
    # A barrier: libtpu 0.0.42 tries to move the reduction out of the loop over micro-batches, and fails a check.
    grad_head = jax.lax.optimization_barrier(grad_head)
    grad_heat = _summed(grad_heat, everywhere).astype(temperature.dtype)
    return _summed(grad_hidden, axes.vocab), None, None, _summed(grad_head, axes.copies), grad_heat


_filled_chunks.defvjp(_forward, _backward)


def _logits(static: _Static, h: Array, head: Array) -> tuple[Array, Array | float]:
    """Returns the logits of this device's share of the vocabulary, [R, c, V], and the derivative of the cap."""
    wide = jnp.promote_types(h.dtype, jnp.float32)
    logits = jnp.einsum("rcd,vd->rcv", h, head, preferred_element_type=wide)
    if static.cap is None:
        return logits, 1.0
    share = jnp.tanh(logits / static.cap)
    return static.cap * share, 1 - share**2


def _matches(static: _Static, tokens: Array, z: Array) -> Array:
    """Returns where this device's share of the vocabulary is the token, [R, c, V] bool."""
    first = jax.lax.axis_index(static.axes.vocab) * z.shape[-1] if static.axes.vocab else 0
    vocabulary = jnp.arange(z.shape[-1], dtype=tokens.dtype) + jnp.asarray(first, tokens.dtype)
    return tokens[..., None] == vocabulary[None, None]


def _at(static: _Static, x: Array, i: Array) -> Array:
    """Returns chunk `i` of [R, M, ...]."""
    return jax.lax.dynamic_slice_in_dim(x, i * static.chunk, static.chunk, 1)


def _gathered(matrix: Array, axes: _Axes) -> Array:
    """Returns the head gathered over its width."""
    return jax.lax.all_gather(matrix, axes.gathered, axis=1, tiled=True) if axes.gathered else matrix


def _summed(x: Array, names: tuple[str, ...]) -> Array:
    return jax.lax.psum(x, names) if names else x


def _varying(x: Array, names: tuple[str, ...]) -> Array:
    """Returns `x` typed as varying along mesh axes, as a loop's carry must be from the start."""
    return jax.lax.pcast(x, names, to="varying") if names else x
