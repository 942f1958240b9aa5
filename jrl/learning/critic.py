"""A separate critic: the role `critic`, which has the value head in place of the policy.

Policy and critic learn from the same train batch, one after the other: the policy by the objective's `token_loss`
without values, the critic by its `value_loss` alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrl.algos.contract import Needs, Objective
from jrl.models.heads import REWARD, VALUE
from jrl.types import Array, ModelState

CRITIC = "critic"  # the role


def of_policy(objective: Objective) -> Objective:
    """Returns the objective that updates a policy without a value head."""
    return objective._replace(needs=functools.partial(_needs_of_policy, objective.needs))


def of_critic(objective: Objective) -> Objective:
    """Returns the objective that updates the critic: the value loss, V1 or the objective's own, without log-probs."""
    needs = functools.partial(_needs_of_critic, objective.needs)
    return objective._replace(token_loss=objective.value_loss, sequence_loss=None, needs=needs)


def begin_critic(source: ModelState, shares: str, zeros: Callable[[], Array], outputs: int) -> ModelState:
    """Returns a critic that begins as a copy of a model (V3), with a copy of its value head, or else of its reward
    head, or else zeros.

    Args:
      shares: the role whose frozen weights the copy uses, if there are frozen weights.
      zeros: returns a new value head. outputs: its size; a head of another size is not copied.

    Source: N+, 2403.17031, begins with the reward model. With zeros the first advantages are the returns alone.
    """
    head = source.heads.get(VALUE, source.heads.get(REWARD))
    return ModelState(
        params=jax.tree.map(jnp.copy, source.params),
        frozen=None,
        heads={VALUE: zeros() if head is None or head.shape[-1] != outputs else jnp.copy(head)},
        opt_state=None,
        version=jnp.zeros_like(source.version),
        shares=None if source.frozen is None and source.shares is None else shares,
    )


def _needs_of_policy(needs: Callable[[Any], Needs], config: Any) -> Needs:
    return needs(config)._replace(values=False)


def _needs_of_critic(needs: Callable[[Any], Needs], config: Any) -> Needs:
    return Needs(logprobs=False, values=True, value_bins=needs(config).value_bins)
