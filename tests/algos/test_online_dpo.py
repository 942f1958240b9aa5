"""Online DPO: whole runs too, in which a group lies in one packed row."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_learner as learning
from small_model import BIGRAM, PARTS

import jrl
from jrl.algos import ALGOS
from jrl.algos.conformance import sample_groups
from jrl.algos.contract import Facts
from jrl.algos.online_dpo import OnlineDPO
from jrl.config import ConfigError
from jrl.device.sharding import MeshShape, make_mesh
from jrl.learning.credit import credit, finish_sampled
from jrl.learning.layout import Learner, packed_shape
from jrl.learning.pack import pack_rollout, plan
from jrl.run import run_hash
from jrl.types import Recomputed

OBJECTIVE = ALGOS["OnlineDPO"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=6)


def test_the_best_sample_is_preferred_to_the_worst():
    groups = sample_groups()  # rewards [1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 0], row 10 without a verdict
    found = jax.jit(lambda g: OBJECTIVE.pairs(OnlineDPO(), g, g.reward))(groups)
    np.testing.assert_array_equal(found.unit, [0, 0, -1, -1, -1, -1, -1, -1, 2, 2, -1, -1])
    np.testing.assert_array_equal(found.label, [1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(found.weight, np.ones(12))


def test_pairs_of_a_minibatch_are_targets_of_its_places():
    rollout, scores = jax.tree.map(jnp.asarray, learning.sequences())
    judged = dict(objective=OBJECTIVE, max_completion=learning.C)
    total = 0
    config = OnlineDPO()
    said = jax.jit(lambda *x: credit(*x, (), config, num_groups=learning.B, **judged))(rollout, scores)
    assert said.advantages is None
    unit = np.asarray(said.pairs.unit)
    learned = np.asarray(said.loss_mask).any(-1)
    np.testing.assert_array_equal(learned, unit >= 0)
    shape = packed_shape(Learner(minibatches=2, micro_batch_tokens=48), learning.N, learning.T, 1, unit=learning.G)
    for k in range(2):
        packing = plan(np.asarray(rollout.length), shape, k, 2)
        packed = jax.jit(pack_rollout)(rollout, packing, jnp.float32(1))
        batch = jax.jit(lambda p, s, q: finish_sampled(p, Recomputed(), q, s, config, **judged))(packed, said, packing)
        counts, sequence = np.asarray(batch.targets.counts), np.asarray(packed.sequence)
        rows = sequence[counts]
        assert set(rows) == {i for i in np.flatnonzero(unit >= 0) if packing.member[i]}
        np.testing.assert_array_equal(np.asarray(batch.targets.unit)[counts], unit[rows])
        np.testing.assert_array_equal(np.asarray(batch.targets.label)[counts], np.asarray(said.pairs.label)[rows])
        assert batch.denominator == batch.targets.denominator == max(len(set(unit[rows])), 1)
        # Both rows of a pair are in one packed row.
        of_row = np.asarray(batch.targets.unit).reshape(-1, sequence.shape[-1])
        for number in set(unit[rows]):
            assert sorted((of_row == number).sum(-1))[-1] == 2
        total += len(set(unit[rows]))
    assert total == len(set(unit[unit >= 0])) > 2


def test_other_pairs_of_a_group():
    groups = sample_groups()  # as above; lengths decide between rows of equal reward
    pairing = lambda **config: np.asarray(
        OBJECTIVE.pairs(OnlineDPO(**config), groups, OBJECTIVE.shape(OnlineDPO(**config), groups)).unit
    )
    lengths = np.asarray(groups.action_mask).sum(1)
    two = pairing(pairing="best_two", length_penalty=0.01)
    # The best two of group 0 are its right rows, 0 and 3, where their lengths differ.
    assert set(np.flatnonzero(two == 0)) == ({0, 3} if lengths[0] != lengths[3] else set())
    assert (pairing(pairing="best_two")[:4] == -1).all()
    random = pairing(pairing="best_random")
    assert random[9] in (2, -1) and (random == 1).sum() == 0 and (random >= 0).sum() in (0, 2, 4)


@pytest.mark.parametrize(
    "config, message",
    [
        (OnlineDPO(pairing="worst"), r"OnlineDPO\.pairing = 'worst'"),
        (OnlineDPO(length_penalty=0.0), r"OnlineDPO\.length_penalty = 0\.0"),
        (OnlineDPO(beta=0.0), r"OnlineDPO\.beta = 0\.0"),
        (OnlineDPO(margin=-1.0), r"OnlineDPO\.margin = -1\.0"),
    ],
)
def test_illegal_values_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)
    OBJECTIVE.check(OnlineDPO(), FACTS)


def test_one_sample_cannot_be_compared_and_greedy_ones_are_all_the_same():
    for facts in (FACTS._replace(samples=1), FACTS._replace(greedy=True)):
        with pytest.raises(ValueError, match="OnlineDPO"):
            OBJECTIVE.check(OnlineDPO(), facts)


TINY = [BIGRAM, "Online.objective=@OnlineDPO()", "Online.prompts=16", "Online.samples=4",
        "Online.steps=4", "Learner.minibatches=2", "Checkpoint.every=1", "Checkpoint.keep=9", "Log.samples=0",
        "Log.writers=()", "Scoring.workers=1", "AdamW.learning_rate=1e-2"]  # fmt: skip


@pytest.mark.parametrize(
    "binding, message",
    [
        ("Online.objective=@DPO()", "DPO learns from stored rows"),
        ("Learner.prefix_sharing='in_row'", "OnlineDPO compares the samples of a prompt, which are packed whole"),
        ("Learner.row_length=24", "shorter than the longest comparison of 4 sequences"),
    ],
)
def test_what_cannot_run_is_refused(binding, message, tmp_path):
    named = {b.partition("=")[0]: b for b in [*TINY, binding]}
    with pytest.raises((ConfigError, ValueError), match=message):
        list(jrl.steps("configs/tiny.gin", list(named.values()), parts=[PARTS], run=tmp_path))


@pytest.mark.usefixtures("frozen_before_the_first_step")
def test_a_run_learns_from_pairs_and_is_the_same_after_a_resume(tmp_path):
    def run(folder, stop_after=None):
        seen = []
        with contextlib.closing(jrl.steps("configs/tiny.gin", TINY, parts=[PARTS], run=folder)) as steps:
            for step in steps:
                seen.append(step)
                if step.step == stop_after:
                    break
        return seen

    with jax.set_mesh(make_mesh(MeshShape(), jax.devices()[:1])):
        steps = run(tmp_path / "straight")
        run(tmp_path / "cut", stop_after=2)
        run(tmp_path / "cut")
    assert run_hash.run_fingerprint(tmp_path / "cut", 4) == run_hash.run_fingerprint(tmp_path / "straight", 4)
    first = steps[0]
    reward = first.rollout["reward"].reshape(16, 4)
    varied = (reward.max(1) > reward.min(1)).sum()
    assert first.metrics["loss/rows"] == 2 * varied > 0
    # The policy is its reference at first: every margin is 0 in the first update, and grows in the second.
    assert 0.5 < first.metrics["loss"] <= np.log(2) + 1e-3 and first.metrics["grad_norm"] > 0
