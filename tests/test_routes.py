"""Routes of a mixture of experts, recorded where tokens are sampled and replayed where they are learned from."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampled import fresh, places_of

from jrl.compatibility import check_routes
from jrl.config.errors import ConfigError
from jrl.device.sharding import MeshShape, batch_sharding, make_mesh, replicated
from jrl.experiment import TABLES, Online
from jrl.learning import learner, nonfinite
from jrl.learning.layout import Learner, packed_shape
from jrl.learning.learner import Weights
from jrl.learning.pack import pack_rollout, plan
from jrl.learning.step import Learned, StageArrays, StagePrograms, prepare, updates
from jrl.models.contract import unrolled
from jrl.models.decoder import MODEL
from jrl.models.experts import Experts
from jrl.models.leaves import layers_of
from jrl.models.shape import Decoder
from jrl.resolve import load_config
from jrl.rollout import sampler
from jrl.rollout.strategies.refinement import Refinement
from jrl.rollout.strategies.rows import continued, widened
from jrl.run.policy import open_policy
from jrl.tasks.tokenizers.bytes import ByteTokenizer
from jrl.tools.sweep.population import unsupported
from jrl.types import ModelState, PromptBatch, Recomputed, TrainBatch, TrainState

NONE = 255  # not recorded
# Two of the four layers are sparse.
CFG = Decoder(
    vocab_size=48, layers=4, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=32,
    experts=Experts(count=6, per_token=2, width=8, layers=(False, True, True)),
)  # fmt: skip
P, C, G = 5, 6, 2
LENGTHS = np.array([3, 1, 5, 2, 4, 5], np.int32)
PROMPTS = PromptBatch(
    tokens=np.random.default_rng(0).integers(8, 48, (6, P)).astype(np.int32),
    length=LENGTHS,
    uid=np.random.default_rng(1).integers(0, 2**32, (6, 2), dtype=np.uint32),
)


ONE = MeshShape()


@functools.cache
def drawn(layers="unrolled", chunk=None, records_routes=True, shape=ONE):
    """Returns what one device draws, or a mesh: G samples of every prompt in three slots, as numpy."""
    mesh = make_mesh(shape, jax.devices()[: math.prod(shape.sizes(8))])
    by_row = lambda x: jax.device_put(x, batch_sharding(mesh, np.ndim(x)))
    everywhere = functools.partial(jax.device_put, device=replicated(mesh))
    config = sampler.Sampler(completion_length=C, slots=3, layers=layers, prefill_chunk=chunk, max_batch_compactions=1)
    options = sampler.static_options(config, MODEL, CFG, samples=G, stop_ids=(7, 8, 9), pad_id=0)
    with jax.set_mesh(mesh):
        params = jax.device_put(fresh(MODEL, CFG), places_of(MODEL, CFG, mesh))
        out = sampler.program(
            params, jax.tree.map(by_row, PROMPTS), everywhere(jax.random.key(1)),
            *map(everywhere, (np.uint32(0), np.int32(0))),
            sampler.params_on_device(config, mesh), None, None,
            options=options._replace(records_routes=records_routes),
        )  # fmt: skip
    return jax.tree.map(np.asarray, out)


def columns_of(rollout):
    """Returns which tokens the sampler has fed, [N, T] bool: all but the last of a row."""
    return np.arange(P + C)[None] < rollout.length[:, None] - 1


@pytest.mark.parametrize(("layers", "chunk"), [("unrolled", None), ("scanned", 2)])
def test_the_sampler_records_the_routes_of_every_token_that_it_feeds(layers, chunk):
    """They are those of a forward pass over whole rows: in prompts, at their last tokens and in completions."""
    out = drawn(layers, chunk)
    assert out.routes.shape == (6 * G, P + C, 2 * 2) and out.routes.dtype == np.uint8
    positions = np.broadcast_to(np.arange(P + C, dtype=np.int32), out.tokens.shape)
    plain = jax.jit(lambda p: MODEL.routes.record(p, out.tokens, positions, None, CFG)[2])(fresh(MODEL, CFG))
    fed = columns_of(out)
    assert fed.sum(1).max() > P + 1 and (out.length < P + C).any()
    np.testing.assert_array_equal(out.routes[fed], np.asarray(plain)[fed])
    assert (out.routes[~fed] == NONE).all() and len(np.unique(out.routes[fed])) == 6


def test_what_is_recorded_changes_nothing_else():
    out, plain = drawn(), drawn(records_routes=False)
    assert plain.routes is None
    for name, value in vars(plain).items():
        np.testing.assert_array_equal(value, None if name == "routes" else getattr(out, name), err_msg=name)


def test_devices_that_share_experts_record_what_one_device_does():
    """Two batch shards take every step together, with idle slots where one has fewer tokens to draw."""
    one, many = drawn(), drawn(shape=MeshShape(expert=2))
    np.testing.assert_array_equal(one.tokens, many.tokens)
    np.testing.assert_array_equal(one.routes, many.routes)


def packed_rows(rollout, prefix_sharing="none"):
    config = Learner(row_length=32, prefix_sharing=prefix_sharing)
    shape = packed_shape(config, len(rollout.length), P + C, 1, prompt_length=P, samples=G)
    packing = plan(rollout.length, shape, 0, 1, rollout.action_mask.argmax(axis=1))
    return jax.tree.map(np.asarray, jax.jit(pack_rollout)(rollout, packing, np.float32(1)))


logprobs_program = jax.jit(functools.partial(learner.logprobs, model=MODEL, cfg=CFG, chunk=16))


def logprobs(packed):
    """Returns the learner's log-probs of packed rows: replayed where they have routes, computed where not."""
    return np.asarray(logprobs_program(Weights(fresh(MODEL, CFG), {}), packed))


