from __future__ import annotations

import collections
import dataclasses

import ml_dtypes
import numpy as np
import pytest
from data_fakes import TOKENIZER, numbered

from jrl.tasks.data import curricula
from jrl.tasks.data.curricula import (
    CURRICULA,
    AdaptiveLevel,
    ConfiguredCurriculum,
    DifficultyBand,
    HardFocus,
    LearningImpact,
    MostVaried,
    Prioritized,
    ProgressMixing,
    SizeMixing,
)
from jrl.tasks.data.prompts import Data, is_held_out
from jrl.tasks.data.stream import open_stream
from jrl.tasks.example import visit_uid

NAN = float("nan")


def of(config):
    return ConfiguredCurriculum(CURRICULA[type(config).__name__], config)


def no_outcomes(size, configs=(), task=None):
    """Returns the table of a source of `size` examples, of the tasks in turn that there are."""
    task = np.zeros(size, np.int32) if task is None else np.array(task, np.int32)
    return curricula.no_outcomes(task, [of(config) for config in configs])


def table(rate, judged=None, last=None, step=1):
    rate = np.array(rate, np.float32)
    judged = np.ones(len(rate), np.int32) if judged is None else np.array(judged, np.int32)
    last = np.ones(len(rate), np.int32) if last is None else np.array(last, np.int32)
    blank = no_outcomes(len(rate))
    return blank._replace(rate=rate, judged=judged, last=last, step=np.asarray(step, np.int32))


def own(weights, **functions):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Own(curricula.OutcomeMemory):
        pass

    return ConfiguredCurriculum(curricula.Curriculum(Own, weights, **functions), Own())


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (lambda config, table: np.ones(2), r"@Own\(\) returns weights of the shape \(2,\) for 3 examples"),
        (lambda config, table: 1.0, r"of the shape \(\) for 3"),
        (lambda config, table: np.array([1.0, -1.0, 0.0]), "negative, infinite or NaN"),
        (lambda config, table: table.history[:, 0], "negative, infinite or NaN"),
        (lambda config, table: ["1", "2", "3"], "returns weights of the dtype <U1; they must be numbers"),
        (lambda config, table: [None, 1.0, 1.0], "of the dtype object"),
        (lambda config, table: [1.0, [1.0], 1.0], "returns weights that are no array: setting an array element"),
        (lambda config, table: table.rate.sort(), "read-only"),
    ],
)
def test_weights_that_no_draw_can_take_are_refused_by_name(weights, said):
    with pytest.raises(ValueError, match=said):
        curricula.weights_of(own(weights), no_outcomes(3))


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.float16, ml_dtypes.bfloat16, np.float64])
def test_weights_of_every_real_dtype_are_taken(dtype):
    weights = curricula.weights_of(own(lambda config, table: np.ones(3, dtype)), no_outcomes(3))
    assert weights.dtype == np.float64 and weights.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (lambda table: table._replace(rate=table.rate * np.ones(3)), r"whose `rate` is float64\[3\]; .* float32\[3\]"),
        (lambda table: table._replace(step=np.zeros(1, np.int32)), r"whose `step` is int32\[1\]; .* int32\[\]"),
        (lambda table: None, "returns a NoneType"),
        (lambda table: table._replace(rate=[[1.0], [1.0, 0.5]]), "returns values of `rate` that are no array"),
    ],
)
def test_a_table_that_no_run_could_go_on_from_is_refused_by_name(after, said):
    curriculum = own(lambda config, table: np.ones(3), after=lambda config, table: after(table))
    with pytest.raises(ValueError, match=rf"@Own\(\): `after` .*{said}"):
        curricula.recorded(curriculum, no_outcomes(3), [], np.zeros((0, 2)), np.zeros((0, 2), bool))


LIMITS = {
    "a mask": lambda order: np.ones(len(order), bool),
    "places beyond": lambda order: order + 1,
    "every example twice": lambda order: np.repeat(order, 2),
    "another order": lambda order: order[::-1],
    "floats": lambda order: order.astype(np.float64),
    "a column": lambda order: order[:, None],
    "nothing at all": lambda order: None,
}


