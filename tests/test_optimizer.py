import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learning.optimizer import AdamW, optimizer


def steps(config, gradient, count):
    """Returns the updates of `count` steps with the same gradient."""
    traced = jax.tree.map(jnp.float32, config)
    params = {"w": jnp.zeros(2)}
    state, updates = optimizer(traced).init(params), []
    for _ in range(count):
        update, state = jax.jit(lambda g, s, c: optimizer(c).update(g, s, params))({"w": gradient}, state, traced)
        updates.append(np.asarray(update["w"]))
    return updates


def test_the_first_update_is_the_learning_rate_against_the_gradient():
    # Adam's first step: m / sqrt(v) = g / |g| after bias correction, so the update is -lr * sign(g).
    (update,) = steps(AdamW(learning_rate=0.1, clip_norm=None), jnp.array([2.0, -3.0]), 1)
    np.testing.assert_allclose(update, [-0.1, 0.1], rtol=1e-6)


def test_warm_up_begins_at_its_share_and_ends_at_the_peak():
    # Four warm-up steps: 1/4, 2/4, 3/4 and all of the peak, then the peak.
    updates = steps(AdamW(learning_rate=0.1, warmup_steps=4, clip_norm=None), jnp.array([1.0, 1.0]), 5)
    np.testing.assert_allclose([-u[0] for u in updates], [0.025, 0.05, 0.075, 0.1, 0.1], rtol=1e-5)


def test_linear_decay_reaches_zero():
    config = AdamW(learning_rate=0.1, schedule="linear", decay_steps=2, clip_norm=None)
    np.testing.assert_allclose([-u[0] for u in steps(config, jnp.ones(2), 3)], [0.1, 0.05, 0.0], atol=1e-7)


def test_changing_a_float_does_not_recompile():
    count = 0

    def update(config, gradient):
        nonlocal count
        count += 1
        params = jnp.zeros(2)
        return optimizer(config).update(gradient, optimizer(config).init(params), params)[0]

    jitted = jax.jit(update)
    for rate in (0.1, 0.2):
        jitted(jax.tree.map(jnp.float32, AdamW(learning_rate=rate)), jnp.ones(2))
    assert count == 1


@pytest.mark.parametrize("field", ["learning_rate", "clip_norm", "eps"])
def test_what_cannot_train_is_refused(field):
    with pytest.raises(ValueError, match=f"AdamW.{field}"):
        AdamW(**{field: 0.0})


def test_a_schedule_without_an_end_is_refused():
    with pytest.raises(ValueError, match="decay_steps"):
        AdamW(schedule="cosine")


def test_moments_in_bfloat16_are_rounded_between_steps_only():
    # b1 = b2 = 1/2, gradient 1.2: m = 0.6, v = 0.72, in bfloat16 0.6015625 and 0.71875. Of the first step nothing is
    # rounded: 0.1 * 1. The second has m = 0.6015625 / 2 + 0.6, v = 0.71875 / 2 + 0.72, both over 1 - 1/4.
    config = AdamW(learning_rate=0.1, b1=0.5, b2=0.5, clip_norm=None, moments="bfloat16")
    first, second = steps(config, jnp.array([1.2, 1.2]), 2)
    np.testing.assert_allclose(first, -0.1, rtol=1e-6)
    m, v = (0.6015625 / 2 + 0.6) / 0.75, (0.71875 / 2 + 0.72) / 0.75
    np.testing.assert_allclose(second, -0.1 * m / v**0.5, rtol=1e-6)
    state = optimizer(config).init({"w": jnp.zeros(2)})
    kept = sorted(str(leaf.dtype) for leaf in jax.tree.leaves(state))
    assert kept == ["bfloat16", "bfloat16", "int32", "int32"]


def test_a_moment_that_would_stand_still_is_refused():
    with pytest.raises(ValueError, match=r"AdamW\.b2 = 0\.999 does not go with moments='bfloat16'"):
        AdamW(b2=0.999, moments="bfloat16")
