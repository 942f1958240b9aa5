"""The configuration of a judge."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from typing import Literal

from jrl.tasks.judges.gap import Gap
from jrl.tasks.judges.grade import Grade
from jrl.tasks.judges.hindsight import Hindsight
from jrl.tasks.judges.pairwise import Pairwise
from jrl.tasks.judges.rubric import Rubric
from jrl.tasks.judges.self_reference import SelfReference
from jrl.tasks.rewards.weighted import LARGEST_REWARD

Plain = float | int | str | bool | None
PlainOrList = Plain | tuple[Plain, ...]
OURS = ("messages", "model", "n", "response_format", "stream")  # of a request: other fields set them, or none may
LENGTHS = ("max_completion_tokens", "max_tokens")  # fields of a request that limit an answer, the newer name first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judge:
    """A language model behind an OpenAI-compatible API whose scores are part of the reward."""

    address: str  # base URL of the API, such as 'http://localhost:8000/v1'
    model: str  # its name there
    name: str = "judge"  # in metrics and files; several judges need different ones
    weight: float = 1.0  # of its score in the reward
    # what the judge is asked
    grading: Grade | Rubric | Pairwise | Gap | Hindsight | SelfReference = dataclasses.field(default_factory=Grade)
    api_key_env: str | None = None  # environment variable that holds the API key; None: no key is sent
    temperature: float = 0.0  # of its answers
    max_tokens: int = 512  # of its answers
    # More fields of every request, as in OpenAI's client, such as {'chat_template_kwargs': {'enable_thinking': False}}.
    # None leaves out a field that jrl sends. A value is plain, a list of plain ones, or a dict of those.
    extra_body: dict[str, PlainOrList | dict[str, PlainOrList]] = dataclasses.field(default_factory=dict)
    response_format: Literal["json_schema", "json_object"] | None = None  # what the server is asked to enforce
    max_characters: int = 20_000  # of a completion; a longer one is masked
    concurrency: int = 16  # requests in flight, of all processes of the run together; at least one per process
    requests_per_second: float | None = None  # of all processes together; None: no limit
    tokens_per_minute: int | None = None  # of requests and answers, of all processes together; None: no limit
    timeout_seconds: float = 60.0  # of one attempt
    attempts: int = 6  # of a request; waiting for a rate limit does not count
    backoff_seconds: float = 1.0  # before the second attempt; doubles from there, with jitter
    patience_seconds: float = 600.0  # time after which a request is given up, rate limits included
    stop_above: float = 0.25  # the run stops if more than this share of a batch's requests fail
    input_price: float = 0.0  # of a million tokens of requests, for the cost in the metrics
    output_price: float = 0.0  # of a million tokens of answers

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.name):
            raise ValueError(f"Judge.name is {self.name!r}; it names files: 1 to 64 letters, digits, '_' and '-'")
        if not self.model:
            raise ValueError("Judge.model is empty; it is the model's name at the API")
        positive = ("max_tokens", "max_characters", "concurrency", "requests_per_second", "tokens_per_minute",
                    "timeout_seconds", "attempts", "backoff_seconds", "patience_seconds")  # fmt: skip
        for field in positive:
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise ValueError(f"Judge.{field} is {value}; it must be above 0")
        if self.concurrency > MOST_CONCURRENCY:
            raise ValueError(f"Judge.concurrency is {self.concurrency}; at most {MOST_CONCURRENCY} threads are started")
        if not abs(self.weight) <= LARGEST_REWARD:
            raise ValueError(f"Judge.weight is {self.weight}; it must be finite, in float32 too")
        if self.timeout_seconds > threading.TIMEOUT_MAX:
            raise ValueError(f"Judge.timeout_seconds is {self.timeout_seconds}; at most {threading.TIMEOUT_MAX:g} "
                             "seconds can be waited for")  # fmt: skip
        for field in ("temperature", "input_price", "output_price"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"Judge.{field} is {getattr(self, field)}; it must be at least 0")
        if ours := [name for name in OURS if name in self.extra_body]:
            raise ValueError(f"Judge.extra_body has {ours[0]!r}, which jrl sets or needs as it is")
        try:
            json.dumps(self.extra_body, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"Judge.extra_body has what JSON does not have: {error}") from error
        for field in LENGTHS:
            value = self.extra_body.get(field)
            if value is not None and not (type(value) is int and value > 0):
                raise ValueError(f"Judge.extra_body[{field!r}] is {value!r}; it is None or a number of tokens above 0")
        if not 0 <= self.stop_above <= 1:
            raise ValueError(f"Judge.stop_above is {self.stop_above}; it is a share, from 0 to 1")


MOST_CONCURRENCY = 512
