"""Experts sharded by number: every token's result and every gradient as on one device, whatever the router decides."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampled import adapted, agree_on_every_mesh, learned

from jrl.device.sharding import TRAIN, MeshShape, constrain, make_mesh, mapped, per_shard, spec, varying_axes
from jrl.models import expert_group, experts
from jrl.models.adapters.lora import LoRA
from jrl.models.contract import ADAPTER
from jrl.models.decoder import MODEL
from jrl.models.expert_group import chunk_rows, mix_group
from jrl.models.experts import Experts
from jrl.models.shape import Decoder, check_divides
from jrl.run.checks import check_expert_axis

OWN = Experts(count=4, per_token=2, width=6)
CFG = Decoder(vocab_size=48, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=32, experts=OWN)
MESHES = [MeshShape(expert=2), MeshShape(expert=2, fsdp=2, tensor=2), MeshShape(data=2, expert=4)]
AXES = {
    "router": ("embed", "all_experts"), "router_bias": ("all_experts",), "expert_scale": ("all_experts",),
    "expert_gate": ("experts", "embed", "mlp"), "expert_up": ("experts", "embed", "mlp"),
    "expert_down": ("experts", "mlp", "embed"), "expert_gate_bias": ("experts", "mlp"),
    "expert_up_bias": ("experts", "mlp"), "expert_down_bias": ("all_experts", "norm"),
}  # fmt: skip
SIZES = {"embed": 8, "norm": 8, "mlp": 6, "experts": 4, "all_experts": 4, "rank": 2}
LOW = {
    "expert_up": {"a": ("experts", "embed", "rank"), "b": ("experts", "rank", "mlp")},
    "expert_down": {"a": ("experts", "mlp", "rank"), "b": ("experts", "rank", "embed")},
}
FORMS = {"plain": dict(), "gpt-oss": dict(bias=True, clamp=0.7), "scaled": dict(scaled=True, softmax="all")}
ROWS = ("batch", None, None)
is_names = lambda x: isinstance(x, tuple)


def mesh_of(shape):
    return make_mesh(shape, jax.devices()[: math.prod(shape.sizes(8))])


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 8 rows, of which every device fills several."""
    monkeypatch.setattr(expert_group, "MIN_CHUNK", 8)
    monkeypatch.setattr(expert_group, "CHUNK_SHARE", (1, 8))


@pytest.fixture
def undefined_beyond(monkeypatch):
    """`ragged_dot` leaves NaN in the rows beyond those of its experts, in its result and in its gradient, as a kernel
    may that never visits them; and its gradient of the matrices multiplies all rows."""
    exact = jax.lax.ragged_dot
    beyond = lambda x, sizes: jnp.arange(len(x))[:, None] >= sizes.sum()

    @jax.custom_vjp
    def poisoned(x, w, sizes):
        return jnp.where(beyond(x, sizes), jnp.nan, exact(x, w, sizes))

    def backward(inputs, gradient):
        x, w, sizes = inputs
        ends = jnp.cumsum(sizes)
        row = jnp.arange(len(x))[:, None]
        member = ((row < ends[None]) & (row >= (ends - sizes)[None])).astype(x.dtype)
        of_x = jax.vjp(lambda x: exact(x, w, sizes), x)[1](gradient)[0]
        of_w = jnp.einsum("me,mi,mo->eio", member, x, gradient)
        return jnp.where(beyond(x, sizes), jnp.nan, of_x), of_w, None

    poisoned.defvjp(lambda *inputs: (poisoned(*inputs), inputs), backward)

    def ragged_dot(x, w, sizes, precision):
        axes = varying_axes(x) | varying_axes(w)
        return poisoned(*(jax.lax.pcast(a, tuple(axes - varying_axes(a)), to="varying") for a in (x, w)), sizes)

    monkeypatch.setattr(jax.lax, "ragged_dot", ragged_dot)


def layer(cfg, low=False):
    """Returns the logical axes of a layer's weights, and random weights."""
    names = {name: axes for name, axes in AXES.items() if cfg.bias or not name.endswith("bias")}
    names = {name: axes for name, axes in names.items() if cfg.scaled or name != "expert_scale"}
    names |= {ADAPTER: LOW} if low else {}
    rng = np.random.default_rng(0)
    return names, jax.tree.map(lambda a: rng.normal(size=[SIZES[name] for name in a]), names, is_leaf=is_names)


def value_and_gradients(cfg, names, w, h, shape):
    """Returns the layer's output, and the gradients of a sum that weighs each of its entries differently."""

    def loss(w, h):
        out, routing = experts.mix(constrain(h, *ROWS), w, cfg, jax.nn.silu)
        return (out**3).sum() + (routing.logits**2).sum(), out

    with jax.set_mesh(mesh_of(shape)):
        w = jax.tree.map(lambda a, x: jax.device_put(x, spec_of(a)), names, w, is_leaf=is_names)
        (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(w, jnp.asarray(h))
        return jax.tree.map(np.asarray, (out, gradients))


def spec_of(axes):
    return jax.sharding.NamedSharding(jax.sharding.get_mesh(), spec(axes, TRAIN))


def agree(cfg, h, shape, low=False, change=lambda w: w):
    names, w = layer(cfg, low)
    w = change(w)
    with jax.enable_x64(True):
        alone = value_and_gradients(cfg, names, w, h, MeshShape())
        many = value_and_gradients(cfg, names, w, h, shape)
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(many), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-12 * np.abs(one).max())


H = np.random.default_rng(1).normal(size=(8, 5, 8))


