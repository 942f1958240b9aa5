"""The memory of a run's programs on one device, from arithmetic: by kind, before anything is compiled.

A program takes what the run keeps (weights, optimiser) and what it makes for itself. The latter is most at one of a few
moments: prompts at work or a turn of decoding; a chunk of logits or a layer on its way back. Each moment is the sum of
the arrays that the TPU compiler was seen to hold then (its buffer assignments, libtpu 0.0.42.1), and nothing is fitted
but a layer of linear attention (`chunk_bytes`): see docs/plan.md.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from jrl.device.sharding import GATHERED, TRAIN
from jrl.models.attention.kernels import LANES
from jrl.models.attention.linear import chunk_of
from jrl.models.contract import is_spec
from jrl.rollout.sampler import narrower, prompts_at_hand
from jrl.tools.plan.case import Case, programs_of, share
from jrl.tools.plan.estimate import (
    adapter_bytes,
    cache_bytes,
    few_bits_bytes,
    head_entries,
    held_bytes,
    itemsize,
    kept_bytes,
    kept_columns,
    mlp_entries,
    moment_bytes,
    trained_bytes,
    widest_heads,
)  # fmt: skip
from jrl.tools.plan.flops import decoded_apart

FLOAT32 = 4  # bytes

RELAID = tuple(kind + name for kind in ("", "full_", "linear_") for name in ("q", "k"))
IN_FLIGHT = 2  # layers whose inputs are on their way to the host, or back
SCORES = 2  # arrays of the size of the scores, float32, that exist at once: before and after the softmax, or gradients


class Memory(NamedTuple):
    """Bytes on one device."""

    weights: int = 0  # stored for training, with the frozen reference and the version before
    optimiser: int = 0
    gradients: int = 0
    activations: int = 0  # kept by the forward pass for the backward pass
    cache: int = 0  # keys and values of the sampler
    temporary: int = 0  # everything else

    @property
    def total(self) -> int:
        return sum(self)


class HostMemory(NamedTuple):
    """Bytes in the host's memory, of one device."""

    optimiser: int = 0  # moments between updates
    activations: int = 0  # inputs of layers, from the forward pass to the backward pass

    @property
    def total(self) -> int:
        return sum(self)


def kept(case: Case) -> Memory:
    """Returns what the run holds all the time."""
    trained = trained_bytes(case, TRAIN)
    return Memory(weights=frozen(case) + trained * (1 + case.reference + case.behaviour), optimiser=moments_there(case))


def init(case: Case) -> Memory:
    """Returns the memory of the first state: weights are drawn where they lie."""
    trained = trained_bytes(case, TRAIN)
    return Memory(weights=frozen(case) + trained, optimiser=moments_there(case))


def moments_there(case: Case) -> int:
    """Returns the bytes of Adam's moments that are on a device between updates."""
    return moment_bytes(case) if case.config.optimizer.memory == "device" else 0


def on_host(case: Case) -> HostMemory:
    """Returns what an update keeps in the host's memory."""
    inputs = case.rows * case.shape.row_length * case.cfg.width * itemsize(case.cfg.dtype)
    return HostMemory(
        optimiser=moment_bytes(case) - moments_there(case),
        activations=case.cfg.layers * inputs if case.cfg.remat == "offload" else 0,
    )


def frozen(case: Case) -> int:
    """Returns the bytes of the weights under adapters on one device; 0 where all weights are trained."""
    return 0 if case.adapters is None else held_bytes(case, TRAIN, case.cfg.param_dtype)


