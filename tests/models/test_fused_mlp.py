"""The kernel gives what the decoder's MLP gives: alone, in the decoder, on a mesh. Interpreted on a CPU."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_fused import random_params

from jrl.device.sharding import TRAIN, MeshShape, make_mesh, shardings
from jrl.models import decoder, fused_mlp
from jrl.models.adapters.lora import LoRA, adapted
from jrl.models.attention import fused_blocks
from jrl.models.attention.fused import MLP, MLP_LEAVES, QKV, fused, has_kernel, rank_of
from jrl.models.contract import ADAPTER, axes
from jrl.models.shape import Decoder

CFG = Decoder(vocab_size=32, layers=2, width=128, heads=2, kv_heads=1, head_dim=8, mlp_width=512)
X = np.random.default_rng(0).normal(size=(5, 1, 128)).astype(np.float32)
OPTIONS = [{}, {"norm": "rms_plus_one", "activation": "gelu_tanh", "norm_place": "both"}]


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(fused_mlp, "mlp", functools.partial(fused_mlp.mlp, interpret=True))
    monkeypatch.setattr(
        fused_blocks, "MLP_BUFFER_BYTES", 6 * 128 * 256 * 4
    )  # two blocks of 256, or one of a share of it


def decode(params, cfg, model=decoder.MODEL):
    """Returns the hidden states of a first token a row."""
    tokens = np.array([[3], [9], [31]], np.int32)
    return model.forward(params, tokens, np.zeros((3, 1), np.int32), None, cfg)[0]


def with_kernels(params, cfg, model=decoder.MODEL):
    return fused(*model.prepare_for_decode(params, cfg), cfg)[0]


@pytest.mark.parametrize("layers", ["scanned", "unrolled"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_decoded_token_has_the_same_hidden_state(options, layers, interpreted):
    cfg = dataclasses.replace(CFG, **options)
    params = random_params(cfg)

    @jax.jit
    def both(params):
        together = with_kernels(params, cfg)
        assert set(together["layers"][MLP]) == set(MLP_LEAVES) and "up" not in together["layers"]
        if layers == "unrolled":
            together = decoder.MODEL.unstack(together, cfg)
        return decode(together, cfg), decode(params, cfg)

    actual, expected = both(params)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("model", [decoder.MODEL, adapted(decoder.MODEL, LoRA(rank=3))])
def test_each_device_adds_its_share(model, interpreted):
    mesh = make_mesh(MeshShape(tensor=2), jax.devices()[:2])
    with jax.set_mesh(mesh):
        cfg = dataclasses.replace(CFG, kv_heads=2)
        placed = jax.device_put(random_params(cfg, model), shardings(axes(model.spec(cfg)), mesh, TRAIN))
        run = lambda p: (decode(with_kernels(p, cfg, model), cfg), decode(p, cfg, model))
        actual, expected = jax.jit(run)(placed)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    "targets, rank, left",
    [
        (("*",), 16, {"o", QKV}),  # filled up to a tile
        (("q", "o"), 0, {"o", QKV}),
        (("q", "down"), None, {"down", QKV}),  # of the three matrices one has an adapter, which is left to XLA
    ],
)
def test_adapters_are_multiplied_inside_the_kernel(targets, rank, left, interpreted):
    model = adapted(decoder.MODEL, LoRA(rank=3, targets=targets))

    @jax.jit
    def both(params):
        layers = (together := with_kernels(params, CFG, model))["layers"]
        assert (rank_of(layers[MLP]) if MLP in layers else None) == rank and set(layers[ADAPTER]) == left
        return decode(together, CFG), decode(params, CFG, model)

    actual, expected = both(random_params(CFG, model))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_bfloat16_is_within_a_rounding():
    params = random_params(CFG)["layers"]
    narrow = {name: params[name].astype(jnp.bfloat16) for name in MLP_LEAVES}
    x = jnp.asarray(X, jnp.bfloat16)
    run = functools.partial(fused_mlp.mlp, activation=jax.nn.silu, eps=1e-6, plus_one=False, interpret=True)
    actual = np.asarray(run(x, decoder.fused.Stacked(narrow, jnp.int32(1))), np.float32)
    w = {name: np.asarray(leaf[1], np.float32) for name, leaf in narrow.items()}
    h = np.asarray(x, np.float32)[:, 0]
    h = h / np.sqrt((h * h).mean(-1, keepdims=True) + 1e-6) * w["mlp_norm"]
    gate, up = h @ w["gate"], h @ w["up"]
    expected = gate / (1 + np.exp(-gate)) * up @ w["down"]
    # h, gate, up, silu(gate), their product and the sum are each rounded by at most 2^-9 of themselves.
    assert np.linalg.norm(actual[:, 0] - expected) < 6 * 2**-9 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "rows, width, mlp_width, itemsize, block",
    [
        (8, 4096, 12288 // 4, 2, 128),  # configs/plan/8b.gin: its weights' buffers are 6 x 4096 x 128 x 2 bytes, 6 MiB
        (8, 2048, 6144 // 2, 2, 256),  # configs/plan/1.7b.gin: 6 MiB as well
        (8, 1024, 384, 2, 128),  # 384 has no divisor but 128
        # As libtpu compiled them, with blocks of 128; or refused them: their buffers and scratch are above 16 MiB.
        (64, 5120, 25600, 2, 128),
        (8, 8192, 3584, 2, 128),
        (16, 4096, 12288, 4, 128),
        (32, 8192, 3584, 2, None),
        (17, 4096, 12288, 4, None),  # in memory these are 24 rows
        (32, 4096, 12288, 4, None),
    ],
)
def test_the_kernel_is_taken_where_it_fits_a_core(rows, width, mlp_width, itemsize, block):
    assert fused_blocks.mlp_block(rows, width, mlp_width, itemsize) == block


def test_bytes_by_hand():
    # 8 rows are 16 in memory. 6 x 128 x 128 x 2 of weights, 2 x 128 x 4 of the norm's scale, 4 x 16 x 128 x 2 of
    # rows; 16 x 128 x 6 of scratch; 16 x (2 x 128 x 4 + 3 x 128 x 4) not written yet.
    actual = fused_blocks.mlp_bytes(8, 128, 128, 2)
    assert actual == 196608 + 1024 + 16384 + 12288 + 40960
    # Adapters of rank 16: of each matrix 2 x 16 x (128 + 128) x 2; 16 x 128 x (2 + 2 + 4) of scratch.
    assert fused_blocks.mlp_bytes(8, 128, 128, 2, rank=16) == actual + 3 * 16384 + 16384


def test_many_rows_and_many_tokens_are_left_to_xla():
    cfg = dataclasses.replace(CFG, width=4096, mlp_width=3072)
    there = lambda *shape: has_kernel(MLP, jax.ShapeDtypeStruct(shape, jnp.bfloat16), cfg)
    assert there(96, 1, 4096) and not there(128, 1, 4096) and not there(1, 2, 4096)


@pytest.mark.parametrize("options", [{"mlp": "plain"}, {"parallel": True}, {"norm_place": "after"},
                                     {"norm": "layer"}, {"mlp_bias": True}, {"mlp_width": 96},
                                     {"activation": "gelu"}])  # fmt: skip
def test_other_mlps_are_left_as_they_are(options):
    cfg = dataclasses.replace(CFG, **options)
    assert MLP not in with_kernels(random_params(cfg), cfg)["layers"]
