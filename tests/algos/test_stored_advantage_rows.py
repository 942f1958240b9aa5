"""Methods that learn from stored rows by their advantage: A-LoL, and AWR of steps."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import two_stored_answers
from small_model import BIGRAM, PARTS
from test_pair_objectives import FACTS, sequences

import jrl
from jrl.algos import ALGOS
from jrl.algos.a_lol import ALoL
from jrl.algos.r_gold import RGOLD
from jrl.algos.step_awr import StepAWR
from jrl.config import ConfigError
from jrl.learning.learner import ModelOutputs, sequence_terms
from jrl.ops import offline_advantage
from jrl.run.bucket_run import RunFolder
from jrl.run.job import open_job

NAN = float("nan")


def stored(logprob, ref_logprob, length, value, mask=None):
    """A row of single sequences with two numbers each."""
    row = sequences(logprob, ref_logprob, length, [1.0] * len(logprob), mask)
    alone = jnp.arange(len(logprob), dtype=jnp.int32)[None]
    return dataclasses.replace(row, unit=alone, value=jnp.float32([value]))


def answers():
    """R - V = 0.4, -0.1, 0.2, of answers whose log-ratios to the reference are 0.5, 1 and -3; and three that do not
    count: one is masked, one has no token, of one the data do not say what was expected."""
    return stored(
        [-6.0, -4.0, -5.0, NAN, -1.0, -1.0],
        [-6.5, -5.0, -2.0, NAN, -1.0, -1.0],
        [3, 2, 5, 4, 0, 1],
        [[0.9, 0.5], [0.4, 0.5], [0.7, 0.5], [NAN, NAN], [9.0, 0.0], [1.0, NAN]],
        [True, True, True, False, True, True],
    )


def loss_of(name, config, batch):
    run = jax.jit(ALGOS[name].sequence_loss)
    loss, metrics = run(config, batch, ())
    slope = jax.grad(lambda lp: run(config, batch.replace(logprob=lp), ())[0].sum())(batch.logprob)
    return np.asarray(loss[0]), metrics, np.asarray(slope[0])


def test_a_lol_by_hand():
    loss, metrics, slope = loss_of("ALoL", ALoL(), answers())
    # -0.4 exp(0.5) * -6 = 3.95693; what is worse than expected has weight 0; exp(-3) is held at 0.1:
    # -0.2 * 0.1 * -5
    np.testing.assert_allclose(loss, [3.95693, 0, 0.1, 0, 0, 0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(slope, [-0.4 * np.exp(0.5), 0, -0.02, 0, 0, 0], rtol=1e-5, atol=1e-7)
    # (R - V) times the mean log-prob of a token: 0.4 * -2, -0.1 * -2, 0.2 * -1
    np.testing.assert_allclose(metrics["advantage/logprob"][0], [-0.8, 0.2, -0.2, 0, 0, 0], rtol=1e-5)
    np.testing.assert_allclose(metrics["advantage/weight"][0], [0.4, 0, 0.2, 0, 0, 0], rtol=1e-5)
    # A ratio of e is held at 1.9.
    above = stored([-4.0], [-5.0], [2], [[1.0, 0.5]])
    np.testing.assert_allclose(loss_of("ALoL", ALoL(), above)[0], [0.5 * 1.9 * 4], rtol=1e-5)


def test_a_lol_of_sums_is_that_of_tokens():
    rng = np.random.default_rng(0)
    lp, ref = (jnp.asarray(rng.uniform(-2, -0.1, (1, 6)), jnp.float32) for _ in range(2))
    segment, mask = jnp.array([[0, 0, 0, 1, 1, 2]]), jnp.ones((1, 6), bool)
    of_sequences = np.array([0.4, 0.0, 0.7], np.float32)
    total = lambda x: [float(x[0, np.asarray(segment[0]) == i].sum()) for i in range(3)]
    options = {"num_segments": 3, "clip": 0.9}
    by_token = offline_advantage.a_lol(lp, ref, jnp.asarray(of_sequences)[segment], mask, segment, **options)
    batch = stored(total(lp), total(ref), [3, 2, 1], [[a, 0.0] for a in of_sequences])
    np.testing.assert_allclose(loss_of("ALoL", ALoL(), batch)[0], total(by_token), rtol=1e-5)


def test_the_other_forms_of_a_lol_by_hand():
    batch = answers()
    free, _, slope = loss_of("ALoL", ALoL(clip=None), dataclasses.replace(batch, ref_logprob=None))
    np.testing.assert_allclose(free, [2.4, 0, 1.0, 0, 0, 0], rtol=1e-5)
    np.testing.assert_allclose(slope, [-0.4, 0, -0.2, 0, 0, 0], rtol=1e-5)
    tied, _, slope = loss_of("ALoL", ALoL(clip=None, kl=0.1), batch)
    np.testing.assert_allclose(tied, [2.4 + 0.05, 0, 1.0 - 0.3, 0, 0, 0], rtol=1e-5)
    np.testing.assert_allclose(slope, [-0.3, 0, -0.1, 0, 0, 0], rtol=1e-5)
    needs = [ALGOS["ALoL"].needs(config).reference for config in (ALoL(), ALoL(clip=None), ALoL(clip=None, kl=0.1))]
    assert needs == [True, False, True]


def test_r_gold_by_hand():
    batch = answers().replace(ref_logprob=None, floored_logprob=jnp.float32([[-2.0, -3.0, -0.5, NAN, NAN, NAN]]))
    run = jax.jit(ALGOS["RGOLD"].sequence_loss)
    loss, metrics = run(RGOLD(), batch, ())
    # R - V = 0.4, -0.1 and 0.2: 0.4 * 2, 0, 0.2 * 0.5; the others do not count.
    np.testing.assert_allclose(loss, [[0.8, 0, 0.1, 0, 0, 0]], rtol=1e-5)
    total = lambda x: run(RGOLD(), batch.replace(floored_logprob=x), ())[0].sum()
    np.testing.assert_allclose(jax.grad(total)(batch.floored_logprob), [[-0.4, 0, -0.2, 0, 0, 0]], rtol=1e-5)
    np.testing.assert_allclose(metrics["advantage/logprob"][0], [-0.8, 0.2, -0.2, 0, 0, 0], rtol=1e-5)


def test_the_learner_weighs_tokens_by_their_floored_probability():
    # Two answers, of tokens 1 and 2 and of token 4: p = 0.5 and 0.05, which weighs 0.1; and 0.2. R - V = 0.4 and -1.
    micro = two_stored_answers([[0.9, 0.5], [0.0, 1.0]], 2)
    probability = jnp.array([[NAN, 0.5, 0.05, NAN, 0.2, NAN]])

    def total(logprobs):
        loss, _ = sequence_terms(
            ModelOutputs(logprobs, None, None, None, None, None), micro, RGOLD(), (), ALGOS["RGOLD"]
        )
        return loss.sum(), loss

    slope, loss = jax.jit(jax.grad(total, has_aux=True))(jnp.log(probability))
    # -0.4 (0.5 log 0.5 + 0.1 log 0.05); no gradient passes the weight.
    np.testing.assert_allclose(loss, [[0.258459, 0]], rtol=1e-5)
    np.testing.assert_allclose(slope, [[0, -0.2, -0.04, 0, 0, 0]], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["ALoL", "RGOLD"])
def test_data_without_an_answer_that_is_better_than_expected_are_refused(name):
    row = ALGOS[name]
    row.check_stored(row.config(), np.array([[0.0, 1.0], [NAN, 0.0], [1.0, 0.5]]))
    for value in ([[0.5, 0.5], [0.0, 1.0], [9.0, NAN]], np.zeros((0, 2))):
        with pytest.raises(ValueError, match=f"{name}: none of the [03] stored rows earned more than"):
            row.check_stored(row.config(), np.array(value))


def test_step_awr_by_hand():
    # Q before and after: 0.5 to 0.75, 0.75 to 0.25, and less than one rollout of four: 1, which is imitation. The
    # fourth would weigh e^4, and weighs 20. Then a masked one, and one of no token.
    batch = stored(
        [-2.0, -3.0, -4.0, -1.0, NAN, -1.0],
        [0.0] * 6,
        [1, 2, 4, 1, 3, 0],
        [[0.5, 0.75], [0.75, 0.25], [0.5, 0.6], [0.0, 1.0], [NAN, NAN], [0.0, 1.0]],
        [True, True, True, True, False, True],
    )
    loss, metrics, slope = loss_of("StepAWR", StepAWR(), batch)
    weights = np.array([np.exp(1), np.exp(-2), 1, 20, 0, 0])
    np.testing.assert_allclose(loss, [2 * np.exp(1), 3 * np.exp(-2), 4, 20, 0, 0], rtol=1e-5)
    np.testing.assert_allclose(slope, -weights, rtol=1e-5)
    np.testing.assert_allclose(metrics["advantage/weight"][0], weights, rtol=1e-5)
    np.testing.assert_allclose(metrics["advantage/mean"][0], [0.25, -0.5, 0, 1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(metrics["advantage/mean_logprob"][0], [-2, -1.5, -1, -1, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(metrics["advantage/logprob"][0], [-0.5, 0.75, 0, -1, 0, 0], atol=1e-6)
    # Of ten rollouts a tenth is one of them: exp(0.1 / 0.25).
    np.testing.assert_allclose(loss_of("StepAWR", StepAWR(rollouts=10), batch)[0][2], 4 * np.exp(0.4), rtol=1e-5)


@pytest.mark.parametrize(
    "name, config, message",
    [
        ("ALoL", ALoL(kl=0.1), r"ALoL\.clip = 0\.9 and ALoL\.kl = 0\.1 are two forms"),
        ("ALoL", ALoL(clip=1.0), r"ALoL\.clip = 1\.0 must lie in \(0, 1\)"),
        ("ALoL", ALoL(clip=None, kl=0.0), r"ALoL\.kl = 0\.0 must be above 0"),
        ("RGOLD", RGOLD(floor=0.0), r"RGOLD\.floor = 0\.0 must be in \(0, 1\]"),
        ("RGOLD", RGOLD(floor=1.5), r"RGOLD\.floor = 1\.5 must be in \(0, 1\]"),
        ("ALoL", ALoL(draw="by_luck"), r"ALoL\.draw = 'by_luck' is none of 'in_turn', 'proportional'"),
        ("RGOLD", RGOLD(draw="by_luck"), r"RGOLD\.draw = 'by_luck' is none of"),
        ("StepAWR", StepAWR(rollouts=0), r"StepAWR\.rollouts = 0 must be above 0"),
        ("StepAWR", StepAWR(beta=0.0), r"StepAWR\.beta = 0\.0 must be above 0"),
        ("StepAWR", StepAWR(max_weight=0.5), r"StepAWR\.max_weight = 0\.5 must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(name, config, message):
    with pytest.raises(ValueError, match=message):
        ALGOS[name].check(config, FACTS)


def test_a_run_on_data_whose_numbers_are_in_the_wrong_order_does_not_begin(tmp_path):
    # What was expected first: of answers that earn nothing and are expected to earn something no one is better.
    rows = [{"id": str(i), "prompt": f"{i}+0=", "answer": str(i), "given": "x", "correctness": 1, "expected": 0}
            for i in range(4)]  # fmt: skip
    data = tmp_path / "rated.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    bindings = [f"Jsonl.path='{data}'", "Rated.values=('expected', 'correctness')"]
    config, parts = jrl.load_config("configs/algos/r_gold.gin", bindings)
    with pytest.raises(ValueError, match=r"RGOLD: none of the 4 stored rows earned more than was expected.*"
                                         r"those of the first row are \[0\.0, 1\.0\]"):  # fmt: skip
        with open_job(config, parts, RunFolder(tmp_path / "run"), threading.Event()):
            pass


@pytest.mark.parametrize("name", ["ALoL", "RGOLD"])
def test_rows_are_drawn_in_proportion_to_their_advantage(name):
    # R - V = 0.4, -0.1, 0.2, one that gives no row, 0: 0.4 and 0.2 of 0.6
    objective = ALGOS[name]
    value = np.float32([[0.9, 0.5], [0.4, 0.5], [0.7, 0.5], [NAN, NAN], [0.5, 0.5]])
    found = objective.draw(objective.config(draw="proportional"))(value)
    np.testing.assert_allclose(found, [2 / 3, 0, 1 / 3, 0, 0], rtol=1e-6)
    assert found.dtype == np.float64 and found.sum() == pytest.approx(1, abs=1e-15)
    assert objective.draw(objective.config()) is None
    with pytest.raises(ValueError, match="none of 1 stored rows is better than expected"):
        objective.draw(objective.config(draw="proportional"))(value[1:2])


def test_a_run_draws_what_earned_more_and_resumes_with_the_same_rows(tmp_path):
    # Of 8 answers the third earned 0.75 more than was expected and the sixth 0.25.
    rows = [{"id": str(i), "prompt": f"{i}+0=", "answer": str(i), "given": "x", "expected": 1,
             "correctness": {2: 1.75, 5: 1.25}.get(i, 1)} for i in range(8)]  # fmt: skip
    data = tmp_path / "rated.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    bindings = [f"Jsonl.path='{data}'", "RGOLD.draw='proportional'", "Config.stages=[@pairs/Offline()]",
                "pairs/Offline.steps=3", "Checkpoint.every=1", "Log.writers=()", BIGRAM, "Config.eval=None",
                "Data.held_out_every=None"]  # fmt: skip
    recipe = "configs/algos/r_gold.gin"
    seen = [step.examples for step in jrl.steps(recipe, bindings, parts=[PARTS], run=tmp_path / "straight")]
    counts = collections.Counter(itertools.chain(*seen))
    assert counts.keys() == {"2", "5"} and sum(counts.values()) == 3 * 64
    # 192 draws of a chance of 3/4 have a deviation of 6.
    assert abs(counts["2"] - 144) < 24 and len({tuple(ids) for ids in seen}) == 3
    with contextlib.closing(jrl.steps(recipe, bindings, parts=[PARTS], run=tmp_path / "cut")) as steps:
        next(steps)
    assert [step.examples for step in jrl.steps(recipe, bindings, parts=[PARTS], run=tmp_path / "cut")] == seen[1:]


def test_data_that_name_another_count_of_numbers_are_refused():
    recipe = "configs/algos/a_lol.gin"
    jrl.load_config(recipe)
    with pytest.raises(ConfigError, match=r"ALoL reads 2 numbers of a row, the reward and the expected reward, and "
                                          r"Rated\.values names 1"):  # fmt: skip
        jrl.load_config(recipe, ["Rated.values=('correctness',)"])
    with pytest.raises(ConfigError, match=r"of every row; set Rated\.complete = True"):
        jrl.load_config(recipe, ["Rated.complete=False"])
    with pytest.raises(ConfigError, match="does not read values of answers"):
        jrl.load_config(recipe, ["pairs/Offline.objective=@SFT()"])
    assert ALGOS["StepAWR"].needs(StepAWR()).row_values
    recipe = "configs/algos/step_awr.gin"
    jrl.load_config(recipe)
    with pytest.raises(ConfigError, match="StepAWR reads the success rate before the step and the success rate after"):
        jrl.load_config(recipe, ["pairs/Offline.source=@StepLabels()"])
