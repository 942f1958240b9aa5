"""Runs the jrl command and says on standard error what the process is doing: for trials that kill it on purpose."""

import functools
import sys

from jrl import cli, lattice, records, scoring


def announced(function, name):
    @functools.wraps(function)
    def call(*args, **kwargs):
        print(f"NOW {name}", file=sys.stderr, flush=True)
        return function(*args, **kwargs)

    return call


if __name__ == "__main__":
    records.save = announced(records.save, "save")
    scoring.Scorer.collect = announced(scoring.Scorer.collect, "scoring")
    compile_one = lattice.Program._executable

    @functools.wraps(compile_one)
    def compiling(self, args):
        if lattice._signature(args) not in self._compiled:
            print("NOW compile", file=sys.stderr, flush=True)
        return compile_one(self, args)

    lattice.Program._executable = compiling
    sys.exit(cli.main(sys.argv[1:]))
