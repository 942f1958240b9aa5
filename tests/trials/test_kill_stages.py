"""Kills a run of three stages with SIGKILL at 12 points, inside and between them, resumes it, and compares every bit.
Run by hand:

pytest -m slow tests/trials/test_kill_stages.py -s
"""

import pytest
from test_kill import contents, finish, kill_at

pytestmark = pytest.mark.slow

CONFIG = "configs/rlhf-tiny.gin"
STEPS = 130
# What the process is doing when it is killed, how many times that is announced before, and the longest wait after.
# Saves are every 10 steps; the 4th and the 10th are those at the end of a stage: just after them is between two stages.
POINTS = [
    ("save", 1, 0.05), ("save", 3, 0.2), ("saved", 4, 0.01), ("save", 6, 0.2), ("saved", 10, 0.01), ("save", 12, 0.2),
    ("compile", 3, 0.3), ("compile", 12, 1.0),
    ("scoring", 1, 0.01), ("scoring", 9, 0.02), ("anywhere", 2, 0.3), ("anywhere", 23, 0.3),
]  # fmt: skip


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folders = {lag: tmp_path_factory.mktemp(f"straight{lag}") for lag in (0, 1)}
    for lag, folder in folders.items():
        finish(folder, lag, CONFIG)
    return {lag: contents(folder) for lag, folder in folders.items()}


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("doing,times,longest", POINTS)
def test_a_killed_run_of_three_stages_resumes_to_the_same_bits(tmp_path, straight, lag, doing, times, longest):
    rows = kill_at(tmp_path, lag, doing, times, longest, seed=f"{doing}{times}{lag}", config=CONFIG)
    finish(tmp_path, lag, CONFIG)
    fingerprint, table = contents(tmp_path)
    print(f"lag {lag}: killed in {doing} with {rows} of {STEPS} rows written; total {fingerprint['total'][:12]}")
    assert fingerprint == straight[lag][0]
    assert table == straight[lag][1]
