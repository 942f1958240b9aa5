"""Confinement of a worker before it scores anything: resources, descriptors, and on Linux system calls.

No verifier of jrl runs model text as code, so this is the second line of defense, not a sandbox for programs: it keeps
a verifier that goes wrong from taking the machine with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import struct
import sys

PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
OPEN_FILES = 64

# Numbers of the system calls, by machine: (audit architecture, denied, openat, kill and its kin).
# Processes and threads, programs, networks, tracing, other processes' memory, namespaces, and changes to files.
# The aarch64 column is from the kernel's generic table and has not run on such a machine.
_CALLS = {
    "x86_64": (
        0xC000003E,
        (41, 56, 57, 58, 59, 76, 77, 82, 83, 84, 85, 86, 87, 88, 90, 91, 92, 93, 94, 101, 129, 133, 161, 165, 248, 249)
        + (250, 258, 259, 260, 263, 264, 265, 266, 268, 272, 297, 308, 310, 311, 316, 321, 322, 424, 425, 434, 435)
        + (437, 438, 452),
        257,
        (62, 200, 234),
        2,
    ),
    "aarch64": (
        0xC00000B7,
        (33, 34, 35, 36, 37, 38, 40, 45, 46, 51, 52, 53, 54, 55, 97, 117, 138, 198, 217, 218, 219, 220, 221, 240, 268)
        + (270, 271, 276, 280, 281, 424, 425, 434, 435, 437, 438, 452),
        56,
        (129, 130, 131),
        None,
    ),
}


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


def limit(memory_mb: int) -> list[str]:
    """Sets this process's resource limits; returns the names of the layers that hold.

    Args:
        memory_mb: address space, in MiB, beyond what the process has now.
    """
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
    return ["rlimits"] + (["seccomp"] if _filter_calls() else [])


def _address_space_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _filter_calls() -> bool:
    """Installs the filter on system calls; False where the platform has none. A denied call fails with EPERM."""
    if sys.platform != "linux" or platform.machine() not in _CALLS or struct.calcsize("P") != 8:
        return False
    program = _program(*_CALLS[platform.machine()], os.getpid())
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(program, len(program))
    holder = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_void_p(ctypes.addressof(holder)), 0, 0) == 0


def _program(
    architecture: int, denied: tuple[int, ...], openat: int, kills: tuple[int, ...], open_call: int | None, pid: int
) -> bytes:
    """Returns the filter as classic BPF. Denies `denied`, opening for writing, and signals to any process but `pid`."""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, deny = 0x7FFF0000, 0x00050000 | 1  # SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO with EPERM
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

    def step(code: int, k: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, k)

    # Each block falls through to the next when its number does not match; jumps count instructions to skip.
    steps = [step(load, 4), step(equal, architecture, 1, 0), step(give, deny), step(load, 0)]
    steps += [step(at_least, 0x40000000, 0, 1), step(give, deny)]
    for number in denied:
        steps += [step(equal, number, 0, 1), step(give, deny)]
    for number in kills:
        steps += [
            step(equal, number, 0, 4),
            step(load, 16),
            step(equal, pid, 1, 0),
            step(give, deny),
            step(give, allow),
        ]
    for number, flags_at in ((openat, 32), (open_call, 24)):
        if number is not None:
            steps += [step(equal, number, 0, 4), step(load, flags_at)]
            steps += [step(any_bit, writing, 0, 1), step(give, deny), step(give, allow)]
    return b"".join([*steps, step(give, allow)])
