"""Repeats past updates of a run: `jrl replay RUN --step N`.

    checkpoint before step N --[rows of the rollout store: tokens, log-probs, rewards]--> update --> checkpoint N

Nothing is sampled and nothing is scored. The bits are the same where the run's promise holds: the same versions, device
count and per-device shape. Reads only, so it works while the run goes on.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import jax
import numpy as np

from jrl.compatibility import component_weights
from jrl.device.placement import place_on_mesh
from jrl.device.sharding import batch_sharding, replicated
from jrl.experiment import Config, Online, Tables, configured_strategy, row_of
from jrl.learning.step import learn_from_sampled, prepare
from jrl.resolve import load_run_config
from jrl.rollout.scoring import HostScores
from jrl.run.batches import host_plans, plan_shardings
from jrl.run.checkpoints.digest import is_key, named_leaves
from jrl.run.checkpoints.run_state import restore_step
from jrl.run.identity import with_saved_model
from jrl.run.policy import Policy, open_policy, root_key
from jrl.run.programs import abstract, packed_shape
from jrl.run.report.rollouts import Snapshot, snapshot
from jrl.run.run_hash import saved_steps
from jrl.run.stage_steps import ends, stage_at, warms_up
from jrl.run.stages import number_on, stage_arrays
from jrl.tasks.tokenizers import load as load_tokenizer
from jrl.types import Rollout, Scores, TrainState

TASK = "task_hash"  # the column of Scores.task
EXAMPLE = "example_index"  # that of Scores.example
COMPONENT = "component."  # prefix of the column of a reward component, before its quoted name


class Repeated(NamedTuple):
    """The outcome of repeating a run's updates."""

    first: int  # the checkpoint that it began with
    step: int  # the last update
    different: list[str]  # leaves that differ from the checkpoint of that step


def score_columns(
    scores: HostScores, task: np.ndarray, example: np.ndarray, components: tuple[str, ...], of_tokens: bool
) -> dict[str, np.ndarray]:
    """Returns the columns of a rollout store that updates read scores from, besides those that every store has.

    Args:
      task: [N] uint32, Scores.task. example: [N] int32, Scores.example.
      components: of the reward, that any stage of the run sees. of_tokens: a stage of the run rewards tokens.
    """
    nothing = np.full(scores.reward.shape, np.nan, np.float32)
    columns = {"outcome": scores.outcome, TASK: task, EXAMPLE: example}
    columns |= {column_of(name): scores.components.get(name, nothing) for name in components}
    if of_tokens:
        none = np.zeros((len(scores.reward), 1), np.float32)
        rewarded = none if scores.token_reward is None else np.where(scores.valid[:, None], scores.token_reward, 0)
        columns["token_reward"] = rewarded.astype(np.float32)
    return columns


def column_of(component: str) -> str:
    """Returns the name of the column of a reward component."""
    return f"{COMPONENT}{quote(component, safe='')}"


def columns_of_stage(rows: Mapping[str, Any], config: Config, tables: Tables, i: int) -> dict[str, Any]:
    """Returns the columns of a step of stage `i`, without the reward components that only other stages have."""
    names = lambda stage: component_weights(stage, config, configured_strategy(stage, tables)).keys()
    of_all = {name for stage in config.stages if isinstance(stage, Online) for name in names(stage)}
    others = {column_of(name) for name in of_all - names(config.stages[i])}
    return {name: value for name, value in rows.items() if name not in others}


def fitting(columns: Mapping[str, np.ndarray], known: set[str]) -> dict[str, np.ndarray]:
    """Returns score columns fitted to a store that may have been created without some of them, or with others.

    Args:
      known: the columns of the store; empty: it has no rows.
    """
    if not known:
        return dict(columns)
    rows = len(columns["outcome"])
    lacking = {name: np.full(rows, np.nan, np.float32) for name in known if name.startswith(COMPONENT)}
    if "token_reward" in known:
        lacking["token_reward"] = np.zeros((rows, 1), np.float32)
    return lacking | {name: value for name, value in columns.items() if name in known}


def repeat(folder: str | Path, step: int) -> Repeated:
    """Repeats the updates after the newest checkpoint before `step`, up to that step, and compares the train state with
    the checkpoint of that step.

    Raises: ValueError if one of the two checkpoints is missing, a step is not of an Online stage, or the store lacks
        what an update needs; DamagedStep if a checkpoint is not what was saved.
    """
    folder = Path(folder)
    saves = saved_steps(folder)
    before = [saved for saved in saves if saved < step]
    config, parts = load_run_config(folder)
    why_not = {last: why_not_repeatable(config, first, last) for first, last in itertools.pairwise(saves)}
    valid = ", ".join(str(last) for last, why in why_not.items() if why is None)
    valid = valid or ("none" if why_not else "none, since a run needs two checkpoints")
    there = f"there are those of steps {', '.join(map(str, saves))}. Steps to repeat: {valid}"
    if not before:
        raise ValueError(f"{folder} has no checkpoint before step {step}; {there}")
    total = ends(config)[-1]
    if step > total:
        raise ValueError(f"{folder} has {total} steps; there is no step {step}")
    if step not in saves:
        raise ValueError(f"{folder} has no checkpoint of step {step} to compare its updates with; {there}")
    if (why := why_not[step]) is not None:
        raise ValueError(f"{folder}: {why}. Steps to repeat: {valid}")
    config = dataclasses.replace(with_saved_model(config, folder), sampler_mesh=None)  # nothing is drawn
    policy = open_policy(config, parts, load_tokenizer(folder / "tokenizer", parts.tables["tokenizers"]))
    try:
        state = _saved(folder, policy, before[-1])
        store = snapshot(folder / "rollouts")
        for done in range(before[-1], step):
            state = _updated(policy, state, done, store)
        different = _different(state, _saved(folder, policy, step))
    finally:
        policy.program_cache.close()
    return Repeated(before[-1], step, different)


