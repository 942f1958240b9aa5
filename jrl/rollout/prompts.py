"""Converts visits to the arrays that the sampler takes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jrl.device.placement import rows_on_mesh
from jrl.device.sharding import batch_sharding, rows_over_shards
from jrl.tasks.data.prompts import Visit
from jrl.types import PromptBatch

# Streams separate the random keys of a prompt in training, evaluation and interactive use.
TRAIN_STREAM, EVAL_STREAM, INTERACTIVE_STREAM = 0, 1, 2


def prompt_batch(visits: Sequence[Visit], *, prompt_length: int, pad_id: int) -> PromptBatch:
    """Returns the prompts as host arrays: tokens [B, P] int32 padded on the right, length [B] int32, uid [B, 2] uint32.

    Raises: ValueError for a prompt that is empty or longer than `prompt_length`.
    """
    tokens = np.full((len(visits), prompt_length), pad_id, np.int32)
    for row, visit in zip(tokens, visits):
        if not 1 <= len(visit.prompt) <= prompt_length:
            raise ValueError(
                f"example {visit.example.id!r}: the prompt has {len(visit.prompt)} tokens, not 1 to {prompt_length}"
            )
        row[: len(visit.prompt)] = visit.prompt
    return PromptBatch(
        tokens=tokens,
        length=np.array([len(visit.prompt) for visit in visits], np.int32),
        uid=np.array([visit.uid for visit in visits], np.uint32).reshape(len(visits), 2),
    )


def place_prompts(visits: Sequence[Visit], count: int, width: int, pad_id: int, mesh: Mesh) -> PromptBatch:
    """Returns prompts on the device, sharded over the batch axes; missing ones are prompts of length 0."""
    host = padded_prompts(visits, count, width, pad_id, mesh)
    return jax.tree.map(functools.partial(rows_on_mesh, mesh), host)


def place_asked(
    asked: Sequence[tuple[int, ...]], visits: Sequence[Visit], count: int, width: int, pad_id: int, mesh: Mesh
) -> PromptBatch:
    """Returns prompts to sample from, on the device, with the prompts that their rows hold.

    Args:
      asked: the prompt to sample from for each visit; (): sample nothing. The others as for `place_prompts`.
    """
    row_prompts = padded_prompts(visits, count, width, pad_id, mesh)
    sampled_visits = [visit._replace(prompt=prompt or visit.prompt) for prompt, visit in zip(asked, visits)]
    prompts = padded_prompts(sampled_visits, count, width, pad_id, mesh)
    prompts.length[[i for i, prompt in enumerate(asked) if not prompt]] = 0
    return jax.tree.map(functools.partial(rows_on_mesh, mesh), with_rows(prompts, row_prompts))


def with_rows(prompts: PromptBatch, rows: PromptBatch) -> PromptBatch:
    """Returns prompts to sample from, with the prompts that their rows hold."""
    return prompts.replace(row_tokens=rows.tokens, row_length=rows.length)


def padded_prompts(visits: Sequence[Visit], count: int, width: int, pad_id: int, mesh: Mesh) -> PromptBatch:
    """Returns the arrays of `place_prompts`, on the host."""
    host = prompt_batch(visits, prompt_length=width, pad_id=pad_id)
    rows = rows_over_shards(count, mesh)
    return jax.tree.map(lambda x: np.concatenate([x, np.zeros((rows - len(x), *x.shape[1:]), x.dtype)]), host)


def abstract_prompts(count: int, width: int, mesh: Mesh) -> PromptBatch:
    """Returns a batch of prompts as shapes."""
    rows = rows_over_shards(count, mesh)
    shape = lambda dims, dtype: jax.ShapeDtypeStruct(dims, dtype, sharding=batch_sharding(mesh, len(dims)))
    return PromptBatch(
        tokens=shape((rows, width), np.int32), length=shape((rows,), np.int32), uid=shape((rows, 2), np.uint32)
    )
