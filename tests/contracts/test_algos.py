"""Every row of ALGOS, with its defaults and with every option on, passes the contract tests of its kind and learns a
toy task."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from documented import write_part

from jrl.algos import ALGOS, conformance
from jrl.algos.common import TruncatedImportance
from jrl.algos.conformance import CONTRACT_TESTS, contract_tests_of, default_config
from jrl.algos.contract import Facts, Groups, Sequences, Tokens, shaped_reward
from jrl.algos.results import checked
from jrl.device.sharding import MeshShape, make_mesh
from jrl.ops import likelihood
from jrl.ops.divergence import DIVERGENCES
from jrl.plugins import load_parts

FACTS = Facts(
    samples=8, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=6, attempts=2,
    branches=(4, 3),
)  # fmt: skip

OPTIONS = {
    "dual_clip": 3.0,
    "kl": 0.1,
    "overlong_buffer": 2,
    "overlong_filter": True,
    "value_clip": 0.1,
    "entropy_bonus": 0.01,
    "kl_in_reward": 0.05,
    "reward_clip": 0.5,
    "whiten_rewards": True,
    "importance": TruncatedImportance(cap=1.5, level="sequence"),
    "margin": 0.5,
    "center": 0.01,
}

# Options that a row's check refuses.
REFUSED = {
    "ALoL": {"kl"},  # beside its clip
    "VTracePPO": {"importance"},
    "DreamerPPO": {"value_clip"},
}

# What an answer of two letters asks for: VAPO's own lambda is 0 for it, and no values are learned here; of nine answers
# a short history tells enough.
SHORT = {"VAPO": {"gae_lambda": 1.0}, "Curiosity": {"history": 256, "width": 64}}

# The mean reward that a row is content with, where that is not all of it: five right of eight hold one in any four.
SATISFIED = {"PassAtK": 0.6}

AT_ONCE = 8  # rows in one program

SAMPLED = [name for name, objective in ALGOS.items() if objective.advantages is not None]
STORED = [name for name in ALGOS if name not in SAMPLED]
WITH_IMPORTANCE = [name for name in SAMPLED if "importance" in ALGOS[name].config.__dataclass_fields__]
OF_STORED_TOKENS = [name for name in STORED if ALGOS[name].token_loss is not None]
OF_PAIRS = [name for name, objective in ALGOS.items() if objective.sequence_loss and objective.unit_size == 2]


def everything_on(objective):
    """Returns a configuration with each optional term switched on. The entropy is an input of its own here."""
    names = {field.name for field in dataclasses.fields(objective.config)}
    names -= REFUSED.get(objective.config.__name__, set())
    return objective.config(**{name: value for name, value in OPTIONS.items() if name in names})


def given_tokens(objective, config):
    """Returns the sample tokens, with the bins of the values where the objective reads them."""
    needs, tokens = objective.needs(config), conformance.sample_tokens()
    if needs.value_bins is None:
        return tokens
    return tokens.replace(value_logits=jnp.zeros((*tokens.mask.shape, needs.value_outputs)))


WITH_OPTIONS = [name for name, row in ALGOS.items() if everything_on(row) != default_config(row)]
CASES = [(name, contract_test) for name, objective in ALGOS.items() for contract_test in contract_tests_of(objective)]


def among_neighbors(name, results, names=tuple(ALGOS)):
    """Returns results((names of rows))[name]: of a stretch of the table, whose rows share much of one program, or of
    the row alone where another of them fails."""
    start = names.index(name) // AT_ONCE * AT_ONCE
    try:
        return results(tuple(names[start : start + AT_ONCE]))[name]
    except Exception:
        return results((name,))[name]


@functools.cache
def compiled(names):
    return conformance.compiled({name: (ALGOS[name], default_config(ALGOS[name])) for name in names})


@pytest.mark.parametrize("name, contract_test", CASES)
def test_defaults_pass_the_contract_test(name, contract_test):
    objective, config = checked(ALGOS[name]), default_config(ALGOS[name])
    if contract_test == "jit_changes_nothing":
        conformance.equals_plain(objective, config, among_neighbors(name, compiled))
    else:
        CONTRACT_TESTS[contract_test](objective, config)


# With all options `test_rows_may_be_sharded_over_data` compares what is compiled with what is not.
@pytest.mark.parametrize(
    "name, contract_test", [case for case in CASES if case[0] in WITH_OPTIONS and case[1] != "jit_changes_nothing"]
)
def test_all_options_together_pass_the_contract_test(name, contract_test):
    CONTRACT_TESTS[contract_test](checked(ALGOS[name]), everything_on(ALGOS[name]))


@pytest.fixture(scope="module", params=["An objective", "An objective that remembers every prompt"])
def documented(request, tmp_path_factory):
    """The row that docs/bring-your-own.md shows under a heading."""
    loaded = load_parts([write_part(request.param, tmp_path_factory.mktemp("documented"))])
    (name,) = loaded.added["algos"]
    return loaded.tables["algos"][name]


@pytest.mark.parametrize("contract_test", contract_tests_of(ALGOS["GRPO"]))
def test_the_objective_of_the_documentation_passes_the_contract_test(documented, contract_test):
    assert set(contract_tests_of(documented)) == set(contract_tests_of(ALGOS["GRPO"]))
    CONTRACT_TESTS[contract_test](documented, default_config(documented))


@pytest.mark.parametrize("name", ALGOS)
def test_the_name_of_a_row_is_the_name_of_its_config(name):
    assert ALGOS[name].config.__name__ == name


@pytest.mark.parametrize("name", ALGOS)
def test_defaults_and_all_options_pass_the_check(name):
    objective = ALGOS[name]
    objective.check(default_config(objective), FACTS)
    objective.check(everything_on(objective), FACTS)


@pytest.mark.parametrize("name", SAMPLED)
def test_greedy_sampling_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} cannot learn from greedy sampling"):
        ALGOS[name].check(default_config(ALGOS[name]), FACTS._replace(greedy=True))


@pytest.mark.parametrize("cap", [0.0, -1.0])
@pytest.mark.parametrize("name", WITH_IMPORTANCE)
def test_an_importance_cap_of_zero_or_less_is_refused(name, cap):
    with pytest.raises(ValueError, match=r"TruncatedImportance\.cap"):
        ALGOS[name].check(ALGOS[name].config(importance=TruncatedImportance(cap=cap)), FACTS)


@pytest.mark.parametrize("name", WITH_IMPORTANCE)
def test_an_unknown_importance_level_is_refused(name):
    with pytest.raises(ValueError, match=r"TruncatedImportance\.level = 'row'"):
        ALGOS[name].check(ALGOS[name].config(importance=TruncatedImportance(level="row")), FACTS)


@pytest.mark.parametrize("name", WITH_IMPORTANCE)
def test_importance_weights_with_a_cap_let_the_lag_be_any(name):
    bounded = ALGOS[name].corrects_staleness
    assert bounded(ALGOS[name].config(importance=TruncatedImportance()))
    # M2PO drops the tokens that are worst, whatever their weights.
    assert bounded(ALGOS[name].config(importance=None)) == (name in ("M2PO", "VTracePPO"))


@pytest.mark.parametrize("name", SAMPLED)
def test_a_negative_entropy_bonus_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}.entropy_bonus"):
        ALGOS[name].check(ALGOS[name].config(entropy_bonus=-0.1), FACTS)


@pytest.mark.parametrize("name", SAMPLED)
def test_the_entropy_gradient_is_asked_for_where_there_is_a_bonus(name):
    objective = ALGOS[name]
    default = default_config(objective)
    assert objective.needs(default).entropy_gradient == (default.entropy_bonus is not None)
    assert objective.needs(objective.config(entropy_bonus=0.01)).entropy_gradient


@pytest.mark.parametrize("name", STORED)
def test_a_row_for_stored_data_needs_nothing_that_only_samples_have(name):
    objective = ALGOS[name]
    assert objective.returns is None
    assert objective.refill(everything_on(objective)) is None


def divergence_of(needs, logprobs, teacher, rows):
    """Returns what an objective reads of a teacher's distribution, [rows, 2], the same in every row; None: nothing."""
    if needs.divergence is None:
        return None
    return jnp.tile(DIVERGENCES[needs.divergence](logprobs, teacher), (rows, 1))


