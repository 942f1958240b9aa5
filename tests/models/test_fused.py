"""One product for queries, keys and values gives what three give."""

from __future__ import annotations

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.device.sharding import TRAIN, MeshShape, make_mesh, shardings
from jrl.models import decoder
from jrl.models.attention.fused import QK_NORM, QKV, fused
from jrl.models.contract import axes, is_spec
from jrl.models.shape import Decoder

CFG = Decoder(vocab_size=32, layers=2, width=16, heads=4, kv_heads=2, head_dim=8, mlp_width=24)
TOKENS = np.arange(12, dtype=np.int32).reshape(2, 6)
POSITIONS = np.broadcast_to(np.arange(6, dtype=np.int32), TOKENS.shape)


def random_params(cfg, model=decoder.MODEL):
    """Every leaf random: norms and adapters too."""

    def draw(path, s):
        rng = np.random.default_rng(zlib.crc32(str(path).encode()))
        fresh = 1 if s.scale is None else s.scale * rng.normal(size=s.shape)
        return jnp.asarray((fresh + 0.3 * rng.normal(size=s.shape)).astype(s.dtype))

    return jax.tree_util.tree_map_with_path(draw, model.spec(cfg), is_leaf=is_spec)


def hidden_of(params, cfg):
    return decoder.MODEL.forward(params, TOKENS, POSITIONS, None, cfg)[0]


@pytest.mark.parametrize(
    "options", [{}, {"qk_norm": None}, {"norm": "rms_plus_one", "window": 3, "window_layers": (True, False)}]
)
def test_the_same_hidden_states(options):
    cfg = dataclasses.replace(CFG, **options)
    params = random_params(cfg)
    together, names = fused(*decoder.MODEL.prepare_for_decode(params, cfg), cfg)
    layers = together["layers"]
    # 4 queries, 2 keys and 2 values, in one share; their norms' scales are those of 4 and 2 heads.
    assert layers[QKV].shape == (2, 16, 1, 8, 8) and "q" not in layers
    assert (QK_NORM in layers) == (cfg.qk_norm == "head")
    assert jax.tree.structure(jax.tree.map(lambda x: 0, layers)) == jax.tree.structure(
        jax.tree.map(lambda x: 0, names["layers"], is_leaf=lambda x: isinstance(x, tuple))
    )
    np.testing.assert_allclose(
        jax.jit(hidden_of, static_argnums=1)(together, cfg), jax.jit(hidden_of, static_argnums=1)(params, cfg),
        rtol=0, atol=8e-6,
    )  # fmt: skip


def test_each_device_has_its_queries_keys_and_values():
    params = random_params(CFG)
    expected = jax.jit(hidden_of, static_argnums=1)(params, CFG)
    mesh = make_mesh(MeshShape(fsdp=2, tensor=2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, shardings(axes(decoder.spec(CFG)), mesh, TRAIN))
        run = jax.jit(lambda params: hidden_of(fused(*decoder.MODEL.prepare_for_decode(params, CFG), CFG)[0], CFG))
        np.testing.assert_allclose(run(placed), expected, rtol=0, atol=8e-6)


@pytest.mark.parametrize(
    "options", [{"qkv_bias": True}, {"value_norm": True}, {"qk_norm": "all"}, {"shared_layers": 1}]
)
def test_other_layers_are_left_as_they_are(options):
    options = options | ({"window": 3, "window_layers": (True, True)} if "shared_layers" in options else {})
    cfg = dataclasses.replace(CFG, **options)
    names = {"layers": {}}
    params = {"layers": {name: jnp.zeros((2, 1)) for name in "qkv"}}
    assert fused(params, names, cfg) == (params, names)
