from __future__ import annotations

import pytest

from jrl.tasks.envs.addition import Addition, open_addition


def test_answer_is_the_sum_of_numbers_of_the_asked_length():
    source = open_addition(Addition(digits=3, size=200))
    for i in range(200):
        left, right = source[i].messages[0].content.removesuffix("=").split("+")
        assert len(left) == len(right) == 3
        assert source[i].answer == str(int(left) + int(right))


def test_one_digit_includes_zero_and_all_pairs():
    source = open_addition(Addition(digits=1, size=2000))
    assert len({source[i].messages[0].content for i in range(2000)}) == 100


def test_seeds_differ():
    first, second = (open_addition(Addition(digits=6, seed=seed)) for seed in (0, 1))
    assert first[0] != second[0] and first[1].messages != second[0].messages
    assert first.fingerprint != second.fingerprint


def test_senseless_sizes_are_refused():
    for wrong in ({"digits": 0}, {"size": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            open_addition(Addition(**wrong))


def test_numbers_may_be_small_and_out_of_range_is_refused():
    source = open_addition(Addition(digits=1, largest=4, size=200))
    numbers = {int(x) for i in range(200) for x in source[i].messages[0].content.rstrip("=").split("+")}
    assert numbers == set(range(5))
    assert source[0].id != open_addition(Addition(digits=1, size=200))[0].id
    for digits, largest in ((1, 10), (2, 9)):
        with pytest.raises(ValueError, match=rf"Addition\.largest is {largest}"):
            open_addition(Addition(digits=digits, largest=largest))
