"""Memory of a run's programs on one device, by kind, from arithmetic before anything is compiled.

A program needs the run's state (weights, optimizer) and its own temporary arrays. The latter peak at one of a few
moments: the prefill or a decode step; the backward pass of a chunk of logits or of a layer. Each moment is the sum of
the arrays in the TPU compiler's buffer assignments (libtpu 0.0.42.1). Nothing is fitted except a layer of linear
attention (`chunk_bytes`): see docs/plan.md.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax

from jrl.device.sharding import GATHERED, TRAIN, num_shards, spec
from jrl.experiment import continues_optimizer, optimizers
from jrl.learning.optimizers.contract import leaf_of
from jrl.learning.optimizers.muon import Muon
from jrl.models.attention.kernels import LANES, NO_KERNEL
from jrl.models.attention.linear import chunk_of
from jrl.models.contract import ParamSpec, is_spec
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

RELAYOUT_MATRICES = tuple(kind + name for kind in ("", "full_", "linear_") for name in ("q", "k"))
IN_FLIGHT = 2  # layers whose inputs are being transferred to or from the host
SCORES = 2  # score-sized float32 arrays that exist at once: before and after the softmax, or their gradients


class Memory(NamedTuple):
    """Bytes on one device."""

    weights: int = 0  # stored for training, including the frozen reference and older versions
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
    """Returns the memory of the run's state during a stage, and of the published reward model, which is not an argument
    of the stage's programs. On devices that only sample: the published weights, and the completions that wait there."""
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
    """Returns the memory of beginning a stage: its state, and the optimizer and copies of the stage that ends, which
    are freed only afterwards. An optimizer that the stage continues is in its state."""
    ending, memory = case.before, resident_memory(case)
    if ending is None:
        return memory
    copies = trained_bytes(ending, TRAIN) * (ending.copies - ending.roles)
    freed = device_moment_bytes(ending, but=case.stage.trains if continues_optimizer(case.stage) else None)
    return memory._replace(temporary=memory.temporary + freed + copies)


def resident_beside(case: Case, name: str) -> Memory:
    """Returns the memory of the run's state while a program runs. `name`: the program's name in the program cache."""
    stage, part = split_name(name)
    if part == "sample":  # further segments are sampled on the learner's devices
        return resident_memory(sampling_case(case_of(case, name)))
    if stage is not None:
        return resident_memory(case_of(case, name))
    if part == "init":
        return init(case)
    return resident_memory(evaluated_case(case)) if part == "sample_eval" else max_resident(case)


def max_resident(case: Case) -> Memory:
    """Returns the memory of the run's state in the planned stage where it is largest."""
    return max(map(resident_memory, cases_of(case)), key=lambda memory: memory.total)


def device_moment_bytes(case: Case, but: str | None = None) -> int:
    """Returns the bytes of optimizer state on one device between updates, over all roles that the stage trains, `but`
    one."""
    on_device = [one for one in updated_cases(case) if not one.moments_on_host and one.updates != but]
    return sum(map(moment_bytes, on_device))


def checkpoint_bytes(case: Case) -> int:
    """Returns the bytes of a checkpoint of the planned stage where it is largest: every weight and moment once, however
    many devices hold it. Draws that wait, and a teacher's weights, are not counted."""

    def of_stage(case: Case) -> int:
        whole = dataclasses.replace(case, sizes=dict.fromkeys(case.sizes, 1))
        moments = sum(map(moment_bytes, updated_cases(whole)))
        return frozen(whole) + trained_bytes(whole, TRAIN) * whole.copies + moments

    return max(map(of_stage, cases_of(case)))


def updated_cases(case: Case) -> list[Case]:
    """Returns a copy of the case for each role that its stage trains."""
    return [dataclasses.replace(case, updates=role) for role in optimizers(case.stage)]


