"""The kernel gives the queries, keys and values that the decoder's operations give. Interpreted on a CPU."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from test_fused import random_params

from jrl.device.sharding import TRAIN, MeshShape, make_mesh, shardings
from jrl.models import decoder, fused_experts
from jrl.models.adapters.lora import LoRA, adapted
from jrl.models.attention import fused_blocks, fused_qkv
from jrl.models.attention.fused import ATTENTION, MLP, QK_NORM, QKV, fused, has_kernel, rank_of
from jrl.models.contract import axes
from jrl.models.experts import Experts
from jrl.models.shape import Decoder

CFG = Decoder(vocab_size=32, layers=2, width=256, heads=4, kv_heads=2, head_dim=128, mlp_width=24)
OPTIONS = [
    # Without norms random queries and keys are long: unscaled, their scores turn a rounding into 3e-5 of the state.
    {"qk_norm": None, "query_scale": 0.01},
    {"norm": "rms_plus_one", "norm_place": "both"},
    # Two stretches of layers, each scanned: the second one's weights do not begin at the stack's first row.
    {"layers": 4, "experts": Experts(count=2, per_token=1, width=8, layers=(False, False, True, True))},
    {"window": 3, "window_layers": (True, False), "window_rope_theta": 100.0, "rotary_layers": (True, False)},
]
MODELS = [decoder.MODEL, adapted(decoder.MODEL, LoRA(rank=2))]
TOKENS, COLUMN = np.array([[3], [9], [31]], np.int32), np.array([[5], [0], [2]], np.int32)


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(fused_qkv, "project", functools.partial(fused_qkv.project, interpret=True))
    monkeypatch.setattr(fused_experts, "mix", functools.partial(fused_experts.mix, interpret=True))
    monkeypatch.setattr(fused_blocks, "QKV_BUFFER_BYTES", 2 * 128 * 1024 * 4)  # two blocks of 128 entries of the stream


def decode(params, cfg, model=decoder.MODEL):
    """Returns the hidden states of a token a row over a cache that holds something, and the cache after it."""
    cache = jax.tree.map(lambda x: x + 0.5, decoder.MODEL.init_cache(cfg, 3, 8))
    cache = decoder.MODEL.cut_cache(cache, 8, "token_major")
    if model is decoder.MODEL and isinstance(params["layers"], tuple):
        cache = jax.tree.map(lambda x: x, decoder_cache(cache, cfg))
    return model.forward(params, TOKENS, COLUMN, None, cfg, cache)


def decoder_cache(cache, cfg):
    """Returns a stacked cache as a tuple of those of the layers."""
    return tuple(jax.tree.map(lambda x, i=i: x[i], cache) for i in range(cfg.layers))


def with_kernels(params, cfg, model=decoder.MODEL):
    return fused(*model.prepare_for_decode(params, cfg), cfg)[0]


@pytest.mark.parametrize(
    "options, layers",
    [*((options, "scanned") for options in OPTIONS), *((options, "unrolled") for options in OPTIONS[2:])],
)
def test_a_decoded_token_has_the_same_state_keys_and_values(options, layers, interpreted):
    cfg = dataclasses.replace(CFG, **options)

    @jax.jit
    def both(params):
        together = with_kernels(params, cfg)
        assert (QK_NORM in together["layers"][ATTENTION]) == (cfg.qk_norm == "head") and QKV not in together["layers"]
        if layers == "unrolled":
            together, params = (decoder.MODEL.unstack(tree, cfg) for tree in (together, params))
        return decode(together, cfg), decode(params, cfg)

    actual, expected = both(random_params(cfg))
    for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * np.abs(other).max())


@pytest.mark.parametrize("rows", [fused_qkv.MOST_STORED, fused_qkv.MOST_STORED + 1])
def test_few_rows_and_many_are_stored_where_attention_reads_them(rows, interpreted):
    """There are as many heads as rows, so that neither can be taken for the other by its size."""
    cfg = dataclasses.replace(CFG, width=128, heads=rows, kv_heads=1)
    tokens = np.arange(rows, dtype=np.int32)[:, None] % 32
    assert has_kernel(ATTENTION, jax.ShapeDtypeStruct((rows, 1, 128), "float32"), cfg)
    read = lambda params: decoder.MODEL.forward(params, tokens, tokens % 7, None, cfg)[0]
    actual, expected = jax.jit(lambda params: (read(with_kernels(params, cfg)), read(params)))(random_params(cfg))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("model", MODELS)
def test_each_device_has_its_heads(model, interpreted):
    mesh = make_mesh(MeshShape(tensor=2), jax.devices()[:2])
    read = lambda params: model.forward(params, TOKENS, COLUMN, None, CFG)[0]
    with jax.set_mesh(mesh):
        placed = jax.device_put(random_params(CFG, model), shardings(axes(model.spec(CFG)), mesh, TRAIN))
        actual, expected = jax.jit(lambda params: (read(with_kernels(params, CFG, model)), read(params)))(placed)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_is_read_by_the_same_weights_sliced(model):
    cfg = dataclasses.replace(CFG, mlp_width=128)  # the MLP's weights are sliced too
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6)
    positions = np.broadcast_to(np.arange(6, dtype=np.int32), tokens.shape)
    read = lambda params: model.forward(params, tokens, positions, None, cfg)[0]

    @jax.jit
    def both(params):
        together = with_kernels(params, cfg, model)
        assert {ATTENTION, MLP} <= set(together["layers"])
        return read(together), read(params)

    actual, expected = both(random_params(cfg, model))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("targets, rank", [(("*",), 16), (("q", "v"), 16), (("down",), 0)])
def test_adapters_are_multiplied_inside_the_kernel(targets, rank, interpreted):
    """Three of rank 5 are one of rank 15, two are one of rank 10; both are filled up to 16."""
    model = adapted(decoder.MODEL, LoRA(rank=5, targets=targets))

    @jax.jit
    def both(params):
        together = with_kernels(params, CFG, model)
        assert rank_of(together["layers"][ATTENTION]) == rank
        return decode(together, CFG), decode(params, CFG, model)

    actual, expected = both(random_params(CFG, model))
    for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * np.abs(other).max())


def test_adapters_that_scale_outputs_are_left_to_xla():
    model = adapted(decoder.MODEL, LoRA(rank=2, kind="dora"))
    assert (
        ATTENTION
        not in jax.eval_shape(lambda params: with_kernels(params, CFG, model), random_params(CFG, model))["layers"]
    )


@pytest.mark.parametrize(
    "rows, width, heads, head_dim, itemsize, block",
    [
        (8, 4096, (8, 2), 128, 2, 512),  # configs/plan/8b.gin: a quarter of its heads
        (8, 2048, (8, 4), 128, 2, 512),  # configs/plan/1.7b.gin: half of them
        # As libtpu compiled it, and refused it: the sum of 113 rows alone is 5.3 MiB.
        (64, 3072, (16, 16), 256, 2, 128),
        (113, 3072, (16, 16), 256, 2, None),
    ],
)
def test_the_kernel_is_taken_where_it_fits_a_core(rows, width, heads, head_dim, itemsize, block):
    assert fused_blocks.qkv_block(rows, width, heads, head_dim, itemsize) == block


def test_bytes_by_hand():
    # 3 rows are 8 in memory, as 2 heads of queries and of keys are, 4 together too. 2 x 128 x 768 x 4 of weights; 2 x 8
    # x (128 x 4 + 2 x 128 x 4) of rows and angles; 8 x (128 + 8 x 128) of scales; 2 x 8 x 128 x 4 x 24 of results;
    # 8 x (128 x 4 + 768 x 4) of scratch; 8 x 128 x 8 not written yet: 786432 + 24576 + 9216 + 196608 + 28672 + 8192.
    assert fused_blocks.qkv_bytes(3, 128, 128, (2, 2), 128, 4) == 1053696
    # Adapters of rank 16: 2 x 16 x (128 + 768) x 4, and 8 x 128 x 4 of scratch.
    assert fused_blocks.qkv_bytes(3, 128, 128, (2, 2), 128, 4, rank=16) == 1053696 + 114688 + 4096


@pytest.mark.parametrize("options", [{"head_dim": 64}, {"rotary_dim": 64}, {"norm": "layer"}, {"parallel": True},
                                     {"norm_place": "after"}, {"output_gate": True}, {"width": 96}])  # fmt: skip
def test_other_attention_is_left_as_it_is(options):
    cfg = dataclasses.replace(CFG, **options)
    layers = with_kernels(random_params(cfg), cfg)["layers"]
    assert ATTENTION not in layers and QKV in layers
