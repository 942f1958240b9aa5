"""A judge that is open: it is asked about groups of completions while the device computes."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import math
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jrl.device.processes import ONE, Processes
from jrl.tasks.example import Example, Message
from jrl.tasks.judges import gap, grade, hindsight, pairwise, rubric, self_reference
from jrl.tasks.judges.answers import read_answer
from jrl.tasks.judges.api import Endpoint
from jrl.tasks.judges.cache import AnswerCache
from jrl.tasks.judges.client import Client, Request, RequestLimits
from jrl.tasks.judges.config import Judge
from jrl.tasks.judges.failures import Failure, JudgeStopped
from jrl.tasks.judges.gap import Gap
from jrl.tasks.judges.grade import Grade
from jrl.tasks.judges.hindsight import Hindsight
from jrl.tasks.judges.pairwise import Pairwise
from jrl.tasks.judges.questions import Chat, Grading, Numbers, Question
from jrl.tasks.judges.rate_limit import RateLimit
from jrl.tasks.judges.rubric import Rubric
from jrl.tasks.judges.self_reference import SelfReference
from jrl.tasks.stopping import Stop, StopRequested, never
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers.journal import Journal

FOLDER = "judges"  # in a run's folder
ASK_SECONDS = 0.1  # between two looks at whether to stop
PREFLIGHT = dict(concurrency=1, attempts=3, backoff_seconds=0.2, patience_seconds=30.0)
PREFLIGHT_SECONDS = 30.0  # of an attempt, at most
COUNTED = ("requests", "cached", "shared", "attempts", "retries", "prompt_tokens", "completion_tokens",
           "uncounted", *Failure)  # fmt: skip

GRADINGS = {
    module_config: Grading(module_config, m.schema, m.questions, m.numbers, m.scores, m.names)
    for module_config, m in ((Grade, grade), (Rubric, rubric), (Pairwise, pairwise))
}
# What differs from a grade, and from a comparison.
GRADINGS[Gap] = GRADINGS[Grade]._replace(config=Gap, questions=gap.questions, scores=gap.scores)
GRADINGS[Hindsight] = GRADINGS[Grade]._replace(
    config=Hindsight, schema=hindsight.schema, questions=hindsight.questions, numbers=hindsight.numbers
)
GRADINGS[SelfReference] = GRADINGS[Pairwise]._replace(
    config=SelfReference, schema=self_reference.schema, questions=self_reference.questions
)


def score_names(config: Judge) -> tuple[str, ...]:
    """Returns the names of the columns of a judge's scores, its reward first, as metrics name them."""
    name = f"Judge/{config.name}"
    return (name, *(f"{name}/{part}" for part in GRADINGS[type(config.grading)].names(config.grading)))


class Group(NamedTuple):
    """The completions of one visit of a prompt."""

    uid: Sequence[int]
    example: Example
    texts: Sequence[str]


class Graded(NamedTuple):
    """What a judge says of N completions."""

    names: tuple[str, ...]  # of the columns, as metrics name them
    weights: tuple[float, ...]  # of each column in the reward
    rows: list[Numbers]  # [N], NaN where there is no score
    problems: list[str]  # [N], why there is none; "" mostly
    statuses: list[Status]  # [N]
    metrics: dict[str, float]  # what it cost since the last batch


class _Asked(NamedTuple):
    """One question of a group, and where its answer comes from."""

    key: str  # of the journal
    recorded: tuple[Verdict, ...] | None
    request: Request | None  # where nothing is recorded


class Ticket(NamedTuple):
    """A batch that is being judged."""

    groups: Sequence[Group]
    questions: list[list[Question]]  # of each group
    asked: list[list[_Asked]]  # of each group


