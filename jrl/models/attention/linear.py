"""Linear attention by the gated delta rule: a layer holds a matrix for each head instead of keys and values.

    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t k_t S_{t-1})^T        o_t = q_t S_t        a_t = exp(g_t), b_t in (0, 1)

A row is computed in chunks of tokens, which the state S passes through one after the other. Inside a chunk that begins
with S_0, with D_tm the sum of g after m up to t, D_t that up to t, and sums over the tokens m before t of the same
sequence, the corrections u_t that enter S solve a unit lower triangular system of the length of the chunk:

    u_t + b_t sum_m exp(D_tm) (k_t k_m) u_m = b_t (v_t - exp(D_t) k_t S_0)
    o_t = exp(D_t) q_t S_0 + sum_{m <= t} exp(D_tm) (q_t k_m) u_m

which is the recurrence, unrolled. The systems of all chunks are solved at once, for v_t and for the terms in S_0; then
a scan over chunks fills in S_0. Each sequence packed in a row begins with a state of zeros. Where continuations share a
prefix two states are carried: the one after the newest prefix, which each of its continuations begins with, and the
continuation's.

Before the recurrence, queries, keys and values go through a causal depthwise convolution over the last few tokens of
their sequence.

Source: 2412.06464 (the gated delta rule), 2406.06484, section 3.2 (chunks, and the triangular system).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrl.device.sharding import constrain, einsum, gather, per_shard
from jrl.models.adapters.quantized import gathered
from jrl.models.norm import rms_norm
from jrl.models.remat import product
from jrl.types import Array, PyTree

CHUNK = 64  # tokens of a triangular system, at most; its operations and memory grow with it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """The shape of linear attention, in the layers that have it."""

    key_heads: int  # of queries and keys; must divide value_heads
    value_heads: int  # of values and outputs
    key_dim: int  # entries of a head of queries and keys
    value_dim: int  # entries of a head of values
    taps: int = 4  # tokens that the convolution sees, its own included
    layers: tuple[bool, ...] = (True, True, True, False)  # which layers are linear: a cycle

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(f"Linear.key_heads must divide value_heads; got {self.key_heads} and {self.value_heads}")
        if self.taps < 2:
            raise ValueError(f"Linear.taps must be at least 2; got {self.taps}")
        if all(self.layers) or not any(self.layers):
            raise ValueError(f"Linear.layers must have both kinds of layers; got {self.layers}")

    def at(self, layer: int) -> bool:
        return self.layers[layer % len(self.layers)]


# name -> (shape, logical axes) of a layer's leaves. A convolution's last axis is its taps, the current token's last.
def leaves(cfg: Linear, width: int) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
    keys, values = (cfg.key_heads, cfg.key_dim), (cfg.value_heads, cfg.value_dim)
    key_axes, value_axes = ("kv_heads", "head_dim"), ("heads", "head_dim")
    return {
        "linear_q": ((width, *keys), ("embed", *key_axes)),
        "linear_k": ((width, *keys), ("embed", *key_axes)),
        "linear_v": ((width, *values), ("embed", *value_axes)),
        "linear_gate": ((width, *values), ("embed", *value_axes)),
        "linear_step": ((width, cfg.value_heads), ("embed", "heads")),
        "linear_beta": ((width, cfg.value_heads), ("embed", "heads")),
        "linear_o": ((*values, width), (*value_axes, "embed")),
        "conv_q": ((*keys, cfg.taps), (*key_axes, None)),
        "conv_k": ((*keys, cfg.taps), (*key_axes, None)),
        "conv_v": ((*values, cfg.taps), (*value_axes, None)),
        "linear_decay": ((cfg.value_heads,), ("heads",)),
        "linear_step_bias": ((cfg.value_heads,), ("heads",)),
        "linear_norm": ((cfg.value_dim,), ("head_dim",)),
    }


LEAVES = tuple(leaves(Linear(key_heads=1, value_heads=1, key_dim=2, value_dim=2), 1))


def chunk_of(length: int) -> int:
    """Returns the tokens of a chunk of rows of `length`: chunks as even as possible, with little padding."""
    return -(-length // -(-length // CHUNK))


def state_shapes(cfg: Linear, batch: int) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
    """Returns field of a State -> (shape, logical axes), of one layer."""
    before = (batch, cfg.taps - 1)
    return {
        "matrix": ((batch, cfg.value_heads, cfg.key_dim, cfg.value_dim), ("batch", "heads", None, None)),
        "tap_q": ((*before, cfg.key_heads, cfg.key_dim), ("batch", None, "kv_heads", None)),
        "tap_k": ((*before, cfg.key_heads, cfg.key_dim), ("batch", None, "kv_heads", None)),
        "tap_v": ((*before, cfg.value_heads, cfg.value_dim), ("batch", None, "heads", None)),
    }


class LayerInputs(NamedTuple):
    """The inputs of a layer's recurrence: projections of the tokens, and the weights that it applies itself."""

    q: Array  # [B, L, J, K], before the convolution, as k and v
    k: Array  # [B, L, J, K]
    v: Array  # [B, L, H, V]
    step: Array  # [B, L, H], before the softplus
    beta: Array  # [B, L, H], before the sigmoid
    conv_q: Array  # [J, K, taps]
    conv_k: Array  # [J, K, taps]
    conv_v: Array  # [H, V, taps]
    decay: Array  # [H]
    step_bias: Array  # [H]


