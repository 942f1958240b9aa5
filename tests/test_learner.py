"""Loss and gradient do not depend on row order, packing, micro-batches or the mesh."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_params import drawn_params

from jrl.algos import ALGOS
from jrl.algos.sft import OBJECTIVE as SFT
from jrl.device.sharding import (
    TRAIN,
    MeshShape,
    batch_sharding,
    make_mesh,
    replicated,
    row_sharding,
    row_shards,
    shardings,
)
from jrl.learning import learner
from jrl.learning.credit import StoredLabels, credit, finish_sampled, finish_stored
from jrl.learning.layout import Learner, RouterLoss, packed_shape
from jrl.learning.learner import KLLimit, Weights, logprobs, loss_sums, weights_of
from jrl.learning.optimizer import begin
from jrl.learning.optimizers.adamw import OPTIMIZER as ADAMW
from jrl.learning.optimizers.adamw import AdamW
from jrl.learning.optimizers.contract import describe
from jrl.learning.pack import pack, pack_rollout, plan, unpack
from jrl.models.contract import axes
from jrl.models.decoder import MODEL
from jrl.models.experts import Experts
from jrl.models.heads import VALUE
from jrl.models.shape import Decoder
from jrl.types import Finish, ModelState, Recomputed, Rollout, Scores, TrainBatch, TrainState

B, G, P, C, V = 8, 4, 5, 7, 40
N, T = B * G, P + C
HEAD_AXES = (None, "norm", None)


def model_config(dtype, experts=None):
    return Decoder(
        vocab_size=V, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=32, dtype=dtype, param_dtype=dtype,
        experts=experts,
    )  # fmt: skip


def routes_of(prompt, length, experts, rng):
    """Returns experts of every token but the last at random, two layers of them; prompts of a group have the same."""
    draw = lambda rows: np.argsort(rng.random((rows, T, 2, experts.count)), -1)[..., : experts.per_token]
    column = np.arange(T)[:, None, None]
    of_prompt = column < prompt[:, None, None, None] - 1
    routes = np.where(of_prompt, draw(B).repeat(G, axis=0), draw(N))
    return np.where(column < length[:, None, None, None] - 1, routes, 255).astype(np.uint8).reshape(N, T, -1)


def sequences(seed=0, dtype=np.float32, experts=None):
    """Random rollouts and rewards, as numpy: what a sampler and a verifier would have returned. experts: those whose
    routes were recorded; None: none were."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(1, P + 1, B).repeat(G)
    completion = rng.integers(1, C + 1, N)
    length = (prompt + completion).astype(np.int32)
    column = np.arange(T)
    action = (column >= prompt[:, None]) & (column < length[:, None])
    completions, prompts = rng.integers(0, V, (N, T)), rng.integers(0, V, (B, T)).repeat(G, axis=0)
    rollout = Rollout(
        tokens=np.where(column < length[:, None], np.where(action, completions, prompts), 0).astype(np.int32),
        length=length,
        action_mask=action,
        sampler_logprobs=np.where(action, rng.normal(-3, 0.5, (N, T)), 0).astype(dtype),
        truncated_logprobs=None,
        support_size=None,
        finish=np.full(N, Finish.STOP_TOKEN, np.int8),
        group=np.arange(N, dtype=np.int32) // G,
        sample=np.arange(N, dtype=np.int32) % G,
        version=np.where(action, 0, -1).astype(np.int32),
        turn=np.zeros((N, T), np.int8),
        weights_fingerprint=np.uint32(0),
        routes=None if experts is None else routes_of(prompt, length, experts, rng),
    )
    reward = rng.integers(0, 2, N).astype(np.float32)
    scores = Scores(
        reward=reward,
        valid=rng.random(N) < 0.9,
        verdict=np.where(reward > 0, 0, 1).astype(np.int8),
        outcome=reward,
    )
    return rollout, scores


@functools.cache
def program(mesh_shape, config, algo, dtype, experts):
    """Returns (mesh, weights, jitted (weights, rollout, scores, plan) -> loss, magnitude, gradient); compiled once."""
    devices = jax.devices()[: np.prod(mesh_shape.sizes(8))]
    mesh = make_mesh(mesh_shape, devices)
    cfg, objective = model_config(dtype, experts), ALGOS[algo]
    hyper, router = jax.tree.map(jnp.float32, (objective.config(), config.router))
    head, needs = objective.returns is not None, objective.needs(objective.config())
    fields = ("old_values", "old_logprobs") * head + ("old_entropy",) * needs.credit_entropy
    static = dict(model=MODEL, cfg=cfg, chunk=config.chunk)
    judged = dict(objective=objective, max_completion=C)

    @jax.jit
    def run(weights, rollout, scores, plan):
        packed, recomputed, values = pack_rollout(rollout, plan, jnp.float32(0.8)), Recomputed(), []
        if fields:
            # Old values of another head, so that those of now have moved.
            old = weights._replace(heads={VALUE: 0.5 * weights.heads[VALUE]}) if head else weights
            recomputed = Recomputed(**learner.recompute(old, packed, fields=fields, **static))
            values = [[(recomputed, plan.source)]]
        said = credit(rollout, scores, (), hyper, *values, num_groups=B, **judged)
        batch = finish_sampled(packed, recomputed, plan, said, hyper, **judged)
        sums = loss_sums(weights, batch, hyper, (), router, objective=objective, **static)
        return (
            sums.loss / batch.denominator,
            sums.magnitude / batch.denominator,
            jax.tree.map(lambda g: g / batch.denominator.astype(g.dtype), sums.gradient),
        )

    with jax.set_mesh(mesh):
        drawn = weights(dtype, experts, head)
        params = jax.tree.map(jax.device_put, drawn.params, shardings(axes(MODEL.spec(cfg)), mesh, TRAIN))
        heads = jax.device_put(drawn.heads, shardings(dict.fromkeys(drawn.heads, HEAD_AXES), mesh, TRAIN))
    return mesh, Weights(params, heads), run