WORD, LETTERS = np.array([2, 0]), 3
ANSWERS, ROUNDS = 64, 60  # rows of an update, in 8 groups, and updates
# A teacher that says the word: log-softmax of 6 at its letters and 0 at the two others.
TEACHER = (6 * np.eye(LETTERS)[WORD] - np.log(np.exp(6) + 2)).astype(np.float32)


def of_two_letters(name):
    return dataclasses.replace(default_config(ALGOS[name]), **SHORT.get(name, {}))


def learn_from_answers(name, logits, before, tokens, state):
    """Returns (gradient of the row's loss by its logits [2, 3], the state after the update). before: log-softmax of the
    logits; tokens: [64, 2], drawn from it."""
    objective, config = ALGOS[name], of_two_letters(name)
    needs, rows, zeros = objective.needs(config), ANSWERS, np.zeros((ANSWERS, 2), np.float32)
    ones, of_letter = np.ones((rows, 2), bool), np.arange(2)[None, :]
    teacher, uniform = jnp.asarray(TEACHER), np.full((rows, 2), -np.log(3.0), np.float32)
    reward = jnp.all(tokens == WORD[None, :], axis=-1).astype(jnp.float32)
    chosen = before[of_letter, tokens]
    groups = Groups(
        reward=reward,
        outcome=reward,
        valid=ones[:, 0],
        group=np.arange(rows, dtype=np.int32) % 8,
        action_mask=ones,
        finish=np.zeros(rows, np.int8),
        num_groups=8,
        max_completion=2,
        values=zeros,
        components={"first": reward, "second": reward, "first_attempt": zeros[:, 0]},
        turn=np.ones((rows, 2), np.int8),
        old_logprobs=chosen,
        behaviour_logprobs=chosen,
        ref_logprobs=uniform,
        teacher_logprobs=teacher[of_letter, tokens],
        old_entropy=jnp.tile(-(jnp.exp(before) * before).sum(-1), (rows, 1)),
        old_sum_squared=jnp.tile(jnp.exp(2 * before).sum(-1), (rows, 1)),
        sample=np.arange(rows, dtype=np.int32) // 8,
        tokens=tokens,
        task=np.zeros(rows, np.int32),
    )
    groups = jax.tree.map(jnp.asarray, groups)
    shaped = shaped_reward(objective, config, groups, state)
    advantages, following, _ = objective.advantages(config, groups, shaped, state)
    returns = zeros if objective.returns is None else objective.returns(config, groups, shaped)
    mask = ones & objective.keep(config, groups)[:, None]
    mask = mask if objective.keep_tokens is None else mask & objective.keep_tokens(config, groups)
    given = Tokens(
        logprobs=None,
        old_logprobs=chosen,
        behaviour_logprobs=chosen,
        ref_logprobs=uniform if needs.reference else None,
        entropy=zeros,
        advantages=advantages,
        mask=mask,
        segment=np.zeros((rows, 2), np.int32),
        num_segments=1,
        values=zeros,
        value_logits=None if needs.value_bins is None else np.zeros((rows, 2, needs.value_outputs), np.float32),
        old_values=zeros,
        returns=returns,
        selected=None if objective.select is None else objective.select(config, groups, advantages),
        positive_weights=None
        if objective.positive is None
        else likelihood.positive_weights(objective.positive(config, groups), mask),
        staleness=np.zeros((rows, 2), np.int32),
    )
    given = jax.tree.map(jnp.asarray, given)

    def loss(logits):
        every = jax.nn.log_softmax(logits)
        batch = given.replace(logprobs=every[of_letter, tokens], divergence=divergence_of(needs, every, teacher, rows))
        per_token, metrics = objective.token_loss(config, batch, state)
        weighted = jnp.where(mask, objective.weights(config, mask, 2) * per_token, 0)
        means = {key: jnp.where(mask, x, 0).sum() / jnp.maximum(mask.sum(), 1) for key, x in metrics.items()}
        means |= {"loss/rows": mask.any(axis=1).sum(), "loss/tokens": mask.sum(), "policy/entropy": 0.0}
        return weighted.sum() / objective.denominator(config, mask, rows, 2), means

    gradient, means = jax.grad(loss, has_aux=True)(logits)
    return gradient, objective.next_state(config, following, means)