def limited_by(limit):
    curriculum = own(lambda config, table: np.ones(6), limit=lambda config, table, order: limit(order))
    return curricula.order_of(curriculum, no_outcomes(6), seed=0, position=0)


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_that_is_no_part_of_the_order_is_refused_by_name(name):
    with pytest.raises(ValueError, match=r"@Own\(\): `limit` returns something else than examples of the order"):
        limited_by(LIMITS[name])


def test_a_limit_of_rows_of_several_lengths_is_refused_by_name():
    with pytest.raises(ValueError, match=r"@Own\(\): `limit` returns examples that are no array"):
        limited_by(lambda order: [[0, 1], [2]])


def test_a_limit_may_leave_out_any_examples_and_not_write():
    order = limited_by(lambda order: order)
    assert limited_by(lambda order: order[1::2]).tolist() == order[1::2].tolist()
    assert limited_by(lambda order: order.tolist()[2:]).tolist() == order[2:].tolist()
    assert limited_by(lambda order: []).tolist() == []
    with pytest.raises(ValueError, match="read-only"):
        limited_by(lambda order: order.sort() or order)


def stream_of(size, config=None, **options):
    config = config or Data(prompt_length=32, held_out_every=None)
    stream = open_stream(numbered(size), TOKENIZER, config, **{"seed": 0, **options})
    stream.outcomes = no_outcomes(size)
    return stream


def test_a_visit_moves_the_running_rate_by_the_mean_of_what_was_judged():
    # prompt 2: the first visit sets (1 + 0) / 2 = 0.5, the masked one left out; the second 0.75 * 0.5 + 0.25 * 1
    config, before = Prioritized(decay=0.75), no_outcomes(4)
    outcome = np.array([[1.0, 0.0, NAN], [NAN, NAN, NAN]], np.float32)
    valid = np.array([[True, True, False], [False, False, False]])
    after = curricula.recorded(of(config), before, [2, 3], outcome, valid)
    assert after.rate.tolist() == [0, 0, 0.5, 0] and after.judged.tolist() == [0, 0, 1, 0]
    again = curricula.recorded(of(config), after, [2], np.ones((1, 3), np.float32), np.ones((1, 3), bool))
    assert again.rate[2] == 0.625 and again.judged[2] == 2 and again.last.tolist() == [0, 0, 2, 0] and again.step == 2
    assert before.rate.tolist() == [0] * 4  # a new table, and the old one as it was


def test_two_visits_of_one_prompt_in_a_step_count_in_their_order():
    config = Prioritized(decay=0.5)
    outcome = np.array([[1.0], [0.0]], np.float32)
    after = curricula.recorded(of(config), no_outcomes(2), [1, 1], outcome, np.ones((2, 1), bool))
    assert after.rate[1] == 0.5 and after.judged[1] == 2


def test_an_outcome_counts_for_so_many_steps():
    found = table([1.0, 1.0, 0.0], judged=[1, 1, 0], last=[1, 3, 0], step=4)
    assert curricula.seen_of(Prioritized(forget_after=3), found).tolist() == [False, True, False]
    assert curricula.seen_of(Prioritized(forget_after=None), found).tolist() == [True, True, False]
    np.testing.assert_allclose(curricula.weights_of(of(DifficultyBand(forget_after=3)), found), [1, 0, 1])
    # (1 - 0.5) + 0.02 each of the two that are new, 0.02 of the solved one, over 1.06
    expected = np.array([0.52, 0.02, 0.52]) / 1.06
    np.testing.assert_allclose(curricula.weights_of(of(Prioritized(forget_after=3)), found), expected)


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


def test_a_selection_visits_distinct_training_prompts_under_names_of_their_own():
    config = Data(prompt_length=32, held_out_every=3)
    stream = stream_of(30, config)
    visits = stream.select(8, of(Prioritized()))
    assert len({visit.index for visit in visits}) == 8
    assert not any(is_held_out(visit.example, config) for visit in visits)
    assert [visit.uid for visit in visits] == [visit_uid(v.example.id, -k) for k, v in enumerate(visits, start=1)]
    assert len({visit.uid for visit in visits + stream.select(8, of(Prioritized()))}) == 16
    assert stream.get_state()["position"] == 16


