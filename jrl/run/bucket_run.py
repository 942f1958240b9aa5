"""A run in a bucket: it works in a private local folder, and what is committed is in the bucket.

    gs://BUCKET/NAME/run.json         the commit: every file of the run, as parts with bytes and sha256
    gs://BUCKET/NAME/files/PATH/...   the parts, each written once and never changed
    gs://BUCKET/NAME/lock             who holds the run (jrl/run/lease.py)

A commit uploads the parts that are new and then replaces run.json, bound to the generation that was last read: one
object decides, so there is no half of a commit, and nothing is ever found by a listing. Whoever takes the run first
writes run.json under its own number, its `life`; a process that has lost the run without noticing then fails to commit.
Parts are named by life and process, so no two processes write one object, and what is swept belongs to earlier lives
only. Of a run of several processes each works in a folder of its own and uploads what it wrote; once all have said
which parts they have uploaded, process 0, which holds the lease, writes run.json. No JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import itertools
import json
import logging
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jrl import paths
from jrl.bucket.client import Bucket, BucketError, Conflict, Missing, shown, split_address
from jrl.bucket.local_copies import (
    complete_copy,
    copies_home,
    in_parallel,
    inside,
    key_of,
    local_copy,
    naming_home,
)
from jrl.device.processes import ONE, Processes
from jrl.run.checkpoints.lock import RunIsHeld, hold_run
from jrl.run.lease import NO_LEASE, Lease, holder_in_bucket, take_lease

FORMAT = 1
COMMIT, FILES, LOCK = "run.json", "files", "lock"
NEEDED = ("checkpoints/", "rollouts/")  # files below these do not disappear while a commit reads them
PART_BYTES = 8 << 20  # of a file in one object: eight at once are sent in 30 s at 18 Mbit/s
MERGED_BYTES = 1 << 20  # a last part below this is rewritten when its file grows
FRESH_SECONDS = 2.0  # a file that changed within these is read again at the next commit
READ_TRIES = 8
_STEP = re.compile(r"checkpoints/(\d+)/manifest\.json")
_log = logging.getLogger(__name__)


class LeaseLost(RuntimeError):
    """Another process has taken the run."""


class DamagedObject(BucketError):
    """A part of a file has other bytes than were committed."""


class Part(NamedTuple):
    """A range of a file, stored as one object."""

    object: str  # below gs://BUCKET/NAME/files/
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Commit:
    """What a run is in its bucket."""

    life: int  # of whoever wrote it
    files: dict[str, tuple[Part, ...]]
    # Makes all conditional writes differ, and identifies the writer.
    nonce: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex, compare=False)

    def steps(self) -> list[int]:
        """Returns the steps whose checkpoints are committed, oldest first."""
        return sorted(int(match[1]) for name in self.files if (match := _STEP.fullmatch(name)))

    def objects(self) -> set[str]:
        return {part.object for parts in self.files.values() for part in parts}


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
def open_run_folder(run: str | os.PathLike[str], processes: Processes = ONE) -> Iterator[RunFolder]:
    """Opens the folder of a run that is trained: a local one as it is; of gs://BUCKET/NAME the local copy of this
    process, brought to what is committed. At the end, what the run has written since is committed too.

    Raises: RunIsHeld where another process trains it; BucketError where the bucket cannot be read and written;
      RefusedIdentity where the place holds something else.
    """
    place = split_address(run)
    bucket = None if place is None else Bucket(place[0])
    address = "a local folder" if place is None else shown(run).rstrip("/")
    processes.agree("run", {"--run": address, **({} if bucket is None else {"endpoint": bucket.endpoint})})
    if place is None:
        yield RunFolder(paths.normalize(run))
        return
    processes.status.begin(f"opening {address}")
    key = key_of(bucket.endpoint, address)
    base = paths.make_private_dir(copies_home() / "runs" / (key if processes.writer else f"{key}.{processes.index}"))
    try:
        held = hold_run(base)
    except RunIsHeld as error:
        raise RunIsHeld(address, error.holder) from error
    try:
        folder = paths.make_private_dir(base / _name_of_folder(place[1], key))
        if not processes.writer:
            yield from _opened(bucket, place[1], folder, NO_LEASE, processes)
            return
        if read_commit(bucket, place[1])[0] is None:  # before anything is written there
            _refuse_foreign(bucket, place[1])
        lease = take_lease(bucket, f"{place[1]}/{LOCK}", address, _name_of_copy(base / LOCK))
        try:
            yield from _opened(bucket, place[1], folder, lease, processes)
        finally:
            lease.release()
    finally:
        held.release()


def _opened(bucket: Bucket, name: str, folder: Path, lease: Lease, processes: Processes) -> Iterator[RunFolder]:
    address = address_of(bucket, name)
    commit, generation = claim_together(bucket, name, processes)
    if commit.files and processes.writer:
        steps = commit.steps()
        what = f"its newest checkpoint is of step {steps[-1]}" if steps else "it has no checkpoint yet"
        _log.warning("%s: continuing in %s from what is committed; %s", address, folder, what)
    lost = sweep(bucket, name, commit) if processes.writer else set()
    with naming_home():
        damaged = fetch_sound(bucket, name, commit, folder)
    lost |= {part.object for parts in damaged.values() for part in parts}
    # From here on commits may remove what others would still read.
    lost = {part for process_lost in processes.exchange("fetched", sorted(lost)) for part in process_lost}
    losses = Losses(damaged, frozenset(lost))
    publisher = Publisher(bucket, name, folder, lease, commit, generation, processes, losses)
    try:
        yield RunFolder(folder, publisher.publish, address, processes.count == 1, publisher.steps)
    except BaseException:
        # As after a kill, what is on disk is sound. What ended the run is what its user must read.
        if processes.count == 1 and not publisher.failed:  # with several, others may be gone
            with contextlib.suppress(OSError, LeaseLost):
                publisher.publish_begun()
        raise
    publisher.publish_begun()


def address_of(bucket: Bucket, name: str) -> str:
    """Returns the address of a run."""
    return f"gs://{bucket.name}/{name}"


def claim_together(bucket: Bucket, name: str, processes: Processes) -> tuple[Commit, int]:
    """Returns the commit that process 0 has claimed, and its generation, in all processes."""
    if processes.writer:
        commit, generation = claim(bucket, name)
        processes.exchange("claimed", [commit.life, generation])
        return commit, generation
    life, expected = processes.exchange("claimed", None)[0]
    commit, generation = read_commit(bucket, name)
    if commit is None or (commit.life, generation) != (life, expected):
        raise _taken(address_of(bucket, name))
    return commit, generation


def claim(bucket: Bucket, name: str) -> tuple[Commit, int]:
    """Writes the commit under a new life, so that earlier holders of the run can no longer commit.

    Returns it and its generation.
    """
    while True:
        before, generation = read_commit(bucket, name)
        if before is None:
            _refuse_foreign(bucket, name)
        commit = Commit(1, {}) if before is None else Commit(before.life + 1, before.files)
        with contextlib.suppress(Conflict):
            return commit, bucket.put(f"{name}/{COMMIT}", _to_json(commit), if_generation=generation).generation


def _refuse_foreign(bucket: Bucket, name: str) -> None:
    """Raises ForeignFolder if there are objects that belong to no run, or to one whose run.json was removed."""
    address = address_of(bucket, name)
    if others := _foreign_names(bucket, name):
        raise ForeignFolder(
            f"{address} is not a run and already contains {', '.join(others[:3])}; choose another --run"
        )
    if _has_parts(bucket, name):
        raise ForeignFolder(_without_commit(address))


def _has_parts(bucket: Bucket, name: str) -> bool:
    """Whether there are files of a run. A new run writes run.json before any of them."""
    return next(bucket.list(f"{name}/{FILES}/"), None) is not None


def _without_commit(address: str) -> str:
    return (
        f"{address} holds files of a run, and {COMMIT}, which says what they are, was removed. Nothing was changed; "
        f"bring back its last version, where the bucket keeps versions or deleted objects, or choose another --run"
    )


def _foreign_names(bucket: Bucket, name: str) -> list[str]:
    """Returns some of the names below NAME that a run does not write before its first commit."""
    names = itertools.islice((stored.name[len(name) + 1 :] for stored in bucket.list(f"{name}/")), 50)
    return [file for file in names if file != LOCK and not file.startswith(f"{FILES}/")]


class ForeignFolder(ValueError):
    """The address of a run holds something else."""


def sweep(bucket: Bucket, name: str, commit: Commit) -> set[str]:
    """Removes what earlier lives have uploaded and not committed, or not removed. Returns the committed objects that
    are not listed. A listing that is behind costs nothing but uploads: what it lacks is swept another time."""
    root, used = f"{name}/{FILES}/", commit.objects()
    lost = set(used)
    for stored in bucket.list(root):
        part = stored.name[len(root) :]
        lost.discard(part)
        if part not in used and (life := _life_of(part)) is not None and life < commit.life:
            bucket.delete(stored.name)
    return lost


def _life_of(part: str) -> int | None:
    match = re.search(r"/(\d+)-\d+-\d+$", part)
    return None if match is None else int(match[1])


def read_commit(bucket: Bucket, name: str) -> tuple[Commit | None, int]:
    """Returns the commit of a run and its generation; (None, 0) if there is none."""
    try:
        data, generation = bucket.get(f"{name}/{COMMIT}")
    except Missing:
        return None, 0
    try:
        content = json.loads(data)
        if content["format"] != FORMAT:
            raise ValueError(f"it is of format {content['format']}, and this version reads {FORMAT}")
        files = {file: tuple(Part(*part) for part in parts) for file, parts in content["files"].items()}
        return Commit(int(content["life"]), files, str(content["nonce"])), generation
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ForeignFolder(
            f"{address_of(bucket, name)}/{COMMIT} is not the commit of a run ({error}); choose another --run"
        ) from error


def _to_json(commit: Commit) -> bytes:
    content = {
        "format": FORMAT,
        "life": commit.life,
        "steps": commit.steps(),
        "nonce": commit.nonce,
        "files": {name: [list(part) for part in parts] for name, parts in sorted(commit.files.items())},
    }
    return json.dumps(content, separators=(",", ":")).encode()


class Losses(NamedTuple):
    """The damage to a commit in the bucket."""

    files: Mapping[str, tuple[Part, ...]]  # that this process could not fetch
    objects: frozenset[str]  # missing or damaged, as some process found: their bytes are uploaded again


NO_LOSSES = Losses({}, frozenset())


class Publisher:
    """Commits the local folders of a run's processes to its place in a bucket. Used from one thread."""

    def __init__(
        self,
        bucket: Bucket,
        name: str,
        folder: Path,
        lease: Lease,
        commit: Commit,
        generation: int,
        processes: Processes = ONE,
        losses: Losses = NO_LOSSES,
    ):
        self._bucket, self._name, self._folder, self._lease = bucket, name, folder, lease
        self._address = address_of(bucket, name)
        self._commit, self._generation, self._processes = commit, generation, processes
        self._serial = itertools.count(processes.index, processes.count)
        self._sent: set[str] = set()  # the nonces of the commits that it tried to write
        self._unchanged: dict[str, tuple[Any, tuple[Part, ...]]] = {}  # mark and parts when a file was last read
        self._fetched = {} if processes.count == 1 else marks_of(folder)
        self._lost = losses.objects
        # What could not be fetched stays committed while its step is there, so that its objects can be brought back.
        self._damaged = {file: (parts, _identity(_step_folder(folder, file))) for file, parts in losses.files.items()}
        self.failed = False  # a commit has failed

    def steps(self) -> list[int]:
        """Returns the steps whose checkpoints are committed, oldest first."""
        return self._commit.steps()

    def publish_begun(self) -> None:
        """Commits a run that has a manifest."""
        if self._processes.from_writer("begun", paths.exists(self._folder / "manifest.json")):
            self.publish()

    def publish(self) -> None:
        """Commits the folders as they are. Raises LeaseLost if another process has taken the run."""
        try:
            self._publish()
        except BaseException:
            self.failed = True
            raise

    def _publish(self) -> None:
        if self._lease.lost():
            raise _taken(self._address)
        # Names of one file are uploaded once: checkpoints have what does not change in common.
        files_by_mark: dict[Any, list[str]] = {}
        for name in self._files_to_upload():
            files_by_mark.setdefault(_mark_of(self._folder / name), []).append(name)
        uploads = in_parallel(self._parts_of_names, files_by_mark.values())
        parts_by_file = {name: parts for uploaded in uploads for name, parts in uploaded.items()}
        if self._processes.writer:
            parts_by_file |= self._still_damaged()
        files: dict[str, tuple[Part, ...]] = {}
        for uploaded in self._processes.exchange("uploaded", parts_by_file):
            files |= {name: tuple(Part(*part) for part in parts) for name, parts in uploaded.items()}
        if files == self._commit.files:
            return
        check_steps_complete(self._folder, files, self._processes, self._damaged)
        commit = Commit(self._commit.life, files)
        superseded = self._processes.from_writer("committed", self._replace(commit) if self._processes.writer else None)
        self._commit = commit
        # The parts of a copy that another process has superseded are removed.
        self._unchanged = {
            name: (mark, parts) for name, (mark, parts) in self._unchanged.items() if files.get(name) == parts
        }
        try:
            in_parallel(self._remove, superseded[self._processes.index :: self._processes.count])
        except OSError as error:
            _log.warning("%s: what is superseded could not be removed (%s); the next start does", self._address, error)

    def _still_damaged(self) -> dict[str, tuple[Part, ...]]:
        """Returns the damaged files, as they are committed, whose step is still the one that was fetched."""
        self._damaged = {
            file: (parts, identity)
            for file, (parts, identity) in self._damaged.items()
            if _identity(_step_folder(self._folder, file)) == identity and not paths.exists(self._folder / file)
        }
        return {file: parts for file, (parts, _) in self._damaged.items()}

    def _files_to_upload(self) -> list[str]:
        """Returns the files that this process uploads. With several processes, the first one that has written a file
        since the start uploads it; else process 0, if it still has the file."""
        present = committed_files(self._folder)
        if self._processes.count == 1:
            return present
        marks = marks_of(self._folder)
        written = [name for name in present if marks.get(name) != self._fetched.get(name)]
        every = self._processes.exchange("written", [written, present if self._processes.writer else []])
        owners = dict.fromkeys(every[0][1], 0)
        for index in reversed(range(self._processes.count)):
            owners |= dict.fromkeys(every[index][0], index)
        return [name for name, index in owners.items() if index == self._processes.index]

    def _replace(self, commit: Commit) -> list[str]:
        """Writes run.json. Returns the parts that are superseded."""
        before = self._commit.objects()
        try:
            self._write(commit)
        except Conflict as error:
            # An earlier commit whose answer was lost may have been written after all.
            current, generation = read_commit(self._bucket, self._name)
            if current is None or current.nonce not in self._sent:
                raise _taken(self._address) from error
            before, self._generation = before | current.objects(), generation
            try:
                self._write(commit)
            except Conflict:
                raise _taken(self._address) from error
        return sorted(before - commit.objects())

    def _write(self, commit: Commit) -> None:
        self._sent.add(commit.nonce)
        target = f"{self._name}/{COMMIT}"
        self._generation = self._bucket.put(target, _to_json(commit), if_generation=self._generation).generation

    def _remove(self, part: str) -> None:
        self._bucket.delete(f"{self._name}/{FILES}/{part}")

    def _parts_of_names(self, names: Sequence[str]) -> dict[str, tuple[Part, ...]]:
        """Returns {name: parts} of a file with one or several names, uploading the parts that are new; {}: it is gone,
        or is no plain file by now."""
        name = next((name for name in names if name in self._commit.files), names[0])
        parts = self._parts_of(name)
        if name in self._unchanged:  # another of the names comes first at the next commit
            self._unchanged |= dict.fromkeys(names, self._unchanged[name])
        return {} if parts is None else dict.fromkeys(names, parts)

    def _parts_of(self, name: str) -> tuple[Part, ...] | None:
        """Returns the parts of a file, uploading those that are new; None: it is gone, or is no plain file by now."""
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(open(self._folder / name, "rb", opener=_open_plain))
            except OSError as error:
                # What others leave in the folder may go at any time; what a step consists of may not.
                if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENXIO) or name.startswith(NEEDED):
                    raise
                return None
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                return None
            mark = _mark(state)
            if name in self._unchanged and self._unchanged[name][0] == mark:
                return self._unchanged[name][1]
            sound = itertools.takewhile(lambda part: part.object not in self._lost, self._commit.files.get(name, ()))
            parts = _still_there(tuple(sound), file, state.st_size)
            start = sum(part.bytes for part in parts)
            file.seek(start)
            while start < state.st_size or not parts:
                data = file.read(min(PART_BYTES, state.st_size - start))
                if not data and state.st_size > start:
                    raise OSError(errno.EIO, f"{self._folder / name} became shorter while it was read")
                part = f"{name}/{self._commit.life}-{start}-{next(self._serial)}"
                self._bucket.put(f"{self._name}/{FILES}/{part}", data, if_generation=0)
                parts.append(Part(part, len(data), hashlib.sha256(data).hexdigest()))
                start += len(data)
                if not data:
                    break
        if time.time() - state.st_mtime > FRESH_SECONDS:
            self._unchanged[name] = (mark, tuple(parts))
        return tuple(parts)


