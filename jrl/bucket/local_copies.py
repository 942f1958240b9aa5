"""Private local copies of objects in buckets: complete, checked, one folder for each state of the source."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jrl.bucket.client import Bucket, Missing, Object, split_address
from jrl.device.cache_home import cache_home

THREADS = 8
FILLING = ".filling"  # suffix of an incomplete copy
_in_use: dict[Path, int] = {}  # copies that this process reads -> file descriptors of their locks


def copies_home() -> Path:
    """Returns the folder of all local copies: JRL_BUCKET_COPIES, else $XDG_CACHE_HOME/jrl/buckets (~/.cache).

    Creates it if missing, accessible only to its owner. Raises ValueError if there is no such place.
    """
    cache = cache_home(os.environ)
    if chosen := os.environ.get("JRL_BUCKET_COPIES"):
        home = Path(chosen).absolute()
    elif cache is not None:
        home = cache / "buckets"
    else:
        raise ValueError(
            "there is no place for local copies of what is in buckets: XDG_CACHE_HOME is a relative path, or there is "
            "no home directory; set JRL_BUCKET_COPIES to a folder"
        )
    home.parent.mkdir(parents=True, exist_ok=True)
    home.mkdir(mode=0o700, exist_ok=True)
    return home


@contextlib.contextmanager
def naming_home() -> Iterator[None]:
    """Adds to the error of a full disk where local copies are, and what chooses another place."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        why = f"{error.strerror} for local copies of what is in buckets; JRL_BUCKET_COPIES can name another place"
        raise OSError(error.errno, why, str(copies_home())) from error


def key_of(*texts: str) -> str:
    """Returns a folder name, a hash of `texts`."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:24]


def complete_copy(bucket: Bucket, name: str, state: str, fill: Callable[[Path], None]) -> Path:
    """Returns a folder that `fill` has filled, once for each state of an object or a folder of a bucket. Removes the
    copies of other states that no process reads.

    Args:
      name: the object or the folder, and on further lines what of it is copied.
      state: identifies the content; another state gets another copy.
      fill: writes the content into an empty folder.
    """
    home = copies_home() / "read" / key_of(bucket.endpoint, f"gs://{bucket.name}/{name}")
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = home / key_of(state)
    lock = _open_lock(place)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)  # keeps the copy from being removed; readers share it
        if not place.exists():
            with naming_home():
                _fill_once(place, fill)
    except BaseException:
        os.close(lock)
        raise
    if _in_use.setdefault(place, lock) != lock:  # this process reads it already
        os.close(lock)
    _remove_unused(home, place)
    return place


def _fill_once(place: Path, fill: Callable[[Path], None]) -> None:
    """Fills a missing folder. Of several processes that need it, one fills it; the others wait."""
    with contextlib.closing(os.fdopen(_open_lock(_filling(place)), "rb")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.exists():
            return
        shutil.rmtree(_filling(place), ignore_errors=True)  # left by a killed process
        _filling(place).mkdir(mode=0o700)
        try:
            fill(_filling(place))
            _sync_folders(_filling(place))
            os.rename(_filling(place), place)
            _sync_folder(place.parent)
        except BaseException:
            shutil.rmtree(_filling(place), ignore_errors=True)
            raise


def _filling(place: Path) -> Path:
    """Returns the path of a copy until it is complete."""
    return place.with_name(f"{place.name}{FILLING}")


def _sync_folders(root: Path) -> None:
    """Syncs a folder and all folders below it: file names then survive a power loss, as their bytes do."""
    for folder, _, _ in os.walk(root):
        _sync_folder(folder)


def _sync_folder(folder: str | os.PathLike[str]) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot; a lost copy is fetched again
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_lock(place: Path) -> int:
    return os.open(f"{place}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _remove_unused(home: Path, used: Path) -> None:
    """Removes the copies that no process reads or fills, such as one that a killed process left incomplete."""
    for other in home.iterdir():
        if other == used or other.suffix == ".lock":
            continue
        # OSError: it is in use, or another process has removed it since the folder was listed.
        with contextlib.closing(os.fdopen(_open_lock(other), "rb")) as lock, contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if other.suffix != FILLING:  # a death while it is removed must not leave half of it under its name
                shutil.rmtree(_filling(other), ignore_errors=True)
                other = other.rename(_filling(other))
            shutil.rmtree(other, ignore_errors=True)


def local_copy(address: str, without: tuple[str, ...] = ()) -> Path:
    """Returns a local copy of the file or the folder at gs://BUCKET/NAME, as it was when this process first read it.

    Args:
      without: suffixes of file names in a folder that are not copied.

    Raises: BucketError if there is nothing, or no permission to read it.
    """
    name, path = split_address(address)
    return _copy_of(name, path, Bucket(name).endpoint, without)


@functools.cache
def _copy_of(name: str, path: str, endpoint: str, without: tuple[str, ...]) -> Path:
    bucket, basename = Bucket(name, endpoint=endpoint), path.rsplit("/", 1)[-1]
    stored, is_file = _list_objects(name, path, endpoint)
    if not is_file:
        stored = {file: entry for file, entry in stored.items() if not file.endswith(without)}
    state = "\n".join(f"{file} {entry.generation} {entry.bytes}" for file, entry in sorted(stored.items()))
    fill = lambda folder: _download(bucket, stored, folder / basename, is_file=is_file)
    copied = "\n".join([path, *without])  # copies of a part do not replace those of all
    return complete_copy(bucket, copied, state, fill) / basename


@functools.cache
def _list_objects(name: str, path: str, endpoint: str) -> tuple[dict[str, Object], bool]:
    """Returns the objects at a name, by relative file name, and whether it is a single file. Cached: all copies of a
    process are of this state."""
    bucket = Bucket(name, endpoint=endpoint)
    if (single := bucket.stat(path)) is not None:
        return {path.rsplit("/", 1)[-1]: single}, True
    stored = {obj.name[len(path) + 1 :]: obj for obj in bucket.list(f"{path}/") if not obj.name.endswith("/")}
    if not stored:
        hint = "; a * stands for files on this machine only; copy them here" if "*" in path else ""
        raise Missing(2, f"gs://{name}/{path}: there is no such file, and no folder of that name, in the bucket{hint}")
    return stored, False


def forget_copies() -> None:
    """Clears the caches of this process: its next read looks at the buckets again."""
    _copy_of.cache_clear()
    _list_objects.cache_clear()


def _download(bucket: Bucket, stored: dict[str, Object], target: Path, *, is_file: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not is_file:
        target.mkdir(exist_ok=True)  # even if nothing is copied

    def download(item: tuple[str, Object]) -> None:
        place = target if is_file else inside(target, item[0])
        place.parent.mkdir(parents=True, exist_ok=True)
        bucket.download(item[1], place)

    in_parallel(download, stored.items())


def inside(folder: Path, name: str) -> Path:
    """Returns FOLDER/NAME. Raises ValueError for a name that is not a relative path below the folder."""
    if name.startswith("/") or "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"the bucket has an object named {name!r}, which is not a valid file name")
    return folder / name


def in_parallel(call: Callable, items: Iterable) -> list:
    """Returns the results of a call on every item, in order. On an error, calls that have not started are canceled,
    running ones are awaited, and the error is raised."""
    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(call, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise
