"""Samples completions on the device: every batch shard decodes its own queue of sequences through a few slots.

One jitted program. Inside `shard_map`, manual over the batch axes, one `while_loop` decodes a shard's B * G / shards
sequences in `slots` rows at a time. A row that ends hands its slot to the next sequence at once, so that the longest
completion does not hold up the rest. A prompt runs through the model once for its G samples, when the first of them
gets a slot, together with the next ones in the queue: at most slots / G + 2 prompts are resident, however long the
queue is.
When none waits any more and half the slots are idle, the last sequences may go on in half as many
(`Sampler.max_batch_compactions`).
Shards take different numbers of turns, therefore no collective over a batch axis may stand inside the loop: weights are
replicated over those axes, and sharded over tensor only.

A sequence always passes through the same computation, whatever slot it has: its prompt's keys and values are copied
from the prefill, then the last prompt token is fed again and every logit comes from the one-token body of the loop, or
of one with fewer slots: when it goes on there depends on the others, and can move a log-prob by a rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, PartitionSpec

from jrl.device.sharding import BATCH_AXES, GATHERED, batch_sharding, batch_shards, constrain, replicated, spec
from jrl.models.attention.kernels import OneToken
from jrl.models.contract import Layout, Model, has_state, unstack_cache
from jrl.ops.draw import draw, greedy
from jrl.ops.fingerprint import fingerprint
from jrl.ops.keys import row_key, token_key
from jrl.ops.truncate import support
from jrl.rollout.stop_strings import StopTable
from jrl.types import Array, Finish, PromptBatch, PyTree, Rollout, traced


@traced
class Sampler:
    """How completions are drawn. Order: temperature, top-k, top-p, min-p; None switches a rule off."""

    completion_length: int  # most tokens of a completion, the stop token included
    slots: int = 32  # sequences decoded at once by a batch shard
    temperature: float | None = 1.0  # None: greedy, and log-probs are those at temperature 1
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop_strings: tuple[str, ...] = ()  # end a completion that contains one, in whatever tokens
    layers: Literal["unrolled", "scanned"] = "unrolled"  # unrolled decodes faster on CPU, scanned compiles faster
    # What of a head's keys lies side by side in the cache: a column's entries, or an entry's columns (faster on CPU).
    kv_layout: Literal["token_major", "head_dim_major"] = "token_major"
    attention: OneToken = "reference"  # of a new token over the cache, or by a kernel of ours for TPUs: 'ragged'
    max_batch_compactions: int = (
        0  # how often the last sequences go on in half the slots, once none waits; each is compiled apart
    )

    def __post_init__(self) -> None:
        if isinstance(self.completion_length, int) and self.completion_length < 1:
            raise ValueError(f"Sampler.completion_length must be at least 1; got {self.completion_length}")
        if self.slots < 1:
            raise ValueError(f"Sampler.slots must be at least 1; got {self.slots}")
        if self.attention == "ragged" and self.kv_layout != "token_major":
            raise ValueError(
                f"Sampler.attention='ragged' reads keys by column; leave out Sampler.kv_layout={self.kv_layout!r}"
            )
        if self.max_batch_compactions < 0:
            raise ValueError(f"Sampler.max_batch_compactions must be at least 0; got {self.max_batch_compactions}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"Sampler.top_k must be at least 1, or None for off; got {self.top_k}")
        for name, low_open in (("temperature", True), ("top_p", True), ("min_p", False)):
            value = {"temperature": self.temperature, "top_p": self.top_p, "min_p": self.min_p}[name]
            if not isinstance(value, (int, float)):  # None, or traced
                continue
            high = float("inf") if name == "temperature" else 1.0
            if not (0 < value <= high if low_open else 0 <= value <= high):
                raise ValueError(f"Sampler.{name} must be in {'(' if low_open else '['}0, {high}]; got {value}")

    @property
    def layout(self) -> Layout:
        """How the cache lies."""
        return "whole" if self.attention == "ragged" else self.kv_layout


@struct.dataclass
class SamplingParams:
    """The traced part of a Sampler. Values may change from call to call; a None is another program."""

    temperature: Array | None  # [] float32
    top_k: Array | None  # [] int32
    top_p: Array | None  # [] float32
    min_p: Array | None  # [] float32

    @property
    def truncated(self) -> bool:
        """The sampling distribution differs from the policy at its temperature: log-probs under both are kept."""
        return self.temperature is None or not (self.top_k is None and self.top_p is None and self.min_p is None)


def sample(
    params: PyTree,
    prompts: PromptBatch,
    key: Array,
    *,
    stream: int,
    version: Array,
    config: Sampler,
    model: Model,
    model_cfg: object,
    samples: int,
    stop_ids: tuple[int, ...],
    pad_id: int,
    mesh: Mesh,
    stop_table: StopTable | None = None,
    budget: Array | None = None,
) -> Rollout:
    """Returns `samples` completions of every prompt, rows of a prompt adjacent, cut over the batch axes of `mesh`.

    A completion ends with a stop id (which is kept, as an action), with the token that completes a stop string, or
    with its budget. Log-probs are in float32 or wider.

    Args:
      params: the stacked tree of `model`, in any sharding; gathered over the batch axes inside.
      prompts: B a multiple of the mesh's batch shards. A prompt of length 0 gives rows without an action.
      key: [] typed key, the run's root. Not consumed: draws are named by (stream, uid, sample, position).
      stream: keeps train, evaluation and interactive draws apart.
      version: [] int32, the update count of `params`.
      samples: G.
      stop_table: of `stop.build`; needed where config.stop_strings is not empty.
      budget: [B * G] int32, most tokens of each completion, also capped by config.completion_length; 0 gives a row
        without an action.

    Raises:
      ValueError: B is no multiple of the batch shards, or stop strings came without their table.
    """
    if prompts.tokens.shape[0] % batch_shards(mesh):
        raise ValueError(
            f"{prompts.tokens.shape[0]} prompts cannot be cut over {batch_shards(mesh)} batch shards; "
            "pad the batch to a multiple"
        )
    if config.stop_strings and stop_table is None:
        raise ValueError(f"stop strings {config.stop_strings!r} need stop_table=stop.build(strings, token_bytes)")
    everywhere = replicated(mesh)
    put = lambda tree: jax.device_put(tree, everywhere)
    sampling_params = SamplingParams(
        temperature=_number(config.temperature, np.float32),
        top_k=_number(config.top_k, np.int32),
        top_p=_number(config.top_p, np.float32),
        min_p=_number(config.min_p, np.float32),
    )
    by_row = lambda x: jax.device_put(x, batch_sharding(mesh, np.ndim(x)))
    with jax.set_mesh(mesh):
        return program(
            params,
            jax.tree.map(by_row, prompts),
            put(key),
            put(_number(stream, np.uint32)),
            put(_number(version, np.int32)),
            put(sampling_params),
            None if stop_table is None else put(stop_table),
            None if budget is None else by_row(budget),
            model=model,
            model_cfg=model_cfg,
            samples=samples,
            completion_length=config.completion_length,
            slots=config.slots,
            layers=config.layers,
            layout=config.layout,
            max_batch_compactions=config.max_batch_compactions,
            stop_ids=stop_ids,
            pad_id=pad_id,
        )


@functools.partial(
    jax.jit,
    static_argnames=(
        "model",
        "model_cfg",
        "samples",
        "completion_length",
        "slots",
        "layers",
        "layout",
        "max_batch_compactions",
        "stop_ids",
        "pad_id",
    ),
)
def program(
    params: PyTree,
    prompts: PromptBatch,
    key: Array,
    stream: Array,
    version: Array,
    sampling_params: SamplingParams,
    stop_table: StopTable | None,
    budget: Array | None,
    *,
    model: Model,
    model_cfg: object,
    samples: int,
    completion_length: int,
    slots: int,
    layers: str,
    layout: Layout,
    max_batch_compactions: int,
    stop_ids: tuple[int, ...],
    pad_id: int,
) -> Rollout:
    """Returns what `sample` does, of arrays already on the mesh. Called under `jax.set_mesh`."""
    # Of the weights as they are stored: the hash does not depend on where they lie, and hashing the gathered ones took
    # 16 GiB a chip more for 8B over tensor 4.
    weights_fingerprint = fingerprint(params)
    params, names = model.ready(params, model_cfg)
    places = jax.tree.map(lambda axes: spec(axes, GATHERED), names, is_leaf=_is_names)
    params = jax.tree.map(jax.sharding.reshard, params, places)
    if budget is None:
        budget = jnp.full(prompts.tokens.shape[0] * samples, completion_length, jnp.int32)
    rows = PartitionSpec(BATCH_AXES)
    prompts, budget = jax.tree.map(lambda x: jax.sharding.reshard(x, rows), (prompts, budget))
    shard = functools.partial(
        _sample_shard,
        model=model,
        model_cfg=model_cfg,
        samples=samples,
        completion_length=completion_length,
        slots=slots,
        layers=layers,
        layout=layout,
        max_batch_compactions=max_batch_compactions,
        stop_ids=stop_ids,
        pad_id=pad_id,
    )
    # At the border of a `shard_map` over some axes, jax 0.10 gathers what is cut over an explicit axis that stays:
    # every device would hold whole weights. An automatic axis is left alone; inside, it is explicit again.
    everywhere = PartitionSpec()
    inside = jax.sharding.explicit_axes(shard, axes="tensor", in_sharding=(places, *[everywhere] * 7))
    mapped = jax.shard_map(
        inside,
        in_specs=(everywhere, rows, rows, everywhere, everywhere, everywhere, everywhere, everywhere),
        out_specs=rows,
        axis_names=set(BATCH_AXES),
    )
    rollout = jax.sharding.auto_axes(mapped, axes="tensor", out_sharding=rows)(
        params, prompts, budget, key, stream, version, sampling_params, stop_table
    )
    return Rollout(**rollout, weights_fingerprint=weights_fingerprint)


class _Slots(NamedTuple):
    """The sequences being decoded, [K] each. An idle slot's sequence is the number of sequences, which is no row."""

    sequence: Array  # int32, row of the shard's outputs
    token: Array  # int32, the token to feed next
    position: Array  # int32, its column
    drawn: Array  # int32, actions so far
    state: Array  # int32, of the stop table


