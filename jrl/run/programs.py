"""The compiled programs of a run, built from its config: the very functions that train, evaluate, score and plan."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrl.algos.contract import Needs, Objective, reads_old_values, recomputes_logprobs
from jrl.device.program_cache import Program, ProgramCache
from jrl.device.sharding import SEQUENCE, replicated, row_sharding, row_shards, rows_over_shards
from jrl.experiment import (
    Config,
    Online,
    Stage,
    Tables,
    attribute_weights_of,
    completion_length,
    configured_optimizers,
    configured_strategy,
    continues_optimizer,
    longest_row,
    optimizers,
    row_of,
    stage_names,
)
from jrl.learning import credit, layout, learner, pack
from jrl.learning.critic import CRITIC, of_critic, of_policy
from jrl.learning.layout import Learner
from jrl.learning.learner import Weights
from jrl.learning.optimizer import check as check_optimizer
from jrl.learning.optimizers.contract import ConfiguredOptimizer, describe
from jrl.learning.pack import PackingPlan, Shape
from jrl.learning.pair_model import first_preferred
from jrl.learning.step import StagePrograms
from jrl.learning.vocab_parallel import output_head
from jrl.models import decoder
from jrl.models.adapters.lora import adapted
from jrl.models.contract import Model, unrolled
from jrl.models.heads import VALUE
from jrl.models.pretrained.published import Published, decoder_of
from jrl.models.shape import Decoder, for_length
from jrl.rollout import sampler, segments
from jrl.rollout.ensembles import Ensemble, aggregate
from jrl.rollout.strategies.contract import ConfiguredStrategy, Drawing
from jrl.rollout.strategies.partial import Partial
from jrl.run.sampler_devices import ProgramApart, copies_for
from jrl.run.teacher import TEACHER, abstract_teacher, teacher_shape, with_teacher
from jrl.run.train_state import begin_stage, continue_stage, copy_leaves, initial_state, state_from
from jrl.types import Array, ModelState, PyTree, Rollout, TrainState

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
    """Returns the config of the run's model, a Decoder unless it is the user's own, with its vocab_size filled in.

    Raises: ValueError if the vocabulary is too small for the tokenizer.
    """
    cfg, vocab_size = config.model, tokenizer.vocab_size
    if isinstance(cfg, Published):
        cfg = decoder_of(cfg)[1]
        if cfg.vocab_size < tokenizer.filled:
            raise ValueError(
                f"the embedding in {config.model.path} has {cfg.vocab_size} rows, and the tokenizer has ids up to "
                f"{tokenizer.filled - 1}; it belongs to another model"
            )
        return for_length(cfg, longest_row(config))
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


def width_of(stage: Stage, config: Config) -> int:
    """Returns T of a stage: the tokens of its longest prompt and completion."""
    return config.data.prompt_length + completion_length(stage, config)


def packed_shape(stage: Stage, config: Config, tables: Tables, mesh: Mesh) -> Shape:
    """Returns the packed shape of one optimizer step of a stage. Raises: ValueError, which names the stage."""
    width, shards, options = width_of(stage, config), row_shards(mesh), layout_options(config, mesh)
    with named_in_errors(stage, config):
        if not isinstance(stage, Online):
            unit = row_of(tables, "algos", stage.objective).unit_size
            return stored_shape(stage.learner, stage.batch_size, unit, width, shards, options)
        sequences = rows_over_shards(stage.prompts, mesh) * stage.samples
        if row_of(tables, "algos", stage.objective).pairs is not None:  # a group is compared within one row
            return layout.packed_shape(stage.learner, sequences, width, shards, unit=stage.samples, **options)
        options |= dict(prompt_length=config.data.prompt_length, samples=stage.samples)
        return layout.packed_shape(stage.learner, sequences, width, shards, **options)


def pretraining_shape(stage: Online, config: Config, mesh: Mesh) -> Shape:
    """Returns the packed shape of the stored rows that one optimizer step of a stage also imitates."""
    width, shards, options = width_of(stage, config), row_shards(mesh), layout_options(config, mesh)
    with named_in_errors(stage, config):
        return stored_shape(stage.learner, stage.pretraining.batch_size, 1, width, shards, options)


@contextlib.contextmanager
def named_in_errors(stage: Stage, config: Config) -> Iterator[None]:
    """Puts the name of a stage of `config` before a ValueError: every stage may have a learner of its own."""
    try:
        yield
    except ValueError as error:
        name = stage_names(config.stages)[config.stages.index(stage)]
        raise ValueError(f"stage {name}: {error}") from None


def layout_options(config: Config, mesh: Mesh) -> dict[str, Any]:
    """Returns the options of `layout.packed_shape` that all stages have in common."""
    return dict(shares=mesh.shape[SEQUENCE], padded_rows=getattr(config.model, "attention", None) == "splash")


def stored_shape(config: Learner, units: int, unit: int, width: int, shards: int, options: dict[str, Any]) -> Shape:
    """Returns the packed shape of stored rows, `units` comparisons of `unit` rows each.

    Args:
      options: of `layout.packed_shape`.
    """
    learner, unit_width = dataclasses.replace(config, prefix_sharing="none"), width * unit
    if config.prefix_sharing == "cross_row" and (learner.row_length or unit_width) < unit_width:
        learner = dataclasses.replace(learner, row_length=None)  # it is for continuations; stored rows are not split
    return layout.packed_shape(learner, units * unit, width, shards, unit=unit, **options)


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
      sampler_mesh: separate devices that sample during training; None: those of `mesh` do.
    """
    cfg = model_config(config, tokenizer)
    model.spec(cfg)  # raises for adapters to projections that the model does not have
    names = stage_names(config.stages)
    stages = [
        build_stage(stage, name, config, tables, model, cfg, tokenizer, mesh, cache)
        for stage, name in zip(config.stages, names)
    ]
    if sampler_mesh is not None:
        stages = [with_sampler_mesh(p, stage, tables, mesh, sampler_mesh) for p, stage in zip(stages, config.stages)]
    sample_eval = None
    if config.eval is not None:
        options = sampling_options(config, config.eval.samples, model, cfg, tokenizer)
        sample_eval = cache.program("sample_eval", functools.partial(sampler.program, options=options))
    return Programs(
        init=cache.program("init", functools.partial(initial_state, cfg=cfg, model=model)),
        init_from=cache.program("init_from", functools.partial(state_from, cfg=cfg, model=model), donate_argnums=0),
        sample_eval=sample_eval,
        stages=tuple(stages),
        teacher=None if config.teacher is None else abstract_teacher(teacher_shape(config), mesh),
    )


