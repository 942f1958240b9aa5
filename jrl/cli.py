"""The command line. Nothing here imports JAX before a command needs it: a typo must be refused at once."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import gc
import itertools
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl import __version__, paths
from jrl.device.compile_cache import ENABLED, cache_settings
from jrl.device.errors import is_of_device
from jrl.run.report.text import printable_lines
from jrl.run.signals import INTERRUPTED, StopRequest, leave_on_second_interrupt, stop_on_signals

DONE, UNFORESEEN, REFUSED, OTHER_RUN, STOPPED, NOTHING_TO_DO = 0, 1, 2, 3, 4, 5
CHECKPOINTS_REMOVED, PREEMPTED, LOST = 6, 75, 76

# By the full name of an exception's class or of one above it, so that nothing is imported to find out.
EXITS: Mapping[str, int] = {
    "jrl.config.errors.ConfigError": REFUSED,
    "jrl.plugins.PartError": REFUSED,
    "jrl.run.checkpoints.lock.RunIsHeld": REFUSED,
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
DEVICE_START = "jax._src.xla_bridge"  # where an error arises when JAX finds no device
# What is wrong with a path that was given. Any other error of the system stops a run that was sound until then.
PATH_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)

MOST_CPU_DEVICES = 16  # virtual ones that a population starts unasked, one a core: each holds what members share
MARKS = {True: "ok", False: "!!", None: "--"}  # of the findings of `jrl doctor`

EXIT_CODES = """exit codes:
  0   done
  1   unexpected internal error
  2   the configuration or an input is refused; the message says where
  3   the folder contains another run, or files that are not a run
  4   stopped by an error; fix the cause and rerun to continue from the last checkpoint (jrl doctor: something is wrong)
  5   nothing to do: the run already has all the steps asked for
  6   the run's checkpoints were removed; nothing was changed
  75  stopped on request (SIGTERM, Ctrl-C) and saved; rerun to continue
  76  another process of the run is gone or does not answer; rerun all to continue from the last checkpoint
  130 stopped at once (a second Ctrl-C); rerun to continue from the last checkpoint"""


@dataclasses.dataclass(frozen=True)
class Command:
    """One command: what `jrl --help` says of it, its arguments, and what it does (returns an exit code)."""

    summary: str
    example: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Errors are one message on standard error."""
    try:
        code = _run(argv)
        flush_output()
        return code
    except BrokenPipeError:  # of help, before there is a command
        nobody_reads()
        return DONE


def _run(argv: Sequence[str] | None) -> int:
    if argv is None:
        # What a command traces and compiles stays: to look through it again and again is a tenth of a short run.
        gc.set_threshold(50_000, 10, 10)
    argv = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="jrl: %(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("absl").setLevel(logging.ERROR)
    if not argv or argv[0] in ("-h", "--help") or argv == ["help"]:
        print(overview())
        return DONE if argv else REFUSED
    if argv[0] in ("-V", "--version"):
        print(f"jrl {__version__}")
        return DONE
    if argv[0] == "help" and argv[1] in COMMANDS:
        argv = [*argv[1:], "--help"]
    name = argv[0]
    if name not in COMMANDS:
        return unknown_command(name, COMMANDS)
    if name == "help" and argv[1] != "config" and not argv[1].startswith("-"):
        return unknown_command(argv[1], (*COMMANDS, "config"))
    parser = parser_of(name)
    try:
        args = parser.parse_intermixed_args(argv[1:])
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return guarded(COMMANDS[name].run, args)


def flush_output() -> None:
    if sys.stdout is not None:  # None: started with it closed
        sys.stdout.flush()


def nobody_reads() -> None:
    """Sends to nowhere what is left to print: the reader of a pipe has left, and there is nothing to say."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def unknown_command(name: str, known: Iterable[str]) -> int:
    from jrl.config.errors import nearest

    guess = nearest(name, known)
    hint = f"; did you mean {guess}?" if guess else ""
    print(f"jrl: unknown command {name!r}{hint or '.'} Available: {', '.join(known)}", file=sys.stderr)
    return REFUSED


def guarded(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Runs a command; an error becomes its exit code and one message."""
    try:
        code = run(args)
        flush_output()
        return code
    except KeyboardInterrupt:
        print(f"jrl: interrupted. {last_checkpoint(args)}", file=sys.stderr)
        return ended(args, INTERRUPTED)
    except BrokenPipeError:
        nobody_reads()
        return DONE
    except Exception as error:
        code = exit_code(error)
        several = getattr(args, "several", None)
        speaker = "jrl" if several is None else f"jrl, {several}"
        # A verifier's error may quote what a model wrote: no line of it may command the terminal.
        text = printable_lines(message(error, code, last_checkpoint(args)))
        with contextlib.suppress(OSError):  # a log on the disk that is full
            if (code == UNFORESEEN and not is_told(error)) or args.traceback:
                traceback.print_exc()
            print(f"{speaker}: {text}", file=sys.stderr)
        return ended(args, code)


def ended(args: argparse.Namespace, code: int) -> int:
    """Returns the exit code of a command that has failed. One of several processes ends here: what JAX would wait for
    when a process ends may never come."""
    if getattr(args, "several", None) is not None:
        from jrl.device.watchdog import leave

        leave(code)
    return code


def is_told(error: BaseException) -> bool:
    """Whether another process has failed, with this message and exit code."""
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__)
    return "jrl.device.processes.OtherProcessFailed" in names


def exit_code(error: BaseException) -> int:
    """Returns the exit code of an exception; UNFORESEEN for one that nobody wrote for a reader."""
    if is_told(error):
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
        return REFUSED  # raised by jrl itself, so that the message was written for whoever reads it
    if _module(error) == DEVICE_START:
        return REFUSED
    return UNFORESEEN if part_place(error) is None else STOPPED


def part_place(error: BaseException) -> str | None:
    """Returns the line of the user's own part, or of a module that it imports, that an exception comes from, "FILE,
    line N, in FUNCTION"; None where jrl's own code was called last, of the two."""
    from jrl.tasks.verifiers.source import is_of_part

    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if is_of_part(frame.f_globals):
            return f"{frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name}"
        if frame.f_globals.get("__name__", "").partition(".")[0] == "jrl":
            return None
    return None


def last_checkpoint(args: argparse.Namespace) -> str:
    """Returns a sentence on the newest save of the run that a command trains, "" for the other commands."""
    if args.command != "train" or args.run is None or str(args.run).startswith("gs:"):  # not opened so far
        return ""
    if (committed := getattr(args, "committed", None)) is not None:  # of a run in a bucket: what others can go on from
        return f"Last checkpoint: step {max(committed())}." if committed() else "Nothing was committed."
    folder = args.run / "checkpoints"
    readable = os.path.isdir(folder) and os.access(folder, os.R_OK)
    steps = [int(name) for name in os.listdir(folder) if name.isdecimal()] if readable else []
    return f"Last checkpoint: step {max(steps)}." if steps else "Nothing was saved."


