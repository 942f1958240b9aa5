"""The kernel and the loops around it, compiled for a TPU that is not there. Needs libtpu: .ci/run puts it beside the
environment for this file alone, as with it every plan would compile."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

TINY = ["Decoder.attention='splash'", "Sampler.attention='ragged'", "Decoder.window=4",
        "Decoder.window_layers=(True, False)", "Decoder.attention_cap=30.0", "Decoder.sinks=True",
        "MeshShape.fsdp=2", "MeshShape.tensor=2"]  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize(
    "dtype, head_dim, remat, memory", [("bfloat16", 64, "offload", "host"), ("float32", 128, "dots", "device")]
)
def test_an_update_and_a_decode_loop_with_the_kernel_compile_for_a_tpu(dtype, head_dim, remat, memory, tmp_path):
    command = [sys.executable, "-m", "jrl.cli", "plan", "configs/tiny.gin", "--topology", "v5e:2x2",
               "--no-collectives", "--json", *TINY, f"Decoder.dtype={dtype!r}",
               f"Decoder.head_dim={head_dim}", f"Decoder.remat={remat!r}", f"AdamW.memory={memory!r}"]  # fmt: skip
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout)
    assert said["fits"] and {"sample", "update"} <= {program["name"] for program in said["programs"]}
    update = next(program for program in said["programs"] if program["name"] == "update")
    assert (update["host"] > 0) == (memory == "host") == (sum(said["host_gib"].values()) > 0)
    assert "update: compiled in" in done.stderr and "sample: compiled in" in done.stderr