def test_fewer_prompts_than_a_step_takes_are_visited_again():
    stream = stream_of(6)
    stream.outcomes = table([0.5, 1.0, 0.5, 0.0, 1.0, 1.0])
    visits = stream.select(5, of(DifficultyBand()))
    assert sorted(collections.Counter(visit.index for visit in visits).items()) in ([(0, 3), (2, 2)], [(0, 2), (2, 3)])
    assert len({visit.uid for visit in visits}) == 5


def test_a_chosen_draw_is_made_again_whatever_the_table_has_become():
    stream = stream_of(20)
    state, visits = stream.get_state(), stream.select(4, of(Prioritized()))
    after = stream.get_state()
    stream.outcomes = table(np.linspace(0, 1, 20))
    stream.set_state(state)
    assert stream.revisit([visit.index for visit in visits]) == visits and stream.get_state() == after


def test_a_band_that_leaves_no_prompt_says_what_it_saw():
    stream = stream_of(4)
    stream.outcomes = table([0.0, 1.0, 0.95, 1.0], step=9)
    expected = "DifficultyBand leaves no prompt after 9 steps: of 4 examples 4 were judged, 3 of them solved and 1"
    with pytest.raises(ValueError, match=expected):
        stream.select(2, of(DifficultyBand(forget_after=None)))


def test_a_bad_prompt_of_a_curriculum_is_refused_without_the_advice_to_drop_it():
    source = numbered(1, ["x" * 99])
    stream = open_stream(source, TOKENIZER, Data(prompt_length=32, held_out_every=None), seed=0)
    stream.outcomes = no_outcomes(1)
    with pytest.raises(ValueError, match=r"'e0': .* = 32; a curriculum drops none: remove such prompts") as refused:
        stream.select(1, of(Prioritized()))
    assert "on_bad_prompt" not in str(refused.value)


def test_metrics_are_shares_of_the_examples():
    found = table([1.0, 0.5, 0.0, 1.0], judged=[1, 2, 1, 0])
    # three were judged; one of them is solved (the last was never judged); two are out of the band
    assert curricula.metrics(of(DifficultyBand()), found) == {
        "curriculum/seen": 0.75, "curriculum/solved": 0.25, "curriculum/dropped": 0.5
    }  # fmt: skip
    assert curricula.metrics(of(Prioritized()), found)["curriculum/dropped"] == 0


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


def visited(config, before, index, rates):
    """Returns the table after a step that visited examples, each with this success rate."""
    rates = np.array(rates, np.float32)[:, None]
    return curricula.recorded(of(config), before, index, rates, np.ones_like(rates, bool))


def test_the_hardest_share_is_visited_and_new_prompts_are_hard():
    # Rates 0.5, 0.25, 1 and one prompt that was never judged: half of four are it and the one of 0.25.
    found = table([0.5, 0.25, 1.0, 0.0], judged=[1, 1, 1, 0])
    assert curricula.weights_of(of(HardFocus(share=0.5)), found).tolist() == [0, 1, 0, 1]
    forgotten = found._replace(step=np.asarray(9, np.int32))
    assert curricula.weights_of(of(HardFocus(share=0.5, forget_after=5)), forgotten).tolist() == [1, 1, 0, 0]


def test_examples_that_are_held_out_are_not_among_the_hardest():
    # Six prompts, of which 0, 2 and 4 are held out and so never judged. Half of the other three is the hardest one.
    found = table([0, 0.5, 0, 0.25, 0, 1.0], judged=[0, 1, 0, 1, 0, 1])
    training = np.array([False, True] * 3)
    assert curricula.weights_of(of(HardFocus(share=0.67)), found, training).tolist() == [0, 1, 0, 1, 0, 0]
    assert curricula.order_of(of(HardFocus(share=0.34)), found, 0, 0, training).tolist() == [3]
    # Of all six, three were judged, one of them is solved, and two are not the hardest.
    expected = {"curriculum/seen": 3 / 6, "curriculum/solved": 1 / 6, "curriculum/dropped": 2 / 6}
    assert curricula.metrics(of(HardFocus(share=0.34)), found, training) == expected
    # The shares of a curriculum that does not ask which are held out are of as many.
    rest = curricula.metrics(of(DifficultyBand(low=0.3)), found)
    assert rest == expected
    # Nor in the size of a task: one of the first is left and two of the second.
    sizes = no_outcomes(6, [SizeMixing()], task=[0, 0, 0, 1, 1, 1])
    weights = curricula.weights_of(of(SizeMixing(alpha=1.0)), sizes, training)
    np.testing.assert_allclose(weights, [0, 1 / 3, 0, 1 / 3, 0, 1 / 3])
    assert not curricula.weights_of(of(HardFocus()), found, np.zeros(6, bool)).any()