def message(error: BaseException, code: int, saved: str = "") -> str:
    """Returns the message of an error.

    Args:
      saved: a sentence on what was saved before, "" where the command saves nothing.
    """
    text = str(error) or type(error).__name__
    if is_told(error):
        return text
    if code == UNFORESEEN:
        return f"Unexpected internal error: {type(error).__name__}: {text}\nThe traceback above shows where it arose."
    if code == STOPPED and (place := part_place(error)) is not None:
        again = f" {saved} Fix it and rerun with --accept-change." if saved else ""
        return f"{type(error).__name__}: {text}\nIt was raised by your own {place}.{again}"
    if isinstance(error, OSError) and code == REFUSED and error.filename is not None and error.strerror is not None:
        names = ", ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        return f"{names}: {error.strerror}"
    if isinstance(error, OSError) and code == STOPPED:
        known = saved if saved and "checkpoint" not in text else ""
        return f"{text.rstrip('.')}. {known} Fix the cause and rerun.".replace("  ", " ")
    if _module(error) == DEVICE_START:
        asked = os.environ.get("JAX_PLATFORMS", "")
        reason = f": {str(error).splitlines()[0]}" if str(error) else ""
        return f"JAX found no device (JAX_PLATFORMS={asked!r}; JAX_PLATFORMS=cpu always works){reason}"
    return f"out of memory: {text}" if isinstance(error, MemoryError) else text


def _module(error: BaseException) -> str:
    """The module that an exception was raised in."""
    frames = list(traceback.walk_tb(error.__traceback__))
    names = frames[-1][0].f_globals if frames else {}
    spec = names.get("__spec__")  # `python -m jrl.cli` is __main__ by name
    return names.get("__name__", "") if spec is None else spec.name


def prepare_jax(args: argparse.Namespace, platform: str | None = None, devices: int | None = None) -> None:
    """Sets what JAX reads from the environment when it starts. What the user has set stays.

    Args:
      platform: the only platform the command may start; None: JAX's choice.
      devices: virtual ones where that platform is a CPU and the user has set none; None: one.
    """
    environment, flag = os.environ, "--xla_force_host_platform_device_count"
    asked = getattr(args, "devices", None)
    if asked is not None:
        if asked < 1:
            raise ValueError(f"--devices is {asked}; it counts virtual CPU devices and must be at least 1")
        platform, devices = "cpu", asked
    elif flag in environment.get("XLA_FLAGS", ""):
        devices = None  # the user has set them
    if devices is not None:
        flags = [f for f in environment.get("XLA_FLAGS", "").split() if not f.startswith(flag)]
        environment["XLA_FLAGS"] = " ".join([*flags, f"{flag}={devices}"])
    if platform is not None:
        environment["JAX_PLATFORMS"] = platform
    if flag in environment.get("XLA_FLAGS", ""):
        # With fewer threads than devices, an executable out of the compilation cache deadlocks in its collectives.
        environment["NPROC"] = str(max(16, 2 * (devices or 1)))
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if getattr(args, "no_compile_cache", False):
        environment[ENABLED] = "false"
    environment.update(cache_settings(environment))


def cores() -> int:
    """Returns how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reading_bar() -> Callable[[int, int], None] | None:
    """Returns what shows (bytes read, bytes in all) of published weights; None without a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    from jrl.run.report.text import bar

    def show(done: int, total: int) -> None:
        end = "\n" if done >= total else ""
        print(f"\rreading {total / 1e9:.1f} GB of weights {bar(done, total)}", end=end, file=sys.stderr, flush=True)

    return show


# The commands


def train(args: argparse.Namespace) -> int:
    began = time.monotonic()
    if args.processes is not None:
        return train_locally(args)
    if args.process_index is not None:
        args.several = f"process {args.process_index}"
    stop = StopRequest()
    with stop_on_signals(stop), leave_on_second_interrupt(stop.say):
        prepare_jax(args)
        from jrl.resolve import load_config

        profile = profiled_steps(args)
        loaded = load_config(args.config, args.bindings)  # a mistake is refused before the slow imports below
        from jrl.run.multihost import joined

        outcome = lambda error: (message(error, exit_code(error), last_checkpoint(args)), exit_code(error))
        with joined(args.coordinator, args.process_count, args.process_index, outcome, began=began) as processes:
            from jrl.api import run_folder
            from jrl.api import steps as run
            from jrl.run.agreement import facts
            from jrl.run.bucket_run import open_run_folder

            if processes.count > 1:
                args.several = f"process {processes.index}"
            if processes.count > 1 and args.run is None:
                raise ValueError(
                    "a run of several processes needs --run DIR, a folder that all of them see, or --run gs://BUCKET/NAME"
                )
            processes.agree("configuration and code", facts(*loaded, processes))  # before a bucket is written to
            with open_run_folder(run_folder(args.run), processes) as folder:
                args.run, args.committed = folder.path, folder.committed
                had = steps_summarized(args.run)
                made = sum(1 for _ in run(args.config, args.bindings, run=folder, stop=stop, processes=processes,
                                          accept_change=args.accept_change, begin_from=args.begin_from,
                                          profile=profile))  # fmt: skip
                asked = sum(stage.steps for stage in loaded[0].stages)
                return NOTHING_TO_DO if not made and had_nothing_to_do(asked, had, steps_summarized(args.run)) else DONE


def profiled_steps(args: argparse.Namespace) -> Any:
    """Returns the steps that --profile names; None without. Raises ValueError for what names none."""
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
    options = {"--devices": args.devices, "--from": args.begin_from, "--profile": args.profile}
    flags = {"--accept-change": args.accept_change, "--no-compile-cache": args.no_compile_cache,
             "--traceback": args.traceback}  # fmt: skip
    return launch(
        [args.config, *args.bindings, "--run", str(args.run)]
        + [text for name, value in options.items() if value is not None for text in (name, str(value))]
        + [name for name, given in flags.items() if given],
        args.processes,
    )


def steps_summarized(run: Path) -> int | None:
    """Returns the steps of a run that has ended, by its summary.json; None for one that has not."""
    return paths.read_object(run / "summary.json")["steps"] if paths.exists(run / "summary.json") else None


def had_nothing_to_do(asked: int, before: int | None, after: int | None) -> bool:
    """Whether a start that made no step had nothing to do: the run had ended with as many steps, or has more than were
    asked for. One that only its end was missing from has been ended.

    Args:
      before, after: `steps_summarized` of the run.
    """
    return after is not None and (before == after or after > asked)


