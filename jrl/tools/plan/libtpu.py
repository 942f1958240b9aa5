"""What libtpu and JAX must find in the environment to compile for TPUs without needing one. Imports neither."""

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
    """Sets it for this process. Call it before JAX is imported: what JAX reads, it reads then."""
    os.environ.update(ENVIRONMENT)
