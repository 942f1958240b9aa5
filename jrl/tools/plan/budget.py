"""The memory of a run's programs on one device, from arithmetic: by kind, before anything is compiled.

A program needs the run's state (weights, optimizer) and its own temporary arrays. The latter peak at one of a few
moments: the prefill or a decode step; the backward pass of a chunk of logits or of a layer. Each moment is the sum of
the arrays in the TPU compiler's buffer assignments (libtpu 0.0.42.1), and nothing is fitted except a layer of linear
attention (`chunk_bytes`): see docs/plan.md.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax

from jrl.device.sharding import GATHERED, TRAIN
from jrl.experiment import optimizers
from jrl.learning.optimizers.contract import leaf_of
from jrl.learning.optimizers.muon import Muon, spread_over
from jrl.models.attention.kernels import LANES, NO_KERNEL
from jrl.models.attention.linear import chunk_of
from jrl.models.contract import is_spec
from jrl.models.remat import is_narrow
from jrl.ops.router import route_dtype
from jrl.rollout.sampler import compaction_sizes, num_resident_prompts
from jrl.tools.plan.case import (
    Case,
    case_of,
    cases_of,
    evaluated_case,
    learned_cases,
    programs_of,
    publication_of,
    sampling_case,
    share,
    split_name,
)
from jrl.tools.plan.estimate import (
    adapter_bytes,
    cache_bytes,
    head_entries,
    held_bytes,
    itemsize,
    kv_cache_bytes,
    mlp_entries,
    moment_bytes,
    padded_columns,
    quantized_bytes,
    trained_bytes,
    widest_heads,
)  # fmt: skip
from jrl.tools.plan.flops import decodes_unmerged

FLOAT32 = 4  # bytes

RELAID = tuple(kind + name for kind in ("", "full_", "linear_") for name in ("q", "k"))
IN_FLIGHT = 2  # layers whose inputs are in transfer to or from the host
SCORES = 2  # float32 arrays of the size of the scores that exist at once: before and after the softmax, or gradients


class Memory(NamedTuple):
    """Bytes on one device."""

    weights: int = 0  # stored for training, with the frozen reference and older versions
    optimizer: int = 0
    gradients: int = 0
    activations: int = 0  # saved by the forward pass for the backward pass
    cache: int = 0  # KV cache of the sampler
    queue: int = 0  # completions that wait to be learned from (Online.lag)
    temporary: int = 0  # everything else

    @property
    def total(self) -> int:
        return sum(self)


class HostMemory(NamedTuple):
    """Bytes in host memory, of one device."""

    optimizer: int = 0  # moments between updates
    activations: int = 0  # inputs of layers, from the forward pass to the backward pass

    @property
    def total(self) -> int:
        return sum(self)


def resident_memory(case: Case) -> Memory:
    """Returns the memory of the run's state during a stage, and beside it of the reward model that is read from a
    folder, which is no argument of the stage's programs. On devices of their own for sampling: the published weights,
    and the completions that wait there."""
    if case.learner_sizes is not None:
        p = publication_of(case)
        return Memory(weights=frozen(case) + p.held * p.weights, queue=queue_bytes(case), temporary=p.sampler)
    return Memory(
        weights=frozen(case) + trained_bytes(case, TRAIN) * case.copies + (case.read.teacher or 0),
        optimizer=device_moment_bytes(case),
        queue=queue_bytes(case),
        temporary=case.read.reward or 0,
    )


def init(case: Case) -> Memory:
    """Returns the memory of the state before the first stage: weights, initialized in place."""
    return Memory(weights=frozen(case) + trained_bytes(case, TRAIN))


def begin(case: Case) -> Memory:
    """Returns the memory of a stage's begin: its state, and the optimizer and the copies of the stage that ends, which
    are freed only afterwards."""
    ended, memory = case.before, resident_memory(case)
    if ended is None:
        return memory
    copies = trained_bytes(ended, TRAIN) * (ended.copies - ended.roles)
    return memory._replace(temporary=memory.temporary + device_moment_bytes(ended) + copies)


def resident_beside(case: Case, name: str) -> Memory:
    """Returns the memory of the run's state while a program runs. `name`: of the program in the program cache."""
    stage, part = split_name(name)
    if part == "sample":  # segments are drawn where the run learns
        return resident_memory(sampling_case(case_of(case, name)))
    if stage is not None:
        return resident_memory(case_of(case, name))
    if part == "init":
        return init(case)
    return resident_memory(evaluated_case(case)) if part == "sample_eval" else max_resident(case)


