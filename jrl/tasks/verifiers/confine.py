"""Confinement of a worker before it scores anything: resources, descriptors, and on Linux user, memory and calls.

No verifier of jrl runs model text as code, so this is the second line of defense, not a sandbox for programs: it keeps
a faulty verifier from taking down the host. SECURITY.md says what it guarantees.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import resource
import signal
import stat
import struct
import sys
from collections.abc import Collection, Sequence
from typing import NamedTuple

from jrl.tasks.verifiers.system_calls import PR_SET_NO_NEW_PRIVS, filter_calls

PR_SET_PDEATHSIG = 1
PR_SET_KEEPCAPS = 8
CAPABILITY_VERSION = 0x20080522
CAP_DAC_READ_SEARCH = 1 << 2
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same numbers on every architecture
READ_FILE, READ_FOLDER = 0b0100, 0b1000  # Landlock's rights
LANDLOCK_READ = READ_FILE | READ_FOLDER
OPEN_FILES = 64
# (first, count) of the user ids that workers get, by pid. The second range is for containers with only 65,536 ids;
# systemd assigns these ids to dynamic services. None of them owns files.
USERS = ((0x40000000, 1 << 22), (61184, 4096))
# System paths that a worker may read if it keeps the capability to read every file: libraries, and the files that the C
# library, Python and OpenSSL look up. No folder with files for root only: passwords, keys, disks, other processes.
SYSTEM = (
    *("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/share", "/usr/local/lib",
      "/usr/local/share"),
    *(f"/etc/{name}" for name in (
        "ld.so.cache", "localtime", "timezone", "passwd", "group", "nsswitch.conf", "hosts", "host.conf", "resolv.conf",
        "os-release", "mime.types", "locale.alias", "ssl/certs", "ssl/openssl.cnf", "pki/tls/certs",
    )),
    *(f"/proc/{name}" for name in ("cpuinfo", "meminfo", "stat", "version", "filesystems", "sys/vm/overcommit_memory")),
    *(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")),
)  # fmt: skip
UNLISTED = ("/etc", "/proc", "/dev", "/sys", "/boot")  # never allowed as part of a module folder such as "/"


def die_with_parent() -> None:
    """Asks Linux to kill this process when the thread that started it ends. Elsewhere it ends with its socket."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def detach(keep: int) -> None:
    """Redirects standard input, output and error to /dev/null and closes every other descriptor except `keep`."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    low, high = 3, os.sysconf("SC_OPEN_MAX")
    os.closerange(low, keep)
    os.closerange(keep + 1, high)


class ReadAccess(NamedTuple):
    """The read access of the workers."""

    of_root: bool  # Python is in folders that only root can read
    paths: (
        list[tuple[str, int]] | None
    )  # `readable_paths`, for a worker that keeps the capability to read; None: it has none


def read_access(private: Sequence[str]) -> ReadAccess:
    """Returns the read access of all workers that this process forks. It lists every entry of some folders.

    Args:
        private: folders that workers must not read even below module folders, such as the run's.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return ReadAccess(False, None)
    folders = [entry for entry in sys.path if os.path.isabs(entry)]
    of_root = not all(_readable_by_others(pathlib.Path(folder)) for folder in folders)
    return ReadAccess(of_root, readable_paths(folders, private) if of_root and _landlock_version() else None)


