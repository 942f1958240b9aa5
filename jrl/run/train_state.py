"""The state that a run begins with, and the one that each of its stages begins with."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrl.algos.contract import Objective
from jrl.device.sharding import TRAIN, spec
from jrl.experiment import is_reserved
from jrl.learning.average import AVERAGE
from jrl.learning.critic import CRITIC, begin_critic
from jrl.learning.learner import Weights
from jrl.learning.optimizer import begin
from jrl.learning.optimizers.contract import ConfiguredOptimizer, describe
from jrl.learning.previous import previous_roles
from jrl.models.contract import Model, split_params
from jrl.models.heads import VALUE, fresh_heads
from jrl.types import Array, ModelState, PyTree, TrainState

INIT_NAME = 0x6A726C  # folded into the run's key for the weights


def initial_state(key: Array, *, cfg: Any, model: Model) -> TrainState:
    """Returns the state before the first stage, parameters sharded for training. `key` is the run's root."""
    frozen, params = split_params(model.init(jax.random.fold_in(key, INIT_NAME), cfg, lambda names: spec(names, TRAIN)))
    zero = jnp.zeros((), jnp.int32)
    policy = ModelState(params=params, frozen=frozen, heads={}, opt_state=None, version=zero)
    return TrainState(step=zero, models={"policy": policy}, objective=(), key=key, skipped=zero)


def state_from(weights: PyTree, key: Array, *, cfg: Any, model: Model) -> TrainState:
    """Returns `initial_state` with `weights` in place of the random ones, which the compiler drops: the policy's, or
    those frozen under adapters. Adapters, which no folder holds, stay random."""
    state = initial_state(key, cfg=cfg, model=model)
    policy = state.models["policy"]
    policy = policy.replace(params=weights) if policy.frozen is None else policy.replace(frozen=weights)
    return state.replace(models={"policy": policy})


def begin_stage(
    state: TrainState,
    *,
    trains: str,
    optimizer: ConfiguredOptimizer,
    objective: Objective,
    config: Any,
    model: Model,
    cfg: Any,
    num_previous: int,
    critic: str | None = None,
    critic_optimizer: ConfiguredOptimizer | None = None,
) -> TrainState:
    """Returns the state that a stage begins with: a fresh optimizer for the role that it trains, copies of the policy
    for the roles that it needs, the objective's first state. Roles that earlier stages trained stay, without their
    optimizers: moments do not pass from stage to stage (except by `continue_stage`), and a reset of the reference keeps
    them (O9).

    Args:
      trains: the role that learns. config: the objective's. cfg: the model's.
      num_previous: how many versions of it before the newest to keep.
      critic: the role that a separate critic begins as a copy of; None: there is no separate critic.
      critic_optimizer: that critic's.
    """
    needs = objective.needs(config)
    models = {role: model.replace(opt_state=None) for role, model in state.models.items() if not is_reserved(role)}
    learner = models[trains] if trains in models else copy_of(models["policy"])
    if critic is not None:
        needs = needs._replace(values=False)
        source = models[critic]
        zeros = lambda: drawn_heads([VALUE], CRITIC, state.key, cfg, needs.head_outputs)[VALUE]
        models[CRITIC] = begin_critic(source, source.shares or critic, zeros, needs.value_outputs)
    fits = lambda head: head in learner.heads and learner.heads[head].shape[-1] == needs.head_outputs[head]
    missing = [head for head in needs.heads if not fits(head)]
    if missing:
        new_heads = drawn_heads(missing, trains, state.key, cfg, needs.head_outputs)
        learner = learner.replace(heads={**learner.heads, **new_heads})
    leaves_of = lambda model_state: Weights(*describe(model.spec(cfg), model_state.heads))
    opt_state = begin(*optimizer, Weights(learner.params, learner.heads), leaves_of(learner))
    learner = learner.replace(opt_state=opt_state, version=jnp.zeros_like(learner.version))
    if needs.reference:
        models["reference"] = copy_of(learner, learner.shares or trains)
    for role in previous_roles(num_previous):
        models[role] = copy_of(learner)
    if optimizer.config.average is not None:
        models[AVERAGE] = copy_of(learner, learner.shares or trains).replace(heads=copy_leaves(learner.heads))
    models[trains] = learner
    if critic is not None:
        begun = models[CRITIC]
        opt_state = begin(*critic_optimizer, Weights(begun.params, begun.heads), leaves_of(begun))
        models[CRITIC] = begun.replace(opt_state=opt_state)
    return state.replace(models=models, objective=objective.init_state(config))


def continue_stage(state: TrainState, *, trains: str, begin_fn: Callable[[TrainState], TrainState]) -> TrainState:
    """Returns `begin_fn(state)`, the state that a stage begins with, except that the optimizer of the role that it
    trains keeps the state of the stage before: moments, and the count of updates that the schedule reads (O9).

    Args:
      begin_fn: `begin_stage` of the stage.

    Source: AceReason, 2505.16400, whose window of completions grows from stage to stage (F7).
    """
    begun = begin_fn(state)
    trained = begun.models[trains].replace(opt_state=state.models[trains].opt_state)
    return begun.replace(models={**begun.models, trains: trained})


def drawn_heads(names: Sequence[str], role: str, key: Array, cfg: Any, outputs: Mapping[str, int]) -> dict[str, Array]:
    """Returns new heads of a role by name. Their random keys derive from its name; `key` is the run's root."""
    named = jax.random.fold_in(jax.random.fold_in(key, INIT_NAME), zlib.crc32(role.encode()))
    return fresh_heads(names, named, cfg.width, cfg.param_dtype, lambda names: spec(names, TRAIN), outputs)


def copy_of(model: ModelState, role: str = "policy") -> ModelState:
    """Returns a model with a copy of the trained parameters of `model`, over the same frozen weights: those of `role`,
    if it has some. The copy has no heads and no optimizer."""
    shares = None if model.frozen is None and model.shares is None else role
    params = jax.tree.map(jnp.copy, model.params)
    return ModelState(params, None, {}, None, jnp.zeros_like(model.version), shares=shares)


def copy_leaves(tree: PyTree) -> PyTree:
    """Returns a copy of every leaf."""
    return jax.tree.map(jnp.copy, tree)
