"""From any saved step, and from a copy of the folder elsewhere, a run does the same steps again.

pytest -m slow tests/trials/test_same_steps.py
"""

import json
import shutil

import pytest
from short_runs import run

from jrl.run.run_hash import run_fingerprint

pytestmark = pytest.mark.slow

TINY = [
    "Decoder.layers=1", "Decoder.width=16", "Decoder.heads=2", "Decoder.kv_heads=1", "Decoder.head_dim=8",
    "Decoder.mlp_width=32", "Online.prompts=4", "Online.samples=2", "Online.steps=6", "Checkpoint.every=1",
    "Checkpoint.keep=10", "Log.samples=0", "Scoring.workers=1",
]  # fmt: skip


def table(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(("time/", "host/"))} for row in rows]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay") / "run"
    run(TINY, folder)
    return folder


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_the_steps_after_a_saved_one_come_out_the_same(uninterrupted, tmp_path, step):
    folder = shutil.copytree(uninterrupted, tmp_path / "run")
    for later in range(step + 1, 7):
        shutil.rmtree(folder / "checkpoints" / f"{later:08d}")
    seen = run(TINY, folder)
    assert [one.step for one in seen] == list(range(step + 1, 7))
    assert table(folder) == table(uninterrupted)
    assert run_fingerprint(folder) == run_fingerprint(uninterrupted)


def test_a_copied_folder_goes_on_elsewhere_to_the_same_bits(uninterrupted, tmp_path):
    """The disk that was mounted is gone, and what was mirrored of it is on another machine."""
    first = tmp_path / "mounted" / "run"
    run(TINY, first, stop_after=3)
    second = shutil.copytree(first, tmp_path / "elsewhere" / "deeper" / "run")
    shutil.rmtree(first.parent)
    run(TINY, second)
    assert table(second) == table(uninterrupted)
    assert run_fingerprint(second) == run_fingerprint(uninterrupted)
