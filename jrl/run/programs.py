"""The compiled programs of a run, built from its config: the very functions that train, evaluate, score and plan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrl.algos.contract import Algorithm
from jrl.algos.supervised import SUPERVISED
from jrl.device.program_cache import ProgramCache
from jrl.device.sharding import BATCH_AXES, TRAIN, batch_sharding, batch_shards, spec
from jrl.experiment import Config, Eval, Tables, row_of
from jrl.learning import learner, pack
from jrl.learning.learner import Credit
from jrl.learning.optimizer import begin
from jrl.learning.pack import Plan, Shape
from jrl.models import decoder
from jrl.models.adapters.lora import adapted
from jrl.models.contract import Model, split, unrolled
from jrl.models.heads import valued
from jrl.models.pretrained.published import Published, decoder_of
from jrl.models.shape import Decoder, for_length
from jrl.rollout import sampler, stop_strings
from jrl.rollout.prompts import prompt_batch
from jrl.rollout.sampler import SamplingParams
from jrl.rollout.stop_strings import StopTable
from jrl.tasks.data.prompts import Visit
from jrl.types import Array, PromptBatch, PyTree, Rollout, Scores, TrainBatch, TrainState

# Streams keep draws apart that share a prompt: training, evaluation, a person at the prompt.
TRAIN_STREAM, EVAL_STREAM, INTERACTIVE_STREAM = 0, 1, 2

INIT_NAME = 0x6A726C  # folded into the run's key for the weights


class Programs(NamedTuple):
    """Jitted functions of arrays. Hyper-parameters travel as arrays, so that changing one never recompiles."""

    init: Callable[[Array], TrainState]
    init_from: Callable[[PyTree, Array], TrainState]  # (published weights, key); the weights are donated
    begin_rl: Callable[[TrainState], TrainState]
    sample: Callable[
        ..., Rollout
    ]  # (params, prompts, key, stream, version, sampling_params, stop_table) at training's shape
    sample_eval: Callable[..., Rollout] | None
    pack: Callable[[Rollout, Plan, Array], TrainBatch]
    logprobs: Callable[[PyTree, TrainBatch], Array]
    values: Callable[[PyTree, TrainBatch], dict[str, Array]] | None  # fields of TrainBatch; None: no value head
    credit: Callable[..., Credit]  # (rollout, scores, baseline, algo[, old values by minibatch])
    finish: Callable[[TrainBatch, Plan, Credit, PyTree], TrainBatch]
    update: Callable[[TrainState, TrainBatch, PyTree, PyTree], tuple[TrainState, dict[str, Array]]]
    close: Callable[..., TrainState]
    keep: Callable[[Rollout, Scores, PyTree], Array]
    before: Callable[[Array], Array]  # version -> max(0, version - 1)
    mean: Callable[[list[dict[str, Array]]], dict[str, Array]]
    copy: Callable[[PyTree], PyTree]
    close_sft: Callable[[TrainState], TrainState] | None
    pack_sft: Callable[..., TrainBatch] | None
    update_sft: Callable[..., tuple[TrainState, dict[str, Array]]] | None


def model_config(config: Config, tokenizer: Any) -> Any:
    """Returns the shape of the run's model, a Decoder but where it is the user's own, its vocabulary filled in.

    Raises: ValueError where that is too small.
    """
    cfg, vocab_size = config.model, tokenizer.vocab_size
    if isinstance(cfg, Published):
        cfg = decoder_of(cfg)[1]
        if cfg.vocab_size < tokenizer.filled:
            raise ValueError(
                f"the embedding in {config.model.path} has {cfg.vocab_size} rows, and the tokenizer has ids up to "
                f"{tokenizer.filled - 1}; it belongs to another model"
            )
        return for_length(cfg, config.data.prompt_length + config.sampler.completion_length)
    if cfg.vocab_size is None:
        return dataclasses.replace(cfg, vocab_size=vocab_size)
    if cfg.vocab_size < vocab_size:
        raise ValueError(
            f"{type(cfg).__name__}.vocab_size={cfg.vocab_size} is smaller than the tokenizer's {vocab_size}"
        )
    return cfg


def model_of(config: Config, tables: Tables) -> Model:
    """Returns the functions of the run's model."""
    if not isinstance(config.model, Decoder | Published):
        return row_of(tables, "models", config.model).model
    model = decoder.MODEL if config.adapter is None else adapted(decoder.MODEL, config.adapter)
    return model if row_of(tables, "algos", config.algo).returns is None else valued(model)