@functools.cache
def weights(dtype, experts=None, head=False):
    """Returns random weights as numpy, with a value head that is not 0 where asked."""
    spec = MODEL.spec(model_config(dtype, experts))
    params = jax.tree.map(np.asarray, drawn_params(spec, seed=3))
    return Weights(params, {VALUE: np.random.default_rng(4).normal(size=(1, 16, 1)).astype(dtype) / 4} if head else {})


def step_sums(mesh_shape, config, algo="GRPO", dtype="float32", order=None, experts=None, replayed=None):
    """Returns (loss, magnitude, gradient as numpy) of one optimizer step. replayed: the experts whose routes it has."""
    mesh, weights, run = program(mesh_shape, config, algo, dtype, experts)
    rollout, scores = sequences(experts=replayed)
    if order is not None:
        rollout, scores = permute(rollout, scores, order)
    with jax.set_mesh(mesh):
        place = lambda x: jax.device_put(x, batch_sharding(mesh, x.ndim) if x.ndim else replicated(mesh))
        packing = planned(rollout, config, row_shards(mesh), shares=mesh.shape["sequence"])
        rows = row_sharding(mesh)
        packing = jax.tree.map(lambda x: jax.device_put(x, rows if np.ndim(x) == 3 else replicated(mesh)), packing)
        loss, magnitude, gradient = run(weights, *jax.tree.map(place, (rollout, scores)), packing)
        return float(loss), float(magnitude), jax.tree.map(np.asarray, gradient)


def planned(rollout, config, shards, minibatch=0, shares=1):
    shape = packed_shape(config, N, T, shards, shares=shares, prompt_length=P, samples=G)
    return plan(rollout.length, shape, minibatch, config.minibatches, rollout.action_mask.argmax(axis=1))


