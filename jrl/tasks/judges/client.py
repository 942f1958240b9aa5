"""Concurrent requests to a judge: threads, rate limits, retries. Every request is settled exactly once."""

from __future__ import annotations

import collections
import hashlib
import heapq
import http.client
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jrl.tasks.judges.api import Completion, Connections, Endpoint
from jrl.tasks.judges.cache import AnswerCache
from jrl.tasks.judges.failures import Failure, JudgeError, ServerClosed
from jrl.tasks.judges.rate_limit import RateLimit

MOST_BACKOFF_SECONDS = 60.0
MOST_RETRY_AFTER_SECONDS = 600.0  # a server that asks to wait longer is out of quota
CLOSE_SECONDS = 2.0  # how long `close` waits for the threads after shutting down their connections
REUSE_SECONDS = 2.0  # how long an idle connection is reused; servers close theirs after a few seconds
IDLE_CLOSED_SECONDS = 1.0  # a server that closes the connection later than this has worked on the request
CHARACTERS_PER_TOKEN = 4  # estimate for a request, until the server reports its usage


class RequestLimits(NamedTuple):
    """Concurrency, timeouts and retries of a client."""

    concurrency: int
    timeout_seconds: float  # of one attempt
    attempts: int  # of a request; waiting for a rate limit does not count
    backoff_seconds: float  # wait before the second attempt; it doubles
    patience_seconds: float  # from a request's first attempt until it is given up
    max_tokens: int  # of an answer


class Request:
    """One request body, and once it is settled its answer or why there is none."""

    def __init__(self, body: bytes, key: str):
        self.body = body
        self.key = key  # of the cache
        self.content: str | None = None  # the judge's valid answer
        self.problem = ""  # why there is none
        self.settled = False
        self.attempts = 0  # without those that a rate limit refused
        self.tries = 0  # with those that a rate limit refused
        self.began: float | None = None