def with_sampler_mesh(
    programs: StagePrograms, stage: Stage, tables: Tables, mesh: Mesh, sampler_mesh: Mesh
) -> StagePrograms:
    """Returns the programs of a stage, with `sample` on a mesh of its own."""
    if not isinstance(stage, Online):
        return programs
    strategy = configured_strategy(stage, tables)
    by_role = bool(strategy.row.roles(strategy.config))
    sample = ProgramApart(programs.sample, mesh, sampler_mesh, copies=copies_for(stage.lag), by_role=by_role)
    return programs._replace(sample=sample)


def teacher_kind(config: Config) -> tuple[Model, Any] | None:
    """Returns the model of Config.teacher and its config; None: a teacher has the model of the policy."""
    return None if config.teacher is None else (decoder.MODEL, teacher_shape(config))


def drawing_of(strategy: ConfiguredStrategy, tokenizer: Any) -> Drawing | None:
    """Returns how a sampling strategy draws rows; None: each row by itself."""
    if strategy.row.drawing is None:
        return None
    drawing = strategy.row.drawing(strategy.config, tokenizer)
    if not hasattr(drawing, "roles"):
        name = type(strategy.config).__name__
        raise ValueError(f"Online.strategy = @{name}(): what its `drawing` returns has no attribute `roles`, the roles "
                         "that it draws with besides the policy, or ()")  # fmt: skip
    return drawing


