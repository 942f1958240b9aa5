"""Mixture of experts: in a sparse layer a router sends every token to a few of the layer's MLPs. No token is dropped.

    weights, ids = top-k of softmax(x router)          y = sum_i weights_i * expert_ids_i(x)

Each batch shard sorts its own tokens by expert and multiplies them with `jax.lax.ragged_dot`. A token's result does not
depend on the other tokens. Experts are sharded by width over `tensor`, like any MLP, and by index over `expert`
(`expert_group`); see docs/decisions/mixture-of-experts.md.

A sparse layer may also have a shared expert, which every token goes through; `decoder` adds both outputs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jrl.device.sharding import EXPERT, axis_size, einsum, gather, mapped, per_shard
from jrl.models.adapters.quantized import gathered
from jrl.models.contract import ADAPTER
from jrl.models.expert_group import Grouped, Multiply, mix_group
from jrl.models.grouped_product import grouped_product
from jrl.models.remat import product
from jrl.ops.router import route
from jrl.types import Array, PyTree

# Leaves of a sparse layer, in place of an MLP's or in addition; some exist only with an option.
LEAVES = ("router", "expert_gate", "expert_up", "expert_down", "router_bias", "expert_gate_bias", "expert_up_bias",
          "expert_down_bias", "router_norm", "expert_scale", "shared_expert_gate", "expert_norm", "expert_out_norm",
          "shared_expert_norm")  # fmt: skip
# The LEAVES that the kernel for one token per row reads from their stack (fused_experts.py), and the leaf that then
# holds them.
KERNEL_LEAVES = ("expert_gate", "expert_up", "expert_down", "expert_gate_bias", "expert_up_bias")
KERNEL = "expert_kernel"
# Leaves that the kernel reads with their inputs last: the last dimension is padded to a multiple of 128, and a device's
# share of the width is often not one.
KERNEL_SWAPPED = ("expert_gate", "expert_up")
GAIN = 1.702  # in the sigmoid gate of a clamped expert


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """The gated MLPs of sparse layers."""

    count: int  # experts per layer
    per_token: int  # experts that a token goes through
    width: int  # hidden units of each
    softmax: Literal["chosen", "all"] = "chosen"  # a token's weights: softmax over its experts, or over all
    layers: tuple[bool, ...] = (True,)  # which layers are sparse: a cycle
    reads: Literal["input", "stream"] = "input"  # of the router: the experts' input, or the stream as Gemma 4 norms it
    scaled: bool = False  # each expert's output is multiplied by a learned scalar
    # An MLP that every token goes through, in addition to the experts. gated: multiplied by a sigmoid of its input, as
    # Qwen's shared expert; normed: it and the experts have separate norms, as in Gemma 4.
    shared_expert: Literal["gated", "normed"] | None = None
    bias: bool = False  # of the router and of every product
    clamp: float | None = None  # g = min(gate, clamp), u = up within +-clamp: g sigmoid(1.702 g) (u + 1), as in gpt-oss

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise ValueError(
                f"Experts.per_token must be between 1 and count; got per_token={self.per_token}, count={self.count}"
            )
        if self.width < 1:
            raise ValueError(f"Experts.width must be at least 1; got {self.width}")
        if self.clamp is not None and not self.clamp > 0:
            raise ValueError(f"Experts.clamp must be above 0, or None for no clamp; got {self.clamp}")
        if not any(self.layers):
            raise ValueError(f"Experts.layers must have at least one sparse layer; got {self.layers}")

    def sparse(self, layer: int) -> bool:
        return self.layers[layer % len(self.layers)]


# (h [B, L, D], weights of each token's experts [B, L, k], their ids [B, L, k]) -> output of `mix` before down's bias
Kernel = Callable[[Array, Array, Array], Array]


class Routing(NamedTuple):
    """A router's output for each token."""

    logits: Array  # [B, L, experts] float32 or wider
    ids: Array  # [B, L, k] int32, its experts


