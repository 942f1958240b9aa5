"""Samples completions on the device: every batch shard decodes its own queue of sequences through a few slots.

One jitted program. Inside `shard_map`, manual over the batch axes, a `while_loop` decodes a shard's B * G / shards
sequences, at most `slots` at a time. A sequence that ends frees its slot for the next one at once, so that the longest
completion does not hold up the rest. A prompt is prefilled once for its G samples, when the first of them gets a slot,
together with the next prompts in the queue: at most slots / G + 2 prompts are resident, however long the queue is.
When the queue is empty and half the slots are idle, the batch may shrink to half as many slots
(`Sampler.max_batch_compactions`).
Shards take different numbers of decode steps, so the loop may contain no collective over a batch axis: weights are
replicated over those axes, and sharded over tensor only.

A sequence goes through the same computation in every slot: its prompt's keys and values are copied from the prefill,
then the last prompt token is fed again, and every logit comes from the decode step. A compaction changes the batch size
of that step, at a time that depends on the other sequences; it can move a log-prob by a rounding error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, PartitionSpec

from jrl.device.placement import place_on_mesh
from jrl.device.sharding import (
    GATHERED,
    batch_axes,
    batch_sharding,
    batch_shards,
    constrain,
    replicated,
    spec,
    split_rules,
)
from jrl.models.attention.fused import fused
from jrl.models.attention.kernels import OneToken
from jrl.models.contract import Layout, Model, has_state, unstack_cache
from jrl.models.mixture import PolicyAndReference, mixture
from jrl.ops.draw import draw, greedy
from jrl.ops.fingerprint import fingerprint
from jrl.ops.keys import row_key, token_key
from jrl.ops.truncate import support
from jrl.rollout.lockstep import any_shard, most_of_shards, where_shard
from jrl.rollout.stop_strings import StopTable, build
from jrl.rollout.strategies.contract import Drawing, Fields, Shard
from jrl.tasks.data.prompts import MOST_TOKENS
from jrl.types import Array, Finish, PromptBatch, PyTree, Rollout, traced

POLICY = "policy"
# Scopes of the loops and the condition whose frequency only the data decides: `jrl plan` counts by their names.
REFILLS, ADMIT, PREFILL, DECODE, COMPACTED = "refills", "admit", "prefill", "decode", "compacted"
PREFILL_CHUNKS, PREFILL_REST = "prefill_chunks", "prefill_rest"  # within a prefill in chunks
# Fields of a Rollout: [N], [N, T], and [N, T] or None
BY_ROW = ("length", "finish", "group", "sample")
BY_TOKEN = ("tokens", "action_mask", "sampler_logprobs", "version", "turn")
WHERE_TRUNCATED = ("truncated_logprobs", "support_size")
LOWEST_TEMPERATURE = 1e-30  # logits divided by less may overflow float32
RESIDENT_TOKENS = 16_384  # most tokens of a batch shard's resident prompts; a single prompt may have more


def check_temperature(temperature: Any, name: str) -> None:
    """Raises ValueError if a temperature is too low to divide logits by, or NaN. None and traced values pass."""
    if isinstance(temperature, (int, float)) and not temperature >= LOWEST_TEMPERATURE:
        raise ValueError(
            f"{name} must be at least {LOWEST_TEMPERATURE}, or None for the likeliest token; got {temperature}"
        )


@traced
class Sampler:
    """How completions are drawn. Order: temperature, top-k, top-p, min-p; None switches a rule off."""

    completion_length: int  # most tokens of a completion, the stop token included
    slots: int = 32  # sequences decoded at once by a batch shard
    temperature: float | None = 1.0  # None: greedy, and log-probs are those at temperature 1
    top_k: int | None = None  # draw from the k likeliest tokens
    top_p: float | None = None  # draw from the likeliest tokens whose probabilities sum to p
    min_p: float | None = None  # draw from tokens at least min_p times as likely as the likeliest
    stop_strings: tuple[str, ...] = ()  # end a completion that contains one, however it is tokenized
    # unrolled decodes faster on CPU, scanned compiles faster; auto: scanned with a TPU kernel, else unrolled
    layers: Literal["auto", "unrolled", "scanned"] = "auto"
    # What is contiguous in a head's key cache: the entries of a token, or the tokens of an entry (faster on CPU).
    kv_layout: Literal["token_major", "head_dim_major"] = "token_major"
    attention: OneToken = "auto"  # of a new token over the cache; 'ragged': our Pallas kernel for TPUs
    # Tokens of a row that are prefilled at once; None: all of them, and on TPUs at most 2,048.
    prefill_chunk: int | None = None
    # How often the batch shrinks to half the slots as rows finish, once the queue is empty; each compiles a loop.
    max_batch_compactions: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.completion_length, int) and not 1 <= self.completion_length <= MOST_TOKENS:
            raise ValueError(f"Sampler.completion_length must be 1 to {MOST_TOKENS}; got {self.completion_length}")
        if self.slots < 1:
            raise ValueError(f"Sampler.slots must be at least 1; got {self.slots}")
        if self.attention == "ragged" and self.kv_layout != "token_major":
            raise ValueError(
                f"Sampler.attention='ragged' reads keys token by token; leave out Sampler.kv_layout={self.kv_layout!r}"
            )
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise ValueError(f"Sampler.prefill_chunk must be at least 1, or None for all; got {self.prefill_chunk}")
        if self.max_batch_compactions < 0:
            raise ValueError(f"Sampler.max_batch_compactions must be at least 0; got {self.max_batch_compactions}")
        if self.top_k is not None and isinstance(self.top_k, int) and not 1 <= self.top_k < 2**31:
            raise ValueError(f"Sampler.top_k must be at least 1 and below 2**31, or None for off; got {self.top_k}")
        if any("\ud800" <= character <= "\udfff" for text in self.stop_strings for character in text):
            raise ValueError("Sampler.stop_strings has half of a surrogate pair, which UTF-8 cannot encode; got "
                             f"{self.stop_strings!a}")  # fmt: skip
        check_temperature(self.temperature, "Sampler.temperature")
        for name, low_open in (("top_p", True), ("min_p", False)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)):  # None, or traced
                continue
            if not (0 < value <= 1 if low_open else 0 <= value <= 1):
                raise ValueError(f"Sampler.{name} must be in {'(' if low_open else '['}0, 1]; got {value}")

    @property
    def layout(self) -> Layout:
        """Returns the layout of the KV cache."""
        return "single_block" if self.attention == "ragged" else self.kv_layout


@struct.dataclass
class SamplingParams:
    """The traced part of a Sampler. Values may change from call to call; changing one to None recompiles."""

    temperature: Array | None  # [] float32
    top_k: Array | None  # [] int32
    top_p: Array | None  # [] float32
    min_p: Array | None  # [] float32

    @property
    def truncated(self) -> bool:
        """Whether the sampling distribution differs from the policy at its temperature: both log-probs are recorded."""
        return self.temperature is None or not (self.top_k is None and self.top_p is None and self.min_p is None)


def params_on_device(config: Sampler, mesh: Mesh) -> SamplingParams:
    """Returns the sampler's traced part as arrays."""
    number = lambda x, dtype: None if x is None else place_on_mesh(dtype(x), replicated(mesh))
    return SamplingParams(
        temperature=number(config.temperature, np.float32),
        top_k=number(config.top_k, np.int32),
        top_p=number(config.top_p, np.float32),
        min_p=number(config.min_p, np.float32),
    )


