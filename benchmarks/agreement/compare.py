"""One part against its loop on seeded random cases: the largest differences of values and of derivatives."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from benchmarks.agreement import advantage_loops, loss_loops, ours
from benchmarks.agreement.cases import Case, case
from jrl.algos.parts import PARTS, Part
from jrl.ops import stored_advantages

SECTIONS = ("A", "L", "K", "G", "V")
BAR = 1e-5


def parts_compared() -> list[Part]:
    """Returns the parts of the sections that are compared, each function once."""
    parts = {part["function"]: part for part in reversed(PARTS) if part["id"][0] in SECTIONS}
    return list(reversed(parts.values()))


def loop_of(part: Part) -> Any:
    """Returns the loop that computes a part, or None."""
    name = part["function"].rpartition(":")[2]
    return getattr(advantage_loops, name, None) or getattr(loss_loops, name, None)


def cases_of(part: Part, count: int, seed: int) -> list[Case]:
    name = part["function"].rpartition(":")[2]
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return [case(name, part["inputs"], rng) for _ in range(count)]


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Returns the largest |ours - theirs| / max(1, |theirs|); infinite where one is not a number and the other is."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if ours.shape != theirs.shape:
        raise ValueError(f"shapes {ours.shape} and {theirs.shape} are to be compared")
    apart = np.where(np.isnan(ours) & np.isnan(theirs), 0, np.abs(ours - theirs) / np.maximum(1, np.abs(theirs)))
    return float(np.max(np.where(np.isnan(apart), np.inf, apart), initial=0))


def against_loop(part: Part, count: int, seed: int) -> tuple[float, float | None]:
    """Returns the largest differences between a part and its loop: of any output, and of the derivative, if any."""
    cases, loop = cases_of(part, count, seed), loop_of(part)
    expected = [loop(**each) for each in cases]
    # A loop of `loss_loops` that has a derivative returns it last.
    differentiate = loop.__module__ == loss_loops.__name__ and isinstance(expected[0], tuple)
    slopes = np.stack([answer[1] for answer in expected]) if differentiate else None
    outputs = [answer[0] if differentiate else answer for answer in expected]
    outputs = [np.stack(column) for column in zip(*[x if isinstance(x, tuple) else (x,) for x in outputs])]
    if part["function"] == "jrl.ops.stored_advantages:sampling_probabilities":  # on the host, a case at a time
        given = [np.stack([stored_advantages.sampling_probabilities(each["advantage"]) for each in cases])]
        return difference(given[0], outputs[0]), None
    given, given_slopes = ours.answers(part["function"], cases, differentiate)
    value = max(difference(a, b) for a, b in zip(given, outputs, strict=True))
    return value, difference(given_slopes, slopes) if differentiate else None
