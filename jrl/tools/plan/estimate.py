"""Estimates the time of a step: for each program, that of the slowest of matrix unit, memory, links and network. This
is a lower bound.

    seconds = max(operations / matrix rate, bytes / HBM rate, link bytes / ring rate, network bytes / network rate)

Every estimate is printed with the ASSUMPTIONS below.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrl.device.sharding import EXPERT, GATHERED, TRAIN, mesh_axes, num_shards
from jrl.device.transfer import Publication
from jrl.experiment import Online, segments_of
from jrl.learning.optimizer import begin
from jrl.learning.optimizers.adamw import AdamW
from jrl.learning.optimizers.contract import describe
from jrl.learning.optimizers.groups import trained_only
from jrl.models.adapters.quantized import is_quantized
from jrl.models.attention.kernels import NO_KERNEL, padded_length
from jrl.models.attention.kv_cache import cache_shapes, ends
from jrl.models.attention.linear import chunk_of
from jrl.models.contract import ParamSpec, is_spec
from jrl.models.expert_group import CHUNK_SHARE
from jrl.models.leaves import layers_of as layers_with
from jrl.models.shape import Decoder
from jrl.tools.plan import flops
from jrl.tools.plan.case import Case, cases_of, learned_cases, programs_of, publication_of, shard_shape, share
from jrl.tools.plan.chips import Chip
from jrl.tools.plan.flops import Flops

FLOAT32_PASSES = 6  # bfloat16 passes of one float32 product at precision 'highest', which jrl uses

ASSUMPTIONS = (
    "every unit at its peak, and the slowest alone counts: memory, links, network and matrix unit overlap within a "
    "program",
    f"float32 products take {FLOAT32_PASSES} bfloat16 passes (precision 'highest'); so does attention without a kernel",
    "experts are visited evenly, and those that no slot goes to are not read",
    "every completion is as long as it may be, every packed row is full, nothing is refilled",
    "a mesh axis moves data around one ring of the torus, both ways; between slices every chip has its share of its "
    "host's network",
    "host time (scoring, data, dispatch) is not in it, nor what AdamW.memory and remat = 'offload' move over its link",
    "of an optimizer only its memory traffic counts, and not what Muon multiplies",
)


class Estimate(NamedTuple):
    """Seconds of one call of a program on one device, by bottleneck."""

    compute: float
    memory: float
    links: float
    network: float = 0.0  # between slices

    @property
    def seconds(self) -> float:
        return max(self)

    @property
    def bound(self) -> str:
        return self._fields[self.index(max(self))]


class Traffic(NamedTuple):
    """Traffic of one call of a program, on one device."""

    hbm: float  # bytes between HBM and the chip
    links: dict[str, float]  # bytes received over links, by mesh axis
    network: float = 0.0  # bytes received from other slices


def itemsize(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


def held_bytes(case: Case, rules: dict, dtype: str, counted: Callable[[ParamSpec], bool] = lambda leaf: True) -> int:
    """Returns the bytes on one device of the parameters that `counted` selects, sharded by `rules`: in `dtype`, except
    quantized matrices, which count as stored."""
    layers = {name: leaf for name, leaf in case.stored["layers"].items() if not is_quantized(leaf)}
    leaves = filter(counted, jax.tree.leaves({**case.stored, "layers": layers}, is_leaf=is_spec))
    wide = sum(share(leaf, rules, case.sizes) for leaf in leaves) * itemsize(dtype)
    return wide + quantized_bytes(case, rules, counted)


def quantized_bytes(case: Case, rules: dict, counted: Callable[[ParamSpec], bool] = lambda leaf: True) -> int:
    """Returns the bytes on one device of the quantized matrices with their scales; 0 if there are none."""
    quantized = [leaf.values() for leaf in case.stored["layers"].values() if is_quantized(leaf)]
    leaves = filter(counted, itertools.chain(*quantized))
    return sum(share(leaf, rules, case.sizes) * leaf.dtype.itemsize for leaf in leaves)


def trained_bytes(case: Case, rules: dict, counted: Callable[[ParamSpec], bool] = lambda leaf: True) -> int:
    """Returns the bytes on one device of the trained parameters that `counted` selects: all weights, or adapters."""
    leaves = filter(counted, jax.tree.leaves(case.trained, is_leaf=is_spec))
    return sum(share(leaf, rules, case.sizes) * leaf.dtype.itemsize for leaf in leaves)


def moment_bytes(case: Case) -> int:
    """Returns the bytes of optimizer state for one device's shard of the trained parameters of the role `case.updates`,
    on the device or its host. The counts of updates are left out."""
    shard = lambda s: jax.ShapeDtypeStruct(shard_shape(s, TRAIN, case.sizes), s.dtype)
    shards, leaves = jax.tree.map(shard, case.trained, is_leaf=is_spec), describe(case.trained, ())[0]
    config = case.optimizer
    if type(config) is AdamW:  # two moments; a search evaluates thousands of layouts, and tracing takes 50 ms
        moments = jax.tree.leaves(trained_only(config, shards, leaves))
        narrow = config.moments == "bfloat16"
        return 2 * sum(math.prod(x.shape) * (2 if narrow else x.dtype.itemsize) for x in moments)
    state = jax.eval_shape(lambda params: begin(*case.optimizers[case.updates], params, leaves), shards)
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state) if x.ndim)


def adapter_bytes(case: Case, counted: Callable[[ParamSpec], bool] = lambda leaf: True) -> int:
    """Returns the bytes on one device, in the compute dtype, of the adapters that `counted` selects; 0 without any."""
    leaves = filter(counted, jax.tree.leaves(case.adapters, is_leaf=is_spec))
    return sum(share(leaf, GATHERED, case.sizes) for leaf in leaves) * itemsize(case.cfg.dtype)


def gathered_over(case: Case, received: float, of_experts: float) -> dict[str, float]:
    """Returns {mesh axes: bytes} that a device receives to gather `received` bytes of weights, of which it has its
    shard: over all axes that shard parameters, except that `of_experts` bytes stay sharded over expert."""

    def over(axes: Sequence[str], received: float) -> dict[str, float]:
        n = num_shards(axes, case.sizes)
        return {"+".join(axes): received * (n - 1) / n}

    axes = mesh_axes("embed", TRAIN, case.sizes)
    return add(over(tuple(axis for axis in axes if axis != EXPERT), of_experts), over(axes, received - of_experts))


def exchanged_tokens(case: Case, tokens: float, exchanges: int) -> dict[str, float]:
    """Returns {axis: bytes} over the expert axis for `exchanges` exchanges of a device's `tokens` in every sparse
    layer: a gather of hidden states, or a scatter of sums over experts. Ids and weights are gathered once."""
    cfg, others = case.cfg, case.sizes["expert"] - 1
    sparse = sum(map(cfg.sparse, range(cfg.layers)))
    if not others:
        return {}
    routing_bytes = 8 * cfg.experts.per_token
    return {"expert": sparse * others * tokens * (exchanges * cfg.width * itemsize(cfg.dtype) + routing_bytes)}


def row_gathers(case: Case, backward: bool) -> dict[str, float]:
    """Returns {axis: bytes} that a device receives over the sequence axis for the keys and values of full rows: once in
    the forward pass and, with `backward`, once for their gradients and once to gather them again, unless
    `Decoder.remat` is 'none'."""
    passes = 1 if not backward else 2 if case.cfg.remat == "none" else 3
    times = case.micro_batches * case.cfg.layers * passes
    size = 2 * case.rows * case.shape.row_length * widest_heads(case.cfg)[1] / case.sizes["tensor"]
    return {"sequence": times * size * itemsize(case.cfg.dtype) * (case.shares - 1) / case.shares}


def tensor_sums(case: Case, tokens: float, passes: int, recomputed: int = 0) -> dict[str, float]:
    """Returns {axis: bytes} over the tensor axis for `passes` passes through the layers: in each layer an all-reduce of
    [tokens, D] (reduce, then gather) after attention and after the MLP or the experts, or after both of these if the
    model has a shared expert. `recomputed`: all-reduces of each layer that the backward pass repeats."""
    n, experts = case.sizes["tensor"], case.cfg.experts
    sums = passes * (2 if experts is None or experts.shared_expert is None else 3) + recomputed
    size = tokens * case.cfg.width * itemsize(case.cfg.dtype)
    return {"tensor": case.cfg.layers * sums * 2 * size * (n - 1) / n}


def add(*parts: dict[str, float]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for axis, size in part.items():
            total[axis] = total.get(axis, 0.0) + size
    return total


def sample_traffic(case: Case) -> Traffic:
    """Returns the traffic of sampling: weights are gathered once, then read in every decode step with the filled blocks
    of the cache."""
    cfg = case.cfg
    weights = decode_step_bytes(case) + (adapter_bytes(case) if flops.decodes_unmerged(case) else 0)
    cache = kv_cache_bytes(case, case.slots, round(flops.read_columns(case)))
    prompts = case.prompts // case.shards * case.prefilled
    experts = held_bytes(case, GATHERED, cfg.dtype, flops.of_experts)
    gathered = gathered_over(case, held_bytes(case, GATHERED, cfg.dtype), experts)
    decoded = case.decode_steps * case.slots
    return Traffic(
        hbm=2 * held_bytes(case, GATHERED, cfg.dtype) + case.decode_steps * (weights + cache),
        links=add(gathered, tensor_sums(case, prompts + decoded, 1), exchanged_tokens(case, prompts + decoded, 2)),
    )


def cache_bytes(case: Case) -> int:
    """Returns the bytes on one device of the KV cache and linear attention states of all slots."""
    return kv_cache_bytes(case, case.slots, padded_columns(case, case.width))


def padded_columns(case: Case, columns: int) -> int:
    """Returns the number of columns of a cache after padding `columns` for a kernel."""
    return ends(columns, case.width, case.config.sampler.layout)[-1]


def kv_cache_bytes(case: Case, rows: int, columns: int) -> int:
    """Returns the bytes of a cache on one device: keys and values of the layers that have them, and states."""
    total, single_block = 0, case.config.sampler.layout == "single_block"
    for stack in cache_shapes(case.cfg, rows, columns).values():
        for name, (shape, dtype, _) in stack.items():
            wide = padded_length(shape[-1]) if single_block and name in ("k", "v") else shape[-1]
            total += math.prod(shape[:-1]) * wide * dtype.itemsize
    return total // case.sizes["tensor"]


def mlp_entries(cfg: Decoder, tensor: int, expert: int = 1) -> int:
    """Returns the number of activations per token of the widest layer's MLP on one device: gate, up and their product.
    With experts, a token and its output are copied for each of its experts; a shared expert adds its own. With experts
    sharded over devices, a device has the tokens and sums of all devices along the axis, and copies a chunk of them at
    once."""
    dense = sparse = 0
    if any(map(cfg.dense, range(cfg.layers))):
        dense = 3 * max(cfg.mlp_width, cfg.shared_mlp_width or 0) // tensor
    if cfg.experts is not None:
        copies = cfg.experts.per_token * (2 * cfg.width + 3 * cfg.experts.width // tensor)
        if expert > 1:
            copies = copies * CHUNK_SHARE[0] // CHUNK_SHARE[1] + 2 * expert * cfg.width
        sparse = copies + cfg.experts.count
    return max(dense, sparse) if cfg.experts is None or cfg.experts.shared_expert is None else dense + sparse


def widest_heads(cfg: Decoder) -> tuple[int, int]:
    """Returns the width of a token's queries, and of its keys, in the layer where their sum is largest."""
    widths = [(cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim)]
    if cfg.full is not None:
        widths.append((cfg.heads * cfg.full.head_dim, cfg.full.kv_heads * cfg.full.head_dim))
    if cfg.linear is not None:  # values, gate and output have one size, queries and keys another
        widths.append(
            (3 * cfg.linear.value_heads * cfg.linear.value_dim // 2, cfg.linear.key_heads * cfg.linear.key_dim)
        )
    return max(widths, key=sum)


def head_entries(cfg: Decoder) -> int:
    """Returns the number of activations per token of the widest layer's attention: queries, keys, values, output."""
    return 2 * sum(widest_heads(cfg))


def decode_step_bytes(case: Case) -> float:
    """Returns the bytes of the weights that a decode step reads on one device: of experts, only those expected to be
    used by a slot of the devices that exchange tokens."""
    cfg = case.cfg
    expert_bytes = held_bytes(case, GATHERED, cfg.dtype, flops.of_experts)
    slots = case.slots * case.sizes["expert"]
    untouched = 0.0 if cfg.experts is None else (1 - cfg.experts.per_token / cfg.experts.count) ** slots
    return held_bytes(case, GATHERED, cfg.dtype) - expert_bytes * untouched


def layer_traffic(case: Case, tokens: float) -> float:
    """Returns the bytes that one forward pass through all layers moves for `tokens` on one device: the inputs and
    outputs of every matmul once, and the float32 scores that are written and read around the softmax (none by a
    kernel), or the [chunk, chunk] weights of linear attention."""
    cfg, tensor = case.cfg, case.sizes["tensor"]
    wide = 2 * cfg.width + head_entries(cfg) / tensor + mlp_entries(cfg, tensor, case.sizes["expert"])
    scores = 4 * 4 * cfg.heads / tensor * case.shape.keys if cfg.attention in NO_KERNEL else 0
    linear = len(layers_with(cfg, "linear_q"))
    shares = 4 * 4 * cfg.linear.value_heads / tensor * chunk_of(case.shape.row_length) if linear else 0
    moved = cfg.layers * 2 * wide * itemsize(cfg.dtype) + (cfg.layers - linear) * scores + linear * shares
    return tokens * moved


def pass_traffic(case: Case, passes: int, exchanges: int) -> Traffic:
    """Returns the traffic of `passes` passes through the layers (a backward pass is two) over all micro-batches, with
    `exchanges` exchanges of tokens between experts. The backward pass gathers weights once, also for what it
    recomputes; with remat = 'none' only those outside layers, because a layer's are saved as gathered. To recompute a
    layer from its input, it repeats the sum over tensor after attention, which the MLP reads."""
    cfg = case.cfg
    tokens = case.micro_batches * case.tokens
    weights = held_bytes(case, GATHERED, cfg.dtype) + adapter_bytes(case)
    times, both = case.micro_batches * passes, min(passes, 2)  # both: forward and backward
    recomputed = int(passes > 1 and cfg.remat in ("layer", "offload") and not cfg.parallel)
    experts = held_bytes(case, GATHERED, cfg.dtype, flops.of_experts) + adapter_bytes(case, flops.of_experts)
    received = both * weights, both * experts
    if cfg.remat == "none" and both > 1:
        in_layers = lambda leaf: leaf.axes[0] == "layers"
        received = 2 * weights - held_bytes(case, GATHERED, cfg.dtype, in_layers) - adapter_bytes(case), experts
    return Traffic(
        hbm=times * 2 * weights + passes * layer_traffic(case, tokens),
        links=add(
            gathered_over(case, *(case.micro_batches * size for size in received)),
            tensor_sums(case, tokens, both, recomputed),
            row_gathers(case, passes > 1),
            exchanged_tokens(case, tokens, exchanges),
        ),
    )


def logprobs_traffic(case: Case) -> Traffic:
    """Returns the traffic of one forward pass over a batch, for log-probs or scores."""
    return pass_traffic(case, 1, 2)


def update_traffic(case: Case) -> Traffic:
    """Returns the traffic of an optimizer step: the gradients of all data that it learns from, and the
    optimizer's trees."""
    gradients = [gradient_traffic(learned) for learned in learned_cases(case)]
    return Traffic(
        hbm=sum(gradient.hbm for gradient in gradients) + 6 * trained_bytes(case, TRAIN) + 2 * moment_bytes(case),
        links=add(*(gradient.links for gradient in gradients)),
        network=sum(gradient.network for gradient in gradients),
    )


def gradient_traffic(case: Case) -> Traffic:
    """Returns the traffic of a batch's gradient: the forward and backward passes, and the reduction. Frozen weights
    have no gradient, which saves half of the backward pass."""
    backward = 2 if case.adapters is None else 1
    # Tokens and gradients, both ways; with remat, tokens are gathered once more.
    exchanges = 4 + (case.cfg.remat != "none")
    passes = pass_traffic(case, 1 + backward + (case.cfg.remat in ("layer", "offload")), exchanges)
    stored = trained_bytes(case, TRAIN)
    # The replicas of a slice reduce-scatter their gradients, slices sum these parts, and the replicas gather them.
    # Until they are accumulated, a micro-batch's gradients have the compute dtype.
    narrow = min(itemsize(case.cfg.dtype) / itemsize(case.cfg.param_dtype), 1)
    gradient, of_experts = (
        narrow * trained_bytes(case, GATHERED, counted) * case.micro_batches
        for counted in (lambda leaf: True, flops.of_experts)
    )
    reduced = gathered_over(case, gradient, of_experts)
    slices, summed = case.mesh_slices, 2 * narrow * stored * case.micro_batches
    copies = case.sizes["data"] // slices
    return Traffic(
        hbm=passes.hbm + 3 * stored * case.micro_batches,
        links=add(passes.links, reduced, {"data": summed * (copies - 1) / copies}),
        network=summed / copies * (slices - 1) / slices,
    )


def of_programs(case: Case) -> dict[str, Traffic]:
    """Returns {program name: traffic of one call}."""
    count = {"sample": sample_traffic, "logprobs": logprobs_traffic, "scores": logprobs_traffic,
             "update": update_traffic}  # fmt: skip
    return {name: count[p.kind](p.case) for name, p in programs_of(case).items()}


def estimate(count: Flops, traffic: Traffic, case: Case, chip: Chip) -> Estimate:
    """Returns the minimum time of one call of a program on one device."""
    narrow = FLOAT32_PASSES if case.cfg.dtype == "float32" else 1
    operations = (narrow * count.weights + FLOAT32_PASSES * count.attention) / case.devices
    return Estimate(
        compute=operations / chip.matrix_rate,
        memory=traffic.hbm / chip.hbm_rate,
        links=sum(traffic.links.values()) / chip.ring_rate,
        network=traffic.network / chip.network_rate if traffic.network else 0.0,
    )


def calls(case: Case) -> dict[str, int]:
    """Returns {program name: calls per step of its stage}. Evaluations are not counted."""
    counts = {"sample_eval": 0}
    for stage_case in cases_of(case):
        learner, online = stage_case.stage.learner, isinstance(stage_case.stage, Online)
        times = {
            "sample": 1,
            "next_segment": segments_of(stage_case.stage, case.config) - 1 if online else 0,
            "correct": 1,
            "step_scores": learner.minibatches,
            "scores": len(stage_case.stage.rewards) if online else 0,
            "recompute": learner.minibatches,
            "reference": learner.minibatches,
            "teacher": learner.minibatches,
            "update": learner.updates_per_batch,
            "critic_values": learner.minibatches,
            "update_critic": learner.updates_per_batch,
        }
        counts |= {f"{stage_case.name}.{part}": n for part, n in times.items()}
    return {name: counts[name] for name in programs_of(case)}


def step_seconds(case: Case, chip: Chip) -> float:
    """Returns the seconds of one step of the case's stage."""
    alone = dataclasses.replace(case, others=())
    counts, moved, programs = flops.of_programs(alone), of_programs(alone), programs_of(alone)
    seconds = {name: estimate(counts[name], moved[name], programs[name].case, chip).seconds for name in counts}
    return step_of(alone, chip, seconds)


def step_of(case: Case, chip: Chip, seconds: Mapping[str, float]) -> float:
    """Returns the seconds of a step, given {program name: seconds of one call} for its stage. If other devices sample:
    the longer of publishing and sampling, and of learning."""
    times = calls(case)
    total = {name: times[name] * each for name, each in seconds.items()}
    p = publication_of(case)
    if p is None:
        return sum(total.values())
    sampling = total.get(f"{case.name}.sample", 0.0)
    return max(sampling + publication_seconds(p, case, chip), sum(total.values()) - sampling)


def publication_seconds(p: Publication, case: Case, chip: Chip) -> float:
    """Returns the seconds in which a sampling device receives the published weights: over links, or with several slices
    over the network."""
    return p.received / (chip.ring_rate if case.slices == 1 else chip.network_rate)
