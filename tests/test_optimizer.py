"""Optimizers on small trees: hand numbers, agreement with optax matrix by matrix, groups, and what stays as it is."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jrl.algos.ppo import PPO
from jrl.device.sharding import MeshShape, make_mesh
from jrl.experiment import Online, optimizers
from jrl.learning.average import moved_average
from jrl.learning.optimizer import begin, check, clip, step, transformation
from jrl.learning.optimizers import OPTIMIZERS
from jrl.learning.optimizers.adafactor import Adafactor
from jrl.learning.optimizers.adamw import AdamW
from jrl.learning.optimizers.contract import describe, leaf_of
from jrl.learning.optimizers.groups import ParameterGroup
from jrl.learning.optimizers.muon import Muon, by_layer, orthogonalize
from jrl.learning.optimizers.schedules import (
    ConstantRate,
    CosineDecay,
    LinearDecay,
    WarmupStableDecay,
    share_of_peak,
)
from jrl.models import decoder
from jrl.models.shape import Decoder
from jrl.types import ModelState

BIAS = {"w": leaf_of("w", ("norm",))}
CONFIGS = {name: row.config for name, row in OPTIMIZERS.items()}


def ruled(config):
    return OPTIMIZERS[type(config).__name__], config


def traced(config):
    return jax.tree.map(jnp.float32, config)


def steps(config, gradient, count):
    """Returns the updates of `count` steps with the same gradient of a vector."""
    params = {"w": jnp.zeros_like(gradient)}
    state, updates = begin(*ruled(traced(config)), params, BIAS), []
    one = jax.jit(lambda g, s, c: transformation(*ruled(c), BIAS).update(g, s, params))
    for _ in range(count):
        update, state = one({"w": gradient}, state, traced(config))
        updates.append(np.asarray(update["w"]))
    return updates


def test_the_first_update_is_the_learning_rate_against_the_gradient():
    # Adam's first step: m / sqrt(v) = g / |g| after bias correction, so the update is -lr * sign(g).
    (update,) = steps(AdamW(learning_rate=0.1, clip_norm=None), jnp.array([2.0, -3.0]), 1)
    np.testing.assert_allclose(update, [-0.1, 0.1], rtol=1e-6)


def test_updates_of_adamw_are_those_of_optax():
    config = AdamW(learning_rate=0.1, weight_decay=0.3, b1=0.8, b2=0.9, eps=1e-3, clip_norm=0.5)
    params, leaves = {"w": jnp.arange(6.0).reshape(2, 3)}, {"w": leaf_of("w", ("embed", "mlp"))}
    theirs = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.3))
    own, other = transformation(*ruled(config), leaves).init(params), theirs.init(params)
    for seed in range(3):
        gradient = {"w": jax.random.normal(jax.random.key(seed), (2, 3))}
        found, own = transformation(*ruled(config), leaves).update(gradient, own, params)
        expected, other = theirs.update(gradient, other, params)
        np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-6)


def test_clipping_is_by_the_global_norm_of_all_arrays():
    # g = [3, 4] in two arrays has norm 5; at 1 it is [0.6, 0.8]. 1 / sqrt(9 + 16) * 3 = 0.6
    config, gradient = traced(AdamW(clip_norm=1.0)), {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    found, _ = jax.jit(lambda c, g: clip(c).update(g, clip(c).init(g)))(config, gradient)
    np.testing.assert_allclose([found["a"][0], found["b"][0]], [0.6, 0.8], rtol=1e-6)
    same, _ = clip(AdamW(clip_norm=None)).update(gradient, optax.EmptyState())
    np.testing.assert_array_equal(same["b"], [4.0])


SHARES = [
    # warmup: (count + 1) / 4, then the peak
    (ConstantRate(warmup_steps=4), [0.25, 0.5, 0.75, 1, 1, 1]),
    (ConstantRate(), [1, 1]),
    (ConstantRate(warmup_steps=1), [1, 1]),
    # 1 - (1 - 0.2) x for x = 0, 1/2, 1, 1
    (LinearDecay(decay_steps=2, end=0.2), [1, 0.6, 0.2, 0.2]),
    (LinearDecay(decay_steps=2, warmup_steps=2), [0.5, 1, 1, 0.5, 0, 0]),
    # (1 + cos(pi x)) / 2 for x = 0, 1/3, 2/3, 1: 1, 0.75, 0.25, 0; then with 0.2 left: 0.2 + 0.8 of it
    (CosineDecay(decay_steps=3), [1, 0.75, 0.25, 0, 0]),
    (CosineDecay(decay_steps=3, end=0.2), [1, 0.8, 0.4, 0.2, 0.2]),
    # two at the peak, then a line over four
    (WarmupStableDecay(warmup_steps=1, stable_steps=2, decay_steps=4, end=0), [1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
]


@pytest.mark.parametrize(("schedule", "expected"), SHARES)
def test_a_schedule_is_a_share_of_the_peak(schedule, expected):
    share = jax.jit(lambda schedule, count: share_of_peak(schedule, count))
    found = [share(traced(schedule), jnp.int32(count)) for count in range(len(expected))]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_step_five_of_ten_of_a_warmup_is_half_the_peak():
    # 1e-6 * 5 / 10 = 0.5e-6
    updates = steps(AdamW(learning_rate=1e-6, schedule=ConstantRate(warmup_steps=10)), jnp.array([1.0]), 5)
    np.testing.assert_allclose(updates[4], [-0.5e-6], rtol=1e-5)


def test_a_schedule_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"LinearDecay\.decay_steps must be at least 1; got 0"):
        LinearDecay(decay_steps=0)
    with pytest.raises(ValueError, match=r"ConstantRate\.warmup_steps must be at least 0; got -1"):
        ConstantRate(warmup_steps=-1)
    with pytest.raises(ValueError, match=r"WarmupStableDecay\.stable_steps"):
        WarmupStableDecay(stable_steps=-1, decay_steps=1)
    with pytest.raises(ValueError, match=r"LinearDecay\.decay_steps must be at most 2147483647; got 10000000000"):
        LinearDecay(decay_steps=10**10)
    with pytest.raises(ValueError, match=r"CosineDecay\.end is a share of the peak, 0 to 1; got 1\.5"):
        CosineDecay(decay_steps=3, end=1.5)


@pytest.mark.parametrize("name", CONFIGS)
def test_changing_a_float_does_not_recompile(name):
    count = 0
    leaves = {"w": leaf_of("w", ("layers", "embed", "mlp"))}

    def update(config, gradient):
        nonlocal count
        count += 1
        params = {"w": jnp.zeros((2, 3, 4))}
        return transformation(*ruled(config), leaves).update(
            gradient, transformation(*ruled(config), leaves).init(params), params
        )[0]

    jitted, results = jax.jit(update), []
    groups = lambda rate: (ParameterGroup(names="w", learning_rate=rate),)
    for rate in (0.1, 0.2):
        config = CONFIGS[name](schedule=LinearDecay(decay_steps=3, end=rate), groups=groups(rate))
        results.append(jitted(traced(config), {"w": jnp.ones((2, 3, 4))})["w"])
    assert count == 1
    np.testing.assert_allclose(results[1], 2 * results[0], rtol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("field", ["learning_rate", "clip_norm", "eps", "average"])
def test_what_cannot_train_is_refused(name, field):
    with pytest.raises(ValueError, match=f"{name}.{field}"):
        CONFIGS[name](**{field: 0.0})


@pytest.mark.parametrize("config, field, value, held", [
    (AdamW, "eps", 1e-50, "0.0"),  # an array without a gradient: 0 / (0 + 0)
    (AdamW, "eps", 1e-40, "0.0"),  # XLA takes it for 0, though float32 has it
    (Adafactor, "eps", 1e-40, "0.0"),
    (AdamW, "b2", 1 - 1e-9, "1.0"),  # v / (1 - b2) is 0 / 0
    (Muon, "momentum", 1 - 1e-9, "1.0"),
    (AdamW, "average", 1 - 1e-9, "1.0"),  # it would never move
    (AdamW, "learning_rate", 1e39, "inf"),
    (AdamW, "weight_decay", 1e39, "inf"),
])  # fmt: skip
def test_what_cannot_train_in_float32_is_refused(config, field, value, held):
    with pytest.raises(
        ValueError, match=rf"{config.__name__}\.{field} = {re.escape(str(value))} cannot train: in float32 it is {held}"
    ):
        config(**{field: value})


def test_a_momentum_of_one_and_no_iterations_are_refused():
    with pytest.raises(ValueError, match=r"Muon\.momentum = 1\.0"):
        Muon(momentum=1.0)
    with pytest.raises(ValueError, match=r"Muon\.iterations must be at least 1"):
        Muon(iterations=0)
    with pytest.raises(ValueError, match=r"Adafactor\.exponent = 1\.5"):
        Adafactor(exponent=1.5)


def test_moments_in_bfloat16_are_rounded_between_steps_only():
    # b1 = b2 = 1/2, gradient 1.2: m = 0.6, v = 0.72, in bfloat16 0.6015625 and 0.71875. Of the first step nothing is
    # rounded: 0.1 * 1. The second has m = 0.6015625 / 2 + 0.6, v = 0.71875 / 2 + 0.72, both over 1 - 1/4.
    config = AdamW(learning_rate=0.1, b1=0.5, b2=0.5, clip_norm=None, moments="bfloat16")
    first, second = steps(config, jnp.array([1.2, 1.2]), 2)
    np.testing.assert_allclose(first, -0.1, rtol=1e-6)
    m, v = (0.6015625 / 2 + 0.6) / 0.75, (0.71875 / 2 + 0.72) / 0.75
    np.testing.assert_allclose(second, -0.1 * m / v**0.5, rtol=1e-6)
    state = begin(*ruled(config), {"w": jnp.zeros(2)}, BIAS)
    kept = sorted(str(leaf.dtype) for leaf in jax.tree.leaves(state))
    assert kept == ["bfloat16", "bfloat16", "int32", "int32"]


def test_a_moment_that_would_stand_still_is_refused():
    with pytest.raises(ValueError, match=r"AdamW\.b2 = 0\.999 does not go with moments='bfloat16'"):
        AdamW(b2=0.999, moments="bfloat16")


AXES = {
    "q": (("layers", "embed", "heads", "head_dim"), 1, 1, True, True),
    "o": (("layers", "heads", "head_dim", "embed"), 1, 2, True, True),
    "expert_up": (("layers", "experts", "embed", "mlp"), 2, 1, True, True),
    "router": (("layers", "embed", "all_experts"), 1, 1, True, True),
    "q_bias": (("layers", "heads", "head_dim"), 1, None, False, False),
    "norm": (("layers", "norm"), 1, None, False, False),
    "expert_scale": (("layers", "all_experts"), 2, None, False, False),
    "conv_q": (("layers", "kv_heads", "head_dim", None), 1, None, False, False),
    "embed": (("vocab", "embed"), 0, 1, False, True),
    "final_norm": (("norm",), 0, None, False, False),
    "a": (("layers", "heads", "head_dim", "rank"), 1, 2, True, True),
    "b": (("layers", "rank", "heads", "head_dim"), 1, 1, True, True),
    "kernel": ((None, None), 0, 1, False, True),
    "bias": ((None,), 0, None, False, False),
}


@pytest.mark.parametrize("name", AXES)
def test_axes_tell_matrices_from_the_rest(name):
    axes, stack, inputs, hidden, decays = AXES[name]
    leaf = leaf_of(name, axes)
    assert (leaf.stack, leaf.inputs, leaf.hidden, leaf.decays) == (stack, inputs, hidden, decays)


def test_every_array_of_a_decoder_and_its_heads_is_described_by_name():
    spec = decoder.MODEL.spec(Decoder(layers=2, width=8, heads=2, kv_heads=1, head_dim=4, mlp_width=8, vocab_size=11))
    params, heads = describe(spec, ("value",))
    assert jax.tree.structure(params) == jax.tree.structure(spec, is_leaf=lambda x: hasattr(x, "axes"))
    assert params["layers"]["down"].name == "layers/down" and params["layers"]["down"].hidden
    assert (heads["value"].name, heads["value"].decays, heads["value"].hidden) == ("heads/value", True, False)


def test_weight_decay_leaves_norms_and_biases_alone_unless_asked():
    # A gradient of 0 has a direction of 0: what moves is decay alone, -0.1 * 0.5 * w.
    leaves = {"norm": leaf_of("norm", ("layers", "norm")), "w": leaf_of("w", ("embed", "mlp"))}
    params = jax.tree.map(jnp.ones_like, {"norm": jnp.ones((2, 3)), "w": jnp.ones((3, 3))})
    zeros = jax.tree.map(jnp.zeros_like, params)
    for groups, of_norm in (((), 0.0), ((ParameterGroup(names="norm", weight_decay=0.2),), -0.02)):
        config = traced(AdamW(learning_rate=0.1, weight_decay=0.5, groups=groups))
        after, _, _ = step(
            *ruled(config), zeros, begin(*ruled(config), params, leaves), params, leaves, jnp.bool_(True)
        )
        np.testing.assert_allclose(after["w"] - 1, -0.05, rtol=1e-5)
        np.testing.assert_allclose(after["norm"] - 1, of_norm, atol=1e-7)


# --- Stacks of matrices, against optax on lists of 2-D leaves -----------------------------------------------------

STACK = {
    "q": leaf_of("layers/q", ("layers", "embed", "heads", "head_dim")),
    "o": leaf_of("layers/o", ("layers", "heads", "head_dim", "embed")),
    "expert_up": leaf_of("layers/expert_up", ("layers", "experts", "embed", "mlp")),
    "norm": leaf_of("layers/norm", ("layers", "norm")),
}
SHAPES = {"q": (3, 8, 2, 2), "o": (3, 2, 2, 8), "expert_up": (3, 2, 8, 6), "norm": (3, 8)}
FLAT = {"q": (8, 4), "o": (4, 8), "expert_up": (8, 6), "norm": (8,)}  # of one matrix or vector


def drawn(seed):
    return {name: jax.random.normal(jax.random.key(seed + i), s) for i, (name, s) in enumerate(SHAPES.items())}


def listed(tree):
    """Returns the matrices and vectors of stacked arrays, one leaf each."""
    return {name: list(jnp.reshape(x, (-1, *FLAT[name]))) for name, x in tree.items()}


def trajectory(config, leaves, params, gradients):
    """Returns the parameters after a step for each gradient, and the last state."""
    state, one = begin(*ruled(config), params, leaves), jax.jit(
        lambda c, g, s, p: step(*ruled(c), g, s, p, leaves, jnp.bool_(True))[:2]
    )  # fmt: skip
    for gradient in gradients:
        params, state = one(traced(config), gradient, state, params)
    return params, state


def followed(theirs, params, gradients):
    state = theirs.init(params)
    for gradient in gradients:
        updates, state = theirs.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


GRADIENTS = [drawn(100 * i) for i in range(1, 4)]


@pytest.mark.parametrize("rms", [0.2, None])
def test_muon_on_stacks_is_optax_muon_on_every_matrix(rms):
    config = Muon(learning_rate=0.1, update_rms=rms, weight_decay=0.1, clip_norm=None, b2=0.9)
    found, _ = trajectory(config, STACK, drawn(0), GRADIENTS)
    theirs = optax.contrib.muon(
        0.1, beta=0.95, weight_decay=0.1, adam_b1=0.9, adam_b2=0.9, consistent_rms=rms, eps=1e-8
    )
    expected = followed(theirs, listed(drawn(0)), [listed(g) for g in GRADIENTS])
    for name in ("q", "o", "expert_up"):
        np.testing.assert_allclose(listed(found)[name], expected[name], atol=2e-5)
    # optax gives the rest Nesterov's Adam; ours is Adam, as for everything else.
    adam = followed(optax.adamw(0.1, b2=0.9, weight_decay=0.0), drawn(0)["norm"], [g["norm"] for g in GRADIENTS])
    np.testing.assert_allclose(found["norm"], adam, atol=1e-6)


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_adafactor_on_stacks_is_optax_on_every_matrix(momentum):
    config = Adafactor(learning_rate=0.1, clip_rms=0.5, momentum=momentum, clip_norm=None)
    found, _ = trajectory(config, STACK, drawn(0), GRADIENTS)
    theirs = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=2),
        optax.clip_by_block_rms(0.5),
        optax.identity() if momentum is None else optax.ema(momentum, debias=False),
        optax.scale(-0.1),
    )
    expected = followed(theirs, listed(drawn(0)), [listed(g) for g in GRADIENTS])
    for name in SHAPES:
        np.testing.assert_allclose(listed(found)[name], expected[name], atol=1e-5)


def test_adafactors_first_direction_by_hand():
    # s = g^2 = [[1, 4], [9, 16]] and at t = 1 the moments are those of s: rows [2.5, 12.5], columns [5, 10], mean of
    # rows 7.5. u = g / sqrt(r c / 7.5): 1 / sqrt(2.5 * 5 / 7.5) = 0.774597, 2 / sqrt(2.5 * 10 / 7.5) = 1.095445,
    # 3 / sqrt(12.5 * 5 / 7.5) = 1.039230, 4 / sqrt(12.5 * 10 / 7.5) = 0.979796
    config = Adafactor(learning_rate=1.0, clip_rms=None, clip_norm=None)
    leaves, params = {"w": leaf_of("w", ("embed", "mlp"))}, {"w": jnp.zeros((2, 2))}
    after, state = trajectory(config, leaves, params, [{"w": jnp.array([[1.0, 2.0], [3.0, 4.0]])}])
    np.testing.assert_allclose(-after["w"], [[0.774597, 1.095445], [1.039230, 0.979796]], rtol=1e-5)
    assert sorted(leaf.shape for leaf in jax.tree.leaves(state)) == [(), (), (1, 2), (2, 1)]


@pytest.mark.parametrize(("dtype", "rounding"), [(None, 1e-4), ("bfloat16", 0.1)])
def test_orthogonalized_matrices_keep_their_directions_and_get_singular_values_near_one(dtype, rounding):
    x = jax.random.normal(jax.random.key(0), (5, 6, 9))
    for wide in (x, jnp.swapaxes(x, 1, 2)):
        found = jax.jit(lambda x: orthogonalize(x, iterations=5, eps=1e-8, dtype=dtype))(wide)
        assert found.dtype == jnp.float32
        u, _, v = jnp.linalg.svd(wide, full_matrices=False)
        middle = jnp.swapaxes(u, 1, 2) @ found @ jnp.swapaxes(v, 1, 2)
        singular = jnp.diagonal(middle, axis1=1, axis2=2)
        np.testing.assert_allclose(middle - jax.vmap(jnp.diag)(singular), 0, atol=rounding)
        assert 0.6 < float(singular.min()) and float(singular.max()) < 1.25
    np.testing.assert_array_equal(orthogonalize(jnp.zeros((1, 2, 3)), iterations=5, eps=1e-8, dtype=dtype), 0)


def test_muon_of_a_diagonal_matrix_by_hand():
    # diag(3, 4) / 5 = diag(0.6, 0.8). p(x) = 3.4445 x - 4.7750 x^3 + 2.0315 x^5: p(0.6) = 2.0667 - 1.0314 + 0.15797 =
    # 1.19327; p(0.8) = 2.7556 - 2.4448 + 0.66568 = 0.97648. Scaled by 0.2 sqrt(2) = 0.282843: 0.337508, 0.276191
    config = Muon(learning_rate=1.0, iterations=1, clip_norm=None)
    leaves, params = {"w": leaf_of("w", ("layers", "embed", "mlp"))}, {"w": jnp.zeros((1, 2, 2))}
    after, _ = trajectory(config, leaves, params, [{"w": jnp.array([[[3.0, 0.0], [0.0, 4.0]]])}])
    np.testing.assert_allclose(-after["w"][0], [[0.337508, 0], [0, 0.276191]], rtol=1e-4, atol=1e-7)


def test_muon_iterates_in_bfloat16_and_its_momentum_stays_as_it_is():
    # As above, of terms of up to 2.8 that bfloat16 rounds to one in 256.
    config = Muon(learning_rate=1.0, iterations=1, clip_norm=None, dtype="bfloat16")
    leaves, params = {"w": leaf_of("w", ("layers", "embed", "mlp"))}, {"w": jnp.zeros((1, 2, 2))}
    after, state = trajectory(config, leaves, params, [{"w": jnp.array([[[3.0, 0.0], [0.0, 4.0]]])}])
    found = -np.asarray(after["w"][0]) / (0.2 * 2**0.5)
    np.testing.assert_allclose(found, [[1.19327, 0], [0, 0.97648]], atol=0.03)
    assert abs(found[0, 0] - 1.19327) > 1e-3  # rounded indeed
    momentum = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (1, 2, 2)]
    np.testing.assert_allclose(momentum, [[[[0.15, 0], [0, 0.2]]]], rtol=1e-6)


# --- What stays as it is ------------------------------------------------------------------------------------------


def test_a_sound_step_moves_what_is_trained_and_its_moments_by_hand():
    # AdamW's first step: m = (1 - 0.8) * 2 = 0.4, v = (1 - 0.9) * 4 = 0.4, corrected 2 and 4, so that -0.1 * 2 / 2 is
    # added. The frozen array stays, and nothing is said to be added to it.
    config = AdamW(learning_rate=0.1, b1=0.8, b2=0.9, clip_norm=None, groups=(ParameterGroup(names="b", frozen=True),))
    leaves = {name: leaf_of(name, ("norm",)) for name in ("a", "b")}
    params, gradient = {"a": jnp.array([1.0]), "b": jnp.array([5.0])}, {"a": jnp.array([2.0]), "b": jnp.array([9.0])}
    state = begin(*ruled(config), params, leaves)
    one = jax.jit(lambda c, sound: step(*ruled(c), gradient, state, params, leaves, sound))
    after, moved, added = one(traced(config), jnp.bool_(True))
    np.testing.assert_allclose([after["a"][0], after["b"][0], added["a"][0]], [0.9, 5, -0.1], rtol=1e-6)
    assert added["b"] is None
    moments = [float(leaf[0]) for leaf in jax.tree.leaves(moved) if leaf.ndim]
    counts = [int(leaf) for leaf in jax.tree.leaves(moved) if not leaf.ndim]
    np.testing.assert_allclose(moments, [0.4, 0.4], rtol=1e-6)
    assert counts and set(counts) == {1}
    after, kept, _ = one(traced(config), jnp.bool_(False))
    jax.tree.map(np.testing.assert_array_equal, (after, kept), (params, state))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("more", [{}, {"momentum": 0.9}])
def test_an_unsound_step_keeps_every_bit_of_weights_and_state(name, more):
    if more and name == "AdamW":
        more = {"moments": "bfloat16"}
    config, params = CONFIGS[name](weight_decay=0.1, **more), drawn(0)
    params, state = trajectory(config, STACK, params, GRADIENTS[:1])
    bad = jax.tree.map(lambda x: x * jnp.nan, GRADIENTS[1])
    one = jax.jit(lambda c, g, s, p, sound: step(*ruled(c), g, s, p, STACK, sound)[:2])
    after = one(traced(config), bad, state, params, jnp.bool_(False))
    jax.tree.map(np.testing.assert_array_equal, after, (params, state))
    moved = one(traced(config), GRADIENTS[1], state, params, jnp.bool_(True))
    assert all(not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves((params, state))))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_frozen_group_keeps_its_bits_has_no_state_and_does_not_share_in_clipping(name):
    frozen = (ParameterGroup(names="layers/o", frozen=True),)
    config = CONFIGS[name](weight_decay=0.1, clip_norm=0.1, groups=frozen)
    params, state = trajectory(config, STACK, drawn(0), GRADIENTS)
    np.testing.assert_array_equal(params["o"], drawn(0)["o"])
    without = {k: v for k, v in STACK.items() if k != "o"}
    fewer = lambda tree: {k: v for k, v in tree.items() if k != "o"}
    config = dataclasses.replace(config, groups=())
    expected, smaller = trajectory(config, without, fewer(drawn(0)), [fewer(g) for g in GRADIENTS])
    jax.tree.map(np.testing.assert_array_equal, fewer(params), expected)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(state), jax.tree.leaves(smaller))


def test_a_group_has_its_learning_rate_and_the_first_that_matches_counts():
    groups = (ParameterGroup(names="layers/o", learning_rate=0.3), ParameterGroup(names="layers/*", learning_rate=0.2))
    config = AdamW(learning_rate=0.1, clip_norm=None, groups=groups)
    leaves = {**STACK, "embed": leaf_of("embed", ("vocab", "embed"))}
    params = {**drawn(0), "embed": jnp.zeros((2, 2))}
    gradient = jax.tree.map(jnp.ones_like, params)
    after, _ = trajectory(config, leaves, params, [gradient])
    moved = {name: float((params[name] - after[name]).mean()) for name in params}
    expected = {"o": 0.3, "q": 0.2, "expert_up": 0.2, "norm": 0.2, "embed": 0.1}
    assert moved == pytest.approx(expected, rel=1e-5)


def test_a_critic_of_its_own_has_its_own_learning_rate():
    policy, critic = AdamW(learning_rate=1e-6, average=0.9), AdamW(learning_rate=1e-5)
    assert optimizers(Online(objective=PPO(), optimizer=policy)) == {"policy": policy}
    both = Online(objective=PPO(), optimizer=policy, critic="policy", critic_optimizer=critic)
    assert optimizers(both) == {"policy": policy, "critic": critic}
    # Without one of its own it learns as the policy does; the moving average is the policy's alone.
    as_policy = dataclasses.replace(both, critic_optimizer=None)
    assert optimizers(as_policy)["critic"] == AdamW(learning_rate=1e-6)


def test_a_small_update_is_lost_in_bfloat16_weights_and_not_in_float32():
    # Between 1 and 2 bfloat16 has numbers 2^-7 = 0.0078125 apart, float32 2^-23 = 1.2e-7. Adam's first update is the
    # learning rate: 1e-6 is 8 of the latter and none of the former, however often.
    config = traced(AdamW(learning_rate=1e-6, clip_norm=None))
    for dtype, moves in ((jnp.bfloat16, False), (jnp.float32, True)):
        params, gradient = {"w": jnp.ones(1, dtype)}, {"w": -jnp.ones(1, dtype)}
        after, _, _ = step(*ruled(config), gradient, begin(*ruled(config), params, BIAS), params, BIAS, jnp.bool_(True))
        assert (float(after["w"][0]) > 1) == moves
    assert float(jnp.nextafter(jnp.bfloat16(1), jnp.bfloat16(2))) == 1 + 2**-7


def test_groups_that_say_nothing_are_refused():
    with pytest.raises(ValueError, match=r"ParameterGroup\.names = 'layers/k' matches no array; there are layers/exp"):
        check(*ruled(AdamW(groups=(ParameterGroup(names="layers/k", frozen=True),))), STACK)
    both = (ParameterGroup(names="layers/*", learning_rate=0.1), ParameterGroup(names="layers/q", frozen=True))
    with pytest.raises(ValueError, match="'layers/q' matches only arrays of groups before it"):
        check(*ruled(AdamW(groups=both)), STACK)
    with pytest.raises(ValueError, match=r"AdamW\.groups freezes every array"):
        check(*ruled(AdamW(groups=(ParameterGroup(names="*", frozen=True),))), STACK)
    with pytest.raises(ValueError, match="is frozen: learning_rate and weight_decay have no effect"):
        ParameterGroup(names="*", frozen=True, learning_rate=0.1)
    with pytest.raises(ValueError, match=r"ParameterGroup\.learning_rate = 0\.0 cannot train"):
        ParameterGroup(names="*", learning_rate=0.0)
    for name in ("learning_rate", "weight_decay"):
        for value in (math.nan, 1e39):  # 1e39 is inf in float32
            with pytest.raises(ValueError, match=re.escape(f"ParameterGroup.{name} = {value} cannot train")):
                ParameterGroup(names="*", **{name: value})
    with pytest.raises(ValueError, match=r"ParameterGroup\.learning_rate = 1e-50 cannot train"):  # 0 in float32
        ParameterGroup(names="*", learning_rate=1e-50)
    with pytest.raises(ValueError, match="has the pattern 'a' twice"):
        AdamW(groups=(ParameterGroup(names="a", frozen=True), ParameterGroup(names="a", frozen=True)))
    check(*ruled(AdamW(groups=both[:1])), STACK)


def test_muon_needs_a_matrix_of_layers():
    flat = {"kernel": leaf_of("kernel", (None, None)), "embed": leaf_of("embed", ("vocab", "embed"))}
    with pytest.raises(ValueError, match="Muon orthogonalizes the matrices of stacked layers"):
        check(*ruled(Muon()), flat)
    with pytest.raises(ValueError, match="every matrix is frozen"):
        check(
            *ruled(Muon(groups=tuple(ParameterGroup(names=f"layers/{k}", frozen=True) for k in ("q", "o", "exp*")))),
            STACK,
        )
    check(*ruled(Muon()), STACK)


# --- Sharded ------------------------------------------------------------------------------------------------------

CUTS = {"q": (None, "fsdp", "tensor", None), "o": (None, "tensor", None, "fsdp"),
        "expert_up": (None, None, "fsdp", "tensor"), "norm": (None, None)}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_sharded_arrays_take_the_same_steps_and_their_state_is_sharded_like_them(name):
    config = CONFIGS[name](learning_rate=0.1, weight_decay=0.1)
    expected, _ = trajectory(config, STACK, drawn(0), GRADIENTS)
    with jax.set_mesh(make_mesh(MeshShape(fsdp=2, tensor=2), jax.devices()[:4])) as _:
        mesh = jax.sharding.get_mesh()
        place = lambda tree: {
            name: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*CUTS[name]))) for name, x in tree.items()
        }
        params = place(drawn(0))
        state = jax.jit(lambda params: begin(*ruled(config), params, STACK))(params)
        one = jax.jit(lambda c, g, s, p: step(*ruled(c), g, s, p, STACK, jnp.bool_(True))[:2])
        for gradient in GRADIENTS:
            params, state = one(traced(config), place(gradient), state, params)
        for leaf, param in zip(jax.tree.leaves(params), jax.tree.leaves(place(drawn(0)))):
            assert leaf.sharding.is_equivalent_to(param.sharding, leaf.ndim)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            own = next((n for n in SHAPES if f"'{n}'" in jax.tree_util.keystr(path)), None)
            if own is None:
                continue
            cut = [axis if size > 1 else None for size, axis in zip(leaf.shape, CUTS[own], strict=True)]
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*cut)), leaf.ndim), path
    for key in SHAPES:
        np.testing.assert_allclose(params[key], expected[key], atol=2e-5)


@pytest.mark.parametrize("layers", [8, 5, 3])
@pytest.mark.parametrize(
    ("mesh", "cut", "stack", "here", "gathers"),
    [
        (dict(fsdp=4, tensor=2), (None, "fsdp", "tensor"), 1, {8: 1, 5: 1, 3: 1}, False),
        (dict(fsdp=4, tensor=2), (None, None, ("fsdp", "tensor")), 1, {8: 1, 5: 1, 3: 1}, False),
        (dict(data=2, fsdp=2), (None, "fsdp", None), 1, {8: 2, 5: 2, 3: 1}, True),
        (dict(fsdp=2, expert=2), (None, "expert", "fsdp", None), 2, {8: 4, 5: 3, 3: 2}, False),
    ],
)
def test_every_device_has_whole_matrices_of_its_share_of_the_layers(layers, mesh, cut, stack, here, gathers):
    """The number of layers need not divide. Copies (data) gather results; between shards parts alone are exchanged."""
    shape, seen = (layers, *(4,) * (stack - 1), 8, 16), []

    def centered(x):  # needs whole matrices
        seen.append(x.shape)
        return x * jnp.sum(x * x, axis=(-2, -1), keepdims=True)

    x = jax.random.normal(jax.random.key(0), shape)
    expected = centered(x)
    with jax.set_mesh(make_mesh(MeshShape(**mesh), jax.devices()[: math.prod(mesh.values())])):
        given = jax.device_put(x, NamedSharding(jax.sharding.get_mesh(), PartitionSpec(*cut)))
        program = jax.jit(lambda x: by_layer(centered, x, stack)).lower(given).compile()
        found = program(given)
    assert seen[-1] == (here[layers], *(2,) * (stack - 1), 8, 16)
    assert found.sharding.is_equivalent_to(given.sharding, found.ndim)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    text = program.as_text()
    assert "all-to-all" in text and ("all-gather" in text) == gathers


# --- The moving average -------------------------------------------------------------------------------------------


def test_the_average_follows_weights_and_heads_and_stays_where_a_step_was_skipped():
    # 0.9 * 1 + 0.1 * 2 = 1.1, then 0.9 * 1.1 + 0.1 * 2 = 1.19; of the head 0.9 * 0 + 0.1 * 5 = 0.5
    model = lambda w, h: ModelState({"w": jnp.float32(w)}, None, {"value": jnp.float32(h)}, None, jnp.int32(0))
    move = jax.jit(moved_average)
    first = move(model(1, 0), model(2, 5), jnp.float32(0.9), jnp.bool_(True))
    np.testing.assert_allclose([first.params["w"], first.heads["value"]], [1.1, 0.5], rtol=1e-6)
    second = move(first, model(2, 5), jnp.float32(0.9), jnp.bool_(True))
    np.testing.assert_allclose(second.params["w"], 1.19, rtol=1e-6)
    kept = move(first, model(jnp.nan, 5), jnp.float32(0.9), jnp.bool_(False))
    jax.tree.map(np.testing.assert_array_equal, kept, first)