class _Written(NamedTuple):
    """Outputs of a shard, filled in as tokens are drawn. n sequences of the shard, T columns."""

    tokens: Array  # [n, T] int32
    logprobs: Array  # [n, T] float32 or wider
    truncated: Array | None  # [n, T] as logprobs
    support_size: Array | None  # [n, T] int32
    length: Array  # [n] int32
    finish: Array  # [n] int8


class _Resident(NamedTuple):
    """Prompts whose keys and values are at hand, side by side in the queue."""

    first: Array  # [] int32, row of the shard's prompts
    cache: PyTree


class _Loop(NamedTuple):
    waiting: Array  # [] int32, the first sequence that has had no slot yet
    resident: _Resident | None  # None: no sequence waits
    slots: _Slots
    cache: PyTree  # of the model
    written: _Written


def prompts_at_hand(local_prompts: int, slots: int, samples: int) -> int:
    """Returns how many prompts of a batch shard pass through the model together and are resident: as equal parts of the
    shard's as can be, so that nearly none is computed twice, and at most slots / G + 2."""
    rounds = -(-local_prompts // (-(-slots // samples) + 2))
    return -(-local_prompts // rounds)


def narrower(slots: int, max_batch_compactions: int) -> tuple[int, ...]:
    """Returns how many slots the last sequences go on in, one after the other: 16, 8 for 32 and 2."""
    found = [slots]
    while len(found) <= max_batch_compactions and found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return tuple(found[1:])


def _sample_shard(
    params: PyTree,
    prompts: PromptBatch,
    budget: Array,
    key: Array,
    stream: Array,
    version: Array,
    sampling_params: SamplingParams,
    stop_table: StopTable | None,
    *,
    model: Model,
    model_cfg: object,
    samples: int,
    completion_length: int,
    slots: int,
    layers: str,
    layout: Layout,
    max_batch_compactions: int,
    stop_ids: tuple[int, ...],
    pad_id: int,
) -> dict[str, Array | None]:
    """Returns the fields of a Rollout for one batch shard."""
    local_prompts, prompt_width = prompts.tokens.shape
    count, width = local_prompts * samples, prompt_width + completion_length
    slots = min(slots, count)
    prompt_of = jnp.arange(count, dtype=jnp.int32) // samples
    sample_of = jnp.arange(count, dtype=jnp.int32) % samples
    prompt_length = prompts.length[prompt_of]
    budget = jnp.where(prompt_length > 0, jnp.minimum(budget, completion_length), 0)
    row_keys = jax.vmap(row_key, in_axes=(None, None, 0, 0))(key, stream, prompts.uid[prompt_of], sample_of)

    resident = prompts_at_hand(local_prompts, slots, samples)
    unrolled, batch_dimension = layers == "unrolled", 0 if layers == "unrolled" else 1
    in_layers = unstack_cache if unrolled else lambda stacked: stacked
    decoded = model.unstack(params, model_cfg) if unrolled else params
    columns = jnp.broadcast_to(jnp.arange(prompt_width, dtype=jnp.int32), (resident, prompt_width))

    def empty(batch: int, length: int) -> PyTree:
        return _vary(model.init_cache(model_cfg, batch, length))

    def prefill(first: Array) -> _Resident:
        """Runs the prompts from `first` on through the model, by the weights that decode: no others are at hand."""
        first = jnp.minimum(first, local_prompts - resident)
        tokens = jax.lax.dynamic_slice_in_dim(prompts.tokens, first, resident)
        cache, later = in_layers(empty(resident, prompt_width)), None
        if has_state(cache):  # which must not have seen the last token, which is fed again, nor what fills the row up
            length = jax.lax.dynamic_slice_in_dim(prompts.length, first, resident)
            later = (columns >= length[:, None] - 1).astype(jnp.int32)
        _, cache = model.forward(decoded, tokens, columns, later, model_cfg, cache)
        return _Resident(first, model.cut_cache(cache, width, layout))

    def admit(_: Array, loop: _Loop) -> _Loop:
        """Gives the first idle slot to the next sequence. One that may draw nothing leaves it idle."""
        slot = jnp.argmax(loop.slots.sequence == count).astype(jnp.int32)
        sequence = loop.waiting
        prompt, last = prompt_of[sequence], jnp.maximum(prompt_length[sequence] - 1, 0)
        absent = prompt >= loop.resident.first + resident
        held = jax.lax.cond(absent, lambda _: prefill(prompt), lambda held: held, loop.resident)
        copy = lambda whole, part: jax.lax.dynamic_update_slice_in_dim(
            whole, jax.lax.dynamic_slice_in_dim(part, prompt - held.first, 1, batch_dimension), slot, batch_dimension
        )
        # The slice is narrower than the slot: columns after it keep the last tenant's, and are never looked at
        # before they are written.
        fresh = _Slots(
            sequence=jnp.where(budget[sequence] > 0, sequence, count),
            token=prompts.tokens[prompt, last],
            position=last,
            drawn=jnp.zeros_like(last),
            state=jnp.zeros_like(last),
        )
        return loop._replace(
            waiting=loop.waiting + 1,
            resident=held,
            slots=jax.tree.map(lambda all_slots, new: all_slots.at[slot].set(new), loop.slots, fresh),
            cache=jax.tree.map(copy, loop.cache, held.cache),
        )

    def refill(loop: _Loop) -> _Loop:
        idle = (loop.slots.sequence == count).sum(dtype=jnp.int32)
        return jax.lax.fori_loop(0, jnp.minimum(idle, count - loop.waiting), admit, loop)

    def step(loop: _Loop) -> _Loop:
        now = loop.slots
        hidden, cache = model.forward(decoded, now.token[:, None], now.position[:, None], None, model_cfg, loop.cache)
        logits = constrain(model.unembed(decoded, hidden, model_cfg), "batch", None, None)[:, 0]
        place = now.position + 1
        keys = jax.vmap(token_key)(row_keys[jnp.minimum(now.sequence, count - 1)], place)
        token, logprob, truncated, support_size = _draw(keys, logits, sampling_params)

        drawn = now.drawn + 1
        state, hit_string = now.state, jnp.zeros_like(token, bool)
        if stop_table is not None:
            state = stop_table.next[state, token]
            hit_string = stop_table.accept[state]
        hit_id = (token[:, None] == jnp.asarray(stop_ids, jnp.int32)[None, :]).any(axis=1)
        over = drawn >= budget[jnp.minimum(now.sequence, count - 1)]
        finish = jnp.where(hit_id, Finish.STOP_TOKEN, jnp.where(hit_string, Finish.STOP_STRING, Finish.LENGTH))
        at = now.sequence  # `count` for an idle slot: out of bounds, dropped
        out = loop.written
        at_token = lambda whole, new: None if whole is None else whole.at[at, place].set(new, mode="drop")
        written = _Written(
            tokens=at_token(out.tokens, token),
            logprobs=at_token(out.logprobs, logprob),
            truncated=at_token(out.truncated, truncated),
            support_size=at_token(out.support_size, support_size),
            length=out.length.at[at].set(place + 1, mode="drop"),
            finish=out.finish.at[at].set(finish.astype(jnp.int8), mode="drop"),
        )
        ended = hit_id | hit_string | over
        after = _Slots(
            sequence=jnp.where(ended, count, now.sequence),
            token=token,
            position=jnp.where(ended | (at == count), 0, place),  # an idle slot looks at nothing that costs
            drawn=drawn,
            state=state,
        )
        return loop._replace(slots=after, cache=cache, written=written)

    def narrowed(loop: _Loop, rows: int) -> _Loop:
        """Moves the sequences that are not done into the first `rows` slots, which are all that there are then."""
        order = jnp.argsort(loop.slots.sequence == count)  # stable: those at work first
        move = lambda i, narrow: jax.tree.map(
            lambda to, whole: jax.lax.dynamic_update_slice_in_dim(
                to, jax.lax.dynamic_slice_in_dim(whole, order[i], 1, batch_dimension), i, batch_dimension
            ),
            narrow,
            loop.cache,
        )
        cache = jax.lax.fori_loop(0, rows, move, model.cut_cache(in_layers(empty(rows, width)), width, layout))
        slots = jax.tree.map(lambda x: x[order[:rows]], loop.slots)
        return loop._replace(resident=None, slots=slots, cache=cache)

    shape = (count, width)
    column = jnp.arange(width, dtype=jnp.int32)[None, :]
    padded = jnp.pad(prompts.tokens[prompt_of], ((0, 0), (0, completion_length)))
    wide = jnp.promote_types(jnp.dtype(model_cfg.dtype), jnp.float32)
    idle = _vary(jnp.full(slots, count, jnp.int32))
    start = _Loop(
        waiting=idle[0] * 0,
        resident=_Resident(
            idle[0] * 0 - resident, model.cut_cache(in_layers(empty(resident, prompt_width)), width, layout)
        ),
        slots=_Slots(sequence=idle, token=idle * 0, position=idle * 0, drawn=idle * 0, state=idle * 0),
        cache=model.cut_cache(in_layers(empty(slots, width)), width, layout),
        written=_Written(
            tokens=jnp.where(column < prompt_length[:, None], padded, pad_id),
            logprobs=_vary(jnp.zeros(shape, wide)),
            truncated=_vary(jnp.zeros(shape, wide)) if sampling_params.truncated else None,
            support_size=_vary(jnp.zeros(shape, jnp.int32)) if sampling_params.truncated else None,
            length=prompt_length,
            finish=_vary(jnp.full(count, Finish.LENGTH, jnp.int8)),
        ),
    )

    def more_than(rows: int) -> Callable[[_Loop], Array]:
        return lambda loop: (loop.waiting < count) | ((loop.slots.sequence < count).sum() > rows)

    halves = narrower(slots, max_batch_compactions)
    loop = jax.lax.while_loop(more_than(halves[0] if halves else 0), lambda loop: step(refill(loop)), start)
    for rows, left in zip(halves, (*halves[1:], 0)):
        loop = jax.lax.while_loop(more_than(left), step, narrowed(loop, rows))
    written = loop.written
    action_mask = (column >= prompt_length[:, None]) & (column < written.length[:, None])
    return dict(
        tokens=written.tokens,
        length=written.length,
        action_mask=action_mask,
        sampler_logprobs=written.logprobs,
        truncated_logprobs=written.truncated,
        support_size=written.support_size,
        finish=written.finish,
        group=prompt_of + jax.lax.axis_index(BATCH_AXES).astype(jnp.int32) * local_prompts,
        sample=sample_of,
        version=jnp.where(action_mask, version, -1),
        turn=jnp.zeros(shape, jnp.int8),
    )


def _draw(
    keys: Array, logits: Array, sampling_params: SamplingParams
) -> tuple[Array, Array, Array | None, Array | None]:
    """Returns (token [K] int32, its log-prob [K] under policy and sampling distribution, size of support).

    The last two are None where the sampling distribution is the policy itself. logits: [K, V] float32 or wider.
    """
    at = lambda values, token: jnp.take_along_axis(values, token[:, None], axis=1)[:, 0]
    if sampling_params.temperature is None:
        token = greedy(logits)
        logprob = at(logits, token) - jax.nn.logsumexp(logits, axis=-1)
        return token, logprob, jnp.zeros_like(logprob), jnp.ones_like(token)
    scaled = logits / sampling_params.temperature.astype(logits.dtype)
    if not sampling_params.truncated:
        token = jax.vmap(draw)(keys, scaled)
        return token, at(scaled, token) - jax.nn.logsumexp(scaled, axis=-1), None, None
    keep = support(scaled, sampling_params.top_k, sampling_params.top_p, sampling_params.min_p)
    limited = jnp.where(keep, scaled, -jnp.inf)
    token = jax.vmap(draw)(keys, limited)
    chosen = at(scaled, token)
    logprob = chosen - jax.nn.logsumexp(scaled, axis=-1)
    return token, logprob, chosen - jax.nn.logsumexp(limited, axis=-1), keep.sum(axis=-1, dtype=jnp.int32)


def _vary(literals: PyTree) -> PyTree:
    """Returns literals typed as differing between batch shards, as what a loop carries must be from its start."""
    return jax.lax.pcast(literals, BATCH_AXES, to="varying")


def _number(value: float | Array | None, dtype: type) -> Array | np.generic | None:
    return dtype(value) if isinstance(value, (int, float)) else value


def _is_names(x: object) -> bool:
    return isinstance(x, tuple)