class OpenJudge:
    """One judge of a run. Must be closed. Used from one thread.

    Args:
      stop: asked while answers are waited for.
    """

    def __init__(self, config: Judge, client: Client, journal: Journal | None, stop: Stop = never):
        self.config = config
        self.client = client
        self._journal, self._stop = journal, stop
        self.names = score_names(config)
        self._grading = GRADINGS[type(config.grading)]
        self._reported: collections.Counter[str] = collections.Counter()

    def submit(self, groups: Sequence[Group]) -> Ticket:
        """Begins to ask about every completion, and returns at once. What the journal holds is not asked.

        Raises: ValueError where the judge is to see an answer that an example does not have.
        """
        questions = [
            self._grading.questions(self.config.grading, g.example, [self._shown(text) for text in g.texts])
            for g in groups
        ]
        bodies = [[body_of(self.config, question.chat) for question in group] for group in questions]
        keys = [
            [f"{''.join(f'{int(word):08x}' for word in group.uid)}/{i}/{hashlib.sha256(body).hexdigest()}"
             for i, body in enumerate(own)] for group, own in zip(groups, bodies)
        ]  # fmt: skip
        recall = lambda key: None if self._journal is None else self._journal.recall(key)
        recorded = [[recall(key) for key in own] for own in keys]
        pending = [
            body for own, known in zip(bodies, recorded) for body, verdicts in zip(own, known) if verdicts is None
        ]
        requests = iter(self.client.ask(pending))
        asked = [
            [_Asked(key, verdicts, next(requests) if verdicts is None else None) for key, verdicts in zip(own, known)]
            for own, known in zip(keys, recorded)
        ]
        return Ticket(groups, questions, asked)

    def collect(self, ticket: Ticket, processes: Processes = ONE) -> Graded:
        """Waits for the answers, writes them to the journal and returns the scores, rows of a group adjacent.

        Args:
          processes: those that ask about a batch together, each about its own groups. Judge.stop_above is of the
            questions of all, so that all stop or none.

        Raises:
          StopRequested: `stop` returned True. Nothing of the batch is in the journal; answers so far are in the cache.
          JudgeStopped: more than Judge.stop_above of the questions have no answer. Likewise.
        """
        began = time.monotonic()
        requests = [asked.request for group in ticket.asked for asked in group if asked.request is not None]
        while not self.client.wait(requests, ASK_SECONDS):
            if self._stop():
                self.client.drop(requests)
                missing = sum(not request.settled for request in requests)
                raise StopRequested(f"asked to stop while {missing} answers of {self.config.name} were missing")
        waited = time.monotonic() - began
        verdicts = [[self._verdicts(asked) for asked in group] for group in ticket.asked]
        self._check_lost([said for group in verdicts for said in group], processes)
        self.client.sync()
        if self._journal is not None:
            self._journal.keep(
                (asked.key, said)
                for group, found in zip(ticket.asked, verdicts)
                for asked, said in zip(group, found)
                if asked.recorded is None
            )
        return self._graded(ticket, verdicts, waited)

    def close(self) -> None:
        """Gives up what is under way, and closes the files."""
        self.client.close()
        if self._journal is not None:
            self._journal.close()

    def _shown(self, text: str) -> str | None:
        return text if len(text) <= self.config.max_characters else None

    def _verdicts(self, asked: _Asked) -> tuple[Verdict, ...]:
        """Returns the numbers of an answer as verdicts, or the one that says why there is none."""
        if asked.recorded is not None:
            return asked.recorded
        if asked.request.content is None:
            return (Verdict(Status.INFRA_ERROR, None, asked.request.problem),)
        return tuple(
            Verdict(Status.CORRECT if number > 0 else Status.WRONG, number)
            for number in numbers_of(self.config, asked.request.content)
        )

    def _check_lost(self, verdicts: Sequence[tuple[Verdict, ...]], processes: Processes) -> None:
        mine = [said[0].detail for said in verdicts if not said[0].status.scorable]
        lost_here = {"asked": len(verdicts), "lost": len(mine), "first": mine[0] if mine else None}
        every = processes.exchange(f"lost by {self.config.name}", lost_here)
        asked, lost = (sum(each[name] for each in every) for name in ("asked", "lost"))
        if lost > self.config.stop_above * asked:
            raise JudgeStopped(
                f"{lost} of {asked} requests to the judge {self.config.name!r} failed ({lost / asked:.0%}), above "
                f"Judge.stop_above = {self.config.stop_above:g}. The first: "
                f"{next(each['first'] for each in every if each['lost'])}. When the judge answers again, run the same "
                "command to continue"
            )

    def _graded(self, ticket: Ticket, verdicts: Sequence[Sequence[tuple[Verdict, ...]]], waited: float) -> Graded:
        rows: list[Numbers] = []
        problems: list[str] = []
        statuses: list[Status] = []
        for group, questions, found in zip(ticket.groups, ticket.questions, verdicts):
            numbers = [tuple(verdict.reward for verdict in said) if said[0].status.scorable else None for said in found]
            scored = self._grading.scores(self.config.grading, questions, numbers, len(group.texts))
            for row, (text, values) in enumerate(zip(group.texts, scored)):
                status, problem = Status.CORRECT, ""
                if self._shown(text) is None:
                    limit = self.config.max_characters
                    status, problem = Status.FORBIDDEN, f"{len(text)} characters; Judge.max_characters is {limit}"
                elif math.isnan(values[0]):
                    failed = (s[0].detail for q, s, n in zip(questions, found, numbers) if n is None and row in q.rows)
                    status, problem = Status.INFRA_ERROR, next(failed, "there is no other completion to compare with")
                rows.append(values)
                problems.append(problem and f"{self.config.name}: {problem}")
                statuses.append(status)
        weights = (self.config.weight, *(0.0 for _ in self.names[1:]))
        return Graded(self.names, weights, rows, problems, statuses, self._metrics(waited))

    def _metrics(self, waited: float) -> dict[str, float]:
        """Returns what the judge was asked since the last batch. All of it depends on the machine."""
        now = collections.Counter(self.client.counts)
        new = {name: now[name] - self._reported[name] for name in COUNTED}
        self._reported = now
        place, c = f"judge/{self.config.name}", self.config
        cost = (new["prompt_tokens"] * c.input_price + new["completion_tokens"] * c.output_price) / 1e6
        counted = {f"host/{place}/{name}": float(count) for name, count in new.items()}
        return {**counted, f"host/{place}/cost": cost, f"time/{place}/wait_seconds": waited}


