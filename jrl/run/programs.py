"""The compiled programs of a run, built from its config: the very functions that train, evaluate, score and plan."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrl.algos.contract import Needs, Objective
from jrl.device.program_cache import Program, ProgramCache
from jrl.device.sharding import SEQUENCE, TRAIN, batch_shards, row_sharding, row_shards, spec
from jrl.experiment import (
    Config,
    Online,
    Stage,
    Tables,
    attribute_weights_of,
    completion_length,
    is_reserved,
    optimizers,
    row_of,
    stage_names,
)
from jrl.learning import credit, layout, learner, pack
from jrl.learning.average import AVERAGE
from jrl.learning.critic import CRITIC, begin_critic, of_critic, of_policy
from jrl.learning.learner import Weights
from jrl.learning.optimizer import begin
from jrl.learning.optimizer import check as check_optimizer
from jrl.learning.optimizers.contract import describe
from jrl.learning.pack import PackingPlan, Shape
from jrl.learning.previous import previous_roles
from jrl.learning.step import StagePrograms
from jrl.learning.vocab_parallel import output_head
from jrl.models import decoder
from jrl.models.adapters.lora import adapted
from jrl.models.contract import Model, split_params, unrolled
from jrl.models.heads import VALUE, fresh_heads
from jrl.models.pretrained.published import Published, decoder_of
from jrl.models.shape import Decoder, for_length
from jrl.rollout import sampler, segments
from jrl.rollout.ensembles import Ensemble, aggregate
from jrl.rollout.strategies import strategy_of
from jrl.rollout.strategies.contract import Drawing
from jrl.rollout.strategies.partial import Partial
from jrl.run.sampler_devices import ProgramApart, copies_for
from jrl.run.teacher import abstract_teacher, teacher_shape, with_teacher
from jrl.types import Array, ModelState, PyTree, Rollout, TrainState

INIT_NAME = 0x6A726C  # folded into the run's key for the weights
STATE_AS_IT_IS = Objective._field_defaults["next_state"]


class Programs(NamedTuple):
    """The programs of a run."""

    init: Callable[[Array], TrainState]
    init_from: Callable[[PyTree, Array], TrainState]  # (published weights, key); the weights are donated
    sample_eval: Callable[..., Rollout] | None
    stages: tuple[StagePrograms, ...]
    teacher: ModelState | None = None  # of Config.teacher, as shapes

    def initial(self, key: jax.ShapeDtypeStruct) -> TrainState:
        """Returns the state before the first step, as shapes."""
        return with_teacher(self.init.shape(key), self.teacher)

    def inside(self, stage: int, config: Config, key: jax.ShapeDtypeStruct) -> TrainState:
        """Returns the state inside a stage, as shapes. stage: its place in `config.stages`."""
        state = self.initial(key)
        for setting, programs in zip(config.stages[: stage + 1], self.stages):
            if setting.steps:
                state = programs.begin.shape(state)
        return state


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
    return decoder.MODEL if config.adapter is None else adapted(decoder.MODEL, config.adapter)


def padded_prompts(stage: Online, mesh: Mesh) -> int:
    """Returns B: the prompts of a step, padded to a multiple of the batch shards."""
    shards = batch_shards(mesh)
    return -(-stage.prompts // shards) * shards


def width_of(stage: Stage, config: Config) -> int:
    """Returns T of a stage: the tokens of its longest prompt and completion."""
    return config.data.prompt_length + completion_length(stage, config)


def packed_shape(stage: Stage, config: Config, tables: Tables, mesh: Mesh) -> Shape:
    """Returns the packed shape of one optimizer step of a stage."""
    width, shards, shares = width_of(stage, config), row_shards(mesh), mesh.shape[SEQUENCE]
    if isinstance(stage, Online):
        if row_of(tables, "algos", stage.objective).pairs is not None:  # a group is compared, and lies in one row
            sequences = padded_prompts(stage, mesh) * stage.samples
            return layout.packed_shape(stage.learner, sequences, width, shards, shares=shares, unit=stage.samples)
        return layout.packed_shape(
            stage.learner,
            padded_prompts(stage, mesh) * stage.samples,
            width,
            shards,
            shares=shares,
            prompt_length=config.data.prompt_length,
            samples=stage.samples,
        )
    unit = row_of(tables, "algos", stage.objective).unit_size
    learner, longest = dataclasses.replace(stage.learner, prefix_sharing="none"), width * unit
    if stage.learner.prefix_sharing == "cross_row" and (learner.row_length or longest) < longest:
        learner = dataclasses.replace(learner, row_length=None)  # that of continuations; stored rows are not cut
    return layout.packed_shape(learner, stage.batch_size * unit, width, shards, shares=shares, unit=unit)


def initial_state(key: Array, *, cfg: Any, model: Model) -> TrainState:
    """Returns the state before the first stage, parameters sharded for training. `key` is the run's root."""
    frozen, params = split_params(model.init(jax.random.fold_in(key, INIT_NAME), cfg, lambda names: spec(names, TRAIN)))
    zero = jnp.zeros((), jnp.int32)
    policy = ModelState(params=params, frozen=frozen, heads={}, opt_state=None, version=zero)
    return TrainState(step=zero, models={"policy": policy}, objective=(), key=key, skipped=zero)


def state_from(weights: PyTree, key: Array, *, cfg: Any, model: Model) -> TrainState:
    """Returns `initial_state` with `weights` in the place of those drawn, which the compiler leaves out: of the policy,
    or frozen under adapters. Adapters, which no folder holds, are drawn."""
    state = initial_state(key, cfg=cfg, model=model)
    policy = state.models["policy"]
    policy = policy.replace(params=weights) if policy.frozen is None else policy.replace(frozen=weights)
    return state.replace(models={"policy": policy})


def begin_stage(
    state: TrainState,
    *,
    trains: str,
    optimizer: Any,
    objective: Objective,
    config: Any,
    model: Model,
    cfg: Any,
    num_previous: int,
    critic: str | None = None,
    critic_optimizer: Any = None,
) -> TrainState:
    """Returns the state that a stage begins with: a fresh optimizer for the role that it trains, copies of the policy
    for the roles that it needs, the objective's first state. Roles that earlier stages trained stay, without theirs.

    Args:
      trains: the role that learns. optimizer: its configuration. config: the objective's. cfg: the model's.
      num_previous: versions of it before the newest that are held.
      critic: the role that a critic of its own begins as a copy of; None: there is none.
      critic_optimizer: that critic's.
    """
    needs = objective.needs(config)
    models = {role: model.replace(opt_state=None) for role, model in state.models.items() if not is_reserved(role)}
    own = models[trains] if trains in models else copy_of(models["policy"])
    if critic is not None:
        needs = needs._replace(values=False)
        source = models[critic]
        zeros = lambda: drawn_heads([VALUE], CRITIC, state.key, cfg, needs.head_outputs)[VALUE]
        models[CRITIC] = begin_critic(source, source.shares or critic, zeros, needs.value_outputs)
    fits = lambda head: head in own.heads and own.heads[head].shape[-1] == needs.head_outputs[head]
    missing = [head for head in needs.heads if not fits(head)]
    if missing:
        own = own.replace(heads={**own.heads, **drawn_heads(missing, trains, state.key, cfg, needs.head_outputs)})
    leaves_of = lambda model_state: Weights(*describe(model.spec(cfg), model_state.heads))
    opt_state = begin(optimizer, Weights(own.params, own.heads), leaves_of(own))
    own = own.replace(opt_state=opt_state, version=jnp.zeros_like(own.version))
    if needs.reference:
        models["reference"] = copy_of(own, own.shares or trains)
    for role in previous_roles(num_previous):
        models[role] = copy_of(own)
    if optimizer.average is not None:
        models[AVERAGE] = copy_of(own, own.shares or trains).replace(heads=copy_leaves(own.heads))
    models[trains] = own
    if critic is not None:
        begun = models[CRITIC]
        opt_state = begin(critic_optimizer, Weights(begun.params, begun.heads), leaves_of(begun))
        models[CRITIC] = begun.replace(opt_state=opt_state)
    return state.replace(models=models, objective=objective.init_state(config))


def drawn_heads(names: Sequence[str], role: str, key: Array, cfg: Any, outputs: Mapping[str, int]) -> dict[str, Array]:
    """Returns new heads of a role by name. Their draws are named after it; `key` is the run's root."""
    named = jax.random.fold_in(jax.random.fold_in(key, INIT_NAME), zlib.crc32(role.encode()))
    return fresh_heads(names, named, cfg.width, cfg.param_dtype, lambda names: spec(names, TRAIN), outputs)


