"""Every curriculum of the table passes every contract test, and the tests find what they are for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jrl.tasks.data.conformance import CONTRACT_TESTS
from jrl.tasks.data.curricula import CURRICULA, Curriculum, OutcomeMemory


@pytest.mark.parametrize("contract_test", CONTRACT_TESTS)
@pytest.mark.parametrize("name", CURRICULA)
def test_it_passes_the_contract_test(name, contract_test):
    CONTRACT_TESTS[contract_test](CURRICULA[name], CURRICULA[name].config())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(OutcomeMemory):
    pass


def uniform(config, table):
    return np.ones(len(table.rate))


def forgetting(config, table):
    table.rate[:] = 0
    return uniform(config, table)


WRONG = {
    "one number": ("weights_are_of_the_examples", Curriculum(Own, lambda config, table: np.ones(1))),
    "a NaN": ("weights_are_of_the_examples", Curriculum(Own, lambda config, table: table.history[:, 0])),
    "below 0": ("weights_are_of_the_examples", Curriculum(Own, lambda config, table: 0.5 - table.rate)),
    "nothing new": ("weights_are_of_the_examples", Curriculum(Own, lambda config, table: table.judged)),
    "it writes": ("tables_stay_as_they_are", Curriculum(Own, forgetting)),
    "a draw": ("tables_stay_as_they_are", Curriculum(Own, lambda config, table: np.random.rand(len(table.rate)))),
    "others": ("limit_chooses_from_the_order", Curriculum(Own, uniform, limit=lambda c, t, order: order + 1)),
    "reversed": ("limit_chooses_from_the_order", Curriculum(Own, uniform, limit=lambda c, t, order: order[::-1])),
    "wider": (
        "after_keeps_the_table",
        Curriculum(Own, uniform, after=lambda config, table: table._replace(rate=table.rate.astype(np.float64))),
    ),
    "a list": ("limit_chooses_from_the_order", Curriculum(Own, uniform, limit=lambda c, t, order: order.tolist())),
    "sorted": (
        "limit_chooses_from_the_order",
        Curriculum(Own, uniform, limit=lambda c, t, order: order.sort() or order),
    ),
    "it ranks": (
        "comparing_is_declared",
        Curriculum(Own, lambda config, table: 1e-6 * (table.rate <= np.median(table.rate)).astype(float)),
    ),
    "the least visited": (
        "comparing_is_declared",
        Curriculum(Own, lambda config, table: (table.judged == table.judged.min()).astype(float)),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_curriculum_is_found(case):
    contract_test, row = WRONG[case]
    with pytest.raises(ValueError if case == "it writes" else AssertionError):  # NumPy stops what writes
        CONTRACT_TESTS[contract_test](row, Own())
