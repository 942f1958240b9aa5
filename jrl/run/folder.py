"""The folder that a run works in: one process at a time trains there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from jrl import paths
from jrl.device.processes import Processes
from jrl.run.agreement import check_shared_folder
from jrl.run.bucket_run import RunFolder
from jrl.run.checkpoints.lock import hold_run
from jrl.run.identity import remove_unbegun


@contextlib.contextmanager
def held_folder(folder: RunFolder, processes: Processes) -> Iterator[Path]:
    """Holds the lock of a run's folder, which is created if it is new, and yields its path once all processes see it. A
    new one is removed at the end if it has no manifest.

    Raises: RunIsHeld if another process trains in the folder; ProcessesDisagree if a process does not see it.
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
