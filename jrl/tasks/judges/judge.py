"""An open judge: it scores groups of completions while the device computes."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import math
import os
import pathlib
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from jrl.device.processes import ONE, Processes
from jrl.tasks.example import Example, Message
from jrl.tasks.judges import gap, grade, hindsight, pairwise, rubric, self_reference
from jrl.tasks.judges.answers import read_answer
from jrl.tasks.judges.api import Endpoint
from jrl.tasks.judges.cache import AnswerCache
from jrl.tasks.judges.client import Client, Request, RequestLimits
from jrl.tasks.judges.config import LENGTHS, Judge
from jrl.tasks.judges.failures import Failure, JudgeStopped
from jrl.tasks.judges.gap import Gap
from jrl.tasks.judges.grade import Grade
from jrl.tasks.judges.hindsight import Hindsight
from jrl.tasks.judges.pairwise import Pairwise
from jrl.tasks.judges.questions import Chat, Grading, Numbers, Question
from jrl.tasks.judges.rate_limit import RateLimit
from jrl.tasks.judges.rubric import Rubric
from jrl.tasks.judges.self_reference import SelfReference
from jrl.tasks.shares import is_above
from jrl.tasks.stopping import Stop, StopRequested, never
from jrl.tasks.verdict import Status, Verdict
from jrl.tasks.verifiers.journal import Journal

FOLDER = "judges"  # in a run's folder
ASK_SECONDS = 0.1  # between two checks of whether to stop
PREFLIGHT = dict(concurrency=1, attempts=3, backoff_seconds=0.2, patience_seconds=30.0)
PREFLIGHT_SECONDS = 30.0  # of an attempt, at most
COUNTED = ("requests", "cached", "shared", "attempts", "retries", "prompt_tokens", "completion_tokens",
           "uncounted", *Failure)  # fmt: skip

GRADINGS = {
    module_config: Grading(module_config, m.schema, m.questions, m.numbers, m.scores, m.names)
    for module_config, m in ((Grade, grade), (Rubric, rubric), (Pairwise, pairwise))
}
# Gap and Hindsight are variants of Grade, SelfReference of Pairwise.
GRADINGS[Gap] = GRADINGS[Grade]._replace(config=Gap, questions=gap.questions, scores=gap.scores)
GRADINGS[Hindsight] = GRADINGS[Grade]._replace(
    config=Hindsight, schema=hindsight.schema, questions=hindsight.questions, numbers=hindsight.numbers
)
GRADINGS[SelfReference] = GRADINGS[Pairwise]._replace(
    config=SelfReference, schema=self_reference.schema, questions=self_reference.questions
)


def score_names(config: Judge) -> tuple[str, ...]:
    """Returns the names of a judge's score columns in metrics, the reward first."""
    name = f"Judge/{config.name}"
    return (name, *(f"{name}/{part}" for part in GRADINGS[type(config.grading)].names(config.grading)))


class Group(NamedTuple):
    """The completions of one visit of a prompt."""

    uid: Sequence[int]
    example: Example
    texts: Sequence[str]


class Graded(NamedTuple):
    """A judge's scores of N completions."""

    names: tuple[str, ...]  # of the columns, in metrics
    weights: tuple[float, ...]  # of each column in the reward
    rows: list[Numbers]  # [N], NaN where there is no score
    problems: list[str]  # [N], why there is no score; "" if there is one
    statuses: list[Status]  # [N]
    metrics: dict[str, float]  # requests and cost since the last batch


class _Asked(NamedTuple):
    """One question of a group, and the source of its answer."""

    key: str  # of the journal
    recorded: tuple[Verdict, ...] | None  # from the journal
    request: Request | None  # if nothing is recorded


class Ticket(NamedTuple):
    """A batch that is being judged."""

    groups: Sequence[Group]
    questions: list[list[Question]]  # of each group
    asked: list[list[_Asked]]  # of each group