def permute(rollout, scores, order):
    """Whole groups change places; rows of a prompt stay adjacent."""
    rows = np.concatenate([np.arange(g * G, (g + 1) * G) for g in order])
    take = lambda x: x[rows] if np.ndim(x) else x
    rollout, scores = jax.tree.map(take, (rollout, scores))
    return rollout.replace(group=np.arange(N, dtype=np.int32) // G), scores


def distance(a, b):
    """Returns |a - b| / |a| in norm over whole trees."""
    square = lambda tree: sum(float((np.asarray(x, np.float64) ** 2).sum()) for x in jax.tree.leaves(tree))
    return np.sqrt(square(jax.tree.map(lambda x, y: np.asarray(x, np.float64) - y, a, b)) / square(a))


OF_EXPERTS = {
    "expert 2": (MeshShape(expert=2), Learner(row_length=32, micro_batch_tokens=256)),
    "expert 2, fsdp 2, tensor 2": (MeshShape(fsdp=2, tensor=2, expert=2), Learner(row_length=32)),
    "expert 2, rows in shares": (MeshShape(fsdp=2, sequence=2, expert=2), Learner(row_length=32)),
}
LAYOUTS = {
    "eight micro-batches": (MeshShape(), Learner(row_length=T, sequences_per_row=1, micro_batch_tokens=4 * T)),
    "packed": (MeshShape(), Learner(row_length=32, micro_batch_tokens=10_000)),
    "packed, micro-batches": (MeshShape(), Learner(row_length=40, micro_batch_tokens=40)),
    "chunks of 5": (MeshShape(), Learner(row_length=32, logprob_chunk=5)),
    "data 8": (MeshShape(data=8), Learner(row_length=32, micro_batch_tokens=256)),
    "fsdp 8": (MeshShape(fsdp=8), Learner(row_length=32)),
    "data, fsdp, tensor, micro-batches": (
        MeshShape(data=2, fsdp=2, tensor=2),
        Learner(row_length=32, micro_batch_tokens=128),
    ),
    "shared prompts": (MeshShape(), Learner(row_length=48, prefix_sharing="in_row")),
    "groups of which no row holds all": (
        MeshShape(),
        Learner(row_length=24, micro_batch_tokens=96, prefix_sharing="in_row"),
    ),
    "prompts apart, groups cut": (
        MeshShape(),
        Learner(row_length=14, micro_batch_tokens=42, prefix_sharing="cross_row"),
    ),
    "prompts apart on all axes": (
        MeshShape(data=2, fsdp=2, tensor=2),
        Learner(row_length=16, micro_batch_tokens=256, prefix_sharing="cross_row"),
    ),
    "shared prompts on all axes": (
        MeshShape(data=2, fsdp=2, tensor=2),
        Learner(row_length=32, prefix_sharing="in_row"),
    ),
    # Sequences cross the blocks of shares, of 8, 6 and 4 tokens.
    "rows in shares on all axes": (MeshShape(fsdp=2, tensor=2, sequence=2), Learner(row_length=32)),
    "shared prompts in shares": (MeshShape(data=2, sequence=4), Learner(row_length=48, prefix_sharing="in_row")),
    "prompts apart in shares": (
        MeshShape(fsdp=2, sequence=2),
        Learner(row_length=16, micro_batch_tokens=256, prefix_sharing="cross_row"),
    ),
}


# A loss whose weights and denominator depend on lengths goes through every layout, through some of them in float64
# alone; one with a constant, one with a ratio of sequences and one with tokens chosen over the step through that of
# micro-batches on every axis; one with a value head through those where a token's neighbor may be another's.
IN_FLOAT64_ALONE = (
    "shared prompts", "prompts apart, groups cut", "data, fsdp, tensor, micro-batches", "rows in shares on all axes"
)  # fmt: skip
CASES = [
    *(("GRPO", layout) for layout in LAYOUTS if layout not in IN_FLOAT64_ALONE),
    *((name, "data, fsdp, tensor, micro-batches") for name in ("GSPO", "HighEntropyTokens", "DrGRPO")),
    ("PPO", "shared prompts on all axes"),
]


def reference(algo="GRPO", dtype="float32"):
    return step_sums(MeshShape(), Learner(row_length=T), algo, dtype)


@pytest.mark.parametrize(("algo", "layout"), CASES)
def test_loss_and_gradient_do_not_depend_on_layout(algo, layout):
    loss, magnitude, gradient = reference(algo)
    other_loss, _, other_gradient = step_sums(*LAYOUTS[layout], algo)
    assert abs(other_loss - loss) <= 1e-6 * magnitude
    assert distance(gradient, other_gradient) <= 1e-5
    assert magnitude > 0.01  # the loss is made of something


def test_loss_and_gradient_do_not_depend_on_row_order():
    loss, magnitude, gradient = reference()
    order = np.random.default_rng(1).permutation(B)
    other_loss, _, other_gradient = step_sums(*LAYOUTS["packed, micro-batches"], order=order)
    assert abs(other_loss - loss) <= 1e-6 * magnitude
    assert distance(gradient, other_gradient) <= 1e-5


# With shared prompts a value is computed of the same hidden states as a log-prob: GRPO goes through them.
@pytest.mark.parametrize("algo, layouts", [
    ("GRPO", ("packed, micro-batches", "data, fsdp, tensor, micro-batches", "shared prompts",
              "prompts apart, groups cut", "rows in shares on all axes")),
    ("PPO", ("packed, micro-batches", "rows in shares on all axes")),
], ids=["GRPO", "PPO"])  # fmt: skip
def test_in_float64_only_a_wrong_formula_can_differ(algo, layouts):
    with jax.enable_x64(True):
        loss, magnitude, gradient = reference(algo, dtype="float64")
        for layout in layouts:
            other_loss, _, other_gradient = step_sums(*LAYOUTS[layout], algo, dtype="float64")
            assert abs(other_loss - loss) <= 1e-12 * magnitude
            assert distance(gradient, other_gradient) <= 1e-12


def test_the_value_loss_teaches_the_head_and_the_layers_under_it():
    _, _, gradient = reference("PPO")
    assert gradient.heads[VALUE].shape == (1, 16, 1) and np.abs(gradient.heads[VALUE]).max() > 1e-3
    with jax.enable_x64(True):  # where only a wrong formula can differ
        mesh, weights, _ = program(MeshShape(), Learner(row_length=T), "PPO", "float64", None)
        rollout, _ = sequences()
        cfg = model_config("float64")
        shape = packed_shape(Learner(minibatches=4), N, T, 1)
        with jax.set_mesh(mesh):
            rollout = jax.tree.map(jnp.asarray, rollout)
            one, *four = (plan(np.asarray(rollout.length), s, k, n) for s, k, n in
                          [(packed_shape(Learner(), N, T, 1), 0, 1), *((shape, k, 4) for k in range(4))])  # fmt: skip
            static = dict(model=MODEL, cfg=cfg, chunk=16)

            @jax.jit
            def old_values(weights, packing):
                return learner.recompute(
                    weights, pack_rollout(rollout, packing, jnp.float32(1)), fields=("old_values",), **static
                )["old_values"]

            back = jax.jit(lambda values, source: unpack(values, source, T, N))
            by_row = lambda plans: sum(back(old_values(weights, p), p.source) for p in plans)
            in_one, dealt = by_row([one]), by_row(four)
            hidden, _ = jax.jit(lambda p, x, c: MODEL.forward(p, x, c, None, cfg))(
                weights.params, rollout.tokens, jnp.broadcast_to(jnp.arange(T)[None], (N, T))
            )
        # The value before token t is read where token t - 1 lies, of sequences that lie alone in their rows.
        alone = np.where(
            rollout.action_mask[:, 1:], np.asarray(hidden)[:, :-1] @ np.asarray(weights.heads[VALUE])[0, :, 0], 0
        )
        np.testing.assert_allclose(in_one[:, 1:], alone, atol=1e-12)
        np.testing.assert_allclose(dealt, in_one, atol=1e-12)
        assert (np.asarray(in_one[:, 0]) == 0).all() and np.abs(in_one).max() > 0.1


EXPERTS = Experts(count=4, per_token=2, width=8)


@pytest.mark.parametrize("layout", ["packed, micro-batches", "shared prompts on all axes", "rows in shares on all axes",
                                    *OF_EXPERTS])  # fmt: skip
def test_terms_of_routers_do_not_depend_on_layout(layout):
    heavy = RouterLoss(balance=0.5, z=0.1)  # so that they cannot hide behind the policy's loss

    def sums(mesh_shape, config, router=heavy, dtype="float64"):
        return step_sums(mesh_shape, dataclasses.replace(config, router=router), dtype=dtype, experts=EXPERTS)

    with jax.enable_x64(True):
        loss, magnitude, gradient = sums(MeshShape(), Learner(row_length=T))
        other_loss, _, other_gradient = sums(*{**LAYOUTS, **OF_EXPERTS}[layout])
        assert abs(other_loss - loss) <= 1e-12 * magnitude
        assert distance(gradient, other_gradient) <= 1e-12
        plain, _, _ = sums(MeshShape(), Learner(row_length=T), None)
        assert loss - plain > 0.4  # balance is about 1


@pytest.mark.parametrize(
    "layout", ["shared prompts on all axes", "prompts apart in shares", "expert 2, fsdp 2, tensor 2"]
)
def test_replayed_routes_do_not_depend_on_layout(layout):
    def sums(mesh_shape, config, replayed=EXPERTS):
        return step_sums(mesh_shape, config, dtype="float64", experts=EXPERTS, replayed=replayed)

    with jax.enable_x64(True):
        loss, magnitude, gradient = sums(MeshShape(), Learner(row_length=T))
        other_loss, _, other_gradient = sums(*{**LAYOUTS, **OF_EXPERTS}[layout])
        assert abs(other_loss - loss) <= 1e-12 * magnitude
        assert distance(gradient, other_gradient) <= 1e-12
        _, _, computed = sums(MeshShape(), Learner(row_length=T), None)
        assert distance(gradient, computed) > 0.1


@pytest.mark.parametrize("layout", ["packed, micro-batches", "data, fsdp, tensor, micro-batches"])
def test_a_mixture_of_experts_learns_the_same_in_float32(layout):
    loss, magnitude, gradient = step_sums(MeshShape(), Learner(row_length=T), experts=EXPERTS)
    other_loss, _, other_gradient = step_sums(*LAYOUTS[layout], experts=EXPERTS)
    assert abs(other_loss - loss) <= 1e-6 * magnitude
    assert distance(gradient, other_gradient) <= 1e-5


def test_router_metrics_are_means_over_the_tokens_that_are_learned_from(mesh):
    state, batch, update = update_program(EXPERTS)
    _, metrics = update(state, batch)
    cfg = model_config("float32", EXPERTS)
    routed = jax.jit(lambda p, b: MODEL.routed(p, b.tokens[0], b.positions[0], b.segment[0], cfg)[1])
    logits = routed(state.models["policy"].params, batch.packed)
    probs = np.asarray(jax.nn.softmax(np.asarray(logits, np.float64)))  # [layers, R, L, experts]
    before = np.roll(np.asarray(batch.loss_mask[0]), -1, axis=1)  # a router is judged where the token is predicted
    assert batch.packed.tokens.shape[0] == 1 and not before[:, -1].any()
    entropy = -(probs * np.log(probs)).sum(-1)
    assert float(metrics["router/entropy"]) == pytest.approx(entropy[:, before].mean(), rel=1e-5)
    z = np.log(np.exp(np.asarray(logits, np.float64)).sum(-1)) ** 2
    assert float(metrics["router/z"]) == pytest.approx(z[:, before].mean(), rel=1e-5)
    chosen = (np.argsort(np.argsort(-probs, axis=-1), axis=-1) < 2)[:, before]  # [layers, tokens, experts]
    load = chosen.sum(1)
    assert float(metrics["router/load_max"]) == pytest.approx((load.max(-1) / load.mean(-1)).mean(), rel=1e-5)
    assert float(metrics["router/unused"]) == pytest.approx((load == 0).mean())
    assert 0.5 < float(metrics["router/balance"]) < 2  # of at most experts / per token


def test_router_terms_pull_on_the_router_alone_where_nothing_else_is_learned(mesh):
    state, batch, _ = update_program(EXPERTS)
    still = batch.replace(advantages=jnp.zeros_like(batch.advantages))
    static = dict(objective=ALGOS["GRPO"], model=MODEL, cfg=model_config("float32", EXPERTS), chunk=16)
    hyper = jax.tree.map(jnp.float32, ALGOS["GRPO"].config())
    policy = weights_of(state.models, "policy")
    gradient = jax.jit(lambda router: loss_sums(policy, still, hyper, (), router, **static).gradient.params)
    weighed = lambda balance, z: gradient(RouterLoss(balance=jnp.float32(balance), z=jnp.float32(z)))
    nothing = weighed(0, 0)
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(nothing))
    for term in ((1, 0), (0, 1)):
        pulled = weighed(*term)
        assert np.abs(pulled["layers"]["router"]).max() > 0
        # The last layer's experts come after the last router.
        assert (np.asarray(pulled["layers"]["expert_down"][-1]) == 0).all()


