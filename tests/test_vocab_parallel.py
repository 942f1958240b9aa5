"""Log-probs with the vocabulary sharded agree with the reference, and so do all gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.device.sharding import TRAIN, MeshShape, batch_axes, make_mesh, spec
from jrl.learning import vocab_parallel
from jrl.learning.vocab_parallel import OutputHead
from jrl.ops import logprobs

R, L, D, V = 4, 12, 8, 24


def inputs(cap):
    keys = jax.random.split(jax.random.key(3), 5)
    hidden, matrix = jax.random.normal(keys[0], (R, L, D)), jax.random.normal(keys[1], (V, D))
    tokens = jax.random.randint(keys[2], (R, L), 0, V)
    mask = np.asarray(jax.random.bernoulli(keys[3], 0.4, (R, L))).copy()
    mask[0], mask[1] = False, True  # a row without a wanted token, and one with all, in three chunks
    weights = jax.random.normal(keys[4], (2, R, L))
    return hidden, matrix, jnp.float32(0.7), tokens, jnp.asarray(mask), weights


def both(cap, mask, tokens, weights):
    """(values and gradients by the reference, the same by vocab_parallel), as functions of hidden, matrix and heat."""

    def reference(hidden, matrix, heat):
        def unembed(h):
            logits = jnp.einsum("rcd,vd->rcv", h, matrix)
            return logits if cap is None else cap * jnp.tanh(logits / cap)

        return logprobs.token_logprobs(hidden, tokens, mask, unembed, temperature=heat, chunk=5)

    def parallel(hidden, matrix, heat):
        head = OutputHead(matrix, cap)
        return vocab_parallel.token_logprobs(hidden, tokens, mask, head, temperature=heat, chunk=5)

    def judged(fn):
        loss = lambda *args: sum((w * jnp.where(mask, x, 0)).sum() for w, x in zip(weights, fn(*args)))
        return lambda *args: (fn(*args), jax.grad(loss, argnums=(0, 1, 2))(*args))

    return judged(reference), judged(parallel)


def assert_close(expected, actual):
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        scale = max(float(jnp.abs(a).max()), 1e-3)
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), atol=2e-6 * scale * 10, rtol=0)


@pytest.mark.parametrize("cap", [None, 3.0])
def test_values_and_gradients_agree_with_the_reference(cap):
    hidden, matrix, heat, tokens, mask, weights = inputs(cap)
    reference, parallel = both(cap, mask, tokens, weights)
    expected = jax.jit(reference)(hidden, matrix, heat)
    assert_close(expected, jax.jit(parallel)(hidden, matrix, heat))


@pytest.mark.parametrize("scale, shape", [
    (1, MeshShape(fsdp=2, tensor=2, sequence=2)),
    (30, MeshShape(data=2, fsdp=2, tensor=2)),
], ids=["small logits", "exp of a logit without a token overflows"])  # fmt: skip
def test_a_mesh_changes_nothing_but_rounding(scale, shape):
    hidden, matrix, heat, tokens, mask, weights = inputs(None)
    hidden = hidden.at[0].multiply(scale)  # a shard of its own, without a wanted token
    expected = jax.jit(both(None, mask, tokens, weights)[0])(hidden, matrix, heat)
    mesh = make_mesh(shape, jax.devices()[:8])
    with jax.set_mesh(mesh):
        put = lambda x, *axes: jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))
        rows = batch_axes(mesh.shape)
        sharded = (put(hidden, rows), put(matrix, *spec(("vocab", "embed"), TRAIN)), put(heat))
        _, parallel = both(None, put(mask, rows), put(tokens, rows), put(weights, None, rows))
        actual = jax.jit(parallel)(*sharded)
    assert actual[1][1].sharding.spec == spec(
        ("vocab", "embed"), TRAIN, mesh.shape
    )  # the gradient is where the matrix is
    assert_close(expected, actual)


def test_without_a_wanted_token_every_gradient_is_zero():
    hidden, matrix, heat, tokens, mask, weights = inputs(None)
    nothing = jnp.zeros_like(mask)
    _, parallel = both(None, nothing, tokens, weights)
    hidden = 100 * hidden  # exp of a logit overflows
    for x in jax.tree.leaves(jax.jit(parallel)(hidden, matrix, heat)):
        np.testing.assert_array_equal(x, 0)


def test_what_is_masked_may_be_anything():
    hidden, matrix, heat, tokens, mask, weights = inputs(None)
    _, parallel = both(None, mask, tokens, weights)
    values, gradients = jax.jit(parallel)(hidden, matrix, heat)
    read = jnp.concatenate([mask[:, 1:], jnp.zeros_like(mask[:, :1])], axis=1).at[:, 0].set(True)
    unread = (~read)[..., None] & ~mask[..., None]
    other = jax.jit(parallel)(jnp.where(unread, 9.0, hidden), matrix, heat)
    np.testing.assert_array_equal(other[0][0], values[0])
    assert float(jnp.abs(jnp.where(mask, 0, values[0])).max()) == 0
    np.testing.assert_array_equal(np.asarray(gradients[0])[np.asarray(~read)], 0)