def test_padding_and_tokens_that_nobody_fed_are_packed_as_not_recorded():
    out = drawn()
    packed = packed_rows(out)
    by_row = packed_rows(out.replace(sampler_logprobs=np.broadcast_to(columns_of(out), out.tokens.shape)))
    fed = by_row.sampler_logprobs.astype(bool)  # packed as the tokens are
    assert 0 < fed.sum() < fed.size and (packed.routes[fed] < 6).all() and (packed.routes[~fed] == NONE).all()
    one = np.argwhere(packed.action_mask)[0]
    where = (out.tokens == packed.tokens[tuple(one)]) & out.action_mask
    assert any((packed.routes[tuple(one)] == routes).all() for routes in out.routes[where])


@pytest.mark.parametrize("prefix_sharing", ["none", "in_row", "cross_row"])
def test_in_float32_replayed_routes_give_the_log_probs_of_computed_ones(prefix_sharing):
    packed = packed_rows(drawn(), prefix_sharing)
    replayed, computed = logprobs(packed), logprobs(packed.replace(routes=None))
    np.testing.assert_allclose(replayed, computed, rtol=0, atol=2e-6)
    difference = np.where(packed.action_mask, replayed - packed.sampler_logprobs, 0)
    assert np.abs(difference).max() <= 2e-5 and np.abs(computed).max() > 3


def test_where_nothing_is_recorded_the_learner_decides_to_the_bit():
    packed = packed_rows(drawn())
    nothing = packed.replace(routes=np.full_like(packed.routes, NONE))
    np.testing.assert_array_equal(logprobs(nothing), logprobs(packed.replace(routes=None)))


