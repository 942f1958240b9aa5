"""The result of a verifier for one completion. No JAX: this crosses process boundaries."""

from __future__ import annotations

import dataclasses
import enum


class Status(enum.IntEnum):
    """A closed enum. The first three are scorable. Rows with any other status are masked and counted, never given 0."""

    CORRECT = 0  # reward as given, usually above 0
    WRONG = 1  # the answer was read and is wrong
    UNPARSABLE = 2  # there is no readable answer
    CPU_LIMIT = 3  # the worker exceeded its deadline, of CPU time or of wall time
    MEMORY_LIMIT = 4
    OUTPUT_LIMIT = 5
    CRASH = 6  # the worker died
    FORBIDDEN = 7  # the verifier does not run on this input (unsafe scorer, input above its caps)
    VERIFIER_ERROR = 8  # the verifier raised or returned no number
    INFRA_ERROR = 9  # our fault: no worker was available, or the pool was closed
    PADDING = 10  # a row that only fills a batch

    @property
    def scorable(self) -> bool:
        return self <= Status.UNPARSABLE


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One verifier's result for one completion. `reward` is a finite float if the status is scorable, else None."""

    status: Status
    reward: float | None
    detail: str = ""
    # Rewards of spans of the completion, in addition to `reward`: (end of the span in characters from the start of the
    # completion, its reward). Ends increase, and are above 0 unless the completion is empty. Only verifiers that
    # declare it (Verifier.rewards_spans) return any.
    spans: tuple[tuple[int, float], ...] = ()
