"""An objective with a state for every example: the one of docs/bring-your-own.md, by hand and in whole runs."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import short_runs
from documented import write_part
from small_model import PLAIN_DECODER

from jrl.plugins import load_parts
from jrl.rollout.collect import example_indices
from jrl.run import replay, run_hash
from jrl.types import Finish

pytestmark = pytest.mark.usefixtures("mesh_of_the_runs")

SMALL = [
    *PLAIN_DECODER, "Decoder.layers=1", "Decoder.width=16", "Decoder.mlp_width=16", "Online.prompts=8",
    "Online.samples=1", "Online.steps=4", "Checkpoint.every=1", "Checkpoint.keep=9", "Log.samples=0",
    "Log.writers=()", "Scoring.workers=1", "Addition.size=12",
]  # fmt: skip
run = functools.partial(short_runs.run, SMALL)


@pytest.fixture
def part(tmp_path):
    return write_part("An objective that remembers every prompt", tmp_path)


def test_the_reward_is_compared_with_the_running_mean_of_the_prompt(part):
    row = load_parts([part]).tables["algos"]["RunningBaseline"]
    config = row.config(examples=4, decay=0.75)
    groups = SimpleNamespace(
        valid=jnp.array([True, True, True, False, False]), group=jnp.arange(5, dtype=jnp.int32), num_groups=5,
        action_mask=jnp.ones((5, 2), bool), finish=jnp.full(5, Finish.STOP_TOKEN, jnp.int8),
        example=jnp.array([2, 0, 2, 1, -1], jnp.int32),
    )  # fmt: skip
    state = {"mean": jnp.array([0.5, 0.25, 0.0, 0.125]), "visits": jnp.array([2, 1, 0, 3], jnp.int32)}
    reward = jnp.array([1.0, 1.0, 0.0, 9.0, jnp.nan])
    found, after, _ = jax.jit(lambda reward, state: row.advantages(config, groups, reward, state))(reward, state)
    # Example 2 is new: no baseline yet, and its mean becomes (1 + 0) / 2. Example 0: 1 - 0.5, then 0.75 * 0.5 + 0.25.
    # Example 1 has no verdict and stays.
    np.testing.assert_allclose(found[:, 0], [0, 0.5, 0, 0, 0])
    np.testing.assert_allclose(after["mean"], [0.625, 0.25, 0.5, 0.125])
    assert after["visits"].tolist() == [3, 1, 2, 3]


def test_every_row_has_the_index_of_its_example():
    visits = [SimpleNamespace(index=index) for index in (5, 0, 2**40, None)]
    found = example_indices(visits, 2, 10)
    assert found.dtype == np.int32 and found.tolist() == [5, 5, 0, 0, 2**31 - 1, 2**31 - 1, -1, -1, -1, -1]


def test_a_run_resumes_and_repeats_with_its_entries(part, tmp_path):
    own = [f"Config.parts=['{part}']", "Online.objective=@RunningBaseline()", "RunningBaseline.examples=20"]
    steps = run(tmp_path / "whole", *own)
    run(tmp_path / "cut", *own, stop_after=2)
    run(tmp_path / "cut", *own)
    assert run_hash.run_fingerprint(tmp_path / "cut", 4) == run_hash.run_fingerprint(tmp_path / "whole", 4)
    visited = np.bincount([visit.index for step in steps for visit in step.batch.visits], minlength=20)
    state = run_hash.read_step(tmp_path / "whole", 4)[0]["state"]["objective"]
    np.testing.assert_array_equal(state["visits"], visited)
    assert visited.max() > 1 and not visited[12:].any()
    assert replay.repeat(tmp_path / "whole", 4) == (3, 4, [])


def test_a_source_with_more_examples_than_entries_is_refused(part, tmp_path):
    own = [f"Config.parts=['{part}']", "Online.objective=@RunningBaseline()", "RunningBaseline.examples=11"]
    with pytest.raises(ValueError, match=r"has entries for 11 examples .* the source has 12"):
        run(tmp_path / "run", *own)