def open_judges(
    configs: Sequence[Judge], folder: pathlib.Path, stop: Stop = never, *, index: int = 0, count: int = 1
) -> list[OpenJudge]:
    """Returns the judges of a run whose folder is `folder`, after one question to each.

    Args:
      index, count: of the process, and how many there are: each asks about its own share of the prompts, and keeps the
        answers in files of its own.

    Raises: ValueError where a judge does not answer as it is asked to; StopRequested where `stop` says so.
    """
    with contextlib.ExitStack() as stack:
        opened = []
        for config in configs:
            preflight(config, stop)
            opened.append(open_judge(config, folder / FOLDER, stop, index=index, count=count))
            stack.callback(opened[-1].close)
        stack.pop_all()
        return opened


def open_judge(config: Judge, folder: pathlib.Path, stop: Stop = never, *, index: int = 0, count: int = 1) -> OpenJudge:
    """Returns a judge with its journal and its answers in a folder. Asks it nothing.

    Of several processes each has an equal part of the limits. It reads the journals of all, also of an earlier
    life of the run with another number of processes, and writes its own.
    """
    mine = f"-{index}" if index else ""
    with contextlib.ExitStack() as stack:
        client = open_client(config, folder / f"{config.name}.answers{mine}.jsonl", count)
        stack.callback(client.close)
        path = folder / f"{config.name}.journal{mine}.jsonl"
        others = sorted(set(folder.glob(f"{config.name}.journal*.jsonl")) - {path})
        journal = Journal(path, others)
        stack.callback(journal.close)
        stack.pop_all()
        return OpenJudge(config, client, journal, stop)


def open_client(config: Judge, answers: pathlib.Path, count: int = 1) -> Client:
    """Returns what asks a judge, and takes valid answers from a file and adds them to it.

    Args:
      count: of those that ask at a time, each with an equal part of the limits, and of the requests under way.
    """
    endpoint, part = endpoint_of(config), lambda limit: None if limit is None else limit / count
    limit = RateLimit(part(config.requests_per_second), part(config.tokens_per_minute))
    check = lambda content: numbers_of(config, content)
    limits = limits_of(config)._replace(concurrency=max(1, config.concurrency // count))
    return Client(endpoint, check, limits, limit, AnswerCache(answers))


def preflight(config: Judge, stop: Stop = never) -> None:
    """Asks a judge one question of the kind that it will be asked.

    Raises: ValueError where nobody answers, or not as it is asked to; StopRequested where `stop` says so.
    """
    example = Example("preflight", (Message("user", "What is 2 + 2?"),), answer="4")
    (question, *_) = GRADINGS[type(config.grading)].questions(config.grading, example, ["4", "5"])
    timeout = min(config.timeout_seconds, PREFLIGHT_SECONDS)
    limits = limits_of(config)._replace(**PREFLIGHT, timeout_seconds=timeout)
    client = Client(
        endpoint_of(config), lambda content: numbers_of(config, content), limits, RateLimit(None, None), None
    )
    try:
        (request,) = client.ask([body_of(config, question.chat)])
        while not client.wait([request], ASK_SECONDS):
            if stop():
                raise StopRequested(f"asked to stop while {config.name} was asked its first question")
    finally:
        client.close()
    if request.content is None:
        raise ValueError(
            f"the judge {config.name!r} (Judge.model = {config.model!r} at {config.address}) cannot be used: "
            f"{request.problem}"
        )


def endpoint_of(config: Judge) -> Endpoint:
    """Returns where a judge is asked, with its key. Raises ValueError where the key's variable is not set."""
    key = None
    if config.api_key_env is not None and (key := os.environ.get(config.api_key_env)) is None:
        raise ValueError(f"the environment variable {config.api_key_env} is not set, which Judge.api_key_env names as "
                         "that of the API key")  # fmt: skip
    return Endpoint(config.address, key)


def limits_of(config: Judge) -> RequestLimits:
    return RequestLimits(**{name: getattr(config, name) for name in RequestLimits._fields})


def numbers_of(config: Judge, content: str) -> Numbers:
    """Returns what an answer says. Raises JudgeError where it is not what was asked for."""
    grading = GRADINGS[type(config.grading)]
    return grading.numbers(config.grading, read_answer(content, grading.schema(config.grading)))


def body_of(config: Judge, chat: Chat) -> bytes:
    """Returns the body of a request: always the same bytes for the same question."""
    body: dict[str, Any] = {
        "model": config.model,
        "messages": chat,
        "temperature": config.temperature,
        "max_tokens": config.max_tokens,
    }
    if config.response_format is not None:
        body["response_format"] = {"type": config.response_format}
    if config.response_format == "json_schema":
        schema = GRADINGS[type(config.grading)].schema(config.grading)
        body["response_format"]["json_schema"] = {"name": "verdict", "schema": schema}
    return json.dumps(body, sort_keys=True).encode()
