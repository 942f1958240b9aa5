"""The interface of an optimizer: a configuration, a function from gradients to directions, and facts about arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import optax

from jrl.models.contract import Names, is_spec, split_params
from jrl.types import PyTree


class Optimizer(NamedTuple):
    """A row of OPTIMIZERS. `config` is a traced dataclass with learning_rate, schedule, weight_decay, clip_norm, groups
    and average."""

    config: type
    # (config, leaves) -> transformation of clipped gradients to directions, to which weight decay is then added, and
    # which are scaled by rates and subtracted; `leaves` has None for arrays that are not trained
    direction: Callable[[Any, PyTree], optax.GradientTransformation]
    # (config, leaves) raises ValueError for a model that it cannot train
    check: Callable[[Any, PyTree], None] = lambda config, leaves: None


class ConfiguredOptimizer(NamedTuple):
    """An optimizer as a stage has it: its row of OPTIMIZERS, and its config."""

    row: Optimizer
    config: Any


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The facts about an array of weights that optimizers use. Not a pytree: a tree of them has the structure of the
    weights.

    A matrix maps inputs to outputs: [stack.., inputs.., outputs..]. Arrays of layers, and of experts, are stacks of
    matrices, and every matrix of a stack is treated separately.
    """

    name: str  # as parameter groups match it: "embed", "layers/q", "layers/q/a", "heads/value"
    trained: bool  # ParamSpec.trained
    stack: int  # leading axes that count matrices or vectors: layers, experts
    inputs: int | None  # axes of a matrix that are summed over when it is applied; None: a bias, a norm, a convolution
    hidden: bool  # a matrix of the layers: not an embedding or the output layer
    decays: bool  # weight decay applies: a matrix or an embedding, not a bias or a norm

    def input_axes(self) -> tuple[int, ...]:
        return tuple(range(self.stack, self.stack + self.inputs))

    def output_axes(self, rank: int) -> tuple[int, ...]:
        return tuple(range(self.stack + self.inputs, rank))


STACKS = ("layers", "experts", "all_experts")


def leaf_of(name: str, axes: Names, trained: bool = True) -> Leaf:
    """Returns the Leaf for an array with these logical axes. If they are unnamed (a user's module), an array of two or
    more axes is a matrix whose last axis is the output, as in Flax."""
    stack = 0
    while stack < len(axes) and axes[stack] in STACKS:
        stack += 1
    inner, inputs = axes[stack:], None
    if len(inner) >= 2:
        if inner[0] in ("embed", "rank"):
            inputs = 1
        elif inner[-1] in ("embed", "rank") or not any(inner):
            inputs = len(inner) - 1
    return Leaf(name, trained, stack, inputs, stack > 0 and inputs is not None, inputs is not None)


def describe(spec: PyTree, heads: Iterable[str]) -> tuple[PyTree, dict[str, Leaf]]:
    """Returns the Leaf of every trained parameter of a model and of each of its heads: trees like `Weights`.

    Args:
      spec: ParamSpecs of the model. heads: their names. A head is a small matrix that decays, but that neither Muon
        nor Adafactor treats as a matrix.
    """
    named = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    to_leaf = lambda path, s: leaf_of(named(path), s.axes, s.trained)
    params = jax.tree_util.tree_map_with_path(to_leaf, split_params(spec)[1], is_leaf=is_spec)
    head = Leaf("", trained=True, stack=0, inputs=None, hidden=False, decays=True)
    return params, {name: dataclasses.replace(head, name=f"heads/{name}") for name in heads}
