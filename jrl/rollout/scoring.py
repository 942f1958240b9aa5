"""Scoring on the host: completions go to the verifier pool, rewards and verdicts come back as numpy arrays.

A row's reward is the weighted sum of its verifiers' rewards (R5), and counts only when every one of them is
scorable. Otherwise the row is masked and has the first status that is not scorable: an infrastructure failure, a
crash or a verifier that raised is never a reward of 0. A scorable row has the status of its *first* verifier: put the
verifier that decides whether the task was solved first, and shaping terms after it.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from jrl.device.processes import ONE, Processes
from jrl.tasks.example import Example
from jrl.tasks.rewards.weighted import LARGEST_REWARD, weighted_sum
from jrl.tasks.shares import is_above
from jrl.tasks.stopping import Stop, never
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers import Verifier, VerifierSpec, config_of, look_up, merge, spec_of
from jrl.tasks.verifiers.extract import Extract, extract_answer
from jrl.tasks.verifiers.journal import Journal, journal_key, rows_text
from jrl.tasks.verifiers.pool import Item, Pool, Ticket
from jrl.tasks.verifiers.source import PartSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring:
    """How completions are scored."""

    # for examples that name none; the reward is their weighted sum, and the first one says what is correct
    verifiers: tuple[Any, ...] = dataclasses.field(default=(), metadata={"table": "verifiers"})
    workers: int = 2  # verifier processes, in parallel
    cpu_seconds: float = 2.0  # CPU time of one verifier on one completion
    wall_seconds: float = 10.0  # wall time of one verifier on one completion
    memory_mb: int = 1024  # MiB a worker may use beyond its verifiers once loaded
    max_characters: int = 100_000  # a longer completion is FORBIDDEN: no verifier sees it
    stop_above: float = 0.1  # share of a batch lost to INFRA_ERROR above which the run stops
    stop_above_verifier_errors: float = 0.25  # the same for VERIFIER_ERROR: a verifier raised, or returned no number

    def __post_init__(self) -> None:
        for name in ("workers", "cpu_seconds", "wall_seconds", "memory_mb", "max_characters"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Scoring.{name} is {getattr(self, name)}; it must be above 0")
        for name in ("stop_above", "stop_above_verifier_errors"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"Scoring.{name} is {getattr(self, name)}; it is a share, from 0 to 1")


class ScoringStopped(RuntimeError):
    """Failures that are not the model's cost too much of a batch. Nothing was learned from the batch."""


class WorkersLost(ScoringStopped):
    """INFRA_ERROR cost too much of a batch: the workers are at fault, not the completions."""


class RewardOverflow(ScoringStopped):
    """A token's reward, or the sum of a batch's rewards or of their squares, is beyond float32, the dtype of learning.
    Nothing was learned from the batch."""


@dataclasses.dataclass(frozen=True)
class HostScores:
    """The scores of N completions, in their order. numpy, on the host."""

    reward: np.ndarray  # [N] float32, weighted sum; 0 where not valid
    valid: np.ndarray  # [N] bool, every verifier's verdict is scorable
    verdict: np.ndarray  # [N] int8, a Status
    outcome: np.ndarray  # [N] float32, the first verifier's own reward, unweighted; 0 where not valid
    components: dict[str, np.ndarray]  # name -> [N] float32, unweighted; NaN where that verifier gave no number
    details: list[str]  # [N], details from the verifiers, mostly ""
    # [N], weighted rewards of spans of the completion, as in Verdict; () where not valid. None: no verifier gives any.
    spans: Sequence[tuple[tuple[int, float], ...]] | None = None
    token_reward: np.ndarray | None = None  # [N, T] float32, from spans and other sources; None: no source gives any
    source_metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # counters of other sources of rewards

    @property
    def counts(self) -> dict[str, int]:
        """Rows by status, every status named."""
        return {status.name: int((self.verdict == status).sum()) for status in Status}

    @property
    def first_problem(self) -> str:
        """The detail of the first invalid row that has one; "" if none has."""
        lost = ~self.valid & (self.verdict != Status.PADDING)
        return next((detail for detail, is_lost in zip(self.details, lost) if is_lost and detail), "")


@dataclasses.dataclass(frozen=True)
class ScoringTicket:
    """A batch that is being scored."""

    pool_ticket: Ticket
    rows: tuple[tuple[int, ...], ...]  # [N], the pool rows that score each completion
    keys: tuple[str, ...]  # [N], journal keys
    known: Mapping[int, tuple[Verdict, ...]]  # index in the batch -> verdicts that need no worker
    pending: tuple[int, ...]  # indices whose verdicts come from the pool, in its order