def why_not_repeatable(config: Config, first: int, last: int) -> str | None:
    """Returns why the updates after step `first`, up to `last`, cannot be repeated; None if they can."""
    for step in range(first + 1, last + 1):
        stage = config.stages[stage_at(config, step)]
        if not isinstance(stage, Online):
            return f"step {step} is not of an Online stage: only those have rollouts"
        left_out = "which the store of rollouts leaves out: its update cannot be repeated"
        if stage.learner.replays_routes:
            return f"step {step} replayed the sampler's routes (Learner.routes), {left_out}"
        if stage.pretraining is not None:
            return f"step {step} imitated stored rows too (Online.pretraining), {left_out}"
    return None


def _saved(folder: Path, policy: Policy, done: int) -> TrainState:
    config, key = policy.config, abstract(root_key(policy), policy.mesh)
    target = policy.programs.inside(stage_at(config, done), config, key)
    _, tree, _ = restore_step(folder / "checkpoints", {"state": target}, done, part=True)
    return tree["state"]


def _updated(policy: Policy, state: TrainState, done: int, store: Snapshot) -> TrainState:
    """Returns the state after one more step than `done`."""
    config, mesh = policy.config, policy.mesh
    i = stage_at(config, done + 1)
    stage, programs = config.stages[i], policy.programs.stages[i]
    if i != stage_at(config, done):
        state = programs.begin(state)
    number = functools.partial(number_on, mesh)
    arrays = stage_arrays(stage, number)
    shape = packed_shape(stage, config, policy.parts.tables, mesh)
    rows = columns_of_stage(_rows_of(store, done + 1), config, policy.parts.tables, i)
    count = stage.prompts * stage.samples
    if len(rows["reward"]) != shape.sequences:
        raise ValueError(f"the store holds {len(rows['reward'])} rows of step {done + 1}, whose batch has "
                         f"{shape.sequences} rows{' with padding' if count < shape.sequences else ''}")  # fmt: skip
    objective = row_of(policy.parts.tables, "algos", stage.objective)
    needs = objective.needs(stage.objective)
    for column, read in ((TASK, needs.task), (EXAMPLE, needs.examples is not None)):
        if read and column not in rows:
            raise ValueError(f"the rollout store was begun by a version that stored no {column}, which "
                             f"{type(stage.objective).__name__} reads")  # fmt: skip
    rollout, scores = _batch(rows, shape.width, mesh)
    plans = host_plans(shape, stage.learner.minibatches, rows["length"], rows["action_mask"])
    plans = place_on_mesh(plans, plan_shardings(plans, mesh))
    temperature = number(config.sampler.temperature or 1.0)
    minibatches = [
        prepare(programs, state, stage.trains, programs.pack(rollout, plan, temperature), plan) for plan in plans
    ]
    learn = dict(role=stage.trains, epochs=stage.learner.epochs, warms_up=warms_up(config, done + 1))
    return learn_from_sampled(programs, state, minibatches, rollout, scores, arrays, **learn)[0]


def _rows_of(store: Snapshot, step: int) -> dict[str, Any]:
    """Returns the rows of one step, in the order in which they were appended. Raises: ValueError where the store has
    none, or was begun without the columns of scores."""
    places = np.flatnonzero(store.read(only=["step"])["step"] == step) if store.rows else ()
    if not len(places):
        raise ValueError(f"the rollout store has no row of step {step}")
    rows = store.read(int(places[0]), int(places[-1]) + 1)
    if "outcome" not in rows:
        raise ValueError("the rollout store was begun by a version that stored no outcomes of verifiers, rewards of "
                         "tokens or components of the reward, which an update may need")  # fmt: skip
    here = rows["step"] == step
    return {name: value[here] for name, value in rows.items() if isinstance(value, np.ndarray)}


def _batch(rows: Mapping[str, np.ndarray], width: int, mesh: jax.sharding.Mesh) -> tuple[Rollout, Scores]:
    """Returns the rollout and the scores of rows of the store."""

    def place(name: str) -> jax.Array | None:
        if name not in rows:
            return None
        value = rows[name]
        if value.ndim > 1:  # [N, columns]: cut or padded to the width
            value = np.pad(value[:, :width], [(0, 0), (0, max(width - value.shape[1], 0))])
        return jax.device_put(value, batch_sharding(mesh, value.ndim))

    by_row = ("tokens", "length", "action_mask", "sampler_logprobs", "truncated_logprobs", "support_size", "finish",
              "group", "sample", "version", "turn")  # fmt: skip
    fingerprint = jax.device_put(rows["weights_fingerprint"][0], replicated(mesh))
    components = {unquote(name.removeprefix(COMPONENT)): place(name) for name in rows if name.startswith(COMPONENT)}
    return Rollout(**{name: place(name) for name in by_row}, weights_fingerprint=fingerprint), Scores(
        **{name: place(name) for name in ("reward", "valid", "verdict", "outcome", "token_reward")},
        components=components,
        task=place(TASK),
        example=place(EXAMPLE),
    )


def _different(state: TrainState, saved: TrainState) -> list[str]:
    """Returns the names of the leaves that differ in one bit or more."""
    bits = lambda leaf: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf).tobytes()
    pairs = zip(named_leaves(state).items(), jax.tree.leaves(saved), strict=True)
    return [name for (name, leaf), saved_leaf in pairs if bits(leaf) != bits(saved_leaf)]
