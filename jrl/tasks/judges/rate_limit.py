"""Rate limit on requests per second and tokens per minute. It reads no clock: the caller passes the time."""

from __future__ import annotations


class RateLimit:
    """Spaces requests evenly and takes their tokens from a bucket that holds one minute's. Times are monotonic seconds.

    Args:
      requests_per_second, tokens_per_minute: None: no limit.
    """

    def __init__(self, requests_per_second: float | None, tokens_per_minute: float | None):
        self._spacing = 0.0 if requests_per_second is None else 1 / requests_per_second
        self._per_second = None if tokens_per_minute is None else tokens_per_minute / 60
        self._capacity = tokens_per_minute or 0.0
        self._next = 0.0  # when the next request may be sent
        self._level, self._at = self._capacity, 0.0  # tokens in the bucket, and the time of that level

    def wait(self, now: float, tokens: float) -> float:
        """Returns the seconds until a request of `tokens` may be sent; 0: now. A request larger than the bucket may be
        sent when the bucket is full."""
        needed = 0.0
        if self._per_second is not None:
            needed = (min(tokens, self._capacity) - self._filled(now)) / self._per_second
        return max(0.0, self._next - now, needed)

    def take(self, now: float, tokens: float) -> None:
        """Counts a request that is sent now, whether or not it may be."""
        self._next = max(self._next, now) + self._spacing
        if self._per_second is not None:
            self._level, self._at = self._filled(now) - tokens, now

    def correct(self, estimated: float, used: float) -> None:
        """Replaces the estimated tokens of a request by the number that the API reports. The correction is at most one
        minute's tokens upward, so a wrong count cannot stall the run."""
        self._level += max(estimated - used, -self._capacity)

    def _filled(self, now: float) -> float:
        return min(self._capacity, self._level + (now - self._at) * self._per_second)
