"""Heads: numbers read off a model's last hidden states, such as a reward for each of several objectives.

    y_mk = h . w_m[:, k]        h [D]; w [members, D, outputs]: an ensemble is members stacked, computed by one vmap

A head is one more leaf of the parameters, so that it is drawn, sharded, saved and restored with them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jrl.models.contract import ParamSpec
from jrl.types import Array

REWARD = "reward"  # the entry of a parameter tree that is a reward head


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """The shape of a head."""

    outputs: int = 1  # objectives, one number for each
    members: int = 1  # of an ensemble; each begins from its own draw

    def __post_init__(self) -> None:
        for name in ("outputs", "members"):
            if getattr(self, name) < 1:
                raise ValueError(f"{type(self).__name__}.{name} must be at least 1; got {getattr(self, name)}")


def head_spec(head: Head, width: int, dtype: Any) -> ParamSpec:
    """Returns the abstract leaf [members, width, outputs]. It begins normal, of variance 1 / width."""
    shape = (head.members, width, head.outputs)
    return ParamSpec(shape, jnp.promote_types(dtype, jnp.float32), (None, "norm", None), width**-0.5)


def read_head(w: Array, hidden: Array) -> Array:
    """Returns what every member says of every hidden state, float32 or wider.

    Args:
      w: [members, D, outputs]. hidden: [..., D].

    Returns:
      [members, ..., outputs].
    """
    wide = jnp.promote_types(w.dtype, hidden.dtype)
    return jax.vmap(lambda own: jnp.matmul(hidden.astype(wide), own.astype(wide)))(w)
