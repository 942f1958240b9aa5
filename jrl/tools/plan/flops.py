"""Floating-point operations of a run's programs, counted from shapes: a multiply-add is two.

Only products of matrices are counted, as they are computed: attention over whole rows, masked or not (by 'splash',
over blocks of which the causal mask leaves something; windows are not looked at), and over whole blocks of the cache.
The compiler's count does not help here: it counts the body of a loop once.
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
    """Operations of a whole program, over all devices."""

    weights: float  # products in Decoder.dtype: with weights, and a kernel's scores and weighted values
    attention: float  # scores and weighted values, which our own attention computes in float32

    @property
    def total(self) -> float:
        return self.weights + self.attention


def layers_of(case: Case) -> int:
    return layer_weights(case.spec, case.cfg.experts) + input_weights(case)


def adapter_weights(case: Case) -> int:
    """Returns the elements of the adapters' matrices that a token is multiplied with; 0 where there are none."""
    leaves = [pair[name] for pair in (case.adapters or {}).values() for name in ("a", "b")]
    some = sum(math.prod(leaf.shape) for leaf in leaves if of_experts(leaf))
    chosen = some // case.cfg.experts.count * case.cfg.experts.per_token if some else 0
    return sum(math.prod(leaf.shape) for leaf in leaves if not of_experts(leaf)) + chosen


def decoded_weights(case: Case) -> int:
    """Returns the elements that a token is multiplied with in the layers during sampling. Merging is not counted."""
    return layers_of(case) + (adapter_weights(case) if decodes_unmerged(case) else 0)


def decodes_unmerged(case: Case) -> bool:
    """Whether sampling multiplies with adapters separately from the weights."""
    return case.adapters is not None and case.config.adapter.sampling == "unmerged"


def input_weights(case: Case) -> int:
    """Returns the elements of the matrix that computes the per-layer inputs; 0 without them."""
    leaf = case.spec.get("layer_project")
    return 0 if leaf is None else math.prod(leaf.shape)


def carried(case: Case) -> int:
    """Returns the states that linear attention carries through a packed row: continuations have separate ones."""
    return 2 if case.shape.samples > 1 and not case.shape.prefix_columns else 1


def of_rows(cfg: Decoder, tokens: int, length: int, states: int = 1) -> Flops:
    """Returns the operations of attention forward, of `tokens` in rows of `length`."""
    linear = float(tokens * linear_attention(cfg, length, states))
    if cfg.attention in NO_KERNEL:
        return Flops(0.0, tokens * softmax_attention(cfg, length) + linear)
    return Flops(tokens * softmax_attention(cfg, length) * causal_share(length), linear)


def plus(*parts: Flops) -> Flops:
    return Flops(*(sum(column) for column in zip(*parts)))


def read_columns(case: Case) -> float:
    """Returns the number of columns of the cache that a decode step reads, the mean over what a step draws of a
    completion of maximum length: the first step reads the prompt, the last all tokens but the one it draws, rounded up
    to full blocks."""
    block_ends = ends(case.width, case.width, case.config.sampler.layout)
    if case.config.sampler.attention == "ragged":
        entries = heads_at_once(case) * padded_length(case.cfg.head_dim)
        block = cache_block(case.width, entries * jnp.dtype(case.cfg.dtype).itemsize)
        block_ends = tuple(range(block, padded_length(case.width) + 1, block))

    def mean(first: int) -> float:
        last = min(first + case.drawn, case.width) - 1
        steps = lambda start, end: max(min(end, last) - max(start + 1, first) + 1, 0)  # that see start + 1 to end
        return sum(steps(*block) * block[1] for block in zip((0, *block_ends), block_ends)) / (last - first + 1)

    return sum(map(mean, case.begun)) / len(case.begun)


def heads_at_once(case: Case) -> int:
    """Returns the number of heads whose keys ragged attention multiplies a query with: all heads of a device."""
    return case.cfg.kv_heads // case.sizes["tensor"]


def stepping(cfg: Decoder, columns: float) -> float:
    """Returns the operations of one token that is decoded: `attention` over the cache's columns, but of linear
    attention three products with its state."""
    if cfg.linear is None:
        return attention(cfg, columns)
    linear = len(layers_with(cfg, "linear_q"))
    shape = cfg.linear
    full_attention = 2 * (2 * cfg.heads * cfg.head_dim * columns)
    return (cfg.layers - linear) * full_attention + linear * shape.value_heads * 6 * shape.key_dim * shape.value_dim


def prefill(case: Case) -> Flops:
    """Returns the operations of running every prompt once through the layers; no logit is computed."""
    return plus(Flops(2.0 * case.prompts * case.prefilled * decoded_weights(case), 0.0), prefill_attention(case))


def prefill_attention(case: Case) -> Flops:
    """Returns the operations of prompts' attention: to all columns of a prompt's row, but a kernel's to those that are
    prefilled."""
    columns = case.config.data.prompt_length if case.cfg.attention in NO_KERNEL else round(case.prefilled)
    return of_rows(case.cfg, round(case.prompts * case.prefilled), columns)


def sample(case: Case) -> Flops:
    """Returns the operations of a sampling call: every prompt once, then every decode step."""
    return plus(prefill(case), decode(case))