def padded_prompts(config: Config, mesh: Mesh) -> int:
    """Returns B: the prompts of a step, padded to a multiple of the batch shards."""
    shards = batch_shards(mesh)
    return -(-config.loop.prompts // shards) * shards


def train_shape(config: Config, mesh: Mesh) -> Shape:
    """Returns the packed shape of one RL optimiser step."""
    width = config.data.prompt_length + config.sampler.completion_length
    sequences = padded_prompts(config, mesh) * config.loop.samples
    return learner.packed_shape(
        config.learner,
        sequences,
        width,
        batch_shards(mesh),
        prompt_length=config.data.prompt_length,
        samples=config.loop.samples,
    )


def sft_shape(config: Config, mesh: Mesh) -> Shape:
    """Returns the packed shape of one supervised step: one pass, one minibatch."""
    width = config.data.prompt_length + config.sampler.completion_length
    plain = dataclasses.replace(config.learner, minibatches=1, epochs=1, prefix_sharing="none")
    if config.learner.prefix_sharing == "cross_row" and (plain.row_length or width) < width:
        plain = dataclasses.replace(plain, row_length=None)  # that of branches; a warm start has whole sequences
    return learner.packed_shape(plain, config.sft.sequences, width, batch_shards(mesh))


def initial_state(key: Array, config: Config, cfg: Any, model: Model) -> TrainState:
    """Returns the state before the first step, parameters sharded for training. `key` is the run's root."""
    drawn = model.init(jax.random.fold_in(key, INIT_NAME), cfg, lambda names: spec(names, TRAIN))
    base, params = split(drawn)
    first = config.optimizer if config.sft is None else config.sft.optimizer
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero,
        version=zero,
        params=params,
        opt_state=begin(first, params),
        key=key,
        baseline=jnp.full((), jnp.nan, jnp.float32),
        reference=None,
        behaviour=None,
        skipped=zero,
        base=base,
    )


def state_from(weights: PyTree, key: Array, config: Config, cfg: Any, model: Model) -> TrainState:
    """Returns `initial_state` with `weights` in the place of those drawn, which the compiler leaves out: of the policy,
    or frozen under adapters. What no folder holds, adapters and a value head, is drawn."""
    state = initial_state(key, config, cfg, model)
    place = "params" if state.base is None else "base"
    return state.replace(**{place: {**getattr(state, place), **weights}})


def rl_state(state: TrainState, config: Config, algorithm: Algorithm) -> TrainState:
    """Returns the state RL begins with: a fresh optimiser, the reference frozen where the algorithm has a KL term."""
    keeps_behaviour = config.loop.lag > 0 and algorithm.refill(config.algo) is not None
    copy = lambda: jax.tree.map(jnp.copy, state.params)
    return state.replace(
        opt_state=begin(config.optimizer, state.params),
        reference=copy() if algorithm.needs_reference(config.algo) else None,
        behaviour=copy() if keeps_behaviour else None,
    )


def build(
    config: Config, algorithm: Algorithm, model: Model, tokenizer: Any, mesh: Mesh, program_cache: ProgramCache
) -> Programs:
    """Returns the programs of a run on `mesh`. Nothing is compiled before it is called."""
    cfg = model_config(config, tokenizer)
    model.spec(cfg)  # refuses adapters to projections that are not there
    learned = model if config.learner.layers == "scanned" else unrolled(model)
    static = dict(model=learned, cfg=cfg, chunk=config.learner.logprob_chunk)
    completion = config.sampler.completion_length
    groups = padded_prompts(config, mesh)
    # The only update of its batch needs no old log-probs; a value head's old values are needed always.
    old_fields = ("old_values",) if config.learner.updates_per_batch == 1 else ("old_values", "old_logprobs")

    def sampling(name: str, samples: int) -> Callable[..., Rollout]:
        fn = functools.partial(
            sampler.program,
            model=model,
            model_cfg=cfg,
            samples=samples,
            completion_length=completion,
            slots=config.sampler.slots,
            layers=config.sampler.layers,
            layout=config.sampler.layout,
            max_batch_compactions=config.sampler.max_batch_compactions,
            stop_ids=tokenizer.end_ids,
            pad_id=tokenizer.pad_id,
        )
        return program_cache.program(name, fn)

    return Programs(
        init=program_cache.program("init", lambda key: initial_state(key, config, cfg, model)),
        init_from=program_cache.program(
            "init_from", lambda weights, key: state_from(weights, key, config, cfg, model), donate_argnums=0
        ),
        begin_rl=program_cache.program("begin_rl", lambda state: rl_state(state, config, algorithm), donate_argnums=0),
        sample=sampling("sample", config.loop.samples),
        sample_eval=None if config.eval is None else sampling("sample_eval", config.eval.samples),
        pack=program_cache.program("pack", pack.pack_rollout),
        logprobs=program_cache.program("logprobs", functools.partial(learner.logprobs, **static)),
        values=None
        if algorithm.returns is None
        else program_cache.program("values", functools.partial(learner.before_update, fields=old_fields, **static)),
        credit=program_cache.program(
            "credit",
            functools.partial(
                learner.credit,
                algorithm=algorithm,
                num_groups=groups,
                max_completion=completion,
            ),
        ),
        finish=program_cache.program(
            "finish", functools.partial(learner.finish, algorithm=algorithm, max_completion=completion)
        ),
        update=program_cache.program(
            "update", functools.partial(learner.update, algorithm=algorithm, **static), donate_argnums=0
        ),
        close=program_cache.program("close", learner.close_step, donate_argnums=0),
        keep=program_cache.program(
            "keep",
            functools.partial(learner.kept_rows, algorithm=algorithm, num_groups=groups, max_completion=completion),
        ),
        before=program_cache.program("before", lambda version: jnp.maximum(version - 1, 0)),
        mean=program_cache.program("mean", learner.mean_metrics),
        copy=program_cache.program("copy", lambda tree: jax.tree.map(jnp.copy, tree)),
        close_sft=None
        if config.sft is None
        else program_cache.program("close_sft", learner.close_sft_step, donate_argnums=0),
        pack_sft=None if config.sft is None else program_cache.program("pack_sft", pack.pack_supervised),
        update_sft=None
        if config.sft is None
        else program_cache.program(
            "update_sft", functools.partial(learner.update, algorithm=SUPERVISED, **static), donate_argnums=0
        ),
    )


