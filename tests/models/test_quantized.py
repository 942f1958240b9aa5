"""Matrices in few bits: by hand, as qwix has them, as the weights they stand for, under adapters and on a mesh."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampled import adapted, agree_on_four_devices, fresh, learned, one_device, places_of

from jrl.device.sharding import MeshShape, make_mesh
from jrl.models.adapters.lora import LoRA, merge
from jrl.models.adapters.matrices import MATRICES
from jrl.models.adapters.quantized import KINDS, NF4, check_bytes, dequantize, quantize
from jrl.models.attention.linear import Linear
from jrl.models.contract import axes, merge_params, split_params
from jrl.models.decoder import MODEL
from jrl.models.experts import Experts
from jrl.models.shape import Decoder, FullHeads

qwix = pytest.importorskip("qwix")

CFG = Decoder(vocab_size=48, layers=2, width=16, heads=2, kv_heads=2, head_dim=8, mlp_width=16)
SPARSE = dataclasses.replace(CFG, experts=Experts(count=3, per_token=2, width=8))
TOKENS = np.random.default_rng(0).integers(0, 48, (4, 8)).astype(np.int32)
POSITIONS = np.broadcast_to(np.arange(8, dtype=np.int32), TOKENS.shape)
CLAMPED = dataclasses.replace(CFG, experts=Experts(count=3, per_token=2, width=8, bias=True, clamp=0.8))
CASES = [(LoRA(rank=2, base="nf4", kind="dora"), CFG), (LoRA(rank=2, base="int4", targets=("o", "expert_*")), SPARSE),
         (LoRA(rank=2, base="int8", targets=("q", "expert_*")), CLAMPED)]  # fmt: skip
IDS = ["nf4-dora", "int4-experts", "int8-experts of gpt-oss"]


@functools.partial(jax.jit, static_argnames=("model", "cfg"))
def logits(params, model=MODEL, cfg=CFG):
    hidden, _ = model.forward(params, TOKENS, POSITIONS, None, cfg)
    return model.unembed(params, hidden, cfg)


@functools.partial(jax.jit, static_argnames=("model", "cfg"))
def loss(adapters, base, model, cfg):
    return (logits(merge_params(base, adapters), model, cfg) ** 2).mean()


gradient = functools.partial(jax.jit, static_argnames=("model", "cfg"))(jax.value_and_grad(loss))


def drawn(config, cfg):
    """Returns (model, parameters whose adapters have learned something, cfg), in float64."""
    model, cfg = adapted(MODEL, config), dataclasses.replace(cfg, dtype="float64", param_dtype="float64")
    return model, learned(model, cfg), cfg


# The formulas


def by_hand(kind, column):
    """Returns (values, scale, the matrix they stand for) of one output with the inputs of `column`."""
    weight = jnp.asarray(column, jnp.float32).reshape(1, -1, 1)
    actual = quantize(weight, "up", kind, ("layers", "embed", "mlp"))
    stood_for = dequantize(jax.tree.map(lambda leaf: leaf[0], actual), "up", jnp.float32, None)
    return actual[kind][0, :, 0].tolist(), actual["scale"][0, :, 0].tolist(), stood_for[:, 0]


def test_eight_bits_by_hand():
    # 127.5 steps reach the largest, so a step is 1; 127.5 is rounded to 128, which is one too many.
    values, scale, stood_for = by_hand("int8", [127.5, 64.4, -1.6, 0.0])
    assert (values, scale) == ([127, 64, -2, 0], [1.0])
    np.testing.assert_array_equal(stood_for, [127, 64, -2, 0])


def test_four_bits_by_hand():
    # 7.5 steps reach the largest, 15: a step is 2. 7.5 is rounded to 8, one too many; -2.6 to -3, -0.4 to 0, 3.6 to 4.
    # Bytes: 7 + 16 (-3 + 16) = 215; 0 + 16 * 4 = 64.
    values, scale, stood_for = by_hand("int4", [15.0, -5.2, -0.8, 7.2])
    assert (values, scale) == ([215, 64], [2.0])
    np.testing.assert_array_equal(stood_for, [14, -6, 0, 8])


def test_normal_floats_by_hand():
    # The largest is 2, so these are 2 times 1, -0.5, 0.05 and -1. The nearest quantiles are the 15th, 1; the 2nd,
    # -0.525 (the 3rd is -0.395); the 8th, 0.0796 (the 7th is 0); and the 0th, -1. Bytes: 15 + 16 * 2 = 47; 8 + 0.
    values, scale, stood_for = by_hand("nf4", [2.0, -1.0, 0.1, -2.0])
    assert (values, scale) == ([47, 8], [2.0])
    np.testing.assert_allclose(stood_for, [2, -1.0501461, 0.1591606, -2], rtol=1e-6)


LAID = {"o": ((2, 2, 128, 6), ("layers", "heads", "head_dim", "embed")),
        "expert_up": ((2, 3, 96, 4), ("layers", "experts", "embed", "mlp"))}  # fmt: skip
SCALES = {("o", "int8"): (2, 1, 1, 6), ("o", "int4"): (2, 2, 2, 6), ("o", "nf4"): (2, 2, 2, 6),
          ("expert_up", "int8"): (2, 3, 1, 4), ("expert_up", "int4"): (2, 3, 3, 4)}  # fmt: skip


@pytest.mark.parametrize("name, kind", SCALES)
def test_every_weight_is_within_half_a_step_and_what_qwix_makes_of_it(name, kind):
    shape, names = LAID[name]
    weight = jax.random.normal(jax.random.key(0), shape)
    actual = quantize(weight, name, kind, names)
    # A scale for all inputs of an output, or for 64 (of 96 inputs: 32, which divides them) of one head or expert.
    assert actual["scale"].shape == SCALES[name, kind]
    first = jax.tree.map(lambda leaf: leaf[0], actual)
    stood_for = dequantize(first, name, jnp.float32, None)
    # Between neighboring levels lies 1, or of the quantiles at most -0.696 + 1.
    step = 1 if kind != "nf4" else max(b - a for a, b in itertools.pairwise(NF4))
    tiles = [n // s for n, s in zip(shape[1:], first["scale"].shape)]
    scale = np.repeat(first["scale"], tiles[1], 1)  # the second axis is the last input of both
    assert (np.abs(stood_for - weight[0]) <= scale * step / 2 * (1 + 1e-5)).all()
    theirs = qwix.quantize(weight[0], kind, channelwise_axes=[i for i, n in enumerate(tiles) if n == 1],
                           tiled_axes={i: n for i, n in enumerate(tiles) if n > 1})  # fmt: skip
    np.testing.assert_array_equal(stood_for, qwix.dequantize(theirs))


LINEAR = Linear(key_heads=2, value_heads=2, key_dim=4, value_dim=4)
FULL = dict(full=FullHeads(head_dim=4, kv_heads=1), window=4, window_layers=(True, False))
OTHERS = {"experts": SPARSE, "linear": dataclasses.replace(CFG, linear=LINEAR),
          "full": dataclasses.replace(CFG, **FULL),
          "shared": dataclasses.replace(CFG, layers=3, shared_layers=1, shared_mlp_width=24),
          "inputs": dataclasses.replace(CFG, layer_inputs=4, output_gate=True)}  # fmt: skip


@pytest.mark.parametrize("cfg", OTHERS.values(), ids=OTHERS)
def test_every_matrix_has_its_inputs_named(cfg):
    """The stream is on one side of each: what is not an input, or an expert's number, is an output."""
    layers = MODEL.spec(cfg)["layers"]
    actual = {name for name, leaf in layers.items() if "embed" in leaf.axes and len(leaf.axes) > 2}
    assert actual - {"router", "linear_step", "linear_beta"} == MATRICES.keys() & layers.keys()
    for name in MATRICES.keys() & layers.keys():
        inputs = [layers[name].axes[1 + axis] for axis in MATRICES[name]]
        assert ("embed" in inputs) != (layers[name].axes[-1] == "embed"), name