def attend(
    h: Array,
    weights: PyTree,
    cfg: Linear,
    eps: float,
    *,
    segment: Array | None,
    state: Sequence[Array] | None,
    token_mask: Array | None,
) -> tuple[Array, tuple[Array, ...] | None]:
    """Returns the output of linear attention, [B, L, D], and the state after the tokens (None where `state` is).

    Args:
      h: [B, L, D]. weights: LEAVES of one layer. eps: of its norm.
      segment: as in `decoder.forward`; only without `state`. The tokens of a segment are adjacent and in order, and
        continuations follow the prefix that they see, with nothing else between.
      state: the fields of the State after the preceding tokens.
      token_mask: [B, L] bool, with `state`: the first tokens of a row, which the new state includes; None: all of them.
    """
    dtype, wide = h.dtype, jnp.promote_types(h.dtype, jnp.float32)
    shapes = leaves(cfg, h.shape[-1])
    heads = {"kv_heads": "kv_heads", "heads": "heads"}

    def project(name: str) -> Array:
        axes = shapes[name][1]
        matrix = gathered(weights, name, h, *axes)
        formula = "bld,dhk->blhk" if matrix.ndim == 3 else "bld,dh->blh"
        return product(einsum(formula, h, matrix, ("batch", None, *(heads.get(axis) for axis in axes[1:]))))

    keys, values, scalars = ("batch", None, "kv_heads", None), ("batch", None, "heads", None), ("batch", None, "heads")
    conv_q, conv_k, conv_v = (
        gather(weights[f"conv_{name}"].astype(wide), *shapes[f"conv_{name}"][1]) for name in "qkv"
    )
    decay, step_bias = (weights[name].astype(wide) for name in ("linear_decay", "linear_step_bias"))
    inputs = LayerInputs(
        project("linear_q"), project("linear_k"), project("linear_v"), project("linear_step"), project("linear_beta"),
        conv_q, conv_k, conv_v, decay, step_bias,
    )  # fmt: skip
    input_axes = LayerInputs(
        keys, keys, values, scalars, scalars,
        keys[2:] + (None,), keys[2:] + (None,), values[2:] + (None,), ("heads",), ("heads",),
    )  # fmt: skip
    fields = state_shapes(cfg, h.shape[0])
    if state is None:
        shape, state_axes = fields["matrix"]
        extra, run = [jnp.zeros(shape, wide), *([] if segment is None else [segment])], _from_zero_state
        extra_axes, outs = [state_axes, *(("batch", *[None] * (x.ndim - 1)) for x in extra[1:])], [values]
    else:
        states = [axes for _, axes in fields.values()]
        every = jnp.ones(h.shape[:2], bool) if token_mask is None else token_mask
        extra, run = [every, *state], _from_state
        extra_axes, outs = [("batch", None), *states], [values, *states]

    def shard(*arrays: Array) -> tuple[Array, ...]:
        return run(LayerInputs(*arrays[: len(inputs)]), *arrays[len(inputs) :], cfg=cfg)

    out, *new = per_shard(shard, (*inputs, *extra), (*input_axes, *extra_axes), outs)
    normed = rms_norm(out, weights["linear_norm"], eps).astype(dtype).astype(wide)
    gated = (normed * jax.nn.silu(project("linear_gate").astype(wide))).astype(dtype)
    o = gathered(weights, "linear_o", gated, *shapes["linear_o"][1])
    out = product(einsum("blhk,hkd->bld", constrain(gated, *values), o, ("batch", None, None)))
    return out, None if state is None else tuple(new)


