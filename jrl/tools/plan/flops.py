"""Floating-point operations of a run's programs, counted from shapes. A multiply-add is two operations.

Only matmuls are counted, as they are executed: attention over full rows, masked or not (with 'splash', over the blocks
that the causal mask does not remove; windows are ignored), and over full blocks of the cache. The compiler's own count
does not help: it counts the body of a loop once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp

from jrl.models.attention.kernels import NO_KERNEL, cache_block, causal_share, padded_length
from jrl.models.attention.kv_cache import ends
from jrl.models.flops import attention, head_weights, layer_weights, linear_attention, of_experts, softmax_attention
from jrl.models.leaves import layers_of as layers_with
from jrl.models.shape import Decoder
from jrl.tools.plan.case import Case, learned_cases, programs_of


class Flops(NamedTuple):
    """Operations of a program over all devices."""

    weights: float  # matmuls in Decoder.dtype: with weights, and a kernel's scores and weighted values
    attention: float  # scores and weighted values that attention without a kernel computes in float32

    @property
    def total(self) -> float:
        return self.weights + self.attention


def layers_of(case: Case) -> int:
    return layer_weights(case.spec, case.cfg.experts) + input_weights(case)


def adapter_weights(case: Case) -> int:
    """Returns the number of adapter elements that a token is multiplied with; 0 without adapters."""
    leaves = [pair[name] for pair in (case.adapters or {}).values() for name in ("a", "b")]
    expert_elements = sum(math.prod(leaf.shape) for leaf in leaves if of_experts(leaf))
    chosen = expert_elements // case.cfg.experts.count * case.cfg.experts.per_token if expert_elements else 0
    return sum(math.prod(leaf.shape) for leaf in leaves if not of_experts(leaf)) + chosen


def decoded_weights(case: Case) -> int:
    """Returns the number of elements that a token is multiplied with in the layers during sampling. Merging is not
    counted."""
    return layers_of(case) + (adapter_weights(case) if decodes_unmerged(case) else 0)


def decodes_unmerged(case: Case) -> bool:
    """Returns whether sampling multiplies with adapters separately from the weights."""
    return case.adapters is not None and case.config.adapter.sampling == "unmerged"


def input_weights(case: Case) -> int:
    """Returns the number of elements of the matrix that computes per-layer inputs; 0 without them."""
    leaf = case.spec.get("layer_project")
    return 0 if leaf is None else math.prod(leaf.shape)


def carried(case: Case) -> int:
    """Returns how many states linear attention carries through a packed row: 2 if continuations share a prefix in their
    row, else 1."""
    return 2 if case.shape.samples > 1 and not case.shape.prefix_columns else 1


def of_rows(cfg: Decoder, tokens: int, length: int, states: int = 1) -> Flops:
    """Returns the operations of attention in the forward pass, for `tokens` in rows of `length`."""
    linear = float(tokens * linear_attention(cfg, length, states))
    if cfg.attention in NO_KERNEL:
        return Flops(0.0, tokens * softmax_attention(cfg, length) + linear)
    return Flops(tokens * softmax_attention(cfg, length) * causal_share(length), linear)


def plus(*parts: Flops) -> Flops:
    return Flops(*(sum(column) for column in zip(*parts)))


def read_columns(case: Case) -> float:
    """Returns the mean number of cache columns that a decode step reads, for completions of maximum length: the first
    step reads the prompt, the last all tokens except the one that it draws, rounded up to full blocks."""
    block_ends = ends(case.width, case.width, case.config.sampler.layout)
    if case.config.sampler.attention == "ragged":
        entries = heads_at_once(case) * padded_length(case.cfg.head_dim)
        block = cache_block(case.width, entries * jnp.dtype(case.cfg.dtype).itemsize)
        block_ends = tuple(range(block, padded_length(case.width) + 1, block))

    def mean(first: int) -> float:
        last = min(first + case.drawn, case.width) - 1
        steps = lambda start, end: max(min(end, last) - max(start + 1, first) + 1, 0)  # that read this block last
        return sum(steps(*block) * block[1] for block in zip((0, *block_ends), block_ends)) / (last - first + 1)

    return sum(map(mean, case.begun)) / len(case.begun)


def heads_at_once(case: Case) -> int:
    """Returns the number of key heads that ragged attention multiplies a query with: all of a device."""
    return case.cfg.kv_heads // case.sizes["tensor"]


def stepping(cfg: Decoder, columns: float) -> float:
    """Returns the attention operations of decoding one token: `attention` over `columns` of the cache; in linear
    attention layers three products with the state instead."""
    if cfg.linear is None:
        return attention(cfg, columns)
    linear = len(layers_with(cfg, "linear_q"))
    shape = cfg.linear
    full_attention = 2 * (2 * cfg.heads * cfg.head_dim * columns)
    return (cfg.layers - linear) * full_attention + linear * shape.value_heads * 6 * shape.key_dim * shape.value_dim


def prefill(case: Case) -> Flops:
    """Returns the operations of running every prompt once through the layers, without logits."""
    return plus(Flops(2.0 * case.prompts * case.prefilled * decoded_weights(case), 0.0), prefill_attention(case))


def prefill_attention(case: Case) -> Flops:
    """Returns the operations of attention in the prefill: over all columns of a prompt's row; a kernel's only over the
    prefilled ones."""
    columns = case.config.data.prompt_length if case.cfg.attention in NO_KERNEL else round(case.prefilled)
    return of_rows(case.cfg, round(case.prompts * case.prefilled), columns)


def sample(case: Case) -> Flops:
    """Returns the operations of a sampling call: every prompt once, then every decode step."""
    return plus(prefill(case), decode(case))


def decode(case: Case) -> Flops:
    """Returns the operations of decoding if every completion has the maximum length: each step feeds one token to every
    slot of every shard and reads the filled blocks of its cache. A kernel multiplies a query with the keys and values
    of all heads, and bfloat16 values with weights that are split into two bfloat16 numbers."""
    tokens, columns = case.decode_steps * case.slots * case.shards, read_columns(case)
    matrices = 2.0 * tokens * (decoded_weights(case) + head_weights(case.cfg))
    attended = stepping(case.cfg, columns)
    if case.config.sampler.attention in NO_KERNEL:
        return Flops(matrices, float(tokens * attended))
    linear = stepping(case.cfg, 0)
    by_kernel = (attended - linear) * heads_at_once(case) * (1.5 if case.cfg.dtype == "bfloat16" else 1)
    return Flops(matrices + tokens * by_kernel, float(tokens * linear))


def completions_in_a_row(case: Case) -> int:
    """Returns how many completions of maximum length a packed row holds: with a shared prompt, those of all complete
    groups that fit, and part of one more group."""
    s = case.shape
    prefix = case.config.data.prompt_length - 1 if s.samples > 1 else 0
    if s.prefix_columns:
        return max(min(s.row_length // (s.width - prefix), s.places, s.samples), 1)
    group = prefix + s.samples * (s.width - prefix)
    rest = max(s.row_length % group - prefix, 0) // (s.width - prefix)
    return max(min(s.row_length // group * s.samples + rest, s.places), 1)


def read_positions(case: Case) -> int:
    """Returns the number of positions of a full batch whose logits are computed: full chunks, after the positions that
    are needed have been moved together; 0 if the objective reads no log-probs."""
    if not case.needs.logprobs:
        return 0
    s, chunk = case.shape, case.chunk
    needed = completions_in_a_row(case) * case.completion_length
    if case.shares > 1:  # a share may contain nothing but completions
        needed = min(needed, case.share_length)
    return case.micro_batches * s.rows * case.shares * -(-needed // chunk) * chunk


def scores(case: Case) -> Flops:
    """Returns the operations of one forward pass over a full batch of packed rows, without logits."""
    tokens = case.micro_batches * case.shape.rows * case.shape.row_length
    layers = layers_of(case) + adapter_weights(case)
    return plus(Flops(2.0 * tokens * layers, 0.0), of_rows(case.cfg, tokens, case.shape.keys, carried(case)))


def logprobs(case: Case) -> Flops:
    """Returns the operations of one log-prob pass over a full batch of packed rows."""
    return plus(scores(case), Flops(2.0 * read_positions(case) * head_weights(case.cfg), 0.0))


def update(case: Case) -> Flops:
    """Returns the operations of one optimizer step on a full batch, and on full rows of any data that it imitates."""
    return plus(*map(forward_and_backward, learned_cases(case)))


def forward_and_backward(case: Case) -> Flops:
    """Returns the operations of a full batch's gradient: the forward pass, the backward pass at twice that, and what is
    recomputed.

    The head is always recomputed. Attention is recomputed if Decoder.remat saves only matmul outputs (with 'splash' its
    output is saved too). If Decoder.remat saves only the inputs of layers, all of a layer is recomputed except its last
    matmul. That output is needed only if more than a sum follows: a norm, a per-layer input, or an expert's weight,
    whose gradient is the product of the output and the incoming gradient. If attention runs in blocks, the scores, half
    of it, are computed once more.

    A kernel's backward pass has seven products of the size of the scores, three for queries and four for keys and
    values; its forward pass has two. Frozen weights have no gradient, which saves half of their backward pass.
    """
    tokens = case.micro_batches * case.shape.rows * case.shape.row_length
    layers, adapters = (2.0 * tokens * n for n in (layers_of(case), adapter_weights(case)))
    attended = of_rows(case.cfg, tokens, case.shape.keys, carried(case))
    head = 2.0 * read_positions(case) * head_weights(case.cfg)
    passes = 3 if case.adapters is None else 2
    weights = passes * layers + 3 * adapters + (passes + 1) * head
    attention_saved = case.cfg.remat == "none" or (case.cfg.remat == "dots" and case.cfg.attention == "splash")
    recomputed = 0.0 if attention_saved else 1.0
    if case.cfg.remat in ("layer", "offload"):
        has_shared_expert = case.cfg.experts is not None and case.cfg.experts.shared_expert is not None
        summed = case.cfg.norm_place == "before" and case.cfg.layer_inputs is None and not has_shared_expert
        last = math.prod(case.spec["layers"]["down"].shape) if summed and "down" in case.spec["layers"] else 0
        weights += layers + adapters - 2.0 * tokens * last
    elif case.sizes["expert"] > 1:  # what experts compute for other devices is not saved
        leaves = [leaf for leaf in case.spec["layers"].values() if of_experts(leaf)]
        chosen = sum(math.prod(leaf.shape) for leaf in leaves) // case.cfg.experts.count * case.cfg.experts.per_token
        weights += 2.0 * tokens * chosen
    blocks = 0.0
    if case.cfg.attention_block is not None and case.cfg.attention_block < case.share_length:
        blocks = 0.5 * tokens * softmax_attention(case.cfg, case.shape.keys)
    kernel = (1 + 3.5 + recomputed) * attended.weights
    return Flops(weights + kernel, (3 + recomputed) * attended.attention + blocks)


def of_programs(case: Case) -> dict[str, Flops]:
    """Returns {program name: operations of one call} of every program that computes matmuls."""
    count = {"sample": sample, "logprobs": logprobs, "scores": scores, "update": update}
    return {name: count[p.kind](p.case) for name, p in programs_of(case).items()}