def sweep(args: argparse.Namespace) -> int:
    stop = StopRequest()
    with stop_on_signals(stop, stop.say):
        # Its settings, and the compilation cache, are those of the members too.
        prepare_jax(args, devices=min(cores(), MOST_CPU_DEVICES) if args.population else None)
        from jrl.tools.sweep import sweeping
        from jrl.tools.sweep.comparison import table
        from jrl.tools.sweep.launch import train_members
        from jrl.tools.sweep.members import read_sweep

        if not args.print:
            sweeping.check_is_local(args.out)
        spec = read_sweep(args.config, args.bindings, args.how, args.count, args.seed)
        options = sweeping.ComparisonOptions(tuple(args.metric), tuple(args.by), args.baseline, args.statistic)
        sweeping.check_options(spec, args.out, options)
        train_options = [*(["--devices", str(args.devices)] if args.devices is not None else []),
                         *(["--no-compile-cache"] if args.no_compile_cache else []),
                         *(["--accept-change"] if args.accept_change else [])]  # fmt: skip
        commands = sweeping.commands_of(spec, args.out, train_options)
        if args.population and (args.print or args.jobs > 1):
            raise ValueError(f"{'--print' if args.print else '--jobs'} is for members in processes of their own; leave "
                             "it out, or --population")  # fmt: skip
        if args.print:
            print("\n".join(map(sweeping.shell, commands.values())))
            return DONE
        jobs, how = args.jobs, lambda count: f"{args.jobs} at a time"
        train = lambda members, progress: train_members(members, commands, args.out, jobs, stop, progress)
        if args.population:
            from jrl.tools.sweep import population

            jobs, how = len(spec.members), population.dealt_out
            configs, parts = population.read_configs(spec)
            population.check_population(configs, parts.tables, [axis.name for axis in spec.axes])
            train = lambda members, progress: population.train_population(
                spec, args.out, configs, parts, stop, progress, accept_change=args.accept_change
            )
        lock = sweeping.hold_sweep(args.out, spec)
        try:
            metric = args.metric[0] if args.metric else "reward/mean"
            ended, finished = sweeping.train_sweep(
                spec, args.out, train=train, jobs=jobs, how=how, metric=metric, stream=sys.stdout
            )
            failed = sweeping.failures(args.out, spec, ended)
            for line in failed:
                print(f"jrl: {line}", file=sys.stderr)
            comparison = None if stop.is_set() else sweeping.report_sweep(spec, args.out, ended, options)
            if comparison is not None:
                print(f"\n{table(comparison)}\n\nThe report is in {args.out / sweeping.PAGE}", flush=True)
        finally:
            lock.release()
    if finished == len(spec.members):
        return DONE
    changed = ", with --accept-change if you have changed a file of your own" if failed else ""
    print(f"jrl: {finished} of {len(spec.members)} members are finished. Run the same command to continue{changed}.",
          file=sys.stderr)  # fmt: skip
    return STOPPED if failed and not stop.is_set() else PREEMPTED


def compare(args: argparse.Namespace) -> int:
    prepare_jax(args, platform="cpu")  # nothing runs
    from jrl.tools.sweep import comparison, page, sweeping

    options = sweeping.ComparisonOptions(tuple(args.metric), tuple(args.by), args.baseline, args.statistic)
    result = sweeping.compare_folders(args.runs, options)
    if args.out is not None:
        page.write_page(args.out, result, "Comparison of runs", " ".join(["jrl compare", *map(str, args.runs)]))
        content = json.dumps(comparison.to_json(result), indent=1, allow_nan=False)
        paths.write_bytes_atomic(args.out / "comparison.json", content.encode() + b"\n")
    print(json.dumps(comparison.to_json(result), indent=1) if args.json else comparison.table(result))
    if args.out is not None and not args.json:
        print(f"\nThe report is in {args.out / page.PAGE}")
    return DONE


def plan(args: argparse.Namespace) -> int:
    from jrl.tools.plan.libtpu import set_environment

    set_environment()
    prepare_jax(args, platform="cpu")  # nothing runs
    say = lambda line: print(f"jrl: {line}", file=sys.stderr, flush=True)
    if args.stage is not None and (args.search or args.all is not None):
        raise ValueError("--stage restricts the table of one plan; leave it out with --search and --all")
    if args.all is not None:
        return plan_all(args, say)
    if args.config is None or args.topology is None:
        raise ValueError("jrl plan takes CONFIG and --topology CHIP:GRID, or --all FOLDER; see `jrl help plan`")
    from jrl.resolve import find_config, load_config
    from jrl.tools.plan import report
    from jrl.tools.plan.chips import parse_topology
    from jrl.tools.plan.planning import make_plan, to_json

    args.config = find_config(args.config)
    config, parts = load_config(args.config, args.bindings)
    if args.search:
        return plan_search(args, config, parts, say)
    topology = parse_topology(args.topology)
    source, count = [args.config, *args.bindings], not args.no_collectives
    run_plan = make_plan(config, parts, topology, source, say, count=count, stage=args.stage)
    print(json.dumps(to_json(run_plan), indent=1) if args.json else report.text(run_plan))
    return DONE


def plan_search(args: argparse.Namespace, config: Any, parts: Any, say: Callable[[str], None]) -> int:
    from jrl.tools.plan import search
    from jrl.tools.plan.chips import parse_chip, parse_topology

    check_not_over(args.out, args.config)
    source = [args.config, *args.bindings]
    if ":" in args.topology:
        done = search.search(config, parts, parse_topology(args.topology), source, say)
    else:
        done = search.smallest(config, parts, parse_chip(args.topology), source, say)
    print(json.dumps(search.to_json(done), indent=1) if args.json else search.text(done))
    if done.fitting:
        out = args.out or Path(f"{Path(args.config).stem}-{done.topology.name.replace(':', '-')}.gin")
        paths.write_bytes_atomic(
            out, search.gin_text(done, os.path.relpath(args.config, out.parent), args.bindings).encode()
        )
        say(f"the fastest layout is in {out}; train with it: jrl train {out} --run DIR")
    return DONE


