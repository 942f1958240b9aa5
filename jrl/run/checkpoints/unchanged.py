"""Large arrays that have not changed since the step before are links to its files, not another copy.

    ROOT/00000010/unchanged/...    such arrays, written by orbax; files that several steps have in common (hard links)

These are the base under adapters, a reference, a teacher: of an 8B base 16 GB a save. Which leaves have not changed is
told by their hashes, so no stage has to say what it trains. What is linked is hashed once more at every save, like all
other bytes of it, and written anew if it is damaged. A file system without hard links gets another copy. Both
are logged.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jrl import paths
from jrl.run.checkpoints import digest

FOLDER = "unchanged"
LEAST_BYTES = 1 << 20  # smaller leaves are not worth it
NO_LINKS = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # a copy could not be written either


class Unchanged(NamedTuple):
    """What a step stores in its folder `unchanged`."""

    leaves: list[str]  # in the order of their names
    files: dict[str, dict[str, Any]]  # {file of the step: {"sha256", "bytes"}} of what is linked; {}: nothing is

    @property
    def is_linked(self) -> bool:
        return bool(self.files)


def find_unchanged(leaves: Mapping[str, Any], earlier: Mapping[str, Any]) -> Unchanged:
    """Returns the large leaves that are as they were at an earlier step, and the files to link.

    The files are linked if all leaves in them are unchanged, and hold more than the leaves that would be written again
    although they are unchanged too, such as the reference of a stage that has begun since.

    Args:
      leaves: {name: dtype, shape and hash} of the step to save. earlier: the manifest of the earlier step.
    """
    large = {name: entry for name, entry in leaves.items() if size_of(entry) >= LEAST_BYTES}
    same = {name for name, entry in large.items() if earlier["leaves"].get(name) == entry}
    stored = set(earlier.get(FOLDER, ()))
    size = lambda names: sum(size_of(leaves[name]) for name in names)
    if stored and stored <= same and size(same - stored) < size(stored):
        files = {name: entry for name, entry in earlier["files"].items() if name.startswith(f"{FOLDER}/")}
        return Unchanged(sorted(stored), files)
    return Unchanged(sorted(same), {})


def size_of(entry: Mapping[str, Any]) -> int:
    """Returns the bytes of a leaf from its entry in a manifest."""
    return math.prod(entry["data_shape"]) * np.dtype(entry["data_dtype"]).itemsize


def link_files(files: Mapping[str, Mapping[str, Any]], source: Path, target: Path) -> bool:
    """Links files of one step into another, and hashes them. Returns False if the file system has no hard links.

    Args:
      files: {name: {"sha256", "bytes"}}. source, target: the folders of the steps. If not True is returned, some may be
        in the target.

    Raises: ValueError if a file is missing, cannot be read or has other bytes than were saved; OSError if the disk is
      full or read-only.
    """
    if outside := [name for name in files if ".." in name.split("/")]:  # not what jrl has written
        raise ValueError(f"{outside[0]} is not a file of a step")
    try:
        for name in files:
            paths.make_dir((target / name).parent)
            os.link(source / name, target / name, follow_symlinks=False)
    except OSError as error:
        if error.errno in NO_LINKS:
            return False
        if error.errno in DISK_FAULTS:
            raise
        raise ValueError(paths.first_line(error)) from error
    try:
        actual = digest.tree_digests(target, files)
    except OSError as error:
        raise ValueError(paths.first_line(error)) from error
    if damaged := [name for name, entry in actual.items() if entry != files[name]]:
        raise ValueError(f"{damaged[0]} has other bytes than were saved")
    return True