@pytest.mark.parametrize("form, shape", [*(("plain", i) for i in range(3)), ("gpt-oss", 1), ("scaled", 1)])
def test_a_layer_and_its_gradients_are_those_of_one_device(form, shape, small_chunks, undefined_beyond):
    agree(dataclasses.replace(OWN, **FORMS[form]), H, MESHES[shape])


def test_adapters_of_experts_and_their_gradients_are_those_of_one_device(small_chunks, undefined_beyond):
    agree(OWN, H, MESHES[1], low=True)


def test_no_token_is_dropped_where_all_go_to_the_experts_of_one_device(small_chunks):
    def to_two_and_three(w):
        w["router"] = np.zeros_like(w["router"])
        w["router"][:, 3], w["router"][:, 2] = 1.0, 0.5
        return w

    agree(OWN, np.abs(H), MESHES[0], change=to_two_and_three)


def test_chunks_hold_a_quarter_more_than_an_even_share():
    assert chunk_rows(65536, 4) == 20480  # 65536 / 4 * 5 / 4
    assert chunk_rows(100, 4) == 100  # no more than there are
    assert chunk_rows(3000, 4) == 1024


def test_rows_of_other_devices_are_not_read_even_where_they_are_nan(small_chunks):
    """Experts 0 and 1 are on the first device. The last token, which goes to 2 and 3 alone, is NaN."""
    _, w = layer(OWN)
    weights = [w[f"expert_{name}"] for name in ("gate", "up", "down")]
    ids = np.array([[[0, 1], [1, 0], [0, 2]], [[1, 3], [0, 1], [3, 2]]], np.int32)
    share = np.random.default_rng(2).uniform(0.2, 0.8, size=ids.shape)
    multiply = functools.partial(experts._by_expert, cfg=OWN, activation=jax.nn.silu, adapted=())
    places = (ROWS, ROWS, ROWS, *(AXES[f"expert_{name}"] for name in ("gate", "up", "down")))
    ins = [tuple(None if a == "embed" else a for a in axes) for axes in places]

    def loss(weights, h, share):
        run = functools.partial(mix_group, multiply=multiply, count=4)
        out = mapped(run, (h, share, ids, *weights), ins, ROWS, summed="mlp")
        return jnp.where(jnp.isnan(out), 0, out**2).sum(), out

    def run(h):
        with jax.set_mesh(mesh_of(MeshShape(expert=2))):
            (_, out), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(
                [jnp.asarray(x) for x in weights], jnp.asarray(h), jnp.asarray(share)
            )
            return np.asarray(out), [np.asarray(x) for x in gradient]

    clean, bad = H[:2, :3].copy(), H[:2, :3].copy()
    clean[1, 2], bad[1, 2] = 0, np.nan
    with jax.enable_x64(True):
        (expected, of_clean), (out, of_bad) = run(clean), run(bad)
    assert np.isnan(out[1, 2]).all()
    np.testing.assert_array_equal(out[0], expected[0])
    np.testing.assert_array_equal(out[1, :2], expected[1, :2])
    for one, other in zip(of_clean, of_bad):
        np.testing.assert_array_equal(other[:2], one[:2])
        assert np.isnan(other[2:]).any()  # of the experts that it goes to


def test_sums_over_experts_are_rounded_to_bfloat16_once():
    """256 + 1 + 1 is 258; rounded after every sum it stays 256. So is the gradient of the input."""
    ids, share = np.broadcast_to([0, 1, 2], (2, 1, 3)).astype(np.int32), np.broadcast_to([256.0, 1, 1], (2, 1, 3))
    multiply = lambda x, weights, grouped, expert, only: x
    run = functools.partial(mix_group, multiply=multiply, count=8)
    narrow = lambda x: jnp.asarray(x, jnp.bfloat16)
    inputs = (ROWS, ROWS, ROWS)
    mixed = lambda h: per_shard(lambda *x: (run(*x),), (h, narrow(share), ids), inputs, (ROWS,))[0]
    summed = lambda h: mixed(h).astype(jnp.float32)
    with jax.set_mesh(mesh_of(MeshShape(expert=2))):
        both = jax.jit(lambda h: (summed(h), jax.grad(lambda h: summed(h).sum())(h)))
        out, gradient = both(narrow(np.ones((2, 1, 4))))
        np.testing.assert_array_equal(out, np.full((2, 1, 4), 258))
        np.testing.assert_array_equal(gradient.astype(jnp.float32), np.full((2, 1, 4), 258))


def test_the_same_tokens_are_drawn_where_experts_are_sharded_by_number():
    """Shards have rows of different lengths: those that are done take part until the last is, in prefill too."""
    agree_on_every_mesh(CFG, "unrolled", many=MeshShape(expert=4), prefill_chunk=1)


def test_the_same_tokens_are_drawn_by_quantized_experts_with_adapters():
    model = adapted(MODEL, LoRA(rank=2, base="int8", targets=("o", "expert_*")))
    agree_on_every_mesh(CFG, "scanned", model, learned(model, CFG), many=MeshShape(expert=2, tensor=2, sequence=2))


def test_a_mesh_that_experts_do_not_divide_over_is_refused():
    with pytest.raises(ValueError, match=r"Experts\.count = 4 does not divide over MeshShape\.expert = 8"):
        check_divides(CFG, mesh_of(MeshShape(expert=8)))
    with pytest.raises(ValueError, match=r"MeshShape\.expert = 2 is for jrl's decoder with a mixture .*use fsdp"):
        check_expert_axis(dataclasses.replace(CFG, experts=None), mesh_of(MeshShape(expert=2)))
    with pytest.raises(ValueError, match="which this model is not"):
        check_expert_axis(object(), mesh_of(MeshShape(expert=2)))  # a model of the user's own