# The policy


def test_the_model_computes_with_the_weights_that_they_stand_for():
    model, params, cfg = drawn(*CASES[0])
    params = params._replace(adapters=jax.tree.map(np.zeros_like, params.adapters))  # nothing comes of the adapters
    with jax.enable_x64(True):
        bare = fresh(MODEL, cfg)
        np.testing.assert_array_equal(params.base["embed"], bare["embed"])
        meant = dict(params.base["layers"])
        for name in meant.keys() & MATRICES.keys():
            stacks = meant[name]
            layers = [dequantize(jax.tree.map(lambda x, i=i: x[i], stacks), name, "float64", None) for i in range(2)]
            meant[name] = np.stack(layers)
        with jax.set_mesh(one_device()):
            actual, without = logits(params, model=model, cfg=cfg), logits(bare, cfg=cfg)
            expected = logits({**bare, "layers": meant}, cfg=cfg)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    assert 1e-4 < np.abs(actual - without).max() < 2


@pytest.mark.parametrize("config, cfg", CASES, ids=IDS)
def test_merged_weights_compute_what_adapters_do(config, cfg):
    model, params, cfg = drawn(config, cfg)
    with jax.enable_x64(True), jax.set_mesh(one_device()):
        merged = jax.jit(lambda p: merge(p, config, axes(model.spec(cfg)), dtype="float64"))(params)
        assert not any(isinstance(leaf, dict) for leaf in merged["layers"].values())
        actual, expected = logits(params, model=model, cfg=cfg), logits(merged, cfg=cfg)
        still = logits(params._replace(adapters=jax.tree.map(np.zeros_like, params.adapters)), model=model, cfg=cfg)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    assert np.abs(actual - still).max() > 0.01


