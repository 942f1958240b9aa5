from __future__ import annotations

import collections

import numpy as np
import pytest
from data_fakes import TOKENIZER, numbered

from jrl.tasks.data import curricula
from jrl.tasks.data.curricula import DifficultyBand, Outcomes, Prioritized
from jrl.tasks.data.prompts import Data, is_held_out
from jrl.tasks.data.stream import open_stream
from jrl.tasks.example import visit_uid

NAN = float("nan")


def table(rate, judged=None, last=None, step=1):
    rate = np.array(rate, np.float32)
    judged = np.ones(len(rate), np.int32) if judged is None else np.array(judged, np.int32)
    last = np.ones(len(rate), np.int32) if last is None else np.array(last, np.int32)
    return Outcomes(rate, judged, last, np.asarray(step, np.int32))


def stream_of(size, config=None, **options):
    config = config or Data(prompt_length=32, held_out_every=None)
    stream = open_stream(numbered(size), TOKENIZER, config, **{"seed": 0, "split": "train", **options})
    stream.outcomes = curricula.no_outcomes(size)
    return stream


def test_a_visit_moves_the_running_rate_by_the_mean_of_what_was_judged():
    # prompt 2: the first visit sets (1 + 0) / 2 = 0.5, the masked one left out; the second 0.75 * 0.5 + 0.25 * 1
    config, before = Prioritized(decay=0.75), curricula.no_outcomes(4)
    outcome = np.array([[1.0, 0.0, NAN], [NAN, NAN, NAN]], np.float32)
    valid = np.array([[True, True, False], [False, False, False]])
    after = curricula.recorded(config, before, [2, 3], outcome, valid)
    assert after.rate.tolist() == [0, 0, 0.5, 0] and after.judged.tolist() == [0, 0, 1, 0]
    again = curricula.recorded(config, after, [2], np.ones((1, 3), np.float32), np.ones((1, 3), bool))
    assert again.rate[2] == 0.625 and again.judged[2] == 2 and again.last.tolist() == [0, 0, 2, 0] and again.step == 2
    assert before.rate.tolist() == [0] * 4  # a new table, and the old one as it was


def test_two_visits_of_one_prompt_in_a_step_count_in_their_order():
    config = Prioritized(decay=0.5)
    outcome = np.array([[1.0], [0.0]], np.float32)
    after = curricula.recorded(config, curricula.no_outcomes(2), [1, 1], outcome, np.ones((2, 1), bool))
    assert after.rate[1] == 0.5 and after.judged[1] == 2


def test_an_outcome_counts_for_so_many_steps():
    found = table([1.0, 1.0, 0.0], judged=[1, 1, 0], last=[1, 3, 0], step=4)
    assert curricula.seen_of(Prioritized(forget_after=3), found).tolist() == [False, True, False]
    assert curricula.seen_of(Prioritized(forget_after=None), found).tolist() == [True, True, False]
    np.testing.assert_allclose(curricula.weights_of(DifficultyBand(forget_after=3), found), [1, 0, 1])
    # (1 - 0.5) + 0.02 each of the two that are new, 0.02 of the solved one, over 1.06
    expected = np.array([0.52, 0.02, 0.52]) / 1.06
    np.testing.assert_allclose(curricula.weights_of(Prioritized(forget_after=3), found), expected)


def test_the_first_of_an_order_is_drawn_in_proportion_and_what_has_no_weight_never():
    weights = np.array([0.5, 0.0, 0.125, 0.375])
    orders = [curricula.draw_order(weights, 7, position) for position in range(4000)]
    assert all(sorted(order.tolist()) == [0, 2, 3] for order in orders)
    first = collections.Counter(int(order[0]) for order in orders)
    # three standard deviations of 4000 draws are at most 0.024
    np.testing.assert_allclose([first[i] / 4000 for i in range(4)], weights, atol=0.024)
    # the second, after 0 was first: 0.125 and 0.375 of 0.5
    second = collections.Counter(int(order[1]) for order in orders if order[0] == 0)
    np.testing.assert_allclose(second[2] / (second[2] + second[3]), 0.25, atol=0.03)


def test_an_order_is_a_function_of_seed_and_position():
    order = lambda seed, position: curricula.draw_order(np.ones(50), seed, position).tolist()
    assert order(0, 3) == order(0, 3) and order(0, 3) != order(1, 3) and order(0, 3) != order(0, 4)


def test_a_selection_visits_distinct_prompts_of_its_split_under_names_of_their_own():
    config = Data(prompt_length=32, held_out_every=3)
    stream = stream_of(30, config)
    visits = stream.select(8, Prioritized())
    assert len({visit.index for visit in visits}) == 8
    assert not any(is_held_out(visit.example, config) for visit in visits)
    assert [visit.uid for visit in visits] == [visit_uid(v.example.id, -k) for k, v in enumerate(visits, start=1)]
    assert len({visit.uid for visit in visits + stream.select(8, Prioritized())}) == 16
    assert stream.get_state()["position"] == 16
    held = stream_of(30, config, split="held_out").select(4, Prioritized())
    assert all(is_held_out(visit.example, config) for visit in held)


def test_fewer_prompts_than_a_step_takes_are_visited_again():
    stream = stream_of(6)
    stream.outcomes = table([0.5, 1.0, 0.5, 0.0, 1.0, 1.0])
    visits = stream.select(5, DifficultyBand())
    assert sorted(collections.Counter(visit.index for visit in visits).items()) in ([(0, 3), (2, 2)], [(0, 2), (2, 3)])
    assert len({visit.uid for visit in visits}) == 5


def test_a_chosen_draw_is_made_again_whatever_the_table_has_become():
    stream = stream_of(20)
    state, visits = stream.get_state(), stream.select(4, Prioritized())
    after = stream.get_state()
    stream.outcomes = table(np.linspace(0, 1, 20))
    stream.set_state(state)
    assert stream.revisit([visit.index for visit in visits]) == visits and stream.get_state() == after


def test_a_band_that_leaves_no_prompt_says_what_it_saw():
    stream = stream_of(4)
    stream.outcomes = table([0.0, 1.0, 0.95, 1.0], step=9)
    expected = "DifficultyBand leaves no prompt after 9 steps: of 4 examples 4 were judged, 3 of them solved and 1"
    with pytest.raises(ValueError, match=expected):
        stream.select(2, DifficultyBand(forget_after=None))


def test_metrics_are_shares_of_the_examples():
    found = table([1.0, 0.5, 0.0, 1.0], judged=[1, 2, 1, 0])
    # three were judged; one of them is solved (the last was never judged); two are out of the band
    assert curricula.metrics(DifficultyBand(), found) == {
        "curriculum/seen": 0.75, "curriculum/solved": 0.25, "curriculum/dropped": 0.5
    }  # fmt: skip
    assert curricula.metrics(Prioritized(), found)["curriculum/dropped"] == 0


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (DifficultyBand, {"low": 0.6, "high": 0.5}, "0 <= low <= high <= 1"),
        (DifficultyBand, {"high": 1.5}, "0 <= low <= high <= 1"),
        (DifficultyBand, {"decay": 1.0}, r"DifficultyBand\.decay"),
        (Prioritized, {"forget_after": 0}, r"Prioritized\.forget_after"),
        (Prioritized, {"floor": -0.1}, r"Prioritized\.exponent and floor"),
    ],
)
def test_a_curriculum_that_could_not_work_is_refused(cls, fields, message):
    with pytest.raises(ValueError, match=message):
        cls(**fields)
