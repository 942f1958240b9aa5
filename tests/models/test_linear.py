"""Linear attention against its recurrence, a token at a time, in numbers of NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampled import agree_on_every_mesh, agree_on_four_devices

from jrl.device.sharding import TRAIN, MeshShape, make_mesh, shardings
from jrl.models.attention import linear
from jrl.models.attention.linear import Linear
from jrl.models.shape import Decoder

CFG = Linear(key_heads=2, value_heads=4, key_dim=3, value_dim=5, taps=3)
WIDTH, LENGTH, EPS = 8, 9, 1e-6


def layer():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape) for name, (shape, _) in linear.leaves(CFG, WIDTH).items()}


def by_hand(h, w):
    """o [L, D] of one sequence h [L, D]: a token at a time."""
    silu, sigmoid = lambda x: x / (1 + np.exp(-x)), lambda x: 1 / (1 + np.exp(-x))

    def convolved(name):
        x = np.einsum("ld,dhk->lhk", h, w[f"linear_{name}"])
        past = np.concatenate([np.zeros((CFG.taps - 1, *x.shape[1:])), x])
        return silu(sum(past[i : i + len(x)] * w[f"conv_{name}"][..., i] for i in range(CFG.taps)))

    q, k, v = (convolved(name) for name in "qkv")
    unit = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
    query, key = (np.repeat(unit(x), CFG.value_heads // CFG.key_heads, 1) for x in (q, k))
    decay = np.exp(-np.exp(w["linear_decay"]) * np.log1p(np.exp(h @ w["linear_step"] + w["linear_step_bias"])))
    rate = sigmoid(h @ w["linear_beta"])
    state, out = np.zeros((CFG.value_heads, CFG.key_dim, CFG.value_dim)), []
    for t in range(len(h)):
        state = decay[t][:, None, None] * state
        missing = v[t] - np.einsum("hk,hkv->hv", key[t], state)
        state = state + rate[t][:, None, None] * np.einsum("hk,hv->hkv", key[t], missing)
        out.append(np.einsum("hk,hkv->hv", query[t] / np.sqrt(CFG.key_dim), state))
    out = np.stack(out)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + EPS) * w["linear_norm"]
    out = out * silu(np.einsum("ld,dhk->lhk", h, w["linear_gate"]))
    return np.einsum("lhk,hkd->ld", out, w["linear_o"])


@jax.jit
def attend_all(h, w, segment=None):
    return linear.attend(h, w, CFG, EPS, segment=segment, state=None, token_mask=None)[0]


def row_of(bundles):
    """Returns segment [L, 2] of trunks of so many tokens, each with branches of so many behind it: [(5, [3, 4]), ...].
    One without branches is a sequence."""
    segment, place = [], 0
    for trunk, branches in bundles:
        root = place if not branches else 50 + place
        segment += [(root, root)] * trunk
        for length in branches:
            segment += [(place, root)] * length
            place += 1
        place += not branches
    return np.array(segment, np.int32)


def row_by_hand(h, w, bundles):
    """Returns o [L, D] of a row of bundles, each branch computed with its trunk as one sequence."""
    out, at = [], 0
    for trunk, branches in bundles:
        root, at = h[at : at + trunk], at + trunk
        out.append(by_hand(root, w))
        for length in branches:
            branch, at = h[at : at + length], at + length
            out.append(by_hand(np.concatenate([root, branch]), w)[trunk:])
    return np.concatenate(out)


def test_a_row_equals_the_recurrence():
    h, w = np.random.default_rng(1).normal(size=(2, LENGTH, WIDTH)), layer()
    with jax.enable_x64(True):
        np.testing.assert_allclose(attend_all(h, w), np.stack([by_hand(row, w) for row in h]), atol=1e-12)


def test_a_row_shorter_than_the_convolution():
    h, w = np.random.default_rng(1).normal(size=(1, 1, WIDTH)), layer()
    with jax.enable_x64(True):
        np.testing.assert_allclose(attend_all(h, w)[0], by_hand(h[0], w), atol=1e-12)


# Rows of 128 tokens are two chunks of 64, rows of 192 three.
PACKED = ([128], [64, 64], [63, 65], [65, 63], [5, 58, 1, 30, 34], [1, 2, 61, 62, 2], [20, 108])
TREES = (
    [(20, [30, 142])],  # a branch through all of a chunk
    [(20, [130, 42])],  # the next begins with what the trunk left two chunks before
    [(64, [64, 32, 32])],  # ends at borders
    [(63, [65, 64])],
    [(65, [62, 1, 64])],
    [(150, [20, 22])],  # a trunk through chunks
    [(1, [1, 2, 188])],  # shorter than what the convolution sees
    [(10, [5, 7]), (30, []), (40, [20, 30, 2]), (3, [44]), (1, [])],
    [(100, []), (20, [50, 22])],
    [(192, [])],
)


def test_packed_sequences_begin_with_nothing():
    rows, w = [[(length, []) for length in lengths] for lengths in PACKED], layer()
    h = np.random.default_rng(1).normal(size=(len(rows), 128, WIDTH))
    segment = np.stack([row_of(row)[:, 0] for row in rows])
    with jax.enable_x64(True):
        actual = attend_all(h, w, segment)
        expected = np.stack([row_by_hand(h[i], w, row) for i, row in enumerate(rows)])
        np.testing.assert_allclose(actual, expected, atol=1e-12)


def test_branches_begin_with_what_their_trunk_left():
    h, w = np.random.default_rng(1).normal(size=(len(TREES), 192, WIDTH)), layer()
    with jax.enable_x64(True):
        actual = attend_all(h, w, np.stack([row_of(row) for row in TREES]))
        expected = np.stack([row_by_hand(h[i], w, row) for i, row in enumerate(TREES)])
        np.testing.assert_allclose(actual, expected, atol=1e-12)


MIXED = [(40, [20, 30]), (7, []), (23, [10])]  # 130 tokens: chunks of 44, the last filled up with 2


WEIGHED = np.random.default_rng(1).normal(size=(2, 130, WIDTH))


@jax.jit
@jax.value_and_grad
def weighed(args):
    segment = jnp.asarray(np.stack([row_of(MIXED), row_of([(130, [])])]))
    return (attend_all(args["h"], args, segment) * WEIGHED).sum()


@pytest.fixture(scope="module")
def given():
    """Returns (arguments, the loss and its gradients on one device)."""
    args = {**layer(), "h": np.random.default_rng(2).normal(size=(2, 130, WIDTH))}
    with jax.enable_x64(True):
        return args, jax.tree.map(np.asarray, weighed(args))


def test_gradients_are_those_of_the_recurrence(given):
    """Along a random direction of each argument, by a step into the complex plane: exact to rounding."""
    args, (_, actual) = given
    rng = np.random.default_rng(3)
    for name, leaf in args.items():
        direction = rng.normal(size=leaf.shape)
        moved = {**args, name: leaf + 1e-30j * direction}
        rows = row_by_hand(moved["h"][0], moved, MIXED), by_hand(moved["h"][1], moved)
        expected = (rows * WEIGHED).sum().imag / 1e-30
        np.testing.assert_allclose((actual[name] * direction).sum(), expected, rtol=1e-11, err_msg=name)


def test_a_mesh_changes_nothing(given):
    args, expected = given
    mesh = make_mesh(MeshShape(data=2, tensor=2), jax.devices()[:4])
    with jax.enable_x64(True), jax.set_mesh(mesh):
        axes = {name: axes for name, (_, axes) in linear.leaves(CFG, WIDTH).items()}
        spread = jax.device_put(args, shardings({**axes, "h": (None, None, None)}, mesh, TRAIN))
        actual = weighed(spread)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max()), actual, expected)


@jax.jit
def continued(h, w, state, token_mask=None):
    return linear.attend(h, w, CFG, EPS, segment=None, state=state, token_mask=token_mask)


@pytest.mark.parametrize("cuts", [(0, 9), (0, 4, 5, 6, 9), (0, 1, 9)])
def test_the_state_stands_for_the_tokens_before(cuts):
    h, w = np.random.default_rng(1).normal(size=(2, LENGTH, WIDTH)), layer()
    with jax.enable_x64(True):
        state = [jnp.zeros(shape) for shape, _ in linear.state_shapes(CFG, 2).values()]
        actual = []

        for start, stop in itertools.pairwise(cuts):
            out, state = continued(h[:, start:stop], w, state)
            actual.append(out)
        expected = np.stack([by_hand(row, w) for row in h])
        np.testing.assert_allclose(np.concatenate(actual, 1), expected, atol=1e-12)


def test_a_long_prompt_leaves_what_its_tokens_that_count_leave():
    """Of 130 tokens, in chunks of 44, the first 100, 44 or 3 count."""
    rng, w, counts = np.random.default_rng(1), layer(), np.array([100, 44, 3])
    prompts, more = rng.normal(size=(3, 130, WIDTH)), rng.normal(size=(3, 70, WIDTH))
    with jax.enable_x64(True):
        state = [jnp.zeros(shape) for shape, _ in linear.state_shapes(CFG, 3).values()]
        _, state = continued(prompts, w, state, np.arange(130)[None] < counts[:, None])
        actual, _ = continued(more, w, state)
        for i, n in enumerate(counts):
            expected = by_hand(np.concatenate([prompts[i, :n], more[i]]), w)[n:]
            np.testing.assert_allclose(actual[i], expected, atol=1e-12)


def test_a_long_row_in_float32_is_as_exact_as_a_short_one():
    """Sums of g are added up between two tokens; a difference of sums over the whole row would be off by 1e-4, and of
    sums over a chunk by 1e-5."""
    rng, length = np.random.default_rng(1), 600
    h = np.float32(rng.normal(size=(1, length, WIDTH)))
    w = {name: np.float32(leaf) for name, leaf in layer().items()}
    w["linear_step_bias"] = w["linear_step_bias"] + 4  # g is about -5 a token
    actual = attend_all(h, w)[0]
    expected = by_hand(np.float64(h[0]), {name: np.float64(leaf) for name, leaf in w.items()})
    assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("wrong", [dict(value_heads=3), dict(taps=1), dict(layers=(True,))])
def test_shapes_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="Linear"):
        Linear(**dict(key_heads=2, value_heads=4, key_dim=3, value_dim=5) | wrong)


@pytest.mark.parametrize(("layers", "agree"), [("scanned", agree_on_every_mesh), ("unrolled", agree_on_four_devices)])
def test_the_samplers_logprobs_are_a_plain_forwards_on_every_mesh(layers, agree):
    """Prompts of different lengths share a prefill, and their last token is fed again."""
    shape = Linear(key_heads=2, value_heads=4, key_dim=6, value_dim=4, layers=(True, False))
    agree(Decoder(vocab_size=48, layers=3, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=32, linear=shape,
                  output_gate=True), layers)  # fmt: skip