class Scorer:
    """A pool, a journal and the run's verifiers. Must be closed. Used from one thread."""

    def __init__(self, config: Scoring, table: Mapping[str, Verifier], pool: Pool, journal: Journal | None):
        self.pool = pool
        self._config = config
        self._table = table
        self._journal = journal
        self._rows = [spec_of(verifier) for verifier in config.verifiers]
        self._names = _component_names(self._rows)
        self._weights = [_weight(verifier) for verifier in config.verifiers]
        self._by_name: dict[str, int] = {}
        self._row_texts: dict[tuple[int, ...], str] = {}  # pool rows that score together -> their text in journal keys
        self.rewards_spans = rewards_spans(config, table)

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(
        self, completions: Sequence[str], examples: Sequence[Example], keys: Sequence[tuple[Sequence[int], int]]
    ) -> ScoringTicket:
        """Hands completions to the workers and returns at once.

        Args:
            completions: N texts.
            examples: N, the example each answers.
            keys: N pairs (words, number) that identify the completion in the journal, such as (uid, sample).

        Raises:
            ValueError: lengths differ, an example names an unknown verifier, or no verifier scores it.
        """
        if not len(completions) == len(examples) == len(keys):
            raise ValueError(
                f"{len(completions)} completions, {len(examples)} examples and {len(keys)} keys; the counts must agree"
            )
        rows, names, known, pending, items = [], [], {}, [], []
        for i, (completion, example, (uid, sample)) in enumerate(zip(completions, examples, keys)):
            example_rows = self.rows_for(example)
            if example_rows not in self._row_texts:
                self._row_texts[example_rows] = rows_text([self._rows[row] for row in example_rows])
            name = journal_key(uid, sample, completion, example.id, self._row_texts[example_rows])
            rows.append(example_rows)
            names.append(name)
            if len(completion) > self._config.max_characters:
                detail = f"{len(completion)} characters; Scoring.max_characters is {self._config.max_characters}"
                known[i] = (Verdict(Status.FORBIDDEN, None, detail),) * len(example_rows)
            elif self._journal is not None and (recorded := self._journal.recall(name)) is not None:
                known[i] = recorded
            else:
                pending.append(i)
                items.append(Item(completion, example, example_rows))
        return ScoringTicket(self.pool.submit(items), tuple(rows), tuple(names), known, tuple(pending))

    def collect(
        self,
        ticket: ScoringTicket,
        stop: Stop = never,
        progress: Callable[[int, int], None] | None = None,
        processes: Processes = ONE,
    ) -> HostScores:
        """Waits for a batch and returns its scores. Writes unscorable verdicts to the journal.

        Args:
            stop: called about ten times a second while workers run.
            progress: called with (rows scored, rows) when that changes, at most about ten times a second, in this
              thread.
            processes: those that score a batch together, each its own rows, which this returns. The limits apply to the
              rows of all processes, so that all of them stop or none does.

        Raises:
            ScoringAbandoned: `stop` returned True. Nothing of the batch is in the journal.
            ScoringStopped: more than `stop_above` of the rows were lost to INFRA_ERROR, or more than
                `stop_above_verifier_errors` to VERIFIER_ERROR. WorkersLost in the first case.
        """
        known, total = len(ticket.known), len(ticket.rows)
        report = None if progress is None else lambda done, _: progress(known + done, total)
        verdicts = dict(ticket.known)
        verdicts.update(zip(ticket.pending, self.pool.collect(ticket.pool_ticket, stop, report)))
        ordered = [verdicts[i] for i in range(total)]
        scores = self._weigh(ordered, ticket)
        self._check_lost(processes.exchange("lost", self._lost(ordered, ticket)))
        if self._journal is not None:
            masked = [i for i in ticket.pending if not all(verdict.status.scorable for verdict in ordered[i])]
            self._journal.keep((ticket.keys[i], ordered[i]) for i in masked)
        return scores

    def _lost(self, verdicts: Sequence[tuple[Verdict, ...]], ticket: ScoringTicket) -> dict[str, Any]:
        """Returns how many rows were lost to failures that are not the model's, and by which verifiers, as JSON."""
        lost: dict[str, Any] = {"rows": len(verdicts), "pool": dict(self.pool.counts)}
        failures: dict[Status, list[tuple[int, str, str]]] = {Status.INFRA_ERROR: [], Status.VERIFIER_ERROR: []}
        for i, (rows, row_verdicts) in enumerate(zip(ticket.rows, verdicts)):
            for row, verdict in zip(rows, row_verdicts):
                if verdict.status in failures:
                    failures[verdict.status].append((i, self._names[row], verdict.detail))
        for status, failed in failures.items():
            lost[status.name] = {
                "rows": len({i for i, _, _ in failed}),
                "by_verifier": dict(collections.Counter(verifier for _, verifier, _ in failed)),
                "first": {verifier: detail for _, verifier, detail in reversed(failed)},
            }
        return lost

    def _check_lost(self, losses: Sequence[Mapping[str, Any]]) -> None:
        """Raises ScoringStopped where too many rows were lost to failures that are not the model's.

        Args:
            losses: what `_lost` returns in every process that scored a share of the batch.
        """
        total = sum(lost["rows"] for lost in losses)
        for status, name, why in (
            (Status.INFRA_ERROR, "stop_above", "could not be scored"),
            (Status.VERIFIER_ERROR, "stop_above_verifier_errors", "made a verifier raise or return no number"),
        ):
            failures = [lost[status.name] for lost in losses]
            rows = sum(failed["rows"] for failed in failures)
            if not is_above(rows, total, getattr(self._config, name)):
                continue
            counts = sum((collections.Counter(failed["by_verifier"]) for failed in failures), collections.Counter())
            verifier = counts.most_common(1)[0][0]
            detail = next(failed["first"][verifier] for failed in failures if verifier in failed["first"])
            pool = sum((collections.Counter(lost["pool"]) for lost in losses), collections.Counter())
            hint = (
                f"The pool so far: {dict(pool)}"
                if status is Status.INFRA_ERROR
                else "Fix the example that the message names, or the verifier, which should return 0 for a "
                "completion that it cannot parse; --accept-change (in Python accept_change=True) continues the run "
                "with the changed file"
            )
            raise (WorkersLost if status is Status.INFRA_ERROR else ScoringStopped)(
                f"{rows} of {total} completions ({rows / total:.0%}) {why}, above "
                f"Scoring.{name} = {getattr(self._config, name)}. The first of {verifier} ({counts[verifier]}): "
                f"{detail or 'no detail'}. {hint}"
            )

    def close(self) -> None:
        """Ends the workers and closes the journal."""
        self.pool.close()
        if self._journal is not None:
            self._journal.close()

    @property
    def component_weights(self) -> dict[str, float]:
        """The weights of `component_names` in the reward."""
        return dict(zip(self._names, self._weights))

    @property
    def component_names(self) -> tuple[str, ...]:
        """The names of the verifiers that have been loaded so far, as `HostScores.components` has them."""
        return tuple(self._names)

    def rows_for(self, example: Example) -> tuple[int, ...]:
        """Returns the pool rows that score an example: those it names, else the run's.

        Raises ValueError where there is none, or a named verifier is unknown.
        """
        if example.verifiers:
            return tuple(self.row_named(name, f"example {example.id!r}") for name in example.verifiers)
        if not self._config.verifiers:
            raise ValueError(
                f"no verifier scores example {example.id!r}: it names none, and Scoring.verifiers is empty"
            )
        return tuple(range(len(self._config.verifiers)))

    def answer_in(self, completion: str, example: Example) -> str:
        """Returns the answer that an example's first verifier reads in a completion: by its `read_answer`, else what
        its `extract` names; the whole completion without either, or where there is no single answer. Loads a verifier
        that was not asked for before, and raises as `rows_for` and `Verifier.answer_in`."""
        verifier = self._rows[self.rows_for(example)[0]]
        row, extract = self._table[verifier.name], verifier.fields.get("extract")
        if row.read_answer is not None:
            answer = row.answer_in(config_of(verifier, row), completion)
        else:
            answer = extract_answer(completion, extract) if extract in get_args(Extract) else None
        return completion if answer is None else answer

    def row_named(self, name: str, place: str) -> int:
        """Returns the pool row of a verifier: the run's configured one, else one with the defaults of the table's.

        Raises:
            ValueError: there is none, or it has no defaults; the message names `place`, which asked for it.
        """
        if name in self._by_name:
            return self._by_name[name]
        verifier = look_up(self._table, name, place)
        rows = [i for i, config in enumerate(self._config.verifiers) if type(config).__name__ == name]
        if rows:
            self._by_name[name] = rows[0]
            return rows[0]
        try:
            config = verifier.config()
        except TypeError as error:
            raise ValueError(
                f"{place} names the verifier {name!r}, which has no defaults for all its fields "
                f"({error}); add @{name}() to Scoring.verifiers and bind them"
            ) from error
        if verifier.rewards_spans and not self.rewards_spans:
            raise ValueError(f"{place} names the verifier {name!r}, which rewards spans of a completion; add @{name}() "
                             "to Scoring.verifiers, so that a run knows of such rewards from its start")  # fmt: skip
        index = self.pool.add_row(spec_of(config))
        while index >= len(self._rows):  # others that share the pool may have added rows before this one
            self._rows.append(self.pool.row(len(self._rows)))
            self._weights.append(1.0)
        self._weights[index] = _weight(config)
        self._names = _component_names(self._rows)
        self._by_name[name] = index
        return index

    def _weigh(self, verdicts: Sequence[tuple[Verdict, ...]], ticket: ScoringTicket) -> HostScores:
        """Returns the weighted sum of each row's verdicts, or masks the row."""
        count = len(verdicts)
        reward, valid = np.zeros(count, np.float32), np.zeros(count, bool)
        status, outcome = np.zeros(count, np.int8), np.zeros(count, np.float32)
        components = {name: np.full(count, np.nan, np.float32) for name in self._names}
        details, spans = [], []
        for i, (row_verdicts, rows) in enumerate(zip(verdicts, ticket.rows)):
            bad = [verdict for verdict in row_verdicts if not verdict.status.scorable]
            problem = ""
            status[i] = (bad or row_verdicts)[0].status
            if not bad:
                # In float64 and in the order of the rows, so that the sum is deterministic.
                total = weighted_sum([verdict.reward for verdict in row_verdicts], [self._weights[row] for row in rows])
                if abs(total) <= LARGEST_REWARD:
                    valid[i], reward[i], outcome[i] = True, total, row_verdicts[0].reward
                else:
                    status[i] = Status.VERIFIER_ERROR
                    problem = f"the weighted sum {total:g} is beyond float32"
            for row, verdict in zip(rows, row_verdicts):
                if verdict.reward is not None:
                    components[self._names[row]][i] = verdict.reward
            row_details = [f"{self._names[r]}: {v.detail}" for r, v in zip(rows, row_verdicts) if v.detail]
            details.append("; ".join([*row_details, *([problem] if problem else [])]))
            weighted = ((end, self._weights[r] * x) for r, v in zip(rows, row_verdicts) for end, x in v.spans)
            spans.append(tuple(weighted) if valid[i] else ())
        return HostScores(
            reward=reward,
            valid=valid,
            verdict=status,
            outcome=outcome,
            components=components,
            details=details,
            spans=spans if self.rewards_spans else None,
        )