def on_host(case: Case) -> HostMemory:
    """Returns the host memory of an update, of one device."""
    inputs = case.tokens * case.cfg.width * itemsize(case.cfg.dtype)
    return HostMemory(
        optimizer=sum(map(moment_bytes, updated_cases(case))) - device_moment_bytes(case),
        activations=case.cfg.layers * inputs if case.cfg.remat == "offload" else 0,
    )


def queue_bytes(case: Case) -> int:
    """Returns the bytes on one device of the draws that wait while a stage learns: Online.lag of them, plus the number
    of segments of a completion minus one; 0 on the learner's devices if others sample, where the draws then wait. Only
    the per-token fields of Rollout are counted."""
    if not case.waiting or (case.sampler_sizes is not None and case.learner_sizes is None):
        return 0
    sampler = case.config.sampler
    truncated = any(limit is not None for limit in (sampler.top_k, sampler.top_p, sampler.min_p))
    # Token, log-prob and version; mask and turn; truncated log-prob and support size.
    by_token = 3 * 4 + 2 * 1 + 2 * 4 * truncated
    by_token += route_bytes(case)
    return case.waiting * case.sequences // case.shards * case.shape.width * by_token


def route_bytes(case: Case) -> int:
    """Returns the bytes of a token's routes, which the sampler records for replay; 0 if it does not record them."""
    if not case.stage.learner.replays_routes:
        return 0
    cfg = case.cfg
    return sum(map(cfg.sparse, range(cfg.layers))) * cfg.experts.per_token * route_dtype(cfg.experts.count).itemsize


