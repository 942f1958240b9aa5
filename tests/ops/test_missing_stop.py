from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from narrow_inputs import check_widens

from jrl.ops import missing_stop

NAN = float("nan")
# R = [2.0, 0.7], of which the first stopped
REWARD, STOPPED = jnp.array([2.0, 0.7]), jnp.array([True, False])


def test_a_missing_stop_replaces_the_reward_by_hand():
    np.testing.assert_allclose(jax.jit(missing_stop.replace_reward)(REWARD, STOPPED, value=-1.0), [2, -1])
    # Whatever the reward was, NaN too: a completion that did not stop was not scored by it.
    np.testing.assert_array_equal(missing_stop.replace_reward(jnp.array([NAN, 1.0]), ~STOPPED, value=-1.0), [-1, 1])
    check_widens(lambda r: missing_stop.replace_reward(r, STOPPED, value=-1.0), REWARD)


def test_a_missing_stop_is_subtracted_by_hand():
    got = jax.jit(missing_stop.subtract_penalty)(REWARD, STOPPED, penalty=1.0)
    np.testing.assert_allclose(got, [2, -0.3], rtol=1e-6)  # 0.7 - 1
    check_widens(lambda r: missing_stop.subtract_penalty(r, STOPPED, penalty=0.3), REWARD)


def test_a_missing_stop_scales_by_hand():
    got = jax.jit(missing_stop.scale_reward)(REWARD, STOPPED, factor=0.5)
    np.testing.assert_allclose(got, [2, 0.35], rtol=1e-6)  # 0.5 * 0.7
    check_widens(lambda r: missing_stop.scale_reward(r, STOPPED, factor=0.3), REWARD)


def test_replacing_by_zero_is_scaling_by_zero():
    reward, stopped = jax.random.normal(jax.random.key(0), (8,)), jnp.arange(8) % 2 == 0
    zeroed = missing_stop.replace_reward(reward, stopped, value=0.0)
    np.testing.assert_array_equal(zeroed, missing_stop.scale_reward(reward, stopped, factor=0.0))
    assert (np.asarray(zeroed)[1::2] == 0).all() and (np.asarray(zeroed)[::2] != 0).all()
