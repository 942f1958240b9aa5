"""Rewards that are functions of text or of a judge's numbers, by hand."""

from __future__ import annotations

import itertools
import math

import pytest

from jrl.tasks.rewards.calibration import calibration
from jrl.tasks.rewards.execution import all_passed, share_passed, speed, staged
from jrl.tasks.rewards.format import format_bonus, format_gate, format_penalty
from jrl.tasks.rewards.gap import reward_gap
from jrl.tasks.rewards.novelty import novelty, self_bleu
from jrl.tasks.rewards.pairwise import pairwise_scores
from jrl.tasks.rewards.rubric import rubric_score, stretched
from jrl.tasks.rewards.similarity import similarity

NAN = math.nan


def test_format_rewards_by_hand():
    assert format_bonus(1.0, False, 0.5) == 1.0 and format_bonus(1.0, True, 0.5) == 1.5
    assert format_gate(1.0, False) == 0.0 and format_gate(0.7, True) == 0.7
    assert format_penalty(1.0, False, 0.2) == 0.8 and format_penalty(1.0, True, 0.2) == 1.0  # 1 - 0.2 (1 - 0)


def test_a_format_penalty_is_a_bonus_shifted():
    for correct, formatted in itertools.product([-1.0, 0.0, 1.0], [False, True]):
        assert format_penalty(correct, formatted, 0.25) == format_bonus(correct, formatted, 0.25) - 0.25


def test_passed_tests_by_hand():
    assert all_passed([True, True, False, True]) == 0.0 and all_passed([True]) == 1.0
    assert share_passed([True, True, False, True]) == 0.75
    assert math.isnan(all_passed([])) and math.isnan(share_passed([]))


def test_similarity_by_hand():
    assert similarity("abcd", "bcde") == 0.75  # "bcd" matches: 2 * 3 / (4 + 4)
    assert similarity("", "") == 1.0 and similarity("", "a") == similarity("a", "") == 0.0
    assert similarity("abc", "abc") == 1.0 and similarity("abc", "xyz") == 0.0
    # Blocks on both sides of the longest one count: "cd" and then "a", 2 * 3 / (4 + 5)
    assert similarity("a-cd", "axxcd") == pytest.approx(6 / 9)


def test_frequent_characters_are_no_junk():
    # difflib's default drops characters that make up more than 1 % of 200 or more.
    assert similarity("ab" * 150, "ab" * 150 + "c" * 300) == pytest.approx(2 * 300 / 900)


def test_a_rubric_by_hand():
    never = (False,) * 3
    # (3 * 1 + 2 * 0.5 - 1 * 0) / (3 + 2 + 1)
    assert rubric_score([1, 0.5, 0], [3, 2, -1], never) == pytest.approx(0.66667, abs=5e-6)
    assert rubric_score([1, 0.5, 1], [3, 2, -1], never) == 0.5  # the flaw is there: (3 + 1 - 1) / 6
    assert rubric_score([0, 0, 1], [3, 2, -1], never) == pytest.approx(-1 / 6)


def test_a_rubrics_missing_score_is_missing_and_so_is_a_rubric_without_weights():
    assert math.isnan(rubric_score([1, NAN, 0], [3, 2, -1], (False,) * 3))
    assert math.isnan(rubric_score([1, NAN], [1, 0], (False, False)))
    assert math.isnan(rubric_score([1], [0], (False,))) and math.isnan(rubric_score([], [], ()))


def test_a_failed_critical_criterion_is_a_veto():
    assert rubric_score([0, 1, 0], [3, 2, -1], (True, False, False)) == 0.0
    assert rubric_score([1, 1, 1], [3, 2, -1], (False, False, True)) == 0.0  # a flaw fails by being there
    assert rubric_score([1, 1, 0], [3, 2, -1], (True, False, True)) == pytest.approx(5 / 6)
    assert rubric_score([1, 0], [1, 0], (False, True)) == 0.0  # one without a weight may veto too
    assert math.isnan(rubric_score([0, NAN], [1, 1], (True, False)))