def confine(memory_mb: int, reads: ReadAccess) -> list[str]:
    """Drops the privileges that a worker does not need and returns the names of the layers in effect.

    "own user": a worker of root becomes a user that owns nothing. If root's Python is in folders that only root can
    read, the worker keeps the capability to read, which Landlock limits to `readable_paths`. "no capabilities": the
    kernel has no such user or no Landlock; the worker is root without capabilities. "landlock": no access to the memory
    of outside processes, no writing and, from Landlock's version 6 on, no signals to them. Calls `die_with_parent`
    after the change of user, which resets it.

    Args:
        memory_mb: address space, in MiB, beyond what the process has now.
        reads: the result of `read_access` in the process that forked this one.
    """
    layers = ["rlimits"]
    used = _address_space_bytes()
    for kind, bound in (
        (resource.RLIMIT_AS, used + (memory_mb << 20)),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # a stricter limit is in effect, or (macOS) none can be set
            resource.setrlimit(kind, (bound, bound))
    if sys.platform == "linux":
        own_proc = (f"/proc/{os.getpid()}", LANDLOCK_READ)
        readable = None if reads.paths is None else [*reads.paths, own_proc]
        if os.geteuid() == 0:
            changed = (readable is not None or not reads.of_root) and _become_own_user(may_read=reads.of_root)
            layers += ["own user"] if changed else ["no capabilities"] if _set_capabilities(0) else []
        if _restrict_by_landlock(readable):
            layers.append("landlock")
        elif readable is not None:
            _set_capabilities(0)
    die_with_parent()
    return layers + (["seccomp"] if filter_calls() else [])


def readable_paths(modules: Sequence[str], private: Sequence[str]) -> list[tuple[str, int]]:
    """Returns the paths that a worker with the capability to read every file may read, each with its rights READ_FILE
    and READ_FOLDER; a folder's rights apply to everything below it.

    These are Python's libraries, the contents of the module folders, and SYSTEM; the worker's /proc folder is added
    later. In a module folder that is not Python's, names that begin with a dot are left out. If a folder contains
    something private, its other entries are allowed one by one and the folder itself may be listed. The names in a
    private folder may then be listed too, but nothing in it can be read.

    Args:
      modules: absolute entries of sys.path.
    """
    real = lambda paths: dict.fromkeys(os.path.realpath(path) for path in paths if os.path.exists(path))
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    libraries = [entry for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if os.path.isabs(entry)]
    of_python = real(
        [f"{prefix}/{name}" for prefix in prefixes for name in ("lib", "lib64", "share", "pyvenv.cfg")] + libraries
    )
    # A run's folder that does not exist yet is hidden too.
    runs, folders = dict.fromkeys(map(os.path.realpath, private)), real(modules)
    hidden = {*runs, *real(UNLISTED)}
    for run in runs:  # and the sibling runs
        parent = os.path.dirname(run)
        if not any(_is_within(folder, parent) for folder in [*folders, *of_python]):
            hidden.add(parent)
    for folder in folders:
        if os.path.isdir(folder) and not any(_is_within(folder, python) for python in of_python):
            hidden |= {os.path.join(folder, name) for name in os.listdir(folder) if name.startswith(".")}
    paths: dict[str, int] = {}
    for path in [*of_python, *folders]:
        if not any(_is_within(path, run) for run in runs):
            _allow(path, hidden, paths)
    for path in real(SYSTEM):
        paths[path] = LANDLOCK_READ
    return list(paths.items())


def _allow(path: str, hidden: Collection[str], paths: dict[str, int]) -> None:
    """Adds a path to `paths`: the whole path if nothing below it is hidden, else its visible entries."""
    if path in hidden:
        return
    if not any(_is_within(entry, path) for entry in hidden):
        paths[path] = LANDLOCK_READ
        return
    paths.setdefault(path, READ_FOLDER)
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            if not entry.is_symlink():  # its target is allowed, or not, at its own path
                _allow(entry.path, hidden, paths)


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def missing_layers(layers: Collection[str], *, root: bool) -> list[str]:
    """Returns descriptions of the expected layers that do not confine the workers on this machine. root: whether the
    trainer runs as root."""
    expected = {"seccomp": "a filter on system calls"} | ({"own user": "a user of their own"} if root else {})
    return [description for layer, description in expected.items() if layer not in layers]


def _become_own_user(*, may_read: bool) -> bool:
    """Changes to a user and group of this worker only, with the capability to read every file if `may_read`. Returns
    False if it cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    for lowest, count in USERS:
        user = lowest + os.getpid() % count
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(user, user, user)
            libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
            os.setresuid(user, user, user)
            return _set_capabilities(CAP_DAC_READ_SEARCH if may_read else 0)
    return False


def _readable_by_others(path: pathlib.Path) -> bool:
    """Returns whether an unprivileged user can import from `path`; True if it does not exist."""
    try:
        path = path.resolve()
        modes = [entry.stat().st_mode for entry in (path, *path.parents)]
    except FileNotFoundError:
        return True
    except OSError:
        return False
    folder = stat.S_ISDIR(modes[0])
    return all(mode & stat.S_IXOTH for mode in modes[0 if folder else 1 :]) and bool(modes[0] & stat.S_IROTH)


def _set_capabilities(bits: int) -> bool:
    """Drops all capabilities except `bits`. Returns whether that succeeded."""
    header = struct.pack("Ii", CAPABILITY_VERSION, 0)
    return ctypes.CDLL(None, use_errno=True).capset(header, struct.pack("6I", bits, bits, 0, 0, 0, 0)) == 0


def _landlock_version() -> int:
    """Returns the version of the kernel's Landlock; 0 if it has none."""
    return max(ctypes.CDLL(None, use_errno=True).syscall(LANDLOCK_CREATE, None, 0, 1), 0)


def _restrict_by_landlock(readable: list[tuple[str, int]] | None) -> bool:
    """Enters a Landlock domain that forbids writing, inspection of outside processes, from version 6 on signals to
    them, and reads outside `readable` (from `readable_paths`; None: reads everywhere). Returns whether that
    succeeded."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = _landlock_version()
    if version < 1 or libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    # Rights on files: all that the version knows. Rights that are named here and that no rule grants are denied.
    rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    files = ((1 << rights) - 1) & ~(LANDLOCK_READ if readable is None else 0)
    networks, scopes = (0b11 if version >= 4 else 0), (0b11 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = libc.syscall(LANDLOCK_CREATE, struct.pack("QQQ", files, networks, scopes), size, 0)
    if rules < 0:
        return False
    for path, allowed in readable or ():
        with contextlib.suppress(OSError):  # the path no longer exists
            fd = os.open(path, os.O_PATH)
            allowed &= LANDLOCK_READ if stat.S_ISDIR(os.fstat(fd).st_mode) else READ_FILE
            libc.syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, fd), 0)
            os.close(fd)
    done = libc.syscall(LANDLOCK_RESTRICT, rules, 0) == 0
    os.close(rules)
    return done


def _address_space_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0
