"""The environment variables that let libtpu and JAX compile for TPUs without having one. Imports neither."""

from __future__ import annotations

import os

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # nothing runs
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # it keeps programs for TPUs too, but cannot read them back
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else two plans at once abort on libtpu's lock file
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


def set_environment() -> None:
    """Sets the variables for this process. Call it before importing JAX, which reads them on import."""
    os.environ.update(ENVIRONMENT)