@functools.cache
def rewards_of_a_word(names):
    """Returns {name: mean reward [60] of every update}; the rows, each with logits of its own, are one program."""
    noise = np.random.default_rng(7).gumbel(size=(ROUNDS, ANSWERS, 2, LETTERS)).astype(np.float32)
    optimizer = optax.adam(0.1)

    @jax.jit
    def update(logits, opt_state, states, noise):
        before = jax.nn.log_softmax(logits)
        tokens = jnp.argmax(before[:, None] + noise[None], axis=-1).astype(jnp.int32)
        given = {name: (logits[i], before[i], tokens[i], states[name]) for i, name in enumerate(names)}
        taught = {name: learn_from_answers(name, *arrays) for name, arrays in given.items()}
        gradient = jnp.stack([taught[name][0] for name in names])
        updates, opt_state = optimizer.update(gradient, opt_state)
        reward = jnp.all(tokens == WORD[None, None, :], axis=-1).mean(-1)
        states = {name: state for name, (_, state) in taught.items()}
        return optax.apply_updates(logits, updates), opt_state, states, reward

    logits = jnp.zeros((len(names), 2, LETTERS))
    states = {name: ALGOS[name].init_state(of_two_letters(name)) for name in names}
    opt_state, rewards = optimizer.init(logits), []
    for of_round in noise:
        logits, opt_state, states, reward = update(logits, opt_state, states, of_round)
        rewards.append(reward)
    return dict(zip(names, np.asarray(rewards).T, strict=True))