def untruncated(temperature: float | None, mesh: Mesh) -> SamplingParams:
    """Returns sampling parameters with this temperature and no truncation; None: greedy."""
    temperature = None if temperature is None else place_on_mesh(np.float32(temperature), replicated(mesh))
    return SamplingParams(temperature=temperature, top_k=None, top_p=None, min_p=None)


def stop_table_on_device(config: Sampler, tokenizer: Any, mesh: Mesh) -> StopTable | None:
    """Returns the stop strings' automaton on the device, or None where there are none."""
    if not config.stop_strings:
        return None
    return place_on_mesh(build(config.stop_strings, tokenizer.token_bytes()), replicated(mesh))


class BehaviorPolicy(NamedTuple):
    """The model that completions are drawn from."""

    model: Model
    cfg: Any  # of `model`
    params: PyTree  # the stacked tree of `model`, in any sharding
    version: int  # the update count of `params`


class StopRules(NamedTuple):
    """What ends a completion, and what comes after its end."""

    stop_ids: tuple[int, ...]
    pad_id: int
    stop_table: StopTable | None = None  # of `stop_strings.build`; needed where Sampler.stop_strings is not empty


class Options(NamedTuple):
    """The static part of sampling: a change compiles another program."""

    model: Model
    model_cfg: Any
    samples: int  # G
    completion_length: int
    slots: int
    unrolled: bool  # layers are decoded one by one, not by a scan
    layout: Layout
    prefill_chunk: int | None
    max_batch_compactions: int
    stop_ids: tuple[int, ...]
    pad_id: int
    greedy_samples: int = 0  # how many of each prompt's samples are greedy: the first ones
    # Record `routes`, of the forward pass that drew the next token. Needs `Model.routes`.
    records_routes: bool = False
    entropy: bool = False  # record the policy's entropy at every sampled token


def static_options(
    config: Sampler, model: Model, model_cfg: Any, samples: int, stop_ids: tuple[int, ...], pad_id: int
) -> Options:
    """Returns the static part of a Sampler."""
    return Options(
        model=model,
        model_cfg=model_cfg,
        samples=samples,
        completion_length=config.completion_length,
        slots=config.slots,
        unrolled=config.layers != "scanned",
        layout=config.layout,
        prefill_chunk=config.prefill_chunk,
        max_batch_compactions=config.max_batch_compactions,
        stop_ids=stop_ids,
        pad_id=pad_id,
    )


