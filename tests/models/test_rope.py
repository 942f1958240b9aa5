"""Rotary embedding and its stretches, by hand."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.contract import abstract, unrolled
from jrl.models.decoder import MODEL
from jrl.models.rope import (
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    YarnRope,
    amplitude,
    cos_sin,
    frequencies,
    rotate,
)
from jrl.models.shape import Decoder


def test_plain_frequencies_are_powers_of_the_base():
    # 4 entries rotate as 2 pairs: 100^0 = 1 and 100^(-1/2) = 0.1 radians a position.
    np.testing.assert_allclose(frequencies(100.0, 2, jnp.float32), [1, 0.1], rtol=1e-6)


def test_linear_divides_all():
    np.testing.assert_allclose(frequencies(100.0, 2, jnp.float32, LinearRope(factor=4)), [0.25, 0.025], rtol=1e-6)


def test_llama3_keeps_short_waves_divides_long_ones_and_blends_between():
    # Base 10^4, 4 pairs: 1, 0.1, 0.01, 0.001 radians; within 1000 tokens 159.2, 15.92, 1.592 and 0.159 rotations.
    # Kept above 4 rotations, divided by 8 below 1; between, a share of (1.5915 - 1) / 3 = 0.19718 is kept:
    # 0.01 * (0.19718 + 0.80282 / 8) = 0.0029753.
    stretch = Llama3Rope(factor=8, low_freq_factor=1, high_freq_factor=4, original_length=1000)
    actual = frequencies(1e4, 4, jnp.float32, stretch)
    np.testing.assert_allclose(actual, [1, 0.1, 0.0029753, 0.000125], rtol=2e-5)


def test_yarn_divides_pairs_by_how_often_they_rotate():
    # The same base: a pair that rotates n times within 1000 tokens has number 4 ln(1000 / (2 pi n)) / ln(10^4), so 32
    # rotations are at 0.697 -> 0, 1 rotation at 2.202 -> 3. Pair i is divided to a share of i / 3, factor 4:
    # 1, 0.1 (2/3 + 1/12) = 0.075, 0.01 (1/3 + 2/12) = 0.005, 0.001 / 4.
    stretch = YarnRope(factor=4, original_length=1000)
    np.testing.assert_allclose(frequencies(1e4, 4, jnp.float32, stretch), [1, 0.075, 0.005, 0.00025], rtol=1e-5)
    assert amplitude(stretch) == pytest.approx(0.1 * math.log(4) + 1)
    assert amplitude(YarnRope(factor=4, original_length=1000, attention_factor=1.5)) == 1.5
    assert amplitude(LinearRope(factor=4)) == 1


def test_only_the_first_entries_turn_and_the_rest_stays():
    # A quarter turn takes (1, 0) to (0, 1) and (0, 2) to (-2, 0); entries 2 to 3 are not of the rotation.
    x = jnp.array([1.0, 0.0, 5.0, 6.0]).reshape(1, 1, 1, 4)
    actual = rotate(x, *cos_sin(jnp.ones((1, 1), jnp.int32), jnp.array([math.pi / 2])))
    np.testing.assert_allclose(actual[0, 0, 0], [0, 1, 5, 6], atol=1e-7)
    doubled = rotate(x, *cos_sin(jnp.ones((1, 1), jnp.int32), jnp.array([math.pi / 2]), 2.0))
    np.testing.assert_allclose(doubled[0, 0, 0], [0, 2, 5, 6], atol=1e-6)


def test_factors_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match="low_freq_factor"):
        Llama3Rope(factor=8, low_freq_factor=4, high_freq_factor=4, original_length=1000)


def test_longrope_divides_each_pair_by_its_own_number():
    # Base 100, 2 pairs: 1 and 0.1. Short list (1, 2): 1 and 0.05; long list (2, 10): 0.5 and 0.01.
    stretch = LongRope(short=(1, 2), long=(2, 10), original_length=16, factor=4)
    np.testing.assert_allclose(frequencies(100.0, 2, jnp.float32, stretch), [1, 0.05], rtol=1e-6)
    within, past = (dataclasses.replace(stretch, longest=n) for n in (16, 17))
    np.testing.assert_allclose(frequencies(100.0, 2, jnp.float32, within), [1, 0.05], rtol=1e-6)
    np.testing.assert_allclose(frequencies(100.0, 2, jnp.float32, past), [0.5, 0.01], rtol=1e-6)
    # ln 4 / ln 16 is 1/2, for both lists.
    assert amplitude(stretch) == amplitude(past) == pytest.approx(math.sqrt(1.5))
    assert amplitude(dataclasses.replace(stretch, attention_factor=1.5)) == 1.5
    with pytest.raises(ValueError, match=r"LongRope\.short has 1"):
        dataclasses.replace(stretch, short=(1,))


def test_proportional_leaves_the_last_pairs_as_they_are():
    # Base 10^4, 4 pairs: 1, 0.1, 0.01, 0.001; half of them, divided by 2.
    stretch = ProportionalRope(share=0.5, factor=2)
    np.testing.assert_allclose(frequencies(1e4, 4, jnp.float32, stretch), [0.5, 0.05, 0, 0], rtol=1e-6)
    assert amplitude(stretch) == 1


def test_all_layers_turn_by_the_same_cosines():
    """Left to itself XLA merges them into the layers: each computes its own, for every head, and on the way back."""
    cfg = Decoder(vocab_size=16, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=16)
    tokens, positions = np.zeros((2, 8), np.int32), np.tile(np.arange(8, dtype=np.int32), (2, 1))

    def loss(params):
        hidden, _ = unrolled(MODEL).forward(params, tokens, positions, None, cfg)
        return (hidden**2).sum()

    text = jax.jit(jax.grad(loss)).lower(abstract(MODEL.spec(cfg))).compile().as_text()
    assert len(re.findall(r" cosine\(", text)) == len(re.findall(r" sine\(", text)) == 1