class OpenJudge:
    """One judge of a run. Must be closed. Used from one thread.

    Args:
      stop: polled while waiting for answers.
    """

    def __init__(self, config: Judge, client: Client, journal: Journal | None, stop: Stop = never):
        self.config = config
        self.client = client
        self._journal, self._stop = journal, stop
        self.names = score_names(config)
        self._grading = GRADINGS[type(config.grading)]
        self._reported: collections.Counter[str] = collections.Counter()

    def submit(self, groups: Sequence[Group]) -> Ticket:
        """Sends the questions about every completion and returns without waiting. Questions whose answers are in the
        journal are not sent.

        Raises: ValueError if the judge must see an example's answer and there is none.
        """
        questions = [
            self._grading.questions(self.config.grading, g.example, [self._shown(text) for text in g.texts])
            for g in groups
        ]
        bodies = [[body_of(self.config, question.chat) for question in group] for group in questions]
        keys = [
            [f"{''.join(f'{int(word):08x}' for word in group.uid)}/{i}/{hashlib.sha256(body).hexdigest()}"
             for i, body in enumerate(group_bodies)] for group, group_bodies in zip(groups, bodies)
        ]  # fmt: skip
        recall = lambda key: None if self._journal is None else self._journal.recall(key)
        recorded = [[recall(key) for key in group_keys] for group_keys in keys]
        pending = [
            body
            for group_bodies, group_recorded in zip(bodies, recorded)
            for body, verdicts in zip(group_bodies, group_recorded)
            if verdicts is None
        ]
        requests = iter(self.client.ask(pending))
        asked = [
            [
                _Asked(key, verdicts, next(requests) if verdicts is None else None)
                for key, verdicts in zip(group_keys, group_recorded)
            ]
            for group_keys, group_recorded in zip(keys, recorded)
        ]
        return Ticket(groups, questions, asked)

    def collect(self, ticket: Ticket, processes: Processes = ONE) -> Graded:
        """Waits for the answers, writes them to the journal and returns the scores, rows of a group adjacent.

        Args:
          processes: those that share a batch, each with its own groups. Judge.stop_above applies to the questions of
            all of them, so either all stop or none.

        Raises:
          StopRequested: `stop` returned True. Nothing of the batch is in the journal; answers so far are in the cache.
          JudgeStopped: more than Judge.stop_above of the questions have no answer. The journal and cache are as above.
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
        self._check_lost([answer for group in verdicts for answer in group], processes)
        self.client.sync()
        if self._journal is not None:
            self._journal.keep(
                (asked.key, answer)
                for group, answers in zip(ticket.asked, verdicts)
                for asked, answer in zip(group, answers)
                if asked.recorded is None
            )
        return self._graded(ticket, verdicts, waited)

    def close(self) -> None:
        """Aborts the requests in flight and closes the files."""
        self.client.close()
        if self._journal is not None:
            self._journal.close()

    def _shown(self, text: str) -> str | None:
        return text if len(text) <= self.config.max_characters else None

    def _verdicts(self, asked: _Asked) -> tuple[Verdict, ...]:
        """Returns the numbers of an answer as verdicts, or one verdict with the reason that there is no answer."""
        if asked.recorded is not None:
            return asked.recorded
        if asked.request.content is None:
            return (Verdict(Status.INFRA_ERROR, None, asked.request.problem),)
        return tuple(
            Verdict(Status.CORRECT if number > 0 else Status.WRONG, number)
            for number in numbers_of(self.config, asked.request.content)
        )

    def _check_lost(self, verdicts: Sequence[tuple[Verdict, ...]], processes: Processes) -> None:
        problems = [answer[0].detail for answer in verdicts if not answer[0].status.scorable]
        local = {"asked": len(verdicts), "lost": len(problems), "first": problems[0] if problems else None}
        every = processes.exchange(f"lost by {self.config.name}", local)
        asked, lost = (sum(each[name] for each in every) for name in ("asked", "lost"))
        if is_above(lost, asked, self.config.stop_above):
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
        for group, questions, answers in zip(ticket.groups, ticket.questions, verdicts):
            numbers = [tuple(v.reward for v in answer) if answer[0].status.scorable else None for answer in answers]
            scored = self._grading.scores(self.config.grading, questions, numbers, len(group.texts))
            for row, (text, values) in enumerate(zip(group.texts, scored)):
                status, problem = Status.CORRECT, ""
                if self._shown(text) is None:
                    limit = self.config.max_characters
                    status, problem = Status.FORBIDDEN, f"{len(text)} characters; Judge.max_characters is {limit}"
                elif math.isnan(values[0]):
                    failed = (
                        answer[0].detail
                        for question, answer, number in zip(questions, answers, numbers)
                        if number is None and row in question.rows
                    )
                    status, problem = Status.INFRA_ERROR, next(failed, "there is no other completion to compare with")
                rows.append(values)
                problems.append(problem and f"{self.config.name}: {problem}")
                statuses.append(status)
        weights = (self.config.weight, *(0.0 for _ in self.names[1:]))
        return Graded(self.names, weights, rows, problems, statuses, self._metrics(waited))

    def _metrics(self, waited: float) -> dict[str, float]:
        """Returns counts, cost and waiting time since the last batch. All of them vary from run to run."""
        now = collections.Counter(self.client.counts)
        new = {name: now[name] - self._reported[name] for name in COUNTED}
        self._reported = now
        prefix, c = f"judge/{self.config.name}", self.config
        cost = (new["prompt_tokens"] * c.input_price + new["completion_tokens"] * c.output_price) / 1e6
        counts = {f"host/{prefix}/{name}": float(count) for name, count in new.items()}
        return {**counts, f"host/{prefix}/cost": cost, f"time/{prefix}/wait_seconds": waited}


def open_judges(
    configs: Sequence[Judge],
    folder: pathlib.Path,
    stop: Stop = never,
    *,
    still_asked: Collection[str],
    index: int = 0,
    count: int = 1,
) -> list[OpenJudge]:
    """Returns the judges of the run in `folder`, after asking one test question of each that is still asked.

    Args:
      still_asked: names of the judges of the stages that are not finished; a run needs no other.
      index, count: the process's index and the number of processes. Each process asks about its share of the prompts
        and keeps the answers in separate files.

    Raises: ValueError if a judge gives no valid answer; StopRequested if `stop` returns True.
    """
    with contextlib.ExitStack() as stack:
        opened = []
        for config in configs:
            if config.name in still_asked:
                preflight(config, stop)
            opened.append(open_judge(config, folder / FOLDER, stop, index=index, count=count))
            stack.callback(opened[-1].close)
        stack.pop_all()
        return opened


def open_judge(config: Judge, folder: pathlib.Path, stop: Stop = never, *, index: int = 0, count: int = 1) -> OpenJudge:
    """Returns a judge whose journal and cached answers are in `folder`. Sends no request.

    Each of several processes gets an equal part of the limits. A process reads the journals of all processes, even
    those from before a resume with another number of processes, and writes only its own.
    """
    suffix = f"-{index}" if index else ""
    with contextlib.ExitStack() as stack:
        client = open_client(config, folder / f"{config.name}.answers{suffix}.jsonl", count)
        stack.callback(client.close)
        path = folder / f"{config.name}.journal{suffix}.jsonl"
        others = sorted(set(folder.glob(f"{config.name}.journal*.jsonl")) - {path})
        journal = Journal(path, others)
        stack.callback(journal.close)
        stack.pop_all()
        return OpenJudge(config, client, journal, stop)


def open_client(config: Judge, answers: pathlib.Path, count: int = 1) -> Client:
    """Returns a client for a judge that caches valid answers in a file.

    Args:
      count: the number of clients that run at the same time; each gets an equal part of the rate limits and of the
        concurrency.
    """
    endpoint, part = endpoint_of(config), lambda limit: None if limit is None else limit / count
    limit = RateLimit(part(config.requests_per_second), part(config.tokens_per_minute))
    check = lambda content: numbers_of(config, content)
    limits = limits_of(config)._replace(concurrency=max(1, config.concurrency // count))
    return Client(endpoint, check, limits, limit, AnswerCache(answers))


def preflight(config: Judge, stop: Stop = never) -> None:
    """Asks a judge one question of the configured kind.

    Raises: ValueError if its key's variable is not set, or it gives no answer or no valid one; StopRequested if `stop`
    returns True.
    """
    if config.api_key_env is not None and config.api_key_env not in os.environ:
        raise ValueError(f"the environment variable {config.api_key_env}, which Judge.api_key_env names for the API "
                         "key, is not set")  # fmt: skip
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
        advice = ""
        if "</think> without" in request.problem:
            advice = (
                ". If its chat template writes the <think>, start the server with its reasoning parser (vLLM, SGLang: "
                "--reasoning-parser), or turn thinking off, as some models do for Judge.extra_body = "
                "{'chat_template_kwargs': {'enable_thinking': False}}"
            )
        elif client.counts[Failure.MALFORMED_ANSWER] and config.response_format is None:
            advice = ". Most servers can be asked to enforce the form: Judge.response_format = 'json_schema'"
        elif client.counts[Failure.REJECTED]:
            advice = ". Judge.address is the base URL, which often ends in /v1; Judge.extra_body changes what is sent"
        raise ValueError(
            f"the judge {config.name!r} (Judge.model = {config.model!r} at {config.address}) cannot be used: "
            f"{request.problem}{advice}"
        )


def endpoint_of(config: Judge) -> Endpoint:
    """Returns a judge's endpoint, with its key if the variable is set, which `preflight` checks."""
    return Endpoint(config.address, None if config.api_key_env is None else os.environ.get(config.api_key_env))


def limits_of(config: Judge) -> RequestLimits:
    limits = RequestLimits(**{name: getattr(config, name) for name in RequestLimits._fields})
    sent = [config.extra_body[name] for name in LENGTHS if config.extra_body.get(name) is not None]
    return limits._replace(max_tokens=sent[0]) if sent else limits


def numbers_of(config: Judge, content: str) -> Numbers:
    """Returns the numbers in an answer. Raises JudgeError if the answer does not fit the schema."""
    grading = GRADINGS[type(config.grading)]
    return grading.numbers(config.grading, read_answer(content, grading.schema(config.grading)))


def body_of(config: Judge, chat: Chat) -> bytes:
    """Returns the body of a request: deterministic bytes for a question."""
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
    body |= config.extra_body
    return json.dumps({name: value for name, value in body.items() if value is not None}, sort_keys=True).encode()
