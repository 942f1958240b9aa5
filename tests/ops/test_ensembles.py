from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from narrow_inputs import check_widens

from jrl.ops import ensembles

NAN = float("nan")
SCORES = jnp.array([[1.0, 5.0], [2.0, 5.0], [3.0, NAN]])  # three members, two completions


def test_ensembles_by_hand():
    one, two = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[2.0], [1.0], [3.0]])
    assert float(jax.jit(ensembles.mean_score)(one)[0]) == 2
    assert float(jax.jit(ensembles.worst_case)(one)[0]) == 1
    # variance of 1, 2, 3 by 3 is 2 / 3: 2 - 0.5 * 2 / 3 = 1.66667; by 2 it would be 1.5
    found = jax.jit(ensembles.variance_penalized)(one, coefficient=0.5)
    np.testing.assert_allclose(found, [1.66667], atol=1e-5)
    # the nominal member is the first, 2: 0.8 * 2 + 0.2 * 1 = 1.8
    np.testing.assert_allclose(jax.jit(ensembles.nominal_worst_case)(two, share=0.8), [1.8], rtol=1e-6)


WAYS = {
    "mean": ensembles.mean_score,
    "worst": ensembles.worst_case,
    "variance": lambda scores: ensembles.variance_penalized(scores, coefficient=0.5),
    "nominal": lambda scores: ensembles.nominal_worst_case(scores, share=0.8),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_missing_member_is_missing_and_one_member_is_itself(way):
    found = WAYS[way](SCORES)
    assert np.isfinite(found[0]) and np.isnan(found[1])
    np.testing.assert_array_equal(WAYS[way](SCORES[:1]), SCORES[0])
    check_widens(WAYS[way], jnp.array([[0.7], [0.3], [0.1]]))


@pytest.mark.parametrize("way", WAYS)
def test_an_ensemble_never_exceeds_its_best_member_and_moves_with_all_of_them(way):
    with jax.enable_x64(True):
        scores = jax.random.normal(jax.random.key(0), (3, 5), jnp.float64)
        assert (WAYS[way](scores) <= scores.max(0)).all()
        np.testing.assert_allclose(WAYS[way](scores + 7), WAYS[way](scores) + 7, rtol=1e-12)


def test_disagreement_is_what_is_penalized():
    scores = jnp.array([[1.0, 0.0], [1.0, 2.0]])  # both have mean 1, the second variance 1
    np.testing.assert_allclose(ensembles.variance_penalized(scores, coefficient=0.25), [1, 0.75])


def test_scores_are_standardized_by_hand():
    # Demonstrations scored 1 and 3: the bias is -2, and a raw 2.5 is 0.5. Of the second label 10 and 30, std0 10:
    # (25 - 20) / 10 = 0.5
    raw, center = jnp.array([[2.5, 25.0], [1.0, 20.0]]), jnp.array([2.0, 20.0])
    found = jax.jit(ensembles.standardized)(raw, center, jnp.array([1.0, 10.0]))
    np.testing.assert_allclose(found, [[0.5, 0.5], [-1, 0]])
    check_widens(ensembles.standardized, raw / 7, center / 7, jnp.array([0.3, 0.7]))


def test_a_member_that_scored_all_demonstrations_alike_is_not_divided_by_zero():
    found = ensembles.standardized(jnp.array([[3.0]]), jnp.array([2.0]), jnp.array([0.0]))
    np.testing.assert_array_equal(found, [[1.0]])