def test_a_stream_draws_the_hardest_of_its_split():
    config = Data(prompt_length=32, held_out_every=2)
    stream = stream_of(40, config)
    training = [i for i in range(40) if not is_held_out(stream._source[i], config)]
    rate = np.ones(40, np.float32)
    rate[training[:5]] = 0.25
    stream.outcomes = table(np.where(np.isin(np.arange(40), training), rate, 0), judged=np.isin(range(40), training))
    share = 5.5 / len(training)
    assert {visit.index for visit in stream.select(5, of(HardFocus(share=share)))} == set(training[:5])


def test_a_step_visits_few_prompts_that_were_never_solved():
    # Prompts 0 to 3 were tried and never solved, 4 never tried, 5 solved half of the time.
    found = table([0, 0, 0, 0, 0, 0.5], judged=[1, 1, 1, 1, 0, 1])
    order = curricula.order_of(of(HardFocus(share=1.0, max_unsolved=2)), found, 0, 0).tolist()
    whole = curricula.order_of(of(HardFocus(share=1.0)), found, 0, 0).tolist()
    assert sorted(whole) == list(range(6))
    first_two = [i for i in whole if i < 4][:2]
    assert order == [i for i in whole if i >= 4 or i in first_two]


def test_after_the_pilot_the_prompts_that_varied_most_are_visited():
    config = MostVaried(count=1, pilot=2, visits=2)
    found = no_outcomes(3, [config])
    found = visited(config, found, [0, 1, 2], [0.0, 1.0, 0.5])
    assert curricula.weights_of(of(config), found).tolist() == [1, 1, 1]
    found = visited(config, found, [0, 1, 2], [0.5, 0.0, 0.5])
    # variances 0.0625, 0.25 and 0
    assert curricula.weights_of(of(config), found).tolist() == [0, 1, 0]
    later = visited(config, found, [0, 0, 0], [1.0, 0.0, 1.0])
    assert curricula.weights_of(of(config), later).tolist() == [0, 1, 0]  # the pilot is over
    np.testing.assert_array_equal(later.history, [[0, 0.5], [1, 0], [0.5, 0.5]])


def test_a_prompt_that_the_pilot_never_visited_is_not_chosen():
    # Prompt 0 may be held out, such as here: the two visited ones have a variance of 0 as well.
    config = MostVaried(count=2, pilot=1, visits=2)
    found = visited(config, no_outcomes(3, [config]), [1, 2], [1.0, 0.5])
    assert curricula.weights_of(of(config), found).tolist() == [0, 1, 1]
    assert curricula.weights_of(of(MostVaried(count=1, pilot=1, visits=2)), found).tolist() == [0, 1, 0]
    assert curricula.weights_of(of(config), no_outcomes(3, [config])._replace(step=np.int32(1))).tolist() == [0, 0, 0]


def test_a_history_holds_the_first_visits_in_their_order():
    config = MostVaried(pilot=9, visits=2)
    found = visited(config, no_outcomes(2, [config]), [0, 0, 0], [0.25, 0.5, 1.0])
    np.testing.assert_array_equal(found.history, [[0.25, 0.5], [NAN, NAN]])


