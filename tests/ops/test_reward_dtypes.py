"""Rewards are computed in float32 or wider, whatever a reward model gives (rule E8 of docs/algorithms.md)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jrl.ops import constraints, ensembles, missing_stop, robust_scale

ROW, MEMBERS, TRUE = jnp.ones(3, jnp.bfloat16), jnp.ones((2, 3), jnp.bfloat16), jnp.ones(3, bool)
CALLS = {
    "scale_reward": lambda: missing_stop.scale_reward(ROW, TRUE, factor=0.5),
    "mean_score": lambda: ensembles.mean_score(MEMBERS),
    "worst_case": lambda: ensembles.worst_case(MEMBERS),
    "nominal_worst_case": lambda: ensembles.nominal_worst_case(MEMBERS, share=0.5),
    "calibrated_reward": lambda: constraints.calibrated_reward(ROW, ROW),
    "constrained_reward": lambda: constraints.constrained_reward(ROW, TRUE, infeasible_reward=0.0),
    "percentile_scaled": lambda: robust_scale.percentile_scaled(ROW, jnp.array(2.0, jnp.bfloat16)),
}


@pytest.mark.parametrize("name", CALLS)
def test_rewards_in_bfloat16_are_widened(name):
    program = jax.make_jaxpr(CALLS[name])()
    assert [x.dtype for x in program.out_avals] == [jnp.float32]
