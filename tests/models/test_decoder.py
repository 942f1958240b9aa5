"""The decoder's own arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np

from jrl.models.decoder import unembed
from jrl.models.shape import Decoder


def test_logits_of_a_bfloat16_model_are_not_rounded_to_bfloat16(mesh):
    # 64 + 0.25 = 64.25 needs 9 bits of mantissa; bfloat16 has 8 and would say 64.
    cfg = Decoder(vocab_size=1, width=2, dtype="bfloat16")
    params = {"embed": jnp.array([[64.0, 0.25]], jnp.float32)}
    hidden = jnp.ones((1, 1, 2), jnp.bfloat16)
    logits = unembed(params, hidden, cfg)
    assert logits.dtype == jnp.float32
    assert float(logits[0, 0, 0]) == 64.25
    gradient = jax.jit(jax.grad(lambda h: unembed(params, h, cfg).sum()))(hidden)
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient[0, 0].astype(jnp.float32), [64.0, 0.25])
