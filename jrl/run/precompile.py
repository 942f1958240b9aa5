"""Compiles the programs of a run before they are needed, from shapes alone.

They are compiled in the order in which they are needed, while weights are read and the first steps run; a call waits
for its own program only. All programs are known before the second step ends, so that a later compilation can be an
error. The functions of the steps are called in abstract form (`StagePrograms.to_compile`). `jrl plan` does the same
without opening a run.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import Mesh

from jrl.device.sharding import batch_sharding, replicated, rows_over_shards
from jrl.experiment import Config, Offline, Online, Stage, correction_length, question_length, trains_online
from jrl.learning.learner import weights_of
from jrl.learning.pack import Shape
from jrl.learning.step import StageArrays, StagePrograms
from jrl.rollout.prompts import abstract_prompts, with_rows
from jrl.rollout.rewards import OpenClassifier
from jrl.rollout.sampler import SamplingParams
from jrl.rollout.stop_strings import StopTable
from jrl.rollout.strategies.contract import PLAIN, ConfiguredStrategy
from jrl.run import offline, online
from jrl.run.programs import Programs, abstract, abstract_plan, pretraining_shape
from jrl.run.stage_steps import ends, stage_at
from jrl.types import Rollout, Scores, TrainState


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs of a run's programs, as shapes. Numbers may stand for arrays of their shape."""

    config: Config
    mesh: Mesh
    programs: Programs
    key: jax.ShapeDtypeStruct
    sampling_params: SamplingParams
    eval_params: SamplingParams | None
    stop_table: StopTable | None
    arrays: tuple[StageArrays, ...]  # by stage
    strategies: tuple[ConfiguredStrategy, ...]  # by stage
    shapes: tuple[Shape, ...]  # packed, by stage
    components: tuple[tuple[str, ...], ...]  # names of the reward components that learning sees, by stage
    rewards_tokens: tuple[bool, ...]  # whether tokens are rewarded too, by stage
    attributes: tuple[int | None, ...]  # of stored rows, by stage; None: they have none


def state_shape(inputs: Inputs, done: int) -> TrainState:
    """Returns the state after `done` steps, as shapes."""
    return inputs.programs.inside(stage_at(inputs.config, done), inputs.config, inputs.key)


def rollout_shape(inputs: Inputs, i: int, state: TrainState) -> Rollout:
    """Returns the rollout that a step of stage `i` draws, as shapes."""
    stage, strategy = inputs.config.stages[i], inputs.strategies[i]
    arguments = sample_arguments(inputs, stage.prompts, state.models["policy"].version, strategy=strategy)
    return inputs.programs.stages[i].sample.shape(online.sampling_weights(strategy, state), *arguments)


def sample_arguments(
    inputs: Inputs,
    count: int,
    version: jax.ShapeDtypeStruct,
    params: SamplingParams | None = None,
    strategy: ConfiguredStrategy = PLAIN,
) -> tuple:
    """Returns the sampler's arguments after its weights, as shapes."""
    prompts = abstract_prompts(count, inputs.config.data.prompt_length, inputs.mesh)
    if strategy.row.asked is not None:
        prompts = with_rows(prompts, prompts)
    params = inputs.sampling_params if params is None else params
    return prompts, inputs.key, _scalar(inputs.mesh, np.uint32), version, params, inputs.stop_table, None


def compile_run(inputs: Inputs, done: int, *, from_weights: bool, classifier: OpenClassifier | None) -> None:
    """Starts to compile every program that the run needs after its first `done` steps.

    Args:
      from_weights: the run begins with published weights.
    """
    config, p = inputs.config, inputs.programs
    if done >= ends(config)[-1]:
        return
    state = p.initial(inputs.key)
    if done == 0:
        policy = state.models["policy"]
        if from_weights:
            p.init_from.compile(policy.params if policy.frozen is None else policy.frozen, inputs.key)
        else:
            p.init.compile(inputs.key)
    needs_eval = config.eval is not None
    for i, (stage, end) in enumerate(zip(config.stages, ends(config))):
        if not stage.steps:
            continue
        if done >= end:
            state = p.stages[i].begin.shape(state)
            continue
        if needs_eval and trains_online(stage):
            compile_eval(inputs, state)
            needs_eval = False
        state = compile_stage(inputs, i, state, begun=done > end - stage.steps)
        if classifier is not None and not isinstance(stage, Offline):
            compile_reward(classifier)
            classifier = None
    if needs_eval:
        compile_eval(inputs, state)


