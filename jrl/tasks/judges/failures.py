"""The ways a request to a judge can fail. Each failure is counted; none counts as a score."""

from __future__ import annotations

import enum


class Failure(enum.StrEnum):
    """A closed enum. The values are names in metrics."""

    CONNECTION = "connection"  # no connection, or it broke
    TIMEOUT = "timeout"
    RATE_LIMIT = "rate_limit"  # 429
    SERVER_ERROR = "server_error"  # 5xx, 408, 409, 425
    REJECTED = "rejected"  # any other status but 200: a wrong key, model or request. Not retried
    HTML = "html"  # a web page: the address is not an API's
    MALFORMED_REPLY = "malformed_reply"  # not the JSON of a chat completion
    TRUNCATED = "truncated"  # the judge's answer was truncated at max_tokens
    MALFORMED_ANSWER = "malformed_answer"  # the judge's answer is not the requested JSON object
    OUT_OF_RANGE = "out_of_range"  # it is, but a score is out of range


class JudgeError(Exception):
    """One attempt failed.

    Args:
      detail: a sentence without the API key.
      wait_seconds: how long the server asks to wait; None: not specified.
    """

    def __init__(self, failure: Failure, detail: str, wait_seconds: float | None = None):
        super().__init__(f"{failure}: {detail}")
        self.failure = failure
        self.detail = detail
        self.wait_seconds = wait_seconds


class ServerClosed(JudgeError):
    """The server closed the connection before any of a reply came."""


class JudgeStopped(RuntimeError):
    """Too many of a batch's requests to a judge failed. The batch was not trained on."""
