"""What every policy loss of jrl.ops owes: masks, constants, clamps, dtypes and gradients, on one packed row."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jrl.ops import (
    awr,
    covariance,
    decoupled,
    gates,
    geometric_mean,
    likelihood,
    mirror_descent,
    mix_policy,
    offline_advantage,
    sequence_ratio,
    trust_region,
)

NAN = float("nan")

# Sequence 0 is tokens 0 to 2, sequence 1 tokens 3 to 5, then padding. Tokens 2 and 6 are masked.
SEGMENT = jnp.array([0, 0, 0, 1, 1, 1, 2], jnp.int32)
MASK = jnp.array([True, True, False, True, True, True, False])
NEW = jnp.array([-1.0, -0.7, -2.0, -0.4, -1.5, -2.2, -1.0])
OLD = NEW - jnp.array([0.1, -0.25, 0.0, 0.31, -0.12, 0.05, 0.0])
BEHAVIOUR = OLD - jnp.array([0.05, 0.1, 0.0, -0.2, 0.15, 0.03, 0.0])
ADVANTAGES = jnp.array([1.5, 1.5, 1.5, -0.5, -0.5, -0.5, 2.0])

PLACES = {"num_segments": 2}
BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}


def fixed(fn, *names, **options):
    """Returns (logprobs, {name: array}) -> loss: the other arrays by their names, in the function's order."""
    return lambda lp, given: fn(lp, *(given[name] for name in names), **options)


PACKED = ("mask", "segment")
LOSSES = {
    "L5": fixed(sequence_ratio.gspo, "old", "A", *PACKED, **PLACES, **BOUNDS),
    "L6": fixed(sequence_ratio.gspo_token, "old", "A", *PACKED, **PLACES, **BOUNDS),
    "L7": fixed(sequence_ratio.sequence_clipped, "old", "A", *PACKED, **PLACES, **BOUNDS),
    "L11": fixed(decoupled.decoupled_clipped, "old", "beh", "A", "mask", **BOUNDS, cap=2.0),
    "L12": fixed(mix_policy.mix_policy_clipped, "old", "beh", "A", "mask", clip=0.5),
    "L13": fixed(mirror_descent.mirror_descent, "old", "A", *PACKED, **PLACES, tau=0.5),
    "L13 mean": fixed(mirror_descent.mean_mirror_descent, "old", "A", *PACKED, **PLACES, tau=0.5),
    "L15": fixed(offline_advantage.a_lol, "old", "A", *PACKED, **PLACES, clip=0.9),
    "L15 token": fixed(offline_advantage.a_lol_token, "old", "A", "mask", clip=0.9),
    "L15 reference-free": fixed(offline_advantage.a_lol_ref_free, "A", "mask"),
    "L15 KL": fixed(offline_advantage.a_lol_kl, "old", "A", "mask", coefficient=0.3),
    "L15 R-GOLD": fixed(offline_advantage.r_gold, "A", "mask", floor=0.1),
    "L16": fixed(awr.awr, "A", "mask", beta=0.5, max_weight=20.0),
    "L17": fixed(likelihood.positive_nll, "correct", "mask"),
    "L18": fixed(gates.soft_gated, "old", "A", "mask", positive_temperature=1.0, negative_temperature=1.05),
    "L19": fixed(geometric_mean.gmpo, "old", "A", *PACKED, **PLACES, log_clip_low=0.4, log_clip_high=0.4),
    "L20": fixed(covariance.kl_cov_loss, "old", "A", "correct", "mask", coefficient=0.7),
    "L21": fixed(trust_region.dppo, "beh", "A", "mask", delta=0.3),
}
GIVEN = {
    "old": OLD,
    "beh": BEHAVIOUR,
    "A": ADVANTAGES,
    "mask": MASK,
    "segment": SEGMENT,
    "correct": jnp.array([True] * 7),
}

IMITATION = {"L15 KL", "L16", "L17"}  # learn where the advantage is 0, or have none
PULLED = {"L13", "L13 mean", "L20"}  # pull to the old policy where the advantage is 0
HELD = {"L6", "L15", "L15 token", "L15 R-GOLD", "L21"}  # hold a weight fixed: finite differences do not see that


