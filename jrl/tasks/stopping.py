"""Cooperative cancellation of reading and scoring. No JAX."""

from __future__ import annotations

from collections.abc import Callable

Stop = Callable[[], bool]  # whether to stop, such as the `is_set` of a threading.Event; called often: must be fast


class StopRequested(RuntimeError):
    """The run was asked to stop. The operation in progress was abandoned and left nothing behind."""


def never() -> bool:
    """A Stop that is never requested."""
    return False


def check_stop(stop: Stop, doing: str) -> None:
    """Raises StopRequested if `stop` returns True. `doing` completes the phrase "asked to stop while"."""
    if stop():
        raise StopRequested(f"asked to stop while {doing}")