def test_terms_of_a_rubric_that_count_together_by_hand():
    never = (False,) * 3
    # (3 * 1 + 2 * 0.5 - 1 * 0 + 2 * 1 * 0.5) / (3 + 2 + 1 + 2) = 5 / 8
    assert rubric_score([1, 0.5, 0], [3, 2, -1], never, [(0, 1, 2.0)]) == 0.625
    # A pair of flaws: (3 - 1 - 2 * 1 * 1) / 6
    assert rubric_score([1, 1], [3, -1], never[:2], [(0, 1, -2.0)]) == 0.0
    assert rubric_score([1, 0.5, 0], [3, 2, -1], never, []) == rubric_score([1, 0.5, 0], [3, 2, -1], never)


def test_a_saturated_rubric_by_hand():
    # 2 sigmoid(x) - 1: 0.90515 of 3, 0.46212 of 1, 0.76159 of 2. (0.90515 + 0.46212) / (0.90515 + 0.76159 + 0.46212)
    got = rubric_score([1, 0.5, 0], [3, 2, -1], (False,) * 3, saturation=1.0)
    assert got == pytest.approx(0.64225, abs=5e-6)
    assert rubric_score([1, 0.5, 1], [3, 2, -1], (False,) * 3, saturation=1.0) == pytest.approx(0.42518, abs=5e-6)
    # A term of a hundred times the weight does not hide the others; with little saturation it is the weighted sum.
    assert rubric_score([1, 0], [100, 1], (False, False), saturation=5.0) < 0.51
    assert rubric_score([1, 0.5, 0], [3, 2, -1], (False,) * 3, saturation=1e-4) == pytest.approx(4 / 6, abs=1e-6)


def test_a_stretched_reward_by_hand():
    # (e - 1) / (e^2 - 1) at 0.5; 0.9 to 1 is more than 0.5 to 0.6; what is not above 0 stays.
    assert stretched(0.5, 2.0) == pytest.approx(0.26894, abs=5e-6)
    assert stretched(1.0, 2.0) == 1.0 and stretched(0.0, 2.0) == 0.0 and stretched(-0.4, 2.0) == -0.4
    assert 1 - stretched(0.9, 2.0) > 2 * (stretched(0.6, 2.0) - stretched(0.5, 2.0))
    assert stretched(0.3, 1e-6) == pytest.approx(0.3, abs=1e-6) and math.isnan(stretched(NAN, 2.0))


def test_stages_and_speed_by_hand():
    assert staged(False, [False, False]) == 0.1 and staged(True, [True, False]) == 0.3 and staged(True, [True]) == 1.0
    assert staged(True, [False], parsed=0.2, run=0.5) == 0.5 and math.isnan(staged(True, []))
    assert speed([True, True], 2, 8) == 0.75  # 1 - 2 / 8
    assert speed([True], 9, 8) == 0.0 and speed([True, False], 2, 8) == 0.0  # slower; wrong
    assert math.isnan(speed([], 2, 8)) and math.isnan(speed([True], 2, 0))


def test_pairwise_scores_by_hand():
    # P12 = 1, P13 = 0.5, P23 = 0 in both orders: R1 = (1 + 0.5) / 2, R2 = (0 + 0) / 2, R3 = (0.5 + 1) / 2
    wins = [[NAN, 1, 0.5], [0, NAN, 0], [0.5, 1, NAN]]
    assert pairwise_scores(wins) == [0.75, 0.0, 0.75]


def test_orders_that_contradict_each_other_are_a_tie():
    assert pairwise_scores([[NAN, 1], [1, NAN]]) == pairwise_scores([[NAN, 0.5], [0.5, NAN]]) == [0.5, 0.5]
    assert pairwise_scores([[NAN, 1], [0.5, NAN]]) == [0.75, 0.25]  # (1 + 1 - 0.5) / 2