def max_resident(case: Case) -> Memory:
    """Returns the memory of the run's state in the planned stage that needs the most."""
    return max(map(resident_memory, cases_of(case)), key=lambda memory: memory.total)


def device_moment_bytes(case: Case) -> int:
    """Returns the bytes of the optimizers' state of all roles that the stage trains that are on a device between
    updates."""
    return sum(moment_bytes(own) for own in updated_cases(case) if not own.moments_on_host)


def updated_cases(case: Case) -> list[Case]:
    """Returns the case once for each role that its stage trains."""
    return [dataclasses.replace(case, updates=role) for role in optimizers(case.stage)]


def on_host(case: Case) -> HostMemory:
    """Returns the host memory of an update."""
    inputs = case.tokens * case.cfg.width * itemsize(case.cfg.dtype)
    return HostMemory(
        optimizer=sum(map(moment_bytes, updated_cases(case))) - device_moment_bytes(case),
        activations=case.cfg.layers * inputs if case.cfg.remat == "offload" else 0,
    )


def queue_bytes(case: Case) -> int:
    """Returns the bytes of the draws on one device that a stage holds while it learns: Online.lag of them, or one less
    than completions have segments, each the fields of Rollout by token. Those by sequence are left out."""
    if not case.waiting or (case.sampler_sizes is not None and case.learner_sizes is None):
        return 0
    sampler = case.config.sampler
    truncated = any(limit is not None for limit in (sampler.top_k, sampler.top_p, sampler.min_p))
    by_token = 3 * 4 + 2 * 1 + 2 * 4 * truncated  # token, log-prob, version; mask, turn; log-prob and size of a support
    by_token += route_bytes(case)
    return case.waiting * case.sequences // case.shards * case.shape.width * by_token


def route_bytes(case: Case) -> int:
    """Returns the bytes of a token's routes, which the sampler records to be replayed; 0 where it does not."""
    if not case.stage.learner.replays_routes:
        return 0
    cfg = case.cfg
    return sum(map(cfg.sparse, range(cfg.layers))) * cfg.experts.per_token * route_dtype(cfg.experts.count).itemsize


