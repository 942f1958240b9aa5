"""SELF: GRPO on the prompts that the policy's greedy answer does not solve.

    train on a prompt only if its greedy answer is wrong or has no valid verdict               F5
    A_i = (R_i - mean_g) / (std_g + 1e-6), over the samples that are not greedy              A3
    l_t = max(-rho_t * A_i, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_i)                  L2 (L3)
    L   = mean over sequences of the mean over their tokens                                   G2

Prompts that the policy already solves are skipped, so that likely answers are not sharpened further and pass@k does not
drop. The first of a prompt's samples is the greedy one: it is scored but not trained on. Fresh prompts replace solved
ones, for up to `max_refills` rounds.

Source: Reasoning Boundary Paradox, 2510.02230: 8 samples, no KL, the next chunk of prompts if none is left.
"""

from __future__ import annotations

import jax

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups
from jrl.ops import advantages as advantage_ops
from jrl.ops import filters, reduce
from jrl.ops import groups as group_ops
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class SELF(common.Clipped):
    max_refills: int = 10  # rounds of fresh prompts for those that are solved; 0: they are left out and not replaced


def check(config: SELF, facts: Facts) -> None:
    common.check_clipped(config, facts)
    if facts.samples < 3:
        raise ValueError(
            f"SELF compares the samples of a prompt beside its greedy one; got samples={facts.samples}. Use 4 to 16."
        )
    common.check_outcome(
        config,
        facts,
        reads="learns on prompts whose greedy answer the first verifier calls wrong",
        instead="Give it a weight, or use GRPO",
    )
    if config.max_refills < 0:
        raise ValueError(f"SELF.max_refills = {config.max_refills} must be at least 0 (filter, never refill).")


def learned(groups: Groups) -> Array:
    """Returns the rows that are compared, [N] bool: scored and not greedy."""
    return contract.eligible(groups) & ~contract.greedy(groups)


def keep(config: SELF, groups: Groups) -> Array:
    scored_greedy = contract.eligible(groups) & contract.greedy(groups)
    correct = group_ops.total(groups.outcome, groups.group, scored_greedy, num_groups=groups.num_groups)
    num_scored = group_ops.count(groups.group, scored_greedy, num_groups=groups.num_groups)
    unsolved = filters.unsolved(correct, num_scored > 0)
    return learned(groups) & group_ops.to_rows(unsolved, groups.group)


def advantages(config: SELF, groups: Groups, reward: Array, state: PyTree) -> tuple[Array, PyTree, dict[str, Array]]:
    row = advantage_ops.group_zscore(reward, groups.group, learned(groups), num_groups=groups.num_groups)
    return advantage_ops.spread(row, groups.action_mask), state, common.count_groups(groups, reward)


OBJECTIVE = common.CLIPPED._replace(
    config=SELF,
    check=check,
    keep=keep,
    refill=lambda config: config.max_refills,
    advantages=advantages,
    weights=lambda config, loss_mask, max_completion: reduce.inverse_length_weights(loss_mask),
    denominator=lambda config, loss_mask, rows, max_completion: reduce.count_sequences(loss_mask),
    needs=lambda config: common.entropy_needs(config)._replace(greedy_sample=True),
)