def sampled_route_bytes(case: Case) -> int:
    """Returns the bytes of the routes that sampling records on one device: of all sequences, of the prompts in flight
    and of the next prompts."""
    resident = 2 * prompts_in_flight(case) * case.config.data.prompt_length
    return (case.sequences // case.shards * case.width + resident) * route_bytes(case)


def learned_route_bytes(case: Case) -> int:
    """Returns the bytes of the routes that learning holds on one device: as sampled, and packed into the rows of every
    minibatch."""
    packed = case.stage.learner.minibatches * case.shape.micro_batches * case.rows * case.shape.row_length
    return (case.sequences // case.shards * case.width + packed) * route_bytes(case)


def frozen(case: Case) -> int:
    """Returns the bytes of the weights under adapters on one device; 0 if all weights are trained."""
    return 0 if case.adapters is None else held_bytes(case, TRAIN, case.cfg.param_dtype)


def sample(case: Case) -> Memory:
    """Returns the memory of sampling. Throughout: gathered weights, the slots' KV cache, and the keys and values of the
    prompts in flight. Added to these: the prefill of the next prompts, whose keys and values exist together with those
    of the last ones, or the logits of a decode step. At the end no prompt is in flight, but the last sequences may move
    to a cache with fewer slots."""
    cfg, tensor = case.cfg, case.sizes["tensor"]
    prompts, length, chunk = prompts_in_flight(case), case.config.data.prompt_length, case.prefill_chunk
    scores = SCORES * prompts * cfg.heads // tensor * queries(case, chunk) * length * FLOAT32
    layer = max(scores + layer_workspace_bytes(case, prompts * chunk), chunk_bytes(case, prompts * chunk, chunk) // 2)
    decode_step = (SCORES * cfg.vocab_size + layer_workspace_bytes(case, 1) // FLOAT32) * case.slots * FLOAT32
    extra_caches = [2 * kv_cache_bytes(case, prompts, padded_columns(case, length))]
    width = padded_columns(case, case.width)
    extra_caches += [
        kv_cache_bytes(case, rows, width)
        for rows in compaction_sizes(case.slots, case.config.sampler.max_batch_compactions)
    ]
    resident = resident_memory(case)
    return resident._replace(
        cache=cache_bytes(case) + max(extra_caches),
        temporary=resident.temporary
        + gathered_weight_bytes(case)
        + relayout_bytes(case)
        + max(layer, decode_step)
        + sampled_route_bytes(case),
    )


def prompts_in_flight(case: Case) -> int:
    """Returns how many prompts of a batch shard are prefilled together."""
    return num_resident_prompts(case.prompts // case.shards, case.slots, case.samples, case.config.data.prompt_length)


def relayout_bytes(case: Case) -> int:
    """Returns the bytes of weights that sampling holds a second time in another layout: the embedding, sharded over its
    width for lookups, and if layers are scanned, the query and key matrices in the prefill's layout."""
    scanned = case.config.sampler.layers == "scanned"
    leaves = [leaf for name, leaf in case.spec["layers"].items() if scanned and name in RELAYOUT_MATRICES]
    matrices = sum(share(leaf, GATHERED, case.sizes) for leaf in leaves)
    return (matrices + (head(case) if case.sizes["tensor"] > 1 else 0)) * itemsize(case.cfg.dtype)


def gathered_weight_bytes(case: Case) -> int:
    """Returns the bytes of the weights that sampling copies, gathered over fsdp and cast. Frozen weights that are
    already stored this way are not copied, except those that adapters are merged into, and the query, key and value
    matrices, which kernels read as one matrix."""
    copied = case.weight_shards > 1 or case.config.sampler.layers != "scanned"
    gathered = held_bytes(case, GATHERED, case.cfg.dtype) - (0 if copied else quantized_bytes(case, GATHERED))
    if case.adapters is None or case.weight_shards > 1 or case.cfg.param_dtype != case.cfg.dtype:
        return gathered + (adapter_bytes(case) if decodes_unmerged(case) else 0)
    if case.config.sampler.layers != "scanned":
        return gathered
    adapter = case.config.adapter
    names = case.adapters
    if decodes_unmerged(case):
        fused_qkv = case.config.sampler.attention == "ragged" and adapter.kind == "lora" and adapter.base is None
        names = [name for name in "qkv" if fused_qkv and name in case.spec["layers"]]
    leaves = [case.spec["layers"][name] for name in names]
    return sum(share(leaf, GATHERED, case.sizes) for leaf in leaves) * itemsize(case.cfg.dtype)


def layer_elements(case: Case) -> int:
    """Returns the number of elements of one layer's weights on one device, gathered over fsdp."""
    leaves = jax.tree.leaves(case.spec["layers"], is_leaf=is_spec)
    return sum(share(leaf, GATHERED, case.sizes) for leaf in leaves) // case.cfg.layers


def head(case: Case) -> int:
    """Returns the number of elements of the head on one device."""
    return case.cfg.vocab_size * case.cfg.width // case.sizes["tensor"]


def queries(case: Case, length: int) -> int:
    """Returns how many queries of a row have scores at once. A kernel's scores stay in the core; it writes LANES copies
    of each query's log-sum-exp."""
    block = case.cfg.attention_block if case.cfg.attention in NO_KERNEL else LANES
    return length if block is None else min(block, length)


def layer_workspace_bytes(case: Case, tokens: int) -> int:
    """Returns the bytes of one layer's workspace for `tokens`: inputs and outputs of its matmuls, each at the mean size
    of float32 and the compute dtype."""
    cfg, tensor = case.cfg, case.sizes["tensor"]
    projected = head_entries(cfg) // tensor
    return (
        tokens
        * (2 * cfg.width + projected + mlp_entries(cfg, tensor, case.sizes["expert"]))
        * (itemsize(cfg.dtype) + FLOAT32)
        // 2
    )


def row_scores(case: Case) -> int:
    """Returns the bytes of one array of attention scores of a micro-batch, float32."""
    cfg, length = case.cfg, case.share_length
    heads = cfg.heads // case.sizes["tensor"]
    return case.rows * queries(case, length) * heads * case.shape.keys * FLOAT32


def gathered_kv_bytes(case: Case) -> int:
    """Returns the bytes of one layer's keys and values of full rows, gathered over `sequence`; 0 if rows are not split
    over devices."""
    if case.shares == 1:
        return 0
    keys = widest_heads(case.cfg)[1] // case.sizes["tensor"]
    return 2 * case.rows * case.shape.row_length * keys * itemsize(case.cfg.dtype)


def chunk_bytes(case: Case, tokens: int, length: int) -> int:
    """Returns the bytes of the backward pass of a linear attention layer on `tokens` in rows of `length`, all in
    float32; 0 without such layers. The forward pass takes half.

    Per value head: four arrays of a chunk's [chunk, chunk] weights, whose last dimension is padded to LANES; six arrays
    of values and six of state reads; one state per chunk. Per key head: twelve arrays of queries and twelve of keys,
    around their convolution and norm, and four of their products. These counts are fitted to the totals of two compiled
    updates (tests/plan/test_budget.py); the rest of this file counts arrays.
    """
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
    """Returns the bytes that a layer saves for the backward pass besides its input, if nothing is recomputed: queries,
    keys and values before, between and after norm and rotation, in float32; the residual stream around its norms; the
    MLP's entries before and after their activation; scores; and the layer's gathered weights."""
    cfg, tensor, narrow = case.cfg, case.sizes["tensor"], itemsize(case.cfg.dtype)
    queries_, keys = (entries // tensor for entries in widest_heads(cfg))
    wide = 3 * queries_ + 4 * keys + 4 * cfg.width
    entries = wide * FLOAT32 + (queries_ + cfg.width + 2 * mlp_entries(cfg, tensor, case.sizes["expert"])) * narrow
    blocked = queries(case, case.share_length) < case.share_length  # blocks are always recomputed
    weights = layer_elements(case) * narrow if case.weight_shards > 1 else 0
    # Keys and values of shared prefixes, which are prepended to each row's own.
    prefix = case.rows * case.shape.prefix_columns * 2 * keys * (narrow + FLOAT32)
    tokens = case.tokens
    between = max(0 if blocked else SCORES * row_scores(case), chunk_bytes(case, tokens, case.shape.row_length) // 2)
    return tokens * entries + prefix + weights + between + gathered_kv_bytes(case)


def layer_matmul_bytes(case: Case) -> int:
    """Returns the bytes of a layer's matmul outputs that the backward pass reads: queries, keys, values, the attention
    output, gate and up; of experts, those of each expert of a token, and their outputs. An output that is only added to
    the residual stream is needed if a norm precedes the addition. In narrow dtypes the stream after attention is saved
    too, unless norms come only before. The mean squares of norms are few and not counted."""
    cfg, tensor = case.cfg, case.sizes["tensor"]
    queries_, keys = widest_heads(cfg)
    # 'splash' saves its output and a sum for each query, and its queries and keys as it reads them.
    attended = 2 * queries_ + keys if cfg.attention == "splash" else 0
    streams = 2 * cfg.width if is_narrow(cfg.dtype) and cfg.norm_place != "before" else cfg.width
    entries = (queries_ * (2 if cfg.output_gate else 1) + attended + 2 * keys) // tensor + streams
    dense = sparse = 0
    if any(map(cfg.dense, range(cfg.layers))):
        wide = max(cfg.mlp_width, cfg.shared_mlp_width or 0) // tensor
        dense = wide * (2 if cfg.mlp == "gated" else 1) + (0 if cfg.norm_place == "before" else cfg.width)
    if cfg.experts is not None:
        # What experts compute for other devices is recomputed.
        alone = case.sizes["expert"] == 1
        sparse = cfg.experts.per_token * (2 * cfg.experts.width // tensor + cfg.width) if alone else 0
    entries += max(dense, sparse) if cfg.experts is None or cfg.experts.shared_expert is None else dense + sparse
    return case.tokens * entries * itemsize(cfg.dtype)


def saved_activation_bytes(case: Case) -> int:
    """Returns the bytes that the forward pass saves on one device for the backward pass under `Decoder.remat`."""
    cfg = case.cfg
    inputs = case.tokens * cfg.width * itemsize(cfg.dtype)
    if cfg.remat == "offload":
        return IN_FLIGHT * inputs
    extra = {"none": layer_activation_bytes, "dots": layer_matmul_bytes, "layer": lambda case: 0}[cfg.remat]
    return cfg.layers * (inputs + extra(case))


def offload_buffer_bytes(case: Case) -> int:
    """Returns the bytes of the largest leaf's moments, before and after the update, if moments are offloaded; else
    0."""
    if not case.moments_on_host:
        return 0
    leaves = jax.tree.leaves(case.trained, is_leaf=is_spec)
    size = 2 if case.optimizer.moments == "bfloat16" else FLOAT32
    return 4 * max(share(leaf, TRAIN, case.sizes) for leaf in leaves) * size


def orthogonalized_bytes(case: Case) -> int:
    """Returns the bytes of Muon's workspace for its largest stack, whose layers are divided over the devices (but for
    those that its experts are divided over): a device's matrices before and after each exchange, their momentum, and
    what the iteration adds to them, as compiled for v5p:4x4x4 6.7 times the matrices; 0 for other optimizers."""
    if not isinstance(case.stage.optimizer, Muon):
        return 0

    def entries(stack: ParamSpec) -> int:
        cuts = [num_shards(part, case.sizes) for part in spec(stack.axes, TRAIN, case.sizes)]
        kept = math.prod(cuts[1 : leaf_of("", stack.axes).stack])
        layers = math.ceil(stack.shape[0] * kept / math.prod(case.sizes.values()))
        return layers * math.prod(stack.shape[1:]) // kept

    stacks = [s for s in jax.tree.leaves(case.trained, is_leaf=is_spec) if leaf_of("", s.axes).hidden]
    return 7 * FLOAT32 * max(map(entries, stacks), default=0)


def cast_weight_bytes(case: Case) -> int:
    """Returns the bytes of the weights that are cast once to the compute dtype, before the loop over micro-batches."""
    if case.cfg.param_dtype == case.cfg.dtype:
        return 0
    return held_bytes(case, TRAIN, case.cfg.dtype) - quantized_bytes(case, TRAIN)


def logits(case: Case) -> int:
    """Returns the bytes of a chunk's logits, of the loss's copy of them, and of a mask of the same shape."""
    return case.rows * case.chunk * case.cfg.vocab_size // case.sizes["tensor"] * (2 * FLOAT32 + 1)


def update(case: Case) -> Memory:
    """Returns the memory of an optimizer step.

    Throughout: the accumulated gradient, the cast weights, and the saved activations: every layer's input, or without
    remat all that the backward pass needs. Then the largest of: the backward pass of a chunk of logits (the gathered
    head, its gradient in float32 and a narrow one, summed over shards); the backward pass of a layer (the micro-batch's
    gradient of all layers, the layer's weights and their gradient); at the end the moments transferred from the host,
    or Muon's matrices. Stored rows that the step also imitates follow its samples, whose gradient is held meanwhile.
    """
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
    """Returns the bytes of the workspace of a micro-batch's backward pass: of a chunk of logits or of a layer, the
    larger."""
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
    """Returns the memory of a forward pass without logits, with one layer's workspace."""
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
    """Returns the memory of a log-prob pass, with one layer's workspace or, after the last layer, the head and a chunk
    of logits."""
    cfg, narrow = case.cfg, itemsize(case.cfg.dtype)
    last = case.tokens * cfg.width * narrow + logits(case) + head(case) * narrow + learned_route_bytes(case)
    layer, resident = scores(case), resident_memory(case).temporary
    return layer._replace(temporary=max(layer.temporary, resident + cast_weight_bytes(case) + last))


def of_programs(case: Case) -> dict[str, Memory]:
    """Returns {name: memory} of every program that decides whether the planned stages fit, and of a restore, which
    reads each device's shard in place. Beginning the first stage takes no more than a restore."""
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
