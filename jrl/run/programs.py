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

from jrl.algos.contract import Needs, Objective, reads_old_values, recomputes_logprobs
from jrl.device.program_cache import Program, ProgramCache
from jrl.device.sharding import SEQUENCE, batch_shards, row_sharding, row_shards
from jrl.experiment import (
    Config,
    Online,
    Stage,
    Tables,
    attribute_weights_of,
    completion_length,
    optimizers,
    row_of,
    stage_names,
)
from jrl.learning import credit, layout, learner, pack
from jrl.learning.critic import CRITIC, of_critic, of_policy
from jrl.learning.layout import Learner
from jrl.learning.learner import Weights
from jrl.learning.optimizer import check as check_optimizer
from jrl.learning.optimizers.contract import describe
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
from jrl.rollout.strategies import strategy_of
from jrl.rollout.strategies.contract import Drawing
from jrl.rollout.strategies.partial import Partial
from jrl.run.sampler_devices import ProgramApart, copies_for
from jrl.run.teacher import TEACHER, abstract_teacher, teacher_shape, with_teacher
from jrl.run.train_state import begin_stage, copy_leaves, initial_state, state_from
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
    width, shards = width_of(stage, config), row_shards(mesh)
    given = dict(shares=mesh.shape[SEQUENCE], padded_rows=getattr(config.model, "attention", None) == "splash")
    if isinstance(stage, Online):
        sequences = padded_prompts(stage, mesh) * stage.samples
        if row_of(tables, "algos", stage.objective).pairs is not None:  # a group is compared, and lies in one row
            return layout.packed_shape(stage.learner, sequences, width, shards, unit=stage.samples, **given)
        prompt = dict(prompt_length=config.data.prompt_length, samples=stage.samples)
        return layout.packed_shape(stage.learner, sequences, width, shards, **prompt, **given)
    unit = row_of(tables, "algos", stage.objective).unit_size
    return stored_shape(stage.learner, stage.batch_size, unit, width, shards, given)


def pretraining_shape(stage: Online, config: Config, mesh: Mesh) -> Shape:
    """Returns the packed shape of the stored rows that one optimizer step of a stage imitates as well."""
    given = dict(shares=mesh.shape[SEQUENCE], padded_rows=getattr(config.model, "attention", None) == "splash")
    return stored_shape(
        stage.learner, stage.pretraining.batch_size, 1, width_of(stage, config), row_shards(mesh), given
    )


def stored_shape(config: Learner, units: int, unit: int, width: int, shards: int, given: dict[str, Any]) -> Shape:
    """Returns the packed shape of stored rows, `units` comparisons of `unit` each.

    Args:
      given: as `layout.packed_shape` takes them.
    """
    learner, longest = dataclasses.replace(config, prefix_sharing="none"), width * unit
    if config.prefix_sharing == "cross_row" and (learner.row_length or longest) < longest:
        learner = dataclasses.replace(learner, row_length=None)  # that of continuations; stored rows are not cut
    return layout.packed_shape(learner, units * unit, width, shards, unit=unit, **given)


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
    evaluated = config.eval and functools.partial(
        sampler.program, options=sampling_options(config, config.eval.samples, model, cfg, tokenizer)
    )
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


def sampling_options(config: Config, samples: int, model: Model, cfg: Any, tokenizer: Any) -> sampler.Options:
    """Returns the static part of a run's sampling, for so many completions of each prompt."""
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
    """Returns the program by which a pair model compares two completions. Attention kernels want rows of lengths of
    their own; questions are read without."""
    model, shape = learned, cfg
    if stage.pair_model.role == TEACHER and (kind := teacher_kind(config)) is not None:
        model, shape = kind
    if getattr(shape, "attention", "reference") != "reference":
        shape = dataclasses.replace(shape, attention="reference")
    return functools.partial(first_preferred, model=model, cfg=shape)