def _from_zero_state(inputs: LayerInputs, zeros: Array, segment: Array | None = None, *, cfg: Linear) -> tuple[Array]:
    """Returns (o [B, L, H, V],) of sequences from their first token. zeros: [B, H, K, V], their state before it."""
    wide = inputs.decay.dtype
    if segment is None:
        segment = jnp.zeros((1, inputs.q.shape[1]), jnp.int32)
    before = _before(segment, cfg.taps)

    def convolve(x: Array, taps: Array) -> Array:
        x = x.astype(wide)
        out = x * taps[None, None, ..., -1]
        for d, (index, exists) in enumerate(before, 1):
            if index is None:  # a shift, cut off where a row is shorter than what the convolution sees
                past = jnp.pad(x, ((0, 0), (d, 0), (0, 0), (0, 0)))[:, : x.shape[1]]
            else:
                past = jnp.take_along_axis(x, index[..., None, None], axis=1)
            out = out + jnp.where(exists[..., None, None], past, 0) * taps[None, None, ..., -1 - d]
        return jax.nn.silu(out)

    g, b = _gates(inputs)
    q, k, v = convolve(inputs.q, inputs.conv_q), convolve(inputs.k, inputs.conv_k), convolve(inputs.v, inputs.conv_v)
    return (_in_chunks(q, k, v, g, b, segment, zeros)[0],)


def _before(segment: Array, taps: int) -> list[tuple[Array | None, Array]]:
    """Returns (index, exists) for the tokens 1, 2, ... taps - 1 before each token in its sequence. index: the earlier
    token's column in the row, [B, L] int32, or None if it is that many columns before; exists: [B, L] bool."""
    length = segment.shape[1]
    if segment.ndim == 2:
        back = lambda d: jnp.pad(segment, ((0, 0), (d, 0)))[:, :length]
        return [(None, (segment == back(d)) & (jnp.arange(length) >= d)[None]) for d in range(1, taps)]
    # The token before a continuation's first is the last of its prefix.
    sequence, prefix = segment[..., 0], segment[..., 1]
    column = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], sequence.shape)
    root = jax.lax.cummax(jnp.where(sequence == prefix, column, -1), axis=1)
    of_prefix = (
        (root >= 0) & (jnp.take_along_axis(sequence, jnp.maximum(root, 0), axis=1) == prefix) & (sequence != prefix)
    )
    follows = (sequence == jnp.pad(sequence, ((0, 0), (1, 0)))[:, :length]) & (column > 0)
    last = jnp.where(follows, column - 1, jnp.where(of_prefix, root, -1))
    past, index = [], column
    for _ in range(1, taps):
        index = jnp.where(index >= 0, jnp.take_along_axis(last, jnp.maximum(index, 0), axis=1), -1)
        past.append((jnp.maximum(index, 0), index >= 0))
    return past


