"""A mesh of four devices, and weights on it, for the kernels."""

import jax
import pytest

from jrl.device.sharding import TRAIN, MeshShape, make_mesh, shardings
from jrl.models.contract import abstract, axes
from jrl.models.decoder import MODEL


@pytest.fixture
def four():
    """Four devices as fsdp 2 x tensor 2."""
    mesh = make_mesh(MeshShape(fsdp=2, tensor=2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture
def drawn(four):
    """A function of a Decoder: weights drawn for it, spread over the four devices."""

    def draw(cfg):
        spec = MODEL.spec(cfg)
        normal = lambda path, s: jax.random.normal(jax.random.key(len(path) + sum(s.shape)), s.shape) * 0.3
        return jax.device_put(
            jax.tree_util.tree_map_with_path(normal, abstract(spec)), shardings(axes(spec), four, TRAIN)
        )

    return draw
