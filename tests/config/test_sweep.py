from __future__ import annotations

import pytest
from reader_tree import TABLES, Config

from jrl.config import ConfigError, load
from jrl.config.sweep import MOST_MEMBERS, Axis, draw, expand_ranges, gin_text, grid, pairs, read_axes

FIXED = ["Config.task=@Sum()", "Config.algo=@GRPO()", "Loop.steps=3", "Scoring.verifiers=[@Length()]"]
RATES, SEEDS = Axis("AdamW.learning_rate", ("0.001", "0.003")), Axis("Run.seed", ("0", "1", "2"))


def axes(*bindings, path=None):
    return read_axes(path, bindings, Config, TABLES)


def test_a_list_is_an_axis_where_the_field_holds_no_list():
    assert axes("AdamW.learning_rate=[1e-3, 3e-3]", "Loop.lag=1") == ((RATES,), ("Loop.lag=1",))
    assert axes("Config.algo=[@GRPO(), @DAPO()]") == ((Axis("Config.algo", ("@GRPO()", "@DAPO()")),), ())


def test_a_list_for_a_field_of_lists_is_a_value_and_a_list_of_lists_an_axis():
    assert axes("Run.parts=['a.py', 'b.py']") == ((), ("Run.parts=['a.py', 'b.py']",))
    assert axes("Run.parts=[]") == ((), ("Run.parts=[]",))
    assert axes("Run.parts=[[], ['a.py']]") == ((Axis("Run.parts", ("[]", "['a.py']")),), ())
    assert axes("AdamW.betas=[(0.9, 0.95), (0.9, 0.99)]")[0] == (Axis("AdamW.betas", ("(0.9, 0.95)", "(0.9, 0.99)")),)


def test_none_and_text_are_values_of_an_axis():
    assert axes("Loop.eval_every=[None, 5]", "Run.name=['a', 'b']")[0] == (
        Axis("Loop.eval_every", ("None", "5")),
        Axis("Run.name", ("'a'", "'b'")),
    )


def test_lists_in_a_file_are_axes_unless_the_command_line_replaces_them(tmp_path):
    path = tmp_path / "lists.gin"
    path.write_text("RATE = [0.001, 0.003]\nAdamW.learning_rate = %RATE\nRun.seed = [0, 1, 2]\n")
    assert axes(path=str(path)) == ((Axis("RATE", RATES.values), SEEDS), ())
    assert axes("Run.seed=4", path=str(path)) == ((Axis("RATE", RATES.values),), ("Run.seed=4",))


def test_a_macro_that_a_field_of_lists_takes_is_a_value(tmp_path):
    path = tmp_path / "lists.gin"
    path.write_text("FILES = ['a.py']\nRun.parts = %FILES\n")
    assert axes(path=str(path)) == ((), ())


@pytest.mark.parametrize(
    ("bindings", "swept"),
    [
        (["A=['a.py']", "B=%A", "Run.parts=%B"], []),
        (["A=[['a.py'], ['b.py']]", "B=%A", "Run.parts=%B"], ["A"]),
        (["A=[1e-3, 3e-3]", "B=%A", "AdamW.learning_rate=%B"], ["A"]),
        (["A=['b.py']", "Run.parts=[['a.py'], %A]"], ["Run.parts"]),  # an item of the list that is swept
        (["A=['a.py', 'b.py']", "Run.parts=[%A]"], ["A"]),  # an item of the value
        (["A=%B", "B=%A", "Run.parts=%A"], []),  # the reader refuses it
    ],
)
def test_a_macro_is_judged_by_where_it_is_used(bindings, swept):
    assert [axis.name for axis in axes(*bindings)[0]] == swept


def test_a_list_of_macros_that_may_be_swept_or_a_value_is_refused():
    """It was one member, with the items of both lists in one."""
    lists = ["A=['a.py']", "B=['b.py']"]
    with pytest.raises(ConfigError, match=r"Run\.parts = \[%A, %B\] may list 2 values .* or \(%A, %B\) for one value"):
        axes(*lists, "Run.parts=[%A, %B]")
    one_value = axes("A=['a.py', 'b.py']", "B=['c.py']", "Run.parts=(%A, %B)")
    assert one_value[0] == (Axis("A", ("'a.py'", "'b.py'")), Axis("B", ("'c.py'",)))
    assert axes("Run.parts=[['a.py'], ['b.py']]")[0] == (Axis("Run.parts", ("['a.py']", "['b.py']")),)
    rates = axes("A=[1e-3]", "B=[2e-3, 3e-3]", "AdamW.learning_rate=[%A, %B]")[0]  # not a field of lists
    assert [axis.name for axis in rates] == ["A", "B", "AdamW.learning_rate"]