def _from_state(
    inputs: LayerInputs, token_mask: Array, matrix: Array, tap_q: Array, tap_k: Array, tap_v: Array, *, cfg: Linear
) -> tuple[Array, ...]:
    """Returns (o [B, L, H, V], and the fields of the State after the unmasked tokens), continuing from the State with
    fields `matrix` and `tap_*`. token_mask: [B, L] bool, as in `attend`."""
    wide, length = inputs.decay.dtype, inputs.q.shape[1]
    count = token_mask.sum(1, dtype=jnp.int32)

    def convolve(x: Array, taps: Array, before: Array) -> tuple[Array, Array]:
        extended = jnp.concatenate([before, x.astype(before.dtype)], axis=1)
        out = sum(extended[:, i : i + length].astype(wide) * taps[None, None, ..., i] for i in range(cfg.taps))
        cut = lambda row, n: jax.lax.dynamic_slice_in_dim(row, n, cfg.taps - 1, 0)
        return jax.nn.silu(out), jax.vmap(cut)(extended, count)

    q, tap_q = convolve(inputs.q, inputs.conv_q, tap_q)
    k, tap_k = convolve(inputs.k, inputs.conv_k, tap_k)
    v, tap_v = convolve(inputs.v, inputs.conv_v, tap_v)
    g, b = _gates(inputs)
    # A masked token decays nothing and writes nothing.
    g, b = (jnp.where(token_mask[..., None], x, 0) for x in (g, b))
    out, after = _in_chunks(q, k, v, g, b, jnp.zeros((1, length), jnp.int32), matrix.astype(wide))
    return out, after.astype(matrix.dtype), tap_q, tap_k, tap_v


def _gates(inputs: LayerInputs) -> tuple[Array, Array]:
    """Returns (g, b) [B, L, H]: g = -exp(decay) softplus(step + step_bias), b = sigmoid(beta)."""
    wide = inputs.decay.dtype
    g = -jnp.exp(inputs.decay)[None, None] * jax.nn.softplus(inputs.step.astype(wide) + inputs.step_bias[None, None])
    return g, jax.nn.sigmoid(inputs.beta.astype(wide))


class Carry(NamedTuple):
    """How states pass through the N chunks, of C tokens each. R states are carried: the one after the last token of the
    newest prefix (or of a sequence without one) and, if there are continuations, the one after the last token."""

    seen: Array  # [N, B, C, C] bool, the tokens of its chunk that a token depends on, itself included
    begins: Array  # [N, B, R, C] bool, the state before the chunk that a token depends on
    ends: Array  # [N, B, R, C] bool, the token after which a state is carried on
    stays: Array  # [N, B, R, R] bool, on the diagonal: a state passes the chunk unchanged


def _carry(segment: Array) -> Carry:
    """Returns how states pass through chunks of segments [N, B, C] or [N, B, C, 2]."""
    continuations = segment.ndim == 4
    sequence, prefix = (segment[..., 0], segment[..., 1]) if continuations else (segment, segment)
    column = jnp.arange(sequence.shape[2])
    causal = (column[:, None] >= column[None, :])[None, None]
    seen = causal & (
        (sequence[..., :, None] == sequence[..., None, :]) | (prefix[..., :, None] == sequence[..., None, :])
    )
    # Of the token before each chunk; for the first chunk, of its own first token.
    sequence_before, prefix_before = (jnp.concatenate([x[:1, :, :1], x[:-1, :, -1:]]) for x in (sequence, prefix))
    goes_on = (sequence == sequence_before) & (sequence_before != prefix_before)
    root = jnp.where(sequence == prefix, column[None, None], -1).max(
        -1, keepdims=True
    )  # the last token outside continuations
    begins, ends = [(prefix == prefix_before) & ~goes_on], [column[None, None] == root]
    if continuations:
        begins, ends = [*begins, goes_on], [*ends, jnp.broadcast_to(column[None, None] == column[-1], sequence.shape)]
    first = jnp.arange(len(ends)) == 0
    stays = (first[:, None] & first[None])[None, None] & (root < 0)[..., None]
    return Carry(seen, jnp.stack(begins, 2), jnp.stack(ends, 2), stays)


