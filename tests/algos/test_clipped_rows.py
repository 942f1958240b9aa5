"""The rows whose loss is PPO's clip of their own advantages: one loss, by hand, through every one of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import clipped_tokens

from jrl.algos import ALGOS, common
from jrl.algos.common import TruncatedImportance
from jrl.algos.contract import Facts

FACTS = Facts(samples=8, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)
# With the options that leave the clip alone in the loss.
CLIPPED = {
    "DAPO": {"clip_high": 0.2}, "DrGRPO": {}, "GDPO": {}, "LitePPO": {}, "MaxRL": {}, "OnPolicyDistillation": {},
    "OPO": {}, "OTB": {}, "PassAtK": {}, "ReinforcePlusPlus": {}, "ReinforcePlusPlusBaseline": {"kl": None}, "RLOO": {},
    "ReMax": {}, "SELF": {}, "SiblingGRPO": {}, "TaskNormalizedGRPO": {},
}  # fmt: skip
GROUPED = sorted(set(CLIPPED) - {"OnPolicyDistillation", "ReinforcePlusPlus", "SiblingGRPO"})


def test_every_row_with_that_loss_is_here():
    assert {name for name, row in ALGOS.items() if row.token_loss is common.clipped_token_loss} <= set(CLIPPED)


@pytest.mark.parametrize("name", CLIPPED)
def test_the_loss_is_the_clip(name):
    # rho 1.5, A 1: -1.2; rho 0.5, A -2: 1.6; the entropy 0.1 * 2 less; w = 2 doubles the clip alone
    objective, tokens = ALGOS[name], clipped_tokens()
    config = objective.config(**CLIPPED[name])
    loss, metrics = jax.jit(objective.token_loss)(config, tokens, ())
    np.testing.assert_allclose(loss, [-1.2, 1.6, 0], rtol=1e-6)
    np.testing.assert_array_equal(metrics["clip_fraction_high"], [1, 0, 0])
    np.testing.assert_array_equal(metrics["clip_fraction_low"], [0, 1, 0])
    corrected = objective.config(importance=TruncatedImportance(), entropy_bonus=0.1, **CLIPPED[name])
    np.testing.assert_allclose(objective.token_loss(corrected, tokens, ())[0], [-2.6, 3.0, 0], rtol=1e-6)
    gradient = jax.grad(lambda lp: objective.token_loss(config, tokens.replace(logprobs=lp), ())[0].sum())
    # Both are clipped; within the bounds the gradient is -A rho.
    np.testing.assert_array_equal(gradient(tokens.logprobs), [0, 0, 0])
    np.testing.assert_allclose(gradient(jnp.log(jnp.array([1.1, 0.9, 1.0]))), [-1.1, 1.8, 0], rtol=1e-6)


@pytest.mark.parametrize("bound", [{"clip_low": 1.5}, {"clip_high": -0.1}, {"dual_clip": 1.0}], ids=str)
@pytest.mark.parametrize("name", CLIPPED)
def test_bounds_that_contradict_are_refused(name, bound):
    ((field, value),) = bound.items()
    with pytest.raises(ValueError, match=rf"{name}\.{field} = {value}"):
        ALGOS[name].check(ALGOS[name].config(**bound), FACTS)


@pytest.mark.parametrize("name", GROUPED)
def test_one_sample_of_a_prompt_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} compares the samples of one prompt"):
        ALGOS[name].check(ALGOS[name].config(), FACTS._replace(samples=1))
