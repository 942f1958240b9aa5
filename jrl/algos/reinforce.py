"""REINFORCE with a moving baseline: the reward against its own running mean, no groups needed.

    A_i = R_i - b;  afterwards b <- decay * b + (1 - decay) * mean(R)     A2
    l_t = -A_i * logprobs_t                                              L1
    L   = mean over all tokens of the step                               G1

The baseline is part of the training state; before the first batch it is NaN and becomes that batch's mean.

Source: Williams 1992; the baseline as in prime-rl, which starts it at 0.
"""

from __future__ import annotations

import jax

from jrl.algos import common, contract
from jrl.algos.contract import Algorithm, Facts, Groups, Tokens
from jrl.ops import advantages as advantage_ops
from jrl.ops import reduce, surrogate
from jrl.types import traced

Array = jax.Array


@traced
class Reinforce:
    baseline_decay: float = 0.95
    entropy_bonus: float | None = None
    importance: common.TruncatedImportance | None = None


def check(config: Reinforce, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=False)
    common.check_importance(config)
    common.check_entropy(config)
    if not 0 <= config.baseline_decay < 1:
        raise ValueError(
            f"Reinforce.baseline_decay = {config.baseline_decay} must lie in [0, 1): the share of the old baseline "
            "that stays at each step. 0.95 is usual; at 1 it would never move."
        )
    if facts.updates_per_batch > 1:
        raise ValueError(
            f"Reinforce takes one update a batch, got updates_per_batch={facts.updates_per_batch}: its loss has no "
            "ratio, so from the second update on it would follow samples of another policy. Use GRPO, DrGRPO or DAPO."
        )


def advantages(
    config: Reinforce, groups: Groups, reward: Array, baseline: Array
) -> tuple[Array, Array, dict[str, Array]]:
    row, following = advantage_ops.moving_baseline(
        reward, contract.eligible(groups), baseline, decay=config.baseline_decay
    )
    counters = common.count_groups(groups, reward)
    return advantage_ops.spread(row, groups.action_mask), following, counters | {"baseline": following}


def token_loss(config: Reinforce, tokens: Tokens) -> tuple[Array, dict[str, Array]]:
    loss = surrogate.policy_gradient(tokens.logprobs, tokens.advantages, tokens.mask)
    loss, weighting = common.correct(config.importance, loss, tokens)
    loss = common.with_entropy(config.entropy_bonus, loss, tokens)
    return loss, common.metrics_of(tokens, common.common_metrics(tokens), weighting)


ALGORITHM = Algorithm(
    config=Reinforce,
    check=check,
    keep=lambda config, groups: contract.eligible(groups),
    refill=lambda config: None,
    shape=lambda config, groups: groups.reward,
    advantages=advantages,
    token_loss=token_loss,
    weights=lambda config, loss_mask, max_completion: reduce.token_weights(loss_mask),
    denominator=lambda config, loss_mask, rows, max_completion: reduce.count_tokens(loss_mask),
    needs_reference=lambda config: False,
    needs_entropy_gradient=lambda config: config.entropy_bonus is not None,
)
