"""Settings that a command makes before JAX starts."""

from __future__ import annotations

import argparse
import os

from jrl.device.compile_cache import ENABLED, cache_settings

MOST_CPU_DEVICES = 16  # most virtual ones of a population by default, one per core; each holds what members share


def prepare_jax(args: argparse.Namespace, platform: str | None = None, devices: int | None = None) -> None:
    """Sets what JAX reads from the environment when it starts. Settings of the user stay.

    Args:
      platform: the only platform the command may start; None: JAX's choice.
      devices: virtual devices if the platform is a CPU, unless the user has set them; None: one.
    """
    environment, flag = os.environ, "--xla_force_host_platform_device_count"
    asked = getattr(args, "devices", None)
    if asked is not None:
        if asked < 1:
            raise ValueError(f"--devices is {asked}; it counts virtual CPU devices and must be at least 1")
        platform, devices = "cpu", asked
    elif flag in environment.get("XLA_FLAGS", ""):
        devices = None  # the user has set them
    if devices is not None:
        flags = [f for f in environment.get("XLA_FLAGS", "").split() if not f.startswith(flag)]
        environment["XLA_FLAGS"] = " ".join([*flags, f"{flag}={devices}"])
    if platform is not None:
        environment["JAX_PLATFORMS"] = platform
    if flag in environment.get("XLA_FLAGS", ""):
        # With fewer threads than devices, an executable from the compilation cache deadlocks in its collectives.
        environment["NPROC"] = str(max(16, 2 * (devices or 1)))
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if getattr(args, "no_compile_cache", False):
        environment[ENABLED] = "false"
    environment.update(cache_settings(environment))


def cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