def mix(
    h: Array,
    weights: PyTree,
    cfg: Experts,
    activation: Callable[[Array], Array],
    seen: Array | None = None,
    recorded: Array | None = None,
    kernel: Kernel | None = None,
) -> tuple[Array, Routing]:
    """Returns the output of the experts for h, [B, L, D], and the routing.

    Args:
      h: [B, L, D]. weights: LEAVES of one layer: router [D, experts], expert_gate and expert_up [experts, D, width],
        expert_down [experts, width, D]; with cfg.bias a bias for each, [experts] and [experts, width] or [experts, D];
        with cfg.scaled expert_scale [experts].
      seen: [B, L, D], the router's input; None: h.
      recorded: [B, L, k], routes to replay (`ops.router.route`); None: all are computed.
      kernel: computes the experts' products, bound to its KERNEL_LEAVES; None: XLA computes them.
    """
    # The router is in float32 or wider: a rounding difference may route a token differently in learner and sampler.
    seen, wide = h if seen is None else seen, jnp.promote_types(h.dtype, jnp.float32)
    router = gather(weights["router"].astype(wide), "embed", "all_experts")
    logits = einsum("bld,de->ble", seen.astype(wide), router, ("batch", None, None))
    if cfg.bias:
        logits = logits + weights["router_bias"][None, None].astype(wide)
    rows = ("batch", None, None)
    scales = [gather(weights["expert_scale"].astype(wide), "all_experts")] if cfg.scaled else []
    routes = [] if recorded is None else [recorded]

    def chosen(logits: Array, *optional: Array) -> tuple[Array, Array]:
        *replayed, scale = optional if cfg.scaled else (*optional, None)
        share, ids = route(logits, cfg.per_token, cfg.softmax, *replayed)
        return (share if scale is None else share * scale[ids]), ids

    ins = (rows, *[rows] * len(routes), *[(None,)] * len(scales))
    share, ids = per_shard(chosen, (logits, *routes, *scales), ins, (rows, rows))
    out = _products(h, share, ids, weights, cfg, activation) if kernel is None else kernel(h, share, ids)
    if not cfg.bias:
        return out, Routing(logits, ids)
    # Added after the sum over `tensor`: before it, every shard would add the output bias.
    visited = ids[..., None] == jnp.arange(cfg.count, dtype=ids.dtype).reshape(1, 1, 1, -1)
    expert_share = jnp.where(visited, share[..., None], 0).sum(-2).astype(h.dtype)
    bias = gather(weights["expert_down_bias"], "all_experts", "norm").astype(h.dtype)
    return out + einsum("ble,ed->bld", expert_share, bias, rows), Routing(logits, ids)


def _products(
    h: Array, share: Array, ids: Array, weights: PyTree, cfg: Experts, activation: Callable[[Array], Array]
) -> Array:
    """Returns the weighted sum of each token's experts, [B, L, D], without the bias of `down`.

    Args: as for `mix`; share: [B, L, k], weights of the token's experts. ids: [B, L, k] int32, the experts.
    """
    rows = ("batch", None, None)
    gate, up = (gathered(weights, f"expert_{name}", h, "experts", "embed", "mlp") for name in ("gate", "up"))
    down = gathered(weights, "expert_down", h, "experts", "mlp", "embed")
    inner = ("gate", "up") if cfg.bias else ()
    biases = [gather(weights[f"expert_{name}_bias"], "experts", "mlp").astype(h.dtype) for name in inner]
    low_rank, adapter_axes = _adapters(weights.get(ADAPTER, {}), h.dtype)
    multiply = functools.partial(_by_expert, cfg=cfg, activation=activation, adapted=tuple(low_rank))
    mix_shard = _mix_shard if axis_size(EXPERT) == 1 else mix_group
    return mapped(
        functools.partial(mix_shard, multiply=multiply, count=cfg.count),
        (h, share, ids, gate, up, down, *biases, *itertools.chain(*low_rank.values())),
        (
            *(rows, rows, rows, ("experts", None, "mlp"), ("experts", None, "mlp"), ("experts", "mlp", None)),
            *(*[("experts", "mlp")] * len(biases), *adapter_axes),
        ),
        rows,
        summed="mlp",
    )


