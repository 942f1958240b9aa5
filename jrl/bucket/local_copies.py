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

from jrl.bucket.client import Bucket, Missing, Object, shown, split_address

THREADS = 8
_in_use: list[int] = []  # descriptors of the copies that this process reads


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


def complete_copy(address: str, state: str, fill: Callable[[Path], None]) -> Path:
    """Returns a folder that `fill` has filled, once for each state of an address. The copies of other states that no
    process reads are removed.

    Args:
      state: names what is copied; another state is another copy.
    """
    home = copies_home() / "read" / key_of(shown(address))
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = home / key_of(state)
    lock = os.open(f"{place}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # one process fills it
    if not place.exists():
        filling = Path(tempfile.mkdtemp(dir=home, prefix=".filling-"))
        try:
            fill(filling)
            os.rename(filling, place)
        except BaseException:
            shutil.rmtree(filling, ignore_errors=True)
            os.close(lock)
            raise
    fcntl.flock(lock, fcntl.LOCK_SH)
    _in_use.append(lock)
    _remove_unused(home, place)
    return place


def _remove_unused(home: Path, used: Path) -> None:
    for other in home.iterdir():
        if other == used or other.suffix == ".lock" or other.name.startswith("."):
            continue
        lock = os.open(f"{other}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.closing(os.fdopen(lock, "rb")), contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other, ignore_errors=True)


@functools.cache
def local_copy(address: str) -> Path:
    """Returns a local copy of the file or the folder at gs://BUCKET/NAME, as it was when this process first asked.

    Raises: BucketError where there is nothing, or it may not be read.
    """
    name, path = split_address(address)
    bucket = Bucket(name)
    if (single := bucket.stat(path)) is not None:
        stored = {path.rsplit("/", 1)[-1]: single}
    else:
        stored = {one.name[len(path) + 1 :]: one for one in bucket.list(f"{path}/") if not one.name.endswith("/")}
        if not stored:
            raise Missing(2, f"{shown(address)}: there is no such file, and no folder of that name, in the bucket")
    state = "\n".join(f"{file} {one.generation} {one.bytes}" for file, one in sorted(stored.items()))
    place = complete_copy(address, state, lambda folder: _download(bucket, stored, folder / path.rsplit("/", 1)[-1],
                                                                   is_file=single is not None))  # fmt: skip
    return place / path.rsplit("/", 1)[-1]


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