def compile_stage(inputs: Inputs, i: int, state: TrainState, *, begun: bool) -> TrainState:
    """Compiles the programs of one stage, passing shapes from one to the next as a step passes arrays. Returns the
    state that the stage begins with, as shapes.

    Args:
      begun: the stage has begun, so the program that begins it is not compiled.
    """
    stage, programs = inputs.config.stages[i], inputs.programs.stages[i]
    p = programs.to_compile()
    state = programs.begin.shape(state) if begun else p.begin(state)
    abstract_step(p, stage, inputs, i, state)
    return state


def abstract_step(p: StagePrograms, stage: Stage, inputs: Inputs, i: int, state: TrainState) -> None:
    """Calls every program of a step of stage `i` in abstract form."""
    mesh, arrays, shape = inputs.mesh, inputs.arrays[i], inputs.shapes[i]
    plan = abstract_plan(shape, mesh)
    if isinstance(stage, Offline):
        offline.abstract_step(p, stage, state, plan, arrays, shape, mesh, inputs.attributes[i])
        return
    policy = state.models["policy"]
    abstract_inputs = online.AbstractInputs(
        arrays=arrays,
        temperature=_scalar(mesh, np.float32),
        sampling=sample_arguments(inputs, stage.prompts, policy.version, strategy=inputs.strategies[i]),
        strategy=inputs.strategies[i],
        scores=functools.partial(scores_shape, inputs, i),
        correcting=None if stage.corrector is None else correct_arguments(inputs, stage, state),
        comparing=None if stage.pair_model is None else prefer_arguments(inputs, stage),
        pretraining=None if stage.pretraining is None else pretraining_arguments(inputs, stage),
    )
    online.abstract_step(p, stage, state, plan, abstract_inputs)


def scores_shape(inputs: Inputs, i: int, rollout: Rollout) -> Scores:
    """Returns the scores of a rollout of stage `i`, as shapes."""
    place = lambda like, dtype: jax.ShapeDtypeStruct(like.shape, dtype, sharding=batch_sharding(inputs.mesh, like.ndim))
    by_row = lambda dtype: place(rollout.length, dtype)
    return Scores(
        by_row(np.float32),
        by_row(bool),
        by_row(np.int8),
        by_row(np.float32),
        token_reward=place(rollout.tokens, np.float32) if inputs.rewards_tokens[i] else None,
        components={name: by_row(np.float32) for name in inputs.components[i]},
        task=by_row(np.uint32),
        example=by_row(np.int32),
    )


def correct_arguments(inputs: Inputs, stage: Online, state: TrainState) -> tuple:
    """Returns the arguments of a corrector's program after its weights, as shapes."""
    length, version = correction_length(stage, inputs.config), state.models[stage.corrector.role].version
    prompts = abstract_prompts(stage.prompts * stage.samples, length, inputs.mesh)
    greedy = SamplingParams(None, None, None, None)
    return prompts, inputs.key, _scalar(inputs.mesh, np.uint32), version, greedy, None, None


def prefer_arguments(inputs: Inputs, stage: Online) -> tuple:
    """Returns the arguments of a pair model's program after its weights, as shapes."""
    mesh, rows = inputs.mesh, rows_over_shards(stage.pair_model.batch, inputs.mesh)
    by_row = lambda *dims: jax.ShapeDtypeStruct(dims, np.int32, sharding=batch_sharding(mesh, len(dims)))
    verdicts = jax.ShapeDtypeStruct((2,), np.int32, sharding=replicated(mesh))
    return by_row(rows, question_length(inputs.config)), by_row(rows), verdicts


def pretraining_arguments(inputs: Inputs, stage: Online) -> tuple:
    """Returns tokens, mask and plan of the stored rows that a stage also imitates, as shapes."""
    mesh, stored = inputs.mesh, pretraining_shape(stage, inputs.config, inputs.mesh)
    rows = (offline.abstract_rows(stored, mesh, np.int32), offline.abstract_rows(stored, mesh, bool))
    return *rows, abstract_plan(stored, mesh)


def compile_eval(inputs: Inputs, state: TrainState) -> None:
    """Compiles the sampling of evaluation."""
    policy = state.models["policy"]
    arguments = sample_arguments(inputs, inputs.config.eval.batch, policy.version, inputs.eval_params)
    inputs.programs.sample_eval.compile(weights_of(state.models, "policy").params, *arguments)


def compile_reward(classifier: OpenClassifier) -> None:
    """Compiles the run's published reward model."""
    by_row = lambda *dims: jax.ShapeDtypeStruct(
        (classifier.batch, *dims), np.int32, sharding=batch_sharding(classifier.mesh, 1 + len(dims))
    )
    prompt_length = [by_row()] if classifier.gated else []
    classifier.program.compile(
        abstract(classifier.params, classifier.mesh), by_row(classifier.width), by_row(), *prompt_length
    )


def _scalar(mesh: Mesh, dtype: type) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), dtype, sharding=replicated(mesh))
