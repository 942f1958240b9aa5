"""summary.json: how a run ended, for checks from outside."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from jrl import paths

INTERVAL = ("mean", "low", "high", "n")


def write_summary(
    path: str | os.PathLike[str],
    *,
    steps: int,
    seconds: Mapping[str, float],
    evals: Mapping[str, Mapping[str, Any]],
    tokens_per_second: float | None,
    peak_bytes: int | None,
    goodput: Mapping[str, Any] | None = None,
    best: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes and returns {"steps","seconds","eval","tokens_per_second","peak_bytes","goodput","best"}.

    Args:
      seconds: "total" and its parts by name.
      evals: name ("before_rl", "after_rl") -> at least mean, low, high, n. Evaluations that did not run are absent.
      tokens_per_second: sampled tokens over the time of RL; None where nothing was sampled.
      peak_bytes: of the whole process tree; None where it cannot be read.
      goodput: as `jrl.run.report.goodput` has it; None: a member of a population.
      best: "step" and "mean" of the saved step with the highest held-out accuracy; None: no saved step was evaluated,
        or not as the run evaluates now.
    Raises ValueError for a missing key. A number that is not finite becomes null.
    """
    if "total" not in seconds:
        raise ValueError(f"summary seconds lack 'total'; got {sorted(seconds)}")
    for name, numbers in evals.items():
        if missing := [key for key in INTERVAL if key not in numbers]:
            raise ValueError(f"summary evaluation {name!r} lacks {', '.join(missing)}")
    summary = finite(
        {
            "steps": steps,
            "seconds": dict(seconds),
            "eval": {name: dict(numbers) for name, numbers in evals.items()},
            "tokens_per_second": tokens_per_second,
            "peak_bytes": peak_bytes,
            "goodput": goodput,
            "best": best,
        }
    )
    paths.write_bytes_atomic(path, json.dumps(summary, indent=2, allow_nan=False).encode() + b"\n")
    return summary


def read_summary(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns what `write_summary` wrote. Raises ValueError naming the file if that was changed into something else."""
    try:
        summary = paths.read_object(path)
        means = [result["mean"] for result in summary["eval"].values()]
        numbers = [summary["steps"], summary["seconds"]["total"], *(mean for mean in means if mean is not None)]
        if any(type(number) not in (int, float) for number in numbers):
            raise ValueError("its steps, its seconds or the mean of an evaluation is not a number")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged ({paths.first_line(error)}). Put a good copy back, or remove it: `jrl train` with "
            "the same configuration and --run writes it again"
        ) from error
    return summary


def finite(value: Any) -> Any:
    """Returns a JSON value with null in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