def _taken(address: str) -> LeaseLost:
    return LeaseLost(
        f"another process has taken {address} and goes on with it; this one stops, and what it has done since its last "
        "commit is dropped"
    )


def _mark(state: os.stat_result) -> tuple[int, int, int]:
    """Returns values that change when a file does."""
    return state.st_ino, state.st_size, state.st_mtime_ns


def _mark_of(path: Path) -> tuple[int, int, int] | str:
    """Returns the mark of a file; of one that is gone something that no other has."""
    try:
        return _mark(os.lstat(path))
    except FileNotFoundError:
        return os.fspath(path)


def marks_of(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Returns the marks of the files of a run folder that are committed."""
    marks = {}
    for name in committed_files(folder):
        with contextlib.suppress(FileNotFoundError):
            marks[name] = _mark(os.lstat(folder / name))
    return marks


def check_steps_complete(
    folder: Path, files: Mapping[str, Any], processes: Processes, damaged: Collection[str] = ()
) -> None:
    """Raises BucketError if process 0 has the manifest of a step of which a file is not uploaded, or if that manifest
    cannot be read.

    Args:
      damaged: files that stay committed though nothing of them is in the folder. A step without its manifest is none
        that a resume takes: it is not checked.
    """
    if processes.count == 1 or not processes.writer:
        return
    for name in files:
        if (match := _STEP.fullmatch(name)) is not None and name not in damaged:
            try:
                step_files = [*json.loads(paths.read_bytes(folder / name))["body"]["files"]]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise BucketError(errno.EIO, f"step {int(match[1])} is not committed: its manifest on this machine "
                                  f"cannot be read ({type(error).__name__}: {error})") from error  # fmt: skip
            missing = [file for file in step_files if f"checkpoints/{match[1]}/{file}" not in files]
            if missing:
                raise BucketError(errno.EIO, f"step {int(match[1])} is not committed: no process has {missing[0]}")


def _open_plain(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def committed_files(folder: Path) -> list[str]:
    """Returns the files of a run folder that are committed: plain files, not links; not its lock, nothing that was
    being written, and no name that an object cannot have."""
    return [
        name
        for name in paths.files_below(folder)
        if _is_plain(folder / name)
        and name != LOCK and not any(piece.startswith(paths.TEMPORARY) for piece in name.split("/"))
        and not name.endswith(".__lock") and _can_be_object(name)
    ]  # fmt: skip


@functools.cache
def _can_be_object(name: str) -> bool:
    """Whether the name of a file can be in that of an object: UTF-8 without line breaks. Warns once of any other."""
    try:
        if not {"\n", "\r"} & set(name.encode().decode()):
            return True
    except UnicodeEncodeError:
        pass
    _log.warning("%s is not committed: an object in a bucket cannot have the name of this file", ascii(name))
    return False


def _is_plain(path: Path) -> bool:
    """Whether there is a plain file. One that has just gone is reported where it is opened."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return True


def _still_there(parts: tuple[Part, ...], file: Any, size: int) -> list[Part]:
    """Returns the parts that a file begins with as they were. The last, where it is small and the file goes on, is left
    out: a file of rows is then as many objects as it has megabytes."""
    same: list[Part] = []
    for part in parts:
        if not part.bytes or hashlib.sha256(file.read(part.bytes)).hexdigest() != part.sha256:
            break
        same.append(part)
    if same and sum(part.bytes for part in same) < size and same[-1].bytes < MERGED_BYTES:
        same.pop()
    return same


def fetch_sound(bucket: Bucket, name: str, commit: Commit, folder: Path) -> dict[str, tuple[Part, ...]]:
    """Makes a folder hold the files of a commit as `fetch` does, but for files of checkpoints and rollouts of which an
    object is gone or has other bytes: these are left out, a warning for each, and returned.

    A checkpoint without one of its files is damaged, as it would be in a local run, and a resume passes it over.
    Raises: BucketError where another file is damaged: nothing goes on without those.
    """
    address = address_of(bucket, name)
    damaged: dict[str, tuple[Part, ...]] = {}

    def note(file: str, error: BucketError) -> None:
        if not file.startswith(NEEDED):
            raise type(error)(
                error.errno,
                f"{address} is damaged: {file} of the run cannot be read: {error}. Nothing was changed; bring that "
                "object back, where the bucket keeps versions or deleted objects, or choose another --run",
            ) from error
        _log.warning("%s: %s is damaged and left out: %s", address, file, error)
        paths.make_dir(inside(folder, file).parent)  # a step of which nothing is left is still one
        damaged[file] = commit.files[file]

    fetch(bucket, name, commit, folder, note)
    return damaged


def _step_folder(folder: Path, file: str) -> Path:
    """Returns the folder of the checkpoint that a file belongs to; of a file of none the run's folder."""
    return folder.joinpath(*file.split("/")[:2]) if file.startswith("checkpoints/") else folder


def _identity(folder: Path) -> int | None:
    """Returns what distinguishes a folder from another of the same name; None if there is no folder."""
    try:
        return os.stat(folder).st_ino
    except FileNotFoundError:
        return None


def fetch(
    bucket: Bucket,
    name: str,
    commit: Commit,
    folder: Path,
    damaged: Callable[[str, BucketError], None] | None = None,
) -> None:
    """Makes a folder hold the files of a commit and no others, but for its lock. What is there already and has the same
    bytes stays; what follows them is cut.

    Args:
      damaged: called with a file of which an object is missing or has other bytes. None: Missing or DamagedObject is
        raised.
    """
    for file in list(paths.files_below(folder)):
        if file != LOCK and file not in commit.files:
            paths.remove_file(folder / file)
    for place, _, _ in os.walk(folder, topdown=False):
        if Path(place) != folder and not os.listdir(place):
            os.rmdir(place)

    def fetch_file(item: tuple[tuple[Part, ...], Sequence[str]]) -> None:
        parts, files = item
        here = [file for file in files if _cut_to(inside(folder, file), parts)]
        for file in files:
            place = inside(folder, file)
            if file in here or (here and _try_link(inside(folder, here[0]), place)):
                continue
            try:
                _fetch_file(bucket, name, parts, place)
                here.append(file)
            except (Missing, DamagedObject) as error:
                if damaged is None:
                    raise
                damaged(file, error)  # raises where the file that is there may be the last copy
                place.unlink(missing_ok=True)

    files_by_parts: dict[tuple[Part, ...], list[str]] = {}
    for file, parts in commit.files.items():
        files_by_parts.setdefault(parts, []).append(file)
    in_parallel(fetch_file, files_by_parts.items())


def _try_link(file: Path, place: Path) -> bool:
    """Makes `place` another name of a file. Returns whether the file system has that."""
    paths.make_dir(place.parent)
    temporary = place.with_name(f"{paths.TEMPORARY}{place.name}")
    try:
        os.link(file, temporary)
    except OSError:
        return False
    os.replace(temporary, place)
    return True


def _fetch_file(bucket: Bucket, name: str, parts: tuple[Part, ...], place: Path) -> None:
    """Writes a file from its parts, atomically."""
    paths.make_dir(place.parent)
    temporary = place.with_name(f"{paths.TEMPORARY}{place.name}")
    try:
        with open(temporary, "wb") as target:
            for part in parts:
                data, _ = bucket.get(f"{name}/{FILES}/{part.object}")
                if len(data) != part.bytes or hashlib.sha256(data).hexdigest() != part.sha256:
                    raise DamagedObject(errno.EIO, f"gs://{bucket.name}/{name}/{FILES}/{part.object} has other bytes "
                                        "than were committed; it was overwritten")  # fmt: skip
                target.write(data)
            target.flush()
            os.fsync(target.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, place)


def _cut_to(place: Path, parts: tuple[Part, ...]) -> bool:
    """Cuts a file that begins with these parts to them: what a killed process wrote after them was not committed.
    Returns whether it has their bytes."""
    size = sum(part.bytes for part in parts)
    if not place.is_file() or place.is_symlink() or place.stat().st_size < size:
        return False
    with open(place, "rb") as file:
        if not all(hashlib.sha256(file.read(part.bytes)).hexdigest() == part.sha256 for part in parts):
            return False
        longer = os.fstat(file.fileno()).st_size > size
    if longer:
        os.truncate(place, size)
    return True


def _name_of_folder(name: str, key: str) -> str:
    """Returns the name of the folder that a run works in: the same on every machine, and another for every run, since
    dashboards tell runs apart by it. Of letters, digits, '.', '_' and '-'."""
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', name.rsplit('/', 1)[-1])[:48]}-{key[:12]}"


def _name_of_copy(lock: Path) -> str:
    """Returns what names this file lock, and no other on any machine: two processes with the same name cannot hold it
    at a time. A clone of the disk, and the same disk after a start of the machine, have other names."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        boot = uuid.uuid4().hex
    state = os.stat(lock)
    return f"{boot}-{state.st_dev}-{state.st_ino}"


def _is_among(file: str, names: tuple[str, ...]) -> bool:
    """Whether a file is one of these, or below one that ends with a slash."""
    return any(file == name or (name.endswith("/") and file.startswith(name)) for name in names)


def holder_of_run(run: str | os.PathLike[str]) -> str | None:
    """Returns a sentence on who trains a run in a bucket; None for a local folder."""
    place = split_address(run)
    if place is None:
        return None
    holder = holder_in_bucket(Bucket(place[0]), f"{place[1]}/{LOCK}")
    if holder is None:
        return f"no process is training {shown(run)}"
    return (
        f"process {holder['pid']} on {holder['host']} is training {shown(run)}, since {holder['started']}; its "
        f"last beat was {holder['seconds']:.0f} s ago"
    )


def readable(source: str | os.PathLike[str], only: tuple[str, ...] = ()) -> Path:
    """Returns a local folder to read a run or a published model from: of gs://BUCKET/NAME a local copy of what is
    committed now, of a local folder itself.

    Args:
      only: the files of a run that are copied, and folders, with a slash at the end; (): all. What is not a run is
        then refused.

    Raises: BucketError where it cannot be read; ValueError where a run has committed nothing.
    """
    place = split_address(source)
    if place is None:
        return Path(source)
    bucket, name = Bucket(place[0]), place[1]
    address = address_of(bucket, name)
    commit, generation = read_commit(bucket, name)
    if commit is None:
        is_foreign = bool(_foreign_names(bucket, name))
        if not is_foreign and _has_parts(bucket, name):
            raise ForeignFolder(_without_commit(address))
        if not is_foreign and bucket.stat(f"{name}/{LOCK}") is not None:
            raise ValueError(f"{address} is a run that was begun; it has committed nothing, no step is saved")
        if only:
            raise ValueError(f"{address} is not a run: there is no {COMMIT}")
        return local_copy(address)
    if not commit.files:
        raise ValueError(f"{address} is a run that was begun; it has committed nothing, no step is saved")
    copied = "\n".join([name, *only])  # copies of a part do not replace those of all
    fill = lambda folder: fetch_newest(bucket, name, folder, commit, generation, only)
    return complete_copy(bucket, copied, str(generation), fill)


def fetch_newest(
    bucket: Bucket,
    name: str,
    folder: Path,
    commit: Commit,
    generation: int,
    only: tuple[str, ...] = (),
) -> None:
    """Makes a folder hold the files of a commit or, where that is superseded while it is read, of a later one. What was
    fetched of a file that has not changed since stays. only: as in `readable`."""
    address = address_of(bucket, name)
    for _ in range(READ_TRIES):
        files = {file: parts for file, parts in commit.files.items() if not only or _is_among(file, only)}
        try:
            fetch(bucket, name, Commit(commit.life, files), folder)
            return
        except Missing as error:
            # A run that goes on removes what it has superseded.
            later, other = read_commit(bucket, name)
            if later is None or other == generation:
                steps = ", ".join(map(str, commit.steps())) or "none"
                raise Missing(
                    errno.ENOENT,
                    f"{address} is damaged: its commit (checkpoints of steps {steps}) names objects that are not "
                    f"there: {error}",
                ) from error
            commit, generation = later, other
    raise BucketError(errno.EBUSY, f"{address} was committed {READ_TRIES} times while it was read; try again")