def sample(
    policy: BehaviorPolicy,
    prompts: PromptBatch,
    key: Array,
    *,
    stream: int,
    config: Sampler,
    samples: int,
    stop: StopRules,
    mesh: Mesh,
    greedy_samples: int = 0,
    budget: Array | None = None,
    drawing: Drawing | None = None,
) -> Rollout:
    """Returns `samples` completions of every prompt, rows of a prompt adjacent, sharded over the batch axes of `mesh`.

    The entry point for interactive use; a run calls `program`, with every array already on the mesh.
    A completion ends with a stop id (which counts as an action), with the token that completes a stop string, or
    with its budget. Log-probs are in float32 or wider.

    Args:
      policy: its parameters are gathered over the batch axes here.
      prompts: B a multiple of the mesh's batch shards. A prompt of length 0 gives rows without an action.
      key: [] typed key, the run's root. Not consumed: draws are named by (stream, uid, sample, position).
      stream: keeps train, evaluation and interactive draws apart.
      samples: G.
      greedy_samples: how many of a prompt's samples are greedy: the first ones. Their log-probs are the policy's too.
      budget: [B * G] int32, most tokens of each completion, also capped by config.completion_length; 0 gives a row
        without an action.
      drawing: as in `program`, which says what `policy.params` then is.

    Raises:
      ValueError: B is not a multiple of the batch shards, or stop strings came without their table.
    """
    if prompts.tokens.shape[0] % batch_shards(mesh):
        raise ValueError(
            f"{prompts.tokens.shape[0]} prompts cannot be divided over {batch_shards(mesh)} batch shards; "
            "pad the batch to a multiple"
        )
    if config.stop_strings and stop.stop_table is None:
        raise ValueError(
            f"stop strings {config.stop_strings!r} need StopRules.stop_table=stop_strings.build(strings, token_bytes)"
        )
    everywhere = replicated(mesh)
    replicate = lambda tree: jax.device_put(tree, everywhere)
    by_row = lambda x: jax.device_put(x, batch_sharding(mesh, np.ndim(x)))
    options = static_options(config, policy.model, policy.cfg, samples, stop.stop_ids, stop.pad_id)
    with jax.set_mesh(mesh):
        return program(
            policy.params,
            jax.tree.map(by_row, prompts),
            replicate(key),
            replicate(np.uint32(stream)),
            replicate(np.int32(policy.version)),
            params_on_device(config, mesh),
            None if stop.stop_table is None else replicate(stop.stop_table),
            None if budget is None else by_row(budget),
            options=options._replace(greedy_samples=greedy_samples),
            drawing=drawing,
        )


