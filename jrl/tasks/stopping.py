"""How reading and scoring are asked to stop before they are done. No JAX."""

from __future__ import annotations

from collections.abc import Callable

Stop = Callable[[], bool]  # whether to stop, such as the `is_set` of a threading.Event; asked often, so it must be fast


class StopRequested(RuntimeError):
    """The run was asked to stop, and what was under way was given up. Nothing of it remains."""


def never() -> bool:
    """The Stop of what nobody interrupts."""
    return False


def check_stop(stop: Stop, doing: str) -> None:
    """Raises StopRequested where `stop` says so. `doing` completes "asked to stop while"."""
    if stop():
        raise StopRequested(f"asked to stop while {doing}")
