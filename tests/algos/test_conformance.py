"""The contract tests can fail: an objective with the fault that one of them is about does not pass it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.algos.bradley_terry import BradleyTerry
from jrl.algos.conformance import CONTRACT_TESTS, contract_tests_of, default_config
from jrl.algos.contract import Needs
from jrl.algos.grpo import GRPO
from jrl.types import traced

ROW, PAIRS, ALONE = ALGOS["GRPO"], ALGOS["BradleyTerry"], ALGOS["SFT"]
KEPT = []
DRAWS = np.random.default_rng(0)
VALUED, COMPARED = ALGOS["PPO"], ALGOS["OnlineDPO"]


@dataclasses.dataclass(frozen=True)
class Untraced:
    """A configuration whose float is structure: every value of it is a program of its own."""

    clip: float = 0.2


jax.tree_util.register_dataclass(Untraced, data_fields=[], meta_fields=["clip"])


@traced
class Needy:
    scale: float


def unmasked_loss(config, tokens, state):
    ratio = jnp.exp(tokens.logprobs - tokens.old_logprobs)
    return jnp.where(tokens.mask, -ratio * tokens.advantages, 0), {}


def biased_loss(config, tokens, state):
    return jnp.where(tokens.mask, -jnp.where(tokens.mask, tokens.logprobs, 0), 0), {}


def leaky_metrics(config, tokens, state):
    loss, metrics = ROW.token_loss(config, tokens, state)
    return loss, metrics | {"logprob": jnp.where(tokens.mask, tokens.logprobs, 0)}


def row_mean_loss(config, tokens, state):
    loss, metrics = ROW.token_loss(config, tokens, state)
    return loss - loss.mean(-1, keepdims=True), metrics


def positional_advantages(config, groups, reward, state):
    by_group = reward.reshape(-1, 4)[: groups.num_groups] if reward.shape[0] % 4 == 0 else reward[:12].reshape(-1, 4)
    row = jnp.where(jnp.isnan(by_group), 0, by_group - by_group.mean(-1, keepdims=True)).reshape(-1)
    row = jnp.pad(row, (0, reward.shape[0] - row.shape[0]))
    return jnp.where(groups.action_mask, row[:, None], 0), state, {}


def spread_everywhere(config, groups, reward, state):
    advantages, state, counters = ROW.advantages(config, groups, reward, state)
    return jnp.broadcast_to(advantages.max(-1, keepdims=True), advantages.shape), state, counters


def with_rewards_of_tokens(config, groups, reward, state):
    advantages, state, counters = ROW.advantages(config, groups, reward, state)
    return advantages + jnp.where(groups.action_mask, groups.token_reward, 0), state, counters


def over_the_spread(config, groups, reward, state):
    counts = groups.valid
    centered = jnp.where(counts, reward - jnp.mean(reward, where=counts), 0)
    row = centered / jnp.sqrt(jnp.mean(centered**2, where=counts))  # with no epsilon
    return jnp.where(groups.action_mask & counts[:, None], row[:, None], 0), state, {}


def over_the_failures(config, groups, reward, state):
    row = reward / jnp.sum(1 - reward, where=groups.valid)
    return jnp.where(groups.action_mask & groups.valid[:, None], row[:, None], 0), state, {}


def trusting_advantages(config, groups, reward, state):
    return ROW.advantages(config, groups.replace(valid=jnp.ones_like(groups.valid)), reward, state)


def drifting_advantages(config, groups, reward, state):
    advantages, _, counters = ROW.advantages(config, groups, reward, state)
    return advantages, {"steps": state["steps"] + 1.0}, counters  # int32 becomes float32


def counting_padding(config, groups, reward, state):
    advantages, _, counters = ROW.advantages(config, groups, reward, state)
    return advantages, {"rows": state["rows"] + reward.shape[0]}, counters


def compared_state(config, state, metrics):
    return {"seen": state["seen"] + 1} if metrics["loss"] > 0 else state


def growing_state(config, state, metrics):
    return {"seen": jnp.concatenate([state["seen"], metrics["loss"][None]])}


def of_host(config, tokens, state):
    if isinstance(tokens.logprobs, jax.core.Tracer):
        return ROW.token_loss(config, tokens, state)
    loss, metrics = ROW.token_loss(config, tokens, state)
    return 2 * loss, metrics


def keeping_loss(config, tokens, state):
    KEPT.append(tokens.logprobs)
    return ROW.token_loss(config, tokens, state)


def noisy_loss(config, tokens, state):
    loss, metrics = ROW.token_loss(config, tokens, state)
    return loss + DRAWS.normal(), metrics


def sequence_row(difference_of):
    """Returns a row of pairs whose loss is softplus(-difference) on the preferred sequence."""

    def loss(config, sequences, state):
        preferred = sequences.mask & (sequences.label > 0.5)
        difference = difference_of(sequences)
        return jnp.where(preferred, jax.nn.softplus(-difference), 0), {}

    return PAIRS._replace(sequence_loss=loss)


def masked_at_the_end(sequences):
    pairs = sequences.score[:, :-1].reshape(sequences.score.shape[0], -1, 2)
    return jnp.pad((pairs[..., :1] - pairs[..., 1:] + 0 * pairs).reshape(pairs.shape[0], -1), ((0, 0), (0, 1)))


def next_place(sequences):
    score = jnp.where(sequences.mask, sequences.score, 0)
    return score - jnp.roll(score, -1, axis=-1)


def row_mean(sequences):
    score = jnp.where(sequences.mask, sequences.score, 0)
    return score - score.mean(-1, keepdims=True)


def absolute_score(sequences):
    return jnp.where(sequences.mask, sequences.score * (sequences.unit + 1), 0)


def leaky_sequence_metrics(config, sequences, state):
    loss, metrics = PAIRS.sequence_loss(config, sequences, state)
    return loss, metrics | {"score": jnp.where(sequences.mask, sequences.score, 0)}


def summed_sequence_metrics(config, sequences, state):
    loss, metrics = PAIRS.sequence_loss(config, sequences, state)
    return loss, metrics | {"all": loss.sum()}


def unmasked_value_loss(config, tokens, state):
    return jnp.square(tokens.values - tokens.returns), {}


def loss_with_a_value_metric(config, tokens, state):
    loss, metrics = VALUED.token_loss(config, tokens, state)
    return loss, {"value/mean": jnp.zeros_like(loss), **metrics}


def only_preferred(config, groups, reward):
    found = COMPARED.pairs(config, groups, reward)
    return found._replace(label=jnp.ones_like(found.label))


def whole_groups(config, groups, reward):
    return COMPARED.pairs(config, groups, reward)._replace(unit=groups.group)


def sum_of_mask(config, mask, *rest):
    return mask.sum().astype(jnp.float32)


steps = lambda config: {"steps": jnp.zeros((), jnp.int32)}
rows = lambda config: {"rows": jnp.zeros((), jnp.int32)}
seen = lambda config: {"seen": jnp.zeros(1)}
nothing = lambda config: Needs()
no_logprobs = lambda config: Needs(logprobs=False)
two_weights = lambda config: Needs(logprobs=False, score=True, score_outputs=3, score_weights=(1.0, 0.0))

FAULTS = [
    ("its_functions_go_together", ROW._replace(token_loss=None), GRPO()),
    ("its_functions_go_together", ALONE._replace(token_loss=None), None),
    ("its_functions_go_together", ALONE._replace(unit_size=2), None),
    ("its_functions_go_together", ALONE._replace(needs=no_logprobs), None),
    ("its_functions_go_together", ROW._replace(needs=lambda config: Needs(values=True)), GRPO()),
    ("its_functions_go_together", ROW._replace(needs=lambda config: Needs(row_values=True)), GRPO()),
    ("its_functions_go_together", PAIRS._replace(needs=two_weights), BradleyTerry()),
    ("its_functions_go_together", ALONE._replace(returns=lambda config, groups, reward: reward), None),
    ("jit_changes_nothing", ROW._replace(token_loss=of_host), GRPO()),
    (
        "another_float_compiles_nothing",
        ROW._replace(config=Untraced, token_loss=biased_loss, needs=nothing),
        Untraced(),
    ),
    ("the_state_keeps_its_form", ROW._replace(advantages=drifting_advantages, init_state=steps), GRPO()),
    ("the_state_keeps_its_form", ROW._replace(next_state=growing_state, init_state=seen), GRPO()),
    ("the_state_keeps_its_form", ALONE._replace(next_state=growing_state, init_state=seen), None),
    ("the_state_keeps_its_form", ALONE._replace(init_state=lambda config: {"weight": 0.5}), None),
    ("zero_advantage_gives_zero_policy_gradient", ROW._replace(token_loss=biased_loss), GRPO()),
    ("rewards_without_a_signal_give_finite_numbers", ROW._replace(advantages=over_the_spread), GRPO()),
    ("rewards_without_a_signal_give_finite_numbers", ROW._replace(advantages=over_the_failures), GRPO()),
    ("masked_tokens_do_not_matter", ROW._replace(token_loss=unmasked_loss), GRPO()),
    ("masked_tokens_do_not_matter", ALONE._replace(token_loss=lambda c, tokens, s: (-tokens.logprobs, {})), None),
    ("metrics_of_tokens_carry_no_gradient", ROW._replace(token_loss=leaky_metrics), GRPO()),
    ("packing_tokens_does_not_matter", ROW._replace(token_loss=row_mean_loss), GRPO()),
    ("row_order_does_not_matter", ROW._replace(advantages=positional_advantages), GRPO()),
    (
        "pad_columns_do_not_matter",
        ROW._replace(denominator=lambda config, mask, rows, width: jnp.float32(mask.shape[-1])),
        GRPO(),
    ),
    ("rows_without_a_verdict_or_a_token_do_not_matter", ROW._replace(advantages=trusting_advantages), GRPO()),
    (
        "rows_without_a_verdict_or_a_token_do_not_matter",
        ROW._replace(advantages=counting_padding, init_state=rows),
        GRPO(),
    ),
    ("only_sampled_tokens_have_advantages", ROW._replace(advantages=spread_everywhere), GRPO()),
    (
        "rewards_of_tokens_matter_where_they_are_asked_for",
        ROW._replace(needs=lambda c: Needs(token_rewards=True)),
        GRPO(),
    ),
    ("rewards_of_tokens_matter_where_they_are_asked_for", ROW._replace(advantages=with_rewards_of_tokens), GRPO()),
    ("a_step_without_tokens_has_loss_zero", ROW._replace(denominator=sum_of_mask), GRPO()),
    ("masked_sequences_do_not_matter", sequence_row(masked_at_the_end), BradleyTerry()),
    ("metrics_of_sequences_carry_no_gradient", PAIRS._replace(sequence_loss=leaky_sequence_metrics), BradleyTerry()),
    ("metrics_of_sequences_carry_no_gradient", PAIRS._replace(sequence_loss=summed_sequence_metrics), BradleyTerry()),
    ("places_of_sequences_do_not_matter", sequence_row(next_place), BradleyTerry()),
    ("packing_sequences_does_not_matter", sequence_row(row_mean), BradleyTerry()),
    ("a_step_without_sequences_has_loss_zero", PAIRS._replace(sequence_denominator=sum_of_mask), BradleyTerry()),
    ("a_tie_has_one_loss", sequence_row(absolute_score), BradleyTerry()),
    ("a_critics_loss_is_of_values_alone", VALUED._replace(value_loss=unmasked_value_loss), None),
    ("a_critics_loss_is_of_values_alone", VALUED._replace(token_loss=loss_with_a_value_metric), None),
    ("pairs_are_of_rows_that_count", COMPARED._replace(pairs=only_preferred), None),
    ("pairs_are_of_rows_that_count", COMPARED._replace(pairs=whole_groups), None),
]


@pytest.mark.parametrize("contract_test, objective, config", FAULTS)
def test_a_fault_fails_its_contract_test(contract_test, objective, config):
    with pytest.raises(AssertionError):
        CONTRACT_TESTS[contract_test](objective, objective.config() if config is None else config)


def test_a_function_that_gives_other_numbers_in_every_call_is_called_that():
    with pytest.raises(AssertionError, match="a second call with the same arguments gives another token_loss"):
        CONTRACT_TESTS["jit_changes_nothing"](ROW._replace(token_loss=noisy_loss), GRPO())


def test_a_function_that_keeps_an_array_of_a_compiled_call_is_called_that():
    with pytest.raises(AssertionError, match="keeps an array of a compiled call outside itself"):
        CONTRACT_TESTS["jit_changes_nothing"](ROW._replace(token_loss=keeping_loss), GRPO())
    KEPT.clear()


def test_the_state_after_a_step_is_compiled_too():
    row = ROW._replace(next_state=compared_state, init_state=seen)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        CONTRACT_TESTS["jit_changes_nothing"](row, GRPO())


def test_every_contract_test_is_failed_by_a_fault():
    assert {name for name, *_ in FAULTS} == set(CONTRACT_TESTS)


def test_a_row_makes_the_contract_tests_of_its_functions():
    of_every_row = {
        "its_functions_go_together",
        "jit_changes_nothing",
        "another_float_compiles_nothing",
        "the_state_keeps_its_form",
    }
    of_credit = ("verdict", "sampled", "asked_for", "signal")
    of_tokens = {name for name in CONTRACT_TESTS if "token" in name and not any(word in name for word in of_credit)}
    of_sequences = {name for name in CONTRACT_TESTS if "sequence" in name}
    assert set(contract_tests_of(ALONE)) == of_every_row | of_tokens
    assert set(contract_tests_of(PAIRS)) == of_every_row | of_sequences | {"a_tie_has_one_loss"}
    assert set(contract_tests_of(PAIRS._replace(unit_size=1))) == of_every_row | of_sequences
    of_values, of_compared = {"a_critics_loss_is_of_values_alone"}, {"pairs_are_of_rows_that_count"}
    common = set(CONTRACT_TESTS) - of_values - of_compared
    assert set(contract_tests_of(ROW)) == common - of_sequences - {"a_tie_has_one_loss"}
    assert set(contract_tests_of(ROW._replace(sequence_loss=PAIRS.sequence_loss, unit_size=2))) == common
    assert set(contract_tests_of(VALUED)) == set(contract_tests_of(ROW)) | of_values
    assert set(contract_tests_of(COMPARED)) == set(contract_tests_of(PAIRS)) | of_compared


def test_a_config_without_defaults_is_named():
    with pytest.raises(TypeError, match="Needy has fields without a default, scale"):
        default_config(ROW._replace(config=Needy))