@functools.partial(jax.jit, static_argnames=("options", "drawing"))
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
    options: Options,
    drawing: Drawing | None = None,
) -> Rollout:
    """Returns what `sample` does, given arrays already on the mesh. Called under `jax.set_mesh`.

    The jitted entry point: each parameter is an argument of the compiled program, or part of its compile key.

    Args:
      drawing: how a sampling strategy draws the rows of a shard; None: each row independently. If it also draws with
        the weights of other roles, `params` is {role: weights}, "policy" included. It sets its own budgets.
    """
    by_role = params if drawing is not None and drawing.roles else {POLICY: params}
    # Hashed as they are stored: the hash does not depend on the sharding, and hashing the gathered weights took 16 GiB
    # a chip more for 8B over tensor 4.
    weights_fingerprint = fingerprint(by_role[POLICY])
    model, cfg, sequences = options.model, options.model_cfg, prompts.tokens.shape[0] * options.samples
    prepared = {role: model.prepare_for_decode(weights, cfg) for role, weights in by_role.items()}
    if options.layout == "single_block":  # which an accelerator's kernel reads
        slots = min(options.slots, sequences // batch_shards(jax.sharding.get_abstract_mesh()))
        prepared = {role: fused(weights, names, cfg, rows=slots) for role, (weights, names) in prepared.items()}

    def specs(rules: Mapping[str | None, Any]) -> dict[str, PyTree]:
        """Returns the partition specs of the prepared weights, by role."""
        is_names = lambda x: isinstance(x, tuple)
        place = lambda names: jax.tree.map(lambda axes: spec(axes, rules), names, is_leaf=is_names)
        return {role: place(names) for role, (_, names) in prepared.items()}

    batch_rules, tensor_rules = split_rules(GATHERED)
    weights = {role: weights for role, (weights, _) in prepared.items()}
    params = jax.tree.map(jax.sharding.reshard, weights, specs(GATHERED))
    if budget is None:
        budget = jnp.full(sequences, options.completion_length, jnp.int32)
    rows = PartitionSpec(batch_axes())
    prompts, budget = jax.tree.map(lambda x: jax.sharding.reshard(x, rows), (prompts, budget))
    shard = functools.partial(_draw_shard, options=options, drawing=drawing)
    # Where a `shard_map` over some axes begins, jax 0.10 gathers what is sharded over the other explicit axes: every
    # device would hold whole weights. It leaves automatic axes alone: `tensor` is automatic outside, explicit inside.
    everywhere = PartitionSpec()
    explicit = jax.sharding.explicit_axes(shard, axes="tensor", in_sharding=(specs(tensor_rules), *[everywhere] * 7))
    mapped = jax.shard_map(
        explicit,
        in_specs=(specs(batch_rules), rows, rows, everywhere, everywhere, everywhere, everywhere, everywhere),
        out_specs=rows,
        axis_names=set(batch_axes()),
        check_vma=model.checked,
    )
    rollout = jax.sharding.auto_axes(mapped, axes="tensor", out_sharding=rows)(
        params, prompts, budget, key, stream, version, sampling_params, stop_table
    )
    return Rollout(**rollout, weights_fingerprint=weights_fingerprint)


class _Shard(NamedTuple):
    """What is constant while a batch shard decodes its n = B * G / shards sequences."""

    options: Options  # with at most n slots
    params: PyTree  # as the decode loop reads them
    prompts: PromptBatch  # of the shard
    prompt: Array  # [n] int32, row of `prompts`
    sample: Array  # [n] int32
    prompt_length: Array  # [n] int32
    budget: Array  # [n] int32
    row_key: Array  # [n] typed keys
    prompt_column: Array  # [resident prompts, prompt width] int32
    column: Array  # [1, T] int32
    sampling_params: SamplingParams
    stop_table: StopTable | None

    @property
    def count(self) -> int:
        return self.prompt.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Sequences and columns, (n, T)."""
        return self.count, self.column.shape[1]

    @property
    def num_resident(self) -> int:
        return self.prompt_column.shape[0]

    @property
    def batch_dimension(self) -> int:
        """The batch dimension of the cache's leaves."""
        return 0 if self.options.unrolled else 1


class _Slots(NamedTuple):
    """The sequences being decoded, [K] each. An idle slot's sequence is the number of sequences, which is not a row."""

    sequence: Array  # int32, row of the shard's outputs
    token: Array  # int32, the token to feed next
    position: Array  # int32, its column
    drawn: Array  # int32, actions so far
    state: Array  # int32, of the stop table


class _Outputs(NamedTuple):
    """Outputs of a shard, filled in as tokens are drawn. n sequences of the shard, T columns."""

    tokens: Array  # [n, T] int32
    logprobs: Array  # [n, T] float32 or wider
    truncated: Array | None  # [n, T] as logprobs
    support_size: Array | None  # [n, T] int32
    entropy: Array | None  # [n, T] as logprobs
    routes: Array | None  # [n, T, F], as Rollout.routes; None: not recorded
    length: Array  # [n] int32
    finish: Array  # [n] int8


class _Resident(NamedTuple):
    """Prompts that are prefilled, adjacent in the queue."""

    first: Array  # [] int32, row of the shard's prompts
    cache: PyTree
    routes: Array | None  # [resident prompts, prompt width, F]; None: not recorded


class _Loop(NamedTuple):
    """The state of the decode loop."""

    waiting: Array  # [] int32, the first sequence that has not had a slot
    resident: _Resident | None  # None: no sequence waits
    slots: _Slots
    cache: PyTree  # of the model
    outputs: _Outputs


def num_resident_prompts(local_prompts: int, slots: int, samples: int, width: int) -> int:
    """Returns how many prompts of a batch shard are prefilled together and then resident.

    At most slots / G + 2, and at most RESIDENT_TOKENS tokens, because the resident prompts have a cache of their own,
    and two while the next prompts are prefilled. The shard's prompts are divided as evenly as possible, so that almost
    none is prefilled twice.

    Args:
      width: the most tokens of a prompt.
    """
    most = min(-(-slots // samples) + 2, max(RESIDENT_TOKENS // width, 1))
    return -(-local_prompts // -(-local_prompts // most))


def chunk_of_prompts(width: int, prefill_chunk: int | None) -> int:
    """Returns how many tokens of each prompt, in rows of `width`, are prefilled at once."""
    return width if prefill_chunk is None else min(prefill_chunk, width)


def compaction_sizes(slots: int, max_batch_compactions: int) -> tuple[int, ...]:
    """Returns how many slots the batch shrinks to, one compaction after the other: 16, 8 for 32 and 2."""
    sizes = [slots]
    while len(sizes) <= max_batch_compactions and sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return tuple(sizes[1:])


def _draw_shard(
    by_role: Mapping[str, PyTree],
    prompts: PromptBatch,
    budget: Array,
    key: Array,
    stream: Array,
    version: Array,
    sampling_params: SamplingParams,
    stop_table: StopTable | None,
    *,
    options: Options,
    drawing: Drawing | None,
) -> Fields:
    """Returns the fields of a Rollout for one batch shard, as a strategy draws them."""

    def sample(
        prompts: PromptBatch,
        budget: Array | None = None,
        *,
        samples: int,
        completion_length: int,
        role: str = POLICY,
        mixed_with: tuple[str, float] | None = None,
        entropy: bool = False,
    ) -> Fields:
        if budget is None:
            budget = jnp.full(prompts.tokens.shape[0] * samples, completion_length, jnp.int32)
        params = by_role[role]
        call_options = options._replace(samples=samples, completion_length=completion_length, entropy=entropy)
        if mixed_with is not None:
            other_role, weight = mixed_with
            call_options = call_options._replace(model=mixture(options.model, weight))
            params = PolicyAndReference(params, by_role[other_role])
        return _sample_shard(
            params, prompts, budget, key, stream, version, sampling_params, stop_table, options=call_options
        )

    if drawing is None:
        return sample(prompts, budget, samples=options.samples, completion_length=options.completion_length)
    fields = drawing(
        Shard(
            sample=sample,
            prompts=prompts,
            key=key,
            stream=stream,
            samples=options.samples,
            completion_length=options.completion_length,
            pad_id=options.pad_id,
        )
    )
    rows, width = prompts.tokens.shape[0] * options.samples, prompts.tokens.shape[1] + options.completion_length
    if (problem := _wrong_fields(fields, rows, width)) is not None:
        raise ValueError(f"the stage's sampling strategy (Online.strategy) draws {problem}; a shard of "
                         f"{prompts.tokens.shape[0]} prompts has {rows} rows of {width} tokens")  # fmt: skip
    return fields


def _wrong_fields(fields: Any, rows: int, width: int) -> str | None:
    """Returns what of a strategy's rows is no field of a Rollout, or has another shape; None: nothing."""
    if not isinstance(fields, dict):
        return f"a {type(fields).__name__}"
    if missing := [name for name in (*BY_ROW, *BY_TOKEN, *WHERE_TRUNCATED) if name not in fields]:
        return f"no {missing[0]!r}"
    for name, array in fields.items():
        if name not in (*BY_ROW, *BY_TOKEN, *WHERE_TRUNCATED, "routes"):
            return f"{name!r}, which is not a field of Rollout"
        shape = (rows,) if name in BY_ROW else (rows, width)
        if np.shape(array)[:2] != shape and not (array is None and name not in (*BY_ROW, *BY_TOKEN)):
            return f"{name!r} of the shape {list(np.shape(array))}"
    return None


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
    options: Options,
) -> Fields:
    """Returns the fields of a Rollout for one batch shard, each row drawn independently."""
    local_prompts, prompt_width = prompts.tokens.shape
    count, samples = local_prompts * options.samples, options.samples
    options = options._replace(slots=min(options.slots, count))
    prompt_of = jnp.arange(count, dtype=jnp.int32) // samples
    sample_of = jnp.arange(count, dtype=jnp.int32) % samples
    if prompts.sample is not None:
        sample_of += prompts.sample[prompt_of]
    prompt_length = prompts.length[prompt_of]
    budget = jnp.where(prompt_length > 0, jnp.minimum(budget, options.completion_length), 0)
    row_keys = jax.vmap(row_key, in_axes=(None, None, 0, 0))(key, stream, prompts.uid[prompt_of], sample_of)

    resident = num_resident_prompts(local_prompts, options.slots, samples, prompt_width)
    decoded = options.model.unstack(params, options.model_cfg) if options.unrolled else params
    prompt_column = jnp.broadcast_to(jnp.arange(prompt_width, dtype=jnp.int32), (resident, prompt_width))
    shard = _Shard(
        options=options,
        params=decoded,
        prompts=prompts,
        prompt=prompt_of,
        sample=sample_of,
        prompt_length=prompt_length,
        budget=budget,
        row_key=row_keys,
        prompt_column=prompt_column,
        column=jnp.arange(prompt_width + options.completion_length, dtype=jnp.int32)[None, :],
        sampling_params=sampling_params,
        stop_table=stop_table,
    )

    decode_step = functools.partial(_decode_step, shard)

    def more_than(rows: int) -> Callable[[_Loop], Array]:
        """Returns the condition of a loop that runs while sequences wait or more than `rows` are being decoded."""
        return lambda loop: any_shard((loop.waiting < count) | ((loop.slots.sequence < count).sum() > rows))

    sizes = compaction_sizes(options.slots, options.max_batch_compactions)
    unfinished = more_than(sizes[0] if sizes else 0)
    no_refill_due = lambda loop: unfinished(loop) & ~any_shard(_num_admitted(shard, loop) > 0)

    def refill_and_decode(loop: _Loop) -> _Loop:
        loop = _refill(shard, loop)
        # An inner loop between two refills: what only a refill reads is not copied or laid out again at every token.
        with jax.named_scope(DECODE):
            return jax.lax.while_loop(no_refill_due, decode_step, loop)

    with jax.named_scope(REFILLS):
        loop = jax.lax.while_loop(unfinished, refill_and_decode, _start(shard))
    for rows, remaining in zip(sizes, (*sizes[1:], 0)):
        compacted = _compact(shard, loop, rows)
        with jax.named_scope(COMPACTED):
            loop = jax.lax.while_loop(more_than(remaining), decode_step, compacted)
    return _rollout_fields(shard, loop.outputs, version)


def _empty_cache(shard: _Shard, batch: int, length: int) -> PyTree:
    """Returns an empty cache of `length` columns in one block; a tuple, one per layer, where layers are unrolled."""
    cache = _vary(shard.options.model.init_cache(shard.options.model_cfg, batch, length))
    return unstack_cache(cache) if shard.options.unrolled else cache


def _decode_cache(shard: _Shard, cache: PyTree) -> PyTree:
    """Returns the cache in the layout that the decode step reads."""
    return shard.options.model.cut_cache(cache, shard.shape[1], shard.options.layout)


def _empty_routes(shard: _Shard, batch: int, length: int) -> Array | None:
    """Returns routes with nothing recorded yet; None where they are not recorded."""
    options = shard.options
    return _vary(options.model.routes.empty(options.model_cfg, batch, length)) if options.records_routes else None


def _start(shard: _Shard) -> _Loop:
    """Returns the loop's state before its first step: every slot is idle and no prompt is resident."""
    options, count = shard.options, shard.count
    padded = jnp.pad(shard.prompts.tokens[shard.prompt], ((0, 0), (0, options.completion_length)))
    wide = jnp.promote_types(jnp.dtype(options.model_cfg.dtype), jnp.float32)
    idle = _vary(jnp.full(options.slots, count, jnp.int32))
    truncated = shard.sampling_params.truncated
    return _Loop(
        waiting=idle[0] * 0,
        resident=_Resident(
            first=idle[0] * 0 - shard.num_resident,
            cache=_decode_cache(shard, _empty_cache(shard, *shard.prompt_column.shape)),
            routes=_empty_routes(shard, *shard.prompt_column.shape),
        ),
        slots=_Slots(sequence=idle, token=idle * 0, position=idle * 0, drawn=idle * 0, state=idle * 0),
        cache=_decode_cache(shard, _empty_cache(shard, options.slots, shard.shape[1])),
        outputs=_Outputs(
            tokens=jnp.where(shard.column < shard.prompt_length[:, None], padded, options.pad_id),
            logprobs=_vary(jnp.zeros(shard.shape, wide)),
            truncated=_vary(jnp.zeros(shard.shape, wide)) if truncated else None,
            support_size=_vary(jnp.zeros(shard.shape, jnp.int32)) if truncated else None,
            entropy=_vary(jnp.zeros(shard.shape, wide)) if options.entropy else None,
            routes=_empty_routes(shard, *shard.shape),
            length=shard.prompt_length,
            finish=_vary(jnp.full(count, Finish.LENGTH, jnp.int8)),
        ),
    )


def _prefill(shard: _Shard, first: Array) -> _Resident:
    """Returns the prompts from `first` on, prefilled with the decode loop's weights, the only copy on the device."""
    prompts, options = shard.prompts, shard.options
    first = jnp.minimum(first, prompts.tokens.shape[0] - shard.num_resident)
    tokens = jax.lax.dynamic_slice_in_dim(prompts.tokens, first, shard.num_resident)
    length = jax.lax.dynamic_slice_in_dim(prompts.length, first, shard.num_resident)
    empty_cache = _empty_cache(shard, *shard.prompt_column.shape)
    empty_routes = _empty_routes(shard, *shard.prompt_column.shape)
    segment = None
    if has_state(empty_cache):  # the state must see neither the last token, which is fed again, nor the padding
        segment = (shard.prompt_column >= length[:, None] - 1).astype(jnp.int32)

    def fill(start: Array | int, size: int, filled: tuple[PyTree, Array | None]) -> tuple[PyTree, Array | None]:
        columns = lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)
        cache, routes = filled
        segments = None if segment is None else columns(segment)
        _, cache, new_routes = _forward(shard, columns(tokens), columns(shard.prompt_column), segments, cache)
        if new_routes is not None:
            routes = jax.lax.dynamic_update_slice_in_dim(routes, new_routes, start, axis=1)
        return cache, routes

    width, filled = tokens.shape[1], (empty_cache, empty_routes)
    chunk = chunk_of_prompts(width, options.prefill_chunk)
    if chunk == width:
        filled = fill(0, width, filled)
    else:  # only up to the longest of these prompts: what comes after it is never read
        (chunks, rest), longest = divmod(width, chunk), most_of_shards(length.max() - 1)
        with jax.named_scope(PREFILL_CHUNKS):
            needed = jnp.minimum(-(-longest // chunk), chunks)
            filled = jax.lax.fori_loop(0, needed, lambda i, filled: fill(i * chunk, chunk, filled), filled)
        if rest:
            with jax.named_scope(PREFILL_REST):
                last = functools.partial(fill, chunks * chunk, rest)
                filled = jax.lax.cond(longest > chunks * chunk, last, lambda filled: filled, filled)
    cache, routes = filled
    if routes is not None:  # the last token is fed again, and padding is not replayed
        routes = jnp.where((shard.prompt_column < length[:, None] - 1)[..., None], routes, empty_routes)
    return _Resident(first, _decode_cache(shard, cache), routes)


def _forward(
    shard: _Shard, tokens: Array, positions: Array, segment: Array | None, cache: PyTree
) -> tuple[Array, PyTree, Array | None]:
    """Returns hidden states, the cache with the tokens in it, and their routes, None where they are not recorded."""
    model, cfg = shard.options.model, shard.options.model_cfg
    if shard.options.records_routes:
        return model.routes.record(shard.params, tokens, positions, segment, cfg, cache)
    return *model.forward(shard.params, tokens, positions, segment, cfg, cache), None


def _admit(shard: _Shard, loop: _Loop, admits: Array) -> _Loop:
    """Returns the loop's state with the first idle slot given to the next sequence, or idle if that has no budget.

    Args:
      admits: [] bool; False for a member of a population that has no idle slot, or no sequence, left.
    """
    count, dimension = shard.count, shard.batch_dimension
    slot = jnp.argmax(loop.slots.sequence == count).astype(jnp.int32)
    sequence = loop.waiting
    prompt, last = shard.prompt[sequence], jnp.maximum(shard.prompt_length[sequence] - 1, 0)
    absent = prompt >= loop.resident.first + shard.num_resident
    with jax.named_scope(PREFILL):
        resident = jax.lax.cond(
            any_shard(absent),
            lambda resident: where_shard(absent, _prefill(shard, prompt), resident),
            lambda resident: resident,
            loop.resident,
        )

    def copy(cache: Array, prefilled: Array) -> Array:
        # A prompt is shorter than a slot: later columns still hold the previous sequence's entries, which are
        # overwritten before they are read.
        row = jax.lax.dynamic_slice_in_dim(prefilled, prompt - resident.first, 1, dimension)
        start = [jnp.zeros_like(slot)] * cache.ndim
        start[dimension] = slot
        current = jax.lax.dynamic_slice(cache, start, row.shape)
        return jax.lax.dynamic_update_slice_in_dim(cache, where_shard(admits, row, current), slot, dimension)

    admitted = _Slots(
        sequence=jnp.where(shard.budget[sequence] > 0, sequence, count),
        token=shard.prompts.tokens[prompt, last],
        position=last,
        drawn=jnp.zeros_like(last),
        state=jnp.zeros_like(last),
    )
    fill = lambda slots, new: slots.at[slot].set(where_shard(admits, new, slots[slot]))
    outputs = loop.outputs
    if outputs.routes is not None:
        routes = jax.lax.dynamic_index_in_dim(resident.routes, prompt - resident.first, keepdims=False)
        row = where_shard(admits, sequence, jnp.full_like(sequence, count))  # `count` is out of bounds, dropped
        outputs = outputs._replace(routes=outputs.routes.at[row, : len(routes)].set(routes, mode="drop"))
    return loop._replace(
        waiting=where_shard(admits, loop.waiting + 1, loop.waiting),
        resident=resident,
        slots=jax.tree.map(fill, loop.slots, admitted),
        cache=jax.tree.map(copy, loop.cache, resident.cache),
        outputs=outputs,
    )


def _refill(shard: _Shard, loop: _Loop) -> _Loop:
    """Returns the loop's state with idle slots given to waiting sequences."""
    num_admitted = _num_admitted(shard, loop)
    admit = lambda i, loop: _admit(shard, loop, i < num_admitted)
    with jax.named_scope(ADMIT):
        return jax.lax.fori_loop(0, most_of_shards(num_admitted), admit, loop)


def _num_admitted(shard: _Shard, loop: _Loop) -> Array:
    """Returns for how many of the waiting sequences there is an idle slot, [] int32."""
    idle = (loop.slots.sequence == shard.count).sum(dtype=jnp.int32)
    return jnp.minimum(idle, shard.count - loop.waiting)


def _decode_step(shard: _Shard, loop: _Loop) -> _Loop:
    """Returns the loop's state after the next token of every slot is drawn and written to the outputs."""
    options, slots, count = shard.options, loop.slots, shard.count
    hidden, cache, routes = _forward(shard, slots.token[:, None], slots.position[:, None], None, loop.cache)
    logits = options.model.unembed(shard.params, hidden, options.model_cfg)
    logits = constrain(logits, "batch", None, None)[:, 0]
    column = slots.position + 1
    keys = jax.vmap(token_key)(shard.row_key[jnp.minimum(slots.sequence, count - 1)], column)
    is_greedy = None
    if options.greedy_samples:
        is_greedy = shard.sample[jnp.minimum(slots.sequence, count - 1)] < options.greedy_samples
    token, logprob, truncated, support_size = _draw(keys, logits, shard.sampling_params, is_greedy)

    drawn = slots.drawn + 1
    state, hit_string = slots.state, jnp.zeros_like(token, bool)
    if shard.stop_table is not None:
        state = shard.stop_table.next[state, token]
        hit_string = shard.stop_table.accept[state]
    hit_id = (token[:, None] == jnp.asarray(options.stop_ids, jnp.int32)[None, :]).any(axis=1)
    over_budget = drawn >= shard.budget[jnp.minimum(slots.sequence, count - 1)]
    finish = jnp.where(hit_id, Finish.STOP_TOKEN, jnp.where(hit_string, Finish.STOP_STRING, Finish.LENGTH))
    row = slots.sequence  # `count` for an idle slot: out of bounds, dropped
    out = loop.outputs
    set_column = lambda array, new: None if array is None else array.at[row, column].set(new, mode="drop")
    outputs = _Outputs(
        tokens=set_column(out.tokens, token),
        logprobs=set_column(out.logprobs, logprob),
        truncated=set_column(out.truncated, truncated),
        support_size=set_column(out.support_size, support_size),
        entropy=set_column(out.entropy, _entropy(logits, shard.sampling_params) if options.entropy else None),
        routes=None if routes is None else out.routes.at[row, slots.position].set(routes[:, 0], mode="drop"),
        length=out.length.at[row].set(column + 1, mode="drop"),
        finish=out.finish.at[row].set(finish.astype(jnp.int8), mode="drop"),
    )
    ended = hit_id | hit_string | over_budget
    slots = _Slots(
        sequence=jnp.where(ended, count, slots.sequence),
        token=token,
        position=jnp.where(ended | (row == count), 0, column),  # an idle slot attends to a single column
        drawn=drawn,
        state=state,
    )
    return loop._replace(slots=slots, cache=cache, outputs=outputs)


def _compact(shard: _Shard, loop: _Loop, rows: int) -> _Loop:
    """Returns the loop's state with the unfinished sequences in `rows` slots, which replace those of the loop."""
    order = jnp.argsort(loop.slots.sequence == shard.count)  # stable: unfinished sequences first
    dimension = shard.batch_dimension

    def move(i: Array, compacted: PyTree) -> PyTree:
        row = lambda cache: jax.lax.dynamic_slice_in_dim(cache, order[i], 1, dimension)
        write = lambda to, cache: jax.lax.dynamic_update_slice_in_dim(to, row(cache), i, dimension)
        return jax.tree.map(write, compacted, loop.cache)

    empty = _decode_cache(shard, _empty_cache(shard, rows, shard.shape[1]))
    cache = jax.lax.fori_loop(0, rows, move, empty)
    slots = jax.tree.map(lambda x: x[order[:rows]], loop.slots)
    return loop._replace(resident=None, slots=slots, cache=cache)


def _rollout_fields(shard: _Shard, outputs: _Outputs, version: Array) -> dict[str, Array | None]:
    """Returns the fields of a Rollout, except the fingerprint of its weights."""
    local_prompts = shard.prompts.tokens.shape[0]
    action_mask = (shard.column >= shard.prompt_length[:, None]) & (shard.column < outputs.length[:, None])
    return dict(
        **({"entropy": outputs.entropy} if shard.options.entropy else {}),
        **({"routes": outputs.routes} if shard.options.records_routes else {}),
        tokens=outputs.tokens,
        length=outputs.length,
        action_mask=action_mask,
        sampler_logprobs=outputs.logprobs,
        truncated_logprobs=outputs.truncated,
        support_size=outputs.support_size,
        finish=outputs.finish,
        group=shard.prompt + jax.lax.axis_index(batch_axes()).astype(jnp.int32) * local_prompts,
        sample=shard.sample,
        version=jnp.where(action_mask, version, -1),
        turn=jnp.zeros(shard.shape, jnp.int8),
    )


def _draw(
    keys: Array, logits: Array, sampling_params: SamplingParams, is_greedy: Array | None
) -> tuple[Array, Array, Array | None, Array | None]:
    """Returns (token [K] int32, its log-prob [K] under the policy and under the sampling distribution, support size).

    The last two are None where the sampling distribution is the policy itself.

    Args:
      logits: [K, V] float32 or wider. is_greedy: [K] bool, rows that take the likeliest token; None: none does.
    """
    or_greedy = lambda drawn: drawn if is_greedy is None else jnp.where(is_greedy, greedy(logits), drawn)
    logit_of = lambda logits, token: jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    if sampling_params.temperature is None:
        token = greedy(logits)
        logprob = logit_of(logits, token) - jax.nn.logsumexp(logits, axis=-1)
        return token, logprob, jnp.zeros_like(logprob), jnp.ones_like(token)
    scaled = logits / sampling_params.temperature.astype(logits.dtype)
    if not sampling_params.truncated:
        token = or_greedy(jax.vmap(draw)(keys, scaled))
        return token, logit_of(scaled, token) - jax.nn.logsumexp(scaled, axis=-1), None, None
    keep = support(scaled, sampling_params.top_k, sampling_params.top_p, sampling_params.min_p)
    limited = jnp.where(keep, scaled, -jnp.inf)
    token = or_greedy(jax.vmap(draw)(keys, limited))
    chosen = logit_of(scaled, token)
    logprob = chosen - jax.nn.logsumexp(scaled, axis=-1)
    return token, logprob, chosen - jax.nn.logsumexp(limited, axis=-1), keep.sum(axis=-1, dtype=jnp.int32)


def _entropy(logits: Array, sampling_params: SamplingParams) -> Array:
    """Returns the entropy of the policy at the sampling temperature, [K] nats; of greedy sampling at temperature 1."""
    if sampling_params.temperature is not None:
        logits = logits / sampling_params.temperature.astype(logits.dtype)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    return -(jnp.exp(logprobs) * logprobs).sum(axis=-1)


def _vary(literals: PyTree) -> PyTree:
    """Returns constants typed as varying over batch shards: the carry of a loop needs its final type from the start."""
    return jax.lax.pcast(literals, batch_axes(), to="varying")