def sampled_route_bytes(case: Case) -> int:
    """Returns the bytes of the routes that sampling records on one device: those of all sequences, and of the prompts
    in flight and the next ones."""
    resident = 2 * prompts_in_flight(case) * case.config.data.prompt_length
    return (case.sequences // case.shards * case.width + resident) * route_bytes(case)


def learned_route_bytes(case: Case) -> int:
    """Returns the bytes of the routes that learning holds on one device: as they were sampled, and packed into the rows
    of every minibatch."""
    packed = case.stage.learner.minibatches * case.shape.micro_batches * case.rows * case.shape.row_length
    return (case.sequences // case.shards * case.width + packed) * route_bytes(case)


def frozen(case: Case) -> int:
    """Returns the bytes of the weights under adapters on one device; 0 where all weights are trained."""
    return 0 if case.adapters is None else held_bytes(case, TRAIN, case.cfg.param_dtype)


def sample(case: Case) -> Memory:
    """Returns the memory of sampling. Throughout: gathered weights, the slots' KV cache, and the keys and
    values of the prompts in flight. Then the prefill of the next prompts, whose keys and values exist beside the last
    ones', or a decode step's logits. At the end, with no prompt in flight, the cache of half the slots, where the last
    sequences move there."""
    cfg, tensor = case.cfg, case.sizes["tensor"]
    prompts, length, chunk = prompts_in_flight(case), case.config.data.prompt_length, case.prefill_chunk
    scores = SCORES * prompts * cfg.heads // tensor * queries(case, chunk) * length * FLOAT32
    layer = max(scores + layer_workspace_bytes(case, prompts * chunk), chunk_bytes(case, prompts * chunk, chunk) // 2)
    decode_step = (SCORES * cfg.vocab_size + layer_workspace_bytes(case, 1) // FLOAT32) * case.slots * FLOAT32
    beside = [2 * kv_cache_bytes(case, prompts, padded_columns(case, length))]
    width = padded_columns(case, case.width)
    beside += [
        kv_cache_bytes(case, rows, width)
        for rows in compaction_sizes(case.slots, case.config.sampler.max_batch_compactions)
    ]
    resident = resident_memory(case)
    return resident._replace(
        cache=cache_bytes(case) + max(beside),
        temporary=resident.temporary
        + gathered_weight_bytes(case)
        + relayout_bytes(case)
        + max(layer, decode_step)
        + sampled_route_bytes(case),
    )


def prompts_in_flight(case: Case) -> int:
    """Returns the prompts of a batch shard that are prefilled together."""
    return num_resident_prompts(case.prompts // case.shards, case.slots, case.samples, case.config.data.prompt_length)


def relayout_bytes(case: Case) -> int:
    """Returns the bytes of weights that sampling holds a second time in another layout: the embedding sharded over its
    width for lookups, and where layers are scanned, the query and key matrices as the prefill reads them."""
    scanned = case.config.sampler.layers == "scanned"
    leaves = [leaf for name, leaf in case.spec["layers"].items() if scanned and name in RELAID]
    matrices = sum(share(leaf, GATHERED, case.sizes) for leaf in leaves)
    return (matrices + (head(case) if case.sizes["tensor"] > 1 else 0)) * itemsize(case.cfg.dtype)


def gathered_weight_bytes(case: Case) -> int:
    """Returns the bytes of the weights that sampling copies, gathered over fsdp and cast. Frozen weights that are
    stored so already are not copied, except those that adapters are merged into, and queries', keys' and values', of
    which kernels read one matrix."""
    copied = case.weight_shards > 1 or case.config.sampler.layers != "scanned"
    every = held_bytes(case, GATHERED, case.cfg.dtype) - (0 if copied else quantized_bytes(case, GATHERED))
    if case.adapters is None or case.weight_shards > 1 or case.cfg.param_dtype != case.cfg.dtype:
        return every + (adapter_bytes(case) if decodes_unmerged(case) else 0)
    if case.config.sampler.layers != "scanned":
        return every
    adapter = case.config.adapter
    names = case.adapters
    if decodes_unmerged(case):
        together = case.config.sampler.attention == "ragged" and adapter.kind == "lora" and adapter.base is None
        names = [name for name in "qkv" if together and name in case.spec["layers"]]
    leaves = [case.spec["layers"][name] for name in names]
    return sum(share(leaf, GATHERED, case.sizes) for leaf in leaves) * itemsize(case.cfg.dtype)


def layer_elements(case: Case) -> int:
    """Returns the elements of one layer's weights, gathered over fsdp, on one device."""
    leaves = jax.tree.leaves(case.spec["layers"], is_leaf=is_spec)
    return sum(share(leaf, GATHERED, case.sizes) for leaf in leaves) // case.cfg.layers


def head(case: Case) -> int:
    """Returns the elements of the head on one device."""
    return case.cfg.vocab_size * case.cfg.width // case.sizes["tensor"]


def queries(case: Case, length: int) -> int:
    """Returns how many of a row's queries have scores at once. A kernel's scores stay in the core; it writes LANES
    copies of each query's log-sum-exp."""
    block = case.cfg.attention_block if case.cfg.attention in NO_KERNEL else LANES
    return length if block is None else min(block, length)


def layer_workspace_bytes(case: Case, tokens: int) -> int:
    """Returns the workspace of one layer for `tokens`, bytes: inputs and outputs of its products, in float32 or
    narrow."""
    cfg, tensor = case.cfg, case.sizes["tensor"]
    projected = head_entries(cfg) // tensor
    return (
        tokens
        * (2 * cfg.width + projected + mlp_entries(cfg, tensor, case.sizes["expert"]))
        * (itemsize(cfg.dtype) + FLOAT32)
        // 2
    )


def row_scores(case: Case) -> int:
    """Returns the bytes of one array of the attention's scores of a micro-batch."""
    cfg, length = case.cfg, case.share_length
    heads = cfg.heads // case.sizes["tensor"]
    return case.rows * queries(case, length) * heads * case.shape.keys * FLOAT32


def gathered_kv_bytes(case: Case) -> int:
    """Returns the bytes of a layer's keys and values of whole rows, gathered over `sequence`; 0 where rows are not
    divided."""
    if case.shares == 1:
        return 0
    keys = widest_heads(case.cfg)[1] // case.sizes["tensor"]
    return 2 * case.rows * case.shape.row_length * keys * itemsize(case.cfg.dtype)


def chunk_bytes(case: Case, tokens: int, length: int) -> int:
    """Returns the bytes of the backward pass of a layer of linear attention on `tokens` in rows of `length`, all in
    float32; the forward pass takes half; 0 without one. Of each value head four arrays of the shares' size, whose last
    dimension fills LANES, six of values and of what reads a state, and a state a chunk; of each key head queries and
    keys twelve times, around their convolution and norm, and four arrays of their products. How many there are is set
    by the totals of two compiled updates (tests/plan/test_budget.py), where the rest of this file counts arrays."""
    shape = case.cfg.linear
    if shape is None:
        return 0
    chunk = chunk_of(length)
    lanes = max(chunk, LANES)
    of_value = 4 * lanes + 6 * (shape.key_dim + shape.value_dim) + shape.key_dim * shape.value_dim // chunk
    of_key = 4 * lanes + 24 * shape.key_dim
    entries = shape.value_heads * of_value + shape.key_heads * of_key
    return tokens * entries // case.sizes["tensor"] * FLOAT32


def layer_activation_bytes(case: Case) -> int:
    """Returns the bytes that a layer keeps for the backward pass beside its input, where nothing is computed again:
    queries, keys and values before, between and after norm and rotation, in float32; the stream around its norms; the
    MLP's entries before and after what is done to them; scores; and its weights, gathered."""
    cfg, tensor, narrow = case.cfg, case.sizes["tensor"], itemsize(case.cfg.dtype)
    queries_, keys = (entries // tensor for entries in widest_heads(cfg))
    wide = 3 * queries_ + 4 * keys + 4 * cfg.width
    entries = wide * FLOAT32 + (queries_ + cfg.width + 2 * mlp_entries(cfg, tensor, case.sizes["expert"])) * narrow
    blocked = queries(case, case.share_length) < case.share_length  # blocks are always computed again
    weights = layer_elements(case) * narrow if case.weight_shards > 1 else 0
    # Keys and values put before each row's own.
    prefix = case.rows * case.shape.prefix_columns * 2 * keys * (narrow + FLOAT32)
    tokens = case.tokens
    between = max(0 if blocked else SCORES * row_scores(case), chunk_bytes(case, tokens, case.shape.row_length) // 2)
    return tokens * entries + prefix + weights + between + gathered_kv_bytes(case)


def layer_matmul_bytes(case: Case) -> int:
    """Returns the bytes of what a layer's matrices make and the backward pass needs again: queries, keys, values, what
    comes out of attention, gate and up; of experts, those of each that a token goes to, and what comes out. What is
    only added to the stream is needed where a norm comes before. In narrow dtypes the
    stream after attention is one more; the mean squares of norms are few, and not counted."""
    cfg, tensor = case.cfg, case.sizes["tensor"]
    queries_, keys = widest_heads(cfg)
    # 'splash' keeps its result and a sum of each query, and queries and keys as it reads them.
    attended = 2 * queries_ + keys if cfg.attention == "splash" else 0
    streams = 2 * cfg.width if is_narrow(cfg.dtype) and cfg.norm_place != "before" else cfg.width
    entries = (queries_ * (2 if cfg.output_gate else 1) + attended + 2 * keys) // tensor + streams
    dense = sparse = 0
    if any(map(cfg.dense, range(cfg.layers))):
        wide = max(cfg.mlp_width, cfg.shared_mlp_width or 0) // tensor
        dense = wide * (2 if cfg.mlp == "gated" else 1) + (0 if cfg.norm_place == "before" else cfg.width)
    if cfg.experts is not None:
        # What is made for other devices is computed again.
        alone = case.sizes["expert"] == 1
        sparse = cfg.experts.per_token * (2 * cfg.experts.width // tensor + cfg.width) if alone else 0
    entries += max(dense, sparse) if cfg.experts is None or cfg.experts.shared_expert is None else dense + sparse
    return case.tokens * entries * itemsize(cfg.dtype)


def saved_activation_bytes(case: Case) -> int:
    """Returns the bytes that the forward pass saves on the device for the backward pass under `Decoder.remat`."""
    cfg = case.cfg
    inputs = case.tokens * cfg.width * itemsize(cfg.dtype)
    if cfg.remat == "offload":
        return IN_FLIGHT * inputs
    beside = {"none": layer_activation_bytes, "dots": layer_matmul_bytes, "layer": lambda case: 0}[cfg.remat]
    return cfg.layers * (inputs + beside(case))


def offload_buffer_bytes(case: Case) -> int:
    """Returns the bytes of the largest leaf's moments where they are offloaded, before and after the update."""
    if not case.moments_on_host:
        return 0
    leaves = jax.tree.leaves(case.trained, is_leaf=is_spec)
    size = 2 if case.optimizer.moments == "bfloat16" else FLOAT32
    return 4 * max(share(leaf, TRAIN, case.sizes) for leaf in leaves) * size


def orthogonalized_bytes(case: Case) -> int:
    """Returns the workspace of Muon's largest stack, whose matrices are gathered and divided by layer: the matrices
    twice, their momentum, and what the iteration adds to them; 0 under other optimizers."""
    if not isinstance(case.stage.optimizer, Muon):
        return 0
    stacks = [s for s in jax.tree.leaves(case.trained, is_leaf=is_spec) if leaf_of("", s.axes).hidden]
    devices = lambda count: math.prod(case.sizes[axis] for axis in spread_over(count, case.sizes))
    return 4 * FLOAT32 * max((math.prod(s.shape) // devices(s.shape[0]) for s in stacks), default=0)


def cast_weight_bytes(case: Case) -> int:
    """Returns the bytes of the weights cast once to the compute dtype, ahead of the loop over micro-batches."""
    if case.cfg.param_dtype == case.cfg.dtype:
        return 0
    return held_bytes(case, TRAIN, case.cfg.dtype) - quantized_bytes(case, TRAIN)


def logits(case: Case) -> int:
    """Returns the bytes of a chunk's logits, of the loss's copy of them, and of the mask of its tokens."""
    chunk = min(case.stage.learner.chunk, case.share_length)
    return case.rows * chunk * case.cfg.vocab_size // case.sizes["tensor"] * (2 * FLOAT32 + 1)


def update(case: Case) -> Memory:
    """Returns the memory of an optimizer step. Throughout: the accumulated gradient, the cast weights, and the saved
    activations: every layer's input, or without remat all that the backward pass needs. Then the backward pass of a
    chunk of logits: the gathered head, its gradient in float32 and a narrow one, summed over shards. Later the backward
    pass of a layer: the micro-batch's gradient of all layers, and the layer's weights and their gradient. At the end
    moments transferred from the host, or Muon's matrices. Stored rows that the step imitates as well come after its
    samples, whose gradient waits for theirs."""
    learned, resident = learned_cases(case), resident_memory(case)
    return resident._replace(
        gradients=len(learned) * trained_bytes(case, TRAIN),
        activations=max(map(saved_activation_bytes, learned)),
        temporary=resident.temporary
        + cast_weight_bytes(case)
        + max(*map(backward_workspace_bytes, learned), offload_buffer_bytes(case), orthogonalized_bytes(case))
        + learned_route_bytes(case),
    )


def backward_workspace_bytes(case: Case) -> int:
    """Returns the workspace of a micro-batch's backward pass: of a chunk of logits, or of a layer."""
    narrow = itemsize(case.cfg.dtype)
    tokens = case.tokens
    full_weights = case.adapters is None  # frozen weights have no gradient
    back = logits(case) + head(case) * (2 * narrow + FLOAT32 if full_weights else narrow) if case.needs.logprobs else 0
    layer = trained_bytes(case, TRAIN) + layer_elements(case) * (narrow + FLOAT32 if full_weights else narrow)
    layer += max(
        layer_workspace_bytes(case, tokens) + SCORES * row_scores(case) + 2 * gathered_kv_bytes(case),
        chunk_bytes(case, tokens, case.shape.row_length),
    )
    return max(back, layer)


def scores(case: Case) -> Memory:
    """Returns the memory of a forward pass without logits: one layer's workspace."""
    tokens = case.tokens
    linear = chunk_bytes(case, tokens, case.shape.row_length) // 2
    layer = max(layer_workspace_bytes(case, tokens) + SCORES * row_scores(case) + gathered_kv_bytes(case), linear)
    resident = resident_memory(case)
    return resident._replace(
        temporary=resident.temporary
        + cast_weight_bytes(case)
        + layer
        + layer_elements(case) * itemsize(case.cfg.dtype)
        + learned_route_bytes(case),
    )


def logprobs(case: Case) -> Memory:
    """Returns the memory of a log-prob pass: one layer's workspace, or the head and a chunk of logits after the last
    layer."""
    cfg, narrow = case.cfg, itemsize(case.cfg.dtype)
    last = case.tokens * cfg.width * narrow + logits(case) + head(case) * narrow + learned_route_bytes(case)
    layer, held = scores(case), resident_memory(case).temporary
    return layer._replace(temporary=max(layer.temporary, held + cast_weight_bytes(case) + last))


def of_programs(case: Case) -> dict[str, Memory]:
    """Returns the memory of every program that decides whether the planned stages fit, and of a restore, which reads
    each device's shard in place. The first stage's begin takes no more than a restore."""
    count = {"sample": sample, "logprobs": logprobs, "scores": scores, "update": update}
    programs = {"init": init(case), "restore": max_resident(case)}
    for name, (kind, planned) in programs_of(case).items():
        first = f"{planned.name}.begin"
        if planned.before is not None and first not in programs:
            programs[first] = begin(planned)
        programs[name] = count[kind](planned)
    return programs


def peak(case: Case) -> tuple[str, int]:
    """Returns the program that takes the most memory, and its bytes on one device."""
    programs = of_programs(case)
    name = max(programs, key=lambda name: programs[name].total)
    return name, programs[name].total
