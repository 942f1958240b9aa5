"""A mixture of experts: each token by itself, whatever lies beside it, on one device or many."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_params import drawn_params
from sampled import agree_on_four_devices

from jrl.models import experts
from jrl.models.contract import is_spec, num_params, unrolled
from jrl.models.decoder import MODEL
from jrl.models.experts import Experts
from jrl.models.leaves import layers_of
from jrl.models.shape import Decoder

OWN = Experts(count=5, per_token=2, width=6)
CFG = Decoder(vocab_size=48, layers=3, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=32, experts=OWN)
MIXED = dataclasses.replace(CFG, layers=4, experts=dataclasses.replace(OWN, width=8, layers=(False, True, True)))


def random_layer(seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    shapes = {"router": (8, 5), "expert_gate": (5, 8, 6), "expert_up": (5, 8, 6), "expert_down": (5, 6, 8)}
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def by_hand(h, w, cfg, routes=None):
    """One token after the other, one expert after the other. routes: [B, L, k], in place of the likeliest."""
    out = np.zeros_like(h)
    for at in np.ndindex(h.shape[:2]):
        z = h[at] @ w["router"]
        chosen = np.argsort(-z)[: cfg.per_token] if routes is None else routes[at]
        unnormalized = np.exp(z - z.max())
        weights = unnormalized[chosen] / (unnormalized[chosen].sum() if cfg.softmax == "chosen" else unnormalized.sum())
        for i, weight in zip(chosen, weights):
            gate, up = h[at] @ w["expert_gate"][i], h[at] @ w["expert_up"][i]
            out[at] += weight * ((gate / (1 + np.exp(-gate)) * up) @ w["expert_down"][i])
    return out


@pytest.mark.parametrize("softmax", ["chosen", "all"])
def test_a_layer_by_hand(softmax):
    cfg, w = dataclasses.replace(OWN, softmax=softmax), random_layer()
    h = np.random.default_rng(1).normal(size=(2, 7, 8))
    with jax.enable_x64(True):
        out, routing = jax.jit(lambda h, w: experts.mix(h, w, cfg, jax.nn.silu))(h, w)
        np.testing.assert_allclose(routing.logits, h @ w["router"], atol=1e-12)
        np.testing.assert_array_equal(routing.ids, np.argsort(-routing.logits, axis=-1)[..., :2])
        np.testing.assert_allclose(out, by_hand(h, w, cfg), atol=1e-12)
        # Any other experts, which the router would not have taken.
        replayed = np.argsort(np.asarray(routing.logits), axis=-1)[..., :2].astype(np.uint8)
        out, again = jax.jit(lambda h, w: experts.mix(h, w, cfg, jax.nn.silu, None, replayed))(h, w)
        np.testing.assert_array_equal(again.ids, replayed)
        np.testing.assert_allclose(out, by_hand(h, w, cfg, replayed), atol=1e-12)


def test_a_token_is_routed_once_in_a_layer():
    cfg, w = dataclasses.replace(OWN, bias=True), random_layer(dtype=np.float32)
    w |= {"router_bias": np.zeros(5), "expert_gate_bias": np.zeros((5, 6)), "expert_up_bias": np.zeros((5, 6)),
          "expert_down_bias": np.zeros((5, 8))}  # fmt: skip
    w = jax.tree.map(jnp.float32, w)
    run = jax.make_jaxpr(lambda h: experts.mix(h, w, cfg, jax.nn.silu)[0])(np.zeros((2, 7, 8), np.float32))
    assert str(run).count("top_k[") == 1


def test_a_token_does_not_depend_on_those_beside_it():
    w, h = random_layer(), np.random.default_rng(1).normal(size=(3, 8, 8))
    with jax.enable_x64(True):
        run = jax.jit(lambda h: experts.mix(h, w, OWN, jax.nn.silu)[0])
        together = run(h)
        for at in [(0, 0), (1, 5), (2, 7)]:
            alone = run(h[at][None, None])[0, 0]
            np.testing.assert_allclose(together[at], alone, rtol=0, atol=1e-12 * np.abs(alone).max())


def test_no_token_is_dropped_where_all_want_the_same_expert():
    w, h = random_layer(), np.abs(np.random.default_rng(1).normal(size=(2, 9, 8)))
    w["router"] = np.zeros_like(w["router"])
    w["router"][:, 3] = w["router"][:, 1] = 1.0  # all go to 1 and 3, the ties' lower first
    with jax.enable_x64(True):
        out, _ = experts.mix(jnp.asarray(h), w, OWN, jax.nn.silu)
        np.testing.assert_allclose(out, by_hand(h, w, OWN), atol=1e-11)


def test_the_gradient_is_that_of_the_formula():
    """Against a dense form: every expert computes every token, and weights that are 0 leave it out."""
    w, h = random_layer(), np.random.default_rng(1).normal(size=(2, 5, 8))

    def dense(w, h):
        z = h @ w["router"]
        top, ids = jax.lax.top_k(z, OWN.per_token)
        weights = (jax.nn.softmax(top)[..., None] * jax.nn.one_hot(ids, OWN.count, dtype=z.dtype)).sum(-2)
        each = lambda name: jnp.einsum("bld,edf->blef", h, w[f"expert_{name}"])
        out = jnp.einsum("blef,efd->bled", jax.nn.silu(each("gate")) * each("up"), w["expert_down"])
        return ((out * weights[..., None]).sum(2) ** 3).sum()

    with jax.enable_x64(True):
        ours = jax.jit(jax.grad(lambda w, h: (experts.mix(h, w, OWN, jax.nn.silu)[0] ** 3).sum(), (0, 1)))(w, h)
        theirs = jax.grad(dense, (0, 1))(w, jnp.asarray(h))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11 * np.abs(b).max())


def test_parameters_are_counted():
    # A sparse layer of CFG: q 16*16, k and v 16*8, o 16*16, norms 40; router 16*5, experts 5 * 3*16*6.
    layer = 256 + 128 + 128 + 256 + 40 + 80 + 5 * 288
    assert num_params(MODEL.spec(CFG)) == 48 * 16 + 3 * layer + 16
    # Of four layers with (False, True, True) the first and the last have an MLP, 3*16*32.
    spec = MODEL.spec(MIXED)["layers"]
    assert layers_of(MIXED, "expert_up") == (1, 2) and layers_of(MIXED, "up") == (0, 3)
    assert spec["expert_up"].shape == (2, 5, 16, 8) and spec["up"].shape == (2, 16, 32) and spec["q"].shape[0] == 4


@pytest.mark.parametrize("cfg", [CFG, MIXED], ids=["all", "mixed"])
def test_routers_say_what_they_decided_by(cfg):
    tokens = np.random.default_rng(0).integers(0, 48, (2, 6)).astype(np.int32)
    positions = np.broadcast_to(np.arange(6, dtype=np.int32), tokens.shape)
    params = drawn_params(MODEL.spec(cfg))
    plain, _ = MODEL.forward(params, tokens, positions, None, cfg)
    for model in (MODEL, unrolled(MODEL)):
        hidden, logits = model.routed(params, tokens, positions, None, cfg)
        np.testing.assert_allclose(hidden, plain, atol=1e-5)
        assert logits.shape == (len(layers_of(cfg, "router")), 2, 6, 5) and logits.dtype == jnp.float32
    no_experts = dataclasses.replace(cfg, experts=None)
    params = drawn_params(MODEL.spec(no_experts))
    assert MODEL.routed(params, tokens, positions, None, no_experts)[1] is None


# Scanned, a mixture of sparse and dense layers is cut into runs of layers; unrolled, each layer is by itself.
@pytest.mark.parametrize(("cfg", "layers"), [(CFG, "unrolled"), (MIXED, "scanned")], ids=["all", "mixed"])
def test_the_samplers_logprobs_on_four_devices_are_a_plain_forwards_on_one(cfg, layers):
    agree_on_four_devices(cfg, layers)


@pytest.mark.parametrize("wrong", [dict(per_token=6), dict(per_token=0), dict(width=0), dict(layers=(False,))])
def test_experts_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=f"Experts.{next(iter(wrong))}"):
        dataclasses.replace(OWN, **wrong)


@pytest.mark.parametrize(
    "form",
    [dict(shared_expert="gated"), dict(shared_expert="normed", reads="stream", scaled=True)],
    ids=lambda form: form["shared_expert"],
)
def test_an_mlp_beside_experts_by_hand(form):
    """One layer, whose attention gives nothing: the stream is the embedding, and what the MLP and experts add."""
    with_shared = dataclasses.replace(OWN, **form)
    cfg = dataclasses.replace(CFG, layers=1, experts=with_shared, dtype="float64", param_dtype="float64", norm_eps=0.01)
    tokens = np.arange(6, dtype=np.int32)[None]
    with jax.enable_x64(True):
        spec = MODEL.spec(cfg)
        draws = np.random.default_rng(0)
        params = jax.tree.map(lambda leaf: jnp.asarray(draws.normal(size=leaf.shape)), spec, is_leaf=is_spec)
        params["layers"]["o"] *= 0
        actual, logits = jax.jit(lambda p: MODEL.routed(p, tokens, tokens, None, cfg))(params)
    w, x = {name: np.asarray(leaf[0]) for name, leaf in params["layers"].items()}, np.asarray(params["embed"])[:6]
    norm = lambda x, scale: x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.01) * scale
    h = norm(x, w["mlp_norm"])
    z = (h @ w["gate"] / (1 + np.exp(-h @ w["gate"])) * (h @ w["up"])) @ w["down"]
    if with_shared.shared_expert == "gated":
        decided = h @ w["router"]
        added = by_hand(h[None], w, with_shared)[0] + z / (1 + np.exp(-h @ w["shared_expert_gate"]))
    else:
        decided = norm(x, w["router_norm"]) / 4 @ w["router"]  # 16 ** -0.5
        read, y = norm(x, w["expert_norm"]), np.zeros_like(x)
        for t, i in np.ndindex(6, 5):
            chosen = np.argsort(-decided[t])[:2]
            share = np.exp(decided[t, i]) / np.exp(decided[t, chosen]).sum() if i in chosen else 0
            gate, up = read[t] @ w["expert_gate"][i], read[t] @ w["expert_up"][i]
            y[t] += share * w["expert_scale"][i] * ((gate / (1 + np.exp(-gate)) * up) @ w["expert_down"][i])
        added = norm(y, w["expert_out_norm"]) + norm(z, w["shared_expert_norm"])
    np.testing.assert_allclose(logits[0, 0], decided, atol=1e-12)
    np.testing.assert_allclose(actual[0], norm(x + added, np.asarray(params["final_norm"])), atol=1e-12)


def test_parameters_beside_experts_are_counted():
    # As above, and an MLP of 3*16*32 in each of three layers: with a gate of 16; with three norms of 16, what the
    # router reads by 16, and a number for each of 5 experts.
    plain = num_params(MODEL.spec(CFG))
    beside = lambda **form: num_params(MODEL.spec(dataclasses.replace(CFG, experts=dataclasses.replace(OWN, **form))))
    assert beside(shared_expert="gated") == plain + 3 * (3 * 512 + 16)
    assert beside(shared_expert="normed", reads="stream", scaled=True) == plain + 3 * (3 * 512 + 48 + 16 + 5)


def test_a_clamped_expert_with_biases_by_hand():
    cfg = dataclasses.replace(OWN, bias=True, clamp=0.7)
    rng, w = np.random.default_rng(1), random_layer()
    h = rng.normal(size=(1, 4, 8))
    for name in ("router", "expert_gate", "expert_up", "expert_down"):
        w[f"{name}_bias"] = rng.normal(size=(*w[name].shape[:-2], w[name].shape[-1]))
    expected = np.zeros_like(h)
    for at in np.ndindex(h.shape[:2]):
        z = h[at] @ w["router"] + w["router_bias"]
        chosen = np.argsort(-z)[:2]
        for i in chosen:
            gate = np.minimum(h[at] @ w["expert_gate"][i] + w["expert_gate_bias"][i], 0.7)
            up = np.clip(h[at] @ w["expert_up"][i] + w["expert_up_bias"][i], -0.7, 0.7)
            product = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            out = product @ w["expert_down"][i] + w["expert_down_bias"][i]
            expected[at] += np.exp(z[i]) / np.exp(z[chosen]).sum() * out
    with jax.enable_x64(True):
        out, _ = jax.jit(lambda h, w: experts.mix(h, w, cfg, jax.nn.silu))(h, w)
        np.testing.assert_allclose(out, expected, atol=1e-12)