@pytest.mark.parametrize("name", LOSSES)
def test_masked_tokens_give_no_loss_and_no_gradient(name):
    poison = lambda x: jnp.where(MASK, x, NAN)
    dirty = GIVEN | {key: poison(GIVEN[key]) for key in ("old", "beh", "A")}
    fn = jax.jit(LOSSES[name])
    np.testing.assert_allclose(fn(poison(NEW), dirty), jnp.where(MASK, fn(NEW, GIVEN), 0), rtol=1e-6)
    gradient = jax.grad(lambda lp, given: fn(lp, given).sum())
    got = gradient(poison(NEW), dirty)
    np.testing.assert_array_equal(jnp.where(MASK, 0, got), 0)
    np.testing.assert_allclose(got, gradient(NEW, GIVEN), rtol=1e-6)
    assert jnp.all(got[MASK] != 0) or name.startswith(("L15", "L17"))


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in IMITATION])
def test_a_zero_advantage_gives_a_zero_gradient(name):
    old = NEW if name in PULLED else OLD
    fn = lambda lp: LOSSES[name](lp, GIVEN | {"A": jnp.zeros(7), "old": old}).sum()
    np.testing.assert_array_equal(jax.grad(fn)(NEW), 0)


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_given_carries_no_gradient(name):
    fn = lambda given: LOSSES[name](NEW, GIVEN | given).sum()
    for gradient in jax.grad(fn)({key: GIVEN[key] for key in ("old", "beh", "A")}).values():
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in HELD])
def test_the_gradient_matches_finite_differences(name):
    with jax.enable_x64(True):
        given = {key: x.astype(jnp.float64) if x.dtype == jnp.float32 else x for key, x in GIVEN.items()}
        loss = functools.partial(LOSSES[name], given=given)
        check_grads(loss, (NEW.astype(jnp.float64),), order=1, modes=["rev"], atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_float64_stays_and_bfloat16_is_widened(name):
    with jax.enable_x64(True):
        given = {key: x.astype(jnp.float64) if x.dtype == jnp.float32 else x for key, x in GIVEN.items()}
        assert LOSSES[name](NEW.astype(jnp.float64), given).dtype == jnp.float64
    half = {key: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for key, x in GIVEN.items()}
    assert LOSSES[name](NEW.astype(jnp.bfloat16), half).dtype == jnp.float32


@pytest.mark.parametrize("name", LOSSES)
def test_log_probs_500_nats_apart_stay_finite(name):
    far = GIVEN | {"old": jnp.array([-500.0, 0.0] * 3 + [0.0]), "beh": jnp.array([0.0, -500.0] * 3 + [0.0])}
    new = jnp.array([0.0, -500.0] * 3 + [0.0])
    fn = lambda lp: LOSSES[name](lp, far).sum()
    value, gradient = jax.value_and_grad(fn)(new)
    assert jnp.isfinite(value) and jnp.all(jnp.isfinite(gradient))


@pytest.mark.parametrize("name", LOSSES)
def test_two_sequences_in_a_row_are_two_rows(name):
    one = jnp.array([0, 0, 0], jnp.int32)
    together = LOSSES[name](NEW, GIVEN)
    for rows in (slice(0, 3), slice(3, 6)):
        alone = {key: x[rows] for key, x in GIVEN.items()} | {"segment": one}
        np.testing.assert_allclose(LOSSES[name](NEW[rows], alone), together[rows], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["L5", "L6", "L7", "L11", "L12", "L18", "L19", "L20", "L21"])
def test_on_its_own_samples_it_has_the_policy_gradient(name):
    # l_t = -A_t * logprobs_t: of the mean over each sequence's tokens where the ratio is of a sequence
    own = GIVEN | {"old": NEW, "beh": NEW}
    count = jnp.where(SEGMENT == 0, 2, 3)
    by_row = lambda loss: (loss / count).sum() if name in ("L5", "L6", "L19") else loss.sum()
    if name == "L7":
        by_row = lambda loss: (loss / count).sum()  # the ratio of a sum: each token has the whole advantage
        expected = -jnp.where(MASK, ADVANTAGES, 0)
    else:
        expected = -jnp.where(MASK, ADVANTAGES, 0) / (count if name in ("L5", "L6", "L19") else 1)
    gradient = jax.grad(lambda lp: by_row(LOSSES[name](lp, own)))(NEW)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-7)
