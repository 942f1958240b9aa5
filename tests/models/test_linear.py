"""Linear attention against its recurrence, a token at a time, in numbers of NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampled import agree_on_every_mesh

from jrl.models import linear
from jrl.models.linear import Linear
from jrl.models.shape import Decoder

CFG = Linear(key_heads=2, value_heads=4, key_dim=3, value_dim=5, taps=3)
WIDTH, LENGTH, EPS = 8, 9, 1e-6


def layer():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape) for name, (shape, _) in linear.leaves(CFG, WIDTH).items()}


def by_hand(h, w):
    """o [L, D] of one sequence h [L, D]."""
    silu, sigmoid = lambda x: x / (1 + np.exp(-x)), lambda x: 1 / (1 + np.exp(-x))

    def convolved(name):
        x = np.einsum("ld,dhk->lhk", h, w[f"linear_{name}"])
        past = np.concatenate([np.zeros((CFG.taps - 1, *x.shape[1:])), x])
        return silu(sum(past[i : i + len(x)] * w[f"conv_{name}"][..., i] for i in range(CFG.taps)))

    q, k, v = (convolved(name) for name in "qkv")
    unit = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
    out = np.zeros((len(h), CFG.value_heads, CFG.value_dim))
    for head in range(CFG.value_heads):
        state = np.zeros((CFG.key_dim, CFG.value_dim))
        for t in range(len(h)):
            key, query = unit(k[t, head // 2]), unit(q[t, head // 2]) / np.sqrt(CFG.key_dim)
            step = h[t] @ w["linear_step"][:, head] + w["linear_step_bias"][head]
            state = np.exp(-np.exp(w["linear_decay"][head]) * np.log1p(np.exp(step))) * state
            rate = sigmoid(h[t] @ w["linear_beta"][:, head])
            state = state + rate * np.outer(key, v[t, head] - key @ state)
            out[t, head] = query @ state
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + EPS) * w["linear_norm"]
    out = out * silu(np.einsum("ld,dhk->lhk", h, w["linear_gate"]))
    return np.einsum("lhk,hkd->ld", out, w["linear_o"])


def whole(h, w, mask, positions, segment=None):
    run = lambda h, w: linear.attend(
        h, w, CFG, EPS, positions=jnp.asarray(positions), segment=segment, mask=jnp.asarray(mask), kept=None,
        counted=None,
    )[0]  # fmt: skip
    return jax.jit(run)(h, w)


def test_a_row_equals_the_recurrence():
    h, w = np.random.default_rng(1).normal(size=(2, LENGTH, WIDTH)), layer()
    with jax.enable_x64(True):
        causal = np.broadcast_to(np.tril(np.ones((LENGTH, LENGTH), bool)), (2, LENGTH, LENGTH))
        found = whole(h, w, causal, np.broadcast_to(np.arange(LENGTH), (2, LENGTH)))
        np.testing.assert_allclose(found, np.stack([by_hand(row, w) for row in h]), atol=1e-12)


def test_a_row_shorter_than_the_convolution():
    h, w = np.random.default_rng(1).normal(size=(1, 1, WIDTH)), layer()
    with jax.enable_x64(True):
        found = whole(h, w, np.ones((1, 1, 1), bool), np.zeros((1, 1), int))
        np.testing.assert_allclose(found[0], by_hand(h[0], w), atol=1e-12)


def test_packed_sequences_begin_with_nothing():
    h, w, cut = np.random.default_rng(1).normal(size=(1, LENGTH, WIDTH)), layer(), 4
    segment = (np.arange(LENGTH) >= cut).astype(np.int32)[None]
    mask = np.tril(segment[:, :, None] == segment[:, None, :])
    positions = np.concatenate([np.arange(cut), np.arange(LENGTH - cut)])[None]
    with jax.enable_x64(True):
        found = whole(h, w, mask, positions, jnp.asarray(segment))[0]
        np.testing.assert_allclose(found, np.concatenate([by_hand(h[0, :cut], w), by_hand(h[0, cut:], w)]), atol=1e-12)


def test_branches_begin_with_what_their_trunk_left():
    # A trunk of 4, a branch of 3 and one of 2.
    h, w = np.random.default_rng(1).normal(size=(1, LENGTH, WIDTH)), layer()
    own, other = np.array([9] * 4 + [0] * 3 + [1] * 2), np.full(LENGTH, 9)
    mask = np.tril((own[:, None] == own[None]) | (other[:, None] == own[None]))[None]
    positions = np.array([0, 1, 2, 3, 4, 5, 6, 4, 5])[None]
    with jax.enable_x64(True):
        found = whole(h, w, mask, positions, jnp.asarray(np.stack([own, other], -1)[None]))[0]
        np.testing.assert_allclose(found[:7], by_hand(h[0, :7], w), atol=1e-12)
        second = np.concatenate([h[0, :4], h[0, 7:]])
        np.testing.assert_allclose(found[7:], by_hand(second, w)[4:], atol=1e-12)


@pytest.mark.parametrize("cuts", [(0, 9), (0, 4, 5, 6, 9), (0, 1, 9)])
def test_what_is_kept_stands_for_the_tokens_before(cuts):
    h, w = np.random.default_rng(1).normal(size=(2, LENGTH, WIDTH)), layer()
    with jax.enable_x64(True):
        kept = [jnp.zeros(shape) for shape, _ in linear.state_shapes(CFG, 2).values()]
        found = []

        @jax.jit
        def attend(h, positions, kept):
            return linear.attend(
                h, w, CFG, EPS, positions=positions, segment=None, mask=None, kept=kept, counted=None
            )  # fmt: skip

        for start, stop in itertools.pairwise(cuts):
            positions = np.broadcast_to(np.arange(start, stop), (2, stop - start))
            out, kept = attend(h[:, start:stop], positions, kept)
            found.append(out)
        expected = np.stack([by_hand(row, w) for row in h])
        np.testing.assert_allclose(np.concatenate(found, 1), expected, atol=1e-12)


def test_a_long_row_in_float32_is_as_exact_as_a_short_one():
    """Sums of g are added up between two tokens; a difference of sums over the whole row would be off by 1e-4."""
    rng, length = np.random.default_rng(1), 600
    h = np.float32(rng.normal(size=(1, length, WIDTH)))
    w = {name: np.float32(leaf) for name, leaf in layer().items()}
    w["linear_step_bias"] = w["linear_step_bias"] + 4  # g is about -5 a token
    causal = np.tril(np.ones((1, length, length), bool))
    found = whole(h, w, causal, np.arange(length)[None])[0]
    expected = by_hand(np.float64(h[0]), {name: np.float64(leaf) for name, leaf in w.items()})
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("wrong", [dict(value_heads=3), dict(taps=1), dict(layers=(True,))])
def test_shapes_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="Linear"):
        Linear(**dict(key_heads=2, value_heads=4, key_dim=3, value_dim=5) | wrong)


@pytest.mark.parametrize("layers", ["scanned", "unrolled"])
def test_the_samplers_logprobs_are_a_plain_forwards_on_every_mesh(layers):
    """Prompts of different lengths share a prefill, and their last token is fed again."""
    own = Linear(key_heads=2, value_heads=4, key_dim=6, value_dim=4, layers=(True, False))
    agree_on_every_mesh(Decoder(vocab_size=48, layers=3, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=32,
                                linear=own, output_gate=True), layers)  # fmt: skip
