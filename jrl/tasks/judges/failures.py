"""How a request to a judge fails. Each failure is counted, and none is a score."""

from __future__ import annotations

import enum


class Failure(enum.StrEnum):
    """A closed enum, named as metrics name them."""

    CONNECTION = "connection"  # no connection, or it was cut
    TIMEOUT = "timeout"
    RATE_LIMIT = "rate_limit"  # 429
    SERVER_ERROR = "server_error"  # 5xx, 408, 409, 425
    REJECTED = "rejected"  # any other status but 200: a wrong key, model or request. Not tried again
    HTML = "html"  # a web page: the address is not that of an API
    MALFORMED_REPLY = "malformed_reply"  # not the JSON of a chat completion
    TRUNCATED = "truncated"  # the judge's answer was cut at max_tokens
    MALFORMED_ANSWER = "malformed_answer"  # the judge's answer is not the JSON object that it was asked for
    OUT_OF_RANGE = "out_of_range"  # it is, but a score is not in its range


class JudgeError(Exception):
    """One attempt has failed.

    Args:
      detail: a sentence without the API key.
      wait_seconds: how long the server asks to wait; None: it does not say.
    """

    def __init__(self, failure: Failure, detail: str, wait_seconds: float | None = None):
        super().__init__(f"{failure}: {detail}")
        self.failure = failure
        self.detail = detail
        self.wait_seconds = wait_seconds


class JudgeStopped(RuntimeError):
    """Too much of a batch was lost to a judge that fails. Nothing was learned from the batch."""
