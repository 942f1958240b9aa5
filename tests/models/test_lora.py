"""Adapters: by hand, as the base where nothing is learned, merged as unmerged, and the gradient of nothing else."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampled import adapted, fresh, learned, one_device, places_of

from jrl.device.sharding import MeshShape, batch_sharding, make_mesh, replicated
from jrl.models.adapters import lora
from jrl.models.adapters.lora import LoRA, columns, merge
from jrl.models.adapters.matrices import ADAPTABLE, MATRICES
from jrl.models.attention.linear import Linear
from jrl.models.contract import ADAPTER, Adapted, abstract, axes, merge_params, num_params, split_params
from jrl.models.decoder import MODEL
from jrl.models.experts import Experts
from jrl.models.shape import Decoder, FullHeads
from jrl.rollout import sampler
from jrl.rollout.sampler import Sampler
from jrl.types import PromptBatch

CFG = Decoder(vocab_size=48, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=32)
PLAIN = dataclasses.replace(CFG, mlp="plain", norm="layer", qk_norm=None, qkv_bias=True, output_bias=True,
                            mlp_bias=True, parallel=True, tied=False)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 48, (4, 10)).astype(np.int32)
POSITIONS = np.broadcast_to(np.arange(10, dtype=np.int32), TOKENS.shape)
KINDS = [LoRA(rank=3, alpha=6.0), LoRA(rank=4, alpha=3.0, kind="dora", scaling="alpha/sqrt(rank)", targets=("q", "o*"))]


def drawn(config, cfg=CFG):
    """Returns parameters after some training."""
    return learned(adapted(MODEL, config), cfg)


@functools.partial(jax.jit, static_argnames=("model", "cfg"))
def logits(params, model=MODEL, cfg=CFG):
    hidden, _ = model.forward(params, TOKENS, POSITIONS, None, cfg)
    return model.unembed(params, hidden, cfg)


def on_one_device(fn, *args, **static):
    with jax.set_mesh(one_device()):
        return jax.tree.map(np.asarray, fn(*args, **static))


# The formulas


def test_a_merged_weight_by_hand():
    # s = 2 / 1. A B = [1, 2]^T [5, 7] = [[5, 7], [10, 14]]. W + 2 A B = [[1 + 10, 2 + 14], [3 + 20, 4 + 28]].
    names = Adapted({"layers": {"up": ("layers", "embed", "mlp")}}, None)
    params = Adapted(
        {"layers": {"up": jnp.array([[[1.0, 2], [3, 4]]])}},
        {"up": {"a": jnp.array([[[1.0], [2]]]), "b": jnp.array([[[5.0, 7]]])}},
    )
    merged = merge(params, LoRA(rank=1, alpha=2.0), names, dtype="float32")
    np.testing.assert_array_equal(merged["layers"]["up"], [[[11, 16], [23, 32]]])
    assert merged.keys() == {"layers"} and ADAPTER not in merged["layers"]


def test_the_forward_pass_by_hand():
    # One row x = [1, 1]: x W = [4, 6], x A = 3, and 2 * 3 * [5, 7] = [30, 42] on top.
    from jrl.models.product import multiply

    weights = {
        "up": jnp.array([[1.0, 2], [3, 4]]),
        ADAPTER: {"up": {"a": jnp.array([[1.0], [2]]), "b": jnp.array([[10.0, 14]])}},
    }
    actual = multiply("bld,df->blf", jnp.ones((1, 1, 2)), weights, "up", ("embed", "mlp"))
    np.testing.assert_array_equal(actual, [[[34, 48]]])
    weights[ADAPTER]["up"]["c"] = jnp.array([0.5, 2])
    actual = multiply("bld,df->blf", jnp.ones((1, 1, 2)), weights, "up", ("embed", "mlp"))
    np.testing.assert_array_equal(actual, [[[17, 96]]])


def test_the_scale_by_hand():
    assert LoRA(rank=16, alpha=32.0).scale == 2
    assert LoRA(rank=16, alpha=32.0, scaling="alpha/sqrt(rank)").scale == 8


@pytest.mark.parametrize("d, c", [(0.0, 0.5), (5.0, 1.0), (-5.0, 0.0)])
def test_the_factor_of_dora_by_hand(d, c):
    # W = [3, 4]^T is 5 long; A B = [3, 4]^T makes it 10 long: c = (5 + d) / 10.
    given = (jnp.array([[[3.0], [4]]]), jnp.array([[[3.0], [4]]]), jnp.array([[[1.0]]]), jnp.array([[d]]))
    assert float(jax.jit(columns, static_argnames="names")(*given, names=("mlp",))[0, 0]) == pytest.approx(c, abs=1e-7)


def test_the_factor_of_dora_is_that_of_its_definition():
    rng = np.random.default_rng(2)
    for into, out in (((6,), (2, 3)), ((2, 3), (5,)), ((7,), (4,))):
        weight, a = rng.normal(size=(2, *into, *out)), rng.normal(size=(2, *into, 3))
        b, d = rng.normal(size=(2, 3, *out)), rng.normal(size=(2, *out))
        inputs = tuple(range(1, 1 + len(into)))
        now = weight + np.stack([np.tensordot(a[i], b[i], 1) for i in range(2)])
        lengths = [np.sqrt((w * w).sum(inputs)) for w in (weight, now)]
        with jax.enable_x64(True):
            actual = columns(*map(jnp.asarray, (weight, a, b, d)), names=(None,) * len(out))
        np.testing.assert_allclose(actual, (lengths[0] + d) / lengths[1], rtol=1e-12)


def test_an_output_without_weights_stays_finite():
    zero = jnp.zeros((1, 2, 1)), jnp.ones((1, 2, 1)), jnp.zeros((1, 1, 1)), jnp.zeros((1, 1))
    assert float(columns(*zero, names=("mlp",))[0, 0]) == 1
    # W = 0 has length 0; A B = [3, 4]^T is 5 long: c = (0 + d) / 5.
    weight, a, b = zero[0], jnp.array([[[3.0], [4]]]), jnp.ones((1, 1, 1))
    for d, c in [(0.0, 0.0), (2.0, 0.4)]:
        assert float(columns(weight, a, b, jnp.array([[d]]), names=("mlp",))[0, 0]) == pytest.approx(c, abs=1e-7)


# The policy


@pytest.mark.parametrize("kind, cfg", [("lora", CFG), ("dora", PLAIN)])
def test_the_first_policy_is_the_base_bit_for_bit(kind, cfg):
    model = adapted(MODEL, LoRA(rank=3, kind=kind))
    params = fresh(model, cfg)
    base, adapters = split_params(params)
    assert np.abs(adapters["q"]["a"]).min() > 0
    jax.tree.map(np.testing.assert_array_equal, base, fresh(MODEL, cfg))  # adapters move no draw of the weights

    def one_by_one(model, params):  # compiled as one, two programs of different shape may round differently
        hidden, _ = model.forward(model.unstack(params, cfg), TOKENS, POSITIONS, None, cfg)
        return model.unembed(params, hidden, cfg)

    np.testing.assert_array_equal(one_by_one(model, params), one_by_one(MODEL, base))
    actual, expected = on_one_device(logits, params, model=model, cfg=cfg), on_one_device(logits, base, cfg=cfg)
    np.testing.assert_allclose(actual, expected, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("config, cfg", list(zip(KINDS, [PLAIN, CFG])))
def test_merged_weights_compute_what_adapters_do(config, cfg):
    with jax.enable_x64(True):
        wide = dataclasses.replace(cfg, dtype="float64", param_dtype="float64")
        model, params = adapted(MODEL, config), drawn(config, wide)
        merged = merge(params, config, axes(model.spec(wide)), dtype="float64")
        expected = on_one_device(logits, merged, cfg=wide)
        actual = on_one_device(logits, params, model=model, cfg=wide)
        bare = on_one_device(logits, split_params(params)[0], cfg=wide)
    np.testing.assert_allclose(actual, expected, atol=1e-12)
    assert np.abs(actual - bare).max() > 0.05


@pytest.mark.parametrize("config", KINDS)
def test_the_gradient_is_that_of_the_definition(config):
    """Through whole weights, W' = c (W + s A B), by autodiff of the line as written, its norm held fixed."""
    with jax.enable_x64(True):
        cfg = dataclasses.replace(CFG, dtype="float64", param_dtype="float64")
        model, (base, adapters) = adapted(MODEL, config), split_params(drawn(config, cfg))

        def written(adapters):
            layers = dict(base["layers"])
            for name, leaf in adapters.items():
                weight, inputs = layers[name], tuple(range(1, 1 + len(ADAPTABLE[name])))
                changed = weight + config.scale * jax.vmap(lambda a, b: jnp.tensordot(a, b, 1))(leaf["a"], leaf["b"])
                if "d" in leaf:
                    now = jax.lax.stop_gradient(jnp.sqrt((changed**2).sum(inputs, keepdims=True)))
                    length = jnp.sqrt((weight**2).sum(inputs, keepdims=True))
                    changed = changed * (length + leaf["d"].reshape(length.shape)) / now
                layers[name] = changed
            return logits({**base, "layers": layers}, cfg=cfg)

        score = lambda out: (out**3).mean()
        with jax.set_mesh(one_device()):
            expected = jax.jit(jax.grad(lambda p: score(written(p))))(adapters)
            actual = jax.jit(jax.grad(lambda p: score(logits(merge_params(base, p), model=model, cfg=cfg))))(adapters)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), actual, expected)
    assert all(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(actual))