def test_a_group_of_one_and_a_missing_verdict():
    assert math.isnan(pairwise_scores([[NAN]])[0]) and pairwise_scores([]) == []
    scores = pairwise_scores([[NAN, 1, NAN], [0, NAN, 1], [1, 0, NAN]])
    assert scores == [1.0, 0.5, 0.0]  # 1 against 3 has one order only, and counts for neither
    assert all(map(math.isnan, pairwise_scores([[NAN, NAN], [1, NAN]])))


def test_pairwise_scores_average_to_one_half():
    wins = [[[0, 0.5, 1][(3 * i + 5 * j * j) % 3] for j in range(6)] for i in range(6)]
    assert sum(pairwise_scores(wins)) / 6 == pytest.approx(0.5)


def test_calibration_by_hand():
    assert calibration(True, 0.8) == pytest.approx(0.92)  # 1 - 2 * 0.2^2
    assert calibration(False, 0.8) == pytest.approx(-0.28)  # 1 - 2 * 0.8^2
    assert calibration(True, 1.0) == 1.0 and calibration(False, 1.0) == -1.0
    assert calibration(True, None) == calibration(True, 1.01) == calibration(False, -0.1) == -1.0
    assert calibration(True, NAN) == -1.0


def test_the_expected_calibration_reward_is_highest_at_the_true_rate():
    rate = 0.3
    expected = {c / 100: rate * calibration(True, c / 100) + (1 - rate) * calibration(False, c / 100)
                for c in range(101)}  # fmt: skip
    assert max(expected, key=expected.get) == rate


def test_self_bleu_by_hand():
    # "a b a c" against "a b x": 1-grams a a b c, of which a (clipped at 1) and b: 2/4; 2-grams ab ba ac, ab: 1/3.
    # Its 4 words are more than 3: brevity 1.
    assert self_bleu("a b a c".split(), ["a b x".split()], max_order=2) == pytest.approx(math.sqrt(2 / 4 * 1 / 3))
    # Clipped at the most of one text, not at the sum over texts: a twice in one of them, so both count: 3/4.
    history = ["a b x".split(), "a a".split(), "a".split()]
    assert self_bleu("a b a c".split(), history, max_order=1) == 3 / 4
    # Two words against four: brevity exp(1 - 4 / 2).
    assert self_bleu("a b".split(), ["a b c d".split()], max_order=2) == pytest.approx(math.exp(-1))
    # Of texts of 2 and 6 words, 4 words are as close to both: the shorter counts, and brevity is 1.
    assert self_bleu(list("abcd"), [list("ab"), list("abcdef")]) == pytest.approx(1.0)


def test_self_bleu_of_what_is_known_is_1_and_of_what_is_new_is_0():
    assert self_bleu(list("abcde"), [list("xyz"), list("abcde")]) == 1.0
    assert self_bleu(list("ab"), [list("ab")]) == 1.0  # shorter than four words
    assert self_bleu(list("xyz"), [list("abc")]) == 0.0
    assert self_bleu(list("ba"), [list("ab")]) == 0.0  # no 2-gram is known
    assert self_bleu([], [list("ab")]) == self_bleu(list("ab"), []) == 0.0
    assert self_bleu(list("ab"), [[]]) == 0.0


def test_novelty_by_hand():
    assert novelty(0.8, list("abcde"), [list("abcde")]) == pytest.approx(0.3)  # 0.8 - 0.5 * 1
    assert novelty(0.8, list("abcde"), []) == 0.8
    # Two known words against four: self-BLEU is exp(-1).
    known = novelty(0.8, "a b".split(), ["a b c d".split()], coefficient=0.25)
    assert known == pytest.approx(0.8 - 0.25 * math.exp(-1))


def test_a_reward_gap_by_hand():
    assert reward_gap(1.4, 0.9, False) == pytest.approx(0.5)
    assert reward_gap(0.9, 1.4, False) == pytest.approx(-0.5)
    assert reward_gap(1.4, 0.9, True) == 0.0  # a noisy judge of one text
    assert math.isnan(reward_gap(NAN, 0.9, False)) and math.isnan(reward_gap(1.4, NAN, False))
