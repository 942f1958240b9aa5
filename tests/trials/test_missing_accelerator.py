"""A run whose accelerator is not there is refused by name, leaves nothing, and does not compute on the processor.

pytest -m slow tests/trials/test_missing_accelerator.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("platform", ["tpu", "cuda", "rocm", "gpu", "tpu,cuda", "rocm,tpu"])
def test_a_platform_that_is_not_there_is_refused(tmp_path, platform):
    environment = {**os.environ, "JAX_PLATFORMS": platform, "CUDA_VISIBLE_DEVICES": "", "TPU_SKIP_MDS_QUERY": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "jrl.cli", "train", "configs/tiny.gin", "--run", str(tmp_path / "run")],
        capture_output=True, text=True, cwd=Path(__file__).parents[2], env=environment,
    )  # fmt: skip
    if done.returncode == 0:
        pytest.skip(f"this machine has {platform}")
    assert f"JAX found no device (JAX_PLATFORMS='{platform}'" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()
