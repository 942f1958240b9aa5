"""Packing plans of the rows of a step, made on the host, and their shardings."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh

from jrl.device.sharding import replicated, row_sharding
from jrl.learning.pack import PackingPlan, Shape, plan
from jrl.types import PyTree


def prompt_lengths(length: np.ndarray, action_mask: np.ndarray) -> np.ndarray:
    """Returns the tokens before the first action of every row, [N] int; all of a row without actions.

    Args:
      length: [N] int. action_mask: [N, T] bool.
    """
    return np.where(action_mask.any(axis=1), action_mask.argmax(axis=1), length)


def host_plans(shape: Shape, minibatches: int, length: np.ndarray, action_mask: np.ndarray) -> list[PackingPlan]:
    """Returns how rows are packed into every minibatch, on the host.

    Args:
      length: [N] int. action_mask: [N, T] bool.
    """
    prompts = prompt_lengths(length, action_mask)
    return [plan(length, shape, i, minibatches, prompts) for i in range(minibatches)]


def plan_shardings(plans: PyTree, mesh: Mesh) -> PyTree:
    """Returns the shardings of packing plans: arrays of rows like the packed rows, others replicated."""
    rows, everywhere = row_sharding(mesh), replicated(mesh)
    return jax.tree.map(lambda x: rows if np.ndim(x) == 3 else everywhere, plans)