def decode(case: Case) -> Flops:
    """Returns the operations of decoding where every completion has the maximum length: each step feeds one token to
    every slot of every shard, and looks at the blocks of its cache that are filled. A kernel multiplies a
    query with the keys and values of all heads, and values of bfloat16 with weights of two such numbers."""
    tokens, columns = case.decode_steps * case.slots * case.shards, read_columns(case)
    matrices = 2.0 * tokens * (decoded_weights(case) + head_weights(case.cfg))
    attended = stepping(case.cfg, columns)
    if case.config.sampler.attention in NO_KERNEL:
        return Flops(matrices, float(tokens * attended))
    linear = stepping(case.cfg, 0)
    by_kernel = (attended - linear) * heads_at_once(case) * (1.5 if case.cfg.dtype == "bfloat16" else 1)
    return Flops(matrices + tokens * by_kernel, float(tokens * linear))


def completions_in_a_row(case: Case) -> int:
    """Returns how many completions of maximum length a packed row holds: those of as many complete groups as fit, where
    groups share their prompt, and of one more."""
    s = case.shape
    prefix = case.config.data.prompt_length - 1 if s.samples > 1 else 0
    if s.prefix_columns:
        return max(min(s.row_length // (s.width - prefix), s.places, s.samples), 1)
    group = prefix + s.samples * (s.width - prefix)
    rest = max(s.row_length % group - prefix, 0) // (s.width - prefix)
    return max(min(s.row_length // group * s.samples + rest, s.places), 1)


def read_positions(case: Case) -> int:
    """Returns the positions of a full batch whose logits are computed: every chunk of a row that holds a token of a
    completion, wanted ones moved together; 0 where the objective reads no log-probs."""
    if not case.needs.logprobs:
        return 0
    s, learner = case.shape, case.stage.learner
    chunk = min(learner.chunk, case.share_length)
    needed = completions_in_a_row(case) * case.completion_length
    if case.shares > 1:  # of a share that holds nothing else
        needed = min(needed, case.share_length)
    return case.micro_batches * s.rows * case.shares * -(-needed // chunk) * chunk


def scores(case: Case) -> Flops:
    """Returns the operations of one pass forward over a full batch of packed rows, without logits."""
    tokens = case.micro_batches * case.shape.rows * case.shape.row_length
    layers = layers_of(case) + adapter_weights(case)
    return plus(Flops(2.0 * tokens * layers, 0.0), of_rows(case.cfg, tokens, case.shape.keys, carried(case)))


def logprobs(case: Case) -> Flops:
    """Returns the operations of one log-prob pass over a full batch of packed rows."""
    return plus(scores(case), Flops(2.0 * read_positions(case) * head_weights(case.cfg), 0.0))


def update(case: Case) -> Flops:
    """Returns the operations of one optimizer step on a full batch, and on full rows of what it imitates as well."""
    return plus(*map(forward_and_backward, learned_cases(case)))


def forward_and_backward(case: Case) -> Flops:
    """Returns the operations of a full batch's gradient: forward, backward at twice that, and forward again for what is
    not kept: always the head; attention, where Decoder.remat keeps only what matrices made (what 'splash' made is kept
    with it); all of the layers but their last product, where it keeps only their inputs (that is needed where more than
    a sum comes after it: a norm, a layer's own input, an expert's weight, whose gradient is its product with what comes
    back); and once more the scores of attention, which are half of it, where they are computed a block at a time. A
    kernel's way back has seven products of the size of scores, three for the queries and four for keys and values,
    where forward has two. Frozen weights have no gradient, which is half of their backward pass."""
    tokens = case.micro_batches * case.shape.rows * case.shape.row_length
    layers, adapters = (2.0 * tokens * n for n in (layers_of(case), adapter_weights(case)))
    attended = of_rows(case.cfg, tokens, case.shape.keys, carried(case))
    head = 2.0 * read_positions(case) * head_weights(case.cfg)
    passes = 3 if case.adapters is None else 2
    weights = passes * layers + 3 * adapters + (passes + 1) * head
    kept = case.cfg.remat == "none" or (case.cfg.remat == "dots" and case.cfg.attention == "splash")
    again = 0.0 if kept else 1.0
    if case.cfg.remat in ("layer", "offload"):
        beside = case.cfg.experts is not None and case.cfg.experts.shared_expert is not None
        summed = case.cfg.norm_place == "before" and case.cfg.layer_inputs is None and not beside
        last = math.prod(case.spec["layers"]["down"].shape) if summed and "down" in case.spec["layers"] else 0
        weights += layers + adapters - 2.0 * tokens * last
    elif case.sizes["expert"] > 1:  # what experts make for other devices is not kept
        leaves = [leaf for leaf in case.spec["layers"].values() if of_experts(leaf)]
        chosen = sum(math.prod(leaf.shape) for leaf in leaves) // case.cfg.experts.count * case.cfg.experts.per_token
        weights += 2.0 * tokens * chosen
    blocks = 0.0
    if case.cfg.attention_block is not None and case.cfg.attention_block < case.share_length:
        blocks = 0.5 * tokens * softmax_attention(case.cfg, case.shape.keys)
    kernel = (1 + 3.5 + again) * attended.weights
    return Flops(weights + kernel, (3 + again) * attended.attention + blocks)


def of_programs(case: Case) -> dict[str, Flops]:
    """Returns the operations of one call of each program that multiplies matrices."""
    count = {"sample": sample, "logprobs": logprobs, "scores": scores, "update": update}
    return {name: count[p.kind](p.case) for name, p in programs_of(case).items()}
