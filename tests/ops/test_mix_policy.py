from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import mix_policy, surrogate


def both(new, old, sampled, advantages, clip=0.2):
    row = lambda x: jnp.asarray(x, jnp.float32)
    mask = jnp.ones(len(new), bool)
    fn = jax.jit(lambda lp: mix_policy.mix_policy_clipped(lp, row(old), row(sampled), row(advantages), mask, clip=clip))
    return fn(row(new)), jax.grad(lambda lp: fn(lp).sum())(row(new))


def test_mix_policy_by_hand():
    # new -1, old -1.2, sampled -1.5: rho = exp(0.5) = 1.64872, c = exp(0.3) = 1.34986
    # A = 1: -min(1.64872, 1.54986) = -1.54986, no gradient; A = -1: 1.64872 with its gradient
    value, gradient = both([-1, -1], [-1.2, -1.2], [-1.5, -1.5], [1, -1])
    np.testing.assert_allclose(value, [-1.5498588, 1.6487213], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0, 1.6487213], rtol=1e-6)


def test_the_lower_bound_by_hand():
    # new -1.5, old -1.2, sampled -1.5: rho = 1, c = exp(0.3): A = -1: max(1, 1.14986) = 1.14986; A = 1: -1
    value, gradient = both([-1.5, -1.5], [-1.2, -1.2], [-1.5, -1.5], [-1, 1])
    np.testing.assert_allclose(value, [1.1498588, -1], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0, -1], rtol=1e-6)


def test_on_fresh_rows_it_is_the_clip():
    new, old, advantages = jnp.array([-0.5, -2.0, -1.1]), jnp.full(3, -1.0), jnp.array([1.0, -1.0, 0.5])
    got, _ = both(new, old, old, advantages)
    expected = surrogate.clipped(new, old, advantages, jnp.ones(3, bool), clip_low=0.2, clip_high=0.2)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_the_center_carries_no_gradient():
    # on the bound of the first case above the loss is -(c + 0.2) A: it moves with c, whose policies are fixed
    new, sampled, advantages = jnp.array([-1.0]), jnp.array([-1.5]), jnp.ones(1)
    loss = lambda old: mix_policy.mix_policy_clipped(new, old, sampled, advantages, jnp.ones(1, bool), clip=0.2).sum()
    assert loss(jnp.array([-1.2])) != loss(jnp.array([-1.25]))
    np.testing.assert_array_equal(jax.grad(loss)(jnp.array([-1.2])), 0)