def sampling_options(config: Config, samples: int, model: Model, cfg: Any, tokenizer: Any) -> sampler.Options:
    """Returns the static part of a run's sampling, for `samples` completions of each prompt."""
    return sampler.static_options(config.sampler, model, cfg, samples, tokenizer.end_ids, tokenizer.pad_id)


def stage_options(
    stage: Online, config: Config, model: Model, cfg: Any, tokenizer: Any, needs: Needs
) -> sampler.Options:
    """Returns the static part of a stage's sampling. needs: its objective's."""
    return sampling_options(config, stage.samples, model, cfg, tokenizer)._replace(
        completion_length=completion_length(stage, config),
        greedy_samples=int(needs.greedy_sample),
        records_routes=stage.learner.replays_routes,
    )


def preferring(stage: Online, config: Config, learned: Model, cfg: Any) -> Callable[..., Array]:
    """Returns the function with which a pair model compares two completions. It uses reference attention: kernels
    restrict the lengths of rows."""
    model, model_cfg = learned, cfg
    if stage.pair_model.role == TEACHER and (kind := teacher_kind(config)) is not None:
        model, model_cfg = kind
    if getattr(model_cfg, "attention", "reference") != "reference":
        model_cfg = dataclasses.replace(model_cfg, attention="reference")
    return functools.partial(first_preferred, model=model, cfg=model_cfg)


DONATES_STATE = ("begin", "update", "update_critic", "close", "close_warmup")  # fields of StagePrograms


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
    configured = configured_optimizers(stage, tables)
    learned = model if stage.learner.layers == "scanned" else unrolled(model)
    if stage.learner.logprobs == "vocab_parallel":
        learned = learned._replace(output_head=output_head)
    if isinstance(stage, Online):
        drawing = drawing_of(configured_strategy(stage, tables), tokenizer)
        row_functions = sampling_functions(stage, config, objective, model, learned, cfg, tokenizer, mesh, drawing)
    else:
        row_functions = stored_row_functions(stage, config, objective)
    functions = {
        **row_functions,
        **state_functions(stage, objective, configured, model, cfg),
        **forward_passes(stage, config, tables, objective, learned, cfg),
        **updates(stage, config, objective, configured, learned, cfg),
        "before": functools.partial(version_before, lag=stage.lag if isinstance(stage, Online) else 0),
        "mean": learner.step_metrics,
        "copy": copy_leaves,
    }

    def program(field: str) -> Program | None:
        if field not in functions:
            return None
        options = dict(donate_argnums=0) if field in DONATES_STATE else {}
        return cache.program(f"{name}.{field}", functions[field], **options)

    return StagePrograms(**{field: program(field) for field in StagePrograms._fields})


Functions = dict[str, Callable[..., Any]]  # by field of StagePrograms; those that a stage does not need are left out


def sampling_functions(
    stage: Online,
    config: Config,
    objective: Objective,
    model: Model,
    learned: Model,
    cfg: Any,
    tokenizer: Any,
    mesh: Mesh,
    drawing: Drawing | None,
) -> Functions:
    """Returns the functions that sample a stage's completions, score them by roles, pack them and assign credit.

    Args:
      learned: the model as the learner runs it. drawing: how the sampling strategy draws rows; None: each by itself.
    """
    options = stage_options(stage, config, model, cfg, tokenizer, objective.needs(stage.objective))
    credit_options = dict(objective=objective, max_completion=completion_length(stage, config))
    group_options = dict(num_groups=rows_over_shards(stage.prompts, mesh), **credit_options)
    newest_only = isinstance(stage.strategy, Partial) and stage.strategy.newest_only
    functions: Functions = {
        "sample": functools.partial(sampler.program, options=options, drawing=drawing),
        "pack": pack.pack_rollout,
        "credit": functools.partial(credit.credit, newest_only=newest_only, **group_options),
        "finish": functools.partial(credit.finish_sampled, **credit_options),
    }
    if isinstance(stage.strategy, Partial):
        functions["next_segment"] = functools.partial(
            segments.next_segment, tokens=stage.strategy.tokens, options=options
        )
    if stage.rewards:
        functions["scores"] = functools.partial(
            learner.sequence_scores, model=learned, cfg=cfg, attribute_weights=stage.attribute_weights
        )
    if stage.process is not None:
        functions["step_scores"] = functools.partial(learner.token_scores, model=learned, cfg=cfg)
    if stage.ensemble is not None:
        functions["combine"] = functools.partial(combined_scores, ensemble=stage.ensemble)
    if stage.corrector is not None:
        corrector_options = options._replace(samples=1, greedy_samples=0, records_routes=False)
        functions["correct"] = functools.partial(sampler.program, options=corrector_options)
    if stage.pair_model is not None:
        functions["prefer"] = preferring(stage, config, learned, cfg)
    if stage.pretraining is not None:
        functions["pretraining"] = credit.pack_pretraining
    if refills(stage, objective):
        functions["keep"] = functools.partial(credit.kept_rows, **group_options)
    return functions


