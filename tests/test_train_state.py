"""The state that a stage begins with: what it makes new, what it keeps, and whose frozen weights its roles stand on."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.algos.contract import Needs, Objective
from jrl.learning.average import AVERAGE
from jrl.learning.critic import CRITIC
from jrl.learning.optimizers.adamw import OPTIMIZER as ADAMW
from jrl.learning.optimizers.adamw import AdamW
from jrl.learning.optimizers.contract import ConfiguredOptimizer
from jrl.models.adapters.lora import LoRA, adapted
from jrl.models.decoder import MODEL
from jrl.models.heads import REWARD, VALUE
from jrl.models.shape import Decoder
from jrl.run.train_state import begin_stage, continue_stage, drawn_heads, initial_state

CFG = Decoder(vocab_size=24, layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=16)
COMPARES = Needs(reference=True)


def first_state(model=MODEL):
    return initial_state(jax.random.key(0), cfg=CFG, model=model)


def begun(state, needs, *, trains="policy", model=MODEL, average=None, num_previous=0, **critic):
    """Returns the state after `begin_stage` by an objective with these needs, which remembers one number."""
    config = ALGOS["GRPO"].config
    objective = Objective(config=config, needs=lambda config: needs, init_state=lambda config: jnp.float32(3))
    return begin_stage(
        state, trains=trains, optimizer=ConfiguredOptimizer(ADAMW, AdamW(average=average)), objective=objective,
        config=config(), model=model, cfg=CFG, num_previous=num_previous, **critic,
    )  # fmt: skip


def same(tree, other):
    jax.tree.map(np.testing.assert_array_equal, tree, other)


def test_a_stage_keeps_heads_that_fit_and_draws_the_others_again(mesh):
    before = first_state()
    heads = {VALUE: jnp.full((1, 16, 1), 0.5), REWARD: jnp.ones((1, 16, 1))}
    policy = before.models["policy"].replace(heads=heads)
    state = begun(before.replace(models={"policy": policy}), Needs(values=True, score=True, score_outputs=2))
    after = state.models["policy"]
    np.testing.assert_array_equal(after.heads[VALUE], heads[VALUE])
    drawn = drawn_heads([REWARD], "policy", before.key, CFG, {REWARD: 2})
    assert drawn[REWARD].shape == (1, 16, 2)
    np.testing.assert_array_equal(after.heads[REWARD], drawn[REWARD])
    same(after.params, policy.params)
    # A model without heads gets both: zeros and normal numbers.
    new = begun(before, Needs(values=True, score=True, score_outputs=2)).models["policy"].heads
    np.testing.assert_array_equal(new[VALUE], np.zeros((1, 16, 1), np.float32))
    np.testing.assert_array_equal(new[REWARD], drawn[REWARD])


def test_a_stage_begins_with_fresh_moments_at_version_0(mesh):
    before = begun(first_state(), Needs())
    policy = before.models["policy"]
    policy = policy.replace(opt_state=jax.tree.map(jnp.ones_like, policy.opt_state), version=jnp.int32(7))
    state = begun(before.replace(models={"policy": policy}, step=jnp.int32(5)), Needs())
    assert state.models.keys() == {"policy"} and (int(state.step), float(state.objective)) == (5, 3.0)
    after = state.models["policy"]
    assert int(after.version) == 0
    assert jax.tree.structure(after.opt_state) == jax.tree.structure(policy.opt_state)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(after.opt_state))
    same(after.params, policy.params)


def test_a_stage_copies_the_model_that_it_trains_to_the_roles_that_it_needs(mesh):
    before = first_state()
    policy = before.models["policy"].replace(heads={VALUE: jnp.full((1, 16, 1), 0.5)}, version=jnp.int32(7))
    old = policy.replace(params=jax.tree.map(jnp.zeros_like, policy.params), heads={}, opt_state=(jnp.ones(()),))
    models = {"policy": policy, "reward": old, "reference": old, "previous_3": old, AVERAGE: old}
    state = begun(before.replace(models=models), COMPARES, average=0.9, num_previous=2)
    assert state.models.keys() == {"policy", "reward", "reference", "previous", "previous_2", AVERAGE}
    for role in ("reference", "previous", "previous_2", AVERAGE):
        copied = state.models[role]
        same(copied.params, policy.params)
        assert int(copied.version) == 0 and copied.opt_state is copied.frozen is copied.shares is None
        assert copied.heads.keys() == ({VALUE} if role == AVERAGE else set())
    np.testing.assert_array_equal(state.models[AVERAGE].heads[VALUE], policy.heads[VALUE])
    # Each update donates its model's arrays: a copy must not be the array itself.
    arrays = [leaf for model in state.models.values() for leaf in jax.tree.leaves((model.params, model.heads))]
    assert len({id(leaf) for leaf in arrays}) == len(arrays)
    # What an earlier stage has trained stays as it is, without its moments.
    assert state.models["reward"].opt_state is None and int(state.models["reward"].version) == 7
    same(state.models["reward"].params, old.params)
    # A stage that needs none of these has none of them.
    assert begun(state, Needs()).models.keys() == {"policy", "reward"}


@pytest.mark.parametrize("trains", ["policy", "reward"])
def test_copies_stand_on_the_frozen_weights_that_the_trained_model_stands_on(trains, mesh):
    # The reward model begins as a copy of the policy and stands on the policy's weights: so do the copies of it.
    model = adapted(MODEL, LoRA(rank=2))
    state = begun(first_state(model), COMPARES, trains=trains, model=model, average=0.9, num_previous=1)
    assert state.models["policy"].shares is None and state.models["policy"].frozen is not None
    for role in {trains, "reference", "previous", AVERAGE} - {"policy"}:
        assert (role, state.models[role].shares, state.models[role].frozen) == (role, "policy", None)
        same(state.models[role].params, state.models["policy"].params)


@pytest.mark.parametrize("adapter", [None, LoRA(rank=2)])
def test_a_critic_has_the_value_head_and_moments_of_its_own(adapter, mesh):
    model = MODEL if adapter is None else adapted(MODEL, adapter)
    before = begun(first_state(model), Needs(score=True), trains="reward", model=model)
    critic = dict(critic="reward", critic_optimizer=ConfiguredOptimizer(ADAMW, AdamW()))
    state = begun(before, Needs(values=True), model=model, **critic)
    assert state.models["policy"].heads == {} and state.models["reward"].opt_state is None
    found = state.models[CRITIC]
    assert found.shares == (None if adapter is None else "policy") and found.frozen is None
    assert int(found.version) == 0
    np.testing.assert_array_equal(found.heads[VALUE], state.models["reward"].heads[REWARD])
    trained = {leaf.shape for leaf in jax.tree.leaves((found.params, found.heads))}
    assert trained <= {leaf.shape for leaf in jax.tree.leaves(found.opt_state)}
    # Of the policy, which has no head of a reward, it begins with zeros.
    of_policy = begun(
        before, Needs(values=True), model=model, critic="policy", critic_optimizer=ConfiguredOptimizer(ADAMW, AdamW())
    ).models[CRITIC]
    np.testing.assert_array_equal(of_policy.heads[VALUE], np.zeros((1, 16, 1), np.float32))
    assert of_policy.shares == (None if adapter is None else "policy")


def test_a_stage_may_continue_the_optimizer_of_the_stage_before(mesh):
    before = begun(first_state(), Needs(values=True))
    policy = before.models["policy"]
    policy = policy.replace(opt_state=jax.tree.map(jnp.ones_like, policy.opt_state), version=jnp.int32(7))
    before = before.replace(models={"policy": policy})
    for needs in (COMPARES._replace(values=True), COMPARES):  # the heads of the model stay, and so do their moments
        begin = functools.partial(begun, needs=needs, average=0.9)
        state = continue_stage(before, trains="policy", begin_fn=begin)
        assert jax.tree.structure(state) == jax.tree.structure(begin(before))
        same(state.models["policy"].opt_state, policy.opt_state)
        assert int(state.models["policy"].version) == 0
        assert state.models["reference"].opt_state is state.models[AVERAGE].opt_state is None