@pytest.mark.parametrize("config", KINDS)
def test_a_mesh_changes_neither_policy_nor_gradient(config):
    model, params = adapted(MODEL, config), drawn(config)
    base, adapters = split_params(params)

    def loss(adapters, base):
        return (logits(merge_params(base, adapters), model=model) ** 2).mean()

    expected = on_one_device(jax.jit(jax.value_and_grad(loss)), adapters, base)
    mesh = make_mesh(MeshShape(fsdp=2, tensor=2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        places = places_of(model, CFG, mesh)
        placed = jax.tree.map(jax.device_put, jax.tree.map(np.asarray, params), places)
        base, adapters = split_params(placed)
        value, gradient = jax.jit(jax.value_and_grad(loss))(adapters, base)
        assert jax.tree.all(jax.tree.map(lambda g, p: g.sharding.spec == p.sharding.spec, gradient, adapters))
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), gradient, expected[1])


# The sampler


def sampled(config, params, mesh=None, layers="unrolled", cfg=CFG):
    rng = np.random.default_rng(5)
    prompts = PromptBatch(
        tokens=rng.integers(0, 48, (8, 5)).astype(np.int32),
        length=rng.integers(1, 6, 8).astype(np.int32),
        uid=rng.integers(0, 2**32, (8, 2), dtype=np.uint32),
    )
    out = sampler.sample(
        sampler.BehaviorPolicy(adapted(MODEL, config), cfg, params, version=4), prompts, jax.random.key(11), stream=0,
        stop=sampler.StopRules((3, 7), 0), samples=2, config=Sampler(completion_length=8, slots=5, layers=layers),
        mesh=mesh or one_device(),
    )  # fmt: skip
    return jax.tree.map(np.asarray, out)