def scores_of_all(scores: HostScores, processes: Processes) -> HostScores:
    """Returns the scores of all processes' rows, in the order of the processes, given those of this one's rows."""
    if processes.count == 1:
        return scores
    shares = [HostScores(**fields) for fields in processes.exchange("scores", vars(scores))]
    names = sorted({name for share in shares for name in share.components})
    joined = lambda name: np.concatenate([getattr(share, name) for share in shares])

    def component(share: HostScores, name: str) -> np.ndarray:
        return share.components.get(name, np.full(share.reward.shape, np.nan, np.float32))

    spans = None
    if scores.spans is not None:
        spans = [tuple((int(end), reward) for end, reward in row) for share in shares for row in share.spans]
    return HostScores(
        reward=joined("reward"),
        valid=joined("valid"),
        verdict=joined("verdict"),
        outcome=joined("outcome"),
        components={name: np.concatenate([component(share, name) for share in shares]) for name in names},
        details=[detail for share in shares for detail in share.details],
        spans=spans,
    )


def check_range(scores: HostScores) -> HostScores:
    """Returns the scores. Raises RewardOverflow where a token's reward in a valid row is beyond float32."""
    if scores.token_reward is not None:
        overflows = scores.valid & ~np.isfinite(scores.token_reward).all(1)
        if overflows.any():
            raise RewardOverflow(
                f"the token rewards of completion {int(np.argmax(overflows))} are beyond float32, whose largest number "
                f"is {LARGEST_REWARD:g}; bound the rewards of spans that verifiers return, or lower the verifiers' "
                "weights, ProcessRewards.weight or Corrector.scale"
            )
    return scores


