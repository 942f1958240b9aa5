"""Runs the jrl command and says on standard error what the process is doing: for trials that kill it on purpose.

FULL_DISK_AT_SAVE=N in the environment: while the N-th save lasts, no file of this process grows beyond some bytes.
"""

import contextlib
import functools
import os
import resource
import sys

from jrl import cli
from jrl.device import processes, program_cache
from jrl.rollout import scoring
from jrl.run import records
from jrl.run.checkpoints import run_state


def say(text):
    with contextlib.suppress(OSError):  # a full disk
        print(text, file=sys.stderr, flush=True)


def announced(function, name, after=None):
    @functools.wraps(function)
    def call(*args, **kwargs):
        say(f"NOW {name}")
        result = function(*args, **kwargs)
        if after is not None:
            say(f"NOW {after}")
        return result

    return call


def with_full_disk(save, times):
    """Returns a save whose last of so many calls finds a full disk."""
    calls = []

    @functools.wraps(save)
    def call(*args, **kwargs):
        calls.append(save)
        if len(calls) != times:
            return save(*args, **kwargs)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
        try:
            return save(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return call


def announce():
    """Has every phase of a run say so before it begins."""
    run_state.save_step = with_full_disk(run_state.save_step, int(os.environ.get("FULL_DISK_AT_SAVE", 0)))
    records.save = announced(records.save, "save", "saved")
    scoring.Scorer.collect = announced(scoring.Scorer.collect, "scoring")
    processes.Processes.exchange = announced(processes.Processes.exchange, "exchange")
    call = program_cache.Program.__call__

    @functools.wraps(call)
    def calling(self, *args):
        say(f"NOW {self.name.rpartition('.')[2]}")
        return call(self, *args)

    program_cache.Program.__call__ = calling
    compile_one = program_cache.Program._executable

    @functools.wraps(compile_one)
    def compiling(self, args):
        if program_cache._signature(args) not in self._compiled:
            say("NOW compile")
        return compile_one(self, args)

    program_cache.Program._executable = compiling


if __name__ == "__main__":
    announce()
    sys.exit(cli.main(sys.argv[1:]))
