"""Every row of ALGOS, with its defaults and with every option on, keeps every promise and learns a toy task."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl.algos import ALGOS, conformance
from jrl.algos.common import TruncatedImportance
from jrl.algos.conformance import PROMISES, default_config
from jrl.algos.contract import Facts, Groups, Tokens
from jrl.device.sharding import MeshShape, make_mesh

FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=6)

OPTIONS = {"dual_clip": 3.0, "kl": 0.1, "overlong_buffer": 2, "overlong_filter": True, "value_clip": 0.1}


def everything_on(algorithm):
    """Returns a configuration with each optional term switched on. The entropy is an input of its own here."""
    names = {field.name for field in dataclasses.fields(algorithm.config)}
    options = {name: value for name, value in OPTIONS.items() if name in names}
    return algorithm.config(entropy_bonus=0.01, importance=TruncatedImportance(cap=1.5, level="sequence"), **options)


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("name", ALGOS)
def test_defaults_keep_the_promise(name, promise):
    PROMISES[promise](ALGOS[name], default_config(ALGOS[name]))


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("name", ALGOS)
def test_all_options_together_keep_the_promise(name, promise):
    PROMISES[promise](ALGOS[name], everything_on(ALGOS[name]))


@pytest.mark.parametrize("name", ALGOS)
def test_the_name_of_a_row_is_the_name_of_its_config(name):
    assert ALGOS[name].config.__name__ == name


@pytest.mark.parametrize("name", ALGOS)
def test_defaults_and_all_options_pass_the_check(name):
    algorithm = ALGOS[name]
    algorithm.check(default_config(algorithm), FACTS)
    algorithm.check(everything_on(algorithm), FACTS)


@pytest.mark.parametrize("name", ALGOS)
def test_greedy_sampling_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} cannot learn from greedy sampling"):
        ALGOS[name].check(default_config(ALGOS[name]), FACTS._replace(greedy=True))


@pytest.mark.parametrize("cap", [0.0, -1.0])
@pytest.mark.parametrize("name", ALGOS)
def test_an_importance_cap_of_zero_or_less_is_refused(name, cap):
    with pytest.raises(ValueError, match=r"TruncatedImportance\.cap"):
        ALGOS[name].check(ALGOS[name].config(importance=TruncatedImportance(cap=cap)), FACTS)


@pytest.mark.parametrize("name", ALGOS)
def test_an_unknown_importance_level_is_refused(name):
    with pytest.raises(ValueError, match=r"TruncatedImportance\.level = 'row'"):
        ALGOS[name].check(ALGOS[name].config(importance=TruncatedImportance(level="row")), FACTS)


@pytest.mark.parametrize("name", ALGOS)
def test_a_negative_entropy_bonus_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}.entropy_bonus"):
        ALGOS[name].check(ALGOS[name].config(entropy_bonus=-0.1), FACTS)


@pytest.mark.parametrize("name", ALGOS)
def test_the_entropy_gradient_is_asked_for_where_there_is_a_bonus(name):
    algorithm = ALGOS[name]
    assert not algorithm.needs_entropy_gradient(default_config(algorithm))
    assert algorithm.needs_entropy_gradient(algorithm.config(entropy_bonus=0.01))


@pytest.mark.parametrize("name", ALGOS)
def test_it_learns_a_word_of_two_letters(name):
    """A policy of [2, 3] logits, rewarded where both letters are right: 1 in 9 at first, nearly always at the end."""
    algorithm = ALGOS[name]
    config = default_config(algorithm)
    rows, num_groups, target = 64, 8, jnp.array([2, 0])
    optimizer = optax.adam(0.1)
    ones = jnp.ones((rows, 2), bool)

    def update(carry, step):
        logits, opt_state, baseline = carry
        tokens = jax.random.categorical(jax.random.fold_in(jax.random.key(7), step), logits, shape=(rows, 2))
        reward = jnp.all(tokens == target[None, :], axis=-1).astype(jnp.float32)
        groups = Groups(
            reward=reward,
            outcome=reward,
            valid=jnp.ones(rows, bool),
            group=jnp.arange(rows, dtype=jnp.int32) % num_groups,
            action_mask=ones,
            finish=jnp.zeros(rows, jnp.int8),
            num_groups=num_groups,
            max_completion=2,
            values=jnp.zeros((rows, 2)),
        )
        advantages, baseline, _ = algorithm.advantages(config, groups, algorithm.shape(config, groups), baseline)
        mask = ones & algorithm.keep(config, groups)[:, None]

        def loss(logits):
            every = jax.nn.log_softmax(logits)
            logprobs = every[jnp.arange(2)[None, :], tokens]
            old = jax.lax.stop_gradient(logprobs)
            batch = Tokens(
                logprobs=logprobs,
                old_logprobs=old,
                behaviour_logprobs=old,
                ref_logprobs=None,
                entropy=jnp.zeros((rows, 2)),
                advantages=advantages,
                mask=mask,
                segment=jnp.zeros((rows, 2), jnp.int32),
                num_segments=1,
                values=jnp.zeros((rows, 2)),
                old_values=jnp.zeros((rows, 2)),
                returns=jnp.zeros((rows, 2)),
            )
            per_token, _ = algorithm.token_loss(config, batch)
            weighted = jnp.where(mask, algorithm.weights(config, mask, 2) * per_token, 0)
            return weighted.sum() / algorithm.denominator(config, mask, rows, 2)

        updates, opt_state = optimizer.update(jax.grad(loss)(logits), opt_state)
        return (optax.apply_updates(logits, updates), opt_state, baseline), reward.mean()

    logits = jnp.zeros((2, 3))
    start = (logits, optimizer.init(logits), jnp.float32(jnp.nan))
    _, rewards = jax.jit(lambda carry: jax.lax.scan(update, carry, jnp.arange(60)))(start)
    assert rewards[:5].mean() < 0.3
    assert rewards[-5:].mean() > 0.9


@pytest.mark.parametrize("name", ALGOS)
def test_rows_may_be_sharded_over_data(name):
    """Under explicit axes a collective that was not written is an error; rows on 4 devices give what 1 gives."""
    algorithm = ALGOS[name]
    config = everything_on(algorithm)
    groups, tokens = conformance.sample_groups(), conformance.sample_tokens()
    tokens = jax.tree.map(lambda x: jnp.concatenate([x, x]), tokens)

    @jax.jit
    def run(groups, tokens):
        advantages, *_ = algorithm.advantages(config, groups, algorithm.shape(config, groups), jnp.float32(0.3))
        mask = groups.action_mask & algorithm.keep(config, groups)[:, None]
        scale = algorithm.weights(config, mask, 6), algorithm.denominator(config, mask, 12, 6)
        total = lambda lp: algorithm.token_loss(config, tokens.replace(logprobs=lp))[0].sum()
        return advantages, scale, jax.value_and_grad(total)(tokens.logprobs)

    alone = run(groups, tokens)
    mesh = make_mesh(MeshShape(data=4), jax.devices()[:4])
    with jax.set_mesh(mesh):
        place = lambda x: jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
        sharded = run(jax.tree.map(place, groups), jax.tree.map(place, tokens))
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(sharded), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALGOS)
def test_truncated_importance_weighs_the_policy_loss(name):
    """A sampler 0.1 nats off everywhere weighs exp(0.1), one 5 nats off the cap of 2."""
    algorithm, tokens = ALGOS[name], conformance.sample_tokens()
    tokens = tokens.replace(values=tokens.returns, old_values=tokens.returns)  # nothing to learn of values
    plain, _ = algorithm.token_loss(algorithm.config(), tokens)
    for difference, weight in ((0.1, np.exp(0.1)), (5.0, 2.0), (-1.0, np.exp(-1.0))):
        shifted = tokens.replace(behaviour_logprobs=tokens.old_logprobs - difference)
        loss, metrics = algorithm.token_loss(algorithm.config(importance=TruncatedImportance()), shifted)
        np.testing.assert_allclose(loss, weight * plain, rtol=1e-5)
        np.testing.assert_allclose(metrics["importance_weight"], jnp.where(tokens.mask, weight, 0), rtol=1e-5)


@pytest.mark.parametrize("name", ALGOS)
def test_float64_stays_float64(name):
    algorithm = ALGOS[name]
    config = everything_on(algorithm)
    with jax.enable_x64(True):
        wide = lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
        groups = jax.tree.map(wide, conformance.sample_groups())
        tokens = jax.tree.map(wide, conformance.sample_tokens())
        loss, metrics = algorithm.token_loss(config, tokens)
        advantages, *_ = algorithm.advantages(config, groups, algorithm.shape(config, groups), jnp.float64(0.3))
        weights = algorithm.weights(config, groups.action_mask, 6)
        denominator = algorithm.denominator(config, groups.action_mask, 12, 6)
        for value in (loss, advantages, weights, denominator, metrics["ratio"], metrics["mismatch_k3"]):
            assert value.dtype == jnp.float64
