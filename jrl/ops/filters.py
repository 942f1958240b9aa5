"""Which rows enter the loss. A filter returns a mask: it never deletes rows and never edits a reward."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.ops import groups
from jrl.types import Finish

Array = jax.Array


def has_signal(outcome: Array, group: Array, valid: Array, *, num_groups: int) -> Array:
    """Returns F1: True for the rows of a group whose valid outcomes are not all equal.

    Judge by the unshaped outcome: shaping makes every group "varied". A group with fewer than two valid rows has no
    signal (DAPO's recipe keeps them).

    Args:
      outcome: [N] float; invalid entries may be NaN. group: [N] int32 in 0..num_groups-1. valid: [N] bool.

    Returns:
      [N] bool; invalid rows of a group with signal are True too, other masks speak of them.

    Source: DAPO, 2503.14476 eq. 11. verl: standard deviation above 0; slime: above 1e-6; AReaL: mean strictly between.
    """
    return groups.to_rows(groups.varied(outcome, group, valid, num_groups=num_groups), group)


def not_truncated(finish: Array) -> Array:
    """Returns F3: False for rows cut at the length limit, [N] bool.

    Such a row leaves the loss and stays in its group's statistics: that it failed is information.

    Args:
      finish: [N] int8, a Finish.

    Source: DAPO, 2503.14476 section 3.4; TRL's `mask_truncated_completions`. open-instruct deletes the rows.
    """
    return finish != jnp.int8(Finish.LENGTH)
