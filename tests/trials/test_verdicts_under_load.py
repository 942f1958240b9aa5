"""The same items are scored on an idle machine and on one where four times as many processes compute as it has.

pytest -m slow tests/trials/test_verdicts_under_load.py
"""

import contextlib
import os
import random
import subprocess
import sys

import pytest

from jrl.tasks.example import Example, Message
from jrl.tasks.verdict import Status
from jrl.tasks.verifiers import VerifierSpec
from jrl.tasks.verifiers.pool import Item, Pool

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def load(processes):
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def items(count):
    draw = random.Random(0)
    texts = [
        "4",
        "\\frac{8}{2}",
        "2^2",
        "5",
        "x+4",
        "\\sqrt{16}",
        "(" * 40,
        "e^{1.386}",
        "\\binom{4}{1}",
        "9" * 3000,
        "",
    ]
    example = Example(id="e", messages=(Message("user", "2 + 2?"),), answer="4")
    return [Item(f"\\boxed{{{draw.choice(texts)}}}", example, (0, 1)) for _ in range(count)]


def test_verdicts_do_not_depend_on_what_else_the_machine_does(trials):
    batch = items(trials(400, 5_000))
    rows = [VerifierSpec("MathEqual", {}), VerifierSpec("Exact", {"extract": "boxed"})]
    verdicts = []
    for processes in (0, 4 * (os.cpu_count() or 1)):
        with load(processes), Pool(rows, workers=2, cpu_seconds=2.0, wall_seconds=60.0, memory_mb=512) as pool:
            verdicts.append(pool.collect(pool.submit(batch)))
    assert {v.status for one in verdicts[0] for v in one} >= {Status.CORRECT, Status.WRONG, Status.UNPARSABLE}
    assert verdicts[0] == verdicts[1]
