"""Expert iteration: imitate every answer that is good enough.

    a_i = 1 where R_i >= threshold, for the first max_kept such answers of a group; 0 elsewhere          L14
    l_t = -a_i * logprobs_t
    L   = mean over the tokens of the rows with a_i > 0                                                  G1

Rejection sampling with an update at every step. `max_kept` bounds the share of easy prompts. The current policy samples
(as in RAFT; ReST-EM restarts each round from the base model). Identical answers to a prompt are imitated once.

Source: rejection sampling as in Xin et al. 2405.14333 (DeepSeek-Prover).
"""

from __future__ import annotations

import math

import jax

from jrl.algos import common, contract, raft
from jrl.algos.contract import Facts, Groups
from jrl.ops import rejection_sampling
from jrl.types import traced

Array = jax.Array


@traced
class ExpertIteration:
    threshold: float = 1.0  # smallest reward that is imitated
    max_kept: int = 4  # different answers to a prompt that are imitated at most
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus


def check(config: ExpertIteration, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=False)
    common.check_entropy(config)
    if config.max_kept < 1:
        raise ValueError(f"ExpertIteration.max_kept = {config.max_kept} must be at least 1: no row would be kept. 4 is "
                         "usual.")  # fmt: skip
    if not math.isfinite(config.threshold):
        raise ValueError(
            f"ExpertIteration.threshold = {config.threshold} must be a number: the smallest reward to keep."
        )


def row_weights(config: ExpertIteration, groups: Groups, reward: Array) -> Array:
    return rejection_sampling.above_threshold(
        reward,
        groups.group,
        groups.sample,
        contract.eligible(groups),
        groups.tokens,
        groups.action_mask,
        num_groups=groups.num_groups,
        threshold=config.threshold,
        max_kept=config.max_kept,
    )


OBJECTIVE = raft.OBJECTIVE._replace(
    config=ExpertIteration,
    check=check,
    needs=lambda config: common.entropy_needs(config)._replace(credit_tokens=True),
    **raft.imitating(row_weights),
)