def _in_chunks(q: Array, k: Array, v: Array, g: Array, b: Array, segment: Array, state: Array) -> tuple[Array, Array]:
    """Returns (o [B, L, H, V], the state [B, H, K, V] after the last token, or with continuations the newest prefix).

    Args:
      q, k: [B, L, J, K], J dividing H: every H / J heads share one. v: [B, L, H, V]. g, b: [B, L, H].
      segment: [B, L] or [B, L, 2] int32 as in `attend`, or [1, L] for all rows.
      state: [B, H, K, V] before the first token, of its sequence.
    """
    (batch, length, heads, _), (key_heads, key_dim) = v.shape, k.shape[2:]
    split = (key_heads, heads // key_heads)
    unit = lambda x: x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6)
    q, k = unit(q) * key_dim**-0.5, unit(k)
    size = chunk_of(length)
    chunks = -(-length // size)

    def cut(x: Array, mode: str = "constant") -> Array:  # [B, L, ...] -> [N, B, C, ...]
        x = jnp.pad(x, ((0, 0), (0, chunks * size - length), *[(0, 0)] * (x.ndim - 2)), mode=mode)
        return jnp.moveaxis(x.reshape(x.shape[0], chunks, size, *x.shape[2:]), 1, 0)

    # The last chunk's padding belongs to its last sequence, decays nothing and writes nothing.
    carried = _carry(cut(segment, "edge"))
    q, k = (jnp.moveaxis(cut(x), 3, 2) for x in (q, k))  # [N, B, J, C, K]
    v, g, b = (x.reshape(batch, length, *split, -1) for x in (v, g, b))
    v, g, b = (jnp.moveaxis(cut(x), 2, 4) for x in (v, g, b))  # [N, B, J, H / J, C, V or 1]
    of_heads = lambda x: x[:, :, None, None]

    seen = of_heads(carried.seen)
    earlier, path = jnp.tril(seen, -1), seen.astype(g.dtype)
    # Sums of g between two tokens are added directly: the difference of two long sums would be less exact.
    share = jnp.where(seen, jnp.exp(path @ jnp.where(earlier, g, 0)), 0)  # [N, B, J, H / J, t, m]
    since = jnp.exp(path @ g)
    due, reads = b * v, b * since * k[:, :, :, None]
    if size > 1:
        system = jnp.where(earlier, b * share * (k @ k.swapaxes(-1, -2))[:, :, :, None], 0)
        both = jnp.concatenate([due, reads], -1)
        both = jax.lax.linalg.triangular_solve(system, both, left_side=True, lower=True, unit_diagonal=True)
        due, reads = both[..., : due.shape[-1]], both[..., due.shape[-1] :]
    weights = share * (q @ k.swapaxes(-1, -2))[:, :, :, None]
    begins = of_heads(carried.begins).astype(g.dtype)[..., None]  # [N, B, 1, 1, R, C, 1]
    begun = begins * since[:, :, :, :, None]
    at_ends = lambda x: jnp.where(of_heads(carried.ends)[..., None], x[:, :, :, :, None], 0).sum(-2)
    left = at_ends(share)[..., None]  # [N, B, J, H / J, R, C, 1], of what a token writes into a state
    # [N, B, J, H / J, R, R], of a state in the next.
    stays = at_ends(jnp.moveaxis(begun[..., 0], 4, 5)) + of_heads(carried.stays).astype(g.dtype)

    def step(carry: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        """Returns the carried states, [B, J, H / J, R, K, V], after a chunk, and the chunk's o."""
        q, k, due, reads, weights, begins, begun, left, stays = xs
        due = due - (begins * jnp.einsum("bjitk,bjirkv->bjirtv", reads, carry)).sum(3)
        out = weights @ due + (begun * jnp.einsum("bjtk,bjirkv->bjirtv", q, carry)).sum(3)
        carry = (stays[..., None, None] * carry[:, :, :, None]).sum(4)
        return carry + jnp.einsum("bjtk,bjirtv->bjirkv", k, left * due[:, :, :, None]), out

    xs = (q, k, due, reads, weights, begins, begun, left, stays)
    state = jnp.repeat(state.reshape(batch, *split, 1, key_dim, -1), begun.shape[4], 3)
    if chunks == 1:
        state, out = step(state, jax.tree.map(lambda x: x[0], xs))
        out = out[None]
    else:
        state, out = jax.lax.scan(step, state, xs)
    out = jnp.moveaxis(out, 4, 2).reshape(chunks, batch, size, heads, -1)
    out = jnp.moveaxis(out, 0, 1).reshape(batch, chunks * size, heads, -1)[:, :length]
    return out, state[:, :, :, 0].reshape(batch, heads, key_dim, -1)
