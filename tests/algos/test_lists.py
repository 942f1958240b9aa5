"""PRO and RRHF on samples of a prompt, and Step-APO on stored pairs with values, by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_pair_objectives import RUNNING

import jrl
from jrl.algos import ALGOS
from jrl.algos.conformance import sample_groups
from jrl.algos.contract import Facts, Sequences
from jrl.algos.pro import PRO
from jrl.algos.rrhf import RRHF
from jrl.algos.step_apo import StepAPO
from jrl.config import ConfigError

FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=6)


def listed(mean_logprob, reward, unit, mask=None):
    """A row of lists; every answer has two tokens, and the first of the best rows of a list is its best."""
    row = lambda x, dtype=jnp.float32: jnp.asarray([x], dtype)
    best = [r == max(q for q, v in zip(reward, unit) if v == u) for r, u in zip(reward, unit)]
    return Sequences(
        logprob=row(mean_logprob) * 2,
        ref_logprob=None,
        length=row([2] * len(unit), jnp.int32),
        score=None,
        label=row(best),
        unit=row(unit, jnp.int32),
        mask=jnp.ones((1, len(unit)), bool) if mask is None else jnp.asarray([mask]),
        value=row(reward),
    )


# LPbar -0.5, -1, -2 with rewards 3, 2, 0: 0.97826 + 0.12693 (P23); the other list's best is likeliest by far
TWO = listed([-1.0, -0.5, -0.5, -2.0, -1.0], [2.0, 3.0, 0.0, 0.0, 1.0], [0, 0, 1, 0, 1])


def test_pro_by_hand():
    loss, metrics = jax.jit(ALGOS["PRO"].sequence_loss)(PRO(nll=0.05), TWO, ())
    # 0.05 * (3 - 1)^2 * 0.5 more; of the other list log(1 + e^(-0.5 + 1)) = 0.974077 and 0.05 * 1 * 1
    np.testing.assert_allclose(loss, [[0, 1.10519 + 0.1, 0, 0, 0.974077 + 0.05]], 1e-5)
    np.testing.assert_allclose(metrics["lists/accuracy"], [[0, 1, 0, 0, 0]])
    np.testing.assert_allclose(metrics["lists/best"], [[0, -0.5, 0, 0, -1]])


def test_rrhf_by_hand():
    loss, _ = jax.jit(ALGOS["RRHF"].sequence_loss)(RRHF(nll=1.0), TWO, ())
    # The first list is in order: the NLL alone; the other has max(0, -0.5 + 1) and an NLL of 1.
    np.testing.assert_allclose(loss, [[0, 0.5, 0, 0, 0.5 + 1]], 1e-6)


@pytest.mark.parametrize("name", ["PRO", "RRHF"])
def test_the_gradient_is_that_of_small_differences_and_none_where_masked(name):
    row = ALGOS[name]
    with jax.enable_x64(True):
        masked = listed([-1.0, -0.7, np.nan, -2.0, -1.6], [2.0, 3.0, np.nan, 0.0, 1.0], [0, 0, 0, 0, 0],
                        [True, True, False, True, True])  # fmt: skip
        masked = masked.replace(label=jnp.asarray([[0, 1, 0, 0, 0]]))
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64) if x.dtype == jnp.float32 else x, masked)
        total = lambda lp: row.sequence_loss(row.config(), dataclasses.replace(wide, logprob=lp), ())[0].sum()
        steps = 1e-5 * jnp.eye(5)[:, None]
        expected = [float((total(wide.logprob + d) - total(wide.logprob - d)) / 2e-5) for d in steps]
        expected[2] = 0.0  # NaN either way
        found = jax.jit(jax.grad(total))(wide.logprob)[0]
        np.testing.assert_allclose(found, expected, 1e-6, 1e-9)
        assert np.any(found)


def test_all_samples_of_a_prompt_are_one_list_where_rewards_differ():
    groups = sample_groups()  # rewards [1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0, 0], row 10 without a verdict
    groups = groups.replace(reward=jnp.where(groups.valid, groups.reward, jnp.nan))
    found = jax.jit(lambda g: ALGOS["RRHF"].pairs(RRHF(), g, g.reward))(groups)
    np.testing.assert_array_equal(found.unit, [0, 0, 0, 0, -1, -1, -1, -1, 2, 2, -1, 2])
    np.testing.assert_array_equal(found.label, [1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(found.value, [1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0])


def test_step_apo_by_hand():
    # D = 2: log(1 + e^-(0.2 - 0.5 * 0.6))
    steps = dataclasses.replace(RUNNING, value=jnp.float32([[0.8, 0.2]]))
    row = ALGOS["StepAPO"]
    loss, metrics = jax.jit(row.sequence_loss)(StepAPO(), steps, ())
    np.testing.assert_allclose(loss, [[0.744397, 0]], 1e-6)
    np.testing.assert_allclose(metrics["pairs/margin"], [[2, 0]], 1e-6)
    masked = dataclasses.replace(steps, mask=jnp.zeros((1, 2), bool), value=jnp.full((1, 2), jnp.nan))
    np.testing.assert_array_equal(row.sequence_loss(StepAPO(), masked, ())[0], 0)
    slope = jax.grad(lambda lp: row.sequence_loss(StepAPO(), steps.replace(logprob=lp), ())[0].sum())(steps.logprob)
    np.testing.assert_allclose(slope, [[-0.0524979, 0.0524979]], 1e-5)  # 0.1 * sigmoid(0.1)


def test_what_makes_no_sense_is_refused():
    for name in ("PRO", "RRHF"):
        with pytest.raises(ValueError, match=rf"{name}\.nll = -1"):
            ALGOS[name].check(ALGOS[name].config(nll=-1.0), FACTS)
        with pytest.raises(ValueError, match="at least 2 of them"):
            ALGOS[name].check(ALGOS[name].config(), FACTS._replace(samples=1))
    with pytest.raises(ValueError, match=r"StepAPO\.scale = 0\.0"):
        ALGOS["StepAPO"].check(StepAPO(scale=0.0), FACTS)
    with pytest.raises(ConfigError, match=r"StepAPO reads values of answers .* Preferences\.values does not name"):
        jrl.load_config("configs/algos/step_apo.gin", ["Preferences.values=None"])
    with pytest.raises(ConfigError, match="DPO does not read values of answers"):
        jrl.load_config("configs/algos/step_apo.gin", ["pairs/Offline.objective=@DPO()"])
