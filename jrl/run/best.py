"""The best checkpoint of a run: the saved step whose policy was most accurate on held-out prompts (Eval.every)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jrl.run.checkpoints.run_state import newest_intact, read_host
from jrl.run.run_hash import saved_steps

_log = logging.getLogger(__name__)

BEST = "best"  # in place of a step: `--step best`
UNKNOWN = ""  # the identity of an evaluation in a save of an earlier version


class Best(NamedTuple):
    """A saved step and its held-out accuracy. As the highest of many estimates it is biased upward."""

    step: int
    mean: float  # share of correct completions, as in `eval/mean` of metrics.jsonl
    eval_identity: str = UNKNOWN  # of the evaluation that measured it (jrl/run/identity.py)


def is_comparable(best: Best, eval_identity: str) -> bool:
    """Whether a best step was measured by an evaluation of this identity. One of unknown identity counts as such."""
    return best.eval_identity in (UNKNOWN, eval_identity)


def update_best(best: Best | None, step: int, mean: float | None, eval_identity: str) -> Best | None:
    """Returns the best saved step once `step` is saved too; at equal accuracy the earlier one. One that another
    evaluation measured (--accept-change) is replaced: the two accuracies do not compare.

    Args:
      mean: held-out accuracy after `step`; None: it was not evaluated, or no completion could be scored.
      eval_identity: of the evaluation that measured it.
    """
    if mean is None or (best is not None and is_comparable(best, eval_identity) and mean <= best.mean):
        return best
    return Best(step, mean, eval_identity)


def present_best(host: Mapping[str, Any], steps: Collection[int]) -> Best | None:
    """Returns the best step that a save names; None if it names none or that one is gone: a better one took its place,
    and was set aside or damaged since. It may be damaged itself.

    Args:
      host: what the save holds other than arrays.
      steps: the saved steps of its run.
    """
    best = host.get("best")
    return None if best is None or best[0] not in steps else Best(*best)


def saved_step(folder: str | Path, step: int | str, location: str | None = None) -> int:
    """Returns a saved step of a run by its number, or by "best". Raises ValueError if it is not saved.

    Args:
      location: of the run, for messages, where the folder is a local copy of it; None: the folder.
    """
    if step == BEST:
        return best_saved(folder, location).step
    if step not in (steps := saved_steps(folder)):
        raise ValueError(
            f"{location or folder} has no checkpoint of step {step}; there are {', '.join(map(str, steps))}"
        )
    return step


def best_saved(folder: str | Path, location: str | None = None) -> Best:
    """Returns the best saved step of a run folder, as its newest intact save has it. location: as in `saved_step`.
    Raises ValueError if there is none; NoIntactStep if all saves are damaged."""
    steps = saved_steps(folder)
    read = lambda step: (None, read_host(Path(folder) / "checkpoints", step))
    best = present_best(newest_intact(location or folder, steps, read, _log.warning)[2], steps)
    if best is None:
        raise ValueError(
            f"{location or folder} has no best checkpoint: no saved step was evaluated on held-out prompts, or the "
            "best one is gone. A stage evaluates every Eval.every of its own steps, and the run saves every "
            "Checkpoint.every of all steps (the save of a stopped run does not count); let them coincide, or give "
            "the number of a step: "
            f"{', '.join(map(str, steps))}"
        )
    return best