def stored_row_functions(stage: Stage, config: Config, objective: Objective) -> Functions:
    """Returns the functions that pack the stored rows of a stage and label them."""
    credit_options = dict(objective=objective, max_completion=completion_length(stage, config))
    return {"pack": pack.pack_tokens, "finish": functools.partial(credit.finish_stored, **credit_options)}


def refills(stage: Stage, objective: Objective) -> bool:
    """Whether further prompts replace those without a learning signal."""
    return isinstance(stage, Online) and objective.refill(stage.objective) is not None


def num_previous(stage: Stage, objective: Objective) -> int:
    """Returns how many older versions of the policy a stage keeps, to refill draws with the weights that drew them.
    Where at most 0 rounds refill a step, which only filters its groups, nothing is drawn with them."""
    return stage.lag if isinstance(stage, Online) and objective.refill(stage.objective) else 0


Optimizers = Mapping[str, ConfiguredOptimizer]  # by role that a stage trains


def state_functions(stage: Stage, objective: Objective, configured: Optimizers, model: Model, cfg: Any) -> Functions:
    """Returns the functions that begin a stage and close its steps. Raises ValueError for an unsuitable optimizer."""
    needs, optimizer = objective.needs(stage.objective), configured[stage.trains]
    begin_options = dict(trains=stage.trains, optimizer=optimizer, objective=objective, config=stage.objective)
    check_optimizer(*optimizer, Weights(*describe(model.spec(cfg), needs.heads)))
    if CRITIC in configured:
        begin_options |= dict(critic=stage.critic, critic_optimizer=configured[CRITIC])
        check_optimizer(*configured[CRITIC], Weights(*describe(model.spec(cfg), [VALUE])))
    close_options = dict(roles=tuple(configured))
    if isinstance(stage, Online):
        close_options |= dict(reset_reference_every=stage.reset_reference_every)
    begin_options |= dict(model=model, cfg=cfg, num_previous=num_previous(stage, objective))
    begin = functools.partial(begin_stage, **begin_options)
    if continues_optimizer(stage):
        begin = functools.partial(continue_stage, trains=stage.trains, begin_fn=begin)
    functions: Functions = {
        "begin": begin,
        "close": functools.partial(learner.close_step, objective=objective, **close_options),
    }
    if CRITIC in configured and stage.critic_warmup:
        # The policy has no updates whose metrics `next_state` could read; what credit changes in the state is stored.
        unchanged = objective._replace(next_state=STATE_AS_IT_IS)
        functions["close_warmup"] = functools.partial(learner.close_step, objective=unchanged, **close_options)
    return functions


def recomputed_fields(stage: Stage, objective: Objective) -> tuple[str, ...]:
    """Returns the fields of `Recomputed` to compute with the weights before a step; () if there are none."""
    needs = objective.needs(stage.objective)
    needed = {
        "old_values": reads_old_values(objective, stage.objective) and CRITIC not in optimizers(stage),
        "old_logprobs": recomputes_logprobs(needs, stage.learner.updates_per_batch),
        "old_entropy": needs.credit_entropy,
        "old_sum_squared": needs.credit_sum_squared,
    }
    return tuple(field for field, is_needed in needed.items() if is_needed)


