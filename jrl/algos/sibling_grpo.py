"""SiblingGRPO: branching completions are compared at their branch points; PPO's clip; the mean over tokens.

    a tree: the prompt's children are the stems, each completion's tokens before its branch point; a stem's children are
            its continuations, the completion's own and those of the branches
    V   = R of a continuation; the mean of its children for a stem
    A_t = V of the token's node - mean V of its siblings                                      A18
    l_t = max(-rho_t * A_t, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_t)                  L2 (L3)
    L   = mean over all tokens of the step                                                   G1

`Online.strategy = @Branching()` draws such completions (S8); CURE treats all of a prompt's as one group. A completion
without branches is, as a whole, a child of the prompt; one without a point to branch at is compared only with the fresh
samples that replace its branches.

The counters zero_variance_groups and group_of_one count groups of siblings, the children of a prompt or of a stem; a
node whose siblings all lack a valid verdict is a group of one.

Source: Besta et al. 2501.11223 on values of siblings; two levels and the clip are ours.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups
from jrl.ops import groups as group_ops
from jrl.ops import tree
from jrl.types import PyTree, traced

Array = jax.Array


@traced
class SiblingGRPO(common.Clipped):
    first: int = 4  # Branching.first
    continuations: int = 3  # Branching.continuations


def check(config: SiblingGRPO, facts: Facts) -> None:
    common.check_clipped(config, facts)
    if facts.branches is None:
        raise ValueError("SiblingGRPO compares completions that branch; set Online.strategy = @Branching()")
    if facts.branches != (config.first, config.continuations):
        raise ValueError(
            f"SiblingGRPO.first and .continuations are {config.first} and {config.continuations}, and Branching draws "
            f"{facts.branches[0]} and {facts.branches[1]}; set them to the same"
        )


def advantages(
    config: SiblingGRPO, groups: Groups, reward: Array, state: PyTree
) -> tuple[Array, PyTree, dict[str, Array]]:
    counts = contract.eligible(groups)
    num_stems = groups.num_groups * config.first  # completions without branches included
    # The strategy numbers rows: stem i has sample i, and `continuations` samples from first + continuations * i on.
    is_branch = groups.sample >= config.first
    stem_in_group = jnp.where(is_branch, (groups.sample - config.first) // config.continuations, groups.sample)
    stem = groups.group * config.first + stem_in_group
    width = groups.action_mask.shape[1]
    column = jnp.arange(width)[None, :]
    first_action = jnp.min(jnp.where(groups.action_mask, column, width), axis=-1)
    branch_point = group_ops.minimum(first_action, stem, is_branch & counts, num_groups=num_stems)
    in_stem = ~is_branch[:, None] & (column < group_ops.to_rows(jnp.minimum(branch_point, width), stem)[:, None])

    num_valid = group_ops.count(stem, counts, num_groups=num_stems)
    stem_valid, prompt = num_valid > 0, jnp.arange(num_stems, dtype=stem.dtype) // config.first
    stem_varies = group_ops.varied(reward, stem, counts, num_groups=num_stems)
    # The mean of equal rewards may be off by rounding that depends on their number, which must not become a signal.
    mean = group_ops.mean(reward, stem, counts, num_groups=num_stems)
    value = jnp.where(stem_varies, mean, group_ops.minimum(reward, stem, counts, num_groups=num_stems))
    stem_advantage = tree.sibling_advantages(value, prompt, stem_valid, num_nodes=groups.num_groups)
    row_advantage = tree.sibling_advantages(reward, stem, counts, num_nodes=num_stems)
    by_token = jnp.where(in_stem, group_ops.to_rows(stem_advantage, stem)[:, None], row_advantage[:, None])
    num_valid_stems = group_ops.count(prompt, stem_valid, num_groups=groups.num_groups)
    prompt_varies = group_ops.varied(value, prompt, stem_valid, num_groups=groups.num_groups)
    num_drawn = group_ops.count(stem, ~contract.aborted(groups), num_groups=num_stems)
    counters = common.count_groups(groups, reward) | {
        # Here a group is the children of one node.
        "zero_variance_groups": (
            jnp.sum((num_valid > 1) & ~stem_varies) + jnp.sum((num_valid_stems > 1) & ~prompt_varies)
        ),
        "group_of_one": jnp.sum((num_valid == 1) & (num_drawn > 1)) + jnp.sum(num_valid_stems == 1),
        "branched": jnp.sum(is_branch & counts),
    }
    return jnp.where(groups.action_mask & counts[:, None], by_token, 0), state, counters


OBJECTIVE = common.CLIPPED._replace(
    config=SiblingGRPO,
    check=check,
    advantages=advantages,
)
