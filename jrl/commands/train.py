"""`jrl train`: trains a policy, or resumes a run."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from jrl.commands import options, start
from jrl.commands.contract import Command
from jrl.commands.exits import exit_code, last_checkpoint, message
from jrl.exit_codes import DONE, NOTHING_TO_DO
from jrl.run.signals import StopRequest, leave_on_second_interrupt, stop_on_signals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a .gin file, or a name from `jrl list configs`; `jrl help "
                        "config` describes every field")  # fmt: skip
    options.add_bindings(parser, "the file")
    parser.add_argument("--run", metavar="DIR", type=options.folder, help="the run's folder, or gs://BUCKET/NAME; an "
                        "existing run is resumed (default: a new folder in runs/, named by the time)")  # fmt: skip
    parser.add_argument("--accept-change", action="store_true",
                        help="continue a run whose configuration, data or parts changed; its manifest "
                             "records the change")  # fmt: skip
    parser.add_argument("--from", metavar="RUN", type=options.folder, dest="begin_from",
                        help="begin a new run with the weights and the tokenizer of another, a folder or "
                        "gs://BUCKET/NAME")  # fmt: skip
    parser.add_argument("--from-step", metavar="N", type=options.step_or_best, dest="begin_from_step",
                        help="with --from: a saved step of that run, or best: the one with the highest held-out "
                             "accuracy (default: the newest)")  # fmt: skip
    parser.add_argument("--profile", metavar="FIRST:LAST", help="write a trace of these steps, such as 3:6, both "
                        "included, to RUN/profile; open it with xprof, TensorBoard or ui.perfetto.dev")  # fmt: skip
    options.add_devices(parser)
    parser.add_argument("--processes", type=int, metavar="N", help="start N processes on this machine that train "
                        "together, each with its own --devices")  # fmt: skip
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="for a run on several machines: where process 0 "
                        "listens. Start the command once on each (not needed on a Cloud TPU slice)")  # fmt: skip
    parser.add_argument("--process-count", type=int, metavar="N", help="with --coordinator: the number of processes")
    parser.add_argument("--process-index", type=int, metavar="I", help="with --coordinator: the index of this process, "
                        "from 0")  # fmt: skip


def train(args: argparse.Namespace) -> int:
    began = time.monotonic()
    if args.processes is not None:
        return train_locally(args)
    if args.process_index is not None:
        args.several = f"process {args.process_index}"
    stop = StopRequest()
    with stop_on_signals(stop), leave_on_second_interrupt(stop.say):
        start.prepare_jax(args)
        from jrl.resolve import load_config

        profile = profiled_steps(args)
        loaded = load_config(args.config, args.bindings)  # reports mistakes before the slow imports below
        from jrl.run.multihost import joined

        outcome = lambda error: (message(error, exit_code(error), last_checkpoint(args)), exit_code(error))
        with joined(args.coordinator, args.process_count, args.process_index, outcome, began=began) as processes:
            from jrl.api import run_folder
            from jrl.api import steps as run
            from jrl.run.agreement import facts
            from jrl.run.bucket_run import open_run_folder
            from jrl.run.stage_steps import ends

            if processes.count > 1:
                args.several = f"process {processes.index}"
            if processes.count > 1 and args.run is None:
                raise ValueError(
                    "a run of several processes needs --run DIR, a folder that all of them see, or --run gs://BUCKET/NAME"
                )
            processes.agree("configuration and code", facts(*loaded, processes))  # before a bucket is written to
            with open_run_folder(run_folder(args.run), processes) as folder:
                args.run, args.committed = folder.path, folder.committed
                before = steps_summarized(args.run)
                num_steps = sum(1 for _ in run(args.config, args.bindings, run=folder, stop=stop, processes=processes,
                                               accept_change=args.accept_change, begin_from=args.begin_from,
                                               begin_from_step=args.begin_from_step, profile=profile))  # fmt: skip
                requested = ends(loaded[0])[-1]
                idle = not num_steps and had_nothing_to_do(requested, before, steps_summarized(args.run))
                return NOTHING_TO_DO if idle else DONE


def profiled_steps(args: argparse.Namespace) -> Any:
    """Returns the steps that --profile names; None without it. Raises ValueError if its value names none."""
    if args.profile is None:
        return None
    from jrl.run.profile import parse_steps

    return parse_steps(args.profile)


def train_locally(args: argparse.Namespace) -> int:
    """Starts the processes of a run on this machine."""
    if args.processes < 1:
        raise ValueError(f"--processes is {args.processes}; it counts processes and must be at least 1")
    if (args.coordinator, args.process_count, args.process_index) != (None, None, None):
        raise ValueError("--processes starts all processes of a run on this machine; leave out --coordinator, "
                         "--process-count and --process-index")  # fmt: skip
    from jrl.resolve import load_config
    from jrl.run.launch import launch

    profiled_steps(args)
    load_config(args.config, args.bindings)
    if args.run is None:
        raise ValueError("a run of several processes needs --run DIR")
    options = {"--devices": args.devices, "--from": args.begin_from, "--from-step": args.begin_from_step,
               "--profile": args.profile}  # fmt: skip
    flags = {"--accept-change": args.accept_change, "--no-compile-cache": args.no_compile_cache,
             "--traceback": args.traceback}  # fmt: skip
    return launch(
        [args.config, *args.bindings, "--run", str(args.run)]
        + [text for name, value in options.items() if value is not None for text in (name, str(value))]
        + [name for name, given in flags.items() if given],
        args.processes,
    )


def steps_summarized(run: Path) -> int | None:
    """Returns the number of steps in summary.json of a finished run; None for a run that has not finished."""
    from jrl import paths
    from jrl.run.report.summary import read_summary

    return read_summary(run / "summary.json")["steps"] if paths.exists(run / "summary.json") else None


def had_nothing_to_do(requested: int, before: int | None, after: int | None) -> bool:
    """Whether a command that took no step had nothing to do: the run had finished before, or has more steps than
    requested. If it has just written the summary, it finished the run.

    Args:
      requested: the number of steps in the configuration.
      before, after: `steps_summarized` of the run, before and after the command.
    """
    return after is not None and (before == after or after > requested)


COMMAND = Command(
    "Train a policy, or resume a run.",
    "jrl train tiny AdamW.learning_rate=1e-3 --run runs/tiny",
    add_arguments,
    train,
)