def copy_of(model: ModelState, role: str = "policy") -> ModelState:
    """Returns a model with a copy of the trained parameters of `model`, over the same frozen weights: those of `role`,
    where it has some. It has no heads and no optimizer."""
    shares = None if model.frozen is None and model.shares is None else role
    params = jax.tree.map(jnp.copy, model.params)
    return ModelState(params, None, {}, None, jnp.zeros_like(model.version), shares=shares)


def build(
    config: Config,
    tables: Tables,
    model: Model,
    tokenizer: Any,
    mesh: Mesh,
    cache: ProgramCache,
    sampler_mesh: Mesh | None = None,
) -> Programs:
    """Returns the programs of a run on `mesh`. Nothing is compiled before it is called.

    Args:
      sampler_mesh: where training draws, on devices of their own; None: on `mesh`.
    """
    cfg = model_config(config, tokenizer)
    model.spec(cfg)  # refuses adapters to projections that are not there
    names = stage_names(config.stages)
    stages = [
        build_stage(stage, name, config, tables, model, cfg, tokenizer, mesh, cache)
        for stage, name in zip(config.stages, names)
    ]
    if sampler_mesh is not None:
        stages = [with_sampler_mesh(p, stage, mesh, sampler_mesh) for p, stage in zip(stages, config.stages)]
    longest = config.sampler.completion_length
    evaluated = config.eval and sampling(config, config.eval.samples, longest, model, cfg, tokenizer)
    return Programs(
        init=cache.program("init", functools.partial(initial_state, cfg=cfg, model=model)),
        init_from=cache.program("init_from", functools.partial(state_from, cfg=cfg, model=model), donate_argnums=0),
        sample_eval=evaluated and cache.program("sample_eval", evaluated),
        stages=tuple(stages),
        teacher=None if config.teacher is None else abstract_teacher(teacher_shape(config), mesh),
    )


def with_sampler_mesh(programs: StagePrograms, stage: Stage, mesh: Mesh, sampler_mesh: Mesh) -> StagePrograms:
    """Returns the programs of a stage with the one that draws on a mesh of its own."""
    if not isinstance(stage, Online):
        return programs
    by_role = bool(strategy_of(stage.strategy).roles(stage.strategy))
    apart = ProgramApart(programs.sample, mesh, sampler_mesh, copies=copies_for(stage.lag), by_role=by_role)
    return programs._replace(sample=apart)


def teacher_kind(config: Config) -> tuple[Model, Any] | None:
    """Returns the model of Config.teacher and its shape; None: a teacher is a model like the policy."""
    return None if config.teacher is None else (decoder.MODEL, teacher_shape(config))


def drawing_of(stage: Online, tokenizer: Any) -> Drawing | None:
    """Returns how the stage's sampling strategy draws rows; None: each by itself."""
    drawing = strategy_of(stage.strategy).drawing
    return None if drawing is None else drawing(stage.strategy, tokenizer)


def sampling(
    config: Config,
    samples: int,
    longest: int,
    model: Model,
    cfg: Any,
    tokenizer: Any,
    greedy_samples: int = 0,
    drawing: Drawing | None = None,
) -> Callable[..., Rollout]:
    """Returns the sampler's program of a run, for so many completions of each prompt, of at most `longest` tokens."""
    return functools.partial(
        sampler.program,
        model=model,
        model_cfg=cfg,
        samples=samples,
        greedy_samples=greedy_samples,
        completion_length=longest,
        slots=config.sampler.slots,
        layers=config.sampler.layers,
        layout=config.sampler.layout,
        prefill_chunk=config.sampler.prefill_chunk,
        max_batch_compactions=config.sampler.max_batch_compactions,
        stop_ids=tokenizer.end_ids,
        pad_id=tokenizer.pad_id,
        drawing=drawing,
    )


