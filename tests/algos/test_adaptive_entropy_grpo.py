"""The adaptive entropy coefficient by hand, and that all else is GRPO."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.algos.adaptive_entropy_grpo import OBJECTIVE, AdaptiveEntropyGRPO, active_coefficient, next_state
from jrl.algos.conformance import sample_groups, sample_tokens
from jrl.algos.contract import Facts
from jrl.algos.grpo import GRPO

FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=8)


def state_of(coefficient, entropy=0.0):
    return {"coefficient": jnp.float32(coefficient), "entropy": jnp.float32(entropy)}


def test_the_coefficient_grows_where_the_entropy_is_too_low_and_falls_where_it_is_not():
    step = lambda state, entropy: jax.jit(next_state)(AdaptiveEntropyGRPO(), state, {"policy/entropy": entropy})
    state = step(state_of(0.01), 0.1)
    np.testing.assert_allclose([state["coefficient"], state["entropy"]], [0.015, 0.1], rtol=1e-6)
    np.testing.assert_allclose(step(state, 0.3)["coefficient"], 0.01, rtol=1e-6)


def test_the_bonus_acts_only_while_the_entropy_is_at_most_its_target():
    config, tokens = AdaptiveEntropyGRPO(), sample_tokens()
    for entropy, coefficient in ((0.1, 0.3), (0.2, 0.3), (0.21, 0.0)):
        state = state_of(0.3, entropy)
        assert float(active_coefficient(config, state)) == np.float32(coefficient)
        ours = jax.jit(lambda t, s: OBJECTIVE.token_loss(config, t, s))(tokens, state)[0]
        theirs = ALGOS["GRPO"].token_loss(GRPO(entropy_bonus=coefficient), tokens, ())[0]
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_it_begins_with_its_bonus_on_and_advantages_are_those_of_grpo():
    groups, config = sample_groups(), AdaptiveEntropyGRPO(entropy_bonus=0.02)
    state = OBJECTIVE.init_state(config)
    found, after, counters = OBJECTIVE.advantages(config, groups, groups.reward, state)
    np.testing.assert_array_equal(found, ALGOS["GRPO"].advantages(GRPO(), groups, groups.reward, ())[0])
    np.testing.assert_allclose(counters["entropy_coefficient"], 0.02, rtol=1e-6)
    assert after is state
    assert OBJECTIVE.needs(config).entropy_gradient and not OBJECTIVE.needs(config).reference


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AdaptiveEntropyGRPO(entropy_bonus=None), "AdaptiveEntropyGRPO.entropy_bonus is None"),
        (AdaptiveEntropyGRPO(target=0.0), "target = 0.0 must be above 0"),
        (AdaptiveEntropyGRPO(step=-1.0), "step = -1.0 must be above 0"),
        (AdaptiveEntropyGRPO(largest=0.0), "largest = 0.0 must be above 0"),
        (AdaptiveEntropyGRPO(entropy_bonus=0.5, largest=0.4), "must not be above largest = 0.4"),
    ],
)
def test_settings_that_cannot_adapt_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)
