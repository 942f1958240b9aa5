"""The file access layer. Every file of a run is read and written through these functions. No JAX.

They work on local files. Files in a bucket are read from a local copy (`readable`), and a run in a bucket works in one
(jrl/run/bucket_run.py).
"""

from __future__ import annotations

import contextlib
import errno
import glob
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jrl.bucket.client import Missing, split_address
from jrl.bucket.local_copies import local_copy

_SCHEME = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]*)://?")
_SERIAL = itertools.count()
MOST_OBJECT_BYTES = 16 << 20
MOST_ROWS_BYTES = 4 << 30  # of a file of rows that is read at once
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")  # suffixes
TEMPORARY = ".jrl-tmp-"  # prefix of a file that was not committed


def local(path: str | os.PathLike[str]) -> Path:
    """Returns `path` as a local path. Raises ValueError for a bucket or another remote address."""
    text = os.fspath(path)
    if not text:
        raise ValueError("a path is empty; give a file or a folder on this machine")
    if scheme := _SCHEME.match(text):
        raise ValueError(
            f"{text!r} is a {scheme[1]}:// address, and here only local files can be used. A gs:// address may be the "
            "run that `jrl train --run` trains, what fingerprint, doctor, eval, rollouts, sample, score, export, "
            "replay and compare read, --from, and the path of a model, a tokenizer or data; else copy it here"
        )
    return Path(text)


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a valid gs:// address. Raises ValueError for an invalid one and for s3://."""
    return split_address(path) is not None


def readable(path: str | os.PathLike[str]) -> Path:
    """Returns a local path of a file or a folder: `path` itself, or a local copy of gs://BUCKET/NAME."""
    return local_copy(os.fspath(path)) if is_remote(path) else local(path)


def readable_without_weights(folder: str | os.PathLike[str]) -> Path:
    """Returns a local path of a published model, as `readable`, but without copying its weights from a bucket."""
    return local_copy(os.fspath(folder), without=WEIGHTS) if is_remote(folder) else local(folder)


def readable_file(folder: str | os.PathLike[str], name: str) -> Path | None:
    """Returns a local path of one file of a folder; None if it is missing. From a bucket, only that file is copied."""
    try:
        path = readable(os.path.join(os.fspath(folder), name))
    except Missing:
        return None
    return path if path.exists() else None


def beside(path: str, file: str | None) -> str:
    """Returns the path that a relative path in a file refers to.

    This is `path` unchanged if it exists from the current directory, or a file that a * in it stands for; else `path`
    joined to the folder of `file`, if that exists; else `path` unchanged, so that the error of opening it shows what
    was written.

    Args:
      file: the file that mentions the path; None: the command line or a Python call.
    """
    if not path or "\0" in path or file is None or os.path.isabs(path) or _SCHEME.match(path) or matches(path):
        return path
    joined = os.path.normpath(os.path.join(os.path.dirname(file), path))
    return joined if matches(joined) else path


def matches(path: str) -> list[str]:
    """Returns what exists of that name: the path itself, else all that a name with * stands for, sorted."""
    if os.path.exists(path):
        return [path]
    return sorted(glob.glob(glob.escape(path).replace("[*]", "*"))) if "*" in path else []


def normalize(path: str | os.PathLike[str]) -> Path:
    """Returns `path` as an absolute path without '..', which orbax and tensorstore refuse.

    Call it where a path enters jrl. In a path with '..', links are resolved, as the system does: the parent of a linked
    folder is not the parent of the link.

    Raises: ValueError for a name that is not UTF-8, which tensorstore refuses.
    """
    target = local(path)
    target = target.resolve() if ".." in target.parts else target.absolute()
    try:
        str(target).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the name of {str(target)!r} is not UTF-8; choose another") from error
    return target