def place_prompts(visits: Sequence[Visit], count: int, width: int, pad_id: int, mesh: Mesh) -> PromptBatch:
    """Returns prompts on the device, cut over the batch axes; missing ones are prompts of length 0."""
    host = prompt_batch(visits, prompt_length=width, pad_id=pad_id)
    rows = -(-count // batch_shards(mesh)) * batch_shards(mesh)

    def place(x: np.ndarray) -> Array:
        full = np.concatenate([x, np.zeros((rows - len(x), *x.shape[1:]), x.dtype)])
        return jax.device_put(full, batch_sharding(mesh, full.ndim))

    return jax.tree.map(place, host)


def sampling_params(config: sampler.Sampler, mesh: Mesh) -> SamplingParams:
    """Returns the sampler's traced part as arrays."""
    number = lambda x, dtype: None if x is None else jax.device_put(dtype(x), NamedSharding(mesh, PartitionSpec()))
    return SamplingParams(
        temperature=number(config.temperature, np.float32),
        top_k=number(config.top_k, np.int32),
        top_p=number(config.top_p, np.float32),
        min_p=number(config.min_p, np.float32),
    )


def eval_sampling_params(config: Eval, mesh: Mesh) -> SamplingParams:
    """Returns the sampling parameters of an evaluation: the policy at its own temperature, never truncated."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    temperature = None if config.temperature is None else jax.device_put(np.float32(config.temperature), everywhere)
    return SamplingParams(temperature=temperature, top_k=None, top_p=None, min_p=None)


def stop_table(config: sampler.Sampler, tokenizer: Any, mesh: Mesh) -> StopTable | None:
    """Returns the stop strings' automaton on the device, or None where there are none."""
    from_host = lambda table: jax.device_put(table, NamedSharding(mesh, PartitionSpec()))
    if not config.stop_strings:
        return None
    return from_host(stop_strings.build(config.stop_strings, tokenizer.token_bytes()))


def abstract(x: PyTree, mesh: Mesh) -> PyTree:
    """Returns shape, dtype and sharding of every leaf; what is not on a device counts as replicated."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", everywhere)), x
    )


def abstract_prompts(count: int, width: int, mesh: Mesh) -> PromptBatch:
    """Returns a batch of prompts as shapes."""
    rows = -(-count // batch_shards(mesh)) * batch_shards(mesh)
    shape = lambda dims, dtype: jax.ShapeDtypeStruct(dims, dtype, sharding=batch_sharding(mesh, len(dims)))
    return PromptBatch(
        tokens=shape((rows, width), np.int32), length=shape((rows,), np.int32), uid=shape((rows, 2), np.uint32)
    )


def abstract_plan(shape: Shape, mesh: Mesh) -> Plan:
    """Returns a packing plan as shapes."""
    rows = NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))
    cut = lambda last: jax.ShapeDtypeStruct((shape.micro_batches, shape.rows, last), np.int32, sharding=rows)
    whole = lambda dims, dtype: jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    return Plan(
        source=cut(shape.row_length),
        segment=cut(shape.row_length),
        trunk=None if shape.samples == 1 or shape.ahead else cut(shape.row_length),
        ahead=cut(shape.ahead) if shape.ahead else None,
        sequence=cut(shape.places),
        member=whole((shape.sequences,), bool),
        num_real=whole((), np.int32),
    )