def _adapters(adapters: PyTree, dtype: Any) -> tuple[dict[str, tuple[Array, Array]], list[tuple[str | None, ...]]]:
    """Returns (matrix -> a [experts, in, r] and b [experts, r, out]) of the matrices with adapters, and their logical
    axes."""
    low_rank, logical_axes = {}, []
    for name, (into, out) in {"gate": ("embed", "mlp"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}.items():
        if f"expert_{name}" in adapters:
            a, b = (adapters[f"expert_{name}"][key].astype(dtype) for key in "ab")
            low_rank[name] = gather(a, "experts", into, "rank"), gather(b, "experts", "rank", out)
            cut = lambda axis: "mlp" if axis == "mlp" else None
            logical_axes += [("experts", cut(into), None), ("experts", None, cut(out))]
    return low_rank, logical_axes


def _mix_shard(h: Array, share: Array, ids: Array, *weights: Array, multiply: Multiply, count: int) -> Array:
    """Returns one batch shard's output, from its share of every expert's width, without the bias of `down`.

    Args: as for `mix_group`, with the weights of all experts.
    """
    x, per_token = h.reshape(-1, h.shape[-1]), share.shape[-1]
    expert = ids.reshape(-1)
    order = jnp.argsort(expert, stable=True)
    back = jnp.argsort(order)
    sizes = (expert[:, None] == jnp.arange(count, dtype=expert.dtype)[None]).sum(0, dtype=jnp.int32)
    copies = jnp.broadcast_to(x[:, None], (len(x), per_token, x.shape[1])).reshape(-1, x.shape[1])
    grouped = lambda x, matrices: grouped_product(x, matrices, sizes)
    outputs = multiply(permute(copies, order, back), weights, grouped, lambda: expert[order], product)
    outputs = permute(outputs, back, order).reshape(len(x), per_token, -1)
    return (outputs * share.reshape(len(x), -1, 1).astype(outputs.dtype)).sum(1).reshape(h.shape)


def _by_expert(
    x: Array,
    weights: tuple[Array, ...],
    grouped: Grouped,
    expert: Callable[[], Array],
    each: Callable[[Array], Array],
    *,
    cfg: Experts,
    activation: Callable[[Array], Array],
    adapted: tuple[str, ...],
) -> Array:
    """Returns the outputs of experts for rows sorted by expert, without the bias of `down`: [rows, D].

    Args:
      x: [rows, D]. weights: gate, up, down; with cfg.bias the biases of gate and up; then a and b of each matrix in
        `adapted`. If an adapter's inputs are sharded, its output is a partial sum, like that of the matrix.
      grouped: (rows, matrices of the device's experts) -> each row times its expert's.
      expert: returns the expert of every row, its index among the device's.
      each: applied to the result of each product.
    """
    gate, up, down, *optional = weights
    biases, low_rank = optional[: 2 * cfg.bias], optional[2 * cfg.bias :]
    pairs = dict(zip(adapted, zip(low_rank[::2], low_rank[1::2])))

    def multiply(x: Array, matrix: Array, name: str, *bias: Array) -> Array:
        y = grouped(x, matrix)
        if name in pairs:
            a, b = pairs[name]
            y = y + grouped(grouped(x, a), b)
        return each(y + bias[0][expert()] if bias else y)

    inner = gated(multiply(x, gate, "gate", *biases[:1]), multiply(x, up, "up", *biases[1:]), activation, cfg.clamp)
    return multiply(inner, down, "down")


def gated(gate: Array, up: Array, activation: Callable[[Array], Array], clamp: float | None) -> Array:
    """Returns an expert's input to `down`, from its products with gate and up."""
    if clamp is None:
        return activation(gate) * up
    gate, up = jnp.minimum(gate, clamp), jnp.clip(up, -clamp, clamp)
    return gate * jax.nn.sigmoid(GAIN * gate) * (up + 1)


@jax.custom_vjp
def permute(x: Array, order: Array, back: Array) -> Array:
    """Returns x[order]. `back` is the inverse of `order`: with it the gradient is a gather; JAX's would be a
    scatter."""
    return x[order]


def _permute_forward(x: Array, order: Array, back: Array) -> tuple[Array, Array]:
    return x[order], back


def _permute_backward(back: Array, gradient: Array) -> tuple[Array, None, None]:
    return gradient[back], None, None


permute.defvjp(_permute_forward, _permute_backward)
