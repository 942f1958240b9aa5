"""Every row of VERIFIERS passes every contract test, and a row that breaks its contract fails one."""

from __future__ import annotations

import dataclasses

import pytest

from jrl.tasks.example import Example, Message
from jrl.tasks.verdict import Status
from jrl.tasks.verifiers import VERIFIERS, VerifierSpec, spec_of
from jrl.tasks.verifiers.conformance import CONTRACT_TESTS
from jrl.tasks.verifiers.source import PartSource

REQUIRED = {"Regex": {"pattern": "(a|b)*c"}}
TASK = {"dataset": "chain_sum", "entry": {"question": "2 + 2?", "answer": "4", "metadata": {}}, "tests": [[0, 4]],
        "steps": ["4"]}  # fmt: skip
EXAMPLE = Example(id="e", messages=(Message("user", "2 + 2?"),), answer="4", info=TASK)
BREAKS = PartSource(
    "breaks.py",
    """
import os
calls = []
def counts(completion, example): calls.append(1); return float(len(calls))
def depends_on_the_process(completion, example): return float(os.getpid())
def raises_on_empty(completion, example): return 1.0 / len(completion.split())
VERIFIERS = {f.__name__: f for f in (counts, depends_on_the_process, raises_on_empty)}
""",
)


@pytest.mark.parametrize("contract_test", CONTRACT_TESTS)
@pytest.mark.parametrize("name", VERIFIERS)
def test_a_row_with_its_defaults_passes_the_contract_test(name, contract_test):
    CONTRACT_TESTS[contract_test](spec_of(VERIFIERS[name].config(**REQUIRED.get(name, {}))), (), EXAMPLE)


@pytest.mark.parametrize("text", ["", " \n\t"])
@pytest.mark.parametrize("name", VERIFIERS)
def test_an_empty_completion_earns_nothing(name, text):
    verdict = VERIFIERS[name].score(VERIFIERS[name].config(**REQUIRED.get(name, {})), text, EXAMPLE)
    assert verdict.status in (Status.WRONG, Status.UNPARSABLE)
    assert verdict.reward <= 0.0


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_config_is_frozen_and_has_a_weight_of_one(name):
    config = VERIFIERS[name].config(**REQUIRED.get(name, {}))
    assert type(config).__name__ == name
    assert config.weight == 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.weight = 2.0


@pytest.mark.parametrize(
    ("name", "contract_test"),
    [
        ("counts", "says the same of the same"),
        ("depends_on_the_process", "says the same of the same"),
        ("raises_on_empty", "judges any text"),
    ],
)
def test_a_row_that_breaks_its_contract_is_caught(name, contract_test):
    with pytest.raises(AssertionError, match=name):
        CONTRACT_TESTS[contract_test](VerifierSpec(name, {}), (BREAKS,), EXAMPLE)
