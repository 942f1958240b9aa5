"""Confinement of a worker before it scores anything: resources, descriptors, and on Linux user, memory and calls.

No verifier of jrl runs model text as code, so this is the second line of defense, not a sandbox for programs: it keeps
a verifier that goes wrong from taking the machine with it. SECURITY.md says what holds and what does not.
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
from collections.abc import Collection

from jrl.tasks.verifiers.system_calls import PR_SET_NO_NEW_PRIVS, filter_calls

PR_SET_PDEATHSIG = 1
PR_SET_KEEPCAPS = 8
CAPABILITY_VERSION = 0x20080522
CAP_DAC_READ_SEARCH = 1 << 2
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same numbers on every machine
LANDLOCK_READ = 0b1100  # files, folders
OPEN_FILES = 64
# Users of a worker's own, by its pid: where ids have 31 bits, and where a container has 65,536 of them, in which case
# those that systemd gives to services at random. None of them owns files.
USERS = ((0x40000000, 1 << 22), (61184, 4096))
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/etc", "/proc", "/dev")


def die_with_parent() -> None:
    """Asks Linux to kill this process when the thread that started it ends. Elsewhere the closed socket must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def detach(keep: int) -> None:
    """Points standard input, output and error at nothing and closes every other descriptor but `keep`."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    low, high = 3, os.sysconf("SC_OPEN_MAX")
    os.closerange(low, keep)
    os.closerange(keep + 1, high)


def confine(memory_mb: int) -> list[str]:
    """Takes from this process what a worker does not need; returns the names of the layers that hold.

    "own user": a worker of root is a user that owns nothing. Where root's Python is in folders that only root can read,
    it keeps the right to read, and Landlock bounds that to the folders of modules and of the system. "no capabilities":
    the kernel has no user or no Landlock for that; it is root without root's rights. "landlock": no memory of, and no
    signal to, processes outside; nothing is written. Ends with `die_with_parent`, which a change of user undoes.

    Args:
        memory_mb: address space, in MiB, beyond what the process has now.
    """
    layers = ["rlimits"]
    held = _address_space_bytes()
    for kind, bound in (
        (resource.RLIMIT_AS, held + (memory_mb << 20)),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # a stricter limit may already hold, or (macOS) none can be set
            resource.setrlimit(kind, (bound, bound))
    if sys.platform == "linux":
        folders = [entry for entry in sys.path if os.path.isabs(entry)]
        readable = None
        if os.geteuid() == 0:
            private = not all(_readable_by_others(pathlib.Path(folder)) for folder in folders)
            if private and _landlock_version():
                libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
                readable = [*folders, *SYSTEM_FOLDERS, sys.prefix, sys.base_prefix, *libraries]
            changed = (readable is not None or not private) and _become_own_user(may_read=private)
            layers += ["own user"] if changed else ["no capabilities"] if _set_capabilities(0) else []
        if _restrict_by_landlock(readable):
            layers.append("landlock")
        elif readable is not None:
            _set_capabilities(0)
    die_with_parent()
    return layers + (["seccomp"] if filter_calls() else [])


def missing_layers(layers: Collection[str], *, root: bool) -> list[str]:
    """Returns what should confine the workers of a trainer, root or not, and does not on this machine."""
    wanted = {"seccomp": "a filter on system calls"} | ({"own user": "a user of their own"} if root else {})
    return [what for layer, what in wanted.items() if layer not in layers]


def _become_own_user(*, may_read: bool) -> bool:
    """Changes to a user and group that nobody else has, with the right to read every file; False where it cannot."""
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
    """Whether a user without rights can import from `path`. One that does not exist hides nothing."""
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
    """Gives up all capabilities but `bits`."""
    header = struct.pack("Ii", CAPABILITY_VERSION, 0)
    return ctypes.CDLL(None, use_errno=True).capset(header, struct.pack("6I", bits, bits, 0, 0, 0, 0)) == 0


def _landlock_version() -> int:
    """Returns the version of the kernel's Landlock; 0 where it has none."""
    return max(ctypes.CDLL(None, use_errno=True).syscall(LANDLOCK_CREATE, None, 0, 1), 0)


def _restrict_by_landlock(readable: list[str] | None) -> bool:
    """Enters a Landlock domain that allows no writing, no signal or view out of it, and reading in `readable` alone
    (None: everywhere); False where there is none."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = _landlock_version()
    if version < 1 or libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    # Rights on files: all that a version knows. Those that are named and that no rule gives are denied.
    rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    files = ((1 << rights) - 1) & ~(LANDLOCK_READ if readable is None else 0)
    networks, scopes = (0b11 if version >= 4 else 0), (0b11 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = libc.syscall(LANDLOCK_CREATE, struct.pack("QQQ", files, networks, scopes), size, 0)
    if rules < 0:
        return False
    for path in readable or ():
        with contextlib.suppress(OSError):  # there is no such folder
            fd = os.open(path, os.O_PATH)
            allowed = LANDLOCK_READ if os.path.isdir(path) else LANDLOCK_READ & 0b0100
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