def newest_only(strategy: Any) -> bool:
    """Whether tokens of older weights are left out of the loss."""
    return isinstance(strategy, Partial) and strategy.newest_only


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
    learned = model if stage.learner.layers == "scanned" else unrolled(model)
    if stage.learner.logprobs == "vocab_parallel":
        learned = learned._replace(output_head=output_head)
    if isinstance(stage, Online):
        given = sampled_rows(stage, config, objective, model, learned, cfg, tokenizer, mesh)
    else:
        given = stored_rows(stage, config, objective)
    functions = {
        **given,
        **state_functions(stage, objective, model, cfg),
        **forward_passes(stage, config, objective, learned, cfg),
        **updates(stage, config, objective, learned, cfg),
        "before": functools.partial(version_before, lag=stage.lag if isinstance(stage, Online) else 0),
        "mean": learner.step_metrics,
        "copy": copy_leaves,
    }

    def program(what: str) -> Program | None:
        if what not in functions:
            return None
        options = dict(donate_argnums=0) if what in DONATES_STATE else {}
        return cache.program(f"{name}.{what}", functions[what], **options)

    return StagePrograms(**{what: program(what) for what in StagePrograms._fields})


Functions = dict[str, Callable[..., Any]]  # by the field of StagePrograms; one that a stage does not need is left out