def plan_all(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    from jrl.tools.plan import every

    lines = every.check_all(args.all, say)
    out = args.out or Path("docs/topologies.md")
    paths.write_bytes_atomic(out, every.markdown(lines).encode())
    for line in lines:
        print("  ".join(filter(None, line[:-1])))
    say(f"the table is in {out}")
    return DONE if all(line.good for line in lines) else REFUSED


def new(args: argparse.Namespace) -> int:
    from jrl.tools.new import create

    commands = create(args.folder)
    print(f"{args.folder}/ contains a configuration, a verifier and ten rows of data. Try:")
    for command in commands:
        print(f"  {command}")
    return DONE


def score(args: argparse.Namespace) -> int:
    prepare_jax(args)
    from jrl.run.bucket_run import readable
    from jrl.run.trained import open_trained
    from jrl.tools.score import is_classifier, judge_file, score_file

    check_not_over(args.out, args.rows)
    args.source = readable(args.source)
    if is_classifier(args.source):
        if args.bindings or args.step is not None:
            raise ValueError(f"{args.source} is a classifier: it takes no bindings and has no steps")
        count = judge_file(args.source, args.rows, args.out, reading_bar())
        print(f"{count} rows scored by {args.source}; rewards are in {args.out}")
        return DONE
    trained = open_trained(
        args.source, args.bindings, args.step, announce=reading_bar(), stage=args.stage, role=args.role
    )
    count = score_file(trained, args.rows, args.out)
    print(f"{count} rows scored with {weights_of(args.source, trained.step)}; log-probs are in {args.out}")
    return DONE


def weights_of(source: Path, step: int) -> str:
    """Returns how a message names weights: those of a run by their step, a published model's by its folder."""
    return f"the weights of step {step}" if paths.exists(source / "manifest.json") else f"the weights of {source}"


def sample(args: argparse.Namespace) -> int:
    prepare_jax(args)
    from jrl.run.bucket_run import readable
    from jrl.run.trained import open_trained
    from jrl.tools import chat

    check_not_over(args.out, args.prompts)
    args.source = readable(args.source)
    prompts = chat.read_prompts(args.prompts) if args.prompts else None
    trained = open_trained(
        args.source, args.bindings, args.step, announce=reading_bar(), stage=args.stage, role=args.role
    )
    asked = chat.open_chat(
        trained, samples=args.n, temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed
    )
    if prompts is not None:
        answers = chat.ask(asked, prompts)
        if args.out is not None:
            chat.write_completions(args.out, prompts, answers)
            print(f"{len(prompts)} prompts answered; completions are in {args.out}")
        else:
            for prompt, completions in zip(prompts, answers):
                chat.show(prompt, completions, sys.stdout)
        return DONE
    if args.out is not None:
        raise ValueError("--out goes with --prompts")
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{weights_of(args.source, trained.step)}; each line is a new prompt, /quit or Ctrl-D ends")
    chat.converse(asked, lambda: input("> " if interactive else ""), sys.stdout)
    return DONE


def evaluate(args: argparse.Namespace) -> int:
    prepare_jax(args)
    from jrl.tools import evaluation, judged_wins

    more = sources_among(args.bindings)
    sources, bindings = [args.source, *map(Path, more)], args.bindings[len(more) :]
    check_not_over(args.out, args.config, args.pairs)
    steps = args.steps or [args.step]
    if args.step is not None and args.steps:
        raise ValueError("--steps names the steps, too; leave --step out")
    if args.reference_step is not None and args.reference is None:
        raise ValueError("--reference-step is a saved step of --reference, which is not given")
    asked = [(address, step) for address in sources for step in steps]
    other = lambda address, **of: None if address is None else _opened(args, address, bindings, len(sources), **of)
    open_reference = lambda: other(args.reference, step=args.reference_step)
    opened = lambda address, step: _opened(args, address, bindings, len(sources), step, args.stage, args.role)
    named = lambda address, step: f"{_shown(address)} {step}" if len(steps) > 1 else _shown(address)
    if args.pairs is not None:
        models = [(named(*one), one[0], lambda one=one: opened(*one)) for one in asked]
        return _evaluate_pairs(args, models, bindings, open_reference)
    beside = evaluation.Asked(args.diversity, open_reference(), other(args.proxy, role=args.proxy_role))
    shown = sys.stderr.isatty()
    announce = lambda done, total: shown and print(f"\r{done}/{total} prompts", end="", file=sys.stderr, flush=True)
    results, private = [], [address for address in sources if not paths.is_remote(address)]
    for one in asked:
        trained = opened(*one)
        evaluation.check_evaluated(trained.policy.config, f"the configuration of {named(*one)}")
        if (warning := evaluation.trained_prompts_warning(one[0], trained.policy.config)) is not None:
            print(warning, file=sys.stderr)
        results.append({"source": named(*one), **evaluation.reevaluate(trained, announce, beside, private)})
        trained.policy.program_cache.close()
    if shown:
        print("\r", end="", file=sys.stderr)
    print(evaluation.table(results[0]) if len(results) == 1 else evaluation.side_by_side(results))
    _write_results(args.out, results)  # a judge that fails costs none of it
    # The last source's judges; all have the same prompts.
    if len(results) > 1 and (judges := judged_wins.comparing(trained.policy.config.judges)):
        examples = [visit.example for visit in evaluation.held_out_visits(trained)]
        answers = None if args.out is None else args.out.with_suffix(".judges")
        judged = judged_wins.judged_wins(judges, results, examples, answers)
        names = [result["source"] for result in results]
        print("\n".join(line for name, wins in judged.items() for line in judged_wins.lines(name, names, wins)))
        for number, result in enumerate(results):
            result["judged"] = {name: wins[number] for name, wins in judged.items()}
        _write_results(args.out, results)
    return DONE


def sources_among(words: Sequence[str]) -> list[str]:
    """Returns the words before the first binding. That has an equals sign, as folders of a sweep's members have."""
    is_source = lambda word: "=" not in word or paths.is_remote(word) or os.path.isdir(word)
    return list(itertools.takewhile(is_source, words))


def _shown(address: Path) -> str:
    from jrl.bucket.client import shown

    return shown(address)


def _opened(
    args: argparse.Namespace, address: Path, bindings: Sequence[str], sources: int, step: int | None = None,
    stage: str | None = None, role: str = "policy",
) -> Any:  # fmt: skip
    """Returns a model that `jrl eval` reads."""
    from jrl.run.bucket_run import readable
    from jrl.run.trained import is_published, open_trained

    source = readable(address)
    # A run has a configuration of its own, by which it is evaluated.
    config = args.config if (sources == 1 and address == args.source) or is_published(source) else None
    return open_trained(source, bindings, step, config, reading_bar(), stage=stage, role=role)


def _write_results(out: Path | None, results: Sequence[Mapping[str, Any]]) -> None:
    if out is not None:
        written = results if len(results) > 1 else {k: v for k, v in results[0].items() if k != "source"}
        paths.write_bytes_atomic(out, json.dumps(written, indent=2).encode() + b"\n")


def _evaluate_pairs(
    args: argparse.Namespace, models: Sequence[tuple[str, Path, Callable[[], Any]]], bindings: Sequence[str],
    open_reference: Callable[[], Any],
) -> int:  # fmt: skip
    """Measures rewards on pairs of answers: `jrl eval --pairs`. models: (name, address, what opens it)."""
    from jrl.models.heads import REWARD
    from jrl.run.bucket_run import readable
    from jrl.tasks.envs import ENVS
    from jrl.tools import inspect_data, reward_quality
    from jrl.tools.score import is_classifier

    if args.proxy is not None or args.diversity:
        raise ValueError("--pairs measures a reward on answers that are given; leave --proxy and --diversity out")
    read = inspect_data.Read(args.layout, "all_pairs" if args.layout is not None else None)
    source = inspect_data.open_named(inspect_data.file_config(str(args.pairs), read), ENVS)
    compared = reward_quality.comparisons([source[index] for index in range(len(source))])
    pairs = sum(len(worse) for _, worse in compared.problems)
    result = lambda name, step, kind, found: {"source": name, "step": step, "reward": kind, "n_pairs": pairs, **found}
    results = []
    folders = {address: readable(address) for _, address, _ in models}
    classifiers = {address for address, folder in folders.items() if is_classifier(folder)}
    unread = args.reference is not None  # until a source reads it
    refusal = (
        "--reference is for the implicit reward of a policy, and every source has a reward of its own; leave it out"
    )
    if unread and len(classifiers) == len(folders):
        raise ValueError(refusal)
    reference = open_reference()
    for i, (name, address, opened) in enumerate(models):
        if address in classifiers:
            if bindings or args.step is not None or args.steps or args.stage is not None or args.role != "policy":
                raise ValueError(f"{address} is a classifier: it takes no bindings and has no steps, stages or roles")
            by_label = reward_quality.of_classifier(folders[address], compared, reading_bar())
            results += [result(name, 0, label, found) for label, found in by_label.items()]
            continue
        model = opened()
        kind = "head" if REWARD in model.heads else "implicit"
        unread = unread and kind == "head"
        if unread and all(other in classifiers for _, other, _ in models[i + 1 :]):
            raise ValueError(refusal)
        found = reward_quality.measured(reward_quality.reward_of(model, reference), compared)
        results.append(result(name, model.step, kind, found))
        model.policy.program_cache.close()
    print(reward_quality.table(results))
    _write_results(args.out, results)
    return DONE


def export(args: argparse.Namespace) -> int:
    prepare_jax(args)
    from jrl.run.bucket_run import readable
    from jrl.tools.export import export_adapter, export_policy

    args.source = readable(args.source)
    if args.adapter_only:
        step, files = export_adapter(
            args.source, args.to, args.step, dtype=args.dtype, stage=args.stage, role=args.role
        )
        print(f"the adapter of step {step} is in {args.to}: {', '.join(files)}")
        return DONE
    step, files = export_policy(args.source, args.to, args.step, dtype=args.dtype, max_shard=args.max_shard_size,
                                stage=args.stage, role=args.role,
                                announce=reading_bar())  # fmt: skip
    print(f"{weights_of(args.source, step)} are in {args.to}: {', '.join(files)}")
    return DONE


def check(args: argparse.Namespace) -> int:
    prepare_jax(args, platform="cpu")
    from jrl.tools.check import check_parts, table

    print(f"testing {', '.join(map(str, args.parts))} ...", file=sys.stderr, flush=True)
    findings = check_parts(args.parts)
    print(table(findings))
    return DONE if all(row.problem is None for row in findings) else REFUSED


def doctor(args: argparse.Namespace) -> int:
    prepare_jax(args)
    from jrl.run.bucket_run import holder_of_run, readable
    from jrl.tools.doctor import Line, examine

    holder = None if args.run is None else holder_of_run(args.run)
    lines = examine(None if args.run is None else readable(args.run))
    if holder is not None:
        lines.append(Line(True, holder))
    for line in lines:
        print(f"{MARKS[line.good]}  {line.text}")
    return STOPPED if any(line.good is False for line in lines) else DONE


def data(args: argparse.Namespace) -> int:
    prepare_jax(args, platform="cpu")  # a configuration's parts may import it
    from jrl.resolve import load_config
    from jrl.tools import inspect_data

    file, bindings = None if args.file is None else str(args.file), args.bindings
    if file is not None and "=" in file and not args.file.exists():  # a binding, where no file is named
        file, bindings = None, [file, *bindings]
    config, parts = (None, None) if args.config is None else load_config(args.config, bindings)
    tables = None if parts is None else parts.tables
    read = inspect_data.Read(args.layout, args.take, args.stage)
    opened = inspect_data.open_file(file, config, tables, args.source, read)
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")  # no-color.org
    layout = inspect_data.Read(args.against_layout)
    evaluation = [inspect_data.open_file(str(path), None, None, None, layout).source for path in args.against]
    for line in inspect_data.lines(opened, args.rows, args.most, color):
        print(line)
    if evaluation:
        for line in inspect_data.contamination(opened, evaluation, args.ngram, args.overlap):
            print(line)
    return DONE


def rollouts(args: argparse.Namespace) -> int:
    prepare_jax(args, platform="cpu")  # the store is read by tensorstore alone; a device may be held by the run
    from jrl.run.bucket_run import readable
    from jrl.tools import browse_rollouts as browse

    run = readable(args.source)
    folder = run / "rollouts"
    if not run.exists():
        raise ValueError(f"{args.source} does not exist; give the --run folder of jrl train")
    if not folder.exists():
        why = "the run has stored none, Log.rollouts was False" if (run / "manifest.json").exists() else (
            "it is not a run folder; give the --run folder of jrl train")  # fmt: skip
        raise ValueError(f"{args.source} holds no rollouts: {why}")
    conditions = browse.parse_where(args.where)
    known = browse.columns_of(folder)
    asked = args.columns and [name.strip() for name in args.columns.split(",")]
    columns = browse.chosen_columns(known, asked, browse.SHOWN if args.out is None else browse.EXPORTED)
    if args.out is not None:
        count = browse.export(browse.select(folder, conditions, columns, args.most), columns, args.out)
        print(f"{count} rows with {', '.join(columns)} are in {args.out}")
        return DONE
    most, shown = 20 if args.most is None else args.most, 0
    for row in browse.select(folder, conditions, columns, most):
        print(browse.show(row), end="\n\n")
        shown += 1
    print(f"{shown} rows shown{'; --most N shows more, --out FILE writes all' if shown == most else ''}. "
          f"Columns: {', '.join(sorted(known))}")  # fmt: skip
    return DONE


def fingerprint(args: argparse.Namespace) -> int:
    prepare_jax(args, platform="cpu")  # arrays are only hashed, and a device may be held by the run
    from jrl.run.bucket_run import readable
    from jrl.run.run_hash import run_fingerprint

    hashes = run_fingerprint(readable(args.source), args.step)
    if args.json:
        print(json.dumps(hashes))
    else:
        for name, value in hashes.items():
            if name != "total":
                print(f"{name:<10} {value}")
        print(hashes["total"])
    return DONE


def replay(args: argparse.Namespace) -> int:
    if args.step is not None:
        return repeat(args)
    prepare_jax(args, platform="cpu")
    from jrl.run.fault import replay as run

    replayed = run(args.source)
    recorded = replayed.recorded
    good = recorded["last_good_step"]
    print(f"step {recorded['step']}, stage {recorded['stage_name']}; last good checkpoint: "
          f"{'none' if good is None else f'step {good}'}")  # fmt: skip
    if replayed.fault is None:
        print("every update is finite on this machine: the fault is not reproduced")
        return STOPPED
    print(f"first not finite: {replayed.fault} of the role {replayed.role}")
    return DONE


def repeat(args: argparse.Namespace) -> int:
    prepare_jax(args)
    from jrl.run.bucket_run import readable
    from jrl.run.replay import repeat as run

    repeated = run(readable(args.source), args.step)
    print(f"updates {repeated.first + 1} to {repeated.step} from the rollout store")
    if repeated.different is None:
        print(f"there is no checkpoint of step {repeated.step} to compare with")
    elif repeated.different:
        print(f"{len(repeated.different)} arrays differ from the checkpoint: {', '.join(repeated.different[:8])}")
        return STOPPED
    else:
        print("every bit is that of the checkpoint")
    return DONE


def show_list(args: argparse.Namespace) -> int:
    prepare_jax(args, platform="cpu")
    from jrl.tools import catalog

    print(json.dumps(catalog.rows(args.kind), indent=1) if args.json else catalog.table(args.kind))
    return DONE


def show_help(args: argparse.Namespace) -> int:
    prepare_jax(args, platform="cpu")
    from jrl.config import describe, describe_section
    from jrl.experiment import TABLES, Config, config_classes

    tables = config_classes(TABLES)
    print(describe(Config, tables) if args.section is None else describe_section(Config, tables, args.section))
    return DONE


# Their arguments


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("it is empty; name a folder")
    return Path(text)


def _bindings(parser: argparse.ArgumentParser, over: str) -> None:
    parser.add_argument(
        "bindings",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help=f"overrides {over}, in gin syntax: Sampler.temperature=0.7",
    )


def _devices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, metavar="N", help="start N virtual CPU devices (see MeshShape)")
    parser.add_argument(
        "--no-compile-cache",
        action="store_true",
        help="compile everything again; by default compiled programs are cached in JAX_COMPILATION_CACHE_DIR, else in "
        "$XDG_CACHE_HOME/jrl/xla (~/.cache/jrl/xla)",
    )