def check_not_special(path: str | os.PathLike[str]) -> None:
    """Raises ValueError for a named pipe, a socket or a device: opening or reading one may block forever.

    Raises OSError if the path does not exist or cannot be inspected.
    """
    mode = os.stat(local(path)).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return
    kind = "a named pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
    raise ValueError(f"{os.fspath(path)!r} is {kind}, not a file; write its contents to a file and name that")


LFS_POINTER = b"version https://git-lfs.github.com/"  # what a clone without Git LFS holds in a large file's place
IS_POINTER = "is a pointer of Git LFS and not the file itself: `git lfs pull` in its repository downloads it"


def read_foreign(path: str | os.PathLike[str], most: int, within: str | os.PathLike[str] | None = None) -> bytes:
    """Returns the bytes of an untrusted file. It must be a plain file.

    Args:
      most: the most bytes that the file may have.
      within: the folder that the file came in. A link there may only lead to a file below the folder, or in the cache
        of a model hub (FOLDER/snapshots/REVISION) below FOLDER. None: the user named the file, and it may be a link.

    Raises: ValueError for a link out of the folder, a folder, a pipe, a socket, a device, a file that is too long, or a
        pointer of Git LFS.
    """
    target = check_foreign(path, within)
    descriptor = os.open(target, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as handle:
        state = os.fstat(descriptor)  # of the open file: the name may lead elsewhere by now
        if not stat.S_ISREG(state.st_mode):
            raise ValueError(f"{os.fspath(path)!r} is not a plain file")
        if state.st_size > most:
            raise ValueError(f"{os.fspath(path)!r} has {state.st_size} bytes; at most {most} are read")
        data = handle.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{os.fspath(path)!r} has more than {most} bytes, and no more are read")
    if data.startswith(LFS_POINTER):
        raise ValueError(f"{os.fspath(path)!r} {IS_POINTER}")
    return data


def check_foreign(path: str | os.PathLike[str], within: str | os.PathLike[str] | None) -> Path:
    """Returns the plain file that an untrusted path resolves to, without links.

    Args:
      within: as in `read_foreign`.

    Raises: ValueError for a link out of the folder, a folder, a pipe, a socket or a device.
    """
    check_not_special(path)
    target = Path(os.path.realpath(local(path)))
    if target.is_dir():
        raise ValueError(f"{os.fspath(path)!r} is a folder, not a file")
    if within is not None:
        root = Path(os.path.realpath(local(within)))
        allowed = root.parents[1] if root.parent.name == "snapshots" else root
        if not target.is_relative_to(allowed):
            raise ValueError(
                f"{os.fspath(path)!r} is a link to {os.fspath(target)!r}, outside of its folder; copy the file into "
                "the folder if you trust it"
            )
    return target


def parse_json(data: bytes | str, name: str | os.PathLike[str]) -> Any:
    """Returns the value of untrusted JSON. Raises ValueError if it is not JSON or nested too deeply.

    Args:
      name: what the error calls it.
    """
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError(f"{os.fspath(name)} is nested too deep to be read") from error
    except ValueError as error:
        raise ValueError(f"{os.fspath(name)} is not JSON: {error}") from error


def parse_object(data: bytes | str, name: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the object in untrusted JSON. Raises ValueError as `parse_json`, and if it is not an object."""
    value = parse_json(data, name)
    if not isinstance(value, dict):
        raise ValueError(f"{os.fspath(name)} holds {type(value).__name__}, not an object")
    return value


def exists(path: str | os.PathLike[str]) -> bool:
    return local(path).exists()


def size(path: str | os.PathLike[str]) -> int:
    """Returns the length of a file in bytes."""
    return local(path).stat().st_size


def list_dir(path: str | os.PathLike[str]) -> list[str]:
    """Returns the names in a folder, sorted; [] if the folder does not exist."""
    try:
        return sorted(os.listdir(local(path)))
    except FileNotFoundError:
        return []


def files_below(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yields every name below `path` that is not a plain folder, relative with '/' between parts, sorted by folder.

    Links are yielded and not followed.
    """
    root = local(path)
    for folder, folders, files in os.walk(root):
        folders.sort()
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in sorted(files + links):
            yield (Path(folder) / name).relative_to(root).as_posix()


def make_dir(path: str | os.PathLike[str]) -> Path:
    """Creates a folder and its parents if missing, and returns it."""
    folder = local(path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_private_dir(path: str | os.PathLike[str]) -> Path:
    """Creates a folder that only its owner can access, and its parents if missing, and returns it. An existing folder
    is unchanged."""
    folder = local(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    return local(path).read_bytes()


def read_object(path: str | os.PathLike[str], within: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Returns the JSON object in an untrusted file. Raises ValueError as `parse_object` and `read_foreign`, and for a
    file above MOST_OBJECT_BYTES.

    Args:
      within: as in `read_foreign`.
    """
    return parse_object(read_foreign(path, MOST_OBJECT_BYTES, within), path)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds the file's path to an OSError raised while writing to an open file, which has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def cause(error: BaseException) -> str:
    """Returns the system's message if a disk is full, which tensorstore wraps in a long one; else `first_line`."""
    known = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
    return next((words for words in known if words in str(error)), None) or first_line(error)


def first_line(error: BaseException) -> str:
    """Returns the type and the first line of an error: "ValueError: message"."""
    text = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def write_bytes_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Replaces a file atomically: a reader, or a machine that lost power, sees the old bytes or the new ones.

    Raises: OSError with the path, such as for a full disk; the old file is intact and no temporary file is left.
    """
    target = local(path)
    temporary = target.with_name(f"{TEMPORARY}{target.name}-{os.getpid()}-{next(_SERIAL)}")
    try:
        with open(temporary, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, f"could not write {len(data)} bytes: {error.strerror}", str(target)) from error
    sync_dir(target.parent)


def write_files(folder: str | os.PathLike[str], files: Mapping[str, bytes]) -> None:
    """Writes {name in the folder, such as "a/b.json": bytes}, each as `write_bytes_atomic`, with the folders above it.

    Raises: OSError with the path.
    """
    for name, data in files.items():
        target = local(folder) / name
        make_dir(target.parent)
        write_bytes_atomic(target, data)


def open_append(path: str | os.PathLike[str], length: int) -> BinaryIO:
    """Opens a file for appending after truncating it to `length` bytes, creating it if length is 0.

    A resumed run thus drops rows that were written after the step that it resumes from.

    Raises: ValueError if the file is shorter than `length`: committed bytes are gone.
    """
    target = local(path)
    handle = open(target, "ab")
    present = os.fstat(handle.fileno()).st_size
    if present < length:
        handle.close()
        raise ValueError(
            f"{target} holds {present} bytes but the checkpoint committed {length}; the file was cut or replaced"
        )
    if present > length:
        handle.truncate(length)
    return handle


def rename(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Renames a file or a folder within one file system, durably. A folder never replaces one that is not empty."""
    os.rename(local(source), local(target))
    sync_dir(local(target).parent)
    if local(source).parent != local(target).parent:
        sync_dir(local(source).parent)


def remove_file(path: str | os.PathLike[str]) -> None:
    """Removes a file, if it exists."""
    local(path).unlink(missing_ok=True)


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Removes a folder and everything below it, if it exists."""
    target = local(path)
    try:
        shutil.rmtree(target)
    except FileNotFoundError:
        return
    sync_dir(target.parent)


def sync_dir(path: str | os.PathLike[str]) -> None:
    """Syncs a folder: renames and new names in it then survive a power loss."""
    descriptor = os.open(local(path), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems cannot sync a folder; their renames are durable when they return.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
            raise
    finally:
        os.close(descriptor)


def sync_tree(path: str | os.PathLike[str]) -> None:
    """Syncs every file and folder below `path`: they then survive a power loss."""
    for folder, _, files in os.walk(local(path), topdown=False):
        for name in files:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_dir(folder)
