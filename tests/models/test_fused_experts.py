"""The kernel for one token a row gives what the decoder's experts give: alone, in the decoder, on a mesh. Interpreted
on a CPU."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_fused import random_params

from jrl.device.sharding import TRAIN, MeshShape, make_mesh, shardings
from jrl.models import decoder, experts, fused_experts
from jrl.models.adapters.lora import LoRA, adapted
from jrl.models.attention import fused_blocks
from jrl.models.attention.fused import fused, has_kernel
from jrl.models.contract import axes
from jrl.models.experts import KERNEL, Experts
from jrl.models.shape import Decoder

OWN = Experts(count=6, per_token=2, width=24)
CFG = Decoder(vocab_size=32, layers=3, width=128, heads=2, kv_heads=2, head_dim=8, mlp_width=64, experts=OWN)
FORMS = {
    "plain": {},
    "gpt-oss": {"qkv_bias": True, "experts": dataclasses.replace(OWN, bias=True, clamp=0.7)},
    "some layers": {"experts": dataclasses.replace(OWN, layers=(False, True, True))},
    "gemma": {
        "activation": "gelu_tanh",
        "experts": dataclasses.replace(OWN, shared_expert="normed", reads="stream", scaled=True, softmax="all"),
    },
}


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(fused_experts, "mix", functools.partial(fused_experts.mix, interpret=True))


def decode(params, cfg, model=decoder.MODEL, rows=3):
    """Returns the hidden states of a first token a row."""
    tokens = np.array([[3], [9], [31], [7]], np.int32)[:rows]
    return model.forward(params, tokens, np.zeros((rows, 1), np.int32), None, cfg)[0]


def with_kernel(params, cfg, model=decoder.MODEL):
    return fused(*model.prepare_for_decode(params, cfg), cfg)[0]


@pytest.mark.parametrize("layers", ["scanned", "unrolled"])
@pytest.mark.parametrize("form", FORMS)
def test_a_decoded_token_has_the_same_hidden_state(form, layers, interpreted):
    cfg = dataclasses.replace(CFG, **FORMS[form])
    params = random_params(cfg)

    @jax.jit
    def both(params):
        together = with_kernel(params, cfg)
        assert set(together["layers"][KERNEL]) == {
            n for n in experts.KERNEL_LEAVES if cfg.experts.bias or "_bias" not in n
        }
        assert "expert_up" not in together["layers"]
        if layers == "unrolled":
            together = decoder.MODEL.unstack(together, cfg)
        return decode(together, cfg), decode(params, cfg)

    actual, expected = both(params)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=4e-6 * np.abs(expected).max())


@pytest.mark.parametrize("form", ["plain", "gpt-oss"])
def test_a_width_in_blocks_is_the_whole(form, interpreted, monkeypatch):
    """240 columns are no multiple of 128, and neither are their blocks of 80."""
    cfg = dataclasses.replace(CFG, **FORMS[form])
    cfg = dataclasses.replace(cfg, experts=dataclasses.replace(cfg.experts, width=240))
    params = random_params(cfg)
    whole = jax.jit(lambda p: decode(with_kernel(p, cfg), cfg))(params)
    monkeypatch.setattr(fused_blocks, "CORE_BYTES", fused_blocks.expert_bytes(3, 128, 80, 4))
    assert fused_blocks.expert_block(3, 128, 240, 4) == 80
    parts = jax.jit(lambda p: decode(with_kernel(p, cfg), cfg))(params)
    np.testing.assert_allclose(parts, whole, rtol=0, atol=4e-6 * np.abs(whole).max())


@pytest.mark.parametrize("form", ["plain", "gpt-oss"])
@pytest.mark.parametrize("shape", [MeshShape(fsdp=2, tensor=2), MeshShape(expert=2, tensor=2)])
def test_each_device_adds_its_share(shape, form, interpreted):
    """Over `expert` the tokens of two devices go to the experts of both."""
    cfg, mesh = dataclasses.replace(CFG, **FORMS[form]), make_mesh(shape, jax.devices()[:4])
    with jax.set_mesh(mesh):
        placed = jax.device_put(random_params(cfg), shardings(axes(decoder.MODEL.spec(cfg)), mesh, TRAIN))
        run = lambda p: (decode(with_kernel(p, cfg), cfg, rows=4), decode(p, cfg, rows=4))
        actual, expected = jax.jit(run)(placed)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=4e-6 * np.abs(expected).max())


def test_experts_that_no_token_goes_to_are_not_read(interpreted):
    """Their matrices are NaN. All tokens go to experts 4 and 1."""
    rng = np.random.default_rng(0)
    h, ids = rng.normal(size=(3, 1, 128)).astype(np.float32), np.broadcast_to([4, 1], (3, 1, 2)).astype(np.int32)
    share = rng.uniform(0.2, 0.8, size=(3, 1, 2)).astype(np.float32)
    shapes = {name: (1, 6, 24, 128) for name in ("expert_gate", "expert_up", "expert_down")}
    leaves = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    expected = sum(
        share[..., i] * (np.asarray(jax.nn.silu(x @ leaves["expert_gate"][0, e].T)) * (x @ leaves["expert_up"][0, e].T))
        @ leaves["expert_down"][0, e]
        for x in [h[:, 0]] for i, e in enumerate([4, 1])
    )  # fmt: skip
    for leaf in leaves.values():
        leaf[:, [0, 2, 3, 5]] = np.nan
    weights = decoder.fused.Stacked({name: jnp.asarray(leaf) for name, leaf in leaves.items()}, jnp.int32(0))
    actual = fused_experts.mix(jnp.asarray(h), share, ids, weights, activation=jax.nn.silu, clamp=None)[:, 0]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=4e-6 * np.abs(expected).max())


def test_a_token_reads_nothing_of_experts_that_only_others_go_to(interpreted):
    """Expert 3 makes infinities; the first token goes to 4 and 1, the second to 3."""
    rng = np.random.default_rng(0)
    h, ids = rng.normal(size=(2, 1, 128)).astype(np.float32), np.array([[[4, 1]], [[3, 1]]], np.int32)
    share = np.full((2, 1, 2), 0.5, np.float32)
    shapes = {name: (1, 6, 24, 128) for name in ("expert_gate", "expert_up", "expert_down")}
    leaves = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    leaves["expert_up"][:, 3], leaves["expert_down"][:, 3] = 3e38, 3e38
    weights = decoder.fused.Stacked({name: jnp.asarray(leaf) for name, leaf in leaves.items()}, jnp.int32(0))
    mixed = lambda h, ids, share: fused_experts.mix(h, share, ids, weights, activation=jax.nn.silu, clamp=None)
    both = mixed(jnp.asarray(h), ids, share)
    assert not np.isfinite(both[1]).all()
    alone = mixed(jnp.asarray(h[:1]), ids[:1], share[:1])
    np.testing.assert_allclose(both[0], alone[0], rtol=0, atol=4e-6 * np.abs(alone).max())


@pytest.mark.parametrize(
    "change", [{"width": 96}, {"activation": "gelu"}], ids=["a width of no whole tiles", "an activation without kernel"]
)
def test_what_the_kernel_cannot_do_is_left_to_xla(change):
    cfg = dataclasses.replace(CFG, **change)
    assert "expert_up" in with_kernel(random_params(cfg), cfg)["layers"]


def test_adapters_of_experts_are_left_to_xla():
    model = adapted(decoder.MODEL, LoRA(rank=2, targets=("expert_up",)))
    assert "expert_up" in with_kernel(random_params(CFG, model), CFG, model)["layers"]


def test_several_tokens_a_row_and_many_rows_take_the_sliced_matrices():
    assert has_kernel(KERNEL, jnp.zeros((3, 1, 128)), CFG)
    assert not has_kernel(KERNEL, jnp.zeros((3, 2, 128)), CFG)
    assert not has_kernel(KERNEL, jnp.zeros((2**16, 1, 128)), CFG)
    cfg = dataclasses.replace(CFG, **FORMS["gpt-oss"])
    params, tokens = random_params(cfg), np.arange(6, dtype=np.int32).reshape(2, 3)
    run = lambda p: decoder.MODEL.forward(p, tokens, np.broadcast_to(np.arange(3, dtype=np.int32), (2, 3)), None, cfg)[
        0
    ]
    actual, expected = jax.jit(lambda p: (run(with_kernel(p, cfg)), run(p)))(params)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=4e-6 * np.abs(expected).max())


def test_a_decoded_token_lowered_for_tpus_makes_no_copy_of_a_layers_experts():
    cfg = dataclasses.replace(CFG, dtype="bfloat16")
    params = jax.eval_shape(lambda: with_kernel(random_params(cfg), cfg))
    text = jax.jit(lambda p: decode(p, cfg)).trace(params).lower(lowering_platforms=("tpu",)).as_text()
    assert len(re.findall(r'kernel_name = "fused_experts"', text)) == 1 and "ragged_dot" not in text
    assert not re.search(r"dynamic_slice.*-> tensor<1x6x(128x24|24x128)xbf16>", text)