def test_the_value_loss_pulls_on_the_layers_where_nothing_else_is_learned():
    mesh, weights, _ = program(MeshShape(), Learner(row_length=T), "PPO", "float32", None)
    rollout, _ = sequences()
    hyper = jax.tree.map(jnp.float32, ALGOS["PPO"].config())
    shape = packed_shape(Learner(), N, T, 1)
    with jax.set_mesh(mesh):
        packing = plan(np.asarray(rollout.length), shape, 0, 1)
        packed = jax.jit(pack_rollout)(jax.tree.map(jnp.asarray, rollout), packing, jnp.float32(1))
        ones = jnp.where(packed.action_mask, 1.0, 0.0)
        batch = TrainBatch(
            packed=packed, recomputed=Recomputed(old_values=0 * ones), loss_mask=packed.action_mask, loss_weights=ones,
            advantages=0 * ones, returns=ones, targets=None, denominator=jnp.float32(1),
        )  # fmt: skip
        static = dict(objective=ALGOS["PPO"], model=MODEL, cfg=model_config("float32"), chunk=16)
        gradient = jax.jit(lambda w: loss_sums(w, batch, hyper, (), **static).gradient.params)(weights)
    assert np.abs(gradient["layers"]["down"][0]).max() > 1e-3  # of the first layer


