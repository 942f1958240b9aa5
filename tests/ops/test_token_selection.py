from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import token_selection

NAN = float("nan")


def chosen(entropy, share, mask=None):
    mask = jnp.ones(len(entropy), bool) if mask is None else jnp.array(mask)
    fn = jax.jit(lambda x, m: token_selection.high_entropy(x, m, share=share))
    return np.flatnonzero(fn(jnp.array(entropy), mask)).tolist()


def test_high_entropy_by_hand():
    # the 0.8 quantile of [0.1, 0.2, 0.3, 0.4, 2.0] is 0.72: the last
    assert chosen([0.1, 0.2, 0.3, 0.4, 2.0], 0.2) == [4]
    # the 0.5 quantile is 0.3 itself, which is in
    assert chosen([0.1, 0.2, 0.3, 0.4, 2.0], 0.5) == [2, 3, 4]
    assert chosen([0.1, 0.2, 0.3, 0.4, 2.0], 1.0) == [0, 1, 2, 3, 4]


def test_ties_at_the_quantile_are_all_in():
    assert chosen([1.0, 1.0, 0.0, 1.0, 0.5], 0.2) == [0, 1, 3]


def test_the_masked_are_not_ranked():
    assert chosen([NAN, 1.0, 2.0, 9.0], 0.5, mask=[False, True, True, False]) == [2]
    assert chosen([NAN, NAN], 0.5, mask=[False, False]) == []


def test_it_equals_numpys_quantile():
    rng = np.random.default_rng(0)
    for size in (1, 2, 7, 30, 101):
        for share in (0.1, 0.2, 0.33, 0.8):
            entropy = rng.uniform(0, 3, size).astype(np.float32)
            expected = np.flatnonzero(entropy >= np.quantile(entropy.astype(np.float64), 1 - share) - 1e-9)
            assert chosen(entropy, share) == expected.tolist()


def test_the_quantile_is_over_all_rows():
    entropy = jnp.array([[0.1, 0.2], [2.0, 3.0]])
    got = token_selection.high_entropy(entropy, jnp.ones((2, 2), bool), share=0.5)
    np.testing.assert_array_equal(got, [[False, False], [True, True]])