def _step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=int, metavar="N", help="a saved step (default: the newest)")


def _stage_and_role(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stage", metavar="NAME", help="the newest saved step of this stage of the run, such as sft")
    parser.add_argument(
        "--role", metavar="NAME", default="policy", help="a model of the run, such as reward (default: policy)"
    )


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a .gin file, or a name out of `jrl list configs`; `jrl help "
                        "config` describes every field")  # fmt: skip
    _bindings(parser, "the file")
    parser.add_argument("--run", metavar="DIR", type=_folder, help="the run's folder, or gs://BUCKET/NAME; an "
                        "existing run is resumed (default: a new folder in runs/, named by the time)")  # fmt: skip
    parser.add_argument("--accept-change", action="store_true",
                        help="continue a run whose configuration, data or parts changed; its manifest "
                             "records the change")  # fmt: skip
    parser.add_argument("--from", metavar="RUN", type=_folder, dest="begin_from",
                        help="begin a new run with the weights and the tokenizer of another, a folder or "
                        "gs://BUCKET/NAME")  # fmt: skip
    parser.add_argument("--profile", metavar="FIRST:LAST", help="write a trace of these steps, both included, into "
                        "RUN/profile, such as 3:6; open it with xprof, TensorBoard or ui.perfetto.dev")  # fmt: skip
    _devices(parser)
    parser.add_argument("--processes", type=int, metavar="N", help="start N processes on this machine that train "
                        "together, each with its own --devices")  # fmt: skip
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="one process of a run on several machines, started "
                        "once on each: where process 0 listens (a Cloud TPU slice is found without)")  # fmt: skip
    parser.add_argument("--process-count", type=int, metavar="N", help="with --coordinator: the processes of the run")
    parser.add_argument("--process-index", type=int, metavar="I", help="with --coordinator: the number of this one, "
                        "from 0")  # fmt: skip


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a .gin file, or a name out of `jrl list configs`; a field "
                        "that the file gives a list of values is swept too")  # fmt: skip
    _bindings(parser, "the file; a list of values is swept: AdamW.learning_rate=[1e-4,3e-4] Run.seed=[0..4]")
    parser.add_argument("--out", metavar="DIR", type=_folder, required=True,
                        help="the sweep's folder, with a run's folder for every member; an interrupted sweep is "
                             "continued, and finished members are not run again")  # fmt: skip
    parser.add_argument("--how", choices=("grid", "random", "pairs"), default="grid",
                        help="every combination of the lists; --count of them drawn at random; or the first values, "
                             "the second values, ... Each is run with every Run.seed (grid)")  # fmt: skip
    parser.add_argument("--count", type=int, metavar="N", help="combinations that --how random draws")
    parser.add_argument("--seed", type=int, metavar="N", help="of that draw (0)")
    parser.add_argument(
        "--jobs", type=_number_of("members"), default=1, metavar="N", help="members trained at a time (1)"
    )
    parser.add_argument("--population", action="store_true",
                        help="train all members in one program, in this process, dealt out over the devices (on CPUs "
                             "one a core, unless --devices says otherwise): members that differ in Run.seed and in "
                             "floats of objectives, optimizers and the sampler only")  # fmt: skip
    parser.add_argument("--accept-change", action="store_true",
                        help="continue members whose data or parts have changed since they began; their manifests "
                             "record the change")  # fmt: skip
    parser.add_argument("--print", action="store_true", help="print the members' commands, for a cluster, and run none")
    _comparison(parser)
    _devices(parser)


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", type=_folder,
                        help="folders or gs:// addresses of runs, folders of sweeps for all their members")  # fmt: skip
    _comparison(parser)
    parser.add_argument("--out", metavar="DIR", type=_folder, help="write report.html, charts and comparison.json here")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _comparison(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--metric", action="append", default=[], metavar="NAME",
                        help="of metrics.jsonl, or an evaluation such as eval/after_rl; may be repeated (reward/mean, "
                             "and the last evaluation)")  # fmt: skip
    parser.add_argument("--by", action="append", default=[], metavar="NAME",
                        help="compare the values of this setting; other settings that differ are tasks, within which "
                             "runs are resampled; may be repeated (all that differ)")  # fmt: skip
    parser.add_argument("--baseline", metavar="NAME=VALUE,...",
                        help="the variant that the others are compared with: the probability that they improve on "
                             "it")  # fmt: skip
    parser.add_argument("--statistic", choices=("mean", "iqm", "gap"), default="mean",
                        help="over a variant's runs: the mean, the interquartile mean, or the optimality gap, how far "
                             "they fall short of 1 (mean)")  # fmt: skip


