from __future__ import annotations

import collections
import dataclasses

import pytest

from jrl.tasks.data.prompts import Data
from jrl.tasks.data.stream import open_stream
from jrl.tasks.envs import ENVS, Environment, Generated, open_source
from jrl.tasks.envs.addition import Addition
from jrl.tasks.envs.mixture import Mixture, integer_weights, mix
from jrl.tasks.example import Example, Message
from jrl.tasks.tokenizers import TOKENIZERS
from jrl.tasks.tokenizers.bytes import Bytes


def source(task: str, size: int) -> Generated:
    return Generated(
        size, lambda i: Example(f"{task}{i}", (Message("user", f"{task} {i}"),), task=task), task, {"a": 1}
    )


def test_three_to_one_is_spread_out():
    mixture = mix([source("x", 300), source("y", 100)], (3, 1))
    # Shares after places 1, 2, 3, 4 are 0.75|0.25, 1.5|0.5, 2.25|0.75, 3|1; the one furthest behind is taken.
    assert [mixture[i].task for i in range(8)] == ["x", "x", "y", "x", "x", "x", "y", "x"]
    assert len(mixture) == 400
    assert collections.Counter(mixture[i].task for i in range(400)) == {"x": 300, "y": 100}


def test_every_example_comes_once_where_the_tasks_end_together():
    mixture = mix([source("x", 30), source("y", 20), source("z", 10)], (1.5, 1.0, 0.5))
    assert len({mixture[i].id for i in range(len(mixture))}) == len(mixture) == 60


def test_a_short_task_starts_over_with_ids_of_its_own_until_the_longest_ends():
    mixture = mix([source("x", 4), source("y", 2)])
    ids = [mixture[i].id for i in range(len(mixture))]
    assert ids == ["0/x0", "1/y0", "0/x1", "1/y1", "0/x2", "1/y0/again1", "0/x3"]


@pytest.mark.parametrize("sizes", [(1, 1), (5, 1), (7, 3), (1, 9)])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (2.0, 5.0)])
def test_the_mixture_ends_with_the_first_walk_of_its_longest_task(sizes, weights):
    mixture = mix([source("x", sizes[0]), source("y", sizes[1])], weights)
    seen = [mixture[i].id for i in range(len(mixture))]
    assert len(set(seen)) == len(seen)
    every_id = {f"0/x{i}" for i in range(sizes[0])} | {f"1/y{i}" for i in range(sizes[1])}
    assert every_id <= set(seen)
    assert not every_id <= set(seen[:-1])


def test_weights_become_least_whole_numbers():
    assert integer_weights((0.5, 0.25, 0.25), 3) == [2, 1, 1]
    assert integer_weights((3.0, 9.0), 2) == [1, 3]
    assert integer_weights((1e-6, 3e-6), 2) == [1, 3]


@pytest.mark.parametrize(
    ("weights", "message"),
    [((1.0,), "1 numbers for 2"), ((1.0, 0.0), "not a positive"), ((1.0, float("nan")), "not a positive"),
     ((1.0, 1e-9), "rounder")],
)  # fmt: skip
def test_weights_without_sense_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        mix([source("x", 4), source("y", 2)], weights)


def test_counts_add_up_and_the_fingerprint_names_tasks_and_weights():
    x, y = source("x", 4), source("y", 2)
    assert mix([x, y]).counts == {"a": 2}
    prints = [mix([x, y]), mix([y, x]), mix([x, y], (1.0, 2.0)), mix([x])]
    assert len({p.fingerprint for p in prints}) == 4


def test_a_task_without_examples_is_refused():
    with pytest.raises(ValueError, match=r"Mixture\.tasks\[1\] has no examples"):
        mix([source("x", 4), source("y", 0)])


def test_tasks_of_one_name_are_noticed():
    assert mix([source("x", 4), source("x", 2), source("y", 2), source("x", 3)]).counts["task_of_same_name"] == 3
    assert "task_of_same_name" not in mix([source("x", 4), source("y", 2)]).counts


def test_a_mixture_may_hold_rows_of_the_user_and_other_mixtures():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine:
        size: int = 3

    table = {**ENVS, "Mine": Environment(Mine, lambda config: source("mine", config.size))}
    inner = Mixture(tasks=(Mine(), Addition(digits=1, size=3)))
    assert [open_source(Mixture(tasks=(inner, Mine())), table)[i].task for i in range(4)] == [
        "mine", "mine", "addition", "mine",
    ]  # fmt: skip


def test_a_config_that_is_no_row_is_refused_with_the_nearest_name():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Additions:
        pass

    with pytest.raises(ValueError, match=r"'Additions'.*'Addition'"):
        open_source(Additions(), ENVS)
    with pytest.raises(ValueError, match="empty"):
        open_source(Mixture(tasks=()), ENVS)


def test_a_mixture_goes_on_where_it_was_and_keeps_its_shares():
    tokenizer, data = TOKENIZERS["Bytes"].build(Bytes(), ()), Data(prompt_length=40, held_out_every=None)
    opened = lambda seed: open_stream(mix([source("x", 30), source("y", 10)], (3, 1)), tokenizer, data, seed=seed)
    stream, again, other = opened(1), opened(1), opened(2)
    before = stream.next(17)
    state = stream.get_state()
    visits = stream.next(63)
    again.set_state(state)
    assert again.next(63) == visits
    assert collections.Counter(v.example.task for v in before + visits) == {"x": 60, "y": 20}  # two epochs
    assert other.next(17) != before


def test_a_source_of_anything_but_examples_is_refused_by_name():
    row = Environment(Addition, lambda config: Generated(3, lambda i: {"prompt": "1+1="}, "x"))
    with pytest.raises(ValueError, match=r"^Addition is a source of examples: its first must be .*, but is a dict$"):
        open_source(Addition(), {"Addition": row})


@pytest.mark.parametrize(("opened", "lacks"), [([], "fingerprint"), (iter([]), "__len__")])
def test_what_is_no_source_is_refused_by_name(opened, lacks):
    row = Environment(Addition, lambda config: opened)
    with pytest.raises(ValueError, match=rf"^Addition must open a source, such as .*, which has no {lacks}$"):
        open_source(Addition(), {"Addition": row})
