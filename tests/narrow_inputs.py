"""Formulas of narrow inputs: bfloat16 is widened before anything is computed of it."""

import jax.numpy as jnp
import numpy as np


def check_widens(formula, *arrays):
    """Asserts that bfloat16 arrays give, in float32, what the same numbers give when they are float32 to begin with."""
    narrow = [jnp.asarray(x).astype(jnp.bfloat16) for x in arrays]
    found, expected = formula(*narrow), formula(*(x.astype(jnp.float32) for x in narrow))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6)
