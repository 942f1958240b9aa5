"""How reading and scoring are asked to stop before they are done. No JAX."""

from __future__ import annotations

from collections.abc import Callable

Stop = Callable[[], bool]  # whether to stop, such as the `is_set` of a threading.Event; asked often, so it must be fast


class StopRequested(RuntimeError):
    """The run was asked to stop, and the operation in progress was abandoned. Nothing of it remains."""


def never() -> bool:
    """A Stop that is never requested."""
    return False


def check_stop(stop: Stop, doing: str) -> None:
    """Raises StopRequested where `stop` returns True. `doing` completes "asked to stop while"."""
    if stop():
        raise StopRequested(f"asked to stop while {doing}")
