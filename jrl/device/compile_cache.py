"""JAX's persistent cache of compiled programs: the same folder for the commands and for calls from Python.

JAX is not imported with the module: the commands set the environment before JAX starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from jrl.device.cache_home import cache_home

FOLDER, MIN_SECONDS = "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
ENABLED = "JAX_ENABLE_COMPILATION_CACHE"


def cache_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that enable the cache, without those that `environment` already sets.

    {} if there is no home directory for compiled programs, or the cache is disabled.
    """
    home = cache_home(environment)
    if home is None or environment.get(ENABLED, "").lower() in ("0", "false"):
        return {}
    settings = {FOLDER: str(home / "xla"), MIN_SECONDS: "0.2"}
    return {name: value for name, value in settings.items() if name not in environment}


def use_compile_cache() -> None:
    """Enables the cache in a process that has imported JAX. The user's settings are kept."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    settings = cache_settings(os.environ)
    if FOLDER not in settings or jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return
    # With fewer threads than virtual devices, an executable from the cache deadlocks in its collectives, and the
    # number of threads can no longer be raised.
    if jax.default_backend() == "cpu" and jax.device_count() > 1 and "NPROC" not in os.environ:
        return
    jax.config.update("jax_compilation_cache_dir", settings[FOLDER])
    if MIN_SECONDS in settings and jax.config.jax_persistent_cache_min_compile_time_secs == 1.0:  # JAX's default
        jax.config.update("jax_persistent_cache_min_compile_time_secs", float(settings[MIN_SECONDS]))
    compilation_cache.reset_cache()  # an earlier compilation has recorded that there is no cache


def leave_cache_of_processes() -> None:
    """Disables the cache for one of several processes on CPUs. Only process 0 writes it, and if it loads a program that
    others compile, their collectives do not match (jaxlib 0.10.2: gloo::EnforceNotMet, an abort)."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    if jax.default_backend() == "cpu":
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