@pytest.mark.parametrize("config, layers", list(zip(KINDS, ["unrolled", "scanned"])))
def test_merged_and_unmerged_sampling_agree_with_each_other_and_with_the_learner(config, layers):
    params = drawn(config)
    merged = dataclasses.replace(config, sampling="merged")
    one, two = sampled(config, params, layers=layers), sampled(merged, params, layers=layers)
    np.testing.assert_array_equal(one.tokens, two.tokens)
    positions = np.broadcast_to(np.arange(one.tokens.shape[1], dtype=np.int32), one.tokens.shape)

    def plain(params, tokens):
        model = adapted(MODEL, config)
        hidden, _ = model.forward(params, tokens, positions, None, CFG)
        return model.unembed(params, hidden, CFG)

    scores = on_one_device(jax.jit(plain), params, one.tokens).astype(np.float64)
    sampling_params = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    expected = np.take_along_axis(sampling_params[:, :-1], one.tokens[:, 1:, None], -1)[..., 0]
    bound = 2e-6 * max(1, np.abs(scores).max())
    for out in (one, two):
        np.testing.assert_allclose(
            out.sampler_logprobs[:, 1:], np.where(out.action_mask[:, 1:], expected, 0), atol=bound
        )
    assert one.weights_fingerprint == two.weights_fingerprint


MERGED = [dataclasses.replace(config, sampling="merged") for config in KINDS]


