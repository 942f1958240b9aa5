"""Eight virtual CPU devices for the whole suite, set before JAX starts; implicit rank promotion raises."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()
# Without it an executable from the compilation cache deadlocks in its collectives when devices outnumber cores.
os.environ["NPROC"] = "16"

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

from jrl.sharding import MeshShape, make_mesh


@pytest.fixture
def mesh():
    """The mesh of one device, set for the test."""
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        yield mesh
