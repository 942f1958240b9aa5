"""Compiled programs are kept between processes, for the commands and for calls from Python alike."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

import jrl
from jrl.bucket.local_copies import copies_home
from jrl.device.cache_home import cache_home
from jrl.device.compile_cache import cache_settings

CHILD = """
import os, sys
import jax
jax.jit(lambda x: x + 1)(1.0).block_until_ready()  # a program before jrl: JAX has seen no cache
mine = sys.argv[1]
if mine:
    jax.config.update("jax_compilation_cache_dir", mine)
from jrl.device.compile_cache import leave_cache_of_processes, use_compile_cache
use_compile_cache()
if "OF_SEVERAL" in os.environ:
    leave_cache_of_processes()
jax.jit(lambda x: x * 2 - 1)(1.0).block_until_ready()
print(jax.config.jax_compilation_cache_dir)
"""


def child(folder, mine="", **variables):
    """Runs CHILD; returns (the cache's folder that JAX was told, whether it holds a program)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "NPROC"))}
    environment |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder), **variables}
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(mine)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    cache_dir = done.stdout.strip()
    return cache_dir, os.path.isdir(cache_dir) and bool(os.listdir(cache_dir))


def test_every_cache_is_below_one_folder_which_is_an_absolute_path(monkeypatch):
    assert cache_home({"XDG_CACHE_HOME": "/c"}) == pathlib.Path("/c/jrl")
    assert cache_home({"XDG_CACHE_HOME": "c"}) is None and cache_settings({"XDG_CACHE_HOME": "c"}) == {}
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_home({}) == cache_home({"XDG_CACHE_HOME": ""}) == pathlib.Path("/home/me/.cache/jrl")
    monkeypatch.setenv("XDG_CACHE_HOME", "c")
    monkeypatch.delenv("JRL_BUCKET_COPIES", raising=False)
    with pytest.raises(ValueError, match="set JRL_BUCKET_COPIES to a folder"):
        copies_home()


def test_the_settings_leave_out_what_the_user_set():
    folder, seconds = "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
    assert cache_settings({"XDG_CACHE_HOME": "/c"}) == {folder: "/c/jrl/xla", seconds: "0.2"}
    assert cache_settings({"XDG_CACHE_HOME": "/c", folder: "/mine"}) == {seconds: "0.2"}
    assert cache_settings({"XDG_CACHE_HOME": "/c", seconds: "9"}) == {folder: "/c/jrl/xla"}
    assert cache_settings({"XDG_CACHE_HOME": "/c", "JAX_ENABLE_COMPILATION_CACHE": "False"}) == {}


def test_a_call_from_python_keeps_its_programs_where_the_commands_do(tmp_path):
    assert child(tmp_path) == (str(tmp_path / "jrl" / "xla"), True)


def test_one_of_several_processes_on_cpus_compiles_its_own(tmp_path):
    assert child(tmp_path, OF_SEVERAL="1") == (str(tmp_path / "jrl" / "xla"), False)


@pytest.mark.parametrize("how", ["config", "environment"])
def test_a_cache_that_the_user_set_stays(tmp_path, how):
    mine = tmp_path / "mine"
    folder, _ = child(tmp_path, mine) if how == "config" else child(tmp_path, JAX_COMPILATION_CACHE_DIR=str(mine))
    assert folder == str(mine) and not (tmp_path / "jrl").exists()


def test_virtual_devices_without_threads_for_them_get_no_cache(tmp_path):
    flags = "--xla_force_host_platform_device_count=4"
    assert child(tmp_path, XLA_FLAGS=flags) == ("None", False)
    assert child(tmp_path, XLA_FLAGS=flags, NPROC="16")[1]


def test_dir_lists_the_api():
    assert {"load_config", "steps", "train", "__version__"} <= set(dir(jrl))
    assert "Any" not in dir(jrl)