def test_a_list_for_an_unknown_field_is_left_to_the_reader_which_names_the_nearest():
    found, fixed = axes("AdamW.learning_rat=[1e-3, 3e-3]")
    assert found == ()
    with pytest.raises(ConfigError, match="did you mean learning_rate"):
        load(None, [*FIXED, *fixed], Config, TABLES)


def test_an_empty_list_is_refused():
    with pytest.raises(ConfigError, match=r"Run\.seed = \[\] lists no value"):
        axes("Run.seed=[]")


def test_ranges_include_both_ends_and_leave_quoted_text():
    assert expand_ranges("Run.seed=[0..3]") == "Run.seed=[0, 1, 2, 3]"
    assert expand_ranges("Run.seed=[-1 .. 1, 7]") == "Run.seed=[-1, 0, 1, 7]"
    assert expand_ranges("Run.name=['0..3', \"a..b\"]") == "Run.name=['0..3', \"a..b\"]"
    assert axes("Run.seed=[0..2]")[0] == (SEEDS,)


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("Run.seed=[3..0]", "counts up"),
        (f"Run.seed=[0..{MOST_MEMBERS}]", "at most 1000 values"),
        ("Run.seed=[0..10000000000000000000000]", "at most 1000 values"),
        ("Run.seed=0..3", "in brackets"),
        ("AdamW.learning_rate=[0.1..0.5]", "whole numbers"),
        ("Run.seed=[0..]", "whole numbers"),
    ],
)
def test_what_is_no_range_is_refused(binding, message):
    with pytest.raises(ConfigError, match=message):
        axes(binding)


def test_grid_is_every_combination_with_the_last_varying_fastest():
    assert grid([RATES, Axis("Loop.lag", ("0", "1"))]) == [
        ("AdamW.learning_rate=0.001", "Loop.lag=0"),
        ("AdamW.learning_rate=0.001", "Loop.lag=1"),
        ("AdamW.learning_rate=0.003", "Loop.lag=0"),
        ("AdamW.learning_rate=0.003", "Loop.lag=1"),
    ]
    assert grid([]) == [()]
    with pytest.raises(ValueError, match="1002 members"):
        grid([Axis("Run.seed", tuple(map(str, range(501)))), Axis("Loop.lag", ("0", "1"))])


def test_pairs_join_values_of_equal_rank():
    assert pairs([RATES, Axis("Loop.lag", ("0", "1"))]) == [
        ("AdamW.learning_rate=0.001", "Loop.lag=0"),
        ("AdamW.learning_rate=0.003", "Loop.lag=1"),
    ]
    with pytest.raises(ValueError, match=r"AdamW\.learning_rate has 2, Run\.seed has 3"):
        pairs([RATES, SEEDS])


def test_a_draw_is_repeatable_without_repetition_and_of_all_combinations():
    every = set(grid([RATES, SEEDS]))
    assert set(draw([RATES, SEEDS], 6, seed=1)) == every
    drawn = draw([RATES, SEEDS], 3, seed=1)
    assert drawn == draw([RATES, SEEDS], 3, seed=1) and len(set(drawn)) == 3 and set(drawn) <= every
    assert drawn != draw([RATES, SEEDS], 3, seed=2)
    assert {draw([RATES, SEEDS], 1, seed=seed)[0] for seed in range(200)} == every
    for count in (0, 7):
        with pytest.raises(ValueError, match="the lists have 6"):
            draw([RATES, SEEDS], count, seed=0)


def test_a_draw_from_lists_with_more_combinations_than_can_be_listed():
    wide = [Axis(f"S.x{i}", tuple(map(str, range(1000)))) for i in range(20)]
    assert len(draw(wide, 5, seed=0)) == 5


def test_points_of_a_sweep_are_what_the_reader_takes():
    found, fixed = axes(*FIXED, "Length.target=[1, 2.5]", "Run.seed=[0, 1]")
    read = [load(None, [*fixed, *point], Config, TABLES) for point in grid(found)]
    assert [(c.scoring.verifiers[0].target, c.run.seed) for c in read] == [(1, 0), (1, 1), (2.5, 0), (2.5, 1)]


def test_text_of_a_value_is_read_back_as_the_value():
    assert gin_text([1e-07, None, True, "it's", (1,), {"a": [2]}]) == "[1e-07, None, True, \"it's\", (1,), {'a': [2]}]"