@pytest.mark.parametrize("shards", [1, 4])
def test_unpack_inverts_pack(shards):
    mesh = make_mesh(MeshShape(data=shards), jax.devices()[:shards])
    rollout, _ = sequences()
    shape = packed_shape(Learner(row_length=32, micro_batch_tokens=64), N, T, shards)
    with jax.set_mesh(mesh):
        packing = plan(rollout.length, shape, 0, 1)
        tokens = jax.device_put(rollout.tokens + 1, batch_sharding(mesh, 2))
        back = jax.jit(lambda x, s: unpack(pack(x, s), s, T, N))(tokens, packing.source)
    inside = np.arange(T) < rollout.length[:, None]
    np.testing.assert_array_equal(np.asarray(back), np.where(inside, rollout.tokens + 1, 0))


def test_a_shared_prompt_lies_in_its_row_once():
    # Prompts of 3 and 1; a prompt of 1 has nothing to share. Of width 6, source = row * 6 + column.
    lengths, prompts = np.array([5, 4, 6, 2, 3, 2]), np.array([3, 3, 3, 1, 1, 1])
    config = Learner(row_length=16, prefix_sharing="in_row")
    shape = packed_shape(config, 6, 6, 1, prompt_length=3, samples=3)
    assert (shape.places, shape.samples) == (6, 3)
    packing = plan(lengths, shape, 0, 1, prompts)
    # 2 of the prefix, then 3 + 2 + 4 of the continuations are 11 tokens; the row's other 5 hold 3 + 2; 2 are left.
    np.testing.assert_array_equal(packing.source[0, 0], [0, 1, 2, 3, 4, 8, 9, 14, 15, 16, 17, 24, 25, 26, 18, 19])
    np.testing.assert_array_equal(packing.segment[0, 0], [7, 7, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4, 4])
    np.testing.assert_array_equal(packing.shared_prefix[0, 0], [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 3, 3, 3, 4, 4])
    np.testing.assert_array_equal(packing.sequence[0, 0], [0, 1, 2, 4, 3, 6])
    np.testing.assert_array_equal(packing.source.reshape(-1)[16:18], [30, 31])
    assert packing.num_real == 1
    # A row of two sequences holds two of the group after its prefix, and the third with a prompt of its own.
    shape = packed_shape(dataclasses.replace(config, sequences_per_row=2), 6, 6, 1, prompt_length=3, samples=3)
    packing = plan(lengths, shape, 0, 1, prompts)
    assert packing.sequence.reshape(-1, 2)[:3].tolist() == [[0, 1], [2, 4], [3, 5]]
    assert packing.source.reshape(-1, 16)[1, :9].tolist() == [12, 13, 14, 15, 16, 17, 24, 25, 26]


def test_a_prompt_apart_lies_in_its_micro_batch_once():
    # As above, in rows of 6, two to a micro-batch. Of the first group a continuation of 4 fills row 0 up behind its
    # prefix of 2, those of 3 and 2 go to row 1; the second group has no prefix: 3 and 2 lie in row 2, 2 in row 3.
    lengths, prompts = np.array([5, 4, 6, 2, 3, 2]), np.array([3, 3, 3, 1, 1, 1])
    config = Learner(row_length=6, micro_batch_tokens=12, prefix_sharing="cross_row")
    shape = packed_shape(config, 6, 6, 1, prompt_length=3, samples=3)
    assert (shape.rows, shape.samples, shape.prefix_columns, shape.keys) == (2, 3, 2, 8)
    packing = plan(lengths, shape, 0, 1, prompts)
    rows = lambda x: x.reshape(-1, x.shape[-1])[:4].tolist()
    none = -1
    assert rows(packing.source) == [
        [0, 1, 14, 15, 16, 17], [2, 3, 4, 8, 9, none], [24, 25, 26, 18, 19, none], [30, 31, none, none, none, none],
    ]  # fmt: skip
    assert rows(packing.segment) == [[7, 7, 0, 0, 0, 0], [0, 0, 0, 1, 1, 6], [0, 0, 0, 1, 1, 6], [0, 0, 6, 6, 6, 6]]
    assert rows(packing.prefix_row) == [[0, 0], [0, 0], [none, none], [none, none]]
    assert [row[:2] for row in rows(packing.sequence)] == [[2, 6], [0, 1], [4, 3], [5, 6]]
    assert packing.shared_prefix is None and packing.num_real == 2


