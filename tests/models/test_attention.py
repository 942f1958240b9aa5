"""Attention's own options, by hand."""

import jax.numpy as jnp
import numpy as np

from jrl.models.attention.reference import attend


def test_a_sink_takes_its_share_and_gives_nothing(mesh):
    # Two heads, one query, two keys with scores (ln 2, 0); sinks 0 and ln 5: weights (2/4, 1/4) and (2/8, 1/8).
    q = jnp.ones((1, 1, 2, 1))
    k = jnp.log(jnp.array([2.0, 1.0])).reshape(1, 1, 2, 1)
    v = jnp.array([8.0, 16.0]).reshape(1, 1, 2, 1)
    mask = jnp.ones((1, 1, 2), bool)
    out = attend(q, k, v, mask, scale=1.0, sinks=jnp.log(jnp.array([1.0, 5.0])))
    np.testing.assert_allclose(out.ravel(), [2 / 4 * 8 + 1 / 4 * 16, 2 / 8 * 8 + 1 / 8 * 16], rtol=1e-6)
    # A sink that is far below takes nothing.
    far = attend(q, k, v, mask, scale=1.0, sinks=jnp.array([-1e4, -1e4]))
    np.testing.assert_allclose(far, attend(q, k, v, mask, scale=1.0), rtol=1e-6)
