"""A layer's weights as decode loops on accelerators read them, where an operation costs some 2,000 cycles however small
it is. One product computes queries, keys and values; their norms and rotations are computed together. The kernels for
one token per row (attention, MLP, experts) read their leaves in the stack of all layers. On CPUs three products are as
fast, and keep the results bit-identical.

Heads are stored in shares, [layers, D, shares, (H + 2 J) / shares, K], one for each device along `tensor`: a share has
its queries, its keys and its values side by side. Every result equals that of the three products, to rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jrl.device.sharding import EXPERT, GATHERED, TRAIN, axis_size, per_shard, reshape, spec
from jrl.models import experts
from jrl.models.adapters.quantized import is_quantized
from jrl.models.attention.fused_blocks import expert_block, mlp_block, qkv_block
from jrl.models.attention.kernels import LANES
from jrl.models.contract import ADAPTER, Names
from jrl.models.product import multiply
from jrl.models.shape import Decoder
from jrl.types import Array, PyTree

QKV, QK_NORM = "qkv", "qk_norm"
# Leaves that the kernels for one token per row read in the stack, a block at a time: fused_qkv.py, models/fused_mlp.py.
# That of models/fused_experts.py is `experts.KERNEL`.
ATTENTION, MLP = "attention_kernel", "mlp_kernel"
MLP_LEAVES = ("mlp_norm", "gate", "up", "down")
# Suffixes of the two leaves of a matrix's adapter: A, stored with its inputs last to fit tiles, and B.
LOW_A, LOW_B = "_a", "_b"
LOW_AXES = {QKV: ("embed", "heads"), "gate": ("embed", "mlp"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}
AXES = ("layers", "embed", "heads", None, "head_dim")  # of QKV
KERNEL_AXES = ("layers", "embed", "heads")  # of QKV as the kernel reads it: shares, heads and entries merged
NORM_AXES = ("layers", None, "head_dim")  # of QK_NORM
B_AXES = ("layers", "rank", "heads", None, "head_dim")  # of the adapter of QKV
RANK_TILE = 16  # rows of a bfloat16 tile
# Those that Pallas lowers for TPUs. The exact GELU needs erfc, which it does not lower.
KERNEL_ACTIVATIONS = ("silu", "gelu_tanh", "relu")


class Stacked(NamedTuple):
    """Weights of all layers; a kernel reads the blocks of one layer in place."""

    leaves: PyTree  # [layers, ...] each
    layer: Array  # [] int32


def fused(params: PyTree, names: PyTree, cfg: Decoder, *, rows: int | None = None) -> tuple[PyTree, PyTree]:
    """Returns the parameters of a decode loop and their logical axes, with one matrix and one adapter in place of those
    of q, k and v. These stay separate where layers differ in kind, have biases or normalized values, normalize all
    heads together, or have DoRA adapters or quantized q, k or v; the MLP's matrices then stay where they are too.
    Experts move to their kernel's leaf, whatever q, k and v do, if the kernel supports them.

    Args:
      params, names: as `prepare_for_decode` returns them.
      rows: that a batch shard decodes at once, at most; None: few enough for the kernels.
    """
    params, names = _with_expert_kernel(params, names, cfg, rows)
    layers = params["layers"]
    parts = [layers.get(name) for name in ("q", "k", "v")]
    same = cfg.full is None and cfg.linear is None and not cfg.shared_layers
    plain = same and not cfg.qkv_bias and not cfg.value_norm and cfg.qk_norm in (None, "head")
    adapters = layers.get(ADAPTER, {})
    scaled = any("c" in adapter for adapter in adapters.values())
    if not plain or scaled or any(part is None or is_quantized(part) for part in parts):
        return params, names
    mesh = jax.sharding.get_abstract_mesh()
    shares = axis_size(TRAIN["heads"])  # each of which has a share of the heads and of the MLP's width

    def in_shares(matrix: Array, axes: Names = AXES) -> Array:
        count, width, heads, head_dim = matrix.shape
        sharding = None if mesh.empty else spec(axes, TRAIN)
        return jnp.reshape(matrix, (count, width, shares, heads // shares, head_dim), out_sharding=sharding)

    replaced = {"q", "k", "v", "q_norm", "k_norm"}
    leaves = {name: leaf for name, leaf in layers.items() if name not in replaced}
    leaf_names = {name: leaf for name, leaf in names["layers"].items() if name not in replaced}
    if adapters:
        leaves[ADAPTER], leaf_names[ADAPTER] = dict(adapters), dict(leaf_names[ADAPTER])
    if _has_mlp_kernel(layers, cfg, shares):
        leaves[MLP], leaf_names[MLP] = ({name: tree.pop(name) for name in MLP_LEAVES} for tree in (leaves, leaf_names))
        for name in MLP_LEAVES[1:]:
            _move_adapter(leaves, leaf_names, name, MLP, cfg)
    leaves[QKV], leaf_names[QKV] = jnp.concatenate([in_shares(part) for part in parts], axis=3), AXES
    if adapted := [i for i, name in enumerate("qkv") if name in adapters]:
        heads = [part.shape[2] // shares for part in parts]
        # One B for all: each matrix's rows are 0 outside its own heads.
        other_heads = lambda i: (sum(heads[:i]), sum(heads[i + 1 :]))
        padded = [
            jnp.pad(in_shares(adapters["qkv"[i]]["b"], B_AXES), (*[(0, 0)] * 3, other_heads(i), (0, 0)))
            for i in adapted
        ]
        low = [(leaves[ADAPTER].pop("qkv"[i]), leaf_names[ADAPTER].pop("qkv"[i])) for i in adapted]
        leaves[ADAPTER][QKV] = {
            "a": jnp.concatenate([adapter["a"] for adapter, _ in low], axis=2),
            "b": jnp.concatenate(padded, axis=1),
        }
        leaf_names[ADAPTER][QKV] = {"a": ("layers", "embed", "rank"), "b": B_AXES}
    if cfg.qk_norm == "head":
        per_head = lambda name, heads: jnp.broadcast_to(
            layers[name][:, None], (cfg.layers, heads // shares, cfg.head_dim), out_sharding=_where(mesh)
        )
        leaves[QK_NORM] = jnp.concatenate([per_head("q_norm", cfg.heads), per_head("k_norm", cfg.kv_heads)], axis=1)
        leaf_names[QK_NORM] = NORM_AXES
    if _has_qkv_kernel(cfg):
        columns = (cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim
        leaves[QKV] = jnp.reshape(
            leaves[QKV], (cfg.layers, cfg.width, columns), out_sharding=None if mesh.empty else spec(KERNEL_AXES, TRAIN)
        )
        leaf_names[QKV] = KERNEL_AXES
        read = [name for name in ("attention_norm", QKV, QK_NORM) if name in leaves]
        leaves[ATTENTION], leaf_names[ATTENTION] = ({n: tree.pop(n) for n in read} for tree in (leaves, leaf_names))
        _move_adapter(leaves, leaf_names, QKV, ATTENTION, cfg)
    return {**params, "layers": leaves}, {**names, "layers": leaf_names}


def _move_adapter(leaves: PyTree, names: PyTree, name: str, part: str, cfg: Decoder) -> None:
    """Moves a matrix's adapter, if it has one, to the leaves that the kernel `part` reads, cast to cfg.dtype. The rank
    is padded with zeros to whole tiles."""
    if name not in leaves.get(ADAPTER, ()):
        return
    adapter = leaves[ADAPTER].pop(name)
    names[ADAPTER].pop(name)
    into, out = LOW_AXES[name]
    a, b = adapter["a"].swapaxes(1, 2).astype(cfg.dtype), adapter["b"].astype(cfg.dtype)
    if b.ndim > 3:
        sharding = None if jax.sharding.get_abstract_mesh().empty else spec(("layers", "rank", out), TRAIN)
        b = jnp.reshape(b, (*b.shape[:2], -1), out_sharding=sharding)
    padded = lambda x: jnp.pad(x, ((0, 0), (0, -x.shape[1] % RANK_TILE), (0, 0)))
    leaves[part] |= {name + LOW_A: padded(a), name + LOW_B: padded(b)}
    names[part] |= {name + LOW_A: ("layers", "rank", into), name + LOW_B: ("layers", "rank", out)}


def _with_expert_kernel(params: PyTree, names: PyTree, cfg: Decoder, rows: int | None) -> tuple[PyTree, PyTree]:
    """Returns both with the experts' matrices in the leaf that their kernel reads, if the kernel computes them. XLA
    would change their layout again for every token."""
    leaves, leaf_names = dict(params["layers"]), dict(names["layers"])
    read = [name for name in experts.KERNEL_LEAVES if name in leaves]
    present = all(name in leaves and not is_quantized(leaves[name]) for name in experts.KERNEL_LEAVES[:3])
    if not present or any(name in leaves.get(ADAPTER, ()) for name in read):
        return params, names
    if not has_expert_activation(cfg):
        return params, names
    if rows is not None and not has_kernel(experts.KERNEL, jax.ShapeDtypeStruct((rows, 1, cfg.width), cfg.dtype), cfg):
        return params, names
    swapped = lambda axes: (*axes[:2], axes[3], axes[2])
    leaves[experts.KERNEL], leaf_names[experts.KERNEL] = (
        {name: tree.pop(name) for name in read} for tree in (leaves, leaf_names)
    )
    for name in experts.KERNEL_SWAPPED:
        leaves[experts.KERNEL][name] = leaves[experts.KERNEL][name].swapaxes(2, 3)
        leaf_names[experts.KERNEL][name] = swapped(leaf_names[experts.KERNEL][name])
    return {**params, "layers": leaves}, {**names, "layers": leaf_names}


def has_expert_activation(cfg: Decoder) -> bool:
    """Whether the experts' kernel supports their activation."""
    return cfg.experts.clamp is not None or cfg.activation in KERNEL_ACTIVATIONS


