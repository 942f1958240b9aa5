"""When the next request may be sent: so many a second, so many tokens a minute. Pure: the caller brings the time."""

from __future__ import annotations


class RateLimit:
    """Requests are spaced evenly; tokens come from a bucket that holds a minute's. Times are monotonic seconds.

    Args:
      requests_per_second, tokens_per_minute: None: no limit.
    """

    def __init__(self, requests_per_second: float | None, tokens_per_minute: float | None):
        self._spacing = 0.0 if requests_per_second is None else 1 / requests_per_second
        self._per_second = None if tokens_per_minute is None else tokens_per_minute / 60
        self._capacity = tokens_per_minute or 0.0
        self._next = 0.0  # when the next request may go
        self._level, self._at = self._capacity, 0.0  # tokens in the bucket, and when

    def wait(self, now: float, tokens: float) -> float:
        """Returns the seconds until a request of so many tokens may be sent; 0: now. More than a minute's tokens are
        sent when the bucket is full."""
        needed = 0.0
        if self._per_second is not None:
            needed = (min(tokens, self._capacity) - self._filled(now)) / self._per_second
        return max(0.0, self._next - now, needed)

    def take(self, now: float, tokens: float) -> None:
        """Counts a request that is sent now."""
        self._next = now + self._spacing
        if self._per_second is not None:
            self._level, self._at = self._filled(now) - tokens, now

    def correct(self, estimated: float, used: float) -> None:
        """Replaces the estimated tokens of a request by those that it used, as the API says. It counts at most a
        minute's more: what an API counts wrongly does not end the run."""
        self._level += max(estimated - used, -self._capacity)

    def _filled(self, now: float) -> float:
        return min(self._capacity, self._level + (now - self._at) * self._per_second)
