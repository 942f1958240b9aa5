"""CRRAFT, from CGPO: imitate each prompt's best answer that satisfies the judges and is near the reference.

    allowed: feasible, and log pi(y) - log pi_ref(y) <= kl_limit                                           R13
    a_i = Rc_i = sigmoid(reward_i - reward of the greedy answer) on the allowed row with the highest reward (the first
          sample at ties), 0 elsewhere; if none is allowed, 0.5 on the greedy answer, if feasible          L14
    l_t = -a_i * logprobs_t
    L   = mean over the tokens of the rows with a_i > 0                                                    G1

The first sample of every prompt is the policy's greedy answer, the baseline of the others, as in CRPG.
`Shaping.constraints` define which rows are feasible; set their infeasible_reward to None.

Source: CGPO, Xu et al. 2409.20370 section 4.2, whose baseline answer is one of a fixed set.
"""

from __future__ import annotations

import jax

from jrl.algos import common, contract, raft
from jrl.algos.contract import Facts, Groups, Needs
from jrl.algos.crpg import calibrated, check_feasible, feasible
from jrl.ops import constraints
from jrl.types import traced

Array = jax.Array


@traced
class CRRAFT:
    kl_limit: float = 10.0  # nats of a whole completion; one that is likelier by more is not imitated
    entropy_bonus: float | None = None  # coefficient of the entropy bonus; None: no bonus


def check(config: CRRAFT, facts: Facts) -> None:
    common.check_sampling(config, facts, grouped=True)
    common.check_entropy(config)
    common.check_positive(config, {"kl_limit": "no answer that the policy likes better than before. 10.0 is usual."})
    check_feasible(config, facts)


def row_weights(config: CRRAFT, groups: Groups, reward: Array) -> Array:
    score, counts = calibrated(groups, reward)
    rows, greedy = contract.eligible(groups) & feasible(groups), contract.greedy(groups)
    tokens = groups.action_mask & contract.eligible(groups)[:, None]
    near = constraints.moved(groups.old_logprobs, groups.ref_logprobs, tokens) <= config.kl_limit
    chosen = constraints.best_feasible(
        reward, rows & counts & near, rows & greedy, groups.group, groups.sample, num_groups=groups.num_groups
    )
    return score * chosen


def needs(config: CRRAFT) -> Needs:
    return common.entropy_needs(config)._replace(reference=True, credit_logprobs=True, greedy_sample=True)


OBJECTIVE = raft.OBJECTIVE._replace(
    config=CRRAFT,
    check=check,
    needs=needs,
    **raft.imitating(row_weights),
)
