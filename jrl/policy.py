"""A trained policy out of a run folder: its configuration, its tokenizer and its newest weights. Reads only."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import jax

from jrl import paths, programs
from jrl.checkpoints.run_state import restore_step
from jrl.config import ConfigError
from jrl.contents import newest, saved_steps
from jrl.job import Policy, open_policy
from jrl.resolve import load_config
from jrl.sharding import MeshShape, replicated
from jrl.tokenizers import load as load_tokenizer
from jrl.types import Array, PyTree

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A policy and its weights at one step."""

    policy: Policy
    step: int
    params: PyTree
    key: Array  # [] typed key, the run's root


def open_trained(folder: str | Path, bindings: Sequence[str] = (), step: int | None = None) -> Trained:
    """Opens the policy of a run on this machine's devices, whatever the run was trained on.

    Args:
      bindings: NAME=VALUE over the run's configuration. `MeshShape.*` lays the policy out over devices; without it
        the run's own mesh is used where it fits, else one device.
      step: a saved step; None: the newest.

    Raises: ValueError where the folder holds no run or no such step; ConfigError for a binding that does not fit.
    """
    folder = Path(folder)
    steps = saved_steps(folder)
    if step is not None and step not in steps:
        raise ValueError(f"{folder} holds no save of step {step}; there are {', '.join(map(str, steps))}")
    # The run's parts as they were, whatever became of the files they came from.
    kept = sorted((folder / "parts").glob("*.py"), key=lambda path: int(path.stem))
    try:
        config, parts = load_config(str(folder / "config.gin"), [*bindings, "Config.parts=[]"], kept)
    except ConfigError as error:
        if not paths.exists(folder / "config.gin"):
            raise ValueError(f"{folder} is not a run folder: it holds no config.gin") from error
        raise
    asked = any(binding.split("=")[0].strip().startswith("MeshShape.") for binding in bindings)
    if not asked:
        config = dataclasses.replace(config, mesh=mesh_that_fits(config.mesh, len(jax.devices())))
    tokenizer = load_tokenizer(folder / "tokenizer", parts.tables["tokenizers"])
    policy = open_policy(config, parts, tokenizer)
    key = jax.device_put(jax.random.key(config.run.seed), replicated(policy.mesh))
    state = policy.programs.init.shape(programs.abstract(key, policy.mesh))
    wanted = {"state": {"params": state.params}}
    at, tree, _ = restore_step(folder / "checkpoints", wanted, step, part=True)
    if step is None and at != newest(folder):
        _log.warning("step %d is damaged; using the weights of step %d", newest(folder), at)
    return Trained(policy, at, tree["state"]["params"], key)


def mesh_that_fits(shape: MeshShape, num_devices: int) -> MeshShape:
    """Returns `shape` where `num_devices` are enough for it, else one device."""
    try:
        shape.sizes(num_devices)
    except ValueError:
        _log.warning("the run's mesh does not fit %d devices; using one", num_devices)
        return MeshShape()
    return shape
