"""Sources of rewards beside the verifiers: a published reward model, a judge over HTTP, a role of the run. Each takes a
batch and returns at once; none waits for another, and each part of the reward is logged by its own name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.device.placement import fetch
from jrl.device.processes import ONE, Processes
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
    """What a model says of N completions."""

    names: tuple[str, ...]  # of its objectives, as metrics name them
    weights: tuple[float, ...]  # of each in the reward
    values: np.ndarray  # [N, objectives] float32, NaN where a row could not be scored
    problems: Sequence[str]  # [N], why a row could not be scored; "" mostly
    token_reward: np.ndarray | None = None  # [N, T] float32, weighted, on sampled tokens; where the source gives some
    lost: Mapping[int, Status] = {}  # row that could not be scored -> its status; FORBIDDEN where it is not here
    metrics: Mapping[str, float] = {}  # counters of the source, to be added up over the rounds of a step


class RewardSource(NamedTuple):
    """One source of rewards beside the verifiers."""

    submit: Callable[[Completions], Any]  # begins, and returns a ticket at once
    collect: Callable[[Any], LearnedScores]  # waits for the ticket's scores
    names: tuple[str, ...]  # of its objectives, as LearnedScores has them
    rewards_tokens: bool = False  # it gives LearnedScores.token_reward


def add_scores(scores: HostScores, learned: LearnedScores) -> HostScores:
    """Returns scores with the weighted sum of a model's added. A row that it could not score is masked.

    Raises: RewardOverflow where rewards of tokens add up to more than float32 holds.
    """
    judged = np.array([not problem for problem in learned.problems], bool)
    # In float64, so that the order of the sum is all that decides it.
    weights = np.asarray(learned.weights)
    # A column without a weight may have no number in a row that is judged: the preference for it over itself.
    counted = judged[:, None] & (weights != 0)
    added = np.where(counted, learned.values, 0).astype(np.float64) @ weights
    fits = np.abs(scores.reward + added) <= LARGEST_REWARD
    problems = [p if p or ok else f"the reward {r:g} is beyond float32"
                for p, ok, r in zip(learned.problems, fits, scores.reward + added)]  # fmt: skip
    judged &= fits
    valid = scores.valid & judged
    lost = np.array([learned.lost.get(row, Status.FORBIDDEN) for row in range(len(judged))], np.int8)
    verdict = np.where(scores.valid & ~judged, lost, scores.verdict)
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
    """Returns the sum of those rewards of tokens that are there, float32."""
    if a is None or b is None:
        return b if a is None else a
    return (a.astype(np.float64) + b).astype(np.float32)


ROLE_ENSEMBLE = "role/ensemble"  # the name of the score of several roles together


def roles_source(name: str, weight: float, scores: Callable[[TrainState, PackedBatch], Array]) -> RewardSource:
    """Returns a source that reads the reward head of a role, or of several that are an ensemble.

    Args:
      name: as metrics have it. scores: (state, packed) -> [M, R, S] on the device.
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


def judge_source(judge: OpenJudge, processes: Processes = ONE) -> RewardSource:
    """Returns a judge as a source. Its requests are under way while the device computes. Of several processes each asks
    about its own share of the prompts, and all get the scores of all."""

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
        mine = LearnedScores(graded.names, graded.weights, values, graded.problems, lost=lost, metrics=graded.metrics)
        return learned_of_all(mine, processes)

    return RewardSource(submit, collect, judge.names)


def learned_of_all(scores: LearnedScores, processes: Processes) -> LearnedScores:
    """Returns the scores of all processes, given those of each one's own rows, in the order of the processes. Counters
    are added up; of seconds waited the longest counts."""
    if processes.count == 1:
        return scores
    lost = [[row, int(status)] for row, status in sorted(scores.lost.items())]
    own = {"values": scores.values, "problems": list(scores.problems), "lost": lost, "metrics": dict(scores.metrics)}
    every = processes.exchange(f"scores of {scores.names[0]}", own)
    first = np.cumsum([0, *(len(each["problems"]) for each in every)])
    metrics = {
        name: (max if name.startswith("time/") else sum)(each["metrics"][name] for each in every)
        for name in scores.metrics
    }
    return scores._replace(
        values=np.concatenate([each["values"] for each in every]),
        problems=[problem for each in every for problem in each["problems"]],
        lost={int(begins) + row: Status(status) for begins, each in zip(first, every) for row, status in each["lost"]},
        metrics=metrics,
    )