@pytest.mark.parametrize("model", [MODEL, unrolled(MODEL)], ids=["scanned", "unrolled"])
def test_routes_that_are_permuted_by_hand_give_the_permuted_mixture(model):
    """Experts 0 and 1, and 2 and 3, have the same logits, and the router takes the first of equals. Routes that name
    the others are those of a mixture in which these pairs have changed places."""
    own = dataclasses.replace(CFG, experts=dataclasses.replace(CFG.experts, count=4, per_token=1, softmax="all"))
    params = jax.tree.map(np.copy, fresh(MODEL, own))
    params["layers"]["router"][..., [1, 3]] = params["layers"]["router"][..., [0, 2]]
    swapped = jax.tree.map(np.copy, params)
    for name in ("expert_gate", "expert_up", "expert_down"):
        assert len(layers_of(own, name)) == 2
        swapped["layers"][name] = params["layers"][name][:, [1, 0, 3, 2]]
    tokens = np.random.default_rng(2).integers(0, 48, (2, 9)).astype(np.int32)
    positions = np.broadcast_to(np.arange(9, dtype=np.int32), tokens.shape)
    run = jax.jit(lambda params, *routes: model.routed(params, tokens, positions, None, own, *routes))
    routes = np.array(jax.jit(lambda p: MODEL.routes.record(p, tokens, positions, None, own)[2])(params))
    assert set(routes.reshape(-1).tolist()) == {0, 2}
    # The second layer's routes depend on what the first one's experts did: they are those of the swapped mixture.
    of_swapped = np.array(jax.jit(lambda p: MODEL.routes.record(p, tokens, positions, None, own)[2])(swapped))
    hidden, logits = run(params, of_swapped + np.uint8(1))
    expected, expected_logits = run(swapped)
    np.testing.assert_allclose(hidden, expected, rtol=0, atol=2e-6)
    np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=2e-6)
    assert np.abs(hidden - run(params)[0]).max() > 1e-3


def test_the_gradient_goes_through_the_logits_of_the_recorded_experts_alone():
    """Of a router's columns, those of experts that no token went to have none."""
    packed = packed_rows(drawn())
    routes = np.where(packed.routes == NONE, np.uint8(NONE), np.tile(np.array([3, 1], np.uint8), 2))
    rows = packed.replace(routes=routes, segment=np.where((routes == NONE).any(-1), 32, packed.segment))

    @jax.jit
    def gradient(params):
        hidden = lambda p: learner.hidden_of(p, learner.micro_batch(rows, 0), MODEL, CFG)[0]
        fed = (routes[0] != NONE).all(-1)[..., None]
        return jax.grad(lambda p: (jnp.where(fed, hidden(p), 0) ** 3).sum())(params)["layers"]["router"]

    columns = np.abs(np.asarray(gradient(fresh(MODEL, CFG)))).max((0, 1))
    assert (columns[[0, 2, 4, 5]] == 0).all() and (columns[[1, 3]] > 1e-6).all()


def test_only_the_model_that_drew_the_rows_replays_their_routes():
    """Reference, teacher, reward models and a critic of its own decide for themselves, and a value head goes along."""
    seen = {}

    def program(name):
        def call(weights, packed):
            seen[name] = packed.routes is not None
            return {}

        return call

    own = ModelState(params=(), frozen=None, heads={}, opt_state=None, version=0)
    state = TrainState(0, {role: own for role in ("policy", "reference", "teacher", "critic")}, (), None, 0)
    names = ("recompute", "reference", "teacher", "row_values", "critic_values")
    programs = StagePrograms(**{name: program(name) if name in names else None for name in StagePrograms._fields})
    packed = packed_rows(drawn())
    prepared = prepare(programs, state, "policy", packed, None)
    assert seen == {name: name == "recompute" for name in names} and prepared.packed is packed

    def update(name):
        return lambda state, batch, *arrays: (seen.update({name: batch.packed.routes is not None}), (state, {}))[1]

    programs = programs._replace(update=update("policy"), update_critic=update("critic"))
    batch = TrainBatch(packed, Recomputed(), None, None, None, None, None, None)
    updates(programs, state, Learned([batch], 1, False), StageArrays((), (), (), None))
    assert seen["policy"] and not seen["critic"]


