"""What the hardware can do, and the least time that a case would take if it did nothing else."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from benchmarks import shapes
from benchmarks.shapes import Learning, ModelShape, Sampling


@dataclasses.dataclass(frozen=True)
class Limits:
    """Rates measured in the run itself, the best of several."""

    matmul: float  # operations a second of a large product of matrices in the model's dtype
    read: float  # bytes a second
    copy: float  # bytes a second, those read and those written


class Work(NamedTuple):
    """Matrix products of one phase, and bytes of weights and cache that it must read."""

    operations: float
    read_bytes: float


def least_seconds(work: Work, limits: Limits) -> float:
    return max(work.operations / limits.matmul, work.read_bytes / limits.read)


def attention(shape: ModelShape, seen: float) -> float:
    """Returns operations of the attention of one token that sees `seen`: scores and their sum, all layers."""
    return 4 * shape.layers * shape.heads * shape.head_dim * seen


def prefill(shape: ModelShape, prompts: int, length: int) -> Work:
    """Returns the work on `prompts` texts: all layers at every token, and no head."""
    each = 2 * shape.layers * shape.layer_weights + attention(shape, (length + 1) / 2)
    return Work(prompts * length * each, shape.layers * shape.layer_weights * shape.item_bytes)


def decode_step(shape: ModelShape, rows: float, seen: float) -> Work:
    """Returns the work of one token for each of `rows` that see `seen` tokens."""
    operations = rows * (2 * shape.matmul_weights + attention(shape, seen))
    return Work(operations, shape.matmul_weights * shape.item_bytes + rows * seen * shape.cache_bytes)


def sampling_seconds(shape: ModelShape, case: Sampling, limits: Limits) -> float:
    """Returns the least time of a sampling call in which every distinct prompt is computed once, no slot is ever idle,
    and a step reads all weights and the filled part of the cache once."""
    lengths = shapes.lengths(case)
    distinct = case.prompts if case.distinct else case.prompts // 8
    rows = min(case.slots, len(lengths))
    steps = lengths.sum() / rows
    # The mean over all tokens drawn of what each sees: the prompt and half of what its row has drawn.
    seen = float(np.average(case.prompt_length + (lengths + 1) / 2, weights=lengths))
    first = least_seconds(prefill(shape, distinct, case.prompt_length), limits)
    return first + steps * least_seconds(decode_step(shape, rows, seen), limits)


def update_seconds(shape: ModelShape, case: Learning, limits: Limits, prompts: int) -> float:
    """Returns the least time of forward and backward on all completions and so many prompts: three products for each
    weight and token."""
    lengths = case.prompt_length + shapes.lengths(case)
    seen = float(np.average((lengths + 1) / 2, weights=lengths))
    tokens = prompts * case.prompt_length + shapes.lengths(case).sum()
    return 3 * tokens * (2 * shape.matmul_weights + attention(shape, seen)) / limits.matmul


def step_seconds(shape: ModelShape, case: Learning, limits: Limits) -> float:
    """Returns the least time of a step of GRPO: its sampling call and one update, each with every prompt once."""
    call = Sampling("", case.prompts, case.samples, case.prompt_length, case.completion_length, lengths=case.lengths,
                    slots=case.sequences)  # fmt: skip
    return sampling_seconds(shape, call, limits) + update_seconds(shape, case, limits, case.prompts)
