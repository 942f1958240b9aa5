"""Losses of sequences: by hand from rows that lie alone, and the same in every layout; pairs are never cut."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_params import drawn_params

from jrl.algos import ALGOS
from jrl.algos.contract import Needs, Objective, other_of_pair
from jrl.algos.paired import gains
from jrl.algos.sft import token_loss
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
from jrl.learning.credit import StoredLabels, finish_stored
from jrl.learning.layout import Learner, packed_shape
from jrl.learning.learner import Weights, loss_sums
from jrl.learning.nonfinite import find_fault
from jrl.learning.optimizer import begin
from jrl.learning.optimizers.adamw import OPTIMIZER as ADAMW
from jrl.learning.optimizers.adamw import AdamW
from jrl.learning.optimizers.contract import describe
from jrl.learning.pack import by_place, pack_tokens, plan
from jrl.models.contract import axes
from jrl.models.decoder import MODEL
from jrl.models.heads import REWARD, VALUE
from jrl.models.shape import Decoder
from jrl.ops.reduce import masked_mean
from jrl.types import ModelState, Recomputed, TrainState, traced

N, T, V, PAD_PAIRS = 16, 12, 40, 1
BETA = 0.5


@traced
class PairLoss:
    beta: float = BETA


def pair_loss(config, sequences, state):
    """Returns -log sigmoid(beta (g_w - g_l)), g the log-ratio to the reference of either sequence, and g_w - g_l."""
    gain = jnp.where(sequences.mask, sequences.logprob - sequences.ref_logprob, 0)
    preferred = sequences.mask & (sequences.label > 0.5)
    difference = jnp.where(preferred, gain - other_of_pair(gain, sequences), 0)
    return jnp.where(preferred, jax.nn.softplus(-config.beta * difference), 0), {"pair/gain": difference}


PAIRS = Objective(config=PairLoss, needs=lambda config: Needs(reference=True), sequence_loss=pair_loss, unit_size=2)


def mean_gain(config, sequences):
    """Returns the mean log-ratio of the sequences that are not preferred, of the whole step."""
    return masked_mean(gains(sequences), sequences.mask & (sequences.label < 0.5))


OBJECTIVES = {
    "BradleyTerry": ALGOS["BradleyTerry"],
    "pairs": PAIRS,
    "tokens": Objective(config=PairLoss, token_loss=token_loss),
    "pairs and tokens": PAIRS._replace(token_loss=token_loss),
    "KTO": ALGOS["KTO"]._replace(sequence_baseline=mean_gain),
    "WPO": ALGOS["WPO"],
    "IQL": ALGOS["IQL"],
}


def model_config(dtype):
    return Decoder(
        vocab_size=V, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=32, dtype=dtype, param_dtype=dtype
    )


class Stored(NamedTuple):
    """Rows as a source gives them, and what is known of them."""

    tokens: np.ndarray
    action_mask: np.ndarray
    length: np.ndarray
    labels: StoredLabels


def stored(dtype="float32"):
    """Returns random pairs, the preferred one first or second, each with a weight; the last pair is padding."""
    rng = np.random.default_rng(0)
    real = np.arange(N) < N - 2 * PAD_PAIRS
    prompt = rng.integers(1, 5, N // 2).repeat(2)
    length = np.where(real, prompt + rng.integers(1, T - 4, N), 0)
    column = np.arange(T)
    first = rng.integers(0, 2, N // 2)
    label = np.stack([first, 1 - first], axis=1).reshape(-1) * real
    action_mask = (column >= prompt[:, None]) & (column < length[:, None])
    return Stored(
        tokens=np.where(column < length[:, None], rng.integers(0, V, (N, T)), 0).astype(np.int32),
        action_mask=action_mask,
        length=length.astype(np.int32),
        labels=StoredLabels(
            mask=action_mask,
            label=label.astype(np.float32),
            weight=(rng.uniform(0.5, 2, N // 2).repeat(2) * real).astype(np.float32),
            unit=np.where(real, np.arange(N) // 2, -1).astype(np.int32),
            value=(rng.uniform(-1, 1, (N, 1)) * real[:, None]).astype(np.float32),
        ),
    )


def in_order(rows, order):
    """Returns the pairs in another order, the padding where it was."""
    take = np.array([2 * pair + i for pair in order for i in range(2)])
    action_mask = rows.action_mask[take]
    of_rows = rows.labels.label[take], rows.labels.weight[take], rows.labels.unit, rows.labels.value[take]
    labels = StoredLabels(action_mask, *of_rows)
    return Stored(rows.tokens[take], action_mask, rows.length[take], labels)


@functools.cache
def drawn(dtype, seed):
    """Returns random weights with a reward head and a value head, as numpy."""
    cfg = model_config(dtype)
    params = jax.tree.map(np.asarray, drawn_params(MODEL.spec(cfg), seed))
    heads = np.random.default_rng(seed).normal(size=(2, 1, 16, 1)).astype(dtype)
    return Weights(params, dict(zip((REWARD, VALUE), heads)))


def placed(weights, cfg, mesh):
    params = jax.tree.map(jax.device_put, weights.params, shardings(axes(MODEL.spec(cfg)), mesh, TRAIN))
    heads = jax.device_put(weights.heads, shardings(dict.fromkeys(weights.heads, (None, "norm", None)), mesh, TRAIN))
    return Weights(params, heads)


# What the sum of both has says it of each: where layouts are compared only these are computed.
BY_LAYOUT = ("BradleyTerry", "pairs and tokens", "KTO", "WPO", "IQL")


@functools.cache
def program(mesh_shape, config, dtype, names):
    """Returns (mesh, jitted (weights, reference, rows, plan) -> {objective: loss, magnitude, gradient}); compiled
    once."""
    mesh = make_mesh(mesh_shape, jax.devices()[: np.prod(mesh_shape.sizes(8))])
    static = dict(model=MODEL, cfg=model_config(dtype), chunk=config.chunk)

    @jax.jit
    def run(weights, reference, rows, packing):
        packed = pack_tokens(rows.tokens, rows.action_mask, packing, jnp.float32(1))
        before = {"ref_logprobs": reference, "old_logprobs": weights}
        recomputed = Recomputed(**{name: learner.logprobs(of, packed, **static) for name, of in before.items()})
        by_name = {}
        for name in names:
            objective = OBJECTIVES[name]
            hyper = jax.tree.map(jnp.float32, objective.config())
            batch = finish_stored(
                packed, recomputed, packing, rows.labels, hyper, objective=objective, max_completion=T
            )
            sums = loss_sums(weights, batch, hyper, (), objective=objective, **static)
            gradient = jax.tree.map(lambda g, by=batch.denominator: g / by.astype(g.dtype), sums.gradient)
            by_name[name] = sums.loss / batch.denominator, sums.magnitude / batch.denominator, gradient
        return by_name

    return mesh, run


def place_plan(packing, mesh):
    rows = row_sharding(mesh)
    return jax.tree.map(lambda x: jax.device_put(x, rows if np.ndim(x) == 3 else replicated(mesh)), packing)


def place_rows(rows, mesh):
    by_row = lambda x: jax.device_put(x, batch_sharding(mesh, x.ndim))
    action_mask = by_row(rows.action_mask)
    labels = StoredLabels(action_mask, *(jax.device_put(x, replicated(mesh)) for x in rows.labels[1:]))
    return Stored(by_row(rows.tokens), action_mask, by_row(rows.length), labels)


def planned(rows, config, shards):
    return plan(rows.length, packed_shape(config, N, T, shards, unit=2), 0, 1)


@functools.cache
def step_sums(mesh_shape, config, dtype="float32", order=None, names=BY_LAYOUT):
    """Returns {objective: (loss, magnitude, gradient)} of one optimizer step, as numpy."""
    mesh, run = program(mesh_shape, config, dtype, names)
    rows = stored() if order is None else in_order(stored(), order)
    cfg = model_config(dtype)
    with jax.set_mesh(mesh):
        packing = place_plan(planned(rows, config, row_shards(mesh)), mesh)
        weights, reference = (placed(drawn(dtype, seed), cfg, mesh) for seed in (3, 4))
        return jax.tree.map(np.asarray, run(weights, reference, place_rows(rows, mesh), packing))


@functools.cache
def alone(dtype, seed):
    """Returns (log-probs [N, T], scores [N], log of the sum of squared probabilities [N, T], values [N, T]) of a plain
    forward pass over rows that lie alone, float64."""
    rows, cfg, weights = stored(), model_config(dtype), drawn(dtype, seed)
    with jax.set_mesh(make_mesh(MeshShape(), jax.devices()[:1])):

        @jax.jit
        def forward(params, tokens):
            hidden, _ = MODEL.forward(params, tokens, jnp.broadcast_to(jnp.arange(T)[None], (N, T)), None, cfg)
            return hidden, MODEL.unembed(params, hidden, cfg)

        hidden, logits = (np.asarray(x, np.float64) for x in forward(weights.params, rows.tokens))
    over = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    logprobs, squared = np.zeros((N, T)), np.zeros((N, T))
    logprobs[:, 1:] = np.take_along_axis(over[:, :-1], rows.tokens[:, 1:, None], -1)[..., 0]
    squared[:, 1:] = np.log((np.exp(over[:, :-1]) ** 2).sum(-1))
    scores, values = ((hidden @ weights.heads[head][0].astype(np.float64))[..., 0] for head in (REWARD, VALUE))
    before = np.pad(values[:, :-1], ((0, 0), (1, 0)))
    return logprobs, scores[np.arange(N), np.maximum(rows.length - 1, 0)], squared, before


def in_rows_of_one_pair():
    """Returns `step_sums` of every objective, from rows of one pair."""
    return step_sums(*ONE_PAIR_A_ROW, names=tuple(OBJECTIVES))


def softplus(x):
    return np.logaddexp(0, x)


def expected(dtype="float32"):
    """Returns {objective: loss} by the formulas, from rows that lie alone.

    Of a pair (w, l) with weight a: BradleyTerry a log(1 + exp(-(s_w - s_l))); pairs a log(1 + exp(-beta (g_w - g_l))),
    g the summed log-ratio to the reference; both over the number of pairs, 7. Tokens: -log p over their number. KTO
    with weights a: a (1 - sigmoid(0.1 (g - z))) of what is preferred, a (1 - sigmoid(0.1 (z - g))) of the rest, whose
    mean g is z; over 7. WPO a min(1, exp(m_w + m_l)) log(1 + exp(-0.1 (g_w - g_l))), m the mean over tokens of
    log p - log sum_v p_v^2; over 7. IQL: of the columns of a row, d the next value, or the reward, less this one:
    -min(exp(d / 0.25), 20) log p + (0.7 or, d < 0, 0.3) d^2, over the number of tokens.
    """
    rows = stored()
    (logprobs, scores, squared, values), (before, *_) = alone(dtype, 3), alone(dtype, 4)
    likely = np.where(rows.action_mask, logprobs - squared, 0).sum(-1) / np.maximum(rows.action_mask.sum(-1), 1)
    gain = np.where(rows.action_mask, logprobs - before, 0).sum(-1)
    pairs = N // 2 - PAD_PAIRS
    losses = {"BradleyTerry": 0.0, "pairs": 0.0, "WPO": 0.0}
    for pair in range(pairs):
        w, l = sorted((2 * pair, 2 * pair + 1), key=lambda i: -rows.labels.label[i])
        losses["BradleyTerry"] += rows.labels.weight[w] * softplus(scores[l] - scores[w]) / pairs
        losses["pairs"] += rows.labels.weight[w] * softplus(BETA * (gain[l] - gain[w])) / pairs
        held = rows.labels.weight[w] * min(1, np.exp(likely[w] + likely[l]))
        losses["WPO"] += held * softplus(np.float64(np.float32(0.1)) * (gain[l] - gain[w])) / pairs
    real = rows.labels.weight > 0
    above = np.float64(np.float32(0.1)) * (gain - gain[real & (rows.labels.label < 0.5)].mean())
    sigmoid = 1 / (1 + np.exp(np.where(rows.labels.label > 0.5, above, -above)))
    losses["KTO"] = (rows.labels.weight * sigmoid)[real].sum() / pairs
    losses["tokens"] = -logprobs[rows.action_mask].sum() / rows.action_mask.sum()
    losses["IQL"], tau, largest = 0.0, np.float64(np.float32(0.7)), np.float64(np.log(np.float32(20)))
    for i, t in zip(*np.nonzero(rows.action_mask)):
        follows = values[i, t + 1] if t + 1 < rows.length[i] else np.float64(rows.labels.value[i, 0])
        d = follows - values[i, t]
        losses["IQL"] += abs(tau - (d < 0)) * d**2 - np.exp(min(d / 0.25, largest)) * logprobs[i, t]
    losses["IQL"] /= rows.action_mask.sum()
    return losses | {"pairs and tokens": losses["pairs"] + losses["tokens"]}


def distance(a, b):
    """Returns |a - b| / |a| in norm over whole trees."""
    square = lambda tree: sum(float((np.asarray(x, np.float64) ** 2).sum()) for x in jax.tree.leaves(tree))
    return np.sqrt(square(jax.tree.map(lambda x, y: np.asarray(x, np.float64) - y, a, b)) / square(a))


ONE_PAIR_A_ROW = MeshShape(), Learner(row_length=2 * T, sequences_per_row=2, micro_batch_tokens=10_000)
LAYOUTS = {
    "packed, micro-batches": (MeshShape(), Learner(row_length=40, micro_batch_tokens=80, logprob_chunk=5)),
    "data, fsdp": (MeshShape(data=2, fsdp=2), Learner(row_length=40, micro_batch_tokens=160)),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_loss_is_that_of_the_formula_on_rows_that_lie_alone(name):
    loss, magnitude, _ = in_rows_of_one_pair()[name]
    assert abs(loss - expected()[name]) <= 1e-6 * magnitude
    assert magnitude > 0.01


# Where only a wrong formula can differ.
def test_loss_and_gradient_of_sequences_do_not_depend_on_layout_and_the_loss_is_that_of_the_formula():
    with jax.enable_x64(True):
        by_hand = expected("float64")
        one, other = (step_sums(*layout, dtype="float64") for layout in LAYOUTS.values())
        for name, (loss, magnitude, gradient) in one.items():
            assert abs(loss - by_hand[name]) <= 1e-12 * magnitude, name
            assert abs(other[name][0] - loss) <= 1e-12 * magnitude, name
            assert distance(gradient, other[name][2]) <= 1e-12, name


def test_loss_and_gradient_of_sequences_do_not_depend_on_the_order_of_pairs():
    order = (3, 0, 6, 2, 5, 1, 4, 7)  # the last is padding
    with jax.enable_x64(True):
        layout = LAYOUTS["packed, micro-batches"]
        one, other = (step_sums(*layout, dtype="float64", order=rows) for rows in (None, order))
        for name, (loss, magnitude, gradient) in one.items():
            assert abs(other[name][0] - loss) <= 1e-12 * magnitude, name
            assert distance(gradient, other[name][2]) <= 1e-12, name


def test_terms_of_tokens_and_sequences_add_up_each_over_its_own_denominator():
    by_name = in_rows_of_one_pair()
    (pairs, pair_size, pair_gradient), (tokens, token_size, token_gradient) = by_name["pairs"], by_name["tokens"]
    loss, magnitude, gradient = by_name["pairs and tokens"]
    assert abs(loss - (pairs + tokens)) <= 1e-6 * magnitude
    assert magnitude == pytest.approx(pair_size + token_size, rel=1e-6)
    assert distance(gradient, jax.tree.map(np.add, pair_gradient, token_gradient)) <= 1e-5
    assert distance(gradient, token_gradient) > 0.05  # neither hides behind the other
    assert distance(gradient, pair_gradient) > 0.05


def test_the_pair_loss_pulls_the_head_and_the_layers_under_it():
    _, _, gradient = in_rows_of_one_pair()["BradleyTerry"]
    assert np.abs(gradient.heads[REWARD]).max() > 1e-3 and np.abs(gradient.params["layers"]["down"][0]).max() > 1e-4
    assert not in_rows_of_one_pair()["pairs"][2].heads[REWARD].any()  # which reads no score


@pytest.mark.parametrize("layout", ["packed, micro-batches", "data, fsdp"])
def test_a_score_is_read_at_the_last_token_of_a_sequence_among_others(layout):
    mesh_shape, config = LAYOUTS[layout]
    mesh, rows, cfg = (
        make_mesh(mesh_shape, jax.devices()[: np.prod(mesh_shape.sizes(8))]),
        stored(),
        model_config("float32"),
    )
    with jax.set_mesh(mesh):
        packing = planned(rows, config, row_shards(mesh))
        assert (packing.sequence < N).sum(-1).max() > 2  # rows hold more than a pair

        @jax.jit
        def scores(weights, rows, packing):
            packed = pack_tokens(rows.tokens, rows.action_mask, packing, jnp.float32(1))
            return learner.sequence_scores(weights, packed, model=MODEL, cfg=cfg)

        actual = scores(placed(drawn("float32", 3), cfg, mesh), place_rows(rows, mesh), place_plan(packing, mesh))
    there = packing.sequence < N
    by_sequence = np.full(N, np.nan)
    by_sequence[packing.sequence[there]] = np.asarray(actual)[there]
    real = rows.length > 0
    np.testing.assert_allclose(by_sequence[real], alone("float32", 3)[1][real], rtol=0, atol=1e-5)
    assert np.isnan(by_sequence[~real]).all()


def test_the_mean_score_of_roles_weighs_the_outputs_of_each_as_the_run_does():
    _, config = LAYOUTS["packed, micro-batches"]
    mesh, rows, cfg = make_mesh(MeshShape(), jax.devices()[:1]), stored(), model_config("float32")
    packing = planned(rows, config, 1)

    @jax.jit
    def scores(weights, rows, packing):
        packed = pack_tokens(rows.tokens, rows.action_mask, packing, jnp.float32(1))
        head = weights.heads[REWARD]
        roles = {
            "one": weights,
            "three": weights._replace(heads={REWARD: jnp.concatenate([head, 2 * head, -head], -1)}),
        }
        given = dict(model=MODEL, cfg=cfg)
        mean = lambda **of: learner.mean_scores(roles, packed, attribute_weights=of, **given)
        alone = learner.sequence_scores(weights, packed, **given)
        return alone, mean(one=None, three=None), mean(one=None, three=(1.0, 0.5, -2.0)), mean(three=(1.0, 0.5, -2.0))

    with jax.set_mesh(mesh):
        placed_rows = place_rows(rows, mesh), place_plan(packing, mesh)
        found = scores(placed(drawn("float32", 3), cfg, mesh), *placed_rows)
    alone, plain, weighed, of_three = (np.asarray(x)[packing.sequence < N] for x in found)
    assert np.abs(alone).max() > 0.1
    np.testing.assert_allclose(plain, alone * (1 + 2 / 3) / 2, rtol=1e-5, atol=1e-6)  # (1 + 2 - 1) / 3
    np.testing.assert_allclose(of_three, alone * 4, rtol=1e-5, atol=1e-6)  # 1 + 0.5 * 2 + 2
    np.testing.assert_allclose(weighed, alone * 2.5, rtol=1e-5, atol=1e-6)  # (1 + 4) / 2


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
def test_by_place_is_what_numpy_picks(shards, dtype):
    mesh = make_mesh(MeshShape(data=shards), jax.devices()[:shards])
    packing = planned(stored(), Learner(row_length=40, micro_batch_tokens=40 * shards), shards)
    x = np.random.default_rng(1).integers(-3, 4, N).astype(dtype)
    with jax.set_mesh(mesh):
        actual = jax.jit(by_place)(jax.device_put(x, replicated(mesh)), place_plan(packing, mesh).sequence)
    np.testing.assert_array_equal(actual, np.append(x, np.zeros(1, dtype))[packing.sequence])
    assert actual.dtype == x.dtype


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_the_packer_never_cuts_a_pair(shards, minibatches):
    width, pairs = 9, 16
    for seed in range(40):
        rng = np.random.default_rng(seed)
        config = Learner(
            row_length=int(rng.integers(2 * width, 6 * width)), sequences_per_row=int(rng.integers(2, 9)),
            micro_batch_tokens=int(rng.integers(1, 400)), minibatches=minibatches,
        )  # fmt: skip
        shape = packed_shape(config, 2 * pairs, width, shards, unit=2)
        # The longest of all, or any; some pairs are padding.
        lengths = np.full(2 * pairs, width) if seed % 4 == 0 else rng.integers(1, width + 1, 2 * pairs)
        lengths = lengths * (rng.random(pairs) < 0.9).repeat(2)
        taken, members = np.zeros((2 * pairs, width), int), np.zeros(2 * pairs, int)
        for k in range(minibatches):
            packing = plan(lengths, shape, k, minibatches)
            assert packing.num_real <= shape.micro_batches
            members += packing.member
            rows_of_shard = shape.rows // shards
            for micro, row in np.ndindex(shape.micro_batches, shape.rows):
                here = packing.sequence[micro, row]
                here = here[here < 2 * pairs]
                assert np.array_equal(here ^ 1, here.reshape(-1, 2)[:, ::-1].reshape(-1))  # a pair side by side
                assert len(here) <= shape.places and (lengths[here] > 0).all()
                assert micro < packing.num_real or not len(here)
                source, segment = packing.source[micro, row], packing.segment[micro, row]
                for t in np.flatnonzero(source >= 0):
                    sequence = row // rows_of_shard * (2 * pairs // shards) + source[t] // width
                    assert packing.sequence[micro, row, segment[t]] == sequence
                    taken[sequence, source[t] % width] += 1
        np.testing.assert_array_equal(taken, np.arange(width) < lengths[:, None])
        np.testing.assert_array_equal(members, lengths > 0)


def test_rows_that_hold_no_pair_are_refused():
    with pytest.raises(ValueError, match="row_length=23 is shorter than the longest comparison of 2 sequences, 24"):
        packed_shape(Learner(row_length=23), N, T, 1, unit=2)
    with pytest.raises(ValueError, match="sequences_per_row=1 holds no comparison of 2 sequences"):
        packed_shape(Learner(sequences_per_row=1), N, T, 1, unit=2)
    with pytest.raises(ValueError, match="8 comparisons a step do not divide into 8 batch shards x 2 minibatches"):
        packed_shape(Learner(minibatches=2), N, T, 8, unit=2)


@pytest.mark.parametrize("name", ["BradleyTerry", "KTO", "WPO"])
def test_faults_are_looked_for_in_what_losses_of_sequences_read(name, mesh):
    rows, cfg, objective = stored(), model_config("float32"), OBJECTIVES[name]
    hyper, zero = jax.tree.map(jnp.float32, objective.config()), jnp.int32(0)
    policy, reference = (jax.tree.map(jnp.asarray, drawn("float32", seed)) for seed in (3, 4))
    role = ModelState(params=policy.params, frozen=None, heads=policy.heads, opt_state=None, version=zero)
    state = TrainState(step=zero, models={"policy": role}, objective=(), key=jax.random.key(0), skipped=zero)
    packing, static = planned(rows, Learner(row_length=40), 1), dict(model=MODEL, cfg=cfg, chunk=16)

    @jax.jit
    def batch_of(rows, packing):
        packed = pack_tokens(rows.tokens, rows.action_mask, packing, jnp.float32(1))
        before = {"ref_logprobs": reference, "old_logprobs": policy}
        recomputed = Recomputed(**{field: learner.logprobs(of, packed, **static) for field, of in before.items()})
        judged = dict(objective=objective, max_completion=T)
        return finish_stored(packed, recomputed, packing, rows.labels, hyper, **judged)

    batch = batch_of(jax.tree.map(jnp.asarray, rows), packing)
    given = dict(role="policy", objective=objective, **static)
    assert find_fault(state, batch, hyper, **given) is None
    wide = {**policy.params, "layers": jax.tree.map(lambda x: x * 1e25, policy.params["layers"])}
    fault = find_fault(state.replace(models={"policy": role.replace(params=wide)}), batch, hyper, **given)
    assert fault.place == "activations"


def test_an_update_on_pairs_trains_its_own_role_and_tells_of_pairs(mesh):
    rows, cfg, objective = stored(), model_config("float32"), ALGOS["BradleyTerry"]
    hyper, adamw = jax.tree.map(jnp.float32, (objective.config(), AdamW(learning_rate=1e-2)))
    own, zero = jax.tree.map(jnp.asarray, drawn("float32", 3)), jnp.int32(0)
    opt_state = begin(ADAMW, adamw, own, Weights(*describe(MODEL.spec(cfg), own.heads)))
    reward = ModelState(params=own.params, frozen=None, heads=own.heads, opt_state=opt_state, version=zero)
    policy = ModelState(params=own.params, frozen=None, heads={}, opt_state=None, version=zero)
    state = TrainState(
        step=zero, models={"policy": policy, "reward": reward}, objective=(), key=jax.random.key(0), skipped=zero
    )
    packing = planned(rows, Learner(row_length=40), 1)
    static = dict(objective=objective, model=MODEL, cfg=cfg, chunk=16)

    @jax.jit
    def update(state, rows, packing):
        packed = pack_tokens(rows.tokens, rows.action_mask, packing, jnp.float32(1))
        judged = dict(objective=objective, max_completion=T)
        batch = finish_stored(packed, Recomputed(), packing, rows.labels, hyper, **judged)
        return learner.update(state, batch, hyper, adamw, optimizer_row=ADAMW, role="reward", **static)

    after, metrics = update(state, jax.tree.map(jnp.asarray, rows), packing)
    scores = alone("float32", 3)[1][: -2 * PAD_PAIRS].reshape(-1, 2)
    preferred = rows.labels.label[: -2 * PAD_PAIRS].reshape(-1, 2) > 0.5
    margin = scores[preferred] - scores[~preferred]  # row by row: one of each pair
    assert float(metrics["reward_model/accuracy"]) == pytest.approx((margin > 0).mean(), rel=1e-6)
    assert float(metrics["reward_model/margin"]) == pytest.approx(margin.mean(), abs=1e-5)
    assert float(metrics["loss"]) == pytest.approx(expected()["BradleyTerry"], rel=1e-5)
    assert int(metrics["update/tokens"]) == rows.action_mask.sum() and int(after.skipped) == 0
    same = lambda a, b: all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))
    assert same(after.models["policy"], state.models["policy"])
    assert not same(after.models["reward"].heads, own.heads) and not same(after.models["reward"].params, own.params)