def _out_file(text: str) -> Path:
    """Reads the name of a file to write, which is none that a run has of its own."""
    path = Path(text)
    if path.name in RUN_FILES and paths.exists(path.parent / "manifest.json"):
        raise argparse.ArgumentTypeError(f"{path} is a file of the run in {path.parent}; choose another name")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def check_not_over(out: Path | None, *sources: str | Path | None) -> None:
    """Raises ValueError where a command would write over a file that it reads."""
    for source in sources if out is not None else ():
        if source is not None and not paths.is_remote(source) and Path(source).resolve() == out.resolve():
            raise ValueError(f"--out is {out}, which is read; choose another name")


RUN_FILES = ("config.gin", "config.json", "goodput.jsonl", "journal.jsonl", "manifest.json", "metrics.jsonl",
             "summary.json")  # fmt: skip


def _number_of(what: str, least: int = 1) -> Callable[[str], int]:
    """Returns what reads an argument that counts `what`."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of {what}; it must be at least {least}")
        return int(text)

    return read


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share; it must lie in [0, 1]")
    return share


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="a .gin file, or a name out of `jrl list configs`; "
                        "data and tokenizer are not opened")  # fmt: skip
    _bindings(parser, "the file")
    parser.add_argument("--topology", metavar="CHIP:GRID",
                        help="such as v5e:4x8 or v5p:4x4x4, 2xv5p:4x4x4 for two slices; with --search, a chip alone, "
                             "such as v5p, asks for the smallest slice that fits")  # fmt: skip
    parser.add_argument(
        "--stage", metavar="NAME", help="plan this stage only (default: all, with the step time of the last Online one)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; memory in GiB per device")
    parser.add_argument(
        "--search",
        action="store_true",
        help="try meshes, micro-batches, rematerialization and slots; print the best layouts and write the fastest",
    )
    parser.add_argument("--all", metavar="FOLDER", type=Path,
                        help="check every recipe in FOLDER against the topology in its header")  # fmt: skip
    parser.add_argument("--out", metavar="FILE", type=_out_file,
                        help="where --search writes the best layout (default: CONFIG-CHIP-GRID.gin in this directory), "
                             "and --all its table (default: docs/topologies.md)")  # fmt: skip
    parser.add_argument(
        "--no-collectives",
        action="store_true",
        help="do not count collectives, which takes a second compilation for virtual CPU devices",
    )


def _new_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="NAME", type=_folder, help="the task's name, and a new folder for its files")


def _score_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", type=Path, help="the folder of a run, or of a published model")
    parser.add_argument("rows", metavar="ROWS.jsonl", type=Path,
                        help='one JSON object a line: {"tokens": [ids]}, {"text": "..."} (bos is added), or '
                             '{"messages": [...]}, which ends with a message of the assistant')  # fmt: skip
    _bindings(parser, "the run's configuration")
    parser.add_argument("--out", metavar="OUT.jsonl", type=_out_file, required=True,
                        help='one {"tokens", "logprobs"} per row, in order, at temperature 1; logprobs[0] = 0; for a '
                             'classifier, {"tokens", "rewards"}')  # fmt: skip
    _step(parser)
    _stage_and_role(parser)
    _devices(parser)


def _sample_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", type=Path, help="the folder of a run, or of a published model")
    _bindings(parser, "the run's configuration")
    parser.add_argument(
        "--prompts", metavar="FILE", type=Path, help="one prompt a line, as a JSON string or plain text"
    )
    parser.add_argument("--out", metavar="FILE.jsonl", type=_out_file, help="write the completions of --prompts here")
    parser.add_argument("--n", type=int, default=1, metavar="N", help="completions per prompt (default: 1)")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="0: greedy (default: that of the run, or of generation_config.json)",
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="most tokens of a completion (default: that of the run)"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="the same seed and prompts give the same answers (default: Run.seed)"
    )
    _step(parser)
    _stage_and_role(parser)
    _devices(parser)


def _eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", type=Path, help="the folder of a run, or of a published model; "
                        "several are shown in one table")  # fmt: skip
    _bindings(parser, "the run's configuration, or --config")
    parser.add_argument("--config", metavar="CONFIG", type=Path,
                        help="the task and the verifiers for published models: a .gin file, or a name out of "
                             "`jrl list configs`")  # fmt: skip
    parser.add_argument("--out", metavar="FILE.json", type=_out_file, help="also write the numbers to this file")
    parser.add_argument("--diversity", action="store_true",
                        help="also measure distinct n-grams and self-BLEU of each prompt's samples")  # fmt: skip
    parser.add_argument("--reference", metavar="SOURCE", type=Path,
                        help="also measure the KL to the policy of this run or published model, and how far apart its "
                             "states find a prompt's samples")  # fmt: skip
    parser.add_argument("--reference-step", metavar="N", type=int, help="a saved step of --reference (the newest)")
    parser.add_argument("--proxy", metavar="RUN", type=Path,
                        help="also measure what this run's reward model gives the samples; with --reference and "
                             "several sources or --steps, where more of it stops paying")  # fmt: skip
    parser.add_argument("--proxy-role", metavar="NAME", default="reward", help="that reward model's role (reward)")
    parser.add_argument("--pairs", metavar="FILE", type=Path,
                        help="measure a reward on pairs of answers instead: --role's reward head, each label of a "
                             "published classifier, or with --reference the implicit reward of a policy")  # fmt: skip
    parser.add_argument("--layout", metavar="NAME", help="how the rows of --pairs are written, out of `jrl list "
                        "layouts` (rows with prompt, answer and rejected)")  # fmt: skip
    parser.add_argument("--steps", metavar="N,N,...", type=_steps_of, default=[],
                        help="several saved steps, a row of the table for each")  # fmt: skip
    _step(parser)
    _stage_and_role(parser)
    _devices(parser)


def _steps_of(text: str) -> list[int]:
    if not all(part.isascii() and part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} are not steps, such as 10,20,30")
    return [int(part) for part in text.split(",")]


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", type=Path, help="the folder of a run, or of a published model")
    parser.add_argument("--to", metavar="DIR", type=Path, required=True, help="a new folder")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the tensors (default: float32)"
    )
    parser.add_argument(
        "--adapter-only",
        action="store_true",
        help="write the run's adapters in PEFT's format (default: merge them into the weights)",
    )
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", default="5GB", help="largest size of one file of tensors (default: 5GB)"
    )
    _step(parser)
    _stage_and_role(parser)
    _devices(parser)


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "parts",
        metavar="PARTS.py",
        nargs="+",
        help="Python files that define ALGOS, SOURCES, ENVS, VERIFIERS, TOKENIZERS or MODELS",
    )


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="SOURCE", nargs="?", type=Path,
                        help="the folder of a run, or of a published model, to check as well")  # fmt: skip
    _devices(parser)


def _fingerprint_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN", type=Path, help="the folder of a run; it may be running")
    _step(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("inspect",), help="inspect: show rows as the model will see them")
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        type=Path,
        help="a data file: .jsonl, .jsonl.gz, .parquet or .array_record (default: the task of --config)",
    )
    _bindings(parser, "--config")
    parser.add_argument("--config", metavar="CONFIG", type=Path,
                        help="whose tokenizer, columns and lengths are used: a .gin file, or a name out of "
                             "`jrl list configs` (default: bytes)")  # fmt: skip
    parser.add_argument("--layout", metavar="LAYOUT", help="how the file is written: a name out of `jrl list layouts` "
                        "(default: the columns of Jsonl)")  # fmt: skip
    parser.add_argument("--stage", metavar="NAME", help="without FILE: the stage of --config whose task is shown")
    parser.add_argument("--take", metavar="TAKE", help="what becomes an example of a layout, such as all_pairs")
    parser.add_argument("--against", metavar="EVAL", type=Path, action="append", default=[],
                        help="an evaluation set, to be compared with the rows' prompts; may be repeated")  # fmt: skip
    parser.add_argument("--against-layout", metavar="LAYOUT", help="how the evaluation sets are written")
    parser.add_argument("--ngram", type=_number_of("words"), default=8, metavar="N",
                        help="words of an n-gram that counts as shared with them (default: 8)")  # fmt: skip
    parser.add_argument("--overlap", type=_share, default=0.5, metavar="SHARE",
                        help="share of an evaluation prompt's words above which it is held (default: 0.5)")  # fmt: skip
    parser.add_argument("--as", dest="source", metavar="SOURCE",
                        help="what rows become: Demonstrations, Preferences, Labeled (default: prompts)")  # fmt: skip
    parser.add_argument("--rows", type=_number_of("rows", 0), default=3, metavar="N", help="rows to show (default: 3)")
    parser.add_argument("--most", type=_number_of("rows"), default=10_000, metavar="N",
                        help="rows that the statistics look at (default: 10000)")  # fmt: skip


def _rollouts_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN", type=Path, help="the folder of a run; it may be running")
    parser.add_argument("--where", metavar="CONDITION", default="",
                        help="rows that meet it, such as \"reward < 0.5 and completion contains 'So'\"")  # fmt: skip
    parser.add_argument("--columns", metavar="A,B", help="what to show of each row (default: step, reward and texts; "
                        "in a file also what Dataset.layout = 'rollouts' reads)")  # fmt: skip
    parser.add_argument(
        "--most", type=_number_of("rows"), metavar="N", help="rows at most (default: 20 on the screen, all in a file)"
    )
    parser.add_argument("--out", metavar="FILE", type=_out_file, help="write the rows to a file, .jsonl or .csv")


def _replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="DIR", type=_folder, help="the folder `fault` of a run that stopped because "
                        "its updates were not finite; with --step, the folder of a run")  # fmt: skip
    parser.add_argument("--step", type=int, metavar="N", help="repeat the run's updates from the checkpoint before "
                        "this step up to it, and compare with the checkpoint of it")  # fmt: skip


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = ("configs", "parts", "algos", "optimizers", "sources", "verifiers", "envs", "layouts", "families",
             "tokenizers")  # fmt: skip
    parser.add_argument(
        "kind",
        choices=kinds,
        help="what to list: bundled configs, parts (the formulas that objectives compose), or a table",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON array")


def _help_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", choices=("config",), metavar="TOPIC", help="config, or a command")
    parser.add_argument("section", nargs="?", metavar="SECTION",
                        help="one section or table of the configuration, such as Sampler or algos")  # fmt: skip


COMMANDS: dict[str, Command] = {
    "train": Command(
        "Train a policy, or resume a run.",
        "jrl train tiny AdamW.learning_rate=1e-3 --run runs/tiny",
        _train_arguments,
        train,
    ),
    "sweep": Command(
        "Train many runs that differ in a few fields, and compare them.",
        "jrl sweep tiny 'AdamW.learning_rate=[1e-3,3e-3]' 'Run.seed=[0..4]' --out runs/rates --jobs 2",
        _sweep_arguments,
        sweep,
    ),
    "compare": Command(
        "Compare runs: a table with intervals over seeds, learning curves, a page to read offline.",
        "jrl compare runs/a runs/b --baseline AdamW.learning_rate=1e-3 --out comparison",
        _compare_arguments,
        compare,
    ),
    "new": Command(
        "Write a small task to start from: a configuration, a verifier and ten rows of data.",
        "jrl new sums",
        _new_arguments,
        new,
    ),
    "plan": Command(
        "Predict whether a run fits a TPU topology, its memory and its step time, without needing the TPU.",
        "jrl plan configs/plan/8b.gin --topology v5p:4x4x4",
        _plan_arguments,
        plan,
    ),
    "score": Command(
        "Write the log-probs of given tokens or texts under a trained policy, or a classifier's rewards.",
        "jrl score runs/tiny rows.jsonl --out scored.jsonl",
        _score_arguments,
        score,
    ),
    "sample": Command(
        "Chat with a trained policy, or have it answer a file of prompts.",
        "jrl sample runs/tiny --prompts prompts.txt --n 4",
        _sample_arguments,
        sample,
    ),
    "eval": Command(
        "Evaluate a trained policy on held-out prompts: avg@k, pass@k, majority@k, with intervals.",
        "jrl eval runs/tiny Data.held_out_every=10 'Config.eval=@Eval()' Eval.prompts=8 Eval.samples=4",
        _eval_arguments,
        evaluate,
    ),
    "export": Command(
        "Write a trained policy as a folder that other tools load: config.json and safetensors.",
        "jrl export runs/tiny --to tiny-model --dtype bfloat16",
        _export_arguments,
        export,
    ),
    "check": Command(
        "Run jrl's contract tests on your own objectives, verifiers, environments and other parts.",
        "jrl check my_parts.py",
        _check_arguments,
        check,
    ),
    "doctor": Command(
        "Check this installation, and a run or a published model, and say what to fix.",
        "jrl doctor runs/tiny",
        _doctor_arguments,
        doctor,
    ),
    "data": Command(
        "Show rows of a data file as the model will see them: tokens, which are learned from, lengths, duplicates.",
        "jrl data inspect pairs.jsonl --as Preferences --config gsm8k/qwen3-0.6b",
        _data_arguments,
        data,
    ),
    "rollouts": Command(
        "Show or export what a run sampled, row by row, by conditions on its columns.",
        "jrl rollouts runs/tiny --where 'reward < 0.5' --columns step,reward,completion",
        _rollouts_arguments,
        rollouts,
    ),
    "fingerprint": Command(
        "Print content hashes of a run: equal hashes, equal runs, bit for bit.",
        "jrl fingerprint runs/tiny --step 30",
        _fingerprint_arguments,
        fingerprint,
    ),
    "replay": Command(
        "Repeat the updates that stopped a run because they were not finite, or any update from its stored rollouts.",
        "jrl replay runs/tiny/fault",
        _replay_arguments,
        replay,
    ),
    "list": Command(
        "List configurations, formulas, objectives, optimizers, sources, verifiers, environments, data layouts, model "
        "families or tokenizers.",
        "jrl list configs",
        _list_arguments,
        show_list,
    ),
    "help": Command(
        "Describe a command, the whole configuration, or one section of it.",
        "jrl help config Sampler",
        _help_arguments,
        show_help,
    ),
}


def overview() -> str:
    """Returns what `jrl --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "jrl trains language models with reinforcement learning, in JAX.",
            "",
            "usage: jrl COMMAND ...",
            "",
            "commands:",
            *lines,
            "",
            "start here:",
            "  jrl train tiny --run runs/tiny                 a run of one minute",
            "  jrl list configs                               the configurations that come with jrl",
            "  jrl new mine                                   a small task to start from",
            "  jrl help train                                 the arguments of a command",
            "  jrl help config                                every field of a configuration",
            "",
            EXIT_CODES,
        ]
    )


def parser_of(name: str) -> argparse.ArgumentParser:
    """Returns the parser of one command."""
    command = COMMANDS[name]
    parser = argparse.ArgumentParser(
        prog=f"jrl {name}",
        description=command.summary,
        epilog=f"example:\n  {command.example}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.arguments(parser)
    parser.set_defaults(command=name)
    parser.add_argument("--traceback", action="store_true", default=_wants_traceback(os.environ),
                        help="print the traceback of an error (or set JRL_TRACEBACK=1)")  # fmt: skip
    return parser


def _wants_traceback(environment: Mapping[str, Any]) -> bool:
    return environment.get("JRL_TRACEBACK", "") not in ("", "0")


if __name__ == "__main__":
    sys.exit(main())
