"""The filter on system calls, run instruction by instruction: what it says of every call, on both machines."""

import os
import struct

import pytest

from jrl.tasks.verifiers.system_calls import ALLOWED_WITH, DENIED, MACHINES, OPENS, program_of

ALLOW, EPERM = 0x7FFF0000, 0x00050001
PID = 4242
# read, write, mmap, munmap, brk, futex, exit_group, getpid, lseek, fstat, clock_gettime, recvfrom, sendto, setrlimit
NEEDED = {
    "x86_64": (0, 1, 9, 11, 12, 202, 231, 39, 8, 5, 228, 45, 44, 160),
    "aarch64": (63, 64, 222, 215, 214, 98, 94, 172, 62, 80, 113, 207, 206, 164),
}


def answer(machine, number, *arguments, architecture=None):
    """Returns what the filter answers to a call, as the kernel would run it."""
    program = program_of(machine, PID)
    steps = [struct.unpack_from("HBBI", program, place) for place in range(0, len(program), 8)]
    assert len(steps) <= 4096
    data = struct.pack("IIQ6Q", number, architecture or MACHINES[machine], 0, *arguments, *[0] * (6 - len(arguments)))
    place = value = 0
    while True:
        code, yes, no, k = steps[place]
        place += 1
        match code:
            case 0x20:
                (value,) = struct.unpack_from("I", data, k)
            case 0x15 | 0x35 | 0x45:
                holds = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
                place += yes if holds else no
            case 0x06:
                return k


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_denied_is_denied_and_nothing_else(machine):
    column = 1 + list(MACHINES).index(machine)
    denied = [call[column] for calls in DENIED.values() for call in calls if call[column] is not None]
    assert len(set(denied)) == len(denied), "a number that two calls have"
    by_argument = [call[column] for call, *_ in (*ALLOWED_WITH, *OPENS) if call[column] is not None]
    assert not set(denied) & {*by_argument, *NEEDED[machine]}
    answers = {number: answer(machine, number) for number in range(600)}
    assert [number for number, given in answers.items() if given == EPERM] == sorted(
        {*denied, *(call[column] for call, place, values in ALLOWED_WITH if 0 not in values)}
    )
    assert set(answers.values()) == {ALLOW, EPERM}


@pytest.mark.parametrize("machine", MACHINES)
def test_signals_and_limits_reach_the_worker_itself_alone(machine):
    column = 1 + list(MACHINES).index(machine)
    for call, place, values in ALLOWED_WITH:
        for value in (*values, 0, 1, PID + 1, 8, 10, 15, 6, 7, 37, 1024, 0x8901, 0x8902):
            given = answer(machine, call[column], *[7] * place, PID if value == "own" else value)
            assert given == (ALLOW if value in (*values, "own") else EPERM), (call[0], value)


@pytest.mark.parametrize("machine", MACHINES)
def test_files_open_for_reading_only(machine):
    column = 1 + list(MACHINES).index(machine)
    for call, place in OPENS:
        if call[column] is None:
            continue
        for flags in (os.O_RDONLY, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY):
            assert answer(machine, call[column], *[0] * place, flags) == ALLOW
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC | os.O_CLOEXEC):
            assert answer(machine, call[column], *[0] * place, flags) == EPERM


def test_calls_of_another_architecture_are_denied():
    assert answer("x86_64", 0, architecture=0x40000003) == EPERM  # of 32 bits, with other numbers
    assert answer("x86_64", 0x40000000) == EPERM  # x32
