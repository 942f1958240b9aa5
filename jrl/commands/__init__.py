"""The commands of jrl, one a file: its arguments and what it does. The work is in jrl/tools/.

Nothing slow is imported before a command needs it: a typo is refused at once, and help is printed at once.
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