def test_after_the_pilot_the_prompts_that_follow_the_mean_are_visited():
    config = LearningImpact(pilot=1, visits=3, threshold=0.2, fewest=2)
    found = no_outcomes(3, [config])
    assert curricula.weights_of(of(config), found).tolist() == [1, 1, 1]
    # Prompt 2 is seen once and left out, of the mean too: that is 0.5, 0.5, 0.5, below 1 by 0.75 squared in all.
    # Prompt 0: 1 - (0.25 + 0 + 0.25) / 0.75 = 1/3. Prompt 1 mirrors it.
    found = visited(config, found, [0, 0, 0, 1, 1, 1, 2], [0, 0.5, 1, 1, 0.5, 0, 1])
    assert curricula.weights_of(of(config), found).tolist() == [1, 1, 0]
    assert curricula.weights_of(of(LearningImpact(pilot=1, visits=3, threshold=0.34)), found).tolist() == [0, 0, 0]


def test_tasks_have_shares_by_the_root_of_their_size():
    # 1 and 9 examples: shares 1/4 and 3/4, each of the nine 1/12.
    found = no_outcomes(10, [SizeMixing()], task=[0] + [1] * 9)
    np.testing.assert_allclose(curricula.weights_of(of(SizeMixing(alpha=0.5)), found), [0.25] + [1 / 12] * 9)
    np.testing.assert_allclose(curricula.weights_of(of(SizeMixing(alpha=1.0)), found), [0.1] * 10)
    assert curricula.metrics(of(SizeMixing(alpha=0.5)), found)["curriculum/task_1"] == pytest.approx(0.75)


def test_tasks_have_shares_by_their_progress():
    # Task 0: 0, 0 then 1, 0.5: 0.75. Task 1: no change. Task 2 has one visit of four and is tried like task 0.
    config = ProgressMixing(window=4, floor=0.25)
    found = no_outcomes(4, [config], task=[0, 1, 2, 2])
    found = visited(config, found, [0] * 5 + [1] * 4 + [2], [1, 0, 0, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 1])
    np.testing.assert_allclose(curricula.weights_of(of(config), found), np.array([1, 0.25, 0.5, 0.5]) / 2.25)


def test_the_level_rises_and_falls_with_the_success_rate():
    config = AdaptiveLevel(window=2, up=0.7, down=0.1)
    found = no_outcomes(4, [config], task=[0, 0, 1, 2])
    assert curricula.weights_of(of(config), found).tolist() == [1, 1, 0, 0]
    found = visited(config, found, [0], [1.0])
    assert found.level == 0  # one visit of two
    found = visited(config, found, [1], [0.5])
    assert found.level == 1 and np.isnan(found.recent).all()  # 0.75 is above 0.7, and the level begins anew
    assert curricula.weights_of(of(config), found).tolist() == [0, 0, 1, 0]
    assert curricula.metrics(of(config), found)["curriculum/task_1"] == 1
    down = visited(config, found, [2, 2], [0.0, 0.0])
    up = visited(config, found, [2, 2], [1.0, 1.0])
    assert (down.level, up.level) == (0, 2)
    assert visited(config, up, [3, 3], [1.0, 1.0]).level == 2  # there is none above


def test_a_curriculum_of_tasks_is_refused_where_there_is_one():
    for config in (SizeMixing(), ProgressMixing(), AdaptiveLevel()):
        with pytest.raises(ValueError, match=r"chooses between tasks, and Config\.task has one"):
            no_outcomes(3, [config])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: HardFocus(share=0.0), r"HardFocus\.share"),
        (lambda: HardFocus(max_unsolved=0), r"HardFocus\.max_unsolved"),
        (lambda: MostVaried(count=0), r"MostVaried\.count"),
        (lambda: MostVaried(pilot=0), "MostVaried needs pilot"),
        (lambda: LearningImpact(threshold=1.0), "LearningImpact needs threshold"),
        (lambda: LearningImpact(visits=1), "LearningImpact needs pilot"),
        (lambda: SizeMixing(alpha=2.0), r"SizeMixing\.alpha"),
        (lambda: ProgressMixing(floor=0.0), "ProgressMixing needs"),
        (lambda: AdaptiveLevel(up=0.1, down=0.2), "AdaptiveLevel needs"),
        (lambda: AdaptiveLevel(decay=1.0), r"AdaptiveLevel\.decay"),
    ],
)
def test_values_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
