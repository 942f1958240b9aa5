"""Heads: numbers read off a model's last hidden states, such as a reward for each of several objectives.

    y_mk = h . w_m[:, k]        h [D]; w [members, D, outputs]: an ensemble is members stacked, computed by one vmap

A head is one more leaf of the parameters, so that it is drawn, sharded, saved and restored with them. A value head says
of every token what reward is to be expected before it is chosen: one number, 0 at first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrl.models.contract import VALUE, Model, Names, ParamSpec, init
from jrl.types import Array, PyTree

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


def head_spec(head: Head, width: int, dtype: Any, scale: float | None = None) -> ParamSpec:
    """Returns the abstract leaf [members, width, outputs]. It begins normal, of deviation `scale`; None: of variance
    1 / width."""
    shape = (head.members, width, head.outputs)
    scale = width**-0.5 if scale is None else scale
    return ParamSpec(shape, jnp.promote_types(dtype, jnp.float32), (None, "norm", None), scale)


def read_head(w: Array, hidden: Array) -> Array:
    """Returns what every member says of every hidden state, float32 or wider.

    Args:
      w: [members, D, outputs]. hidden: [..., D].

    Returns:
      [members, ..., outputs].
    """
    wide = jnp.promote_types(w.dtype, hidden.dtype)
    return jax.vmap(lambda own: jnp.matmul(hidden.astype(wide), own.astype(wide)))(w)


def read_values(w: Array, hidden: Array) -> Array:
    """Returns what a value head says before each token is chosen, [R, L] float32 or wider: column t is read where the
    token before it lies, as its log-prob is. Column 0 has none before it and is 0.

    Args:
      w: [1, D, 1]. hidden: [R, L, D], of packed rows.
    """
    read = read_head(w, hidden)[0, ..., 0]
    return jnp.concatenate([jnp.zeros_like(read[:, :1]), read[:, :-1]], axis=1)


def valued(model: Model) -> Model:
    """Returns the model whose parameters have one more entry, VALUE: a value head of zeros, whatever the key.

    Its other functions are those of `model`, and take parameters with or without that entry; `ready` takes the policy's
    (contract.policy_of) alone.
    """

    def spec(cfg: Any) -> PyTree:
        return {**model.spec(cfg), VALUE: head_spec(Head(), cfg.width, cfg.param_dtype, scale=0.0)}

    def fresh(key: Array, cfg: Any, place: Callable[[Names], Any] = lambda names: None) -> PyTree:
        return {**model.init(key, cfg, place), **init(key, {VALUE: spec(cfg)[VALUE]}, place)}

    return model._replace(spec=spec, init=fresh)
