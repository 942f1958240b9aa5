from __future__ import annotations

import datetime
import enum
import fractions
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from jrl.tasks.envs.reasoning_gym import HASH_ORDERED, ReasoningGym, fenced, open_reasoning_gym, plain


def test_question_answer_and_what_the_scorer_needs():
    source = open_reasoning_gym(ReasoningGym(dataset="chain_sum", size=10, config={"min_terms": 2, "max_terms": 2}))
    example = source[3]
    assert example.messages[0].content == example.info["entry"]["question"]
    assert example.answer == example.info["entry"]["answer"]
    assert (example.task, example.verifiers) == ("chain_sum", ("ReasoningGymScore",))
    assert example.info["dataset"] == "chain_sum"
    assert (example.info["config"]["min_terms"], example.info["config"]["max_terms"]) == (2, 2)
    assert len(source) == 10


def test_a_system_message_comes_first():
    example = open_reasoning_gym(ReasoningGym(dataset="chain_sum", size=2, system="Only the number."))[0]
    assert [m.role for m in example.messages] == ["system", "user"]


def test_seeds_and_configs_give_other_tasks_and_ids():
    configs = [
        ReasoningGym(dataset="chain_sum", size=20, seed=0),
        ReasoningGym(dataset="chain_sum", size=20, seed=1),
        ReasoningGym(dataset="chain_sum", size=20, seed=0, level=2),
    ]
    sources = [open_reasoning_gym(config) for config in configs]
    assert len({source.fingerprint for source in sources}) == 3
    assert len({source[i].id for source in sources for i in range(20)}) == 60
    # Neighboring seeds of the package share all their tasks but one.
    first, second = ({source[i].messages[0].content for i in range(20)} for source in sources[:2])
    assert first.isdisjoint(second)


def test_a_level_raises_every_attribute_of_the_curriculum():
    low, high = (open_reasoning_gym(ReasoningGym(dataset="chain_sum", size=2, level=level)) for level in (0, 2))
    easy, hard = low[0].info["config"], high[0].info["config"]
    assert hard["max_terms"] > easy["max_terms"]
    assert hard["max_digits"] > easy["max_digits"]


def test_config_overrides_the_level():
    source = open_reasoning_gym(ReasoningGym(dataset="chain_sum", size=2, level=2, config={"max_digits": 9}))
    assert source[0].info["config"]["max_digits"] == 9


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dataset": "chain_sums"}, "unknown dataset 'chain_sums'; the nearest is 'chain_sum'"),
        ({"dataset": "composite"}, "Mixture"),
        ({"config": {"max_term": 3}}, "no field 'max_term'; the nearest is 'max_terms'"),
        ({"config": {"seed": 3}}, "no field 'seed'"),
        ({"config": {"min_terms": 9, "max_terms": 2}}, "refuses chain_sum"),
        ({"level": 99}, "highest level of chain_sum is"),
        ({"level": -1}, "lowest level is 0"),
        ({"dataset": "acre", "level": 1}, "acre has no curriculum"),
        ({"size": 0}, "at least 1"),
    ],
)
def test_wrong_configs_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        open_reasoning_gym(ReasoningGym(**{"dataset": "chain_sum", "size": 5, **wrong}))


def test_global_random_state_is_left_alone_and_does_not_matter():
    random.seed(1)
    np.random.seed(1)
    mine = (random.getstate(), np.random.get_state()[1].tolist())
    texts = []
    for _ in range(2):
        # Both draw from the global generators: list_functions from random's, pool_matrix from numpy's.
        for name in ("list_functions", "pool_matrix"):
            source = open_reasoning_gym(ReasoningGym(dataset=name, size=40))
            texts.append([source[i].to_json() for i in range(40)])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == mine
        random.seed(2)
        np.random.seed(2)
        mine = (random.getstate(), np.random.get_state()[1].tolist())
    assert texts[:2] == texts[2:]


def test_the_fence_is_put_down_when_a_generator_raises():
    mine = random.getstate()
    with pytest.raises(RuntimeError), fenced("x"):
        random.random()
        raise RuntimeError
    assert random.getstate() == mine


def test_datasets_that_follow_the_hash_seed_are_refused_unless_it_is_fixed():
    code = (
        "from jrl.tasks.envs.reasoning_gym import *; open_reasoning_gym(ReasoningGym(dataset='ransom_note', size=3))[0]"
    )
    results = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        for seed in ("0", "7")
    ]
    assert results[0].returncode == 0
    assert "PYTHONHASHSEED=0" in results[1].stderr


def test_every_hash_ordered_name_is_a_dataset():
    from reasoning_gym.factory import DATASETS

    assert set(DATASETS) >= HASH_ORDERED


def test_plain_values():
    class Color(enum.Enum):
        RED = "red"

    given = {
        1: (1, 2), Color.RED: Color.RED, "a": np.array([[1.5]]), "b": np.int32(3), "c": {3, 1}, "d": np.str_("x"),
        "e": float("nan"), "f": datetime.date(2026, 1, 2), "g": fractions.Fraction(1, 4), "h": None, "i": True,
        "j": object(),
    }  # fmt: skip
    assert plain(given) == {
        "1": [1, 2], "red": "red", "a": [[1.5]], "b": 3, "c": [1, 3], "d": "x",
        "e": "nan", "f": "2026-01-02", "g": "1/4", "h": None, "i": True, "j": "<object>",
    }  # fmt: skip
    json.dumps(plain(given), allow_nan=False)


SWEEP = """
import json, sys, time
from jrl.tasks.envs import reasoning_gym as tasks
from reasoning_gym.factory import DATASETS
names = sorted(set(DATASETS) - {"composite"} - tasks.HASH_ORDERED)
found = {}
for name in reversed(names) if sys.argv[2] == "backwards" else names:
    source = tasks.open_reasoning_gym(tasks.ReasoningGym(dataset=name, size=500, seed=int(sys.argv[3])))
    until = time.monotonic() + 1.0
    for i in range(40):
        found[f"{name}/{i}"] = json.dumps(source[i].to_json(), allow_nan=False)
        if time.monotonic() > until:
            break
json.dump(found, open(sys.argv[1], "w"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_every_other_dataset_is_the_same_in_any_process(tmp_path, seed):
    """Minutes. Two processes of different hash seeds, reading the datasets in opposite orders."""
    for hash_seed, order in (("1", "forwards"), ("2", "backwards")):
        command = [sys.executable, "-c", SWEEP, str(tmp_path / hash_seed), order, str(seed)]
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": hash_seed}, check=True, capture_output=True)
    first, second = (json.loads((tmp_path / hash_seed).read_text()) for hash_seed in ("1", "2"))
    differing = {name.split("/")[0] for name in first.keys() & second.keys() if first[name] != second[name]}
    assert differing == set()
