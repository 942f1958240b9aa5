"""One part against its loop on seeded random cases: the largest differences of values and of derivatives."""

from __future__ import annotations

import os
import subprocess
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.agreement import advantage_loops, loss_loops, ours, preference_loops
from benchmarks.agreement.cases import Case, case
from benchmarks.agreement.rows import FINISH, PREPARE, Row
from jrl.algos.parts import PARTS, Part
from jrl.ops import stored_advantages

SECTIONS = ("A", "L", "K", "G", "V")
BAR = 1e-5


def parts_compared(sections: Sequence[str] = SECTIONS) -> list[Part]:
    """Returns the parts of the sections that are compared, each function once. How data become rows, and how a step is
    put together, is no formula; what reads a model's hidden states is compared by its own tests, with a head."""
    steps = ("jrl.tasks.data", "jrl.learning")
    formulas = [part for part in PARTS if not part["function"].startswith(steps) and "hidden" not in part["inputs"]]
    parts = {part["function"]: part for part in reversed(formulas) if part["id"][0] in sections}
    return list(reversed(parts.values()))


def preferences_compared() -> dict[str, Part]:
    """Returns the parts of sections P and R that have a loop in `preference_loops`, by the names of their functions or
    of their objectives."""
    parts = {preference_loops.name_of(part): part for part in parts_compared("PR")}
    return {name: part for name, part in parts.items() if preference_loops.comparison_of(name) is not None}


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


def against_preference_loop(part: Part, count: int, seed: int) -> tuple[float, float | None]:
    """Returns the same for a part of section P or R, whose cases are rows of pairs or of answers, or numbers."""
    name = preference_loops.name_of(part)
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    answers = preference_loops.comparison_of(name)(part, count, rng)
    worst = [max(map(difference, a, b), default=0.0) for a, b in answers]
    return worst[0], worst[1] if len(worst) > 1 else None


def part_of(name: str) -> Part:
    return next(part for part in parts_compared() if part["function"].rpartition(":")[2] == name)


def shared_cases(row: Row, count: int, seed: int) -> list[Case]:
    """Returns cases of what a part and a library define alike; masked entries are NaN."""
    rng = np.random.default_rng([seed, zlib.crc32(f"{row.library} {row.name}".encode())])
    inputs = part_of(row.part)["inputs"]
    return [PREPARE[row.prepare](case(row.part, inputs, rng, shared=True), rng) for _ in range(count)]


def library_answers(library: str, cases: dict[str, list[Case]], python: str) -> dict[str, np.ndarray]:
    """Returns what a library gives for the cases of its rows: `row/value`, `row/slope` or `row/failed`."""
    stacked = {}
    for name, each in cases.items():
        for key in each[0]:
            array = np.stack([np.asarray(one[key]) for one in each])
            # These libraries multiply by the mask: what we mark with NaN must be a number there.
            stacked[f"{name}/{key}"] = np.nan_to_num(array, nan=0.0) if array.dtype.kind == "f" else array
    with tempfile.TemporaryDirectory() as folder:
        given, taken = Path(folder) / "cases.npz", Path(folder) / "answers.npz"
        np.savez(given, **stacked)
        clean = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
        clean |= {"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [python, "-m", "benchmarks.agreement.side", str(given), str(taken), library],
            capture_output=True,
            text=True,
            env=clean,
            cwd=folder,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{library}: {done.stderr.strip().splitlines()[-1]}")
        with np.load(taken) as answers:
            return {key: answers[key] for key in answers.files}


def against_library(row: Row, cases: list[Case], answers: dict[str, np.ndarray]) -> tuple[float, float | None]:
    """Returns the largest differences of a row, of values and, if both have one, of derivatives."""
    part = part_of(row.part)
    given, slopes = ours.answers(
        part["function"],
        cases,
        bool(row.differentiate),
        inputs=part["inputs"],
        finish=lambda outputs, one: (
            FINISH[row.finish](outputs[row.output], one) if row.finish else outputs[row.output],
        ),
    )
    value = difference(given[0], answers[f"{row.name}/value"])
    return value, difference(slopes, answers[f"{row.name}/slope"]) if row.differentiate else None
