"""The generator gives the published words, and its streams look random."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops.threefry import random_bits, threefry


@pytest.mark.parametrize(
    "key, counter, expected",
    [  # known answers of threefry2x32, 20 rounds, from the Random123 distribution
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers(key, counter, expected):
    words = threefry(tuple(map(jnp.uint32, key)), tuple(map(jnp.uint32, counter)))
    assert tuple(map(int, words)) == expected


def test_streams_of_two_keys_share_no_word():
    one, two = (np.asarray(random_bits(jax.random.key(seed), 101)) for seed in (0, 1))
    assert one.shape == (101,) and len(set(one) | set(two)) == 202


def test_every_bit_is_set_half_of_the_time():
    bits = np.asarray(random_bits(jax.random.key(0), 100_001))
    share = ((bits[:, None] >> np.arange(32, dtype=np.uint32)) & 1).mean(0)
    assert np.abs(share - 0.5).max() < 4.5 * 0.5 / np.sqrt(1e5)


def test_a_key_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="threefry2x32"):
        random_bits(jax.random.key(0, impl="rbg"), 4)
