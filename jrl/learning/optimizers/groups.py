"""Parameter groups: arrays, selected by name, with their own learning rate or weight decay, or frozen."""

from __future__ import annotations

import fnmatch
import math
from typing import Any

import jax
import numpy as np

from jrl.learning.optimizers.contract import Leaf
from jrl.types import Array, PyTree, traced


@traced
class ParameterGroup:
    """The arrays whose names match a pattern. An array belongs to the first group that it matches."""

    names: str  # a shell pattern over names such as "layers/q", "layers/*norm", "embed", "heads/value"
    learning_rate: float | None = None  # peak; None: the optimizer's
    weight_decay: float | None = None  # None: the optimizer's, and 0 for biases and norms
    frozen: bool = False  # never updated; has no moments

    def __post_init__(self) -> None:
        for name in ("learning_rate", "weight_decay"):
            value = getattr(self, name)
            if not isinstance(value, int | float):  # None, or traced
                continue
            held = in_float32(value)
            if not (0 <= value and held < math.inf) or (held == 0 and name == "learning_rate"):
                raise ValueError(
                    f"ParameterGroup.{name} = {value} cannot train; set it above 0 and within float32, or frozen = "
                    f"True where {self.names!r} is not to move"
                )
        if self.frozen and (self.learning_rate is not None or self.weight_decay is not None):
            raise ValueError(f"ParameterGroup {self.names!r} is frozen: learning_rate and weight_decay have no effect")


def group_of(config: Any, leaf: Leaf) -> ParameterGroup | None:
    """Returns the group of an optimizer's configuration that an array belongs to; None: none of them."""
    return next((group for group in config.groups if fnmatch.fnmatchcase(leaf.name, group.names)), None)


def is_trained(config: Any, leaf: Leaf) -> bool:
    """Whether an array is updated."""
    group = group_of(config, leaf)
    return leaf.trained and not (group is not None and group.frozen)


def peak_rate(config: Any, leaf: Leaf) -> Array | float:
    """Returns the peak learning rate of an array, [] float (O5): that of the first group that it matches, else that of
    the optimizer. Usual values: RLVR 1e-6, with LoRA 1e-5 to 1e-4; DPO 5e-7; reward models and SFT 5e-6 to 1e-5."""
    group = group_of(config, leaf)
    return config.learning_rate if group is None or group.learning_rate is None else group.learning_rate


def weight_decay(config: Any, leaf: Leaf) -> Array | float | None:
    """Returns the weight decay of an array; None: it does not decay (O1: by default biases and norms do not)."""
    group = group_of(config, leaf)
    if group is not None and group.weight_decay is not None:
        return group.weight_decay
    return config.weight_decay if leaf.decays else None


def trained_only(config: Any, tree: PyTree, leaves: PyTree) -> PyTree:
    """Returns a tree of the weights' structure with None for arrays that are not updated."""
    return jax.tree.map(lambda leaf, x: x if is_trained(config, leaf) else None, leaves, tree)


def check_groups(config: Any, leaves: PyTree) -> None:
    """Raises ValueError for a group that no array belongs to, or if nothing is left to train."""
    all_leaves = jax.tree.leaves(leaves)
    for group in config.groups:
        if not any(group_of(config, leaf) is group for leaf in all_leaves):
            names = ", ".join(sorted(leaf.name for leaf in all_leaves))
            matches = any(fnmatch.fnmatchcase(leaf.name, group.names) for leaf in all_leaves)
            why = "matches only arrays of groups before it" if matches else f"matches no array; there are {names}"
            raise ValueError(f"ParameterGroup.names = {group.names!r} {why}")
    if not any(is_trained(config, leaf) for leaf in all_leaves):
        raise ValueError(f"{type(config).__name__}.groups freezes every array; leave something to train")


def in_float32(x: float) -> float:
    """Returns a float as programs hold it: in float32, with 0 for what is below the least normal number."""
    with np.errstate(over="ignore"):
        return 0.0 if abs(x) < np.finfo(np.float32).tiny else float(np.float32(x))
