"""Divergences from a teacher by hand, over chunks, and a sampled token's advantage."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops.divergence import DIVERGENCES, jensen_shannon, teacher_advantage, token_divergence

P, Q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
BY_HAND = {
    "reverse": 0.25 * np.log(2),  # 0.5 log 2 - 0.25 log 2
    "forward": 0.25 * np.log(2),
    # m = (3/8, 3/8, 1/4): both halves 0.5 log(4/3) + 0.25 log(2/3)
    "jensen_shannon": 0.5 * np.log(4 / 3) + 0.25 * np.log(2 / 3),
}


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_by_hand(kind):
    found = jax.jit(DIVERGENCES[kind])(jnp.log(P), jnp.log(Q))
    assert found == pytest.approx(BY_HAND[kind], abs=1e-6)
    assert DIVERGENCES[kind](jnp.log(P), jnp.log(P)) == pytest.approx(0, abs=1e-7)


def test_the_direction_of_each():
    # p = (0.5, 0.5), q = (0.9, 0.1): KL(p, q) = 0.5 log(0.25 / 0.09); KL(q, p) = 0.9 log 1.8 + 0.1 log 0.2
    p, q = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.9, 0.1]))
    assert DIVERGENCES["reverse"](p, q) == pytest.approx(0.5108256, abs=1e-6)
    assert DIVERGENCES["forward"](p, q) == pytest.approx(0.3680642, abs=1e-6)
    # m = (0.6, 0.4) at a share of 0.25: 0.25 (0.9 log 1.5 + 0.1 log 0.25) + 0.75 (0.5 log(25 / 24))
    assert jensen_shannon(p, q, 0.25) == pytest.approx(0.0718796, abs=1e-6)
    # the limits of small and large shares
    assert jensen_shannon(p, q, 1e-3) / 1e-3 == pytest.approx(float(DIVERGENCES["forward"](p, q)), rel=5e-3)
    assert jensen_shannon(p, q, 1 - 1e-3) / 1e-3 == pytest.approx(float(DIVERGENCES["reverse"](p, q)), rel=5e-3)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_over_chunks_it_is_that_of_every_state_with_its_gradient(kind):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        draw = lambda *shape: jnp.asarray(rng.normal(size=shape))
        hidden, theirs, head, other = draw(2, 7, 3), draw(2, 7, 4), draw(3, 5), draw(4, 5)
        mask = jnp.asarray(rng.random((2, 7)) < 0.6).at[:, 0].set(False)
        poisoned = theirs.at[1, 6].set(jnp.nan)  # column 6 is read by none

        def chunked(hidden):
            return token_divergence(hidden, poisoned, mask, lambda h: h @ head, lambda h: h @ other, kind=kind,
                                    temperature=jnp.asarray(0.7), chunk=3)  # fmt: skip

        def plain(hidden):
            p, q = (jax.nn.log_softmax(x / 0.7) for x in (hidden[:, :-1] @ head, theirs[:, :-1] @ other))
            at = jnp.stack([DIVERGENCES[kind](p[:, t], q[:, t]) for t in range(6)], axis=1)
            return jnp.where(mask, jnp.pad(at, ((0, 0), (1, 0))), 0)  # column t is about the state at t - 1

        np.testing.assert_allclose(jax.jit(chunked)(hidden), plain(hidden), 1e-12, 1e-14)
        weights = draw(2, 7)
        slope = lambda f: jax.grad(lambda h: jnp.sum(weights * f(h)))(hidden)
        np.testing.assert_allclose(slope(chunked), slope(plain), 1e-10, 1e-12)
        assert np.any(slope(plain))


def test_a_teacher_gets_no_gradient():
    hidden, head = jnp.ones((1, 3, 2)), jnp.eye(2)
    at = lambda theirs: token_divergence(
        hidden, theirs, jnp.array([[False, True, True]]), lambda h: h @ head, lambda h: h @ head, kind="reverse",
        temperature=jnp.float32(1), chunk=2,
    ).sum()  # fmt: skip
    np.testing.assert_array_equal(jax.grad(at)(jnp.array([[[0.0, 2.0]] * 3])), 0)


def test_a_sampled_token_is_rewarded_by_what_the_teacher_gives_it_more():
    old, teacher = jnp.array([[-1.0, -2.0, jnp.nan]]), jnp.array([[-0.5, -3.0, jnp.nan]])
    found = jax.jit(teacher_advantage)(old, teacher, jnp.array([[True, True, False]]))
    np.testing.assert_allclose(found, [[0.5, -1.0, 0.0]])


def test_the_policy_gradient_with_that_advantage_is_the_gradient_of_the_reverse_kl():
    with jax.enable_x64(True):
        logits, teacher = jnp.array([0.3, -0.2, 0.9]), jax.nn.log_softmax(jnp.array([1.0, 0.0, -1.0]))
        p = jax.nn.log_softmax(logits)
        advantage = teacher_advantage(p, teacher, jnp.ones(3, bool))
        surrogate = lambda z: -jnp.sum(jnp.exp(p) * advantage * jax.nn.log_softmax(z))  # its mean over samples
        expected = jax.grad(lambda z: DIVERGENCES["reverse"](jax.nn.log_softmax(z), teacher))(logits)
        np.testing.assert_allclose(jax.grad(surrogate)(logits), expected, 1e-12)
