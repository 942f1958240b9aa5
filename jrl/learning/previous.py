"""The roles that hold older versions of the policy, which refill a step with lag."""

from __future__ import annotations

from jrl.types import ModelState, PyTree

PREVIOUS = "previous"


def previous_roles(count: int) -> tuple[str, ...]:
    """Returns the roles of the `count` versions before the policy's, newest first: previous, previous_2, ..."""
    return tuple(PREVIOUS if age == 1 else f"{PREVIOUS}_{age}" for age in range(1, count + 1))


def is_previous(role: str) -> bool:
    """Whether a role's name is one of `previous_roles`."""
    stem, _, age = role.partition("_")
    return stem == PREVIOUS and (role == PREVIOUS or age.isdigit())


def with_previous(models: dict[str, ModelState], params: PyTree, version: object) -> dict[str, ModelState]:
    """Returns the models with `params`, of `version`, as the newest previous version, and the oldest one dropped.

    Args:
      models: by role, with those of `previous_roles`.
    """
    roles = previous_roles(sum(map(is_previous, models)))
    newest = models[PREVIOUS].replace(params=params, version=version)
    return {**models, **dict(zip(roles, [newest, *(models[role] for role in roles)]))}
