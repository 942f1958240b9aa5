"""Log-prob and entropy of a token, and their derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops.categorical import logprob_and_entropy

TOKENS = jnp.array([2, 0, 4], jnp.int32)


def plain(logits, tokens, temperature):
    log_probs = jax.nn.log_softmax(logits / temperature)
    return jnp.take_along_axis(log_probs, tokens[:, None], 1)[:, 0], -(jnp.exp(log_probs) * log_probs).sum(-1)


def logits(dtype=jnp.float32):
    return jnp.asarray(3 * np.random.default_rng(0).normal(size=(3, 5)), dtype)


def test_by_hand():
    # exp(z) = 1, 3: p = 1/4, 3/4. Entropy = ln 4 - 3/4 ln 3 = 1.386294 - 0.823959 = 0.562335.
    z = jnp.log(jnp.array([[1.0, 3.0]]))
    actual = jax.jit(logprob_and_entropy)(z, jnp.array([1]), jnp.float32(1))
    np.testing.assert_allclose(actual, [[np.log(0.75)], [0.562335]], rtol=1e-5)
    # d log p_1 / dz = (0 - 1/4, 1 - 3/4).
    # d H / dz = -p (log p + H) = (-1/4 (-1.386294 + 0.562335), -3/4 (-0.287682 + 0.562335)) = (0.205990, -0.205990).
    of = lambda i: jax.jit(jax.grad(lambda z: logprob_and_entropy(z, jnp.array([1]), jnp.float32(1))[i].sum()))(z)
    np.testing.assert_allclose(of(0), [[-0.25, 0.25]], rtol=1e-6)
    np.testing.assert_allclose(of(1), [[0.205990, -0.205990]], rtol=1e-5)


def test_a_temperature_divides_the_logits():
    # At T = 2, logits 2 ln 1 and 2 ln 3 are the distribution above; a logit moves half as much.
    z = 2 * jnp.log(jnp.array([[1.0, 3.0]]))
    actual = logprob_and_entropy(z, jnp.array([1]), jnp.float32(2))
    np.testing.assert_allclose(actual, [[np.log(0.75)], [0.562335]], rtol=1e-5)
    moved = jax.grad(lambda z: logprob_and_entropy(z, jnp.array([1]), jnp.float32(2))[0].sum())(z)
    np.testing.assert_allclose(moved, [[-0.125, 0.125]], rtol=1e-6)


@pytest.mark.parametrize("which", [0, 1])
def test_values_and_derivatives_are_those_that_jax_derives(which):
    with jax.enable_x64(True):
        z, t = logits(jnp.float64), jnp.float64(0.7)
        weights = jnp.array([0.3, -2.0, 1.1])
        ours, theirs = (
            jax.value_and_grad(lambda z, t, fn=fn: (weights * fn(z, TOKENS, t)[which]).sum(), argnums=(0, 1))(z, t)
            for fn in (logprob_and_entropy, plain)
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-13), ours, theirs)