def test_the_gradient_of_adapters_is_that_of_the_loss():
    model, params, cfg = drawn(*CASES[1])
    base, adapters = split_params(params)
    with jax.enable_x64(True), jax.set_mesh(one_device()):
        slope = gradient(adapters, base, model, cfg)[1]
        rng = np.random.default_rng(2)
        along = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), adapters)
        moved = lambda step: jax.tree.map(lambda x, d: x + step * d, adapters, along)
        at = lambda step: float(gradient(moved(step), base, model, cfg)[0])
        actual = sum(float(np.vdot(g, d)) for g, d in zip(*map(jax.tree.leaves, (slope, along))))
        expected = (at(3e-7) - at(-3e-7)) / 6e-7
    assert actual == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("config, cfg", CASES, ids=IDS)
def test_a_mesh_changes_neither_policy_nor_gradient(config, cfg):
    model, params, cfg = drawn(config, cfg)
    base, adapters = split_params(params)
    with jax.enable_x64(True):
        with jax.set_mesh(one_device()):
            expected = jax.tree.map(np.asarray, gradient(adapters, base, model, cfg))
        mesh = make_mesh(MeshShape(fsdp=2, tensor=2), jax.devices()[:4])
        with jax.set_mesh(mesh):
            places = places_of(model, cfg, mesh)
            base, adapters = split_params(jax.tree.map(jax.device_put, jax.tree.map(np.asarray, params), places))
            values = next(iter(base["layers"]["q"].values()))
            assert values.addressable_shards[0].data.size * 4 == values.size  # cut as the whole matrix is
            value, slope = gradient(adapters, base, model, cfg)
            assert jax.tree.all(jax.tree.map(lambda g, p: g.sharding.spec == p.sharding.spec, slope, adapters))
            value, slope = jax.tree.map(np.asarray, (value, slope))
    np.testing.assert_allclose(value, expected[0], rtol=1e-12)
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-12 * np.abs(y).max())
    jax.tree.map(close, slope, expected[1])


@pytest.mark.parametrize(("case", "layers"), list(zip(CASES, ("unrolled", "scanned", "scanned"))), ids=IDS)
def test_the_samplers_logprobs_on_four_devices_are_a_plain_forwards_on_one(case, layers):
    config, cfg = case
    model = adapted(MODEL, config)
    agree_on_four_devices(cfg, layers, model, learned(model, cfg))


# What is refused


def test_a_merged_copy_is_refused():
    with pytest.raises(ValueError, match=r"LoRA\.sampling = 'merged' dequantizes every matrix"):
        LoRA(base="int8", sampling="merged")


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_do_not_divide_are_refused(kind):
    mesh = make_mesh(MeshShape(fsdp=8), jax.devices()[:8])
    cfg = dataclasses.replace(CFG, width=8)  # 8 inputs over 8 devices, but 4 bytes
    actual = adapted(MODEL, LoRA(base=kind)).spec(cfg).base
    if kind == "int8":
        return check_bytes(actual, mesh)
    with pytest.raises(ValueError, match=r"4 bytes do not divide over MeshShape.fsdp = 8; 'int8' does"):
        check_bytes(actual, mesh)
    with pytest.raises(ValueError, match="two inputs in a byte, and 'q' has 7"):
        adapted(MODEL, LoRA(base=kind)).spec(dataclasses.replace(CFG, width=7))


def test_a_missing_qwix_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(ImportError, match=r"needs the package qwix.*jrl-jax\[quant\]"):
        by_hand("int8", [1.0, 2.0])
