"""A gate that mixes the objectives of a reward model by what the prompt is about (R12, ArmoRM)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jrl import paths
from jrl.models.pretrained.tensors import open_file
from jrl.ops import gated_reward
from jrl.types import Array, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    """A small network that reads the prompt's last hidden state and weighs the labels of a reward model."""

    path: str  # a safetensors file: layers.0.weight [out, in], layers.0.bias [out], ...; ReLU between layers
    temperature: float = 10.0  # its outputs are divided by it before the softmax
    # The label that measures length, and how much of it is subtracted from every label, in their order. None: nothing.
    verbosity: str | None = None
    coefficients: tuple[float, ...] = ()  # with verbosity: one for each label, 1 for verbosity itself

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"Gate.temperature is {self.temperature}; it must be above 0")
        if (self.verbosity is None) != (not self.coefficients):
            raise ValueError("Gate.verbosity and Gate.coefficients belong together: set both or none")


def load_gate(config: Gate, labels: Sequence[str], width: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns weight [out, in] and bias [out] of every layer of the gate.

    Args:
      width: of the hidden states.

    Raises: ValueError for a file without such a network, and for labels that the reward model does not have.
    """
    if config.verbosity is not None and config.verbosity not in labels:
        raise ValueError(f"Gate.verbosity is {config.verbosity!r}; the labels are {', '.join(labels)}")
    if config.coefficients and len(config.coefficients) != len(labels):
        raise ValueError(f"Gate.coefficients has {len(config.coefficients)} numbers; the labels are {len(labels)}, "
                         f"{', '.join(labels)}")  # fmt: skip
    with open_file(paths.readable(config.path)) as file:
        tensors = {name: file.read(name, tuple(map(slice, shape))) for name, shape in file.shapes.items()}
    layers = [(tensors.pop(f"layers.{i}.weight", None), tensors.pop(f"layers.{i}.bias", None))
              for i in range(max(1, (len(tensors) + 1) // 2))]  # fmt: skip
    sizes = [width]
    for i, (weight, bias) in enumerate(layers):
        if weight is None or bias is None or weight.shape != (bias.size, sizes[-1]):
            shape = "missing" if weight is None or bias is None else list(weight.shape)
            raise ValueError(f"{config.path}: layers.{i}.weight is {shape}, and a bias [out] with a weight [out, "
                             f"{sizes[-1]}] was expected")  # fmt: skip
        sizes.append(bias.size)
    if sizes[-1] != len(labels):
        raise ValueError(f"{config.path}: the last layer has {sizes[-1]} outputs, and the reward model has "
                         f"{len(labels)} labels, {', '.join(labels)}")  # fmt: skip
    return [(weight.astype(np.float32), bias.astype(np.float32)) for weight, bias in layers]


def gate_logits(layers: PyTree, hidden: Array) -> Array:
    """Returns the network's outputs, [N, K] float32 or wider. hidden: [N, D], the prompt's last state."""
    x = hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32))
    for i, (weight, bias) in enumerate(layers):
        x = (jax.nn.relu(x) if i else x) @ weight.T + bias[None]
    return x


def gated_scores(config: Gate, layers: PyTree, labels: Sequence[str], objectives: Array, hidden: Array) -> Array:
    """Returns the gated reward, then the unchanged objectives, [N, 1 + K] float32.

    Args:
      objectives: [N, K] float, of the labels. hidden: [N, D], the prompt's last state.
    """
    decorrelated = objectives
    if config.verbosity is not None:
        coefficients = jnp.array(config.coefficients, jnp.float32)
        decorrelated = gated_reward.decorrelated(objectives, coefficients, verbosity=labels.index(config.verbosity))
    gate = gated_reward.gate_weights(gate_logits(layers, hidden), temperature=config.temperature)
    reward = gated_reward.gated_reward(decorrelated, gate)
    return jnp.concatenate([reward[:, None], objectives], axis=1).astype(jnp.float32)
