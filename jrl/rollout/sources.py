"""Sources of rewards in addition to the verifiers: a published reward model, a judge over HTTP, a role of the run. Each
takes a batch and returns at once, without waiting for the others. Each component of the reward is logged by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.device.placement import fetch
from jrl.device.processes import Processes
from jrl.rollout.scoring import HostScores, check_range
from jrl.tasks.data.prompts import Visit
from jrl.tasks.judges import Group, OpenJudge
from jrl.tasks.judges.judge import Ticket
from jrl.tasks.rewards.weighted import LARGEST_REWARD
from jrl.tasks.verdict import Status
from jrl.types import Array, PackedBatch, TrainState


class Completions(NamedTuple):
    """A batch of completions to be scored, rows of a prompt adjacent."""

    visits: Sequence[Visit]  # one for each prompt
    texts: Sequence[str]  # [N], samples of a prompt adjacent
    samples: int
    host: Mapping[str, np.ndarray]  # of the rollout: tokens, length, action_mask, with rows of padding at the end
    packed: Callable[[], Sequence[PackedBatch]]  # the same rows on the device, packed by minibatch
    state: TrainState


class LearnedScores(NamedTuple):
    """The scores that a model gives N completions."""

    names: tuple[str, ...]  # metric names of its objectives
    weights: tuple[float, ...]  # weight of each in the reward
    values: np.ndarray  # [N, objectives] float32, NaN where a row could not be scored
    problems: Sequence[str]  # [N], why a row could not be scored; "" if it was
    token_reward: np.ndarray | None = None  # [N, T] float32, weighted, on sampled tokens; None: no such rewards
    lost: Mapping[int, Status] = {}  # row that could not be scored -> its status; FORBIDDEN if it is missing
    metrics: Mapping[str, float] = {}  # counters of the source, summed over the rounds of a step


class RewardSource(NamedTuple):
    """One source of rewards in addition to the verifiers."""

    submit: Callable[[Completions], Any]  # starts scoring, and returns a ticket at once
    collect: Callable[[Any], LearnedScores]  # waits for the ticket's scores
    names: tuple[str, ...]  # of its objectives, as LearnedScores has them
    rewards_tokens: bool = False  # it sets LearnedScores.token_reward


def add_scores(scores: HostScores, learned: LearnedScores) -> HostScores:
    """Returns scores plus the weighted sum of a model's. A row that the model could not score is masked.

    Raises: RewardOverflow if the rewards of tokens add up to more than float32 holds.
    """
    scored = np.array([not problem for problem in learned.problems], bool)
    # In float64, so that the result depends only on the order of the sum.
    weights = np.asarray(learned.weights)
    # A column of weight 0 may be NaN in a row that was scored, such as the preference for a completion over itself.
    counted = scored[:, None] & (weights != 0)
    added = np.where(counted, learned.values, 0).astype(np.float64) @ weights
    fits = np.abs(scores.reward + added) <= LARGEST_REWARD
    problems = [p if p or ok else f"the reward {r:g} is beyond float32"
                for p, ok, r in zip(learned.problems, fits, scores.reward + added)]  # fmt: skip
    scored &= fits
    valid = scores.valid & scored
    lost = np.array([learned.lost.get(row, Status.FORBIDDEN) for row in range(len(scored))], np.int8)
    verdict = np.where(scores.valid & ~scored, lost, scores.verdict)
    source = learned.names[0].split("/")[0]
    details = ["; ".join(filter(None, (old, new and f"{source}: {new}"))) for old, new in zip(scores.details, problems)]
    with np.errstate(over="ignore"):
        token_reward = _sum(scores.token_reward, learned.token_reward)
    total = dataclasses.replace(
        scores,
        reward=np.where(valid, scores.reward + added, 0).astype(np.float32),
        valid=valid,
        verdict=verdict.astype(np.int8),
        outcome=np.where(valid, scores.outcome, 0).astype(np.float32),
        components={**scores.components, **{name: learned.values[:, i] for i, name in enumerate(learned.names)}},
        details=details,
        token_reward=token_reward,
        source_metrics={**scores.source_metrics, **learned.metrics},
    )
    return check_range(total)


def _sum(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    """Returns the sum of rewards of tokens, float32; None counts as 0."""
    if a is None or b is None:
        return b if a is None else a
    return (a.astype(np.float64) + b).astype(np.float32)


ROLE_ENSEMBLE = "role/ensemble"  # the name of the score of several roles


def roles_source(name: str, weight: float, scores: Callable[[TrainState, PackedBatch], Array]) -> RewardSource:
    """Returns a source that reads the reward head of a role, or of several roles that form an ensemble.

    Args:
      name: in metrics. scores: (state, packed) -> [M, R, S] on the device.
    """

    def submit(batch: Completions) -> tuple[int, list[tuple[Array, Array]]]:
        return len(batch.texts), [(packed.sequence, scores(batch.state, packed)) for packed in batch.packed()]

    def collect(ticket: tuple[int, list[tuple[Array, Array]]]) -> LearnedScores:
        count, dispatched = ticket
        values = np.full(count, np.nan, np.float32)
        for sequence, sequence_scores in fetch(dispatched):
            placed = sequence < count
            values[sequence[placed]] = sequence_scores[placed]
        problems = ["" if np.isfinite(value) else f"its score is {value}" for value in values]
        return LearnedScores((name,), (weight,), np.where(np.isfinite(values), values, np.nan)[:, None], problems)

    return RewardSource(submit, collect, (name,))


def judge_source(judge: OpenJudge, processes: Processes) -> RewardSource:
    """Returns a judge as a source. Its requests run while the device computes. Each process sends those for its share
    of the prompts, and all processes get all scores."""

    def submit(batch: Completions) -> Ticket:
        k = batch.samples
        groups = [
            Group(batch.visits[i].uid, batch.visits[i].example, batch.texts[i * k : (i + 1) * k])
            for i in processes.share(len(batch.visits))
        ]
        return judge.submit(groups)

    def collect(ticket: Ticket) -> LearnedScores:
        graded = judge.collect(ticket, processes)
        values = np.array(graded.rows, np.float32).reshape(-1, len(graded.names))
        lost = {row: status for row, status in enumerate(graded.statuses) if not status.scorable}
        local = LearnedScores(graded.names, graded.weights, values, graded.problems, lost=lost, metrics=graded.metrics)
        return learned_of_all(local, processes)

    return RewardSource(submit, collect, judge.names)


def learned_of_all(scores: LearnedScores, processes: Processes) -> LearnedScores:
    """Returns the scores of the rows of all processes, in the order of the processes. Counters are summed; for seconds
    waited the maximum is taken."""
    if processes.count == 1:
        return scores
    lost = [[row, int(status)] for row, status in sorted(scores.lost.items())]
    local = {"values": scores.values, "problems": list(scores.problems), "lost": lost, "metrics": dict(scores.metrics)}
    shares = processes.exchange(f"scores of {scores.names[0]}", local)
    starts = np.cumsum([0, *(len(share["problems"]) for share in shares)])
    metrics = {
        name: (max if name.startswith("time/") else sum)(share["metrics"][name] for share in shares)
        for name in scores.metrics
    }
    return scores._replace(
        values=np.concatenate([share["values"] for share in shares]),
        problems=[problem for share in shares for problem in share["problems"]],
        lost={int(i) + row: Status(status) for i, share in zip(starts, shares) for row, status in share["lost"]},
        metrics=metrics,
    )
