"""Pinned host memory, which devices access directly: moving arrays there and back, and a check that it exists. An array
in it has the type float32<host>[8] and must be moved to the device before it is used in a computation."""

from __future__ import annotations

from typing import Any

import jax

from jrl.types import Array

HOST = "pinned_host"  # JAX's name for it


def to_host(x: Array) -> Array:
    """Returns `x` in host memory, each device's shard on its host."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: Array) -> Array:
    """Returns `x` in device memory."""
    return jax.device_put(x, jax.memory.Space.Device)


def memory_kind(leaf: Any) -> str | None:
    """Returns HOST for an array, or an abstract one, in host memory; None for one in device memory."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return HOST if kind == HOST else None


def check_host_memory(setting: str, device: Any) -> None:
    """Raises ValueError if `device` has no such memory. `setting`: the field that needs it, with its value."""
    if all(memory.kind != HOST for memory in device.addressable_memories()):
        raise ValueError(
            f"{setting} needs host memory ({HOST}), which these {device.platform.upper()} devices do not have"
        )