def test_prompts_apart_need_two_rows_or_one_that_holds_both():
    one = Learner(row_length=8, micro_batch_tokens=8, prefix_sharing="cross_row")
    assert packed_shape(one, 6, 10, 1, prompt_length=4, samples=3).rows == 2
    one_row = dataclasses.replace(one, row_length=10, micro_batch_tokens=10)
    assert packed_shape(one_row, 6, 10, 1, prompt_length=4, samples=3).rows == 1
    with pytest.raises(ValueError, match="shorter than the longest prompt or completion, 7 tokens"):
        packed_shape(dataclasses.replace(one, row_length=6), 6, 10, 1, prompt_length=4, samples=3)
    cut = packed_shape(Learner(prefix_sharing="cross_row", minibatches=2), 48, 192, 1, prompt_length=64, samples=8)
    assert cut[3:] == packed_shape(Learner(prefix_sharing="cross_row"), 24, 192, 1, prompt_length=64, samples=8)[3:]
    alone = packed_shape(Learner(prefix_sharing="cross_row"), 6, 10, 1, prompt_length=4, samples=1)  # nothing to share
    assert (alone.samples, alone.prefix_columns) == (1, 0)


@pytest.mark.parametrize(
    ("width", "unit", "sharing", "row_length"),
    [(12, 1, "none", 24), (50, 1, "none", 100), (100, 1, "none", 128), (200, 1, "none", 200), (12, 2, "none", 48),
     (12, 8, "none", 128), (12, 1, "in_row", 128), (12, 1, "cross_row", 14)],
)  # fmt: skip
def test_short_sequences_share_a_row_by_twos(width, unit, sharing, row_length):
    shape = packed_shape(Learner(prefix_sharing=sharing), 16, width, 1, prompt_length=8, samples=8, unit=unit)
    assert shape.row_length == row_length  # cross_row: 7 tokens of a prompt before continuations of 5


def test_rows_that_attention_pads_are_as_long_as_it_pads_them():
    assert packed_shape(Learner(), 16, 12, 1, padded_rows=True).row_length == 128
    assert packed_shape(Learner(), 16, 5, 1, shares=2).row_length == 12  # two blocks for each share


