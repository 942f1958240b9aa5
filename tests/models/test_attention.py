"""Attention's own options, by hand."""

import jax.numpy as jnp
import numpy as np

from jrl.device.sharding import constrain
from jrl.models.attention.reference import attend


def test_a_sink_takes_its_share_and_gives_nothing(mesh):
    # Two heads, one query, two keys with scores (ln 2, 0); sinks 0 and ln 5: weights (2/4, 1/4) and (2/8, 1/8).
    q = jnp.ones((1, 1, 2, 1))
    # Keys and values are sharded as the decoder's are: jax 0.12 multiplies no other ones with the queries.
    of_heads = lambda *values: constrain(jnp.array(values).reshape(1, 1, 2, 1), "batch", "kv_heads", None, None)
    k, v = jnp.log(of_heads(2.0, 1.0)), of_heads(8.0, 16.0)
    mask = jnp.ones((1, 1, 2), bool)
    out = attend(q, k, v, mask, scale=1.0, sinks=jnp.log(jnp.array([1.0, 5.0])))
    np.testing.assert_allclose(out.ravel(), [2 / 4 * 8 + 1 / 4 * 16, 2 / 8 * 8 + 1 / 8 * 16], rtol=1e-6)
    # A sink that is far below takes nothing.
    far = attend(q, k, v, mask, scale=1.0, sinks=jnp.array([-1e4, -1e4]))
    np.testing.assert_allclose(far, attend(q, k, v, mask, scale=1.0), rtol=1e-6)
