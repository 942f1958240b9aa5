"""A router of tokens over experts: where each goes, and the two terms that keep a router healthy.

Logits are [..., experts]. Sums only: numerators stay apart from their denominators, the number of tokens, until the
end of an optimizer step, so that nothing depends on packing, micro-batches or the mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

Array = jax.Array


def route(
    logits: Array, per_token: int, softmax: Literal["chosen", "all"], recorded: Array | None = None
) -> tuple[Array, Array]:
    """Returns (weights, ids) of the experts that each token goes to, the likeliest first, [..., per_token].

        all:     exp(z_i) / sum over all experts          (OLMoE; Qwen3-MoE without norm_topk_prob)
        chosen:  exp(z_i) / sum over the chosen           (Mixtral; Qwen3-MoE with norm_topk_prob)

    A softmax over all, divided by what the chosen have of it, is the softmax over the chosen. Of equal logits the
    expert with the lower number comes first. Source: 2401.04088, 2409.02060, 2505.09388.

    Args:
      recorded: [..., per_token], routes that are replayed where they are known: the weights are of these experts'
        logits, which the gradient goes through. Source: rollout routing replay, 2510.11370. None: none is.
    """
    top, ids = jax.lax.top_k(logits, per_token)
    if recorded is not None:
        ids = replayed(ids, recorded)
        # A sum over one number: a gather of single numbers, and the scatter of its gradient, are slow on TPUs.
        top = jnp.where(_one_hot(ids, logits.shape[-1]), logits[..., None, :], 0).sum(-1)
    if softmax == "chosen":
        return jax.nn.softmax(top, axis=-1), ids
    return jnp.exp(top - jax.nn.logsumexp(logits, axis=-1, keepdims=True)), ids


def route_dtype(experts: int) -> jnp.dtype:
    """Returns the dtype that routes over so many experts are recorded in. Its largest value stands for "not recorded"
    and is no expert."""
    return jnp.dtype(jnp.uint8 if experts < 256 else jnp.uint16)


def not_recorded(dtype: jnp.dtype) -> int:
    """Returns the value that stands in recorded routes where none is known."""
    return int(jnp.iinfo(dtype).max)


def replayed(ids: Array, recorded: Array) -> Array:
    """Returns recorded routes, and `ids` where none is recorded, [..., per_token] in the dtype of `ids`."""
    return jnp.where(recorded == not_recorded(recorded.dtype), ids, recorded.astype(ids.dtype))


def by_token(routes: Array) -> Array:
    """Returns routes [layers, B, L, k] as [B, L, layers * k]: the last dimension is then wide enough for the tiles that
    accelerators lay arrays out in."""
    return jnp.moveaxis(routes, 0, 2).reshape(*routes.shape[1:3], -1)


def by_layer(routes: Array, layers: int) -> Array:
    """Returns routes [B, L, layers * k] as [layers, B, L, k]."""
    return jnp.moveaxis(routes.reshape(*routes.shape[:2], layers, -1), 2, 0)


def visits(logits: Array, per_token: int, recorded: Array | None = None) -> Array:
    """Returns [..., experts] bool: does the token go to the expert? recorded: as `route` has it."""
    _, ids = jax.lax.top_k(logits, per_token)
    if recorded is not None:
        ids = replayed(ids, recorded)
    return _one_hot(ids, logits.shape[-1]).any(-2)


def _one_hot(ids: Array, experts: int) -> Array:
    """Returns which expert every id is, [..., k, experts] bool."""
    each = jnp.arange(experts, dtype=ids.dtype).reshape((1,) * ids.ndim + (-1,))
    return ids[..., None] == each


def balance_sum(
    logits: Array,
    mask: Array,
    segment: Array,
    *,
    num_segments: int,
    per_token: int,
    summed: Callable[[Array], Array] = lambda x: x,
) -> Array:
    """Returns the sum over tokens of the load-balancing loss, a sequence at a time: [].

        sum over sequences of n * sum_e f_e P_e,    f_e = E / (K n) * (visits of e),    P_e = mean softmax_e

    n is the sequence's tokens in the mask, E the experts, K those of a token. Divided by the number of tokens it is 1
    where load is even, and E / K where K experts have everything. Gradients go through P alone. The usual product of
    means over a batch is no sum over micro-batches; a sequence is in one micro-batch whole.

    Args:
      logits: [R, L, experts] of one layer. mask: [R, L] bool. segment: [R, L] int32, place of the sequence in its row.
      summed: adds sums over a sequence's tokens, [R, S, ...], up where its row is divided over devices.

    Source: 2101.03961, equations 4 to 6; a sequence at a time as 2412.19437, equations 17 to 20, weighted by n.
    """
    place = jnp.arange(num_segments, dtype=segment.dtype)
    member = ((segment[..., None] == place[None, None]) & mask[..., None]).astype(logits.dtype)  # [R, L, S]
    inside = lambda x: jnp.where(mask[..., None], x, 0)
    count = jnp.einsum("rls,rle->rse", member, inside(visits(logits, per_token)).astype(logits.dtype))
    share = jnp.einsum("rls,rle->rse", member, inside(jax.nn.softmax(jnp.where(mask[..., None], logits, 0))))
    count, share = summed(count), summed(share)
    tokens = jnp.maximum(summed(member.sum(1)), 1)[..., None]  # [R, S, 1]
    return (count * share / tokens).sum() * (logits.shape[-1] / per_token)


def z_sum(logits: Array, mask: Array) -> Array:
    """Returns the sum over tokens of logsumexp(z)^2, which keeps logits small: []. Source: 2202.08906, equation 5."""
    return (jax.nn.logsumexp(jnp.where(mask[..., None], logits, 0), axis=-1) ** 2 * mask).sum()


def entropy_sum(logits: Array, mask: Array) -> Array:
    """Returns the sum over tokens of the entropy of softmax(z) over all experts, nats: []."""
    logprobs = jax.nn.log_softmax(jnp.where(mask[..., None], logits, 0))
    return (-(jnp.exp(logprobs) * logprobs).sum(-1) * mask).sum()


def load(logits: Array, mask: Array, per_token: int, recorded: Array | None = None) -> Array:
    """Returns how many tokens go to each expert, [experts] in the dtype of `logits`. logits: [R, L, experts].
    recorded: as `route` has it."""
    return jnp.where(mask[..., None], visits(logits, per_token, recorded), False).sum((0, 1)).astype(logits.dtype)


def changed_sum(logits: Array, mask: Array, recorded: Array) -> Array:
    """Returns how many tokens would go to another set of experts than the recorded one, [] in the dtype of `logits`. A
    token of which no route is recorded counts as one that would not.

    Args:
      logits: [R, L, experts]. mask: [R, L] bool. recorded: [R, L, k].
    """
    per_token = recorded.shape[-1]
    changed = (visits(logits, per_token) != visits(logits, per_token, recorded)).any(-1)
    return (mask & changed).sum().astype(logits.dtype)
