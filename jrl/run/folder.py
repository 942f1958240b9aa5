"""The folder that a run works in: where it is, and that one run at a time holds it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

from jrl import paths
from jrl.device.processes import Processes
from jrl.run.agreement import check_shared_folder
from jrl.run.checkpoints.lock import hold_run
from jrl.run.identity import remove_unbegun


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Where a run works. `publish()` commits the folder as it is; of a local run it does nothing. All processes of a
    run call it."""

    path: Path
    publish: Callable[[], None] = lambda: None
    address: str | None = None  # gs://BUCKET/NAME; None: a local run
    shared: bool = True  # whether all processes work in this folder; False: each has one of its own
    committed: Callable[[], list[int]] | None = None  # the steps that are in the bucket; None: a local run


@contextlib.contextmanager
def held_folder(folder: RunFolder, processes: Processes) -> Iterator[Path]:
    """Holds a run's folder, made if it is new, and yields its path once all processes see it. A new one is removed
    again where it has no manifest in the end.

    Raises: RunIsHeld where another process trains in the folder; ProcessesDisagree where a process does not see it.
    """
    path = folder.path
    with contextlib.ExitStack() as stack:
        if processes.writer:
            is_new = not paths.exists(path)
            path = Path(paths.make_private_dir(path))
            lock = hold_run(path)
            stack.callback(lock.release)
            if is_new:
                stack.callback(remove_unbegun, path)
        if folder.shared:
            check_shared_folder(path, processes)
        yield path