def stage_sampling(
    stage: Online, config: Config, model: Model, cfg: Any, tokenizer: Any, needs: Needs
) -> Callable[..., Rollout]:
    """Returns the program that draws a stage's completions, or their first segments. needs: its objective's."""
    own = {"greedy_samples": int(needs.greedy_sample), "drawing": drawing_of(stage, tokenizer)}
    return sampling(config, stage.samples, completion_length(stage, config), model, cfg, tokenizer, **own)


def segment_sampling(
    stage: Online, config: Config, model: Model, cfg: Any, tokenizer: Any, needs: Needs
) -> Callable[..., Rollout]:
    """Returns the program that draws the further segments of a stage's completions. needs: its objective's."""
    own, longest = ("samples", "completion_length", "drawing"), completion_length(stage, config)
    greedy = int(needs.greedy_sample)
    options = sampling(config, stage.samples, longest, model, cfg, tokenizer, greedy_samples=greedy).keywords
    return functools.partial(
        segments.next_segment,
        completion_length=longest,
        tokens=stage.strategy.tokens,
        **{name: value for name, value in options.items() if name not in own},
    )


def correcting(stage: Online, config: Config, model: Model, cfg: Any, tokenizer: Any) -> Callable[..., Rollout]:
    """Returns the program by which a corrector rewrites a stage's completions, in at most as many tokens."""
    return sampling(config, 1, completion_length(stage, config), model, cfg, tokenizer)


def newest_only(strategy: Any) -> bool:
    """Whether tokens of older weights are left out of the loss."""
    return isinstance(strategy, Partial) and strategy.newest_only


def build_stage(
    stage: Stage,
    name: str,
    config: Config,
    tables: Tables,
    model: Model,
    cfg: Any,
    tokenizer: Any,
    mesh: Mesh,
    cache: ProgramCache,
) -> StagePrograms:
    """Returns the programs of one stage, each named after it in the cache."""
    objective = row_of(tables, "algos", stage.objective)
    needs, online = objective.needs(stage.objective), isinstance(stage, Online)
    learned = model if stage.learner.layers == "scanned" else unrolled(model)
    if stage.learner.logprobs == "vocab_parallel":
        learned = learned._replace(output_head=output_head)
    static = dict(model=learned, cfg=cfg, chunk=stage.learner.chunk)
    kind = teacher_kind(config) if needs.has_teacher else None
    of_teacher = {} if kind is None else dict(zip(("model", "cfg"), kind))
    longest = completion_length(stage, config)
    judged = dict(objective=objective, max_completion=longest)
    trained, updated = optimizers(stage), objective
    has_critic = CRITIC in trained
    if has_critic:
        updated = of_policy(objective)
    # The only update of its batch needs no old log-probs; a value head's old values are needed always.
    fields = ("old_values",) * (needs.values and not has_critic)
    if needs.logprobs and (stage.learner.updates_per_batch > 1 or needs.credit_logprobs):
        fields += ("old_logprobs",)
    fields += ("old_entropy",) * needs.credit_entropy
    refills = online and objective.refill(stage.objective) is not None
    starts = dict(trains=stage.trains, optimizer=stage.optimizer, objective=objective, config=stage.objective)
    check_optimizer(stage.optimizer, Weights(*describe(model.spec(cfg), needs.heads)))
    if has_critic:
        starts |= dict(critic=stage.critic, critic_optimizer=trained[CRITIC])
        check_optimizer(trained[CRITIC], Weights(*describe(model.spec(cfg), [VALUE])))
    closes = dict(roles=tuple(trained), objective=objective)
    if online:
        closes |= dict(reset_reference_every=stage.reset_reference_every)

    def program(what: str, fn: Callable, **options: Any) -> Program:
        return cache.program(f"{name}.{what}", fn, **options)

    def judging(what: str, fn: Callable, **more: Any) -> Program:
        return program(what, functools.partial(fn, num_groups=padded_prompts(stage, mesh), **judged, **more))

    return StagePrograms(
        begin=program(
            "begin",
            functools.partial(begin_stage, **starts, model=model, cfg=cfg, num_previous=stage.lag if refills else 0),
            donate_argnums=0,
        ),
        sample=program("sample", stage_sampling(stage, config, model, cfg, tokenizer, needs)) if online else None,
        next_segment=program("next_segment", segment_sampling(stage, config, model, cfg, tokenizer, needs))
        if online and isinstance(stage.strategy, Partial)
        else None,
        pack=program("pack", pack.pack_rollout if online else pack.pack_tokens),
        recompute=program(
            "recompute", functools.partial(learner.recompute, fields=fields, value_bins=needs.value_bins, **static)
        )
        if fields
        else None,
        reference=program("reference", functools.partial(learner.logprobs, **static)) if needs.reference else None,
        teacher=program("teacher", functools.partial(learner.logprobs, **{**static, **of_teacher}))
        if needs.teacher
        else None,
        row_values=program(
            "row_values",
            functools.partial(
                learner.mean_scores,
                attribute_weights={role: attribute_weights_of(config.stages, role) for role in needs.scored_by},
                model=learned,
                cfg=cfg,
            ),
        )
        if needs.scored_by
        else None,
        critic_values=program(
            "critic_values",
            functools.partial(learner.recompute, fields=("old_values",), value_bins=needs.value_bins, **static),
        )
        if has_critic
        else None,
        scores=program(
            "scores",
            functools.partial(
                learner.sequence_scores, model=learned, cfg=cfg, attribute_weights=stage.attribute_weights
            ),
        )
        if online and stage.rewards
        else None,
        combine=program("combine", functools.partial(combined_scores, ensemble=stage.ensemble))
        if online and stage.ensemble is not None
        else None,
        correct=program("correct", correcting(stage, config, model, cfg, tokenizer))
        if online and stage.corrector is not None
        else None,
        credit=judging("credit", credit.credit, newest_only=newest_only(stage.strategy)) if online else None,
        finish=program(
            "finish", functools.partial(credit.finish_sampled if online else credit.finish_stored, **judged)
        ),
        update=program(
            "update",
            functools.partial(learner.update, role=stage.trains, objective=updated, teacher_kind=kind, **static),
            donate_argnums=0,
        ),
        update_critic=program(
            "update_critic",
            functools.partial(learner.update, role=CRITIC, objective=of_critic(objective), **static),
            donate_argnums=0,
        )
        if has_critic
        else None,
        close=program("close", functools.partial(learner.close_step, **closes), donate_argnums=0),
        # The policy has not learned, and what its metrics would change stays.
        close_warmup=program(
            "close_warmup",
            functools.partial(
                learner.close_step, **{**closes, "objective": objective._replace(next_state=STATE_AS_IT_IS)}
            ),
            donate_argnums=0,
        )
        if has_critic and stage.critic_warmup
        else None,
        keep=judging("keep", credit.kept_rows) if refills else None,
        before=program("before", functools.partial(version_before, lag=stage.lag if online else 0)),
        mean=program("mean", learner.step_metrics),
        copy=program("copy", copy_leaves),
    )


