"""The Python API, for notebooks: the same runs as with `jrl train`, with your own parts passed as objects."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from jrl import paths
from jrl.bucket.client import shown, split_address
from jrl.device.compile_cache import use_compile_cache
from jrl.device.processes import ONE, Processes
from jrl.experiment import Config
from jrl.loop import steps as loop_steps
from jrl.plugins import Part, Parts
from jrl.resolve import load_config
from jrl.run.begin_from import request
from jrl.run.bucket_run import RunFolder, open_run_folder
from jrl.run.job import open_job
from jrl.run.profile import Steps
from jrl.run.records import Preempted, Step, note_stop
from jrl.run.signals import StopRequest, stop_on_signals
from jrl.tasks.stopping import StopRequested
from jrl.tools.plan.start import refuse_overflow


def run_folder(run: str | Path | None) -> str | Path:
    """Returns the folder of a run, absolute, or its gs:// address. None: a new one under runs/, named by the time."""
    if run is not None and split_address(run) is not None:
        return shown(run)
    return paths.normalize(run if run is not None else Path("runs") / time.strftime("%Y%m%d-%H%M%S"))


def steps(
    config: str | Path | Config,
    bindings: Sequence[str] = (),
    *,
    run: str | Path | RunFolder | None = None,
    parts: Sequence[Part] = (),
    stop: threading.Event | None = None,
    accept_change: bool = False,
    begin_from: str | Path | None = None,
    begin_from_step: int | Literal["best"] | None = None,
    processes: Processes = ONE,
    profile: Steps | None = None,
) -> Iterator[Step]:
    """Yields the steps of a run when they are done: step.step, step.phase, step.metrics, step.rollout, step.texts.

    Compiled programs are cached as in `jrl train`, unless JAX's cache is already configured.
    A step is yielded once the next one is dispatched, or once it is saved if `Checkpoint.every` says so. Leaving the
    loop early finishes the step in progress, saves and closes the run: its row is in metrics.jsonl, and the same call
    continues after it.

    Args:
      config: a .gin file, the name of a bundled configuration, or a Config.
      bindings: "NAME=VALUE"; they override the file.
      run: the run's folder, or gs://BUCKET/NAME; an existing one is resumed. None: a new folder under runs/, named by
        the time.
      accept_change: resume a run with another configuration, data or parts; its manifest records what changed.
      begin_from: the folder or gs:// address of another run; a new one begins with its weights and tokenizer.
      begin_from_step: a saved step of that run; "best": the one with the highest held-out accuracy; None: the newest.
      processes: the processes that train together, as `jrl.device.joining.join` returns them.
      profile: first and last step to write a trace of, into RUN/profile.
      stop: set it from any thread to save after the current step and raise Preempted, as SIGTERM and Ctrl-C do.
    """
    begin = request(begin_from, begin_from_step)
    job_options = dict(accept_change=accept_change, begin_from=begin, profile=profile)
    with _opened(config, bindings, parts, run, stop, processes, **job_options) as (_, run_steps):
        yield from run_steps


@contextlib.contextmanager
def _opened(
    config: str | Path | Config,
    bindings: Sequence[str],
    parts: Sequence[Part],
    run: str | Path | RunFolder | None,
    stop: threading.Event | None,
    processes: Processes = ONE,
    **job_options: Any,
) -> Iterator[tuple[RunFolder, Iterator[Step]]]:
    """Reads the configuration and opens the run's folder; yields it and the steps of the run. While the folder is open,
    signals set the event. job_options: of `open_job`."""
    resolved, loaded = load_config(config, bindings, parts)
    say = None  # a caller that passed the event reports the stop itself
    if stop is None:
        stop = StopRequest()
        say = stop.say
    use_compile_cache()
    refuse_overflow(resolved, loaded, jax.local_devices(), jax.device_count())
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop_on_signals(stop, say))
        if isinstance(run, RunFolder):
            folder = run
        else:
            folder = stack.enter_context(open_run_folder(run_folder(run), processes))
        run_steps = _steps_in(resolved, loaded, folder, stop, processes=processes, **job_options)
        yield folder, stack.enter_context(contextlib.closing(run_steps))


def _steps_in(
    config: Config, parts: Parts, folder: RunFolder, stop: threading.Event, **job_options: Any
) -> Iterator[Step]:
    """Yields the steps of a run in an open folder."""
    with contextlib.ExitStack() as stack:
        try:
            job = stack.enter_context(open_job(config, parts, folder, stop, **job_options))
        except StopRequested as error:
            raise Preempted(f"{error}; nothing was changed") from error
        if job.stopping():
            raise Preempted("asked to stop before the first step; nothing was changed")
        try:
            yield from loop_steps(job)
        except Preempted:
            raise
        except Exception as error:
            note_stop(job, error)
            raise


def train(
    config: str | Path | Config,
    bindings: Sequence[str] = (),
    *,
    run: str | Path | None = None,
    parts: Sequence[Part] = (),
    stop: threading.Event | None = None,
    accept_change: bool = False,
    begin_from: str | Path | None = None,
    begin_from_step: int | Literal["best"] | None = None,
) -> dict[str, Any]:
    """Trains to the end of the run and returns its summary, as in RUN/summary.json. Arguments as in `steps`."""
    job_options = dict(accept_change=accept_change, begin_from=request(begin_from, begin_from_step))
    with _opened(config, bindings, parts, run, stop, **job_options) as (folder, run_steps):
        for _ in run_steps:
            pass
        return json.loads((folder.path / "summary.json").read_text())
