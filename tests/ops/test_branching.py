"""Where a completion is branched (S8)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops.branching import branch_column, most_uncertain

NAN = np.nan


def test_the_most_uncertain_tokens_by_hand():
    entropy = jnp.array([[0.1, 2.0, 0.3, 1.5], [0.1, 2.0, NAN, 1.5], [1.0, 1.0, 1.0, 1.0], [NAN] * 4])
    eligible = jnp.array([[True] * 4, [True, False, False, True], [False, True, True, True], [False] * 4])
    found = jax.jit(most_uncertain, static_argnames="count")(entropy, eligible, count=2)
    # Columns 1 and 3; what is not eligible is passed over; of equal entropies the first; none where none is eligible.
    assert [np.flatnonzero(row).tolist() for row in found] == [[1, 3], [0, 3], [1, 2], []]
    assert most_uncertain(entropy[:1], eligible[:1], count=9).all()
    np.testing.assert_array_equal(most_uncertain(entropy[None], eligible[None], count=2)[0], found)
    assert most_uncertain(jnp.array([[0.0, -0.0]]), jnp.array([[False, True]]), count=1).tolist() == [[False, True]]


def test_the_column_is_the_candidate_with_the_most_noise():
    candidates = jnp.array(
        [[False, True, False, True], [False, True, False, True], [False] * 4, [True, False, False, True]]
    )
    noise = jnp.array([[0.9, 0.2, 0.8, 0.7], [0.9, 0.7, 0.8, 0.2], [0.5] * 4, [0.0, 0.9, 0.9, 0.0]])
    assert jax.jit(branch_column)(candidates, noise).tolist() == [3, 1, -1, 0]
    # Whatever axes lead: in this order column 1 has a candidate and row 1 has none.
    assert branch_column(candidates[None, ::-1], noise[None, ::-1]).tolist() == [[0, -1, 1, 3]]


def test_the_draw_is_fair():
    candidates = jnp.tile(jnp.array([[True, False, True, True]]), (3000, 1))
    columns = branch_column(candidates, jax.random.uniform(jax.random.key(0), (3000, 4)))
    counts = np.bincount(np.asarray(columns), minlength=4)
    assert counts[1] == 0 and (abs(counts[[0, 2, 3]] - 1000) < 100).all()
