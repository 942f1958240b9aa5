"""Exit codes and messages of the errors that end a command."""

from __future__ import annotations

import argparse
import errno
import os
import traceback
from collections.abc import Mapping

from jrl.device.errors import is_of_device, is_out_of_memory
from jrl.exit_codes import CHECKPOINTS_REMOVED, LOST, OTHER_RUN, PREEMPTED, REFUSED, STOPPED, UNFORESEEN

# By the full name of an exception's class or base class, so that nothing must be imported.
EXITS: Mapping[str, int] = {
    "jrl.config.errors.ConfigError": REFUSED,
    "jrl.plugins.PartError": REFUSED,
    "jrl.run.checkpoints.lock.RunIsHeld": REFUSED,
    "jrl.tasks.wrong_result.WrongResult": STOPPED,
    "jrl.run.identity.RefusedIdentity": OTHER_RUN,
    "jrl.run.bucket_run.ForeignFolder": OTHER_RUN,
    "jrl.run.bucket_run.LeaseLost": STOPPED,
    "jrl.run.records.StopRun": STOPPED,
    "jrl.run.records.Diverged": STOPPED,
    "jrl.run.sampler_devices.WrongWeights": STOPPED,
    "jrl.run.records.CheckpointsRemoved": CHECKPOINTS_REMOVED,
    "jrl.rollout.scoring.ScoringStopped": STOPPED,
    "jrl.tasks.judges.failures.JudgeStopped": STOPPED,
    "jrl.device.program_cache.CompileAfterFreeze": STOPPED,
    "jrl.run.checkpoints.run_state.SaveFailed": STOPPED,
    "jrl.run.checkpoints.run_state.DamagedStep": STOPPED,
    "jrl.run.checkpoints.run_state.NoIntactStep": STOPPED,
    "jrl.run.checkpoints.run_state.StateMismatch": OTHER_RUN,
    "jrl.run.records.Preempted": PREEMPTED,
    "jrl.device.processes.HostLost": LOST,
    "jrl.tasks.stopping.StopRequested": PREEMPTED,
    "jrl.tasks.verifiers.process.TemplateLost": STOPPED,
    "builtins.MemoryError": STOPPED,
}
DEVICE_START = "jax._src.xla_bridge"  # the module that raises when JAX finds no device
LESS_MEMORY = (
    "Compute less at once (Learner.micro_batch_tokens, Sampler.slots, fewer or shorter completions), recompute more "
    "(Decoder.remat), or use more devices; `jrl plan` shows what takes memory."
)
# Errors of a path that the user gave. Any other OSError stops a run that was valid until then.
PATH_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)


def exit_code(error: BaseException) -> int:
    """Returns the exit code of an exception; UNFORESEEN for one without a message for users."""
    if from_other_process(error):
        return error.code
    names = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__]
    for name in names:
        if name in EXITS:
            return EXITS[name]
    if is_of_device(error):
        return STOPPED
    if isinstance(error, OSError):
        return REFUSED if error.errno in PATH_ERRORS else STOPPED
    if isinstance(error, ValueError | ImportError) and _module(error).startswith("jrl."):
        return REFUSED  # raised by jrl itself, so its message is for the user
    if _module(error) == DEVICE_START:
        return REFUSED
    return UNFORESEEN if _part_location(error) is None else STOPPED


def from_other_process(error: BaseException) -> bool:
    """Whether an error reports that another process failed; it has that process's message and exit code."""
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__)
    return "jrl.device.processes.OtherProcessFailed" in names


def last_checkpoint(args: argparse.Namespace) -> str:
    """Returns a sentence about the newest checkpoint of the run that a command trains; "" for other commands."""
    if args.command != "train" or args.run is None or str(args.run).startswith("gs:"):  # not opened yet
        return ""
    if (committed := getattr(args, "committed", None)) is not None:  # a run in a bucket: steps that others can resume
        return f"Last checkpoint: step {max(committed())}." if committed() else "Nothing was committed."
    folder = args.run / "checkpoints"
    readable = os.path.isdir(folder) and os.access(folder, os.R_OK)
    steps = [int(name) for name in os.listdir(folder) if name.isdecimal()] if readable else []
    return f"Last checkpoint: step {max(steps)}." if steps else "Nothing was saved."


def message(error: BaseException, code: int, saved: str = "") -> str:
    """Returns the message of an error.

    Args:
      saved: `last_checkpoint`; "": the command saves nothing.
    """
    text = str(error) or type(error).__name__
    if from_other_process(error):
        return text
    if code == UNFORESEEN:
        return f"Unexpected internal error: {type(error).__name__}: {text}\nThe traceback above shows where it arose."
    if code == STOPPED and not is_of_device(error) and (location := _part_location(error)) is not None:
        again = f" {saved} Fix it and rerun with --accept-change." if saved else ""
        return f"{text if _is_ours(error) else f'{type(error).__name__}: {text}'}\n{location}.{again}"
    if code == REFUSED and isinstance(error, ValueError) and (location := _part_location(error)) is not None:
        return f"{text}\n{location}."
    if isinstance(error, OSError) and code == REFUSED and error.filename is not None and error.strerror is not None:
        names = ", ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        return f"{names}: {error.strerror}"
    if isinstance(error, OSError) and code == STOPPED:
        known = saved if saved and "checkpoint" not in text else ""
        return f"{text.rstrip('.')}. {known} Fix the cause and rerun.".replace("  ", " ")
    if is_out_of_memory(error):
        less = "Ask for fewer or shorter completions at once, or use more devices."
        advice = f"{LESS_MEMORY} {saved}" if saved else less
        return f"Out of device memory: {text.rstrip()}\n{advice}"
    if _module(error) == DEVICE_START:
        asked = os.environ.get("JAX_PLATFORMS", "")
        reason = f": {str(error).splitlines()[0]}" if str(error) else ""
        return f"JAX found no device (JAX_PLATFORMS={asked!r}; JAX_PLATFORMS=cpu always works){reason}"
    return f"out of memory: {text}" if isinstance(error, MemoryError) else text


def _part_location(error: BaseException) -> str | None:
    from jrl.tasks.verifiers.part_location import part_location  # only when something has failed

    return part_location(error)


def _is_ours(error: BaseException) -> bool:
    """Whether an exception is of a class of jrl: its message says all, without the name of the class."""
    return type(error).__module__.partition(".")[0] == "jrl"


def _module(error: BaseException) -> str:
    """Returns the module that raised an exception."""
    frames = list(traceback.walk_tb(error.__traceback__))
    names = frames[-1][0].f_globals if frames else {}
    spec = names.get("__spec__")  # `python -m jrl.cli` is __main__ by name
    return names.get("__name__", "") if spec is None else spec.name
