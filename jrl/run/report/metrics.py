"""metrics.jsonl, the truth about a run: one JSON object a step, "step" first, then the other keys sorted.

Whatever depends on the clock or the machine is under time/ or host/; the rest is bit-identical when a run is repeated
or resumed. Numbers keep every digit (a float32 is written as the double that equals it). JSON has no NaN or infinity:
they are written as the strings "NaN", "Infinity" and "-Infinity", which float() reads. Other sinks get the same rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jrl import paths

_log = logging.getLogger(__name__)
FAILURES_IN_A_ROW = 5  # after so many a sink is left alone, so that a dead service costs a run seconds at most


@dataclasses.dataclass(frozen=True)
class Sink:
    """Somewhere else that rows go. It may fail; the run does not."""

    name: str
    write: Callable[[Mapping[str, Any]], None]
    close: Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Metrics:
    """An open metrics.jsonl. `append(row)` hands the row to the system before it returns. `commit()` forces
    all rows to disk and returns their bytes, and `sha256()` is the hash (hex) of as much: what a checkpoint records."""

    append: Callable[[Mapping[str, Any]], None]
    commit: Callable[[], int]
    sha256: Callable[[], str]
    close: Callable[[], None]


def no_metrics() -> Metrics:
    """Returns metrics that write nothing, for the processes of a run other than the first."""
    return Metrics(append=lambda row: None, commit=lambda: 0, sha256=lambda: "", close=lambda: None)


def open_metrics(
    path: str | os.PathLike[str], offset: int = 0, sinks: Sequence[Sink] = (), sha256: str | None = None
) -> Metrics:
    """Opens metrics.jsonl for appending after cutting it to `offset` bytes (0 for a new run).

    Args:
      sha256: of those bytes, as a checkpoint recorded it; None: a checkpoint of a version that did not.

    Raises ValueError where the file is shorter than `offset`, where `offset` is not at the end of a row, or where the
      rows before it are not those that were saved. The file is then as it was.
    """
    digest = check_committed(path, offset, sha256)
    handle = paths.open_append(path, offset)
    position = offset
    in_a_row = {sink.name: 0 for sink in sinks}
    warned: set[str] = set()

    def append(row: Mapping[str, Any]) -> None:
        nonlocal position
        line = row_line(row)
        with paths.naming(path):
            handle.write(line)
            handle.flush()
        digest.update(line)
        position += len(line)
        for sink in sinks:
            if in_a_row[sink.name] < FAILURES_IN_A_ROW:
                attempt(sink, sink.write, row)

    def attempt(sink: Sink, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
            in_a_row[sink.name] = 0
        except KeyboardInterrupt:  # meant for the run
            raise
        # A sink is foreign code on a foreign service. It may ask the process to end (SystemExit) or cancel tasks of its
        # own (CancelledError). metrics.jsonl has the row already.
        except BaseException as error:
            in_a_row[sink.name] += 1
            if sink.name not in warned:
                warned.add(sink.name)
                _log.warning(
                    "metrics writer %s failed (%s: %s); metrics.jsonl is complete",
                    sink.name,
                    type(error).__name__,
                    error,
                )

    def commit() -> int:
        with paths.naming(path):
            handle.flush()
            os.fsync(handle.fileno())
        return position

    def close() -> None:
        if not handle.closed:
            commit()
            handle.close()
            for sink in sinks:
                attempt(sink, sink.close)

    return Metrics(append=append, commit=commit, sha256=digest.hexdigest, close=close)


def check_committed(path: str | os.PathLike[str], offset: int, sha256: str | None) -> Any:
    """Returns the hash of the first `offset` bytes of metrics.jsonl, to be updated. Changes nothing.

    Args and Raises: as `open_metrics`.
    """
    digest, last, rest = hashlib.sha256(), b"\n", offset
    if offset and paths.exists(path):
        with open(path, "rb") as reader:
            while part := reader.read(min(rest, 1 << 20)):
                digest.update(part)
                last, rest = part[-1:], rest - len(part)
    if rest:
        raise ValueError(
            f"{path} holds {offset - rest} bytes but the checkpoint committed {offset}; the file was cut or replaced"
        )
    if sha256 is not None and digest.hexdigest() != sha256:
        raise ValueError(f"{path} has other rows before byte {offset} than were saved; it is damaged")
    if last != b"\n":
        raise ValueError(f"{path} has no row that ends at byte {offset}; it is not the file that was saved")
    return digest


def row_line(row: Mapping[str, Any]) -> bytes:
    """Returns one line of metrics.jsonl. Raises TypeError or ValueError naming the key that cannot be written."""
    if isinstance(row.get("step"), bool) or not isinstance(row.get("step"), int | np.integer):
        raise ValueError(f"a metrics row needs an integer 'step', got {row.get('step')!r}")
    ordered = {"step": int(row["step"])}
    for key in sorted(row):
        if key != "step":
            ordered[key] = _json_value(key, row[key])
    return json.dumps(ordered, allow_nan=False, separators=(", ", ": ")).encode() + b"\n"


def read_metrics(path: str | os.PathLike[str], last_step: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields the rows up to and with `last_step`. A last line without its end, which a kill may leave, is not a row.

    Raises ValueError naming the line that is not JSON, or has no step.
    """
    if not paths.exists(path):
        return
    lines = paths.read_bytes(path).split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}, is not a metrics row: {error}") from error
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise ValueError(f"{path}, line {number}, is not a metrics row: it has no step")
        if last_step is None or row["step"] <= last_step:
            yield row


def _json_value(key: str, value: Any) -> Any:
    if isinstance(value, str | bool) or value is None:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if np.ndim(value) or not hasattr(value, "__float__"):
        raise TypeError(
            f"metric {key!r} is a {type(value).__name__} of shape {np.shape(value)}; one number or text a key"
        )
    if getattr(value, "dtype", None) is not None and np.issubdtype(np.asarray(value).dtype, np.integer):
        return int(value)
    number = float(value)
    if math.isnan(number):
        return "NaN"
    return number if math.isfinite(number) else ("Infinity" if number > 0 else "-Infinity")