def forward_passes(
    stage: Stage, config: Config, tables: Tables, objective: Objective, learned: Model, cfg: Any
) -> Functions:
    """Returns the forward passes over a step's rows, of the weights before the step and of frozen roles."""
    needs, has_critic = objective.needs(stage.objective), CRITIC in optimizers(stage)
    static = dict(model=learned, cfg=cfg, chunk=stage.learner.chunk)
    recompute = functools.partial(learner.recompute, value_bins=needs.value_bins, **static)
    functions: Functions = {}
    if fields := recomputed_fields(stage, objective):
        functions["recompute"] = functools.partial(recompute, fields=fields)
    if has_critic:
        functions["critic_values"] = functools.partial(recompute, fields=("old_values",))
    if needs.reference:
        functions["reference"] = functools.partial(learner.logprobs, **static)
    if needs.teacher:
        teacher_options = dict(static)
        if needs.has_teacher and (kind := teacher_kind(config)) is not None:
            teacher_options["model"], teacher_options["cfg"] = kind
        functions["teacher"] = functools.partial(learner.logprobs, **teacher_options)
    if needs.scored_by:
        reached = next(i for i, candidate in enumerate(config.stages) if candidate is stage)
        weights = {role: attribute_weights_of(config.stages, role, tables, reached) for role in needs.scored_by}
        functions["row_values"] = functools.partial(
            learner.mean_scores, attribute_weights=weights, model=learned, cfg=cfg
        )
    return functions


def updates(
    stage: Stage, config: Config, objective: Objective, configured: Optimizers, learned: Model, cfg: Any
) -> Functions:
    """Returns the updates of the role that a stage trains and of its critic."""
    static = dict(model=learned, cfg=cfg, chunk=stage.learner.chunk)
    kind = teacher_kind(config) if objective.needs(stage.objective).has_teacher else None
    options = dict(role=stage.trains, optimizer_row=configured[stage.trains].row, teacher_kind=kind, **static)
    if CRITIC not in optimizers(stage):
        return {"update": functools.partial(learner.update, objective=objective, **options)}
    critic_options = dict(role=CRITIC, optimizer_row=configured[CRITIC].row, **static)
    return {
        "update": functools.partial(learner.update, objective=of_policy(objective), **options),
        "update_critic": functools.partial(learner.update, objective=of_critic(objective), **critic_options),
    }


def combined_scores(scores: Sequence[Array], *, ensemble: Ensemble) -> Array:
    """Returns one score from those of several roles, [M, R, S] each (R11)."""
    return aggregate(ensemble, jnp.stack(scores))


def version_before(version: Array, *, lag: int) -> Array:
    """Returns max(version - lag, 0)."""
    return jnp.maximum(version - lag, 0)


def abstract(x: PyTree, mesh: Mesh) -> PyTree:
    """Returns shape, dtype and sharding of every leaf; a leaf without a sharding counts as replicated."""
    everywhere = replicated(mesh)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", everywhere)), x
    )


def abstract_plan(shape: Shape, mesh: Mesh) -> PackingPlan:
    """Returns a packing plan as shapes."""
    by_row, everywhere = row_sharding(mesh), replicated(mesh)
    rows = lambda columns: jax.ShapeDtypeStruct((shape.micro_batches, shape.rows, columns), np.int32, sharding=by_row)
    return PackingPlan(
        source=rows(shape.row_length),
        segment=rows(shape.row_length),
        shared_prefix=None if shape.samples == 1 or shape.prefix_columns else rows(shape.row_length),
        prefix_row=rows(shape.prefix_columns) if shape.prefix_columns else None,
        sequence=rows(shape.places),
        member=jax.ShapeDtypeStruct((shape.sequences,), bool, sharding=everywhere),
        num_real=jax.ShapeDtypeStruct((), np.int32, sharding=everywhere),
    )
