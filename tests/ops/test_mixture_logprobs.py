"""The geometric mixture of two policies (S14)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops.mixture import mixed_logits

POLICY, REFERENCE = jnp.log(jnp.array([0.8, 0.2])), jnp.log(jnp.array([0.5, 0.5]))


def test_the_mixture_by_hand():
    # Weights sqrt(0.8 * 0.5) and sqrt(0.2 * 0.5): 0.632456 / (0.632456 + 0.316228) = 2/3.
    mixed = jax.jit(mixed_logits, static_argnames="weight")(POLICY, REFERENCE, weight=0.5)
    np.testing.assert_allclose(jax.nn.softmax(mixed), [2 / 3, 1 / 3], rtol=1e-6)
    # A quarter of the reference: 0.8^0.75 * 0.5^0.25 to 0.2^0.75 * 0.5^0.25, a ratio of 4^0.75 = 2.828427.
    mixed = jax.nn.softmax(mixed_logits(POLICY, REFERENCE, weight=0.25))
    assert mixed[0] / mixed[1] == pytest.approx(2.828427, rel=1e-5)


def test_at_the_ends_it_is_one_of_the_two():
    np.testing.assert_array_equal(mixed_logits(POLICY, REFERENCE, weight=0.0), POLICY)
    np.testing.assert_array_equal(mixed_logits(POLICY, REFERENCE, weight=1.0), REFERENCE)
    narrow = [x.astype(jnp.bfloat16) for x in (POLICY, REFERENCE)]
    widened = [x.astype(jnp.float32) for x in narrow]
    mixed = mixed_logits(*narrow, weight=0.3)
    assert mixed.dtype == jnp.float32
    np.testing.assert_array_equal(mixed, mixed_logits(*widened, weight=0.3))
