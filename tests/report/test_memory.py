from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jrl.run.report import memory

needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
MEGABYTE = 1 << 20


@needs_linux
def test_children_of_children_count():
    grandchild = "import sys; b = bytearray(b'x') * (64 << 20); print('up', flush=True); sys.stdin.read()"
    middle = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    before = memory.tree_pss_bytes(os.getpid())
    process = subprocess.Popen([sys.executable, "-c", middle], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    grown = memory.tree_pss_bytes(os.getpid()) - before
    process.communicate()
    assert 60 * MEGABYTE < grown < 200 * MEGABYTE


@needs_linux
def test_the_peak_stays_when_memory_is_given_back():
    peak = memory.PeakMemory()
    first = peak.sample(now=True)
    block = bytearray(b"x") * (64 * MEGABYTE)
    high = peak.sample(now=True)
    del block
    assert high > first + 60 * MEGABYTE
    assert peak.sample(now=True) == high == peak.peak


def test_off_linux_there_is_no_number(monkeypatch):
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert memory.tree_pss_bytes(1) is None and memory.PeakMemory().sample() is None
