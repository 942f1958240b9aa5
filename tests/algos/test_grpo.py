from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ALGOS
from jrl.algos.common import TruncatedImportance
from jrl.algos.contract import Facts, Groups, Tokens
from jrl.algos.grpo import GRPO
from jrl.types import Finish

OBJECTIVE = ALGOS["GRPO"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=3)

MASK = jnp.array([[True, False, False], [True, True, True]])


def tokens(new, old, advantages, mask=None, behaviour=None, reference=None):
    row = lambda x: jnp.asarray(x, jnp.float32)
    return Tokens(
        logprobs=row(new),
        old_logprobs=row(old),
        behaviour_logprobs=row(old if behaviour is None else behaviour),
        ref_logprobs=None if reference is None else row(reference),
        entropy=jnp.ones(len(new)),
        advantages=row(advantages),
        mask=jnp.ones(len(new), bool) if mask is None else jnp.array(mask),
        segment=jnp.zeros(len(new), jnp.int32),
        num_segments=1,
    )


def test_the_advantage_is_the_zscore_on_each_sampled_token_and_counters_tell_of_the_groups():
    # group 0: [1, 0, 0, 1] -> 0.5 / (0.57735 + 1e-6) = 0.866024; group 1: all 1 -> 0; group 2: one row is left -> 0
    reward = jnp.array([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 5.0, jnp.nan, 5.0])
    groups = Groups(
        reward=reward,
        outcome=reward,
        valid=jnp.isfinite(reward),
        group=jnp.array([0, 0, 0, 0, 1, 1, 2, 2, 2], jnp.int32),
        action_mask=jnp.array([[False, True, True]] * 8 + [[False] * 3]),
        finish=jnp.zeros(9, jnp.int8),
        num_groups=4,
        max_completion=2,
    )
    fn = jax.jit(lambda config, g: OBJECTIVE.advantages(config, g, g.reward, jnp.float32(0.7)))
    got, state, counters = fn(GRPO(), groups)
    z = 0.866024
    np.testing.assert_allclose(got[:, 1], [z, -z, -z, z, 0, 0, 0, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(got[:, 1], got[:, 2].at[8].set(0))
    np.testing.assert_array_equal(got[:, 0], 0)
    assert state == np.float32(0.7)  # whatever it is: theirs has none
    counts = {name: int(counters[name]) for name in counters if name != "reward_used"}
    assert counts == {"zero_variance_groups": 1, "group_of_one": 1, "unscorable": 1, "aborted": 1}
    np.testing.assert_allclose(counters["reward_used"], (2 + 2 + 5) / 7, rtol=1e-6)
    np.testing.assert_array_equal(OBJECTIVE.keep(GRPO(), groups), [True] * 7 + [False, False])


def test_rows_that_pad_the_batch_are_in_no_counter():
    groups = Groups(
        reward=jnp.array([1.0, 0.0, 0.0, 0.0]),
        outcome=jnp.array([1.0, 0.0, 0.0, 0.0]),
        valid=jnp.array([True, True, False, False]),
        group=jnp.array([0, 0, 1, 1], jnp.int32),
        action_mask=jnp.array([[True], [True], [False], [False]]),
        finish=jnp.array([Finish.STOP_TOKEN, Finish.LENGTH, Finish.LENGTH, Finish.LENGTH], jnp.int8),
        num_groups=2,
        max_completion=1,
    )
    counters = OBJECTIVE.advantages(GRPO(), groups, groups.reward, ())[2]
    assert (int(counters["unscorable"]), int(counters["aborted"])) == (0, 0)
    failed = groups.replace(finish=groups.finish.at[2].set(Finish.FAILED))  # not padding: sampling was tried
    counters = OBJECTIVE.advantages(GRPO(), failed, failed.reward, ())[2]
    assert (int(counters["unscorable"]), int(counters["aborted"])) == (1, 1)


def test_the_loss_is_the_clip_and_metrics_say_where_it_binds():
    # rho 1.5, A 1: -1.2; rho 0.5, A -1: 0.8; rho 1.1, A 1: -1.1
    old, ratio = np.array([-1.0, -2.0, -0.5]), np.array([1.5, 0.5, 1.1])
    loss, metrics = jax.jit(OBJECTIVE.token_loss)(GRPO(), tokens(old + np.log(ratio), old, [1, -1, 1]), ())
    np.testing.assert_allclose(loss, [-1.2, 0.8, -1.1], rtol=1e-6)
    np.testing.assert_array_equal(metrics["clip_fraction_high"], [1, 0, 0])
    np.testing.assert_array_equal(metrics["clip_fraction_low"], [0, 1, 0])
    np.testing.assert_allclose(metrics["ratio"], ratio, rtol=1e-6)
    # approx_kl: 0.5 * log(rho)^2, and rho - 1 - log rho
    np.testing.assert_allclose(metrics["approx_kl_k2"], np.log(ratio) ** 2 / 2, rtol=1e-5)
    np.testing.assert_allclose(metrics["approx_kl_k3"], ratio - 1 - np.log(ratio), rtol=1e-4)
    np.testing.assert_array_equal(metrics["clamped"], 0)
    assert "importance_weight" not in metrics and "kl_ref_k1" not in metrics


def test_mismatch_compares_sampler_and_learner_whether_or_not_it_is_corrected():
    # M17: lp_beh [-1, -2], lp_old [-1.1, -1.9]: k1 [0.1, -0.1]; k3 exp(-0.1) - 1 + 0.1, exp(0.1) - 1 - 0.1
    batch = tokens([-1.1, -1.9], [-1.1, -1.9], [1, 1], behaviour=[-1.0, -2.0])
    for config in (GRPO(), GRPO(importance=TruncatedImportance())):
        _, metrics = OBJECTIVE.token_loss(config, batch, ())
        np.testing.assert_allclose(metrics["mismatch_k1"], [0.1, -0.1], rtol=1e-5)
        np.testing.assert_allclose(metrics["mismatch_k3"], [0.0048374, 0.0051709], rtol=1e-3)


def test_importance_weights_multiply_the_policy_loss():
    # L11: behaviour -1.2, old -1.0, new -0.9, A = 1: -exp(0.2) * min(exp(0.1), 1.2) = -1.349859
    batch = tokens([-0.9, -0.9], [-1.0, -1.0], [1, 1], behaviour=[-1.2, -3.0])
    loss, metrics = OBJECTIVE.token_loss(GRPO(importance=TruncatedImportance(cap=2.0)), batch, ())
    # the second weight is exp(2) cut to 2: -2 * exp(0.1) = -2.210342
    np.testing.assert_allclose(loss, [-1.3498588, -2.2103418], rtol=1e-6)
    np.testing.assert_allclose(metrics["importance_weight"], [1.2214028, 2.0], rtol=1e-6)
    np.testing.assert_array_equal(metrics["importance_capped"], [0, 1])


@pytest.mark.parametrize(
    "level, weight", [("token", [np.e, 1.0]), ("sequence", [np.e] * 2), ("geometric", [np.e**0.5] * 2)]
)
def test_importance_levels(level, weight):
    batch = tokens([-1, -1], [-1, -1], [1, 1], behaviour=[-2, -1])
    option = TruncatedImportance(cap=100.0, level=level)
    np.testing.assert_allclose(
        OBJECTIVE.token_loss(GRPO(importance=option), batch, ())[0], -np.array(weight), rtol=1e-6
    )


@pytest.mark.parametrize(
    "estimator, value, coefficient",
    [
        ("k2", 0.125, 0.5),  # d = 0.5
        ("k3", 0.1065307, 0.3934693),
        ("k3_corrected", 0.1065307, 0.5),
        ("k3_straight", 0.1065307, 0.5),
    ],
)
def test_the_kl_is_added_with_its_coefficient_and_is_not_importance_weighted(estimator, value, coefficient):
    config = GRPO(kl=0.04, kl_estimator=estimator, importance=TruncatedImportance())
    batch = tokens([-1.0], [-1.0], [0.0], behaviour=[-2.0], reference=[-1.5])
    loss = lambda lp: OBJECTIVE.token_loss(config, batch.replace(logprobs=lp), ())[0].sum()
    np.testing.assert_allclose(loss(batch.logprobs), 0.04 * value, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(loss)(batch.logprobs), [0.04 * coefficient], rtol=1e-5)
    metrics = OBJECTIVE.token_loss(config, batch, ())[1]
    # The sampler's log-prob is 1 below: e * 0.5 and e * 0.1065307.
    np.testing.assert_allclose([metrics["kl_ref_k1"][0], metrics["kl_ref_k3"][0]], [1.3591409, 0.2895805], rtol=1e-5)


def test_the_kl_that_is_reported_is_of_the_policy_as_it_is():
    # Drawn evenly from two tokens, and now the policy is [0.8, 0.2], the reference [0.5, 0.5]: its KL is
    # 0.8 log 1.6 + 0.2 log 0.4 = 0.192745, whichever estimator; the mean of k1 alone is (log 1.6 + log 0.4) / 2 =
    # -0.223144.
    even = np.log([0.5, 0.5])
    batch = tokens(np.log([0.8, 0.2]), even, [0.0, 0.0], behaviour=even, reference=even)
    metrics = OBJECTIVE.token_loss(GRPO(kl=0.04), batch, ())[1]
    np.testing.assert_allclose(metrics["kl_ref_k1"].mean(), 0.192745, rtol=1e-5)
    np.testing.assert_allclose(metrics["kl_ref_k3"].mean(), 0.192745, rtol=1e-5)


def test_the_entropy_bonus_is_subtracted():
    # A = 1, rho = 1: -1 - 0.01 * 1
    loss, _ = OBJECTIVE.token_loss(GRPO(entropy_bonus=0.01), tokens([-1.0], [-1.0], [1.0]), ())
    np.testing.assert_allclose(loss, [-1.01], rtol=1e-6)


def test_the_dual_clip_bounds_negative_advantages():
    batch = tokens([np.log(5.0)], [0.0], [-1.0])
    np.testing.assert_allclose(OBJECTIVE.token_loss(GRPO(), batch, ())[0], [5], rtol=1e-6)
    np.testing.assert_allclose(OBJECTIVE.token_loss(GRPO(dual_clip=3.0), batch, ())[0], [3], rtol=1e-6)


@pytest.mark.parametrize("field", ["logprobs", "behaviour_logprobs", "ref_logprobs"])
def test_clamps_are_counted(field):
    batch = tokens([-1.0, -1.0], [-1.0, -1.0], [1, 1], reference=[-1.0, -1.0])
    far = batch.replace(**{field: jnp.array([-1.0, -30.0])})
    np.testing.assert_array_equal(OBJECTIVE.token_loss(GRPO(kl=0.1), far, ())[1]["clamped"], [0, 1])


def test_sequences_weigh_alike():
    # G2 on rows of 1 and 3 tokens: weights 1 and 1/3, over 2 sequences
    np.testing.assert_allclose(OBJECTIVE.weights(GRPO(), MASK, 3), [[1, 0, 0], [1 / 3] * 3], rtol=1e-6)
    assert OBJECTIVE.denominator(GRPO(), MASK, 8, 3) == 2


def test_a_reference_is_needed_only_for_a_kl():
    assert not OBJECTIVE.needs(GRPO()).reference
    assert OBJECTIVE.needs(GRPO(kl=0.04)).reference
    assert OBJECTIVE.refill(GRPO()) is None


@pytest.mark.parametrize(
    "config, message",
    [
        (GRPO(clip_low=1.0), r"GRPO\.clip_low = 1\.0"),
        (GRPO(clip_low=-0.1), r"GRPO\.clip_low = -0\.1"),
        (GRPO(clip_high=-0.1), r"GRPO\.clip_high = -0\.1"),
        (GRPO(clip_high=0.3, dual_clip=1.3), r"dual_clip = 1\.3 must exceed 1 \+ clip_high"),
        (GRPO(kl=0.1, kl_estimator="k1"), "regularizes nothing"),
        (GRPO(kl=0.1, kl_estimator="k4"), r"'k4' must be 'k2', 'k3'"),
        (GRPO(kl=0.0), r"GRPO\.kl = 0\.0 must be above 0, or None"),
    ],
)
def test_illegal_combinations_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        OBJECTIVE.check(config, FACTS)


def test_one_sample_a_prompt_is_refused():
    with pytest.raises(ValueError, match="at least 2 of them, got samples=1"):
        OBJECTIVE.check(GRPO(), FACTS._replace(samples=1))


def test_a_floating_point_nan_is_refused():
    with pytest.raises(ValueError, match="clip_low = nan"):
        OBJECTIVE.check(GRPO(clip_low=float("nan")), FACTS)