@pytest.mark.parametrize("name", SAMPLED)
def test_it_learns_a_word_of_two_letters(name):
    """A policy of [2, 3] logits, rewarded where both letters are right: 1 in 9 at first, nearly always at the end."""
    rewards = among_neighbors(name, rewards_of_a_word, SAMPLED)
    assert rewards[:5].mean() < 0.3
    assert rewards[-5:].mean() > SATISFIED.get(name, 0.9)


@pytest.mark.parametrize("name", OF_STORED_TOKENS)
def test_it_learns_to_say_a_stored_word(name):
    """A policy of [2, 3] logits and one row: a third for each letter at first, nearly certain at the end."""
    objective, word = ALGOS[name], jnp.array([[2, 0]])
    config, optimizer, mask = default_config(objective), optax.adam(0.1), jnp.ones((1, 2), bool)
    state = objective.init_state(config)
    logprobs_of = lambda logits: jax.nn.log_softmax(logits)[jnp.arange(2)[None, :], word]
    needs, teacher = objective.needs(config), jax.nn.log_softmax(6 * jax.nn.one_hot(word[0], 3))
    given = conformance.sample_tokens().replace(
        mask=mask, segment=jnp.zeros((1, 2), jnp.int32), num_segments=1, entropy=jnp.zeros((1, 2)),
        behaviour_logprobs=None, advantages=None, old_values=None, returns=None,
        values=jnp.zeros((1, 2)) if needs.values else None, row_values=jnp.ones((1, 2, len(needs.row_value_names))),
        ref_logprobs=jnp.full((1, 2), -jnp.log(3.0)) if objective.needs(config).reference else None,
    )  # fmt: skip

    def loss(logits):
        logprobs = logprobs_of(logits)
        tokens = given.replace(logprobs=logprobs, old_logprobs=jax.lax.stop_gradient(logprobs))
        tokens = tokens.replace(divergence=divergence_of(needs, jax.nn.log_softmax(logits), teacher, 1))
        tokens = tokens.replace(state_values=jax.nn.logsumexp(logits, axis=-1)[None])
        return objective.token_loss(config, tokens, state)[0].sum()

    def update(carry, _):
        updates, opt_state = optimizer.update(jax.grad(loss)(carry[0]), carry[1])
        return (optax.apply_updates(carry[0], updates), opt_state), None

    logits = jnp.zeros((2, 3))
    (logits, _), _ = jax.jit(lambda c: jax.lax.scan(update, c, length=60))((logits, optimizer.init(logits)))
    assert jnp.exp(logprobs_of(logits)).min() > 0.9


