"""What a layer keeps for the backward pass: which arrays, where they lie, and that the gradient is the same."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.adapters.lora import LoRA, adapted
from jrl.models.contract import init, unrolled
from jrl.models.decoder import MODEL
from jrl.models.experts import Experts
from jrl.models.shape import Decoder

CFG = Decoder(vocab_size=16, layers=3, width=12, heads=4, kv_heads=2, head_dim=4, mlp_width=20)
SPARSE = dataclasses.replace(CFG, experts=Experts(count=4, per_token=2, width=8), norm_place="both")
TOKENS = np.arange(14).reshape(2, 7) % 16
POSITIONS = np.broadcast_to(np.arange(7), (2, 7))
MODELS = {
    "scanned": (CFG, MODEL),
    "unrolled, with adapters": (CFG, unrolled(adapted(MODEL, LoRA(rank=2)))),
    "experts": (SPARSE, MODEL),
}


def loss(params, name, remat):
    cfg, model = MODELS[name]
    cfg = dataclasses.replace(cfg, remat=remat)
    hidden, _ = model.forward(params, TOKENS, POSITIONS, None, cfg)
    return (model.unembed(params, hidden, cfg) ** 2).sum()


@functools.cache
def weights(name):
    cfg, model = MODELS[name]
    return jax.tree.map(lambda x: x + 0.01, init(jax.random.key(0), model.spec(cfg)))  # adapters begin at 0


@functools.cache
def gradient(name, remat):
    return jax.jit(jax.grad(lambda params: loss(params, name, remat)))(weights(name))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("remat", ["dots", "offload"])
def test_the_gradient_is_that_of_keeping_everything(name, remat):
    for a, b in zip(jax.tree.leaves(gradient(name, remat)), jax.tree.leaves(gradient(name, "none"))):
        assert np.linalg.norm(a - b) <= 1e-5 * max(1, np.linalg.norm(b))


def stacks(remat):
    """Returns the shapes of what all layers keep, (shape of one layer's, whether it lies on the host), sorted; weights
    aside."""
    backward = jax.make_jaxpr(lambda params: jax.vjp(lambda p: loss(p, "scanned", remat), params)[1])(
        weights("scanned")
    )
    of_weights = {leaf.shape for leaf in jax.tree.leaves(weights("scanned"))}
    actual = [aval for aval in backward.out_avals if aval.shape[:3] == (3, 2, 7) and aval.shape not in of_weights]
    return sorted((aval.shape[3:], aval.memory_space == jax.memory.Space.Host) for aval in actual)


def test_a_layer_keeps_what_its_policy_names():
    stream, mlp = (12,), (20,)
    assert stacks("layer") == [(stream, False)]
    assert stacks("offload") == [(stream, True)]
    # Queries, keys and values by head; gate and up; the stream at the layer's input and after attention; and the mean
    # squares of both, of queries and of keys.
    products = [((2, 4), False), ((2, 4), False), ((4, 4), False), (mlp, False), (mlp, False)]
    means = [((1,), False), ((1,), False), ((4, 1), False), ((2, 1), False)]
    assert stacks("dots") == sorted([*products, (stream, False), (stream, False), *means])
    assert len(stacks("none")) > 7


def test_sampling_and_log_probs_keep_nothing():
    forward = jax.make_jaxpr(lambda params: loss(params, "scanned", "offload"))(weights("scanned"))
    assert jnp.isfinite(loss(weights("scanned"), "scanned", "offload")) and "<host>" not in str(forward)
