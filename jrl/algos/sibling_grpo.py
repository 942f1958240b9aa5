"""SiblingGRPO: completions that branch are compared where they part; PPO's clip; the mean over tokens.

    a tree: the prompt's children are the tokens of each completion before its branch; theirs are all that follows it,
            the completion's own and those of the branches
    V   = R of what follows a branch; of what is before it the mean of its children
    A_t = V of the token's node - mean V of its siblings                                      A18
    l_t = max(-rho_t * A_t, -clip(rho_t, 1 - clip_low, 1 + clip_high) * A_t)                  L2 (L3)
    L   = mean over all tokens of the step                                                   G1

`Online.strategy = @Branching()` draws such completions (S8), of which CURE makes one group. A completion without a
branch is a child of the prompt as a whole; one with no place to branch at is compared with what is drawn again in the
place of its branches alone.

The counters zero_variance_groups and group_of_one are of siblings, the children of a prompt or of a completion's first
part; one whose siblings all lack a verdict is a group of one.

Source: Besta et al. 2501.11223 on values of siblings; two levels and the clip are ours.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.algos import common, contract
from jrl.algos.contract import Facts, Groups, Objective
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
    stems = groups.num_groups * config.first  # what is before a branch, with what was not branched
    # The strategy numbers rows: those of stem i are sample i, and first + continuations * i and the next ones.
    is_branch = groups.sample >= config.first
    of_stem = jnp.where(is_branch, (groups.sample - config.first) // config.continuations, groups.sample)
    stem = groups.group * config.first + of_stem
    width = groups.action_mask.shape[1]
    column = jnp.arange(width)[None, :]
    begins = jnp.min(jnp.where(groups.action_mask, column, width), axis=-1)
    parted = group_ops.minimum(begins, stem, is_branch & counts, num_groups=stems)
    before = ~is_branch[:, None] & (column < group_ops.to_rows(jnp.minimum(parted, width), stem)[:, None])

    left = group_ops.count(stem, counts, num_groups=stems)
    there, prompt = left > 0, jnp.arange(stems, dtype=stem.dtype) // config.first
    varies = group_ops.varied(reward, stem, counts, num_groups=stems)
    # A mean of equal rewards may round, by how many they are: prompts whose rewards are equal would learn from that.
    mean = group_ops.mean(reward, stem, counts, num_groups=stems)
    value = jnp.where(varies, mean, group_ops.minimum(reward, stem, counts, num_groups=stems))
    of_stems = tree.sibling_advantages(value, prompt, there, num_nodes=groups.num_groups)
    of_rows = tree.sibling_advantages(reward, stem, counts, num_nodes=stems)
    by_token = jnp.where(before, group_ops.to_rows(of_stems, stem)[:, None], of_rows[:, None])
    prompts = (prompt, there)
    num_left = group_ops.count(*prompts, num_groups=groups.num_groups)
    prompts_vary = group_ops.varied(value, *prompts, num_groups=groups.num_groups)
    drawn = group_ops.count(stem, ~contract.aborted(groups), num_groups=stems)
    counters = common.count_groups(groups, reward) | {
        # A group are the children of one node.
        "zero_variance_groups": jnp.sum((left > 1) & ~varies) + jnp.sum((num_left > 1) & ~prompts_vary),
        "group_of_one": jnp.sum((left == 1) & (drawn > 1)) + jnp.sum(num_left == 1),
        "branched": jnp.sum(is_branch & counts),
    }
    return jnp.where(groups.action_mask & counts[:, None], by_token, 0), state, counters


OBJECTIVE = Objective(
    config=SiblingGRPO,
    check=check,
    corrects_staleness=common.has_importance,
    advantages=advantages,
    token_loss=common.clipped_token_loss,
    needs=common.entropy_needs,
)