class Client:
    """Sends requests to one judge. Must be closed.

    Args:
      read: raises JudgeError for an answer that is not valid.
      cache: of valid answers; None: no cache.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        read: Callable[[str], object],
        limits: RequestLimits,
        limit: RateLimit,
        cache: AnswerCache | None,
    ):
        self.counts: collections.Counter[str] = collections.Counter()  # requests, failures by name, tokens, ...
        self._endpoint, self._read, self._limits, self._limit, self._cache = endpoint, read, limits, limit, cache
        self._lock = threading.RLock()
        self._sendable = threading.Condition(self._lock)  # the client's threads wait on it; one wakes per request
        self._settled = threading.Condition(self._lock)  # callers of `wait` wait on it
        self._waiting: list[tuple[float, int, Request]] = []  # a heap: time it may be sent, order, request
        self._order = itertools.count()
        self._asked: dict[str, Request] = {}  # by key, the requests that are not settled
        self._pause_until = 0.0  # a rate limit pauses all requests
        self._closing = False
        self._failure: BaseException | None = None
        self._connections = Connections(endpoint.connect)
        self._threads = [
            threading.Thread(target=self._run, name=f"jrl-judge-{number}", daemon=True)
            for number in range(limits.concurrency)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, bodies: Sequence[bytes]) -> list[Request]:
        """Returns a request for each body, without waiting for answers. Equal bodies in flight share one request."""
        with self._lock:
            if self._closing:
                raise RuntimeError("the judge's client is closed") from self._failure
            return [self._ask(body) for body in bodies]

    def _ask(self, body: bytes) -> Request:
        key = hashlib.sha256(self._endpoint.address.encode() + b"\0" + body).hexdigest()
        if key in self._asked:
            self.counts["shared"] += 1
            return self._asked[key]
        request = Request(body, key)
        if (cached := self._recall(key)) is not None:
            self.counts["cached"] += 1
            request.content, request.settled = cached, True
            return request
        self.counts["requests"] += 1
        self._asked[key] = request
        self._push(request, 0.0)
        return request

    def wait(self, requests: Sequence[Request], seconds: float) -> bool:
        """Returns whether all requests are settled, after at most `seconds`.

        Raises: OSError if a thread of the client failed with one (a full disk); RuntimeError if it failed otherwise.
        """
        with self._lock:
            done = lambda: self._failure is not None or all(request.settled for request in requests)
            self._settled.wait_for(done, seconds)
            if isinstance(self._failure, OSError):
                raise self._failure
            if self._failure is not None:
                raise RuntimeError(f"the judge's client failed: {self._failure!r}") from self._failure
            return done()

    def drop(self, requests: Sequence[Request]) -> None:
        """Gives up requests. Those already sent still write their answers to the cache."""
        with self._lock:
            dropped = set(map(id, requests))
            self._waiting = [entry for entry in self._waiting if id(entry[2]) not in dropped]
            heapq.heapify(self._waiting)
            for request in requests:
                self._asked.pop(request.key, None)

    def sync(self) -> None:
        """Returns once all answers so far are on the disk."""
        if self._cache is not None:
            self._cache.sync()

    def close(self) -> None:
        """Aborts the requests in flight, ends the threads and closes the cache."""
        with self._lock:
            self._closing = True
            self._sendable.notify_all()
        self._connections.cut()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:  # a thread still blocked in a DNS lookup sees that the client is closed and writes nothing
            if self._cache is not None:
                self._cache.close()

    def _recall(self, key: str) -> str | None:
        cached = self._cache.recall(key) if self._cache is not None else None
        if cached is None:
            return None
        try:
            self._read(cached)
        except JudgeError:  # written by an older version
            return None
        return cached

    def _push(self, request: Request, ready: float) -> None:
        heapq.heappush(self._waiting, (ready, next(self._order), request))
        self._sendable.notify()

    # The methods below run in the client's threads.

    def _run(self) -> None:
        connection, idle_since = self._connections.new(self._limits.timeout_seconds), time.monotonic()
        try:
            while (request := self._next()) is not None:
                if time.monotonic() - idle_since > REUSE_SECONDS:
                    connection.close()
                completion = None
                try:
                    completion = self._post(connection, request)
                    self._read(completion.content)
                    error = None
                except JudgeError as caught:
                    error = caught
                idle_since = time.monotonic()
                with self._lock:
                    self._settle(request, completion, error)
        except BaseException as failure:  # a bug or a full disk: `wait` must raise it
            with self._lock:
                self._failure = failure
                self._settled.notify_all()
        finally:
            connection.close()

    def _post(self, connection: http.client.HTTPConnection, request: Request) -> Completion:
        """Returns the reply to a request. A server may close an idle connection: the request is then sent again over a
        new one at once. The rate limit counts that, and nothing else does."""
        seconds, is_reused, began = self._limits.timeout_seconds, connection.sock is not None, time.monotonic()
        try:
            return self._endpoint.post(connection, request.body, seconds)
        except ServerClosed:
            if not is_reused or self._closing or time.monotonic() - began > IDLE_CLOSED_SECONDS:
                raise
        with self._lock:
            self._limit.take(time.monotonic(), self._tokens(request))
        return self._endpoint.post(connection, request.body, seconds)

    def _next(self) -> Request | None:
        """Waits for the next request that may be sent and returns it; None if the client is closing."""
        with self._lock:
            while not self._closing:
                if not self._waiting:
                    self._sendable.wait()
                    continue
                now = time.monotonic()
                ready, _, request = self._waiting[0]
                tokens = self._tokens(request)
                delay = max(ready - now, self._pause_until - now, self._limit.wait(now, tokens))
                if delay > 0:
                    self._sendable.wait(min(delay, threading.TIMEOUT_MAX))
                    continue
                heapq.heappop(self._waiting)
                if self._waiting:  # another thread must wait for the next one
                    self._sendable.notify()
                self._limit.take(now, tokens)
                request.tries += 1
                request.began = request.began or now
                self.counts["attempts"] += 1
                return request
        return None

    def _tokens(self, request: Request) -> float:
        return len(request.body) / CHARACTERS_PER_TOKEN + self._limits.max_tokens

    def _settle(self, request: Request, completion: Completion | None, error: JudgeError | None) -> None:
        """Settles a request after an attempt, or queues a retry."""
        if self._closing:
            return
        if completion is not None:
            used = completion.prompt_tokens + completion.completion_tokens
            self.counts["prompt_tokens"] += completion.prompt_tokens
            self.counts["completion_tokens"] += completion.completion_tokens
            if used:
                self._limit.correct(self._tokens(request), used)
            else:
                self.counts["uncounted"] += 1
        if error is None:
            if self._cache is not None:
                self._cache.add(request.key, completion.content)
            request.content = completion.content
            self._finish(request)
            return
        self.counts[error.failure] += 1
        now = time.monotonic()
        asked = error.wait_seconds
        limited = error.failure is Failure.RATE_LIMIT or (asked is not None and error.failure is Failure.SERVER_ERROR)
        request.attempts += not limited
        # Earlier rate limits do not lengthen the backoff of a later failure. Requests that a rate limit refused
        # together are spread out by their jitter.
        failures = request.attempts if not limited else request.tries if asked is None else 1
        delay = (asked or 0.0) + backoff(f"{request.key}/{request.tries}", failures, self._limits.backoff_seconds)
        if limited:
            self._pause_until = max(self._pause_until, now + min(asked or delay, MOST_RETRY_AFTER_SECONDS))
        why = self._given_up(request, error, now + delay)
        if why is not None:
            request.problem = f"{error.detail}{why}"
            self._finish(request)
            return
        self.counts["retries"] += 1
        self._push(request, now + delay)

    def _given_up(self, request: Request, error: JudgeError, ready: float) -> str | None:
        """Returns why a request is not retried after an error, as the end of a message; None if it is retried."""
        if error.failure is Failure.REJECTED:
            return ""
        if request.attempts >= self._limits.attempts:
            return f" (attempt {request.attempts} of {self._limits.attempts})"
        if error.wait_seconds is not None and error.wait_seconds > MOST_RETRY_AFTER_SECONDS:
            return f" (it asks to wait {error.wait_seconds:.0f} s)"
        if ready - request.began > self._limits.patience_seconds:
            return f" (given up after {self._limits.patience_seconds:g} s)"
        return None

    def _finish(self, request: Request) -> None:
        request.settled = True
        self._asked.pop(request.key, None)
        self._settled.notify_all()


def backoff(name: str, failures: int, first: float) -> float:
    """Returns the seconds to wait before a retry: first * 2^(failures - 1), at most a minute, times a jitter factor in
    [0.5, 1) derived from `name`, which identifies the request and the try. Requests that failed together are not
    retried together."""
    jitter = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) / 2**32
    return min(MOST_BACKOFF_SECONDS, first * 2 ** (min(failures, 64) - 1)) * (1 + jitter) / 2
