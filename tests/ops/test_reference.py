from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import reference


@pytest.mark.parametrize(
    "step, share", [(0, 1), (50, 1), (51, 0.9), (60, 0.9), (61, 0.8), (75, 0.7), (100, 0.5), (200, 0.5)]
)
def test_the_share_of_the_base_by_hand(step, share):
    # at 75: ceil(25 / 10) = 3, 1 - 0.3
    np.testing.assert_allclose(jax.jit(reference.base_share)(jnp.int32(step)), share, rtol=1e-6)


def test_the_mixed_kl_by_hand():
    # 0.7 * 0.3 + 0.3 * 0.1 = 0.24
    got = reference.mixed_kl(jnp.array([0.3, 0.0]), jnp.array([0.1, 1.0]), jnp.int32(75))
    np.testing.assert_allclose(got, [0.24, 0.3], rtol=1e-6)


def test_a_reset_is_due_every_so_many_steps_and_not_at_the_start():
    due = [bool(jax.jit(lambda t: reference.reset_due(t, every=3))(step)) for step in range(8)]
    assert due == [False, False, False, True, False, False, True, False]


def test_the_average_by_hand():
    # 0.9 * 1 + 0.1 * 3 = 1.2; dtypes stay
    old = {"a": jnp.array([1.0]), "b": jnp.array([1.0], jnp.bfloat16)}
    new = {"a": jnp.array([3.0]), "b": jnp.array([3.0], jnp.bfloat16)}
    got = jax.jit(lambda *trees: reference.averaged_reference(*trees, decay=0.9))(old, new)
    np.testing.assert_allclose(got["a"], [1.2], rtol=1e-6)
    assert got["b"].dtype == jnp.bfloat16 and abs(float(got["b"][0]) - 1.2) < 0.01
    for decay, expected in ((1.0, old), (0.0, new)):
        found = reference.averaged_reference(old, new, decay=decay)
        assert all(jnp.all(found[name] == expected[name]) for name in old)