def sampled_rows(
    stage: Online,
    config: Config,
    objective: Objective,
    model: Model,
    learned: Model,
    cfg: Any,
    tokenizer: Any,
    mesh: Mesh,
) -> Functions:
    """Returns what draws a stage's completions, scores them by roles, packs them and turns scores into credit.

    Args:
      learned: the model as the learner runs it.
    """
    options = stage_options(stage, config, model, cfg, tokenizer, objective.needs(stage.objective))
    judged = dict(objective=objective, max_completion=completion_length(stage, config))
    of_groups = dict(num_groups=padded_prompts(stage, mesh), **judged)
    functions: Functions = {
        "sample": functools.partial(sampler.program, options=options, drawing=drawing_of(stage, tokenizer)),
        "pack": pack.pack_rollout,
        "credit": functools.partial(credit.credit, newest_only=newest_only(stage.strategy), **of_groups),
        "finish": functools.partial(credit.finish_sampled, **judged),
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
        rewriting = options._replace(samples=1, greedy_samples=0, records_routes=False)
        functions["correct"] = functools.partial(sampler.program, options=rewriting)
    if stage.pair_model is not None:
        functions["prefer"] = preferring(stage, config, learned, cfg)
    if stage.pretraining is not None:
        functions["pretraining"] = credit.pack_pretraining
    if refills(stage, objective):
        functions["keep"] = functools.partial(credit.kept_rows, **of_groups)
    return functions


def stored_rows(stage: Stage, config: Config, objective: Objective) -> Functions:
    """Returns what packs the stored rows of a stage and labels them."""
    judged = dict(objective=objective, max_completion=completion_length(stage, config))
    return {"pack": pack.pack_tokens, "finish": functools.partial(credit.finish_stored, **judged)}


def refills(stage: Stage, objective: Objective) -> bool:
    """Whether further prompts take the place of those that teach nothing."""
    return isinstance(stage, Online) and objective.refill(stage.objective) is not None


def num_previous(stage: Stage, objective: Objective) -> int:
    """Returns how many older versions of the policy a stage keeps, to refill draws with the weights that drew them."""
    return stage.lag if refills(stage, objective) else 0


def state_functions(stage: Stage, objective: Objective, model: Model, cfg: Any) -> Functions:
    """Returns what begins a stage and what closes its steps. Raises ValueError for an optimizer that does not fit."""
    needs, trained = objective.needs(stage.objective), optimizers(stage)
    starts = dict(trains=stage.trains, optimizer=stage.optimizer, objective=objective, config=stage.objective)
    check_optimizer(stage.optimizer, Weights(*describe(model.spec(cfg), needs.heads)))
    if CRITIC in trained:
        starts |= dict(critic=stage.critic, critic_optimizer=trained[CRITIC])
        check_optimizer(trained[CRITIC], Weights(*describe(model.spec(cfg), [VALUE])))
    closes = dict(roles=tuple(trained))
    if isinstance(stage, Online):
        closes |= dict(reset_reference_every=stage.reset_reference_every)
    functions: Functions = {
        "begin": functools.partial(
            begin_stage, **starts, model=model, cfg=cfg, num_previous=num_previous(stage, objective)
        ),
        "close": functools.partial(learner.close_step, objective=objective, **closes),
    }
    if CRITIC in trained and stage.critic_warmup:
        # The policy has not learned, and what its metrics would change stays.
        unchanged = objective._replace(next_state=STATE_AS_IT_IS)
        functions["close_warmup"] = functools.partial(learner.close_step, objective=unchanged, **closes)
    return functions


def recomputed_fields(stage: Stage, objective: Objective) -> tuple[str, ...]:
    """Returns the fields of `Recomputed` that the weights before a step are asked for; () if none is."""
    needs = objective.needs(stage.objective)
    asked = {
        "old_values": reads_old_values(objective, stage.objective) and CRITIC not in optimizers(stage),
        "old_logprobs": recomputes_logprobs(needs, stage.learner.updates_per_batch),
        "old_entropy": needs.credit_entropy,
        "old_sum_squared": needs.credit_sum_squared,
    }
    return tuple(field for field, is_asked in asked.items() if is_asked)


def forward_passes(stage: Stage, config: Config, objective: Objective, learned: Model, cfg: Any) -> Functions:
    """Returns what the weights before a step say of its rows, and what frozen roles say of them."""
    needs, has_critic = objective.needs(stage.objective), CRITIC in optimizers(stage)
    static = dict(model=learned, cfg=cfg, chunk=stage.learner.chunk)
    recomputed = lambda *fields: functools.partial(
        learner.recompute, fields=fields, value_bins=needs.value_bins, **static
    )
    functions: Functions = {}
    if fields := recomputed_fields(stage, objective):
        functions["recompute"] = recomputed(*fields)
    if has_critic:
        functions["critic_values"] = recomputed("old_values")
    if needs.reference:
        functions["reference"] = functools.partial(learner.logprobs, **static)
    if needs.teacher:
        kind = dict(zip(("model", "cfg"), teacher_kind(config) or ()) if needs.has_teacher else ())
        functions["teacher"] = functools.partial(learner.logprobs, **{**static, **kind})
    if needs.scored_by:
        weights = {role: attribute_weights_of(config.stages, role) for role in needs.scored_by}
        functions["row_values"] = functools.partial(
            learner.mean_scores, attribute_weights=weights, model=learned, cfg=cfg
        )
    return functions


def updates(stage: Stage, config: Config, objective: Objective, learned: Model, cfg: Any) -> Functions:
    """Returns the updates of the role that a stage trains and of its critic."""
    static = dict(model=learned, cfg=cfg, chunk=stage.learner.chunk)
    kind = teacher_kind(config) if objective.needs(stage.objective).has_teacher else None
    own = dict(role=stage.trains, teacher_kind=kind, **static)
    if CRITIC not in optimizers(stage):
        return {"update": functools.partial(learner.update, objective=objective, **own)}
    return {
        "update": functools.partial(learner.update, objective=of_policy(objective), **own),
        "update_critic": functools.partial(learner.update, role=CRITIC, objective=of_critic(objective), **static),
    }


def combined_scores(scores: Sequence[Array], *, ensemble: Ensemble) -> Array:
    """Returns one score from those of several roles, [M, R, S] each (R11)."""
    return aggregate(ensemble, jnp.stack(scores))


def version_before(version: Array, *, lag: int) -> Array:
    """Returns max(version - lag, 0)."""
    return jnp.maximum(version - lag, 0)


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