def test_rows_of_two_calls_have_the_routes_of_the_call_that_drew_the_next_token():
    """The first call fed the columns 0 and 1, and drew column 2; the second began with all of these and fed 2 and 3."""
    routes = lambda *ids: jnp.array([[[i, i] for i in ids]], jnp.uint8)
    fields = dict.fromkeys(("tokens", "sampler_logprobs", "version", "turn"), jnp.zeros((1, 6), jnp.int32))
    fields |= dict(truncated_logprobs=None, support_size=None, finish=jnp.zeros(1, jnp.int8), length=jnp.array([3]))
    first = fields | {"action_mask": jnp.arange(6)[None] == 2, "routes": routes(1, 2, NONE)}
    second = fields | {"action_mask": jnp.arange(6)[None] >= 3, "routes": routes(3, 3, 3, 4, NONE, NONE)}
    wide = widened(first, 6, 0)
    assert wide["routes"][0, :, 0].tolist() == [1, 2, NONE, NONE, NONE, NONE]
    assert continued(wide, second)["routes"][0, :, 1].tolist() == [1, 2, 3, 4, NONE, NONE]
    assert widened(second, 4, 0)["routes"].shape == (1, 4, 2)


MIXTURE = ("Decoder.experts=@Experts()", "Experts.count=4", "Experts.per_token=2", "Experts.width=16")
STORED = ("Config.stages=[@Offline()]", "Offline.source=@Demonstrations()", "Offline.objective=@SFT()")


@pytest.mark.parametrize(
    ("bindings", "error"),
    [
        ((), "mixture of experts, and this model has no experts; leave it out"),
        ((*MIXTURE, *STORED), "an Offline stage learns from stored rows; set it only for the stage that samples"),
        (
            (*MIXTURE, "Online.objective=@XPO()", "Online.samples=2", "Online.strategy=@ReferenceSamples()"),
            r"@ReferenceSamples\(\): it draws rows with other weights",
        ),
        (
            (*MIXTURE, "Online.objective=@NashMD()", "Online.strategy=@MixtureOpponent()"),
            r"@MixtureOpponent\(\): it draws rows with other weights",
        ),
    ],
    ids=["dense", "stored rows", "reference samples", "opponents"],
)
def test_where_nothing_could_be_replayed_the_option_is_refused(bindings, error):
    with pytest.raises((ConfigError, ValueError), match=error):
        config, parts = load_config("configs/tiny.gin", [*bindings, "Learner.routes='replayed'"])
        open_policy(config, parts, ByteTokenizer())


def test_a_population_does_not_replay_routes(mesh):
    config, _ = load_config("configs/tiny.gin", [*MIXTURE, "MeshShape.data=1", "Learner.routes='replayed'"])
    assert unsupported(config) == "replayed routes (Learner.routes = 'replayed')"
    computed, _ = load_config("configs/tiny.gin", [*MIXTURE, "MeshShape.data=1"])
    assert unsupported(computed) is None


def test_routes_after_another_prompt_are_refused():
    with pytest.raises(ValueError, match=r"@Refinement\(\): it draws rows .* after another prompt"):
        check_routes(Online(objective=None, strategy=Refinement(condition="{feedback}")), TABLES)


@pytest.mark.parametrize("layer", [0, 2])
def test_the_first_layer_that_is_not_finite_is_found_among_replayed_ones(mesh, layer):
    """Fewer layers read the routes of the first of them."""
    uniform = dataclasses.replace(CFG, layers=3, experts=Experts(count=6, per_token=2, width=8))
    packed = packed_rows(drawn())
    packed = packed.replace(routes=np.random.default_rng(0).integers(0, 6, (*packed.tokens.shape, 6)).astype(np.uint8))
    params = jax.tree.map(np.copy, fresh(MODEL, uniform))
    for name in ("expert_gate", "expert_up"):
        params["layers"][name][layer] *= 1e25  # 1e25 * 1e25 overflows
    micro = jax.tree.map(lambda x: x[0] if np.ndim(x) > 1 else x, packed)
    assert nonfinite._first_bad_layer(params, micro, MODEL, uniform) == layer
