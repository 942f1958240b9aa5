"""Linear attention by the gated delta rule: a layer holds a matrix for each head instead of keys and values.

    S_t = a_t S_{t-1} + b_t k_t (v_t - a_t k_t S_{t-1})^T        o_t = q_t S_t        a_t = exp(g_t), b_t in (0, 1)

Many tokens are computed at once. With D_tm the sum of g after m up to t, and sums over the tokens m before t of the
same sequence, the corrections u_t that enter S solve a unit lower triangular system of the length of the row:

    u_t + b_t sum_m exp(D_tm) (k_t k_m) u_m = b_t (v_t - exp(D_t) k_t S_0)
    o_t = exp(D_t) q_t S_0 + sum_{m <= t} exp(D_tm) (q_t k_m) u_m

which is the recurrence, written out. Which m are before t is what attention's mask says: packed sequences, and branches
that share a trunk, need no states of their own. Before it queries, keys and values pass a causal convolution over the
last few tokens of their sequence, channel by channel.

Source: 2412.06464 (the gated delta rule), 2406.06484, section 3.2 (the triangular system). Theirs is in chunks; ours is
one chunk, whose arrays have the size of attention's scores.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jrl.models.norm import rms_norm
from jrl.models.quantised import gathered
from jrl.sharding import constrain, einsum, gather, per_shard
from jrl.types import Array, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """The linear attention of layers that have it."""

    key_heads: int  # of queries and keys; must divide value_heads
    value_heads: int
    key_dim: int  # entries of a head of queries and keys
    value_dim: int
    taps: int = 4  # tokens that the convolution sees, its own included
    layers: tuple[bool, ...] = (True, True, True, False)  # which layers are linear: a cycle

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(f"Linear.key_heads must divide value_heads; got {self.key_heads} and {self.value_heads}")
        if self.taps < 2:
            raise ValueError(f"Linear.taps must be at least 2; got {self.taps}")
        if all(self.layers) or not any(self.layers):
            raise ValueError(f"Linear.layers is a cycle of both kinds of layers; got {self.layers}")

    def at(self, layer: int) -> bool:
        return self.layers[layer % len(self.layers)]


# name -> (shape, logical axes) of a layer's leaves. The convolution's last axis is the tokens it sees, its own last.
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


def state_shapes(cfg: Linear, batch: int) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
    """Returns field of a State -> (shape, logical axes), of one layer."""
    before = (batch, cfg.taps - 1)
    return {
        "matrix": ((batch, cfg.value_heads, cfg.key_dim, cfg.value_dim), ("batch", "heads", None, None)),
        "tap_q": ((*before, cfg.key_heads, cfg.key_dim), ("batch", None, "kv_heads", None)),
        "tap_k": ((*before, cfg.key_heads, cfg.key_dim), ("batch", None, "kv_heads", None)),
        "tap_v": ((*before, cfg.value_heads, cfg.value_dim), ("batch", None, "heads", None)),
    }


def attend(
    h: Array,
    weights: PyTree,
    cfg: Linear,
    eps: float,
    *,
    positions: Array,
    segment: Array | None,
    mask: Array | None,
    kept: Sequence[Array] | None,
    counted: Array | None,
) -> tuple[Array, tuple[Array, ...] | None]:
    """Returns what linear attention makes of h, [B, L, D], and what it keeps of the tokens seen (None where `kept` is).

    Args:
      h: [B, L, D]. weights: LEAVES of one layer. eps: of its norm.
      positions: [B, L] int32, of a token in its sequence. segment: as `decoder.forward` takes it, without `kept`.
      mask: [B, L, L] bool, the tokens that a token sees, itself included; None where `kept` is given.
      kept: the fields of the State of the tokens before these.
      counted: [B, L] bool, with `kept`: the first tokens of a row, that what is kept speaks of; None: all of them.
    """
    dtype, wide = h.dtype, jnp.promote_types(h.dtype, jnp.float32)
    shapes = leaves(cfg, h.shape[-1])
    heads = {"kv_heads": "kv_heads", "heads": "heads"}

    def project(name: str) -> Array:
        axes = shapes[name][1]
        matrix = gathered(weights, name, h, *axes)
        formula = "bld,dhk->blhk" if matrix.ndim == 3 else "bld,dh->blh"
        return einsum(formula, h, matrix, ("batch", None, *(heads.get(axis) for axis in axes[1:])))

    keys, values, scalars = ("batch", None, "kv_heads", None), ("batch", None, "heads", None), ("batch", None, "heads")
    conv = [gather(weights[f"conv_{name}"].astype(wide), *shapes[f"conv_{name}"][1]) for name in "qkv"]
    own = [weights[name].astype(wide) for name in ("linear_decay", "linear_step_bias")]
    args = [project("linear_q"), project("linear_k"), project("linear_v"), project("linear_step"),
            project("linear_beta"), *conv, *own]  # fmt: skip
    ins = [keys, keys, values, scalars, scalars, keys[2:] + (None,), keys[2:] + (None,), values[2:] + (None,),
           ("heads",), ("heads",)]  # fmt: skip
    outs = [values]
    if kept is None:
        extra, run = [mask, positions, *([] if segment is None else [segment])], _whole
        ins += [("batch", *[None] * (x.ndim - 1)) for x in extra]
    else:
        states = [axes for _, axes in state_shapes(cfg, h.shape[0]).values()]
        every = jnp.ones_like(positions, bool) if counted is None else counted
        extra, run = [every, *kept], _after
        ins += [("batch", None), *states]
        outs += states
    out, *new = per_shard(functools.partial(run, cfg=cfg), (*args, *extra), ins, outs)
    normed = rms_norm(out, weights["linear_norm"], eps).astype(dtype).astype(wide)
    gated = (normed * jax.nn.silu(project("linear_gate").astype(wide))).astype(dtype)
    o = gathered(weights, "linear_o", gated, *shapes["linear_o"][1])
    out = einsum("blhk,hkd->bld", constrain(gated, *values), o, ("batch", None, None))
    return out, None if kept is None else tuple(new)


def _whole(
    q: Array, k: Array, v: Array, step: Array, beta: Array, conv_q: Array, conv_k: Array, conv_v: Array,
    decay: Array, bias: Array, mask: Array, positions: Array, segment: Array | None = None, *, cfg: Linear,
) -> tuple[Array]:  # fmt: skip
    """Returns (o [B, L, H, V],) of whole sequences, from a state of zeros each."""
    wide = decay.dtype
    trees = segment is not None and segment.ndim == 3
    if trees:
        # The token d before in a branch may lie in its trunk: the one that is seen and has that position.
        at = lambda d: mask & (positions[:, None, :] == positions[:, :, None] - d)
        found = [at(d) for d in range(1, cfg.taps)]
        index, there = [x.argmax(-1) for x in found], [x.any(-1) for x in found]
        before = lambda x, d: jnp.take_along_axis(x, index[d - 1][..., None, None], axis=1)
    else:
        # Cut off where a row is shorter than what the convolution sees.
        before_mask = lambda d: jnp.pad(jnp.diagonal(mask, -d, 1, 2), ((0, 0), (d, 0)))[:, : mask.shape[1]]
        there = [before_mask(d) for d in range(1, cfg.taps)]
        before = lambda x, d: jnp.pad(x, ((0, 0), (d, 0), (0, 0), (0, 0)))[:, : x.shape[1]]

    def convolve(x: Array, taps: Array) -> Array:
        x = x.astype(wide)
        out = x * taps[None, None, ..., -1]
        for d in range(1, cfg.taps):
            out = out + jnp.where(there[d - 1][..., None, None], before(x, d), 0) * taps[None, None, ..., -1 - d]
        return jax.nn.silu(out)

    g, b = _gates(step, beta, decay, bias)
    own = segment[..., 0] if trees else segment
    same = mask if segment is None else mask & (own[:, :, None] == own[:, None, :])
    later = jnp.tril(jnp.ones(mask.shape[1:], bool), -1)[None]
    # Sums of g between two tokens, added up one after the other: a difference of two long sums would be less exact.
    inside = jnp.where((later & same)[:, :, :, None], g[:, :, None], 0)  # [B, t, m, H]: g_t for every m before t
    sums = jnp.cumsum(inside, axis=1)
    if trees:
        # From m in the trunk: what is left of the trunk after m, and then what the branch has up to t.
        rest = jnp.einsum("bnm,bnh->bmh", (later & same).astype(wide), g)
        begun = jnp.einsum("btn,bnh->bth", same.astype(wide), g)
        sums = jnp.where(same[..., None], sums, begun[:, :, None] + rest[:, None])
    q, k, v = convolve(q, conv_q), convolve(k, conv_k), convolve(v, conv_v)
    return (_solve(q, k, v, b, sums, mask, None)[0],)


def _after(
    q: Array, k: Array, v: Array, step: Array, beta: Array, conv_q: Array, conv_k: Array, conv_v: Array,
    decay: Array, bias: Array, counted: Array, state: Array, tap_q: Array, tap_k: Array, tap_v: Array, *, cfg: Linear,
) -> tuple[Array, ...]:  # fmt: skip
    """Returns (o [B, L, H, V], state, taps of q, k and v) of tokens that follow those that are kept."""
    wide, length = decay.dtype, q.shape[1]
    count = counted.sum(1, dtype=jnp.int32)

    def convolve(x: Array, taps: Array, kept: Array) -> tuple[Array, Array]:
        line = jnp.concatenate([kept, x.astype(kept.dtype)], axis=1)
        out = sum(line[:, i : i + length].astype(wide) * taps[None, None, ..., i] for i in range(cfg.taps))
        cut = lambda line, n: jax.lax.dynamic_slice_in_dim(line, n, cfg.taps - 1, 0)
        return jax.nn.silu(out), jax.vmap(cut)(line, count)

    (q, tap_q), (k, tap_k), (v, tap_v) = (
        convolve(*x) for x in ((q, conv_q, tap_q), (k, conv_k, tap_k), (v, conv_v, tap_v))
    )
    g, b = _gates(step, beta, decay, bias)
    # A token that does not count decays nothing and writes nothing.
    g, b = (jnp.where(counted[..., None], x, 0) for x in (g, b))
    later = jnp.tril(jnp.ones((length, length), bool), -1)[None, :, :, None]
    sums = jnp.cumsum(jnp.where(later, g[:, :, None], 0), axis=1)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (q.shape[0], length, length))
    out, state = _solve(q, k, v, b, sums, mask, (state, jnp.cumsum(g, axis=1)))
    return out, state, tap_q, tap_k, tap_v


def _gates(step: Array, beta: Array, decay: Array, bias: Array) -> tuple[Array, Array]:
    """Returns (g, b) [B, L, H]: g = -exp(decay) softplus(step + bias), b = sigmoid(beta)."""
    wide = decay.dtype
    g = -jnp.exp(decay)[None, None] * jax.nn.softplus(step.astype(wide) + bias[None, None])
    return g, jax.nn.sigmoid(beta.astype(wide))


def _solve(
    q: Array, k: Array, v: Array, b: Array, sums: Array, mask: Array, begun: tuple[Array, Array] | None
) -> tuple[Array, Array | None]:
    """Returns (o [B, L, H, V], the state after the last token; None where it began nowhere).

    Args:
      q, k: [B, L, J, K], J dividing H: every H / J heads share one. v: [B, L, H, V]. b: [B, L, H].
      sums: [B, L, L, H], D_tm. mask: [B, L, L] bool.
      begun: state [B, H, K, V] before the first token, and D_t [B, L, H]; None: zeros.
    """
    group = v.shape[2] // k.shape[2]
    unit = lambda x: x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6)
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    q, k = (jnp.repeat(x, group, axis=2).swapaxes(1, 2) for x in (q, k))  # [B, H, L, K]
    v, b, seen = v.swapaxes(1, 2), b.swapaxes(1, 2), mask[:, None]
    # Safe on both sides: a pair that does not see each other may have any sum.
    share = jnp.where(seen, jnp.exp(jnp.where(seen, jnp.moveaxis(sums, 3, 1), 0)), 0)  # [B, H, t, m]
    due = v
    if begun is not None:
        state, since = begun[0].astype(v.dtype), jnp.exp(begun[1].swapaxes(1, 2))[..., None]
        due = v - since * jnp.einsum("bhtk,bhkv->bhtv", k, state)
    due = b[..., None] * due
    if v.shape[2] > 1:
        system = jnp.tril(b[..., None] * share * jnp.einsum("bhtk,bhmk->bhtm", k, k), -1)
        due = jax.lax.linalg.triangular_solve(system, due, left_side=True, lower=True, unit_diagonal=True)
    out = jnp.einsum("bhtm,bhmv->bhtv", share * jnp.einsum("bhtk,bhmk->bhtm", q, k), due)
    if begun is None:
        return out.swapaxes(1, 2), None
    out = out + since * jnp.einsum("bhtk,bhkv->bhtv", q, state)
    after = since[:, :, -1:] * state + jnp.einsum("bhm,bhmk,bhmv->bhkv", share[:, :, -1], k, due)
    return out.swapaxes(1, 2), after.astype(begun[0].dtype)
