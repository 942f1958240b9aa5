"""The system call filter (seccomp) that a worker installs for itself, as a table of denied calls by reason.

A denied call fails with EPERM. The numbers for aarch64 are from the kernel's generic table and are untested there.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # audit architectures, in the order of the columns below
# name, number on x86_64 and on aarch64 (None: no such call)
Call = tuple[str, int | None, int | None]
DENIED: dict[str, tuple[Call, ...]] = {
    "processes, threads and programs": (
        ("clone", 56, 220), ("fork", 57, None), ("vfork", 58, None), ("clone3", 435, 435),
        ("execve", 59, 221), ("execveat", 322, 281),
    ),
    "networks": (("socket", 41, 198), ("io_uring_setup", 425, 425)),
    "signals to others": (
        ("rt_sigqueueinfo", 129, 138), ("rt_tgsigqueueinfo", 297, 240), ("pidfd_send_signal", 424, 424),
        ("pidfd_open", 434, 434), ("pidfd_getfd", 438, 438),
    ),
    "memory and state of others": (
        ("ptrace", 101, 117), ("process_vm_readv", 310, 270), ("process_vm_writev", 311, 271), ("kcmp", 312, 272),
        ("perf_event_open", 298, 241), ("move_pages", 279, 239), ("migrate_pages", 256, 238),
        ("process_madvise", 440, 440), ("process_mrelease", 448, 448), ("userfaultfd", 323, 282), ("bpf", 321, 280),
    ),
    "priorities of others": (
        ("setpriority", 141, 140), ("ioprio_set", 251, 30), ("sched_setparam", 142, 118),
        ("sched_setscheduler", 144, 119), ("sched_setaffinity", 203, 122), ("sched_setattr", 314, 274),
    ),
    "memory and queues that outlive a process": (
        ("shmget", 29, 194), ("shmat", 30, 196), ("shmctl", 31, 195), ("semget", 64, 190), ("semop", 65, 193),
        ("semtimedop", 220, 192), ("semctl", 66, 191), ("msgget", 68, 186), ("msgsnd", 69, 189), ("msgrcv", 70, 188),
        ("msgctl", 71, 187), ("mq_open", 240, 180), ("mq_unlink", 241, 181),
        ("add_key", 248, 217), ("request_key", 249, 218), ("keyctl", 250, 219),
    ),
    "changes to files, and locks on them": (
        ("truncate", 76, 45), ("ftruncate", 77, 46), ("creat", 85, None), ("openat2", 437, 437),
        ("rename", 82, None), ("renameat", 264, 38), ("renameat2", 316, 276),
        ("mkdir", 83, None), ("mkdirat", 258, 34), ("rmdir", 84, None), ("mknod", 133, None), ("mknodat", 259, 33),
        ("link", 86, None), ("linkat", 265, 37), ("symlink", 88, None), ("symlinkat", 266, 36),
        ("unlink", 87, None), ("unlinkat", 263, 35), ("chmod", 90, None), ("fchmod", 91, 52), ("fchmodat", 268, 53),
        ("fchmodat2", 452, 452), ("chown", 92, None), ("fchown", 93, 55), ("lchown", 94, None), ("fchownat", 260, 54),
        ("utime", 132, None), ("utimes", 235, None), ("futimesat", 261, None), ("utimensat", 280, 88),
        ("setxattr", 188, 5), ("lsetxattr", 189, 6), ("fsetxattr", 190, 7), ("setxattrat", 463, 463),
        ("removexattr", 197, 14), ("lremovexattr", 198, 15), ("fremovexattr", 199, 16), ("removexattrat", 466, 466),
        ("flock", 73, 32), ("open_by_handle_at", 304, 265), ("fanotify_init", 300, 262),
    ),
    "namespaces, mounts and the machine": (
        ("chroot", 161, 51), ("pivot_root", 155, 41), ("mount", 165, 40), ("umount2", 166, 39), ("unshare", 272, 97),
        ("setns", 308, 268), ("open_tree", 428, 428), ("move_mount", 429, 429), ("fsopen", 430, 430),
        ("fsconfig", 431, 431), ("fsmount", 432, 432), ("fspick", 433, 433), ("mount_setattr", 442, 442),
        ("swapon", 167, 224), ("swapoff", 168, 225), ("reboot", 169, 142), ("sethostname", 170, 161),
        ("setdomainname", 171, 162), ("init_module", 175, 105), ("delete_module", 176, 106), ("finit_module", 313, 273),
        ("kexec_load", 246, 104), ("kexec_file_load", 320, 294), ("quotactl", 179, 60), ("quotactl_fd", 443, 443),
        ("acct", 163, 89), ("settimeofday", 164, 170), ("clock_settime", 227, 112), ("adjtimex", 159, 171),
        ("clock_adjtime", 305, 266), ("syslog", 103, 116), ("iopl", 172, None), ("ioperm", 173, None),
    ),
}  # fmt: skip

# Calls that are allowed if an argument has one of these values. "own" is the worker's pid.
# fcntl: DUPFD, GETFD, SETFD, GETFL, SETFL, DUPFD_CLOEXEC, GETPIPE_SZ. Others lock, or set an owner that gets signals.
# ioctl: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. Others can set the owner of a socket's signals.
ALLOWED_WITH: tuple[tuple[Call, int, tuple[int | str, ...]], ...] = (
    (("kill", 62, 129), 0, ("own",)),
    (("tkill", 200, 130), 0, ("own",)),
    (("tgkill", 234, 131), 0, ("own",)),
    (("prlimit64", 302, 261), 0, (0, "own")),
    (("fcntl", 72, 25), 1, (0, 1, 2, 3, 4, 1030, 1032)),
    (("ioctl", 16, 29), 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
)
# call, and the index of the argument with its flags
OPENS: tuple[tuple[Call, int], ...] = ((("openat", 257, 56), 2), (("open", 2, None), 1))


def filter_calls() -> bool:
    """Installs the filter for the rest of this process. Returns False if the platform does not support it."""
    if sys.platform != "linux" or platform.machine() not in MACHINES or struct.calcsize("P") != 8:
        return False
    program = program_of(platform.machine(), os.getpid())
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(program, len(program))
    holder = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_void_p(ctypes.addressof(holder)), 0, 0) == 0


def program_of(machine: str, pid: int) -> bytes:
    """Returns the filter for a worker `pid` as classic BPF."""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, deny = 0x7FFF0000, 0x00050000 | 1  # SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO with EPERM
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

    def step(code: int, k: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, k)

    def number_of(call: Call) -> int | None:
        return call[1 + list(MACHINES).index(machine)]

    def argument(index: int) -> int:
        """Returns the offset of an argument's lower half: the kernel uses only 32 bits of these arguments."""
        return 16 + 8 * index

    # Each block falls through to the next if its number does not match; jumps count the instructions to skip.
    steps = [step(load, 4), step(equal, MACHINES[machine], 1, 0), step(give, deny), step(load, 0)]
    steps += [step(at_least, 0x40000000, 0, 1), step(give, deny)]  # the x32 calls of x86_64
    for calls in DENIED.values():
        for number in map(number_of, calls):
            if number is not None:
                steps += [step(equal, number, 0, 1), step(give, deny)]
    for call, index, values in ALLOWED_WITH:
        tests = [step(equal, pid if value == "own" else int(value), 0, 1) + step(give, allow) for value in values]
        block = [step(load, argument(index)), *tests, step(give, deny)]
        steps += [step(equal, number_of(call), 0, len(b"".join(block)) // 8), *block]
    for call, index in OPENS:
        if (number := number_of(call)) is not None:
            steps += [step(equal, number, 0, 4), step(load, argument(index))]
            steps += [step(any_bit, writing, 0, 1), step(give, deny), step(give, allow)]
    return b"".join([*steps, step(give, allow)])