@pytest.mark.parametrize("name", OF_PAIRS)
def test_it_learns_which_of_two_is_preferred(name):
    """Sequences are vectors, and what is said of one rises with a linear function of it, a log-prob staying below 0:
    every pair ends in the right order."""
    objective = ALGOS[name]
    config, optimizer = default_config(objective), optax.adam(0.05)
    needs, state = objective.needs(config), objective.init_state(config)
    features = jnp.asarray(np.random.default_rng(5).normal(size=(1, 8, 6)), jnp.float32)  # four pairs
    given = Sequences(
        logprob=None,
        ref_logprob=jnp.full((1, 8), -3 * np.log(2.0), jnp.float32) if needs.reference else None,
        behaviour_logprob=jnp.full((1, 8), -3 * np.log(2.0), jnp.float32),
        value=jnp.tile(jnp.array([1.0, 0.0]), 4)[None],
        length=jnp.full((1, 8), 3, jnp.int32),
        score=None,
        label=jnp.tile(jnp.array([1.0, 0.0]), 4)[None],
        unit=jnp.repeat(jnp.arange(4, dtype=jnp.int32), 2)[None],
        mask=jnp.ones((1, 8), bool),
        baseline=jnp.zeros((1, 8)),
        log_sum_squared=jnp.full((1, 8), -3 * np.log(2.0), jnp.float32) if needs.log_sum_squared else None,
    )

    def loss(w):
        values = features @ w
        logprob = 3 * jax.nn.log_sigmoid(values)
        sequences = given.replace(logprob=logprob if needs.logprobs else None, score=values if needs.score else None)
        if needs.common_length:  # answers of one length have it in common
            sequences = sequences.replace(common_gain=logprob - given.ref_logprob)
        return objective.sequence_loss(config, sequences, state)[0].sum()

    def update(carry, _):
        updates, opt_state = optimizer.update(jax.grad(loss)(carry[0]), carry[1])
        return (optax.apply_updates(carry[0], updates), opt_state), loss(carry[0])

    w = jnp.zeros(6)
    (w, _), losses = jax.jit(lambda c: jax.lax.scan(update, c, length=200))((w, optimizer.init(w)))
    difference = (features @ w).reshape(4, 2) @ jnp.array([1.0, -1.0])
    assert jnp.all(difference > 0)
    assert losses[-1] < losses[0]


def row_inputs(name):
    """Returns sample groups, tokens and sequences for a row with all options, of the shapes that the contract tests
    have. Rows of a group are on either device."""
    objective = ALGOS[name]
    config = everything_on(objective)
    apart = np.r_[: conformance.ROWS : 2, 1 : conformance.ROWS : 2]
    return (
        jax.tree.map(lambda x: x[apart], conformance.sample_groups()),
        given_tokens(objective, config),
        conformance.given_sequences(objective, config),
    )


