"""Private local copies of what is in buckets: complete, checked, one folder for each state of what was read."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jrl.bucket.client import Bucket, Missing, Object, split_address

THREADS = 8
_in_use: dict[Path, int] = {}  # the copies that this process reads, and the descriptors of their locks


def copies_home() -> Path:
    """Returns the folder of all local copies: JRL_BUCKET_COPIES, else $XDG_CACHE_HOME/jrl/buckets (~/.cache). Only its
    owner can look into it."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    home = Path(os.environ.get("JRL_BUCKET_COPIES") or os.path.join(cache, "jrl", "buckets")).absolute()
    home.parent.mkdir(parents=True, exist_ok=True)
    home.mkdir(mode=0o700, exist_ok=True)
    return home


def key_of(*texts: str) -> str:
    """Returns the name of a folder for what these texts name."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:24]


def complete_copy(bucket: Bucket, name: str, state: str, fill: Callable[[Path], None]) -> Path:
    """Returns a folder that `fill` has filled, once for each state of what is under a name. The copies of other states
    that no process reads are removed.

    Args:
      state: names what is copied; another state is another copy.
    """
    home = copies_home() / "read" / key_of(bucket.endpoint, f"gs://{bucket.name}/{name}")
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = home / key_of(state)
    lock = _open_lock(place)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)  # nobody removes it; readers do not exclude each other
        if not place.exists():
            _fill_once(place, fill)
    except BaseException:
        os.close(lock)
        raise
    if _in_use.setdefault(place, lock) != lock:  # this process reads it already
        os.close(lock)
    _remove_unused(home, place)
    return place


def _fill_once(place: Path, fill: Callable[[Path], None]) -> None:
    """Fills a folder that is missing. Of several who want it one does; the others wait for it."""
    with contextlib.closing(os.fdopen(_open_lock(place.with_name(f"{place.name}.filling")), "rb")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.exists():
            return
        filling = Path(tempfile.mkdtemp(dir=place.parent, prefix=".filling-"))
        try:
            fill(filling)
            os.rename(filling, place)
        except BaseException:
            shutil.rmtree(filling, ignore_errors=True)
            raise


def _open_lock(place: Path) -> int:
    return os.open(f"{place}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _remove_unused(home: Path, used: Path) -> None:
    for other in home.iterdir():
        if other == used or other.suffix == ".lock" or other.name.startswith("."):
            continue
        with contextlib.closing(os.fdopen(_open_lock(other), "rb")) as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other, ignore_errors=True)


def local_copy(address: str) -> Path:
    """Returns a local copy of the file or the folder at gs://BUCKET/NAME, as it was when this process first asked.

    Raises: BucketError where there is nothing, or it may not be read.
    """
    name, path = split_address(address)
    return _copy_of(name, path, Bucket(name).endpoint)


@functools.cache
def _copy_of(name: str, path: str, endpoint: str) -> Path:
    bucket, address = Bucket(name, endpoint=endpoint), f"gs://{name}/{path}"
    if (single := bucket.stat(path)) is not None:
        stored = {path.rsplit("/", 1)[-1]: single}
    else:
        stored = {one.name[len(path) + 1 :]: one for one in bucket.list(f"{path}/") if not one.name.endswith("/")}
        if not stored:
            raise Missing(2, f"{address}: there is no such file, and no folder of that name, in the bucket")
    state = "\n".join(f"{file} {one.generation} {one.bytes}" for file, one in sorted(stored.items()))
    last = path.rsplit("/", 1)[-1]
    fill = lambda folder: _download(bucket, stored, folder / last, is_file=single is not None)
    return complete_copy(bucket, path, state, fill) / last


def _download(bucket: Bucket, stored: dict[str, Object], target: Path, *, is_file: bool) -> None:
    def one(item: tuple[str, Object]) -> None:
        place = target if is_file else inside(target, item[0])
        place.parent.mkdir(parents=True, exist_ok=True)
        bucket.download(item[1], place)

    in_parallel(one, stored.items())


def inside(folder: Path, name: str) -> Path:
    """Returns FOLDER/NAME. Raises ValueError for a name that leads out of the folder."""
    if name.startswith("/") or "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"the bucket holds an object of the name {name!r}, which is no name of a file")
    return folder / name


def in_parallel(call: Callable, items) -> Iterator:
    """Returns the results of a call on every item, in their order. The first error ends it; calls under way are
    awaited."""
    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(call, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise
