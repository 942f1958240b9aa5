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
from sampled import drawn_on, fresh
from test_fused import random_params

from jrl.device.sharding import TRAIN, MeshShape, make_mesh, shardings
from jrl.models import decoder, experts, fused_experts
from jrl.models.adapters.lora import LoRA, adapted
from jrl.models.attention import fused_blocks, ragged
from jrl.models.attention.fused import fused, has_kernel
from jrl.models.contract import abstract, axes
from jrl.models.experts import KERNEL, Experts
from jrl.models.shape import Decoder

OWN = Experts(count=6, per_token=2, width=24)
CFG = Decoder(vocab_size=32, layers=3, width=128, heads=2, kv_heads=2, head_dim=8, mlp_width=64, experts=OWN)
FORMS = {
    "plain": {},
    "gpt-oss": {"qkv_bias": True, "experts": dataclasses.replace(OWN, bias=True, clamp=0.7)},
    "a width of no whole tiles": {"width": 96},
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


@pytest.mark.parametrize(
    "form, layers", [*((form, "scanned") for form in FORMS), ("gpt-oss", "unrolled"), ("some layers", "unrolled")]
)
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


@pytest.mark.parametrize(
    "rows, width, expert_width, itemsize, block",
    [
        (8, 2048, 768 // 4, 2, 192),  # configs/plan/30b_moe.gin: 6 x 2048 x 192 x 2 bytes are 4.5 MiB of 6
        (8, 2048, 768, 2, 256),  # 6 MiB
        (8, 2048, 192, 4, 96),
        (8, 2048, 768, 4, 128),
        (8, 2880, 2880 // 4, 2, 144),  # gpt-oss: 16 x 9 columns; of 16 x 15 the weights are above 6 MiB
        (8, 2880, 2880 // 8, 2, 360),  # of no whole tiles of 16, so that there is no smaller block
        (64, 2880, 2880 // 8, 2, None),
        (2**12, 2048, 192, 2, None),
    ],
)
def test_a_block_is_the_most_columns_whose_weights_fit(rows, width, expert_width, itemsize, block):
    assert fused_blocks.expert_block(rows, width, expert_width, itemsize) == block


def test_bytes_by_hand():
    # 8 rows are 16 in memory, 24 columns 32 or 128. 6 x 128 x 32 x 2 of weights, 4 x 16 x 128 x 2 of rows, 2 x 16 x 128
    # x 4 of their weights, 4 x 8 x 128 x 4 of biases; 16 x 128 x 4 of the sum; 16 x 128 x 5 x 4 not written yet.
    assert fused_blocks.expert_bytes(8, 128, 24, 2) == 49152 + 16384 + 16384 + 16384 + 8192 + 40960
    # 6 x 128 x 24 x 4 of weights, 4 x 8 x 128 x 4 of rows, 2 x 8 x 128 x 4 of their weights, 4 x 8 x 128 x 4 of biases;
    # 3 x 2 x 128 x 24 of a block's parts; 8 x 128 x 4 of the sum; 8 x (2 x 128 x 8 + 3 x 128 x 4) not written yet.
    expected = 73728 + 16384 + 8192 + 16384 + 18432 + 4096 + 28672
    assert fused_blocks.expert_bytes(8, 128, 24, 4) == expected


def test_a_width_in_blocks_is_the_whole(interpreted, monkeypatch):
    """240 columns are no multiple of 128, and neither are their blocks of 80."""
    cfg = dataclasses.replace(CFG, **FORMS["gpt-oss"])
    cfg = dataclasses.replace(cfg, experts=dataclasses.replace(cfg.experts, width=240))
    params = random_params(cfg)
    whole = jax.jit(lambda p: decode(with_kernel(p, cfg), cfg))(params)
    monkeypatch.setattr(fused_blocks, "MLP_BUFFER_BYTES", 6 * 128 * 119 * 4)
    assert fused_blocks.expert_block(3, 128, 240, 4) == 80
    parts = jax.jit(lambda p: decode(with_kernel(p, cfg), cfg))(params)
    np.testing.assert_allclose(parts, whole, rtol=0, atol=4e-6 * np.abs(whole).max())


@pytest.mark.parametrize("shape", [MeshShape(fsdp=2, tensor=2), MeshShape(expert=2, tensor=2)])
def test_each_device_adds_its_share(shape, interpreted):
    """Over `expert` the tokens of two devices go to the experts of both."""
    cfg, mesh = dataclasses.replace(CFG, **FORMS["gpt-oss"]), make_mesh(shape, jax.devices()[:4])
    with jax.set_mesh(mesh):
        placed = jax.device_put(random_params(cfg), shardings(axes(decoder.MODEL.spec(cfg)), mesh, TRAIN))
        run = lambda p: (decode(with_kernel(p, cfg), cfg, rows=4), decode(p, cfg, rows=4))
        actual, expected = jax.jit(run)(placed)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=4e-6 * np.abs(expected).max())


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("goes_to", [[[4, 1], [1, 2], [4, 1]], [[0, 5], [2, 3], [4, 1]], [[9, 9], [9, 9], [9, 9]]])
def test_every_visited_expert_is_fetched_once_and_no_other(goes_to, parts):
    """A block is fetched where it is another than before. Of six experts all, some, or none are this device's."""
    chosen = np.array(goes_to)[..., None] == np.arange(6)
    expert, number = fused_experts._visits(jnp.asarray(chosen))
    layer = np.array([7])
    read = lambda visit, part: fused_experts._read(visit, part, layer, number, expert, parts=parts)
    blocks = [tuple(map(int, read(visit, part))) for visit in range(len(expert)) for part in range(parts)]
    fetched = [block for block, before in zip(blocks, [None, *blocks]) if block != before]
    visited = sorted({e for row in goes_to for e in row if e < 6})
    assert len(expert) == 6 and number.tolist() == [len(visited)]
    every = [(7, e, part) for e in visited for part in range(parts)]
    assert fetched == (every or [(7, 0, parts - 1)])  # a kernel's first block is always fetched


@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(expert=2, tensor=2)])
def test_sampling_by_the_kernels_draws_the_same_tokens(shape, monkeypatch):
    """Inside the sampler's map over batch shards, of which those that share experts take every step together."""
    calls, shard = [], fused_experts._shard

    def interpreted_shard(layer, h, share, ids, *weights, **how):
        calls.append(h.shape)
        # The interpreter's loop wants the types that operations give here: arguments vary over axes of the map around.
        return shard(layer, h, share, ids, *(1 * leaf for leaf in weights), **how | {"interpret": True})

    monkeypatch.setattr(ragged, "attend", functools.partial(ragged.attend, interpret=True))
    monkeypatch.setattr(fused_experts, "_shard", interpreted_shard)
    cfg = dataclasses.replace(CFG, vocab_size=48, layers=2)
    draw = functools.partial(drawn_on, shape, cfg, "scanned", decoder.MODEL, fresh(decoder.MODEL, cfg))
    actual, expected = draw("ragged"), draw("reference")
    assert calls and len(set(expected.length.tolist())) > 2
    np.testing.assert_array_equal(actual.tokens, expected.tokens)
    np.testing.assert_allclose(actual.sampler_logprobs, expected.sampler_logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("clamp", [None, 0.7])
def test_bfloat16_is_within_its_roundings(clamp):
    """Plain experts; and with biases and a clamp, as gpt-oss has them."""
    rng, narrow = np.random.default_rng(0), lambda x: jnp.asarray(x, jnp.bfloat16)
    h, ids = narrow(rng.normal(size=(3, 1, 128))), np.array([[[4, 1]], [[1, 2]], [[5, 0]]], np.int32)
    share = np.asarray(narrow(rng.uniform(0.2, 0.8, size=(3, 1, 2))), np.float32)
    names = experts.KERNEL_LEAVES[: 3 if clamp is None else 5]
    leaves = {n: narrow(0.2 * rng.normal(size=(1, 6, 24, 128)[: 3 if n.endswith("_bias") else 4])) for n in names}
    weights = decoder.fused.Stacked(leaves, jnp.int32(0))
    actual = fused_experts.mix(h, share, ids, weights, activation=jax.nn.silu, clamp=clamp, interpret=True)
    w = {name: np.asarray(leaf[0], np.float64) for name, leaf in leaves.items()}
    sigmoid, expected = lambda x: 1 / (1 + np.exp(-x)), np.zeros((3, 128))
    for row, i in np.ndindex(3, 2):
        e, x = ids[row, 0, i], np.asarray(h[row, 0], np.float64)
        gate, up = (w[f"expert_{n}"][e] @ x + w.get(f"expert_{n}_bias", np.zeros((6, 24)))[e] for n in ("gate", "up"))
        if clamp is None:
            inner = gate * sigmoid(gate) * up
        else:
            gate, up = np.minimum(gate, clamp), np.clip(up, -clamp, clamp)
            inner = gate * sigmoid(1.702 * gate) * (up + 1)
        expected[row] += share[row, 0, i] * (inner @ w["expert_down"][e])
    difference = np.linalg.norm(np.asarray(actual[:, 0], np.float64) - expected)
    # gate and up, silu(gate) or the sums with their biases, what down multiplies, and the result are each rounded by at
    # most 2^-9 of themselves; down's outputs, and these times their weights, are not.
    assert 2**-11 * np.linalg.norm(expected) < difference < 6 * 2**-9 * np.linalg.norm(expected)


def test_experts_that_no_token_goes_to_add_nothing(interpreted):
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


def test_an_activation_without_kernel_is_left_to_xla():
    cfg = dataclasses.replace(CFG, activation="gelu")
    assert "expert_up" in with_kernel(random_params(cfg), cfg)["layers"]


def test_quantized_experts_are_left_to_xla():
    model = adapted(decoder.MODEL, LoRA(rank=2, targets=("q",), base="int8"))
    params = jax.eval_shape(lambda params: with_kernel(params, CFG, model), abstract(model.spec(CFG)))
    assert "expert_up" in params["layers"] and KERNEL not in params["layers"]


def test_adapters_of_experts_are_left_to_xla():
    model = adapted(decoder.MODEL, LoRA(rank=2, targets=("expert_up",)))
    assert "expert_up" in with_kernel(random_params(CFG, model), CFG, model)["layers"]


def test_more_rows_than_a_core_holds_leave_every_matrix_as_it_was():
    """XLA would transpose gate and up in every layer of every decode step."""
    leaves = lambda rows: fused(*decoder.MODEL.prepare_for_decode(random_params(CFG), CFG), CFG, rows=rows)[0]["layers"]
    assert KERNEL in leaves(3) and "expert_up" in leaves(2**16) and KERNEL not in leaves(2**16)


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
    params = jax.eval_shape(lambda params: with_kernel(params, cfg), random_params(cfg))
    text = jax.jit(lambda p: decode(p, cfg)).trace(params).lower(lowering_platforms=("tpu",)).as_text()
    assert len(re.findall(r'kernel_name = "fused_experts"', text)) == 1 and "ragged_dot" not in text
    assert not re.search(r"dynamic_slice.*-> tensor<1x6x(128x24|24x128)xbf16>", text)
