"""`jrl sweep`: trains many runs that differ in a few fields, and compares them."""

from __future__ import annotations

import argparse
import sys

from jrl.commands import options, start
from jrl.commands.contract import Command
from jrl.exit_codes import DONE, PREEMPTED, STOPPED
from jrl.run.signals import StopRequest, stop_on_signals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a .gin file, or a name from `jrl list configs`; a field "
                        "that has a list of values in the file is swept too")  # fmt: skip
    more = "; a list of values is swept: AdamW.learning_rate=[1e-4,3e-4] Run.seed=[0..4]"
    options.add_bindings(parser, "the file", more)
    parser.add_argument("--out", metavar="DIR", type=options.folder, required=True,
                        help="the sweep's folder, with a run folder for every member; an interrupted sweep is "
                             "continued, and finished members are not run again")  # fmt: skip
    parser.add_argument("--how", choices=("grid", "random", "pairs"), default="grid",
                        help="every combination of the lists; --count of them drawn at random; or the first values, "
                             "the second values, ... Each is run with every Run.seed (grid)")  # fmt: skip
    parser.add_argument("--count", type=int, metavar="N", help="combinations that --how random draws")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of that draw (0)")
    parser.add_argument(
        "--jobs", type=options.number_of("members"), default=1, metavar="N", help="members trained at a time (1)"
    )
    parser.add_argument("--population", action="store_true",
                        help="train all members in one program, in this process, distributed over the devices (on CPUs "
                             "one per core, at most 16, unless --devices says otherwise): members that differ in "
                             "Run.seed and in floats of objectives, optimizers and the sampler only")  # fmt: skip
    parser.add_argument("--accept-change", action="store_true",
                        help="go on although data or parts files have changed: continue members that have begun "
                             "(their manifests record the change), and train the rest beside those that are "
                             "finished")  # fmt: skip
    parser.add_argument("--print", action="store_true", help="print the members' commands, for a cluster, and run none")
    options.add_comparison(parser)
    options.add_devices(parser)


def sweep(args: argparse.Namespace) -> int:
    stop = StopRequest()
    with stop_on_signals(stop, stop.say):
        # The members inherit these settings, and the compilation cache.
        start.prepare_jax(args, devices=min(start.cores(), start.MOST_CPU_DEVICES) if args.population else None)
        from jrl import paths
        from jrl.tools.sweep import manifest, population, sweeping
        from jrl.tools.sweep.comparison import table
        from jrl.tools.sweep.launch import train_members
        from jrl.tools.sweep.members import read_sweep
        from jrl.tools.sweep.page import PAGE

        if not args.print:
            sweeping.check_is_local(args.out)
        spec = read_sweep(args.config, args.bindings, args.how, args.count, args.seed)
        options = sweeping.ComparisonOptions(tuple(args.metric), tuple(args.by), args.baseline, args.statistic)
        sweeping.check_options(spec, args.out, options, accept_change=args.accept_change)
        train_options = [*(["--devices", str(args.devices)] if args.devices is not None else []),
                         *(["--no-compile-cache"] if args.no_compile_cache else []),
                         *(["--accept-change"] if args.accept_change else [])]  # fmt: skip
        commands = sweeping.commands_of(spec, args.out, train_options)
        if args.population and (args.print or args.jobs > 1):
            raise ValueError(f"{'--print' if args.print else '--jobs'} is for members in separate processes; leave "
                             "it or --population out")  # fmt: skip
        together = [] if paths.is_remote(args.out) else population.interrupted(args.out)
        if together and not args.population:
            raise ValueError(f"the members in {args.out} train in a population that was interrupted; continue it "
                             "with --population, or choose another --out")  # fmt: skip
        if args.print:
            print("\n".join(map(sweeping.shell, commands.values())))
            return DONE
        jobs, how = args.jobs, lambda count: f"{args.jobs} at a time"
        check = lambda member: manifest.check_unchanged(args.out, spec, member, accept_change=args.accept_change)
        train = lambda members, progress: train_members(members, commands, args.out, jobs, stop, progress, check=check)
        if args.population:
            jobs, how = None, population.dealt_out
            configs, parts = population.read_configs(spec)
            population.check_population(configs, parts.tables, [axis.name for axis in spec.axes])
            train = lambda members, progress: population.train_population(
                spec, args.out, configs, parts, stop, progress, accept_change=args.accept_change
            )
        lock = sweeping.hold_sweep(args.out, spec)
        try:
            ended, finished = sweeping.train_sweep(
                spec, args.out, train=train, jobs=jobs, how=how, metrics=args.metric, stream=sys.stdout,
                together=together,
            )  # fmt: skip
            failed = sweeping.failures(args.out, spec, ended)
            for line in failed:
                print(f"jrl: {line}", file=sys.stderr)
            comparison = None
            if finished == len(spec.members) or not stop.is_set():
                comparison = sweeping.report_sweep(spec, args.out, ended, options)
            if comparison is not None:
                print(f"\n{table(comparison)}\n\nThe report is in {args.out / PAGE}", flush=True)
        finally:
            lock.release()
    if finished == len(spec.members):
        return DONE
    changed = ", with --accept-change if you have changed a file of your own" if failed else ""
    print(f"jrl: {finished} of {len(spec.members)} members are finished. Run the same command to continue{changed}.",
          file=sys.stderr)  # fmt: skip
    return STOPPED if failed and not stop.is_set() else PREEMPTED


COMMAND = Command(
    "Train many runs that differ in a few fields, and compare them.",
    "jrl sweep tiny 'AdamW.learning_rate=[1e-3,3e-3]' 'Run.seed=[0..4]' --out runs/rates --jobs 2",
    add_arguments,
    sweep,
)
