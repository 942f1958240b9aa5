"""When the next request may be sent, by hand."""

from __future__ import annotations

from jrl.tasks.judges.client import MOST_BACKOFF_SECONDS, backoff
from jrl.tasks.judges.rate_limit import RateLimit


def test_requests_are_spaced_evenly():
    limit = RateLimit(4.0, None)  # one each 0.25 s
    assert limit.wait(10.0, 5) == 0
    limit.take(10.0, 5)
    assert limit.wait(10.0, 5) == 0.25
    assert limit.wait(10.2, 5) == 10.25 - 10.2
    assert limit.wait(10.25, 5) == 0
    limit.take(11.0, 5)  # a pause saves nothing up
    assert limit.wait(11.0, 5) == 0.25
    limit.take(11.0, 5)  # one that does not wait: the next one does
    assert limit.wait(11.0, 5) == 0.5


def test_tokens_come_from_a_bucket_of_a_minute():
    limit = RateLimit(None, 600)  # 10 a second, at most 600
    limit.take(0.0, 500)
    assert limit.wait(0.0, 100) == 0
    assert limit.wait(0.0, 150) == 5.0  # 50 are missing
    assert limit.wait(5.0, 150) == 0
    limit.take(5.0, 150)  # 100 + 50 - 150 = 0
    limit.correct(150, 30)  # 120 were not used
    assert limit.wait(5.0, 120) == 0
    assert limit.wait(5.0, 130) == 1.0
    assert limit.wait(1000.0, 700) == 0  # more than the bucket holds: when it is full
    limit.take(1000.0, 700)
    assert limit.wait(1000.0, 10) == 11.0  # (10 + 100) / 10


def test_what_an_api_counts_wrongly_is_a_minutes_tokens_at_most():
    limit = RateLimit(None, 600)
    limit.take(0.0, 100)
    limit.correct(100, 10**12)
    assert limit.wait(0.0, 0) == 10.0 and limit.wait(0.0, 600) == 70.0  # 600 - 100 - 600 = -100


def test_tokens_that_were_used_beyond_a_minutes_are_waited_for():
    limit = RateLimit(None, 600)
    limit.take(0.0, 6000)
    limit.correct(6000, 6000)
    assert limit.wait(0.0, 6000) == 600.0  # (600 - 600 + 6000) / 10


def test_without_limits_nothing_waits():
    limit = RateLimit(None, None)
    limit.take(0.0, 1e9)
    limit.correct(3, 4)
    assert limit.wait(0.0, 1e9) == 0


def test_backoff_doubles_with_jitter_that_the_request_decides():
    waits = [backoff("ab", tries, 1.0) for tries in range(1, 6)]
    for tries, wait in enumerate(waits, 1):
        assert 2 ** (tries - 2) <= wait < 2 ** (tries - 1)
        assert wait == waits[0] * 2 ** (tries - 1)
    assert len({backoff(f"{i:02x}", 1, 1.0) for i in range(50)}) == 50
    assert MOST_BACKOFF_SECONDS / 2 <= backoff("ab", 10**6, 1.0) < MOST_BACKOFF_SECONDS
