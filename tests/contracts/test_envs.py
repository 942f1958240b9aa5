"""What holds for every row of the environment table."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from jrl.tasks.envs import ENVS, Generated, open_source
from jrl.tasks.envs.check import check_source
from jrl.tasks.example import Example, Message
from jrl.tasks.verifiers import VERIFIERS

ROWS = [{"prompt": f"Say {i}.", "answer": str(i), "verifiers": ["Exact"]} for i in range(30)]
OF_A_DATA_SET = [
    {"messages": [{"role": "user", "content": row["prompt"]}], "ground_truth": row["answer"], "dataset": "said"}
    for row in ROWS
]


def addition_of(size):
    return ENVS["Addition"].config(size=size, seed=1)


@pytest.fixture(params=sorted(ENVS))
def config(request, tmp_path):
    """A small config of each row. A new row needs one here."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data_set = tmp_path / "data_set.jsonl"
    data_set.write_text("".join(json.dumps(row) + "\n" for row in OF_A_DATA_SET))
    addition = ENVS["Addition"].config()
    sums = ENVS["ReasoningGym"].config(dataset="chain_sum", size=50)
    samples = {
        "Addition": addition,
        "Cleaned": ENVS["Cleaned"].config(task=ENVS["Addition"].config(size=40), evaluation=(addition_of(5),)),
        "Dataset": ENVS["Dataset"].config(path=str(data_set), layout="rlvr", verifiers=("Exact",)),
        "Filtered": ENVS["Filtered"].config(task=ENVS["Addition"].config(size=40), evaluation=(addition_of(5),)),
        "Jsonl": ENVS["Jsonl"].config(path=str(path)),
        "Mixture": ENVS["Mixture"].config(tasks=(addition, sums), weights=(2.0, 1.0)),
        "ReasoningGym": sums,
    }
    return samples[request.param]


def mark(completion: str, example: Example) -> float | None:
    (name,) = example.verifiers
    row = VERIFIERS[name]
    return row.score(row.config(), completion, example).reward


def test_a_row_passes_its_contract_tests_and_its_answers_are_worth_one(config):
    assert check_source(lambda: open_source(config, ENVS), 20, mark) == []


def test_a_wrong_answer_is_not_worth_one(config):
    source = open_source(config, ENVS)
    assert all(mark(f"{source[i].answer}x", source[i]) == 0.0 for i in range(10))


def test_opening_and_reading_imports_no_jax():
    code = (
        "import sys, jrl.tasks.tokenizers, jrl.tasks.tokenizers.pieces, jrl.tasks.envs, jrl.tasks.envs.check\n"
        "from jrl.tasks.envs import ENVS\n"
        "assert 'reasoning_gym' not in sys.modules, 'imported before it is used'\n"
        "row = ENVS['ReasoningGym']\n"
        "row.open(row.config(dataset='chain_sum', size=3))[0]\n"
        "ENVS['Addition'].open(ENVS['Addition'].config())[0]\n"
        "assert not {'jax', 'jaxlib', 'grain'} & set(sys.modules), 'jax'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def source_of(make, size=5) -> Generated:
    return Generated(size, make, "x")


def good(i: int) -> Example:
    return Example(f"e{i}", (Message("user", "q"),), answer="1")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda calls, i: Example(f"e{next(calls)}", (Message("user", "q"),)), "read in another order"),
        (lambda calls, i: Example("e", (Message("user", "q"),)), "same id"),
        (lambda calls, i: {"prompt": "q"}, "example 0 is a dict and must be a jrl.tasks.example.Example"),
        (lambda calls, i: Example(f"e{i}", ()), "no messages"),
        (lambda calls, i: Example(f"e{i}", (Message("robot", "q"),)), "role"),
        (lambda calls, i: Example(f"e{i}", (Message("user", "q"),), info={"x": float("inf")}), "JSON"),
        (lambda calls, i: Example(f"e{i}", (Message("user", "q"),), info={"x": (1, 2)}), "after JSON"),
    ],
)
def test_the_check_names_what_breaks_the_contract(make, message):
    calls = iter(range(1000))
    assert any(message in problem for problem in check_source(lambda: source_of(lambda i: make(calls, i))))


def test_the_check_says_a_rule_once():
    source = lambda: source_of(lambda i: dataclasses.replace(good(i // 3), info={"x": (1, 2)}))
    assert check_source(source, 5, lambda *_: 0.5) == [
        "examples 0 and 1 have the same id 'e0' (the same for 2 more examples)",
        "example 0 is not the same after JSON and back (the same for 4 more examples)",
        "example 0: its own answer '1' has the reward 0.5, not 1 (the same for 4 more examples)",
    ]


def test_the_check_finds_unbounded_sources_and_worthless_answers():
    class Endless:
        fingerprint, counts = "x", {}

        def __len__(self):
            return 3

        def __getitem__(self, i):
            return good(i)

    assert any("index -1" in problem for problem in check_source(Endless))
    assert any("index 3" in problem for problem in check_source(Endless))
    assert any("has the reward 0.5" in problem for problem in check_source(lambda: source_of(good), 5, lambda *_: 0.5))
    assert check_source(lambda: source_of(good), 5, lambda *_: 1.0) == []
    assert check_source(lambda: source_of(good, 0)) == ["it has no examples"]
