"""Host arrays on the device: packing plans and stored rows."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrl.device.processes import place_on_mesh
from jrl.device.sharding import BATCH_AXES, replicated
from jrl.learning.pack import PackingPlan, Shape, plan


def pack_plans(
    shape: Shape, minibatches: int, lengths: np.ndarray, prompts: np.ndarray, mesh: Mesh
) -> list[PackingPlan]:
    """Returns the packing of every minibatch on the device, cut as the packed rows are.

    Args:
      lengths: [N] int, tokens of every sequence. prompts: [N] int, those before the first action.
    """
    rows = NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))
    place = lambda x: place_on_mesh(x, rows if np.ndim(x) == 3 else replicated(mesh))
    return [jax.tree.map(place, plan(lengths, shape, i, minibatches, prompts)) for i in range(minibatches)]
