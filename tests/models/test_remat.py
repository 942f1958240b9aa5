"""What a layer keeps for the backward pass: which arrays, where they lie, and that the gradient is the same."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_params import drawn_params

from jrl.models.adapters.lora import LoRA, adapted
from jrl.models.contract import unrolled
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


def loss(params, name, remat, dtype="float32"):
    cfg, model = MODELS[name]
    cfg = dataclasses.replace(cfg, remat=remat, dtype=dtype)
    hidden, _ = model.forward(params, TOKENS, POSITIONS, None, cfg)
    return (model.unembed(params, hidden, cfg) ** 2).sum()


@functools.cache
def weights(name):
    cfg, model = MODELS[name]
    return jax.tree.map(lambda x: x + 0.01, drawn_params(model.spec(cfg)))  # adapters begin at 0


@functools.cache
def gradient(name, remat, dtype="float32"):
    return jax.jit(jax.grad(lambda params: loss(params, name, remat, dtype)))(weights(name))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("remat", ["dots", "offload"])
def test_the_gradient_is_that_of_keeping_everything(name, remat):
    for a, b in zip(jax.tree.leaves(gradient(name, remat)), jax.tree.leaves(gradient(name, "none"))):
        assert np.linalg.norm(a - b) <= 1e-5 * max(1, np.linalg.norm(b))


@pytest.mark.parametrize("remat", ["none", "layer", "dots"])
def test_the_gradient_in_bfloat16_is_that_of_float32(remat):
    """A layer's output is added where the next one's norm reads the sum: the gradient goes through both."""
    narrow = gradient("scanned", remat, "bfloat16")
    for actual, expected in zip(jax.tree.leaves(narrow), jax.tree.leaves(gradient("scanned", "none")), strict=True):
        assert np.linalg.norm(actual - expected) <= 0.1 * np.linalg.norm(expected)


def stacks(remat, dtype="float32"):
    """Returns the shapes of what all layers keep, (shape of one layer's, whether it lies on the host), sorted; weights
    aside."""
    backward = jax.make_jaxpr(lambda params: jax.vjp(lambda p: loss(p, "scanned", remat, dtype), params)[1])(
        weights("scanned")
    )
    of_weights = {leaf.shape for leaf in jax.tree.leaves(weights("scanned"))}
    actual = [aval for aval in backward.out_avals if aval.shape[:3] == (3, 2, 7) and aval.shape not in of_weights]
    return sorted((aval.shape[3:], aval.memory_space == jax.memory.Space.Host) for aval in actual)


def test_a_layer_keeps_what_its_policy_names():
    stream, mlp = (12,), (20,)
    assert stacks("layer") == [(stream, False)]
    assert stacks("offload") == [(stream, True)]
    # Queries, keys and values by head; what comes out of attention; gate and up; and the layer's input.
    products = [((2, 4), False), ((2, 4), False), ((4, 4), False), (stream, False), (mlp, False), (mlp, False)]
    assert stacks("dots") == sorted([*products, (stream, False)])
    # In bfloat16 the stream after attention in place of what comes out of it; and the mean squares of what the norms
    # read: the stream twice, queries and keys.
    means = [((1,), False), ((1,), False), ((4, 1), False), ((2, 1), False)]
    assert stacks("layer", "bfloat16") == [(stream, False)]
    assert stacks("dots", "bfloat16") == sorted([*products, (stream, False), *means])
    assert len(stacks("none")) > 7


def test_sampling_and_log_probs_keep_nothing():
    forward = jax.make_jaxpr(lambda params: loss(params, "scanned", "offload"))(weights("scanned"))
    assert jnp.isfinite(loss(weights("scanned"), "scanned", "offload")) and "<host>" not in str(forward)