@pytest.mark.parametrize("config, layers", [(KINDS[1], "unrolled"), (MERGED[0], "unrolled"), (MERGED[1], "scanned")])
def test_sampling_on_a_mesh_draws_the_same(config, layers):
    model, params = adapted(MODEL, config), drawn(config)
    mesh = make_mesh(MeshShape(fsdp=2, tensor=2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        places = places_of(model, CFG, mesh)
        placed = jax.tree.map(jax.device_put, jax.tree.map(np.asarray, params), places)
    one, two = sampled(config, params, layers=layers), sampled(config, placed, mesh, layers)
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_allclose(one.sampler_logprobs, two.sampler_logprobs, atol=5e-6)
    assert one.weights_fingerprint == two.weights_fingerprint


def test_over_data_alone_sampling_moves_no_weight():
    config = KINDS[0]
    model, mesh = adapted(MODEL, config), make_mesh(MeshShape(data=8))
    with jax.set_mesh(mesh):
        shape = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        spec = model.spec(CFG)
        params = jax.tree.map(shape, abstract(spec), places_of(model, CFG, mesh))
        row = lambda dims, dtype: jax.ShapeDtypeStruct(dims, dtype, sharding=batch_sharding(mesh, len(dims)))
        number = lambda dtype: jax.ShapeDtypeStruct((), dtype, sharding=replicated(mesh))
        key = jax.eval_shape(jax.random.key, 0)
        drawn_by = sampler.Sampler(completion_length=8, slots=5, layers="unrolled")
        options = sampler.static_options(drawn_by, model, CFG, samples=2, stop_ids=(3,), pad_id=0)
        compiled = sampler.program.lower(
            params, PromptBatch(tokens=row((8, 5), np.int32), length=row((8,), np.int32), uid=row((8, 2), np.uint32)),
            jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicated(mesh)), number(np.uint32), number(np.int32),
            sampler.SamplingParams(number(np.float32), None, None, None), None, None, options=options,
        ).compile()  # fmt: skip
    moved = re.findall(r"= (\S+) (?:all-gather|all-to-all|collective-permute)\(", compiled.as_text())
    assert moved == []


# What is refused


def test_adapters_are_counted():
    # q and o: 2 layers of rank 4 over 16 inputs and 16 outputs, and DoRA's 16 lengths.
    assert num_params(adapted(MODEL, KINDS[1]).spec(CFG).adapters) == 2 * 2 * (4 * (16 + 16) + 16)


def test_a_target_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"'w_proj' matches no projection\. Available: q, k, v, o, gate, up, down"):
        LoRA(targets=("q", "w_proj"))
    with pytest.raises(ValueError, match=r"'gate' matches no projection\. Available: q, k, v, o, up, down"):
        adapted(MODEL, LoRA(targets=("gate",))).spec(PLAIN)


def test_every_matrix_has_adapters_or_is_named():
    gated = dict(output_gate=True, window=4, full=FullHeads(head_dim=8, kv_heads=2), window_layers=(True, False))
    cases = [
        (dict(), ()),
        (gated, ()),
        (dict(experts=Experts(count=4, per_token=2, width=8)), ("router", "expert_gate", "expert_up", "expert_down")),
        (
            dict(experts=Experts(count=4, per_token=2, width=8, shared_expert="gated")),
            ("router", "shared_expert_gate", "expert_gate", "expert_up", "expert_down"),
        ),
        (dict(layer_inputs=4), ("input_gate", "input_out")),
        (
            dict(layers=4, linear=Linear(key_heads=2, value_heads=4, key_dim=6, value_dim=4)),
            tuple(name for name in MATRICES if name.startswith("linear_")),
        ),
    ]
    for options, bare in cases:
        spec = MODEL.spec(dataclasses.replace(CFG, **options))
        assert lora.without_adapters(spec) == bare
        wide = {name for name, leaf in spec["layers"].items() if len(leaf.shape) > 2 and leaf.scale}
        small = {"linear_step", "linear_beta", "conv_q", "conv_k", "conv_v"}  # a number a head, taps of a channel
        assert set(lora.adapter_spec(LoRA(), spec)) | set(bare) == wide - small


@pytest.mark.parametrize("fields", [{"rank": 0}, {"alpha": 0.0}, {"targets": ()}])
def test_adapters_that_learn_nothing_are_refused(fields):
    with pytest.raises(ValueError, match=f"LoRA.{next(iter(fields))}"):
        LoRA(**fields)


def test_adapters_to_bfloat16_are_float32():
    spec = adapted(MODEL, KINDS[1]).spec(dataclasses.replace(CFG, param_dtype="bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(abstract(spec.adapters))} == {np.dtype("float32")}


def test_adapters_to_experts_are_asked_for_by_name():
    sparse = dataclasses.replace(CFG, experts=Experts(count=3, per_token=2, width=8))
    assert adapted(MODEL, LoRA()).spec(sparse).adapters.keys() == {"q", "k", "v", "o"}
    actual = adapted(MODEL, LoRA(rank=2, targets=("expert_up",))).spec(sparse).adapters["expert_up"]
    assert actual["a"].shape == (2, 3, 16, 2) and actual["b"].shape == (2, 3, 2, 8)
    with pytest.raises(ValueError, match="'dora' is not supported for experts"):
        LoRA(kind="dora", targets=("expert_*",))
