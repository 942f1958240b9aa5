"""The Gumbel race draws from the softmax, from nothing else, and is the same draw under any rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops.draw import BLOCK, _gumbel, draw, greedy, race
from jrl.ops.truncate import support

DRAWS = 200_000
pytestmark = pytest.mark.usefixtures("compiled_as_shipped")  # so many draws take longer than to compile them well


def counts(logits, seed=0, draws=DRAWS):
    keys = jax.random.split(jax.random.key(seed), draws)
    tokens = jax.jit(lambda keys: jax.lax.map(lambda key: draw(key, logits), keys, batch_size=2000))(keys)
    return np.bincount(np.asarray(tokens), minlength=logits.shape[0])


drawn = jax.jit(jax.vmap(draw, in_axes=(0, None)))


def chi_square(observed, logits):
    """Standardized chi-square over cells of at least 10 expected draws, the rest pooled: about N(0, 1)."""
    expected = np.asarray(jax.nn.softmax(logits.astype(jnp.float32)), np.float64) * observed.sum()
    large = expected >= 10
    cells = np.append(expected[large], expected[~large].sum())
    actual = np.append(observed[large], observed[~large].sum())
    cells, actual = cells[cells >= 10], actual[cells >= 10]
    freedom = len(cells) - 1
    return (((actual - cells) ** 2 / cells).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("vocabulary", [3, BLOCK, 300])
def test_law_is_the_softmax(vocabulary):
    logits = 2 * jax.random.normal(jax.random.key(vocabulary), (vocabulary,))
    assert abs(chi_square(counts(logits), logits)) < 4


def test_law_under_truncation_is_the_renormalised_softmax():
    logits = 2 * jax.random.normal(jax.random.key(9), (300,))
    keep = support(logits, top_k=jnp.int32(90), top_p=jnp.float32(0.8))
    limited = jnp.where(keep, logits, -jnp.inf)
    observed = counts(limited)
    assert 10 < keep.sum() < 90
    assert observed[~np.asarray(keep)].sum() == 0
    assert abs(chi_square(observed, limited)) < 4


def test_a_law_that_is_off_by_little_fails_the_same_statistic():
    logits = 2 * jax.random.normal(jax.random.key(9), (300,))
    assert abs(chi_square(counts(logits), logits * 1.03)) > 4


def test_minus_infinity_never_wins_even_as_a_whole_block():
    logits = jnp.full(4 * BLOCK, -jnp.inf).at[jnp.array([BLOCK + 3, 3 * BLOCK + 5])].set(jnp.array([-80.0, -81.0]))
    observed = counts(logits, draws=20_000)
    assert observed[BLOCK + 3] + observed[3 * BLOCK + 5] == 20_000
    assert abs(observed[BLOCK + 3] / 20_000 - 0.7311) < 0.015  # sigma(1) ~ 0.7311, four standard deviations


def test_rare_tokens_are_drawn_at_their_rate():
    # 100,000 draws from each of 100 tokens of probability 1e-4 against one of 0.99: 1,000 rare draws expected.
    logits = jnp.log(jnp.append(jnp.full(100, 1e-4), 0.99))
    rare = counts(logits, draws=100_000)[:100].sum()
    assert abs(rare - 1000) < 4 * np.sqrt(1000)


def test_noise_has_the_moments_and_tails_of_a_gumbel():
    noise = np.asarray(
        jax.jit(jax.vmap(lambda key: _gumbel(key, 1000)))(jax.random.split(jax.random.key(3), 1000)), np.float64
    )
    assert abs(noise.mean() - 0.577216) < 4 * 1.2825 / 1000
    assert abs(noise.var() - np.pi**2 / 6) < 0.02
    for edge in (-2.0, 8.0, 11.0):
        share = np.exp(-np.exp(-edge)) if edge < 0 else -np.expm1(-np.exp(-edge))
        actual = (noise < edge).mean() if edge < 0 else (noise > edge).mean()
        assert abs(actual - share) < 4 * np.sqrt(share / 1e6)


def test_noise_does_not_depend_on_the_dtype_of_the_logits():
    with jax.enable_x64(True):
        logits = jax.random.normal(jax.random.key(1), (500,), jnp.float32)
        key = jax.random.key(2)
        for narrow, wide in zip(race(key, logits), race(key, logits.astype(jnp.float64))):
            np.testing.assert_allclose(narrow, wide, rtol=2e-6)
        assert race(key, logits.astype(jnp.float64))[0].dtype == jnp.float64


def test_a_rounding_of_the_logits_does_not_change_the_draw():
    logits = 3 * jax.random.normal(jax.random.key(4), (1000,))
    shaken = logits * (1 + 1e-7 * jax.random.normal(jax.random.key(5), (1000,)))
    keys = jax.random.split(jax.random.key(6), 5000)
    one, two = (drawn(keys, x) for x in (logits, shaken))
    assert (one == two).all()


def test_adding_a_constant_does_not_change_the_draw():
    logits = jnp.arange(260, dtype=jnp.float32) % 7
    keys = jax.random.split(jax.random.key(6), 1000)
    one, two = (drawn(keys, x) for x in (logits, logits + 64.0))
    assert (one == two).all()


def test_greedy_takes_the_lowest_of_ties():
    assert greedy(jnp.array([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]])).tolist() == [1, 0]