def row_outputs(name, groups, tokens, sequences):
    """Returns what the functions of a row with all options give, and their gradients."""
    objective, actual = ALGOS[name], []
    config = everything_on(objective)
    state = objective.init_state(config)
    if objective.advantages is not None:
        reward = shaped_reward(objective, config, groups, state)
        advantages, *rest = objective.advantages(config, groups, reward, state)
        mask = groups.action_mask & objective.keep(config, groups)[:, None]
        mask = mask if objective.keep_tokens is None else mask & objective.keep_tokens(config, groups)
        actual += [mask, advantages, *rest]
        actual += [] if objective.returns is None else [objective.returns(config, groups, reward)]
        actual += [] if objective.select is None else [objective.select(config, groups, advantages)]
        actual += [objective.weights(config, mask, 6), objective.denominator(config, mask, 12, 6)]

    def with_gradient(loss_of, x):
        def total(x):
            given = loss_of(x)
            return given[0].sum(), given

        gradient, given = jax.grad(total, has_aux=True)(x)
        return [given, gradient]

    if objective.token_loss is not None:
        of_tokens = lambda lp: objective.token_loss(config, tokens.replace(logprobs=lp), state)
        actual += with_gradient(of_tokens, tokens.logprobs)
    if objective.sequence_loss is not None:
        of_sequences = lambda x: objective.sequence_loss(config, sequences.replace(**x), state)
        actual += with_gradient(of_sequences, {"logprob": sequences.logprob, "score": sequences.score})
    return actual


@functools.cache
def sharded(names):
    mesh = make_mesh(MeshShape(data=2), jax.devices()[:2])
    run = jax.jit(lambda given: {name: row_outputs(name, *arrays) for name, arrays in given.items()})
    with jax.set_mesh(mesh):
        place = lambda x: jax.device_put(np.asarray(x), jax.NamedSharding(mesh, jax.P("data")))
        return jax.tree.map(np.asarray, run(jax.tree.map(place, {name: row_inputs(name) for name in names})))


@pytest.mark.parametrize("name", ALGOS)
def test_rows_may_be_sharded_over_data(name):
    """Under explicit axes a collective that was not written is an error; rows on 2 devices give what 1 gives."""
    alone = row_outputs(name, *row_inputs(name))
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(among_neighbors(name, sharded)), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", WITH_IMPORTANCE)
def test_truncated_importance_weighs_the_policy_loss(name):
    """A sampler 0.1 nats off everywhere weighs exp(0.1), one 5 nats off the cap of 2."""
    objective, tokens = ALGOS[name], conformance.sample_tokens()
    # A policy without a value head, no KL to the reference and no entropy: none is weighted.
    tokens = tokens.replace(values=None, returns=jnp.zeros_like(tokens.returns), ref_logprobs=tokens.logprobs)
    tokens = tokens.replace(positive_weights=jnp.zeros_like(tokens.returns))
    tokens = tokens.replace(entropy=jnp.zeros_like(tokens.entropy))
    loss_of = lambda config, tokens: objective.token_loss(config, tokens, objective.init_state(config))
    plain, _ = loss_of(objective.config(), tokens)
    for difference, weight in ((0.1, np.exp(0.1)), (5.0, 2.0), (-1.0, np.exp(-1.0))):
        shifted = tokens.replace(behaviour_logprobs=tokens.old_logprobs - difference)
        loss, metrics = loss_of(objective.config(importance=TruncatedImportance()), shifted)
        np.testing.assert_allclose(loss, weight * plain, rtol=1e-5)
        np.testing.assert_allclose(metrics["importance_weight"], jnp.where(tokens.mask, weight, 0), rtol=1e-5)


@pytest.mark.parametrize("name", ALGOS)
def test_float64_stays_float64(name):
    objective = ALGOS[name]
    config = everything_on(objective)

    def run(groups, tokens, sequences, state):
        values = []
        if objective.token_loss is not None:
            loss, metrics = objective.token_loss(config, tokens, state)
            values += [loss, *(metrics[key] for key in ("ratio", "mismatch_k3") if key in metrics)]
            values += [objective.weights(config, groups.action_mask, 6)]
            values += [objective.denominator(config, groups.action_mask, 12, 6)]
        if objective.advantages is not None:
            reward = shaped_reward(objective, config, groups, state)
            values.append(objective.advantages(config, groups, reward, state)[0])
        if objective.sequence_loss is not None:
            values.append(objective.sequence_loss(config, sequences, state)[0])
        return values

    with jax.enable_x64(True):
        wide = lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
        sequences = conformance.given_sequences(objective, config)
        given = conformance.sample_groups(), given_tokens(objective, config), sequences, objective.init_state(config)
        for value in jax.eval_shape(run, *jax.tree.map(wide, given)):
            assert value.dtype == jnp.float64