def combined_scores(scores: Sequence[Array], *, ensemble: Ensemble) -> Array:
    """Returns one score from those of several roles, [M, R, S] each (R11)."""
    return aggregate(ensemble, jnp.stack(scores))


def version_before(version: Array, *, lag: int) -> Array:
    """Returns max(version - lag, 0)."""
    return jnp.maximum(version - lag, 0)


def copy_leaves(tree: PyTree) -> PyTree:
    """Returns a copy of every leaf."""
    return jax.tree.map(jnp.copy, tree)


def abstract(x: PyTree, mesh: Mesh) -> PyTree:
    """Returns shape, dtype and sharding of every leaf; what is not on a device counts as replicated."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", everywhere)), x
    )


def abstract_plan(shape: Shape, mesh: Mesh) -> PackingPlan:
    """Returns a packing plan as shapes."""
    rows = row_sharding(mesh)
    cut = lambda last: jax.ShapeDtypeStruct((shape.micro_batches, shape.rows, last), np.int32, sharding=rows)
    replicated_shape = lambda dims, dtype: jax.ShapeDtypeStruct(
        dims, dtype, sharding=NamedSharding(mesh, PartitionSpec())
    )
    return PackingPlan(
        source=cut(shape.row_length),
        segment=cut(shape.row_length),
        shared_prefix=None if shape.samples == 1 or shape.prefix_columns else cut(shape.row_length),
        prefix_row=cut(shape.prefix_columns) if shape.prefix_columns else None,
        sequence=cut(shape.places),
        member=replicated_shape((shape.sequences,), bool),
        num_real=replicated_shape((), np.int32),
    )
