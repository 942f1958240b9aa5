"""Host arrays on the device: packing plans and stored rows."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh

from jrl.device.placement import place_on_mesh
from jrl.device.sharding import replicated, row_sharding
from jrl.learning.pack import PackingPlan, Shape, plan
from jrl.types import PyTree


def pack_plans(
    shape: Shape, minibatches: int, lengths: np.ndarray, prompts: np.ndarray, mesh: Mesh
) -> list[PackingPlan]:
    """Returns the packing of every minibatch on the device, cut as the packed rows are.

    Args:
      lengths: [N] int, tokens of every sequence. prompts: [N] int, those before the first action.
    """
    plans = host_plans(shape, minibatches, lengths, prompts)
    return place_on_mesh(plans, plan_shardings(plans, mesh))


def host_plans(shape: Shape, minibatches: int, lengths: np.ndarray, prompts: np.ndarray) -> list[PackingPlan]:
    """Returns what `pack_plans` does, on the host."""
    return [plan(lengths, shape, i, minibatches, prompts) for i in range(minibatches)]


def plan_shardings(plans: PyTree, mesh: Mesh) -> PyTree:
    """Returns how the arrays of packing plans are cut: those of rows as the packed rows are."""
    rows, everywhere = row_sharding(mesh), replicated(mesh)
    return jax.tree.map(lambda x: rows if np.ndim(x) == 3 else everywhere, plans)
