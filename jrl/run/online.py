"""One step of an Online stage, from top to bottom: draw, submit, prepare, wait for scores, credit, update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jrl.algos.contract import Objective
from jrl.device.placement import place_on_mesh
from jrl.experiment import Online
from jrl.learning.learner import weights_of, without_routes
from jrl.learning.pack import PackingPlan, Shape
from jrl.learning.previous import previous_roles
from jrl.learning.step import Learned, Minibatch, StageArrays, StagePrograms, learn_from_sampled, prepare
from jrl.rollout.collect import (
    Collected,
    Draw,
    PromptSampler,
    Submitted,
    collect,
    draw,
    draw_further,
    hand_out,
    record_outcomes,
    refilled,
    submit,
)
from jrl.rollout.scoring import Scorer
from jrl.rollout.sources import Completions, RewardSource
from jrl.rollout.strategies.contract import ConfiguredStrategy
from jrl.run.batches import host_plans, plan_shardings
from jrl.run.clock import RunClock
from jrl.run.offline import PretrainingRows, next_on_host, pretraining_batches, shardings
from jrl.tasks.stopping import Stop
from jrl.types import Array, PackedBatch, PretrainingBatch, PyTree, Rollout, Scores, TrainState


@dataclasses.dataclass(frozen=True)
class OnlineStage:
    """An Online stage that is open."""

    name: str
    config: Online
    objective: Objective
    programs: StagePrograms
    arrays: StageArrays
    shape: Shape  # packed, of one optimizer step
    sampler: PromptSampler
    scorer: Scorer
    sources: Sequence[RewardSource]  # of rewards, beside the verifiers
    temperature: Array
    pretraining: PretrainingRows | None = None  # stored rows that are also imitated; None: there are none

    @property
    def rewards_tokens(self) -> bool:
        """Whether single tokens are rewarded too, not only rows."""
        return self.scorer.rewards_spans or any(source.rewards_tokens for source in self.sources)


class Stepped(NamedTuple):
    """The result of a step."""

    state: TrainState
    waiting: tuple[Draw, ...]  # completions that are being drawn for the next steps, in order
    metrics: dict[str, Array | float]
    batch: Collected
    learned: Learned


def step(
    stage: OnlineStage,
    state: TrainState,
    waiting: Sequence[Draw],
    draws_ahead: int,
    phase: Callable[..., None],
    stop: Stop,
    clock: RunClock,
    *,
    warms_up: bool,
) -> Stepped:
    """Returns the state after one step, with what it sampled.

    Args:
      waiting: the draws already in flight: of this step, if it has one, then of the next steps.
      draws_ahead: how many of the next steps have their draws started before this step learns.
      phase: called with what the step does, and with (done, total) where that is counted.
      stop: polled while completions are scored. clock: records where the time goes.
      warms_up: only a separate critic learns.

    Raises: StopRequested where `stop` says so. `state` and `waiting` are unchanged; the data stream has advanced.
    """
    phase("sampling")

    def wait_and_submit(drawn: Draw) -> Submitted:
        waited = clock.wait_for(drawn.rollout.length)
        with clock.on("score"):
            submitted = send(stage, state, drawn)
        clock.drawn.append(submitted.host)
        if drawn.under_way is None:
            return submitted
        return submitted._replace(seconds={"time/wait_for_draw_seconds": waited, **submitted.seconds})

    # With separate sampling devices, this step's draw is submitted before weights are published, and scored meanwhile.
    submitted = wait_and_submit(waiting[0]) if waiting and stage.sampler.devices is not None else None
    with clock.on("sample"):
        current, *following = draws(stage, state, waiting, 1 + draws_ahead)
        for rollout in [drawn.rollout for drawn in (current, *following)]:
            if all(rollout is not in_flight.rollout for in_flight in waiting):
                clock.dispatched("sample", rollout.length)
    if submitted is None:
        submitted = wait_and_submit(current)
    del current  # else its gathered fields would stay on every device
    phase("scoring", done=0, total=len(submitted.ticket.rows))
    with clock.on("prepare"):
        minibatches = pack_and_prepare(stage, state, submitted.drawn.rollout, submitted.host)
        note_prepared(clock, minibatches)
    progress = lambda done, total: phase("scoring", done=done, total=total)

    def wait_for_scores(submitted: Submitted) -> Collected:
        with clock.on("score"):
            return collect(submitted, stage.scorer, stage.sources, stage.sampler, stop, progress)

    batch = wait_for_scores(submitted)
    rounds = [batch]
    max_refills = stage.objective.refill(stage.config.objective)
    if max_refills is not None:

        def refill() -> Collected:
            with clock.on("sample"):
                drawn = draw(stage.sampler, *refill_weights(stage, state))
                clock.dispatched("sample", drawn.rollout.length)
            rounds.append(wait_for_scores(wait_and_submit(drawn)))
            return rounds[-1]

        def keep(round_: Collected) -> Array:
            return stage.programs.keep(round_.rollout, round_.scores, stage.arrays.objective, stage.arrays.shaping)

        filled = refilled(batch, max_refills, refill, keep, stage.sampler)
        if filled.rollout is not batch.rollout:
            minibatches = pack_and_prepare(stage, state, filled.rollout, filled.host)
        batch = filled

    phase("updating")
    pretraining, left_out = pretraining_rows(stage, warms_up)  # from here on the step cannot be stopped
    with clock.on("update"):
        state, metrics, learned = learn_from_sampled(
            stage.programs,
            state,
            minibatches,
            batch.rollout,
            batch.scores,
            stage.arrays,
            role=stage.config.trains,
            epochs=stage.config.learner.epochs,
            warms_up=warms_up,
            pretraining=pretraining,
        )
        clock.dispatched("update", metrics["update/skipped_nonfinite"])
    outcomes = record_outcomes(stage.sampler, rounds)
    metrics = {**metrics, **submitted.seconds, **batch.metrics, **outcomes, **left_out}
    return Stepped(state, tuple(following), metrics, batch, learned)


def pretraining_rows(stage: OnlineStage, warms_up: bool) -> tuple[list[PretrainingBatch], dict[str, float]]:
    """Returns the next stored rows that a stage imitates, by minibatch, and counts of those left out; none where only a
    separate critic learns, which imitates nothing."""
    if stage.pretraining is None or warms_up:
        return [], {}
    batch, left_out, _ = next_on_host(stage.pretraining, stage.config.learner.minibatches)
    batch = place_on_mesh(batch, shardings(batch, stage.sampler.mesh))
    return pretraining_batches(stage.programs, batch, stage.arrays.pretraining), left_out


def note_prepared(clock: RunClock, minibatches: Sequence[Minibatch]) -> None:
    """Records on the clock the passes that prepare minibatches, if there are any."""
    if results := jax.tree.leaves([minibatch.recomputed for minibatch in minibatches]):
        clock.dispatched("prepare", results[-1])


def draws(stage: OnlineStage, state: TrainState, waiting: Sequence[Draw], count: int) -> list[Draw]:
    """Returns the draws of this step and of the next ones, `count` in all: those that wait, each with its next segment
    where completions have several, and new ones.

    The first step fills the queue with its own weights, since step t learns from version max(0, t - lag). Earlier
    segments of those draws are drawn now too.
    """
    sampler, version = stage.sampler, state.models["policy"].version
    weights = sampling_weights(sampler.strategy, state)
    next_segment = lambda drawn: draw_further(sampler, drawn, weights, version)
    queue = [next_segment(drawn) for drawn in waiting] if sampler.segments > 1 else list(waiting)
    if queue and sampler.devices is None:
        queue[0] = hand_out(queue[0])  # before new ones are drawn
    for place in range(len(queue), count):
        drawn = draw(sampler, weights, version)
        for _ in range(sampler.segments - 1 - place):
            drawn = next_segment(drawn)
        queue.append(drawn)
    return queue


def refill_weights(stage: OnlineStage, state: TrainState) -> tuple[PyTree, Array]:
    """Returns the weights that a step's refills are drawn with, and the policy's version in them: max(0, t - lag)."""
    version = state.models["policy"].version
    if stage.config.lag:
        oldest = previous_roles(stage.config.lag)[-1]
        return sampling_weights(stage.sampler.strategy, state, oldest), stage.programs.before(version)
    return sampling_weights(stage.sampler.strategy, state), version


def sampling_weights(strategy: ConfiguredStrategy, state: TrainState, policy: str = "policy") -> PyTree:
    """Returns the weights that completions are drawn with: the policy's, or {role: weights} where the strategy
    draws with other roles too.

    Args:
      policy: the role that has the policy's weights, or an older version of them.
    """
    weights = lambda role: weights_of(state.models, role).params
    others = strategy.row.roles(strategy.config)
    return {**{role: weights(role) for role in others}, "policy": weights(policy)} if others else weights(policy)


def send(stage: OnlineStage, state: TrainState, drawn: Draw) -> Submitted:
    """Waits for a draw and submits it to every source of rewards."""

    def completions(drawn: Draw, host: dict[str, np.ndarray], texts: list[str]) -> Completions:
        packed = lambda: [without_routes(p) for _, p in packed_minibatches(stage, drawn.rollout, host)]
        return Completions(drawn.visits, texts, stage.config.samples, host, packed, state)

    return submit(drawn, stage.sampler, stage.scorer, stage.sources, completions)


def packed_minibatches(
    stage: OnlineStage, rollout: Rollout, host: dict[str, np.ndarray]
) -> list[tuple[PackingPlan, PackedBatch]]:
    """Returns (plan, packed batch) of every minibatch of sampled rows."""
    plans = sampled_plans(stage, host)
    plans = place_on_mesh(plans, plan_shardings(plans, stage.sampler.mesh))
    return [(plan, stage.programs.pack(rollout, plan, stage.temperature)) for plan in plans]


def sampled_plans(stage: OnlineStage, host: Mapping[str, np.ndarray]) -> list[PackingPlan]:
    """Returns how sampled rows are packed into every minibatch, on the host."""
    return host_plans(stage.shape, stage.config.learner.minibatches, host["length"], host["action_mask"])


def pack_and_prepare(
    stage: OnlineStage, state: TrainState, rollout: Rollout, host: dict[str, np.ndarray]
) -> list[Minibatch]:
    """Returns the minibatches of a batch, with what the weights before the step compute for them."""
    return [
        prepare(stage.programs, state, stage.config.trains, packed, plan)
        for plan, packed in packed_minibatches(stage, rollout, host)
    ]


def abstract_step(
    p: StagePrograms, config: Online, state: TrainState, plan: PackingPlan, inputs: AbstractInputs
) -> None:
    """Calls every program of a step as `step` does, in abstract form: `p` takes and returns shapes.

    Args:
      plan: the packing of one minibatch, as shapes.
    """
    policy = state.models["policy"]
    weights = sampling_weights(inputs.strategy, state)
    rollout = p.sample(weights, *inputs.sampling)
    if p.next_segment is not None:
        _, key, stream, version, sampling_params, _, _ = inputs.sampling
        uid = jax.ShapeDtypeStruct((*rollout.length.shape, 2), np.uint32, sharding=rollout.tokens.sharding)
        rollout = p.next_segment(weights, rollout, uid, key, stream, version, sampling_params)
    packed = p.pack(rollout, plan, inputs.temperature)
    scores_of_roles = [p.scores(weights_of(state.models, role), without_routes(packed)) for role in config.rewards]
    if p.step_scores is not None:
        p.step_scores(weights_of(state.models, config.process.role), without_routes(packed))
    if p.combine is not None:
        p.combine(scores_of_roles)
    if p.correct is not None:
        p.correct(weights_of(state.models, config.corrector.role).params, *inputs.correcting)
    if p.prefer is not None:
        p.prefer(weights_of(state.models, config.pair_model.role), *inputs.comparing)
    minibatch = prepare(p, state, config.trains, packed, plan)
    scores = inputs.scores(rollout)
    if p.keep is not None:
        p.keep(rollout, scores, inputs.arrays.objective, inputs.arrays.shaping)
        if config.lag:
            p.before(policy.version)
    minibatches = [minibatch] * config.learner.minibatches
    pretraining = []
    if p.pretraining is not None:
        pretraining = [p.pretraining(*inputs.pretraining, inputs.arrays.pretraining)] * config.learner.minibatches
    for warms_up in (True, False) if config.critic_warmup else (False,):
        learn_from_sampled(
            p,
            state,
            minibatches,
            rollout,
            scores,
            inputs.arrays,
            role=config.trains,
            epochs=config.learner.epochs,
            warms_up=warms_up,
            pretraining=() if warms_up else pretraining,
        )


class AbstractInputs(NamedTuple):
    """The outside inputs of a step's programs, as shapes."""

    arrays: StageArrays
    temperature: jax.ShapeDtypeStruct
    sampling: tuple  # the sampler's arguments after its weights
    strategy: ConfiguredStrategy
    scores: Callable[[Rollout], Scores]
    correcting: tuple | None  # as `sampling`, for a corrector; None: the stage has none
    comparing: tuple | None  # a pair model's arguments after its weights; None: the stage has none
    pretraining: tuple | None  # (tokens, mask, plan) of stored rows that are also imitated; None: there are none
