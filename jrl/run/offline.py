"""One step of an Offline stage: read the next stored rows, pack, prepare, update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jrl.algos.contract import Objective
from jrl.device.placement import place_on_mesh
from jrl.device.sharding import batch_sharding, replicated
from jrl.experiment import Offline, PretrainingMix
from jrl.learning.credit import StoredLabels
from jrl.learning.pack import PackingPlan, Shape
from jrl.learning.step import Learned, StageArrays, StagePrograms, learn_from_stored, prepare
from jrl.run.batches import host_plans, plan_shardings
from jrl.run.clock import RunClock
from jrl.run.throughput import count_packed
from jrl.tasks.data.stored import StoredSource, padded_rows
from jrl.tasks.data.stream import Stream
from jrl.tasks.stopping import Stop
from jrl.types import Array, PretrainingBatch, TrainState


@dataclasses.dataclass(frozen=True)
class OfflineStage:
    """An Offline stage that is open."""

    name: str
    config: Offline
    objective: Objective
    programs: StagePrograms
    arrays: StageArrays
    shape: Shape  # packed, of one optimizer step
    stream: Stream
    source: StoredSource
    tokenizer: Any
    mesh: Mesh
    temperature: Array  # 1
    chances: np.ndarray | None = None  # [examples] float64, probability of each; None: they come in the stream's order


@dataclasses.dataclass(frozen=True)
class PretrainingRows:
    """The stored rows of an Online stage that is open."""

    config: PretrainingMix
    shape: Shape  # packed, of one optimizer step
    stream: Stream
    source: StoredSource
    tokenizer: Any
    chances: None = None  # its examples come in the stream's order


def stored_rows(stage: Any) -> OfflineStage | PretrainingRows | None:
    """Returns the reader of an open stage's stored rows, Offline or Online; None: the stage has none."""
    return stage if isinstance(stage, OfflineStage) else stage.pretraining


def chances_of(
    objective: Objective, config: Offline, source: StoredSource, stream: Stream, tokenizer: Any, width: int, stop: Stop
) -> np.ndarray | None:
    """Returns the probability of every example of a stage to be drawn, [examples] float64; None: they come in the
    stream's order.

    Reads every example. Raises ValueError where none can be drawn; StopRequested if `stop` returns True.

    Args:
      width: T, the most tokens of a row.
    """
    chances = objective.draw(config.objective)
    if chances is None:
        return None
    no_row = np.full(len(objective.needs(config.objective).row_value_names), np.nan, np.float32)
    values = []
    for visit in stream.every(stop):
        rows = source.rows(config.source, [] if visit is None else [visit], tokenizer, width)[0]
        values.append(rows.value[0] if len(rows.length) else no_row)
    return chances(np.array(values))


class Stepped(NamedTuple):
    """The result of a step."""

    state: TrainState
    metrics: dict[str, Array | float]
    learned: Learned
    examples: list[str]  # the id of every row; [] where some examples gave none


def step(stage: OfflineStage, state: TrainState, phase: Callable[[str], None], clock: RunClock) -> Stepped:
    """Returns the state after one step on stored rows of the training split, with what it learned from."""
    phase("learning from stored rows")
    with clock.on("wait"):
        batch, left_out, examples = next_on_host(stage, stage.config.learner.minibatches)
    clock.packed = count_packed([plan.source for plan in batch.plans], batch.labels.mask)
    with clock.on("update"):
        batch = place_on_mesh(batch, shardings(batch, stage.mesh))
        state, metrics, learned = learn(stage, state, batch, stage.arrays, stage.temperature)
        clock.dispatched("update", metrics["update/skipped_nonfinite"])
    return Stepped(state, {**metrics, **left_out}, learned, examples)


class StoredBatch(NamedTuple):
    """The rows of one step, and how they are packed."""

    tokens: Array  # [N, T] int32
    labels: StoredLabels
    plans: list[PackingPlan]  # of every minibatch


