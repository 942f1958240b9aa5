"""Faults that are planted in formulas, and the list of those that make no difference."""

from __future__ import annotations

import json

import pytest

from benchmarks import mutants
from jrl.ops import gae, reduce


def faulty(function, change):
    changes = [what for what, _ in mutants.parsed(function)[1]]
    return mutants.mutant(function, changes.index(change))


def test_a_fault_is_what_it_says():
    code = faulty(
        reduce.masked_mean,
        "masked_sum(x, mask) / jnp.maximum(jnp.sum(mask), 1) -> masked_sum(x, mask) * jnp.maximum(jnp.sum(mask), 1)",
    )
    assert code.co_name == "masked_mean"
    assert code.co_code != reduce.masked_mean.__code__.co_code


def test_faults_of_the_same_text_have_places():
    def twice(x):
        return x + 1 if x > 0 else x * 2 + 1

    changes = [what for what, _ in mutants.parsed(twice)[1]]
    assert {"1 -> 2", "1 -> 2, place 2", "x > 0 -> x < 0", "x * 2 -> x / 2"} <= set(changes)
    assert len(changes) == len(set(changes))


def test_the_body_that_a_function_hands_to_a_scan_has_faults_too():
    (body,) = mutants.bodies_of(gae.gae)
    faults = {what: owner for what, owner, _ in mutants.faults_of(gae.gae)}
    assert body is gae._token_before
    assert faults["_token_before: reward + pending_reward -> reward - pending_reward"] is body
    assert faults["discount * gae_lambda -> discount / gae_lambda"] is gae.gae


def test_every_equivalent_fault_is_possible_and_has_a_reason():
    assert mutants.equivalent_mutants()


@pytest.mark.parametrize(
    "entry, message",
    [
        ({"function": "jrl.ops.reduce:nothing"}, "no function of the parts list"),
        ({"change": "1 -> 3"}, "has no place for '1 -> 3'"),
        ({"reason": " "}, "say why"),
    ],
)
def test_a_stale_entry_is_refused(tmp_path, entry, message):
    row = json.loads(mutants.EQUIVALENT.read_text())[0] | entry
    path = tmp_path / "equivalent.json"
    path.write_text(json.dumps([row]))
    with pytest.raises(ValueError, match=message):
        mutants.equivalent_mutants(path)
