"""The learning part of a step, written once as calls of device programs: recompute, credit, finish, update, close.

A run calls the programs; precompilation and `jrl plan` call them in their abstract form, so that what is compiled and
planned is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jrl.learning.credit import Credit, StoredLabels
from jrl.learning.critic import CRITIC
from jrl.learning.learner import KL_REACHED, KLLimit, weights_of, without_routes
from jrl.learning.pack import PackingPlan
from jrl.learning.previous import PREVIOUS
from jrl.models.heads import REWARD
from jrl.types import (
    Array,
    PackedBatch,
    PretrainingBatch,
    PyTree,
    Recomputed,
    Rollout,
    Scores,
    TrainBatch,
    TrainState,
)


class StagePrograms(NamedTuple):
    """The programs of a stage, jitted functions of arrays. Hyperparameters are passed as arrays, so that changing one
    never recompiles. `jrl.learning.step` composes them. A run calls them; precompilation and a plan call
    `Program.compile` in their place (`to_compile`)."""

    begin: Callable[[TrainState], TrainState]  # the state before the stage -> the state that it begins with
    sample: Callable[..., Rollout] | None  # (params, prompts, key, stream, version, sampling_params, stop_table, None)
    # (params, rollout, uid, key, stream, version, sampling_params); None: a completion is drawn in one call
    next_segment: Callable[..., Rollout] | None
    pack: Callable[..., PackedBatch]  # (rollout, plan, temperature); stored rows: (tokens, mask, plan, temperature)
    recompute: Callable[..., dict[str, Array]] | None  # (weights, packed) -> fields of Recomputed; None: not needed
    reference: Callable[..., Array] | None  # (weights, packed) -> log-probs under the reference; None: not needed
    teacher: Callable[..., Array] | None  # (weights, packed) -> log-probs under the teacher; None: not needed
    row_values: Callable[..., Array] | None  # (weights by role, packed) -> [M, R, S], mean score; None: not needed
    critic_values: Callable[..., dict[str, Array]] | None  # (weights, packed) -> old values; None: no separate critic
    scores: Callable[..., Array] | None  # (weights, packed) -> [M, R, S], of a role's reward head; None: no such role
    # (weights, packed) -> [M, R, L], of a role's reward head at every token; None: no role scores steps
    step_scores: Callable[..., Array] | None
    combine: Callable[..., Array] | None  # (scores of each role) -> [M, R, S]; None: the roles are not an ensemble
    correct: Callable[..., Rollout] | None  # as `sample`, with a corrector's weights; None: the stage has no corrector
    # (weights, tokens, length, verdicts) -> [n], the preference for the first of two answers; None: no pair model
    prefer: Callable[..., Array] | None
    # (rollout, scores, state, config, [(recomputed, source)], shaping, version); None: stored rows
    credit: Callable[..., Credit] | None
    # (tokens, mask, plan, coefficient) of stored rows; None: no stored rows are imitated
    pretraining: Callable[..., PretrainingBatch] | None
    finish: Callable[..., TrainBatch]  # (packed, recomputed, plan, credit or labels, config)
    update: Callable[..., tuple[TrainState, dict[str, Array]]]  # (state, batch, config, optimizer, router, KL limit)
    update_critic: Callable[..., tuple[TrainState, dict[str, Array]]] | None  # for a separate critic, without a limit
    close: Callable[..., TrainState]  # (state, previous, objective state, metrics, config, skipped, reference decay)
    close_warmup: Callable[..., TrainState] | None  # the same after a step of the critic alone; None: no such steps
    keep: Callable[..., Array] | None  # (rollout, scores, config, shaping) -> [N] bool; None: never refilled
    before: Callable[[Array], Array]  # version -> max(0, version - lag)
    mean: Callable[[list[dict[str, Array]], list[dict[str, Array]]], dict[str, Array]]  # (the role's, the critic's)
    copy: Callable[[PyTree], PyTree]

    def to_compile(self) -> StagePrograms:
        """Returns the programs in abstract form: each call starts a compilation and returns shapes."""
        return StagePrograms(*(program and program.compile for program in self))


class StageArrays(NamedTuple):
    """A stage's hyper-parameters as arrays."""

    objective: PyTree
    optimizer: PyTree
    critic_optimizer: PyTree | None  # of a separate critic
    router: PyTree | None  # loss terms of a mixture of experts
    shaping: PyTree | None = None  # of sampled rows' rewards; None: no shaping
    reference_decay: Array | None = None  # share of the old reference kept when it moves; None: nothing is kept
    pretraining: Array | None = None  # coefficient of the stored rows that are imitated; None: there are none
    kl_limit: KLLimit | None = None  # of the updates of a batch, as a step begins; None: all of them are made


class Minibatch(NamedTuple):
    """The rows of one optimizer step, packed, and what the weights before the step compute for them."""

    plan: PackingPlan
    packed: PackedBatch
    recomputed: Recomputed


class Learned(NamedTuple):
    """What the updates of a step learned from."""

    batches: Sequence[TrainBatch]  # one for each minibatch
    epochs: int
    warms_up: bool  # only a separate critic learned