def _has_qkv_kernel(cfg: Decoder) -> bool:
    """Whether the kernel can compute queries, keys and values of every layer, given that their matrix is fused."""
    normed_before = cfg.norm != "layer" and cfg.norm_place != "after" and not cfg.parallel and not cfg.output_gate
    rotates = cfg.rotated == cfg.head_dim and any(map(cfg.rotates, range(cfg.layers)))
    return normed_before and rotates and not cfg.head_dim % LANES and not cfg.width % LANES


def _has_mlp_kernel(layers: PyTree, cfg: Decoder, shares: int) -> bool:
    """Whether the kernel can compute the MLP of every layer."""
    plain = cfg.mlp == "gated" and not cfg.mlp_bias and cfg.norm != "layer" and cfg.activation in KERNEL_ACTIVATIONS
    alone = cfg.norm_place != "after" and not cfg.parallel and cfg.experts is None
    present = all(name in layers and not is_quantized(layers[name]) for name in MLP_LEAVES)
    present &= sum(name in layers.get(ADAPTER, ()) for name in MLP_LEAVES) in (0, len(MLP_LEAVES) - 1)
    return plain and alone and present and not cfg.width % LANES and not cfg.mlp_width % (shares * LANES)


def has_kernel(part: str, x: Array, cfg: Decoder, rank: int = 0) -> bool:
    """Whether the kernel of `part` (ATTENTION, MLP or experts.KERNEL) can compute x [B, L, D]: one token per row, and
    few enough rows for a core's memory. All rows of B count, including those on other devices.

    Args:
      rank: of the adapters in the kernel's leaves; 0: there are none.
    """
    rows, length, width = x.shape
    shares, itemsize = axis_size(TRAIN["heads"]), x.dtype.itemsize
    if length != 1:
        return False
    if part == MLP:
        return mlp_block(rows, width, cfg.mlp_width // shares, itemsize, rank) is not None
    if part == experts.KERNEL:
        return expert_block(rows * axis_size(EXPERT), width, cfg.experts.width // shares, itemsize) is not None
    heads = (cfg.heads // shares, cfg.kv_heads // shares)
    return qkv_block(rows, width, heads, cfg.head_dim, itemsize, rank) is not None


def stacked(weights: PyTree) -> Stacked:
    """Returns the weights of a layer as a kernel takes them: those of a single layer become a stack of one."""
    if isinstance(weights, Stacked):
        return weights
    return Stacked(jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 0), weights), jnp.int32(0))


def with_sliced(weights: PyTree, x: Array, cfg: Decoder) -> PyTree:
    """Returns the weights of a layer, with the leaves of each kernel that cannot compute x [B, L, D] as ordinary
    leaves."""
    for part in (ATTENTION, MLP, experts.KERNEL):
        if part not in weights or has_kernel(part, x, cfg, rank_of(weights[part])):
            continue
        leaves = weights[part]
        if isinstance(leaves, Stacked):
            leaves, layer = leaves
            leaves = {n: jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False) for n, leaf in leaves.items()}
        leaves = {n: _by_head(leaf, cfg) if n in (QKV, QKV + LOW_B) else leaf for n, leaf in leaves.items()}
        leaves = {n: _inputs_first(leaf) if n in experts.KERNEL_SWAPPED else leaf for n, leaf in leaves.items()}
        low = {n: {"a": leaves.pop(n + LOW_A).swapaxes(0, 1), "b": leaves.pop(n + LOW_B)}
               for n in LOW_AXES if n + LOW_A in leaves}  # fmt: skip
        weights = {name: leaf for name, leaf in weights.items() if name != part} | leaves
        if low:
            weights[ADAPTER] = weights.get(ADAPTER, {}) | low
    return weights


