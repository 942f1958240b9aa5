"""Rows of a Rollout from several calls of the sampler: cut, continued and combined. Arrays are of one batch shard."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops.keys import row_key, token_key
from jrl.ops.router import not_recorded, replayed
from jrl.rollout.strategies.contract import Fields, Shard
from jrl.types import Array

BY_TOKEN = ("tokens", "action_mask", "sampler_logprobs", "truncated_logprobs", "support_size", "version", "turn")
ROUTES = "routes"  # also by token, if they are recorded
EMPTY = {"action_mask": False, "sampler_logprobs": 0, "truncated_logprobs": 0, "support_size": 0, "version": -1,
         "turn": 0}  # fmt: skip


def drawn_by_visit(shard: Shard) -> Array:
    """Returns two numbers for every prompt, [2, b] float32, uniform in [0, 1). Their key is of the sample index after
    the last, so that it differs from those of the samples."""
    draw = lambda uid: jax.random.uniform(token_key(row_key(shard.key, shard.stream, uid, shard.samples), 0), (2,))
    return jax.vmap(draw)(shard.prompts.uid).T


def widened(fields: Fields, width: int, pad_id: int) -> Fields:
    """Returns rows of `width` columns: adds empty columns, or cuts columns off, which must be empty."""
    fill = {**EMPTY, "tokens": pad_id}

    def change(name: str, array: Array | None) -> Array | None:
        if array is None or name not in (*BY_TOKEN, ROUTES):
            return array
        missing, no_padding = max(0, width - array.shape[1]), [(0, 0)] * (array.ndim - 2)
        empty = not_recorded(array.dtype) if name == ROUTES else fill[name]
        return jnp.pad(array, ((0, 0), (0, missing), *no_padding), constant_values=empty)[:, :width]

    return {name: change(name, array) for name, array in fields.items()}


def appended(tokens: Array, length: Array, more: Array, pad_id: int) -> tuple[Array, Array]:
    """Returns the rows with the tokens `more` after each, [n, T + k] int32, and their lengths.

    Args:
      tokens: [n, T] int32. length: [n] int32. more: [k] int32.
    """
    wide = jnp.pad(tokens, ((0, 0), (0, more.shape[0])), constant_values=pad_id)
    place = jnp.arange(wide.shape[1])[None, :] - length[:, None]
    added = more[jnp.clip(place, 0, more.shape[0] - 1)]
    wide = jnp.where((place >= 0) & (place < more.shape[0]), added, jnp.where(place < 0, wide, pad_id))
    return wide, length + more.shape[0]


def after_prompts(fields: Fields, drawn_after: Array, tokens: Array, length: Array, *, pad_id: int) -> Fields:
    """Returns the rows with another prompt before their completions (P34's ILF).

    Args:
      drawn_after: [n] int32, length of each row's prompt. tokens: [n, P] int32, the other prompt; length: [n] int32,
        its length; with the completion it fits in the row.
    """
    width = fields["tokens"].shape[1]
    column, length = jnp.arange(width)[None, :], length[:, None]
    written = jnp.maximum(fields["length"] - drawn_after, 0)[:, None]
    is_completion = (column >= length) & (column < length + written)
    source = jnp.clip(column - length + drawn_after[:, None], 0, width - 1)

    def moved(name: str, array: Array | None) -> Array | None:
        if array is None or name not in BY_TOKEN:
            return array
        return jnp.where(is_completion, jnp.take_along_axis(array, source, axis=1), EMPTY.get(name, pad_id))

    rows = {name: moved(name, array) for name, array in fields.items()}
    prompt = jnp.pad(tokens, ((0, 0), (0, width - tokens.shape[1])))
    return {
        **rows,
        "tokens": jnp.where(column < length, prompt, rows["tokens"]),
        "length": (length + written)[:, 0],
    }


def continued(first: Fields, second: Fields) -> Fields:
    """Returns rows with the actions of both calls. If the second sampled nothing, the row is the first's.

    A token's routes are from the call that sampled the token after it: from the first call if that read the token.

    Args:
      first, second: rows of the same width; the second begins with all tokens of the first.
    """
    sampled = second["action_mask"]
    went_on = sampled.any(axis=-1)
    by_token = {
        name: None if first[name] is None else jnp.where(sampled, second[name], first[name])
        for name in BY_TOKEN
        if name not in ("tokens", "turn")
    }
    if ROUTES in first and first[ROUTES] is not None:
        by_token[ROUTES] = replayed(second[ROUTES], first[ROUTES])
    tokens = jnp.where(went_on[:, None], second["tokens"], first["tokens"])
    by_row = {name: jnp.where(went_on, second[name], first[name]) for name in ("length", "finish")}
    return {**first, **by_token, "tokens": tokens, **by_row}


def second_turn(first: Fields, second: Fields) -> Fields:
    """Returns S17's rows: `continued`, with turn 0 for the first's actions and turn 1 for the second's."""
    turn = jnp.where(second["action_mask"], 1, 0).astype(first["turn"].dtype)
    return {**continued(first, second), "turn": turn}


def interleaved(parts: list[Fields], prompts: int) -> Fields:
    """Returns the rows of several calls on the same prompts; rows of a prompt are adjacent, in the order of the calls.

    Args:
      parts: rows of the same width, [prompts * samples of the call, ...]. prompts: number of prompts of the shard.
    """
    grouped = lambda array: array.reshape(prompts, -1, *array.shape[1:])
    joined = {
        name: None if parts[0][name] is None else jnp.concatenate([grouped(part[name]) for part in parts], axis=1)
        for name in parts[0]
    }
    rows = {name: None if x is None else x.reshape(-1, *x.shape[2:]) for name, x in joined.items()}
    group = grouped(parts[0]["group"])[:, :1]
    return {**rows, "group": jnp.broadcast_to(group, joined["group"].shape).reshape(-1)}
