"""A system under measurement answers by JSON lines, whatever it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SIDE = """
from benchmarks.child import serve
def double(x):
    print("a library speaks")
    return {"twice": 2 * x}
serve(double)
"""


def test_answers_are_apart_from_what_is_printed():
    asked = [{"do": "double", "x": 4}, {"do": "double", "x": None}]
    done = subprocess.run(
        [sys.executable, "-c", SIDE],
        input="".join(json.dumps(question) + "\n" for question in asked),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    first, second = map(json.loads, done.stdout.splitlines())
    assert first == {"done": {"twice": 8}}
    assert "TypeError" in second["failed"]
    assert "a library speaks" in done.stderr
