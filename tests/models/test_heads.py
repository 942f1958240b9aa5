"""Heads: by hand, an ensemble as its members one by one, and drawn beside a model without moving it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.learning.learner import weights_of
from jrl.learning.optimizers.adamw import OPTIMIZER as ADAMW
from jrl.learning.optimizers.adamw import AdamW
from jrl.learning.optimizers.contract import ConfiguredOptimizer
from jrl.models.adapters.lora import LoRA, adapted
from jrl.models.contract import init, merge_params
from jrl.models.decoder import MODEL
from jrl.models.heads import REWARD, VALUE, Head, fresh_heads, head_spec, read_head, read_values
from jrl.models.shape import Decoder
from jrl.run.train_state import begin_stage, initial_state

CFG = Decoder(vocab_size=24, layers=1, width=16, heads=2, kv_heads=1, head_dim=8, mlp_width=16)


def test_two_objectives_of_two_members_by_hand():
    # h = [1, 2]. First member: [1*1 + 2*0, 1*2 + 2*3] = [1, 8]; second: [1*(-1) + 2*1, 0 + 2*0.5] = [1, 1].
    w = jnp.array([[[1.0, 2], [0, 3]], [[-1, 0], [1, 0.5]]])
    np.testing.assert_array_equal(read_head(w, jnp.array([1.0, 2])), [[1, 8], [1, 1]])


def test_an_ensemble_is_its_members_one_by_one():
    rng = np.random.default_rng(0)
    w, hidden = rng.normal(size=(3, 6, 2)).astype(np.float32), rng.normal(size=(4, 5, 6)).astype(np.float32)
    actual = jax.jit(read_head)(w, hidden)
    assert actual.shape == (3, 4, 5, 2)
    for member in range(3):
        np.testing.assert_allclose(actual[member], hidden @ w[member], atol=1e-6)


def test_hidden_states_in_bfloat16_are_summed_wide():
    hidden = jnp.full((1, 512), 1.0, jnp.bfloat16)
    w = jnp.full((1, 512, 1), 1.001, jnp.float32)
    assert float(read_head(w, hidden)[0, 0, 0]) == pytest.approx(512 * 1.001, rel=1e-6)


def test_a_head_is_drawn_beside_the_weights_and_moves_none_of_them():
    spec = MODEL.spec(CFG)
    head = Head(outputs=2, members=3)
    both = init(jax.random.key(0), {**spec, REWARD: head_spec(head, CFG.width, "bfloat16")})
    reward_head = both.pop(REWARD)
    assert reward_head.shape == (3, 16, 2) and reward_head.dtype == jnp.float32
    assert len({float(reward_head[i, 0, 0]) for i in range(3)}) == 3  # members begin apart
    np.testing.assert_allclose(float((reward_head**2).mean()), 1 / 16, rtol=0.4)  # variance 1 / width
    jax.tree.map(np.testing.assert_array_equal, both, init(jax.random.key(0), spec))


@pytest.mark.parametrize("field", ["outputs", "members"])
def test_a_head_of_nothing_is_refused(field):
    with pytest.raises(ValueError, match=f"Head.{field} must be at least 1"):
        Head(**{field: 0})


def test_a_value_is_read_where_the_token_before_lies():
    # w = [1, 2]: hidden states [1, 0], [0, 1], [1, 1] say 1, 2, 3; the first token has none before it.
    w, hidden = jnp.array([[[1.0], [2.0]]]), jnp.array([[[1.0, 0], [0, 1], [1, 1]]])
    np.testing.assert_array_equal(jax.jit(read_values)(w, hidden), [[0, 1, 2]])


@pytest.mark.parametrize("adapter", [None, LoRA(rank=2)])
def test_a_value_head_of_zeros_is_trained_beside_the_weights_or_the_adapters_and_moves_none_of_them(adapter, mesh):
    model = MODEL if adapter is None else adapted(MODEL, adapter)
    objective = ALGOS["PPO"]
    before = initial_state(jax.random.key(0), cfg=CFG, model=model)
    bare = jax.tree.map(np.asarray, before.models["policy"].params)
    state = begin_stage(
        before, trains="policy", optimizer=ConfiguredOptimizer(ADAMW, AdamW()), objective=objective,
        config=objective.config(), model=model, cfg=CFG, num_previous=0,
    )  # fmt: skip
    policy = state.models["policy"]
    np.testing.assert_array_equal(policy.heads[VALUE], np.zeros((1, 16, 1), np.float32))
    assert policy.heads.keys() == {VALUE} and (policy.frozen is None) == (adapter is None)
    jax.tree.map(np.testing.assert_array_equal, policy.params, bare)
    trained = {leaf.shape for leaf in jax.tree.leaves((policy.params, policy.heads))}
    assert trained <= {leaf.shape for leaf in jax.tree.leaves(policy.opt_state)}  # the head has moments too
    weights = weights_of(state.models, "policy")
    assert weights.heads is policy.heads
    jax.tree.map(np.testing.assert_array_equal, weights.params, merge_params(policy.frozen, policy.params))


def test_a_reward_head_begins_normal_and_a_draw_of_its_own():
    both = fresh_heads((VALUE, REWARD), jax.random.key(0), 4096, "float32")
    assert both[REWARD].shape == both[VALUE].shape == (1, 4096, 1) and not both[VALUE].any()
    np.testing.assert_allclose(float((both[REWARD] ** 2).mean()), 1 / 4096, rtol=0.1)
    alone = fresh_heads((REWARD,), jax.random.key(0), 4096, "float32")
    np.testing.assert_array_equal(both[REWARD], alone[REWARD])
