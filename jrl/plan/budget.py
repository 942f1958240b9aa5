"""The memory of a run's programs on one device, from arithmetic: by kind, before anything is compiled.

What a program takes is what the run keeps (weights, optimiser) and what it makes for itself: gradients, activations,
cache, and the rest, which is temporary. Copies are counted as the TPU compiler was seen to make them; `jrl plan` prints
both numbers side by side where libtpu is installed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from jrl.models.contract import is_spec
from jrl.plan.case import Case, programs_of, share
from jrl.plan.estimate import adapter_bytes, cache_bytes, held_bytes, itemsize, mlp_entries, trained_bytes
from jrl.plan.flops import decoded_apart
from jrl.sharding import GATHERED, TRAIN

FLOAT32 = 4  # bytes

# Arrays of the size of the scores that exist at once. Float32 products are of three bfloat16 parts each (1.5 times the
# bytes); the backward pass has the softmax's gradient too. Calibrated: 8B, v5p:4x4x4, libtpu 0.0.42.1.
FORWARD_SCORES, BACKWARD_SCORES = 4, 8


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


def kept(case: Case) -> Memory:
    """Returns what the run holds all the time."""
    trained = trained_bytes(case, TRAIN)
    return Memory(weights=frozen(case) + trained * (1 + case.reference + case.behaviour), optimiser=2 * trained)


def init(case: Case) -> Memory:
    """Returns the memory of the first state: weights are drawn where they lie."""
    trained = trained_bytes(case, TRAIN)
    return Memory(weights=frozen(case) + trained, optimiser=2 * trained)


def frozen(case: Case) -> int:
    """Returns the bytes of the weights under adapters on one device; 0 where all weights are trained."""
    return 0 if case.adapters is None else held_bytes(case, TRAIN, case.cfg.param_dtype)


def sample(case: Case) -> Memory:
    """Returns the memory of sampling: weights gathered over fsdp as they multiply, embedding and head once more as they
    are exchanged; the prompts' keys and values beside the slots'; the prefill's layer at work, or a turn's logits."""
    cfg, tensor = case.cfg, case.sizes["tensor"]
    prompts = case.prompts // case.shards
    length = case.config.data.prompt_length
    a_column = 2 * cfg.layers * cfg.kv_heads // tensor * cfg.head_dim * itemsize(cfg.dtype)
    scores = prompts * cfg.heads // tensor * queries(case, length) * length * FLOAT32
    hidden = prompts * length * (2 * cfg.width + mlp_entries(cfg, tensor) // 3) * FLOAT32
    logits = 3 * case.slots * cfg.vocab_size * FLOAT32
    ends = 2 * head(case) * itemsize(cfg.dtype)
    return kept(case)._replace(
        cache=cache_bytes(case) + a_column * prompts * length,
        temporary=gathered(case) + ends + max(FORWARD_SCORES * scores + hidden, logits),
    )


def gathered(case: Case) -> int:
    """Returns the bytes of the weights that sampling makes for itself, gathered over fsdp and as they multiply. Frozen
    ones that lie so already are read where they are, but for those that adapters are merged into."""
    every = held_bytes(case, GATHERED, case.cfg.dtype)
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
    """Returns how many of a row's queries have scores at once."""
    block = case.cfg.attention_block
    return length if block is None else min(block, length)


def at_work(case: Case, tokens: int, scores: int) -> int:
    """Returns the bytes of one layer at work on `tokens`: inputs and outputs of its products, and `scores` arrays of
    the size of the attention's scores, float32."""
    cfg, tensor = case.cfg, case.sizes["tensor"]
    narrow = itemsize(cfg.dtype)
    projected = (2 * cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim // tensor
    wide = 2 * cfg.width + projected + mlp_entries(cfg, tensor)
    a_score = case.rows * queries(case, case.shape.row_length) * cfg.heads // tensor * case.shape.row_length * FLOAT32
    return tokens * wide * (narrow + FLOAT32) + scores * a_score


def update(case: Case) -> Memory:
    """Returns the memory of an optimiser step: the gradient's sum and the micro-batch's own; the input of every layer;
    one layer at work, or all that it keeps where nothing is computed again; a chunk of logits; head and embedding."""
    cfg = case.cfg
    tokens = case.rows * case.shape.row_length
    inputs = cfg.layers * tokens * cfg.width * itemsize(cfg.dtype)
    working = at_work(case, tokens, BACKWARD_SCORES)
    made = 2 * FLOAT32 if case.adapters is None else itemsize(cfg.param_dtype)  # frozen weights have no gradient
    weights = a_layer(case) * (made + itemsize(cfg.dtype))
    ends = 2 * head(case) * itemsize(cfg.dtype)
    chunk = min(case.config.learner.logprob_chunk, case.shape.row_length)
    logits = 3 * case.rows * chunk * cfg.vocab_size // case.sizes["tensor"] * FLOAT32
    every, blocked = cfg.remat == "none", queries(case, case.shape.row_length) < case.shape.row_length
    return kept(case)._replace(
        gradients=2 * trained_bytes(case, TRAIN),
        activations=inputs + (cfg.layers * at_work(case, tokens, 0 if blocked else 2) if every else 0),
        temporary=working + weights + ends + logits,
    )


def logprobs(case: Case) -> Memory:
    """Returns the memory of a log-prob pass: a layer at work, or the head and a chunk of logits after the last."""
    cfg = case.cfg
    tokens = case.rows * case.shape.row_length
    chunk = min(case.config.learner.logprob_chunk, case.shape.row_length)
    logits = 3 * case.rows * chunk * cfg.vocab_size // case.sizes["tensor"] * FLOAT32
    layers = at_work(case, tokens, FORWARD_SCORES) + a_layer(case) * (FLOAT32 + itemsize(cfg.dtype))
    return kept(case)._replace(temporary=max(layers, 2 * head(case) * itemsize(cfg.dtype) + logits))


def of_programs(case: Case) -> dict[str, Memory]:
    """Returns the memory of every program that decides whether a run fits."""
    count = {"sample": sample, "logprobs": logprobs, "update": update}
    return {"init": init(case), **{name: count[p.kind](p.case) for name, p in programs_of(case).items()}}


def peak(case: Case) -> tuple[str, int]:
    """Returns the program that takes the most memory, and its bytes on one device."""
    found = of_programs(case)
    name = max(found, key=lambda name: found[name].total)
    return name, found[name].total
