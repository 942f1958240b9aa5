"""Memory of the host that a device reads and writes by itself: how an array gets there and back, and where there is
none. In a type it stands as float32<host>[8]; what is there must be fetched before anything is computed with it."""

from __future__ import annotations

from typing import Any

import jax

from jrl.types import Array

HOST = "pinned_host"  # JAX's name of it


def to_host(x: Array) -> Array:
    """Returns `x` in the host's memory, each device's share of it on that device's host."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: Array) -> Array:
    """Returns `x` in the devices' memory."""
    return jax.device_put(x, jax.memory.Space.Device)


def memory_kind(leaf: Any) -> str | None:
    """Returns HOST where an array, or the shape of one, lies there; None where it lies on devices."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return HOST if kind == HOST else None


def check_host_memory(wanted: str, device: Any) -> None:
    """Raises ValueError where `device` knows no such memory. `wanted`: the field that asks for it, with its value."""
    if all(memory.kind != HOST for memory in device.addressable_memories()):
        raise ValueError(
            f"{wanted} needs memory of the host ({HOST}), which devices of {device.platform.upper()} do not have here"
        )
