"""The commands of jrl, one per file: the arguments and the call. The work is done in jrl/tools/.

A command imports slow modules only when it runs, so that help and errors for typos appear at once.
"""

from __future__ import annotations

from jrl.commands import (
    check,
    compare,
    data,
    describe,
    doctor,
    evaluate,
    export,
    fingerprint,
    new,
    plan,
    replay,
    rollouts,
    sample,
    score,
    sweep,
    train,
)
from jrl.commands.contract import Command

COMMANDS: dict[str, Command] = {
    "train": train.COMMAND,
    "sweep": sweep.COMMAND,
    "compare": compare.COMMAND,
    "new": new.COMMAND,
    "plan": plan.COMMAND,
    "score": score.COMMAND,
    "sample": sample.COMMAND,
    "eval": evaluate.COMMAND,
    "export": export.COMMAND,
    "check": check.COMMAND,
    "doctor": doctor.COMMAND,
    "data": data.COMMAND,
    "rollouts": rollouts.COMMAND,
    "fingerprint": fingerprint.COMMAND,
    "replay": replay.COMMAND,
    "list": describe.LIST,
    "help": describe.HELP,
}
