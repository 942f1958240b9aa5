"""Heads: linear functions of a model's last hidden states, such as a reward for each of several objectives.

    y_mk = h . w_m[:, k]        h [D]; w [members, D, outputs]: an ensemble's members are stacked, computed by one vmap

A head is one more leaf of the parameters: it is initialized, sharded, saved and restored with them. A value head
predicts the expected return before each token is chosen: one number, initially 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrl.models.contract import Names, ParamSpec, init
from jrl.ops.segments import previous_column
from jrl.types import Array

REWARD = "reward"  # the name of a reward head: it is read at the last token of a sequence
VALUE = "value"  # the name of a value head: it is read before every token, and starts at 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """The shape of a head."""

    outputs: int = 1  # objectives, one number for each
    members: int = 1  # of an ensemble; each has its own initialization

    def __post_init__(self) -> None:
        for name in ("outputs", "members"):
            if getattr(self, name) < 1:
                raise ValueError(f"{type(self).__name__}.{name} must be at least 1; got {getattr(self, name)}")


def head_spec(head: Head, width: int, dtype: Any, scale: float | None = None) -> ParamSpec:
    """Returns the abstract leaf [members, width, outputs]. Its initialization is normal with standard deviation
    `scale`; None: with variance 1 / width."""
    shape = (head.members, width, head.outputs)
    scale = width**-0.5 if scale is None else scale
    return ParamSpec(shape, jnp.promote_types(dtype, jnp.float32), (None, "norm", None), scale)


def read_head(w: Array, hidden: Array) -> Array:
    """Returns the output of every member for every hidden state, float32 or wider.

    Args:
      w: [members, D, outputs]. hidden: [..., D].

    Returns:
      [members, ..., outputs].
    """
    wide = jnp.promote_types(w.dtype, hidden.dtype)
    return jax.vmap(lambda member: jnp.matmul(hidden.astype(wide), member.astype(wide)))(w)


def read_values(w: Array, hidden: Array, joined: Callable[[Array], Array] = lambda x: x) -> Array:
    """Returns the value before each token is chosen, [R, L] float32 or wider; [R, L, K] if the head has K outputs.

    Column t is read at column t - 1, like its log-prob. Column 0 has no column before it and is 0.

    Args:
      w: [1, D, 1] or [1, D, K]. hidden: [R, L, D], of packed rows.
      joined: joins shares of rows into rows, if `hidden` holds shares.
    """
    values = read_head(w, hidden)[0]
    values = joined(values[..., 0] if w.shape[-1] == 1 else values)
    return previous_column(values)


def fresh_heads(
    names: Sequence[str],
    key: Array,
    width: int,
    dtype: Any,
    place: Callable[[Names], Any] = lambda names: None,
    outputs: Mapping[str, int] = {},
) -> dict[str, Array]:
    """Returns new heads by name, [1, width, outputs[name]] each, with 1 output by default. A value head starts at
    zero, all others are normal. `key` is consumed."""
    head = lambda name: Head(outputs=outputs.get(name, 1))
    spec = {name: head_spec(head(name), width, dtype, scale=0.0 if name == VALUE else None) for name in names}
    return init(key, spec, place)
