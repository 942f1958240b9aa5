"""`jrl replay`: repeats updates of a run: the ones that stopped it, or earlier ones."""

from __future__ import annotations

import argparse

from jrl.commands import options, start
from jrl.commands.contract import Command
from jrl.exit_codes import DONE, STOPPED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="DIR", type=options.folder,
                        help="the folder `fault` of a run that stopped because its updates were not finite; with "
                             "--step, the folder of a run")  # fmt: skip
    parser.add_argument("--step", type=int, metavar="N", help="repeat the run's updates from the checkpoint before "
                        "this step up to it, and compare with its checkpoint; a step that has one")  # fmt: skip


def replay(args: argparse.Namespace) -> int:
    if args.step is not None:
        return repeat(args)
    start.prepare_jax(args, platform="cpu")
    from jrl.run.fault import replay as run

    replayed = run(args.source)
    recorded = replayed.recorded
    good = recorded["last_good_step"]
    print(f"step {recorded['step']}, stage {recorded['stage_name']}; last good checkpoint: "
          f"{'none' if good is None else f'step {good}'}")  # fmt: skip
    if replayed.fault is None:
        print("every update is finite on this machine: the fault was not reproduced")
        return STOPPED
    print(f"first not finite: {replayed.fault} of the role {replayed.role}")
    return DONE


def repeat(args: argparse.Namespace) -> int:
    start.prepare_jax(args)
    from jrl.run.bucket_run import readable
    from jrl.run.replay import repeat as run

    repeated = run(readable(args.source), args.step)
    print(f"updates {repeated.first + 1} to {repeated.step} from the rollout store")
    if repeated.different:
        print(f"{len(repeated.different)} arrays differ from the checkpoint: {', '.join(repeated.different[:8])}")
        return STOPPED
    print("all bits match the checkpoint")
    return DONE


COMMAND = Command(
    "Repeat the updates that stopped a run because they were not finite, or any update from its stored rollouts.",
    "jrl replay runs/tiny/fault",
    add_arguments,
    replay,
)