def sample(case: Case) -> Memory:
    """Returns the memory of sampling. All through it: weights gathered over fsdp as they multiply, the slots' cache,
    and the keys and values of the prompts at hand. Then the next prompts at work, whose keys and values are made beside
    the last ones', or a turn's logits of every token. At the end, with no prompt at hand, the cache of half the slots,
    where the last sequences move there."""
    cfg, tensor = case.cfg, case.sizes["tensor"]
    prompts, length = resident(case), case.config.data.prompt_length
    scores = SCORES * prompts * cfg.heads // tensor * queries(case, length) * length * FLOAT32
    layer = max(
        scores + layer_workspace_bytes(case, prompts * length), chunk_bytes(case, prompts * length, length) // 2
    )
    turn = (SCORES * cfg.vocab_size + layer_workspace_bytes(case, 1) // FLOAT32) * case.slots * FLOAT32
    beside = [2 * kept_bytes(case, prompts, kept_columns(case, length))]
    width = kept_columns(case, case.width)
    beside += [
        kept_bytes(case, rows, width) for rows in narrower(case.slots, case.config.sampler.max_batch_compactions)
    ]
    return kept(case)._replace(
        cache=cache_bytes(case) + max(beside),
        temporary=gathered(case) + relayout_bytes(case) + max(layer, turn),
    )


def resident(case: Case) -> int:
    """Returns the prompts of a batch shard that pass through the model together."""
    return prompts_at_hand(case.prompts // case.shards, case.slots, case.config.loop.samples)


def relayout_bytes(case: Case) -> int:
    """Returns the bytes of weights that sampling holds a second time, laid out for another use: the embedding cut over
    its width, as tokens are looked up in it, and where layers are scanned, queries' and keys' matrices as prompts
    multiply with them."""
    scanned = case.config.sampler.layers == "scanned"
    leaves = [leaf for name, leaf in case.spec["layers"].items() if scanned and name in RELAID]
    matrices = sum(share(leaf, GATHERED, case.sizes) for leaf in leaves)
    return (matrices + (head(case) if case.sizes["tensor"] > 1 else 0)) * itemsize(case.cfg.dtype)


def gathered(case: Case) -> int:
    """Returns the bytes of the weights that sampling makes for itself, gathered over fsdp and as they multiply. Frozen
    ones that lie so already are read where they are, but for those that adapters are merged into."""
    copied = case.sizes["fsdp"] > 1 or case.config.sampler.layers == "unrolled"
    every = held_bytes(case, GATHERED, case.cfg.dtype) - (0 if copied else few_bits_bytes(case, GATHERED))
    if case.adapters is None or case.sizes["fsdp"] > 1 or case.cfg.param_dtype != case.cfg.dtype:
        return every + (adapter_bytes(case) if decoded_apart(case) else 0)
    if case.config.sampler.layers == "unrolled":
        return every
    leaves = [] if decoded_apart(case) else [case.spec["layers"][name] for name in case.adapters]
    return sum(share(leaf, GATHERED, case.sizes) for leaf in leaves) * itemsize(case.cfg.dtype)


def a_layer(case: Case) -> int:
    """Returns the elements of one layer's weights, gathered over fsdp, on one device."""
    leaves = jax.tree.leaves(case.spec["layers"], is_leaf=is_spec)
    return sum(share(leaf, GATHERED, case.sizes) for leaf in leaves) // case.cfg.layers


def head(case: Case) -> int:
    """Returns the elements of the head on one device."""
    return case.cfg.vocab_size * case.cfg.width // case.sizes["tensor"]


def queries(case: Case, length: int) -> int:
    """Returns how many of a row's queries have scores at once. A kernel's do not leave the core; what it says of each
    query, the logarithm of a sum, it writes LANES times."""
    block = case.cfg.attention_block if case.cfg.attention == "reference" else LANES
    return length if block is None else min(block, length)


def layer_workspace_bytes(case: Case, tokens: int) -> int:
    """Returns the bytes of one layer at work on `tokens`: inputs and outputs of its products, in float32 or narrow."""
    cfg, tensor = case.cfg, case.sizes["tensor"]
    projected = head_entries(cfg) // tensor
    return tokens * (2 * cfg.width + projected + mlp_entries(cfg, tensor)) * (itemsize(cfg.dtype) + FLOAT32) // 2


def row_scores(case: Case) -> int:
    """Returns the bytes of one array of the attention's scores of a micro-batch."""
    cfg, length = case.cfg, case.shape.row_length
    heads = cfg.heads // case.sizes["tensor"]
    return case.rows * queries(case, length) * heads * case.shape.keys * FLOAT32


def chunk_bytes(case: Case, tokens: int, length: int) -> int:
    """Returns the bytes of a layer of linear attention at work on `tokens` in rows of `length`, on its way back, all in
    float32; half of it forward; 0 without one. Of each value head four arrays of the shares' size, whose last dimension
    fills LANES, six of values and of what reads a state, and a state a chunk; of each key head queries and keys twelve
    times, around their convolution and norm, and four arrays of their products. How many there are is set by the totals
    of two compiled updates (tests/plan/test_budget.py), where the rest of this file counts arrays."""
    shape = case.cfg.linear
    if shape is None:
        return 0
    chunk = chunk_of(length)
    lanes = max(chunk, LANES)
    of_value = 4 * lanes + 6 * (shape.key_dim + shape.value_dim) + shape.key_dim * shape.value_dim // chunk
    of_key = 4 * lanes + 24 * shape.key_dim
    entries = shape.value_heads * of_value + shape.key_heads * of_key
    return tokens * entries // case.sizes["tensor"] * FLOAT32


def a_layer_keeps(case: Case) -> int:
    """Returns the bytes that a layer keeps for the backward pass beside its input, where nothing is computed again:
    queries, keys and values before, between and after norm and rotation, in float32; the stream around its norms; the
    MLP's entries before and after what is done to them; scores; and its weights, gathered."""
    cfg, tensor, narrow = case.cfg, case.sizes["tensor"], itemsize(case.cfg.dtype)
    queries_, keys = (entries // tensor for entries in widest_heads(cfg))
    wide = 3 * queries_ + 4 * keys + 4 * cfg.width
    entries = wide * FLOAT32 + (queries_ + cfg.width + 2 * mlp_entries(cfg, tensor)) * narrow
    blocked = queries(case, case.shape.row_length) < case.shape.row_length  # blocks are always computed again
    weights = a_layer(case) * narrow if case.sizes["fsdp"] > 1 else 0
    ahead = case.rows * case.shape.ahead * 2 * keys * (narrow + FLOAT32)  # keys and values put before each row's own
    tokens = case.rows * case.shape.row_length
    between = max(0 if blocked else SCORES * row_scores(case), chunk_bytes(case, tokens, case.shape.row_length) // 2)
    return tokens * entries + ahead + weights + between


def a_layer_made(case: Case) -> int:
    """Returns the bytes of what a layer's matrices make and the backward pass needs again: queries, keys, values, what
    comes out of attention, gate and up; of experts, those of each that a token goes to, and what comes out. What is
    only added to the stream is needed where a norm comes before."""
    cfg, tensor = case.cfg, case.sizes["tensor"]
    queries_, keys = widest_heads(cfg)
    entries = (queries_ * (2 if cfg.output_gate else 1) + 2 * keys) // tensor + cfg.width
    dense = sparse = 0
    if any(map(cfg.dense, range(cfg.layers))):
        wide = max(cfg.mlp_width, cfg.shared_mlp_width or 0) // tensor
        dense = wide * (2 if cfg.mlp == "gated" else 1) + (0 if cfg.norm_place == "before" else cfg.width)
    if cfg.experts is not None:
        sparse = cfg.experts.per_token * (2 * cfg.experts.width // tensor + cfg.width)
    entries += max(dense, sparse) if cfg.experts is None or cfg.experts.shared_expert is None else dense + sparse
    return case.rows * case.shape.row_length * entries * itemsize(cfg.dtype)


def kept_for_backward(case: Case) -> int:
    """Returns the bytes that the forward pass keeps on the device for the backward pass, as `Decoder.remat` says."""
    cfg = case.cfg
    inputs = case.rows * case.shape.row_length * cfg.width * itemsize(cfg.dtype)
    if cfg.remat == "offload":
        return IN_FLIGHT * inputs
    beside = {"none": a_layer_keeps, "dots": a_layer_made, "layer": lambda case: 0}[cfg.remat]
    return cfg.layers * (inputs + beside(case))


def offload_buffer_bytes(case: Case) -> int:
    """Returns the bytes of the largest leaf's moments where they come from the host, as they came and as they go."""
    if case.config.optimizer.memory == "device":
        return 0
    leaves = jax.tree.leaves(case.spec if case.adapters is None else case.adapters, is_leaf=is_spec)
    size = 2 if case.config.optimizer.moments == "bfloat16" else FLOAT32
    return 4 * max(share(leaf, TRAIN, case.sizes) for leaf in leaves) * size


def narrowed(case: Case) -> int:
    """Returns the bytes of the stored weights as they multiply: cast once, ahead of the loop over micro-batches."""
    if case.cfg.param_dtype == case.cfg.dtype:
        return 0
    return held_bytes(case, TRAIN, case.cfg.dtype) - few_bits_bytes(case, TRAIN)


def logits(case: Case) -> int:
    """Returns the bytes of a chunk's logits, of what the loss makes of them, and of where its tokens are."""
    chunk = min(case.config.learner.logprob_chunk, case.shape.row_length)
    return case.rows * chunk * case.cfg.vocab_size // case.sizes["tensor"] * (2 * FLOAT32 + 1)


def update(case: Case) -> Memory:
    """Returns the memory of an optimiser step. All through it: the gradient's sum, the weights as they multiply, and
    what the forward pass keeps: every layer's input, or where nothing is computed again all that it needs. Then a chunk
    of logits on its way back: the head gathered, its gradient in float32 and again, narrow, summed over shards. Later a
    layer on its way back: the micro-batch's own gradient of all layers, and the layer's weights and theirs. At the end
    moments that come from the host."""
    narrow = itemsize(case.cfg.dtype)
    tokens = case.rows * case.shape.row_length
    gradient = trained_bytes(case, TRAIN)
    whole = case.adapters is None  # frozen weights have no gradient
    back = logits(case) + head(case) * (2 * narrow + FLOAT32 if whole else narrow)
    layer = gradient + a_layer(case) * (narrow + FLOAT32 if whole else narrow)
    layer += max(
        layer_workspace_bytes(case, tokens) + SCORES * row_scores(case),
        chunk_bytes(case, tokens, case.shape.row_length),
    )
    return kept(case)._replace(
        gradients=gradient,
        activations=kept_for_backward(case),
        temporary=narrowed(case) + max(back, layer, offload_buffer_bytes(case)),
    )


def logprobs(case: Case) -> Memory:
    """Returns the memory of a log-prob pass: a layer at work, or the head and a chunk of logits after the last."""
    cfg, narrow = case.cfg, itemsize(case.cfg.dtype)
    tokens = case.rows * case.shape.row_length
    linear = chunk_bytes(case, tokens, case.shape.row_length) // 2
    layer = max(layer_workspace_bytes(case, tokens) + SCORES * row_scores(case), linear) + a_layer(case) * narrow
    last = tokens * cfg.width * narrow + logits(case) + head(case) * narrow
    return kept(case)._replace(temporary=narrowed(case) + max(layer, last))


def of_programs(case: Case) -> dict[str, Memory]:
    """Returns the memory of every program that decides whether a run fits, and of a restore, which is none: each device
    is given its share of the state where it lies."""
    count = {"sample": sample, "logprobs": logprobs, "update": update}
    programs = {name: count[p.kind](p.case) for name, p in programs_of(case).items()}
    return {"init": init(case), "restore": kept(case), **programs}


def peak(case: Case) -> tuple[str, int]:
    """Returns the program that takes the most memory, and its bytes on one device."""
    found = of_programs(case)
    name = max(found, key=lambda name: found[name].total)
    return name, found[name].total
