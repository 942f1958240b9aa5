"""T-REG (P25), by hand: token rewards out of a packed row, and the loss of a pair."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_pair_objectives import FACTS, sequences

from jrl.algos import ALGOS
from jrl.algos.t_reg import TREG
from jrl.device.sharding import MeshShape, make_mesh
from jrl.learning.learner import ModelOutputs, micro_batch, sequence_terms
from jrl.ops.token_regularization import token_contrast
from jrl.types import PackedBatch, Recomputed, SequenceTargets, TrainBatch

ROW = ALGOS["TREG"]
NAN = np.nan
# The running pair, D = 2, and its answers after the other prompts; sums of r_t lp_t -0.1 and -0.2
PAIR = dataclasses.replace(
    sequences([-10.0, -12.0, NAN, NAN, NAN, NAN], [-11.0, -11.0] + [NAN] * 4, [10, 12] * 3, [1.0, 0, -1, -2, -3, -4]),
    unit=jnp.zeros((1, 6), jnp.int32), contrast=jnp.float32([[-0.1, -0.2, NAN, NAN, NAN, NAN]]),
)  # fmt: skip


def test_by_hand():
    loss, metrics = jax.jit(ROW.sequence_loss)(TREG(), PAIR, ())
    # REG 0.01 + 0.02; log(1 + e^-0.2) + 0.25 sigmoid(-0.2) 0.03
    np.testing.assert_allclose(loss, [[0.601515, 0, 0, 0, 0, 0]], rtol=1e-5)
    np.testing.assert_allclose(metrics["t_reg/regularizer"], [[0.03, 0, 0, 0, 0, 0]], rtol=1e-5)
    np.testing.assert_allclose(metrics["pairs/margin"], [[2, 0, 0, 0, 0, 0]])
    total = lambda given: ROW.sequence_loss(TREG(), PAIR.replace(**given), ())[0].sum()
    slope = jax.jit(jax.grad(total))({"logprob": PAIR.logprob, "contrast": PAIR.contrast})
    # DPO's alone, -0.1 sigmoid(-0.2): no gradient passes the weight; -0.25 * 0.1 sigmoid(-0.2) of both sums
    np.testing.assert_allclose(slope["logprob"], [[-0.0450166, 0.0450166, 0, 0, 0, 0]], rtol=1e-5)
    np.testing.assert_allclose(slope["contrast"], [[-0.01125415, -0.01125415, 0, 0, 0, 0]], rtol=1e-5)


def test_a_pair_that_lacks_an_answer_is_left_out():
    empty = PAIR.replace(length=jnp.int32([[10, 0, 10, 12, 10, 12]]))
    masked = PAIR.replace(mask=jnp.array([[True, False] + [True] * 4]))
    for lacking in (empty, masked):
        np.testing.assert_array_equal(jax.jit(ROW.sequence_loss)(TREG(), lacking, ())[0], 0)


# One packed row: w, l after the worse prompt, w after the better one, l, w after the worse one, l after the better one,
# and padding. Prompts (P) are of different lengths; w has two tokens, l one.
SEGMENT = jnp.array([0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4, 4, 5, 5, 6])
MASK = jnp.array([0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 0], bool)
LOGPROB = jnp.array([NAN, -9, -9, NAN, -1.5, NAN, -1.0, -2.0, NAN, -9, NAN, NAN, -1.4, -1.5, NAN, -1.0, NAN])
LABEL = jnp.array([1.0, -4, -1, 0, -3, -2])
UNIT, COUNTS = jnp.zeros(6, jnp.int32), jnp.ones(6, bool)


def contrast(label=LABEL, unit=UNIT, counts=COUNTS, mask=MASK):
    return jax.jit(token_contrast)(LOGPROB, mask, SEGMENT, label, unit, counts)


def test_an_answers_tokens_are_contrasted_with_those_after_two_other_prompts():
    # w: -1 against -1.4, -2 against -1.5; l: -1 against -1.5. sigmoid(0.4) - 1/2, sigmoid(-0.5), sigmoid(0.5)
    expected = np.zeros(17)
    expected[[1, 2, 9]] = [0.098688, -0.122459, 0.122459]
    np.testing.assert_allclose(contrast(), expected, rtol=1e-5)
    two_rows = [jnp.stack([x, x]) for x in (LOGPROB, MASK, SEGMENT, LABEL, UNIT, COUNTS)]
    np.testing.assert_allclose(jax.jit(token_contrast)(*two_rows), np.stack([expected, expected]), rtol=1e-5)
    of = lambda lp: token_contrast(lp, MASK, SEGMENT, LABEL, UNIT, COUNTS).sum()
    np.testing.assert_array_equal(jax.jit(jax.grad(of))(LOGPROB), 0)


def test_answers_of_two_pairs_in_a_row_are_contrasted_with_their_own():
    # The same again after it with other log-probs: -1 against -1.1 and -2 against -2.4 of w, -3 against -1 of l.
    again = jnp.array([NAN, -9, -9, NAN, -1.0, NAN, -1.0, -2.0, NAN, -9, NAN, NAN, -1.1, -2.4, NAN, -3.0, NAN])
    both = (jnp.concatenate([LOGPROB[:16], again]), jnp.concatenate([MASK[:16], MASK]),
            jnp.concatenate([SEGMENT[:16], SEGMENT + 6]), jnp.tile(LABEL, 2), jnp.repeat(jnp.arange(2), 6))  # fmt: skip
    alone = jax.jit(token_contrast)(again, MASK, SEGMENT, LABEL, UNIT, COUNTS)
    np.testing.assert_allclose(alone[jnp.array([1, 2, 9])], [0.024979, 0.098688, -0.380797], rtol=1e-4)
    found = jax.jit(token_contrast)(*both, jnp.ones(12, bool))
    np.testing.assert_allclose(found, jnp.concatenate([contrast()[:16], alone]), rtol=1e-5)
    # Of a pair that does not count nothing is contrasted, and it stands beside no other.
    found = jax.jit(token_contrast)(*both, jnp.arange(12) >= 6)
    np.testing.assert_allclose(found, jnp.concatenate([jnp.zeros(16), alone]), rtol=1e-5)


@pytest.mark.parametrize("offset", [-2, -4])
def test_what_lacks_one_of_both_is_not_contrasted(offset):
    # w without the one that asks for a good answer, or for a bad one; l has both.
    expected = np.zeros(17)
    expected[9] = 0.122459
    lacking = jnp.where(LABEL == 1 + offset, -9, LABEL)
    np.testing.assert_allclose(contrast(label=lacking), expected, rtol=1e-5)
    at = int(jnp.argmax(LABEL == 1 + offset))  # or it is cut to one token
    cut = MASK & ~((SEGMENT == at) & (jnp.cumsum(MASK & (SEGMENT == at)) == 2))
    np.testing.assert_allclose(contrast(mask=cut), expected, rtol=1e-5)


def test_rows_may_be_sharded_over_data():
    rows = [jnp.stack([x] * 4) for x in (LOGPROB, MASK, SEGMENT, LABEL, UNIT, COUNTS)]
    mesh = make_mesh(MeshShape(data=4), jax.devices()[:4])
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, jax.NamedSharding(mesh, jax.P("data"))) for x in rows]
        found = jax.jit(token_contrast)(*placed)
    np.testing.assert_array_equal(found, np.stack([contrast()] * 4))


def test_the_learner_sums_token_rewards_times_the_policys_own_log_probs():
    row = lambda x: x[None, None]
    packed = PackedBatch(
        tokens=row(SEGMENT), positions=row(SEGMENT), segment=row(SEGMENT), shared_prefix=None, prefix_row=None,
        action_mask=row(MASK), behaviour_logprobs=None, sampler_logprobs=None,
        sequence=row(jnp.arange(6)), temperature=jnp.float32(1), num_real=jnp.int32(1),
    )  # fmt: skip
    targets = SequenceTargets(row(COUNTS), row(LABEL), jnp.ones((1, 1, 6)), row(UNIT), jnp.float32(1))
    weights = jnp.ones_like(row(LOGPROB))
    batch = TrainBatch(packed, Recomputed(ref_logprobs=row(LOGPROB)), row(MASK), weights, None, None, targets,
                       jnp.float32(1))  # fmt: skip
    micro = micro_batch(batch, jnp.int32(0))
    # lp -3 and -2 of w's tokens, -1 of l's: their sums of r lp are -0.051146 and -0.122459
    logprobs = jnp.full((1, 17), jnp.nan).at[0, jnp.array([1, 2, 9])].set(jnp.array([-3.0, -2.0, -1.0]))
    logprobs = logprobs.at[0, jnp.array([4, 6, 7, 12, 13, 15])].set(-0.5)
    terms = lambda logprobs: sequence_terms(
        ModelOutputs(logprobs, None, None, None, None, None), micro, TREG(beta=0.5, alpha=1.0), (), ROW
    )

    def total(logprobs):
        loss, metrics = terms(logprobs)
        return loss.sum(), (loss, metrics)

    slope, (loss, metrics) = jax.jit(jax.grad(total, has_aux=True))(logprobs)
    np.testing.assert_allclose(metrics["t_reg/regularizer"], 0.5 * (0.051146 + 0.122459), rtol=1e-4)
    margin = 0.5 * ((-5 + 18) - (-1 + 9))  # D = 13 - 8
    expected = np.log1p(np.exp(-margin)) + 0.086803 / (1 + np.exp(margin))
    np.testing.assert_allclose(loss, [[expected, 0, 0, 0, 0, 0]], rtol=1e-4)
    slope = slope[0]
    fading = 1 / (1 + np.exp(margin))
    np.testing.assert_allclose(slope[jnp.array([1, 9])], [
        -0.5 * fading - 0.5 * fading * 0.098688, 0.5 * fading - 0.5 * fading * 0.122459], rtol=1e-4)  # fmt: skip
    np.testing.assert_array_equal(slope[jnp.array([4, 6, 7, 12, 13, 15])], 0)  # nothing is learned from contrasts


def test_an_answer_without_both_contrasts_has_none():
    alone = np.zeros(17)
    alone[9] = 0.122459
    for without in (
        contrast(label=LABEL.at[4].set(-5.0)),  # did not fit
        contrast(unit=UNIT.at[4].set(1)),  # of another pair
        contrast(counts=COUNTS.at[2].set(False)),
        contrast(mask=MASK.at[13].set(False)),  # cut
    ):
        np.testing.assert_allclose(without, alone, rtol=1e-5)


@pytest.mark.parametrize("field", ["beta", "alpha"])
def test_coefficients_are_above_0(field):
    with pytest.raises(ValueError, match=rf"TREG\.{field} = 0\.0 must be above 0"):
        ROW.check(TREG(**{field: 0.0}), FACTS)
