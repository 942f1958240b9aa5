from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jrl.ops import pairs

NAN = float("nan")


def found(fn, score, group, *more, text=None, valid=None, margin=0.0, num_groups=1):
    """Returns [(chosen, rejected)] by group, under jit."""
    text = jnp.arange(len(score)) if text is None else jnp.array(text)
    valid = jnp.ones(len(score), bool) if valid is None else jnp.array(valid)
    got = jax.jit(fn, static_argnames="num_groups")(
        jnp.array(score), text, jnp.array(group, jnp.int32), valid, *more, num_groups=num_groups, margin=margin
    )
    return list(zip(got.chosen.tolist(), got.rejected.tolist()))


def test_the_best_is_chosen_and_the_worst_rejected():
    # scores [1.2, 0.3, 1.2, 0.5]: chosen 0, rejected 1; all [0.4, 0.4]: none
    assert found(pairs.best_against_worst, [1.2, 0.3, 1.2, 0.5], [0] * 4) == [(0, 1)]
    assert found(pairs.best_against_worst, [0.4, 0.4], [0, 0]) == [(-1, -1)]


def test_groups_in_any_order_with_rows_missing_give_pairs_of_their_own():
    score = [0.1, 5.0, NAN, 0.7, 4.0, 3.0]
    group, valid = [1, 0, 1, 1, 0, 2], [True, True, False, True, True, True]
    # group 0: rows 1 and 4; group 1: 3 and 0, row 2 has no verdict; group 2: one row; group 3: none
    expected = [(1, 4), (3, 0), (-1, -1), (-1, -1)]
    assert found(pairs.best_against_worst, score, group, valid=valid, num_groups=4) == expected


def test_a_margin_must_be_exceeded():
    # the gap is 0.5, exact in binary
    assert found(pairs.best_against_worst, [1.0, 0.5], [0, 0], margin=0.5) == [(-1, -1)]
    assert found(pairs.best_against_worst, [1.0, 0.5], [0, 0], margin=0.25) == [(0, 1)]


def test_one_text_is_no_pair():
    assert found(pairs.best_against_worst, [1.0, 0.0], [0, 0], text=[7, 7]) == [(-1, -1)]
    assert found(pairs.best_against_worst, [1.0, 0.0], [0, 0], text=[7, 8]) == [(0, 1)]


def test_the_second_best_is_rejected_where_it_is_asked_for():
    assert found(pairs.best_two, [0.1, 0.9, 0.5, 0.2], [0] * 4) == [(1, 2)]
    assert found(pairs.best_two, [1.2, 0.3, 1.2, 0.5], [0] * 4) == [(-1, -1)]  # the first two are equal


@pytest.mark.parametrize("other", [0, 2, 3])
def test_a_random_other_is_rejected_where_it_is_asked_for(other):
    draw = jnp.zeros(4).at[other].set(0.5).at[1].set(0.9)
    assert found(pairs.best_against_random, [0.1, 0.9, 0.5, 0.2], [0] * 4, draw) == [(1, other)]


def test_a_length_penalty_is_the_callers():
    # R - 0.01 len: 1.0 - 0.3 = 0.7 and 0.9 - 0.1 = 0.8: the shorter one is chosen
    reward, length = jnp.array([1.0, 0.9, 0.0]), jnp.array([30, 10, 10])
    assert found(pairs.best_against_worst, reward - 0.01 * length, [0] * 3) == [(1, 2)]
