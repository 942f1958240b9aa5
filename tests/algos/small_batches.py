"""Small batches that several objectives are tried on, and what is read of their functions under jit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.algos import ALGOS
from jrl.algos.contract import Groups, Tokens
from jrl.algos.grpo import GRPO
from jrl.learning.learner import micro_batch
from jrl.types import PackedBatch, Recomputed, SequenceTargets, TrainBatch


def tokens(new, old, advantages, behaviour=None, segment=None):
    """Returns packed tokens, all in the loss: of one sequence, or of two by `segment`."""
    row = lambda x: jnp.asarray(x, jnp.float32)
    return Tokens(
        logprobs=row(new),
        old_logprobs=row(old),
        behaviour_logprobs=row(old if behaviour is None else behaviour),
        ref_logprobs=None,
        entropy=jnp.ones(len(new)),
        advantages=row(advantages),
        mask=jnp.ones(len(new), bool),
        segment=jnp.zeros(len(new), jnp.int32) if segment is None else jnp.array(segment),
        num_segments=2,
    )


def two_stored_answers(value, denominator):
    """Returns a micro-batch of a row with two stored answers, of tokens 1 and 2 and of token 4, with what the data say
    of each, [2, K]."""
    row = lambda x: jnp.asarray(x)[None, None]
    segment, mask = row([0, 0, 0, 1, 1, 2]), row([False, True, True, False, True, False])
    packed = PackedBatch(
        tokens=segment, positions=segment, segment=segment, shared_prefix=None, prefix_row=None, action_mask=mask,
        behaviour_logprobs=None, sampler_logprobs=None, sequence=row(jnp.arange(2)), temperature=jnp.float32(1),
        num_real=jnp.int32(1),
    )  # fmt: skip
    targets = SequenceTargets(row(jnp.ones(2, bool)), row(jnp.ones(2)), row(jnp.ones(2)), row(jnp.arange(2)),
                              jnp.float32(2), value=row(jnp.float32(value)))  # fmt: skip
    weights = mask.astype(jnp.float32)
    batch = TrainBatch(packed, Recomputed(), mask, weights, None, None, targets, jnp.float32(denominator))
    return micro_batch(batch, jnp.int32(0))


def loss_of(objective, config, batch, state=()):
    """Returns loss, metrics and the gradient of the sum, by log-prob."""
    loss, metrics = jax.jit(objective.token_loss)(config, batch, state)
    total = lambda lp: objective.token_loss(config, batch.replace(logprobs=lp), state)[0].sum()
    return loss, metrics, jax.grad(total)(batch.logprobs)


def two_prompts():
    """Two prompts of three rows, in turns; one row of the second has no verdict, and a row no token."""
    reward = jnp.array([1.0, 1.0, 0.0, 0.0, 0.0, jnp.nan, 9.0])
    return Groups(
        reward=reward,
        outcome=reward,
        valid=~jnp.isnan(reward),
        group=jnp.array([0, 1, 0, 1, 0, 1, 0], jnp.int32),
        action_mask=jnp.arange(3)[None, :] < jnp.array([1, 2, 3, 1, 2, 3, 0])[:, None],
        finish=jnp.zeros(7, jnp.int8),
        num_groups=2,
        max_completion=3,
    )


def credited(objective, config, given):
    """Returns advantages on every row's first token, after checking that its other sampled tokens have the same."""
    run = jax.jit(lambda config, g: objective.advantages(config, g, objective.shape(config, g), ()))
    found, state, counters = run(config, given)
    assert state == ()
    assert {name: int(counters[name]) for name in ("unscorable", "aborted")} == {"unscorable": 1, "aborted": 1}
    np.testing.assert_array_equal(found, jnp.where(given.action_mask, found[:, :1], 0))
    return found[:, 0]


def clipped_tokens():
    """Returns tokens of ratios 1.5, 0.5 and, masked, 1, drawn with half the probability that the learner gives."""
    return Tokens(
        logprobs=jnp.log(jnp.array([1.5, 0.5, 1.0])),
        old_logprobs=jnp.zeros(3),
        behaviour_logprobs=jnp.full(3, -np.log(2.0), jnp.float32),
        ref_logprobs=None,
        entropy=jnp.full(3, 2.0),
        advantages=jnp.array([1.0, -2.0, 3.0]),
        mask=jnp.array([True, True, False]),
        segment=jnp.zeros(3, jnp.int32),
        num_segments=1,
    )


def groups_of(reward, group, valid=None):
    """Returns rows of two sampled tokens each, all different."""
    row, count = jnp.asarray(reward, jnp.float32), len(reward)
    sample = [list(group[:i]).count(group[i]) for i in range(count)]
    return Groups(
        reward=row,
        outcome=row,
        valid=jnp.ones(count, bool) if valid is None else jnp.array(valid),
        group=jnp.asarray(group, jnp.int32),
        sample=jnp.array(sample, jnp.int32),
        action_mask=jnp.array([[False, True, True]] * count),
        tokens=jnp.arange(3 * count, dtype=jnp.int32).reshape(count, 3),
        finish=jnp.zeros(count, jnp.int8),
        num_groups=3,
        max_completion=2,
    )


def plain(groups):
    """Returns the advantages of GRPO."""
    return ALGOS["GRPO"].advantages(GRPO(), groups, groups.reward, ())[0]


def counted(groups):
    """Returns the sampled tokens of judged rows."""
    return np.asarray(groups.action_mask & groups.valid[:, None])


def covariances(groups):
    """Returns cov of L20 on the tokens that count, NaN elsewhere."""
    mask, advantages, lp = counted(groups), np.asarray(plain(groups), np.float64), np.asarray(groups.old_logprobs)
    return np.where(mask, (advantages - advantages[mask].mean()) * (lp - lp[mask].mean()), np.nan)


def rows_with_values():
    """A row with a tool's answer in it, one of two tokens, one without a verdict and one without a token."""
    return Groups(
        reward=jnp.array([1.0, 0.0, jnp.nan, 5.0]),
        outcome=jnp.zeros(4),
        valid=jnp.array([True, True, False, True]),
        group=jnp.arange(4, dtype=jnp.int32),
        action_mask=jnp.array([[True, True, False, True], [False, True, True, False], [True] * 4, [False] * 4]),
        finish=jnp.zeros(4, jnp.int8),
        num_groups=4,
        max_completion=4,
        values=jnp.array([[0.2, 0.4, jnp.nan, 0.6], [jnp.nan, 0.5, 0.1, jnp.nan], [9.0] * 4, [jnp.nan] * 4]),
        old_logprobs=jnp.full((4, 4), -1.0).at[0, 2].set(jnp.nan),
        behaviour_logprobs=jnp.full((4, 4), -1.0).at[0, 2].set(jnp.nan),
    )


def credited_values(objective, config, given):
    """Returns advantages and returns."""
    run = jax.jit(lambda config, g: (objective.advantages(config, g, g.reward, ())[0],
                                     objective.returns(config, g, g.reward)))  # fmt: skip
    return run(config, given)


def whitened(first, second):
    """Returns the advantages of both rows' sampled tokens in their places, whitened."""
    each = np.array([*first, *second])
    a, b, c, d, e = (each - each.mean()) / np.sqrt(each.var(ddof=1) + 1e-8)
    return [[a, b, 0, c], [0, d, e, 0], [0] * 4, [0] * 4]