def prepare(p: StagePrograms, state: TrainState, role: str, packed: PackedBatch, plan: PackingPlan) -> Minibatch:
    """Returns a minibatch for the role that learns, before rewards are known."""
    recomputed = Recomputed()
    if p.recompute is not None:
        recomputed = recomputed.replace(**p.recompute(weights_of(state.models, role), packed))
    unrouted = without_routes(packed)
    if p.reference is not None:
        recomputed = recomputed.replace(ref_logprobs=p.reference(weights_of(state.models, "reference"), unrouted))
    if p.teacher is not None:
        recomputed = recomputed.replace(teacher_logprobs=p.teacher(weights_of(state.models, "teacher"), unrouted))
    if p.row_values is not None:
        judges = {name: weights_of(state.models, name) for name, model in state.models.items() if REWARD in model.heads}
        recomputed = recomputed.replace(row_values=p.row_values(judges, unrouted))
    if p.critic_values is not None:
        recomputed = recomputed.replace(**p.critic_values(weights_of(state.models, CRITIC), unrouted))
    return Minibatch(plan, packed, recomputed)


def learn_from_sampled(
    p: StagePrograms,
    state: TrainState,
    minibatches: Sequence[Minibatch],
    rollout: Rollout,
    scores: Scores,
    arrays: StageArrays,
    *,
    role: str,
    epochs: int,
    warms_up: bool,
    pretraining: Sequence[PretrainingBatch] = (),
) -> tuple[TrainState, dict[str, Array], Learned]:
    """Returns the state after all updates on a scored batch, the means of their metrics, still on the device, and what
    was learned from.

    Args:
      role: the one that learns; the policy has drawn the rollout.
      warms_up: only a separate critic learns (V3); the policy does not change by a bit.
      pretraining: stored rows that each minibatch also imitates; (): none.
    """
    before = [(m.recomputed, m.plan.source) for m in minibatches]
    version = state.models["policy"].version
    credit = p.credit(rollout, scores, state.objective, arrays.objective, before, arrays.shaping, version)
    if epochs * len(minibatches) == 1:  # only credit may need them: the ratio of a single update is exactly 1
        minibatches = [m._replace(recomputed=m.recomputed.replace(old_logprobs=None)) for m in minibatches]
    batches = [p.finish(m.packed, m.recomputed, m.plan, credit, arrays.objective) for m in minibatches]
    objective_state, credit_metrics = credit.state, credit.metrics
    del credit  # the batches have its per-token arrays
    if pretraining:
        batches = [batch.replace(pretraining=rows) for batch, rows in zip(batches, pretraining, strict=True)]
    return _learn(
        p, state, batches, objective_state, arrays, credit_metrics, role=role, epochs=epochs, warms_up=warms_up
    )


def learn_from_stored(
    p: StagePrograms,
    state: TrainState,
    minibatches: Sequence[Minibatch],
    labels: StoredLabels,
    arrays: StageArrays,
    *,
    role: str,
    epochs: int,
) -> tuple[TrainState, dict[str, Array], Learned]:
    """Returns the state after all updates on a batch of stored rows, the means of their metrics, and what was learned
    from."""
    batches = [p.finish(m.packed, m.recomputed, m.plan, labels, arrays.objective) for m in minibatches]
    return _learn(p, state, batches, state.objective, arrays, {}, role=role, epochs=epochs, warms_up=False)


def _learn(
    p: StagePrograms,
    state: TrainState,
    batches: Sequence[TrainBatch],
    objective_state: PyTree,
    arrays: StageArrays,
    credit_metrics: dict[str, Array],
    *,
    role: str,
    epochs: int,
    warms_up: bool,
) -> tuple[TrainState, dict[str, Array], Learned]:
    """Returns the state after all updates, the step's metrics (of credit, and means over the updates), and what was
    learned from."""
    # Copies, since the update donates the arrays of the state.
    objective_state, skipped = p.copy((objective_state, state.skipped))
    previous = p.copy(state.models[role].params) if PREVIOUS in state.models else None
    learned = Learned(batches, epochs, warms_up)
    state, update_metrics, critic_metrics = updates(p, state, learned, arrays)
    metrics = {**credit_metrics, **p.mean(update_metrics, critic_metrics)}
    close = p.close_warmup if warms_up else p.close
    state = close(state, previous, objective_state, metrics, arrays.objective, skipped, arrays.reference_decay)
    return state, metrics, learned


def critic_batch(batch: TrainBatch) -> TrainBatch:
    """Returns the batch that a separate critic learns from: it replays no routes and imitates no stored rows."""
    return batch.replace(packed=without_routes(batch.packed), pretraining=None)


def updates(
    p: StagePrograms, state: TrainState, learned: Learned, arrays: StageArrays
) -> tuple[TrainState, list[dict[str, Array]], list[dict[str, Array]]]:
    """Returns the state after all updates of a step (O6), and the metrics of each update: the role's, and those of a
    separate critic, whose updates no KL limit ends."""
    role_metrics: list[dict[str, Array]] = []
    critic_metrics: list[dict[str, Array]] = []
    kl_limit = arrays.kl_limit
    for _ in range(learned.epochs):
        for batch in learned.batches:
            if not learned.warms_up:
                state, metrics = p.update(state, batch, arrays.objective, arrays.optimizer, arrays.router, kl_limit)
                kl_limit = limit_after(kl_limit, metrics)
                role_metrics.append(metrics)
            if p.update_critic is not None:
                state, metrics = p.update_critic(
                    state, critic_batch(batch), arrays.objective, arrays.critic_optimizer, arrays.router
                )
                critic_metrics.append(metrics)
    return state, role_metrics, critic_metrics


def limit_after(kl_limit: KLLimit | None, metrics: dict[str, Array]) -> KLLimit | None:
    """Returns the KL limit (O6) for the next update of a step, by the metrics of an update."""
    return None if kl_limit is None else kl_limit._replace(reached=metrics[KL_REACHED])
