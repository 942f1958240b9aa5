"""Every optimizer of the table passes every contract test, and the tests find what they are for."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

from jrl.learning.optimizers import OPTIMIZERS
from jrl.learning.optimizers.conformance import CONTRACT_TESTS, default_config
from jrl.learning.optimizers.contract import Optimizer
from jrl.learning.optimizers.settings import OptimizerSettings
from jrl.types import traced


@pytest.mark.parametrize("contract_test", CONTRACT_TESTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_passes_the_contract_test(name, contract_test):
    row = OPTIMIZERS[name]
    CONTRACT_TESTS[contract_test](row, default_config(row))


@traced
class Own(OptimizerSettings):
    b1: float = 0.9


def own(direction):
    return Optimizer(config=Own, direction=direction)


def stateful(update, init=lambda params: jnp.zeros(())):
    return lambda config, leaves: optax.GradientTransformation(init, update)


WRONG = {
    "it_goes_downhill": lambda config, leaves: optax.lion(1e-2),
    "directions_are_like_the_gradient": lambda config, leaves: optax.stateless(
        lambda g, params: jax.tree.map(lambda x: x / jnp.sqrt(jnp.sum(x * x)), g)
    ),
    "its_state_keeps_its_structure": stateful(lambda g, state, params: (g, state[None])),
    "it_takes_none_for_what_is_not_trained": lambda config, leaves: optax.stateless(
        lambda g, params: {**g, "frozen": jnp.zeros((3, 3))}
    ),
    "jit_changes_nothing": stateful(
        lambda g, state, params: (g if isinstance(state, jax.core.Tracer) else jax.tree.map(jnp.negative, g), state)
    ),
}


@pytest.mark.parametrize("contract_test", WRONG)
def test_a_wrong_optimizer_is_found(contract_test):
    row = own(WRONG[contract_test])
    with pytest.raises(AssertionError):
        CONTRACT_TESTS[contract_test](row, default_config(row))


def test_a_state_that_is_not_sharded_as_the_parameters_are_is_found():
    zeros = lambda params: jax.tree.map(lambda x: jnp.zeros(x.shape), params)
    row = own(stateful(lambda g, state, params: (jax.tree.map(lambda x, y: jnp.stack([x, y])[0], g, state), g), zeros))
    with pytest.raises(Exception, match="should have the same sharding"):
        CONTRACT_TESTS["directions_are_like_the_gradient"](row, default_config(row))


def test_a_float_that_is_not_traced_is_found():
    fields = [field.name for field in dataclasses.fields(Own)]

    class Static(Own):
        pass

    jax.tree_util.register_dataclass(Static, data_fields=fields[:-1], meta_fields=fields[-1:])
    row = Optimizer(config=Static, direction=lambda config, leaves: optax.identity())
    with pytest.raises(AssertionError, match="with @traced"):
        CONTRACT_TESTS["another_float_compiles_nothing"](row, default_config(row))


def test_an_optimizer_of_optax_passes():
    row = own(lambda config, leaves: optax.scale_by_lion(b1=config.b1))
    for holds in CONTRACT_TESTS.values():
        holds(row, default_config(row))