def _inputs_first(matrix: Array) -> Array:
    """Returns a layer's matrices [experts, width, D] as [experts, D, width]."""
    # Without this, XLA changes the layout of the whole stack before it slices: a copy of all experts.
    in_order = lambda matrix: (with_layout_constraint(matrix, Layout((0, 1, 2))).swapaxes(1, 2),)
    return per_shard(in_order, (matrix,), (("experts", "mlp", None),), (("experts", None, "mlp"),))[0]


def _by_head(matrix: Array, cfg: Decoder) -> Array:
    """Returns QKV as the kernel reads it, [rows, shares n K], as [rows, shares, n, K]."""
    mesh = jax.sharding.get_abstract_mesh()
    shares = axis_size(TRAIN["heads"])  # each of which has a share of the heads and of the MLP's width
    shape = (len(matrix), shares, (cfg.heads + 2 * cfg.kv_heads) // shares, cfg.head_dim)
    return jnp.reshape(matrix, shape, out_sharding=None if mesh.empty else spec(AXES[1:], GATHERED))


def rank_of(weights: PyTree) -> int:
    """Returns the rank of the adapters in a kernel's leaves; 0 where there are none."""
    leaves = weights.leaves if isinstance(weights, Stacked) else weights
    return next((leaf.shape[-2] for name, leaf in leaves.items() if name.endswith(LOW_A)), 0)


def project(h: Array, weights: PyTree, cfg: Decoder, scale: Array | None) -> tuple[Array, Array]:
    """Returns queries and keys together, normed, [B, L, shares (H + J) / shares, K], and values [B, L, J, K].

    Args:
      h: [B, L, D]. weights: of a layer. scale: [(H + J) / shares, K] of the norms of both; None: no norms.
    """
    shares = weights[QKV].shape[1]
    both = (cfg.heads + cfg.kv_heads) // shares
    out = multiply("bld,dtsk->bltsk", h, weights, QKV, ("embed", "heads", None, "head_dim"))
    qk, v = out[..., :both, :], out[..., both:, :]
    if scale is not None:
        wide = qk.astype(jnp.promote_types(qk.dtype, jnp.float32))
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + cfg.norm_eps)
        qk = (normed * scale[None, None, None].astype(wide.dtype)).astype(qk.dtype)
    return _heads(qk), _heads(v)


def split(qk: Array, weights: PyTree, cfg: Decoder) -> tuple[Array, Array]:
    """Returns (queries [B, L, H, K], keys [B, L, J, K]) from both together, as `project` returns them."""
    shares = weights[QKV].shape[1]
    batch, length, heads, head_dim = qk.shape
    qk = reshape(qk, (batch, length, shares, heads // shares, head_dim), "batch", None, "heads", None, None)
    queries = cfg.heads // shares
    return _heads(qk[..., :queries, :]), _heads(qk[..., queries:, :])


def _heads(x: Array) -> Array:
    """Returns [B, L, shares, n, K] as [B, L, shares n, K]."""
    batch, length, shares, count, head_dim = x.shape
    return reshape(x, (batch, length, shares * count, head_dim), "batch", None, "heads", None)


def _where(mesh: jax.sharding.AbstractMesh) -> jax.sharding.PartitionSpec | None:
    return None if mesh.empty else spec(NORM_AXES, GATHERED)