def next_on_host(
    stage: OfflineStage | PretrainingRows, minibatches: int
) -> tuple[StoredBatch, dict[str, float], list[str]]:
    """Returns the next stored rows of the training split and how they are packed, on the host; counts of those left
    out, as metrics; and the id of every row's example, [] where some examples gave no row.

    Args:
      minibatches: Learner.minibatches of the stage.
    """
    config, stream = stage.config, stage.stream
    visits = stream.next(config.batch_size) if stage.chances is None else stream.draw(config.batch_size, stage.chances)
    rows, left_out = stage.source.rows(config.source, visits, stage.tokenizer, stage.shape.width)
    rows = padded_rows(rows, stage.shape.sequences)
    plans = host_plans(stage.shape, minibatches, rows.length, rows.action_mask)
    labels = StoredLabels(rows.action_mask, rows.label, rows.weight, rows.unit, rows.value)
    counts = {f"data/left_out_{cause}": float(count) for cause, count in left_out.items()}
    examples = [] if left_out else [visit.example.id for visit in visits for _ in range(stage.source.unit_size)]
    return StoredBatch(rows.tokens, labels, plans), counts, examples


def shardings(batch: StoredBatch, mesh: Mesh) -> StoredBatch:
    """Returns the shardings of a batch: tokens are sharded over the batch axes, labels replicated."""
    by_row, everywhere = batch_sharding(mesh, 2), replicated(mesh)
    labels = StoredLabels(by_row, *[everywhere] * 4)
    return StoredBatch(by_row, labels, plan_shardings(batch.plans, mesh))


def pretraining_batches(p: StagePrograms, batch: StoredBatch, coefficient: Array) -> list[PretrainingBatch]:
    """Returns the stored rows that every optimizer step of an Online stage also imitates."""
    return [p.pretraining(batch.tokens, batch.labels.mask, plan, coefficient) for plan in batch.plans]


def learn(
    stage: OfflineStage, state: TrainState, batch: StoredBatch, arrays: StageArrays, temperature: Array
) -> tuple[TrainState, dict[str, Array], Learned]:
    """Returns the state after the updates on a batch, their metrics, and what they learned from."""
    role, p = stage.config.trains, stage.programs
    packed = lambda plan: p.pack(batch.tokens, batch.labels.mask, plan, temperature)
    minibatches = [prepare(p, state, role, packed(plan), plan) for plan in batch.plans]
    return learn_from_stored(p, state, minibatches, batch.labels, arrays, role=role, epochs=stage.config.learner.epochs)


def abstract_rows(shape: Shape, mesh: Mesh, dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns a per-token array of stored rows, [N, T], as a shape."""
    return jax.ShapeDtypeStruct((shape.sequences, shape.width), dtype, sharding=batch_sharding(mesh, 2))


def abstract_step(
    p: StagePrograms,
    config: Offline,
    state: TrainState,
    plan: PackingPlan,
    arrays: StageArrays,
    shape: Shape,
    mesh: Mesh,
    attributes: int | None,
) -> None:
    """Calls every program of a step as `step` does, in abstract form: `p` takes and returns shapes.

    Args:
      attributes: as `stored_attributes` has them.
    """
    role = config.trains
    by_token = lambda dtype: abstract_rows(shape, mesh, dtype)
    replicated_shape = lambda dims, dtype: jax.ShapeDtypeStruct(dims, dtype, sharding=replicated(mesh))
    packed = p.pack(by_token(np.int32), by_token(bool), plan, replicated_shape((), np.float32))
    minibatch = prepare(p, state, role, packed, plan)
    count = (shape.sequences,)
    labels = StoredLabels(
        by_token(bool),
        replicated_shape(count, np.float32),
        replicated_shape(count, np.float32),
        replicated_shape(count, np.int32),
        replicated_shape(count if attributes is None else (*count, attributes), np.float32),
    )
    minibatches = [minibatch] * config.learner.minibatches
    learn_from_stored(p, state, minibatches, labels, arrays, role=role, epochs=config.learner.epochs)
