from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from small_batches import credited, groups_of, loss_of, tokens, two_prompts

from jrl.algos import ALGOS
from jrl.algos.contract import Facts
from jrl.algos.sequence_rloo import SequenceRLOO

OBJECTIVE = ALGOS["SequenceRLOO"]
FACTS = Facts(samples=4, lag=0, updates_per_batch=1, truncated_sampling=False, greedy=False, max_completion=2)


def test_without_a_reference_advantages_are_those_of_rloo():
    found = credited(OBJECTIVE, SequenceRLOO(kl_in_reward=None), two_prompts())
    np.testing.assert_allclose(found, [1, 1, -0.5, -1, -0.5, 0, 0], rtol=1e-6)


def test_the_kl_of_an_answer_is_taken_from_its_reward():
    # Row 0: log-ratios 0.5 and 1.5 on its two tokens, 0.1 * 2 off its reward: 0.8 against 0.
    rows = groups_of([1.0, 0.0], [0, 0])
    old = jnp.array([[jnp.nan, -1.0, -1.0], [jnp.nan, -2.0, -2.0]])
    rows = rows.replace(old_logprobs=old, ref_logprobs=old - jnp.array([[0, 0.5, 1.5], [0, 0, 0]]))
    found = OBJECTIVE.advantages(SequenceRLOO(kl_in_reward=0.1), rows, rows.reward, ())[0]
    np.testing.assert_allclose(found, [[0, 0.8, 0.8], [0, -0.8, -0.8]], rtol=1e-6)
    assert OBJECTIVE.needs(SequenceRLOO()).reference and not OBJECTIVE.needs(SequenceRLOO(kl_in_reward=None)).reference


def test_the_ratio_is_that_of_the_whole_answer_and_an_answer_counts_once():
    # Ratios 2 and 0.55 of tokens: 1.1 of the answer, within the clip. An answer of one token, 1.5: clipped at 1.2.
    new = np.log([2.0, 0.55, 1.5])
    batch = tokens(new, [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], segment=[0, 0, 1])
    loss, _, gradient = loss_of(OBJECTIVE, SequenceRLOO(), batch)
    np.testing.assert_allclose(loss, [-1.1, -1.1, -1.2], rtol=1e-6)
    # Each token of an answer weighs 1 / length: the gradient of 1.1 by each of its log-probs is 1.1.
    weights = OBJECTIVE.weights(SequenceRLOO(), jnp.array([[True, True, False], [True, False, False]]), 3)
    np.testing.assert_allclose(weights, [[0.5, 0.5, 0], [1, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-2.2, -2.2, 0], rtol=1e-6)


@pytest.mark.parametrize("bad", [{"kl_in_reward": 0.0}, {"clip_low": 1.0}, {"entropy_bonus": -1.0}], ids=str)
def test_illegal_values_are_refused(bad):
    ((field, value),) = bad.items()
    with pytest.raises(ValueError, match=rf"SequenceRLOO\.{field} = {value}"):
        OBJECTIVE.check(SequenceRLOO(**bad), FACTS)
    with pytest.raises(ValueError, match="SequenceRLOO compares the samples of one prompt"):
        OBJECTIVE.check(SequenceRLOO(), FACTS._replace(samples=1))