def check_sums(scores: HostScores, weights: Mapping[str, float]) -> HostScores:
    """Returns the scores. Raises RewardOverflow where the rewards of the batch, or their squares, add up to more than
    float32 holds: their mean and standard deviation would not be finite.

    Args:
      weights: weights of the components, by name.
    """
    rewards = np.where(scores.valid, scores.reward, 0).astype(np.float64)
    if max(np.abs(rewards).sum(), np.square(rewards).sum()) <= LARGEST_REWARD:
        return scores
    worst = int(np.argmax(np.abs(rewards)))
    contribution = lambda name: np.nan_to_num(abs(weights[name] * float(scores.components[name][worst])))
    name = max(weights.keys() & scores.components.keys(), key=contribution, default=None)
    cause = "" if name is None else f", most of it from {name}, whose weight is {weights[name]:g}"
    raise RewardOverflow(
        f"the reward of completion {worst} is {scores.reward[worst]:g}{cause}: the batch's rewards, or their squares, "
        f"add up to more than float32 holds, whose largest number is {LARGEST_REWARD:g}: they have no mean or spread. "
        "Lower that weight, or bound the reward"
    )


def open_scoring(
    config: Scoring,
    verifier_table: Mapping[str, Any],
    part_sources: Sequence[PartSource] = (),
    journal_path: str | os.PathLike[str] | None = None,
    *,
    other_journals: Sequence[str | os.PathLike[str]] = (),
    private: Sequence[str | os.PathLike[str]] = (),
    also: Sequence[str] = (),
    pool: Pool | None = None,
) -> Scorer:
    """Starts the workers and returns the scorer. Must be closed.

    Args:
        config: the run's.
        verifier_table: name -> row, jrl's own verifiers and those of the run's parts.
        part_sources: the parts files that define verifiers, as text; the workers load them.
        journal_path: file of the verdicts that depended on the machine; None: no journal.
        other_journals: files of other processes, whose verdicts are replayed too.
        private: folders that workers of a root process cannot read, such as the run's.
        also: names of verifiers that examples name. Others are loaded at their first example, which may take seconds
            and adds a name to `HostScores.components`.
        pool: the workers of another scorer of the same configuration; None: new ones are started.

    Raises:
        ValueError: a part does not load in a process without JAX, or a verifier's config cannot be sent to it.
    """
    table = merge(verifier_table)
    for verifier in config.verifiers:
        look_up(table, type(verifier).__name__, "Scoring.verifiers")
    journal = None if journal_path is None else Journal(journal_path, other_journals)
    try:
        pool = pool or Pool(
            [spec_of(verifier) for verifier in config.verifiers],
            part_sources,
            workers=config.workers,
            cpu_seconds=config.cpu_seconds,
            wall_seconds=config.wall_seconds,
            memory_mb=config.memory_mb,
            private=private,
        )
    except BaseException:
        if journal is not None:
            journal.close()
        raise
    scorer = Scorer(config, table, pool, journal)
    try:
        for name in also:
            scorer.row_named(name, "the run's data")
    except BaseException:
        scorer.close()
        raise
    return scorer


def rewards_spans(config: Scoring, table: Mapping[str, Verifier]) -> bool:
    """Whether a configured verifier may reward spans of a completion."""
    return any(table[type(verifier).__name__].rewards_spans for verifier in config.verifiers)


def component_names(config: Scoring) -> tuple[str, ...]:
    """Returns the names of the configured verifiers in metrics and in the reward's components."""
    return tuple(_component_names([spec_of(verifier) for verifier in config.verifiers]))


def _component_names(rows: Sequence[VerifierSpec]) -> list[str]:
    """Returns the metric names of verifier rows: a verifier used twice is "Length" and "Length_2"."""
    seen: collections.Counter[str] = collections.Counter()
    names = []
    for row in rows:
        seen[row.name] += 1
        names.append(row.name if seen[row.name] == 1 else f"{row.name}_{seen[row.name]}")
    return names


def _weight(config: Any) -> float:
    """Returns the weight of a verifier in the reward. Raises ValueError where it is not a finite float32."""
    if not abs(config.weight) <= LARGEST_REWARD:
        raise ValueError(f"{type(config).__name__}.weight is {config.weight}; it must be finite, in float32 too")
    return float(config.weight)
