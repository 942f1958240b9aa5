"""Advantages from continuations of a prefix: Monte Carlo values of steps, and siblings in a tree. No gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import advantages, reduce

Array = jax.Array


def step_advantages(success: Array, estimated: Array, *, rollouts: int) -> Array:
    """Returns A17, the advantage of each step of an answer: Q(prefix after the step) - Q(prefix before it).

    A difference smaller in size than 1 / rollouts is less than one rollout, and counts as 0.

    Args:
      success: [..., K + 1] float, Q: the mean success of `rollouts` completions of the prefix after so many steps.
        Column 0 is the empty prefix, the success rate of the prompt.
      estimated: same shape, bool, there is such a prefix and it was completed; elsewhere success may be NaN.
      rollouts: completions that a Q is the mean of.

    Returns:
      [..., K] float32 or wider, one for every step; 0 where either prefix was not estimated.

    Source: Setlur et al. 2406.14532; `jrl.ops.groups.mean`, keyed by prefix, gives Q.
    """
    success = reduce.masked(success, estimated)
    change = success[..., 1:] - success[..., :-1]
    # Differences of shares are whole numbers of rollouts up to rounding.
    counts = jnp.abs(change) * rollouts > 1 - 1e-3
    return jnp.where(estimated[..., 1:] & estimated[..., :-1] & counts, change, 0)


def sibling_advantages(value: Array, parent: Array, valid: Array, *, num_nodes: int) -> Array:
    """Returns A18: a node's value minus the mean value of its parent's children, itself included.

    A4 with the parent as the group: an only child gets 0, and so do siblings of equal value.

    Args:
      value: [M] float, of every node; invalid entries may be NaN. parent: [M] int32, 0..num_nodes-1.
      valid: [M] bool, the node has a value; roots have no parent and are not valid.

    Returns:
      [M] float32 or wider.

    Source: Besta et al. 2501.11223 (a blueprint of reasoning language models); the form is ours.
    """
    return advantages.group_centered(value, parent, valid, num_groups=num_nodes)


def spread_nodes(advantage: Array, node: Array, action_mask: Array) -> Array:
    """Returns the advantage of a token's node (A18) on each sampled token, [N, T], 0 elsewhere.

    Args:
      advantage: [M] float. node: [N, T] int32, the branch that a token is in, 0..M-1 on sampled tokens.
      action_mask: [N, T] bool.
    """
    return jnp.where(action_mask, advantage[jnp.where(action_mask, node, 0)], 0)
