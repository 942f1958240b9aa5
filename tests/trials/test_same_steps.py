"""From any saved step, and from a copy of the folder elsewhere, a run does the same steps again.

pytest -m slow tests/trials/test_same_steps.py
"""

import json
import random
import shutil

import pytest
from short_runs import run
from small_model import BIGRAM

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


# Other kinds of runs, with a model whose programs compile sooner.
SMALL = [
    BIGRAM, "Online.prompts=4", "Online.samples=2", "Sampler.completion_length=4", "Checkpoint.every=1",
    "Checkpoint.keep=20", "Log.samples=0", "Scoring.workers=1",
]  # fmt: skip
KINDS = {
    "on policy": ["Online.steps=11"],
    "lag and refills": [
        "Online.steps=11", "Online.lag=2", "Online.objective=@DAPO()", "DAPO.max_refills=1",
        "DAPO.importance=@TruncatedImportance()",
    ],
    "two stages": [
        "Config.stages=[@warm/Offline(), @Online()]", "warm/Offline.source=@Demonstrations()",
        "warm/Offline.objective=@SFT()", "warm/Offline.batch_size=2", "warm/Offline.steps=4", "Online.steps=7",
        "Online.lag=1", "Config.eval=@Eval()", "Eval.prompts=4", "Eval.batch=4", "Data.held_out_every=5",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns a function: the folder of an uninterrupted run of a kind."""
    folders = {}

    def folder_of(kind):
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp("kinds") / "run"
            run([*SMALL, *KINDS[kind]], folders[kind])
        return folders[kind]

    return folder_of


@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_after_any_saved_one_come_out_the_same_in_every_kind_of_run(whole, tmp_path, kind, trials):
    draw = random.Random(kind)
    for step in draw.sample(range(1, 11), trials(2, 10)):
        folder = shutil.copytree(whole(kind), tmp_path / f"run{step}")
        for later in range(step + 1, 12):
            shutil.rmtree(folder / "checkpoints" / f"{later:08d}")
        seen = run([*SMALL, *KINDS[kind]], folder)
        assert [one.step for one in seen] == list(range(step + 1, 12))
        assert table(folder) == table(whole(kind)) and run_fingerprint(folder) == run_fingerprint(whole(kind)), step


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_any_moment_goes_on_elsewhere_to_the_same_bits(whole, tmp_path, kind, trials):
    """Of a run whose rows, rollouts and steps may be newer than the last checkpoint that was mirrored."""
    draw = random.Random(kind)
    for step in draw.sample(range(1, 11), trials(1, 8)):
        first = tmp_path / f"mounted{step}" / "run"
        run([*SMALL, *KINDS[kind]], first, stop_after=step)
        second = shutil.copytree(first, tmp_path / f"elsewhere{step}" / "deeper" / "run")
        shutil.rmtree(first.parent)
        if step > 1 and draw.random() < 0.5:
            shutil.rmtree(second / "checkpoints" / f"{step:08d}")
        run([*SMALL, *KINDS[kind]], second)
        assert table(second) == table(whole(kind)) and run_fingerprint(second) == run_fingerprint(whole(kind)), step