@pytest.mark.parametrize("most_of_guide", [0, C])
@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize(
    ("row_length", "prompts_"),
    [(T, "in_row"), (18, "in_row"), (24, "in_row"), (40, "in_row"), (16, "cross_row"), (40, "cross_row")],
)
def test_every_action_lies_in_a_row_once_with_its_whole_past_in_sight(row_length, prompts_, minibatches, most_of_guide):
    """A guide's tokens (RollIn) are none of the policy's, and stand after prompts of any length, the longest too."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        shape = packed_shape(
            Learner(row_length=row_length, minibatches=minibatches, micro_batch_tokens=100, prefix_sharing=prompts_),
            24, T, 2, prompt_length=P, samples=4,
        )  # fmt: skip
        guided = np.random.default_rng(seed).integers(0, most_of_guide + 1, 6).repeat(4)
        prompts = (rng.integers(1, P + 1, 6).repeat(4) + guided) * (np.arange(24) < 20)
        lengths = np.where(prompts > 0, prompts + rng.integers(0, C + 1 - guided), 0)
        past = {}
        for k in range(minibatches):
            packing = plan(lengths, shape, k, minibatches, prompts)
            for micro, row in np.ndindex(shape.micro_batches, shape.rows):
                shard = row // (shape.rows // 2)
                source, segment = packing.source[micro, row], packing.segment[micro, row]
                if prompts_ == "in_row":
                    prefix, front = packing.shared_prefix[micro, row], []
                else:
                    prefix = segment
                    at = shard * (shape.rows // 2) + packing.prefix_row[micro, row].max()
                    front = packing.source[micro, at][: shape.prefix_columns][
                        packing.prefix_row[micro, row] >= 0
                    ].tolist()
                for t in np.flatnonzero(segment < shape.places):
                    sees = [*front, *(source[u] for u in range(t + 1) if segment[u] in (segment[t], prefix[t]))]
                    sequence = packing.sequence[micro, row, segment[t]]
                    group = [(12 * shard + u // T) // 4 for u in sees]
                    assert set(group) == {sequence // 4}
                    assert sequence == 12 * shard + source[t] // T
                    column = source[t] % T
                    assert [u % T for u in sees] == list(range(column + 1))
                    assert column < prompts[sequence] or (sequence, column) not in past
                    past[sequence, column] = True
        expected = {(i, t) for i in range(24) for t in range(prompts[i], lengths[i])}
        assert expected <= past.keys()


def test_minibatches_share_out_every_sequence_once():
    shape = packed_shape(Learner(row_length=32, minibatches=4), N, T, 2)
    rollout, _ = sequences()
    members = [plan(rollout.length, shape, k, 4).member for k in range(4)]
    np.testing.assert_array_equal(np.sum(members, axis=0), np.ones(N))


def test_no_buffer_of_the_update_holds_all_logits():
    """The compiled update has no array of rows x L x V elements; the largest has rows x chunk x V."""
    config = Learner(row_length=64, logprob_chunk=8, micro_batch_tokens=64 * 4)
    cfg = Decoder(vocab_size=4096, layers=1, width=8, heads=1, kv_heads=1, head_dim=8, mlp_width=8)
    spec = MODEL.spec(cfg)
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        params = drawn_params(spec)
        rollout, _ = sequences()
        shape = packed_shape(config, N, T, 1)
        packing = plan(rollout.length, shape, 0, 1)
        packed = jax.jit(pack_rollout)(jax.tree.map(jnp.asarray, rollout), packing, jnp.float32(1))
        by_row = (jnp.zeros(N, dtype) for dtype in ("float32", "float32", "int32"))
        labels = StoredLabels(jnp.asarray(rollout.action_mask), *by_row)
        finish = functools.partial(finish_stored, config=SFT.config(), objective=SFT, max_completion=C)
        batch = jax.jit(finish)(packed, Recomputed(), packing, labels)
        static = dict(objective=SFT, model=MODEL, cfg=cfg, chunk=8)
        text = (
            jax.jit(lambda p, b: loss_sums(Weights(p, {}), b, SFT.config(), (), **static).gradient)
            .lower(params, batch)
            .compile()
            .as_text()
        )
    sizes = [np.prod([int(d) for d in dims.split(",")]) for dims in re.findall(r"f32\[([\d,]+)\]", text)]
    assert max(sizes) <= shape.rows * 8 * 4096


@functools.cache
def update_program(experts=None):
    """Returns (state, batch, jitted update): compiled once for every test of an update."""
    cfg = model_config("float32", experts)
    adamw = jax.tree.map(jnp.float32, AdamW(learning_rate=1e-2))
    objective = ALGOS["GRPO"]
    hyper = jax.tree.map(jnp.float32, objective.config())
    rollout, scores = jax.tree.map(jnp.asarray, sequences())
    drawn = jax.tree.map(jnp.asarray, weights("float32", experts))
    zero = jnp.int32(0)
    policy = ModelState(
        params=drawn.params,
        frozen=None,
        heads={},
        opt_state=begin(ADAMW, adamw, drawn, Weights(*describe(MODEL.spec(cfg), ()))),
        version=zero,
    )
    state = TrainState(step=zero, models={"policy": policy}, objective=(), key=jax.random.key(0), skipped=zero)
    packing = plan(np.asarray(rollout.length), packed_shape(Learner(), N, T, 1), 0, 1)

    @jax.jit
    def assemble(rollout, scores, packing):
        judged = dict(objective=objective, max_completion=C)
        credited = credit(rollout, scores, (), hyper, num_groups=B, **judged)
        packed = pack_rollout(rollout, packing, jnp.float32(1))
        return finish_sampled(packed, Recomputed(), packing, credited, hyper, **judged)

    static = dict(role="policy", objective=objective, model=MODEL, cfg=cfg, chunk=16)
    update = jax.jit(lambda state, batch: learner.update(state, batch, hyper, adamw, optimizer_row=ADAMW, **static))
    return state, assemble(rollout, scores, packing), update


def updated(mutate):
    """Returns (policy before, policy after, updates skipped, metrics) of one update on a batch that `mutate` has
    changed."""
    state, batch, update = update_program()
    after, metrics = update(state, mutate(batch))
    return state.models["policy"], after.models["policy"], int(after.skipped), metrics


def same_bits(a, b):
    return all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))
    )


def test_a_sound_update_moves_the_parameters(mesh):
    before, after, skipped, metrics = updated(lambda batch: batch)
    assert not same_bits(before.params, after.params)
    assert skipped == 0 and float(metrics["grad_norm"]) > 0
    _, _, _, halved = updated(lambda batch: batch.replace(denominator=2 * batch.denominator))
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(float(halved[name]), float(metrics[name]) / 2, rtol=1e-6)


def test_what_is_not_trained_keeps_its_bits_under_weight_decay(mesh):
    cfg = dataclasses.replace(model_config("float32"), layers=1, layer_scale=True)
    state, batch, _ = update_program()
    adamw = jax.tree.map(jnp.float32, AdamW(learning_rate=1e-2, weight_decay=0.1))
    params = drawn_params(MODEL.spec(cfg))
    params["layers"]["layer_scale"] = jnp.full((1, 1), 0.7)
    own = Weights(params, {})
    policy = state.models["policy"].replace(
        params=params, opt_state=begin(ADAMW, adamw, own, Weights(*describe(MODEL.spec(cfg), ())))
    )
    state = state.replace(models={"policy": policy})
    static = dict(objective=ALGOS["GRPO"], model=MODEL, cfg=cfg, chunk=16)
    hyper = jax.tree.map(jnp.float32, ALGOS["GRPO"].config())
    after, _ = jax.jit(
        lambda state: learner.update(state, batch, hyper, adamw, optimizer_row=ADAMW, role="policy", **static)
    )(state)
    layers = after.models["policy"].params["layers"]
    unchanged = {name for name, leaf in layers.items() if np.array_equal(leaf, params["layers"][name])}
    assert unchanged == {"layer_scale"}
    gradient = jax.jit(lambda w: loss_sums(w, batch, hyper, (), **static).gradient.params)(own)
    assert not np.any(gradient["layers"]["layer_scale"]) and np.any(gradient["layers"]["q"])


# The loss of 1e30 is finite, and the squares of its gradient are not.
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_a_non_finite_update_keeps_every_bit_and_is_counted(mesh, bad):
    def poison(batch):
        advantages = np.array(batch.advantages)
        advantages[tuple(np.argwhere(np.asarray(batch.loss_mask))[0])] = bad
        return batch.replace(advantages=jax.device_put(advantages, batch.advantages.sharding))

    before, after, skipped, metrics = updated(poison)
    assert same_bits(before.params, after.params) and same_bits(before.opt_state, after.opt_state)
    assert skipped == 1
    assert float(metrics["update/skipped_nonfinite"]) == 1
    assert np.isfinite(metrics["loss"]) == (bad == 1e30)


def test_a_value_that_is_not_finite_anywhere_keeps_every_bit(mesh, trials):
    state, batch, update = update_program()
    counts = np.argwhere(np.asarray(batch.loss_mask))
    draw, policy = np.random.default_rng(0), state.models["policy"]
    leaves, tree = jax.tree.flatten(policy.params["layers"])
    for trial in range(trials(24, 200)):
        bad = (np.nan, np.inf, -np.inf)[trial % 3]
        given, drawn = state, batch
        if trial % 2:
            field = ("advantages", "loss_weights")[trial // 2 % 2]
            values = np.array(getattr(batch, field))
            values[tuple(draw.choice(counts))] = bad
            drawn = batch.replace(**{field: jax.device_put(values, getattr(batch, field).sharding)})
        else:
            which = int(draw.integers(len(leaves)))
            place = tuple(draw.integers(0, leaves[which].shape))
            values = leaves[which].at[place].set(bad)
            layers = jax.tree.unflatten(tree, [*leaves[:which], values, *leaves[which + 1 :]])
            params = {**policy.params, "layers": layers}
            given = state.replace(models={"policy": policy.replace(params=params)})
        after, metrics = update(given, drawn)
        assert same_bits(given.models["policy"].params, after.models["policy"].params), trial
        assert same_bits(policy.opt_state, after.models["policy"].opt_state), trial
        assert int(after.skipped) == float(metrics["update/skipped_nonfinite"]) == 1


def test_a_batch_without_a_token_to_learn_from_is_skipped(mesh):
    empty = lambda batch: batch.replace(loss_mask=jnp.zeros_like(batch.loss_mask))
    before, after, skipped, metrics = updated(empty)
    assert same_bits(before.opt_state, after.opt_state) and skipped == 1
    assert float(metrics["update/skipped_empty"]) == 1


@functools.cache
def limited_update():
    """Returns (state, batch, jitted update with a KL limit); the old log-probs are 0.1 below those of the weights."""
    state, batch, _ = update_program()
    cfg, objective = model_config("float32"), ALGOS["GRPO"]
    static = dict(model=MODEL, cfg=cfg, chunk=16)
    old = logprobs(Weights(state.models["policy"].params, {}), batch.packed, **static) - 0.1
    batch = batch.replace(recomputed=batch.recomputed.replace(old_logprobs=old))
    hyper, adamw = (jax.tree.map(jnp.float32, config) for config in (objective.config(), AdamW(learning_rate=1e-2)))
    options = dict(role="policy", objective=objective, optimizer_row=ADAMW, **static)
    update = jax.jit(lambda state, batch, limit: learner.update(state, batch, hyper, adamw, None, limit, **options))
    return state, batch, update


def test_an_update_above_the_kl_limit_is_left_out_and_those_after_it_are_not_computed(mesh):
    # k3 of a token that is exp(0.1) times as likely: exp(0.1) - 1 - 0.1 = 0.0051709
    state, batch, update = limited_update()
    limit = lambda most, reached=0.0: KLLimit(jnp.float32(most), jnp.float32(reached))
    below, metrics = update(state, batch, limit(0.00518))
    np.testing.assert_allclose(metrics["approx_kl_k3"], 0.0051709, rtol=1e-3)
    unlimited, _ = update(state, batch, None)
    assert same_bits(below.models, unlimited.models) and metrics["update/kl_reached"] == 0
    assert not same_bits(below.models["policy"].params, state.models["policy"].params)
    for kl_limit, tokens in ((limit(0.00516), metrics["update/tokens"]), (limit(9.0, reached=1.0), 0)):
        after, metrics = update(state, batch, kl_limit)
        assert same_bits(after.models, state.models) and metrics["update/kl_reached"] == 1
        assert metrics["update/tokens"] == tokens and metrics["update/norm"] == 0
        # nothing went wrong: the objective's state advances
        assert after.skipped == 0 == metrics["update/skipped_nonfinite"] == metrics["update/skipped_empty"]
    assert metrics["loss"] == metrics["grad_norm"] == 0


def test_a_kl_limit_needs_the_objectives_kl(mesh):
    state, batch, _ = limited_update()
    objective = ALGOS["GRPO"]
    silent = objective._replace(token_loss=lambda *given: (objective.token_loss(*given)[0], {}))
    static = dict(role="policy", optimizer_row=ADAMW, model=MODEL, cfg=model_config("float32"), chunk=16)
    given = (state, batch, objective.config(), AdamW(), None, KLLimit(jnp.float32(1), jnp.float32(0)))
    with pytest.raises(ValueError, match=r"reads the metric 'approx_kl_k3', which the objective's token_loss does not"):
        jax.eval_shape(lambda *given: learner.update(*given, objective=silent, **static), *given)


def test_a_non_finite_update_is_skipped_under_a_kl_limit_too(mesh):
    state, batch, update = limited_update()
    advantages = jnp.where(batch.loss_mask, jnp.nan, batch.advantages)
    after, metrics = update(state, batch.replace(advantages=advantages), KLLimit(jnp.float32(9), jnp.float32(0)))
    assert same_bits(after.models["policy"].params, state.models["policy"].params)
    assert after.skipped == 1 == metrics["update/skipped_nonfinite"] and metrics["update/kl_reached"] == 0


def test_nan_where_the_loss_is_masked_does_not_leak(mesh):
    def poison(batch):
        holes = lambda x: jnp.where(batch.loss_mask, x, jnp.nan)
        packed = batch.packed.replace(behaviour_logprobs=holes(batch.packed.behaviour_logprobs))
        return batch.replace(packed=packed, advantages=holes(batch.advantages))

    _, clean, _, _ = updated(lambda batch: batch)
    _, after, _, metrics = updated(poison)
    assert same_bits(clean.params, after.params)
    assert all(np.isfinite(float(value)) for value in metrics.values())
