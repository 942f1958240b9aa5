"""Every sampling strategy of the table passes every contract test, and the tests find what they are for."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jrl.rollout.strategies import STRATEGIES
from jrl.rollout.strategies.conformance import contract_tests_of
from jrl.rollout.strategies.contract import Strategy

OPTIONS = {
    "Partial": {"tokens": 8},
    "Refinement": {"condition": "{feedback}"},
    "RollIn": {"guide": "guide", "tokens": 5},
    "RollOut": {"guide": "guide"},
    "SelfCorrection": {"instruction": "?"},
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_it_passes_the_contract_tests(name):
    row = STRATEGIES[name]
    config = row.config(**OPTIONS.get(name, {}))
    for holds in contract_tests_of(row, config).values():
        holds(row, config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own:
    pass


class Plain(NamedTuple):
    """What draws each row by itself, and then changes the rows."""

    change: object = None
    roles: tuple[str, ...] = ()

    def __call__(self, shard):
        rows = shard.sample(shard.prompts, samples=shard.samples, completion_length=shard.completion_length)
        return rows if self.change is None else self.change(rows, shard)


def drawing(change):
    return Strategy(config=Own, drawing=lambda config, tokenizer: Plain(change))


def by_place(rows, shard):
    """Draws with numbers of the row's place in the batch, not of its prompt's uid."""
    prompts = shard.prompts.replace(uid=jnp.zeros_like(shard.prompts.uid).at[:, 0].set(jnp.arange(4, dtype=jnp.uint32)))
    return shard.sample(prompts, samples=shard.samples, completion_length=shard.completion_length)


def by_others(rows, shard):
    """Draws with a number that depends on all prompts of the batch."""
    prompts = shard.prompts.replace(uid=shard.prompts.uid + shard.prompts.uid.sum(0, keepdims=True, dtype=jnp.uint32))
    return shard.sample(prompts, samples=shard.samples, completion_length=shard.completion_length)


def same_key(rows, shard):
    return jax.tree.map(jnp.zeros_like, rows) | {"tokens": jnp.zeros_like(rows["tokens"])}


WRONG = {
    "it_is_part_of_the_compile_key": Strategy(config=Own, drawing=lambda config, tokenizer: Plain(lambda *rows: rows)),
    "rows_are_whole": drawing(lambda rows, shard: {**rows, "sample": jnp.zeros_like(rows["sample"])}),
    "rows_begin_with_their_prompt": drawing(lambda rows, shard: {**rows, "tokens": rows["tokens"].at[:, 0].set(0)}),
    "rows_of_a_prompt_begin_alike": drawing(
        lambda rows, shard: {
            **rows,
            "action_mask": rows["action_mask"] & (jnp.arange(32)[None, :] > 8 + rows["sample"][:, None]),
        }
    ),
    "a_prompt_does_not_see_the_others": drawing(by_place),
    "a_prompt_does_not_see_the_others ": drawing(by_others),
    "rows_are_whole  ": drawing(lambda rows, shard: {**rows, "turn": jnp.full_like(rows["turn"], 2)}),
    "draws_follow_the_key": drawing(same_key),
    "logprobs_are_the_policys": drawing(
        lambda rows, shard: {**rows, "sampler_logprobs": 0.5 * rows["sampler_logprobs"]}
    ),
    "host_tokens_fit": Strategy(config=Own, prefix=lambda config, visit, tokenizer, room: (97, 98)),
    "host_tokens_fit ": Strategy(config=Own, prefix=lambda config, visit, tokenizer, room: [97][:room]),
    "rows_are_whole ": Strategy(config=Own, drawing=lambda config, tokenizer: lambda shard: None),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_strategy_is_found(case):
    row, contract_test = WRONG[case], case.strip()
    with pytest.raises(AssertionError):
        contract_tests_of(row, Own())[contract_test](row, Own())


def test_plain_sampling_passes():
    row = drawing(None)
    for holds in contract_tests_of(row, Own()).values():
        holds(row, Own())
