"""Every option of the decoder: one answer whether cached, packed, scanned or sharded, and its own arithmetic."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_params import drawn_params
from sampled import agree_on_every_mesh

from jrl.device.sharding import TRAIN, MeshShape, batch_axes, make_mesh, shardings
from jrl.models import decoder
from jrl.models.attention.linear import Linear
from jrl.models.contract import PrefixSegments, abstract, axes, unstack_cache
from jrl.models.decoder import MODEL
from jrl.models.experts import Experts
from jrl.models.norm import layer_norm
from jrl.models.rope import ProportionalRope, YarnRope
from jrl.models.shape import Decoder, FullHeads, check_divides

CFG = Decoder(vocab_size=48, layers=3, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=32)
# Every option, in the combinations that published decoders have and a few that they do not: what one of these computes
# exactly is compared with transformers in tests/families.
OPTIONS = {
    "neox, gpt2": dict(norm="layer", qk_norm=None, qkv_bias=True, output_bias=True, mlp="plain", mlp_bias=True,
                       activation="gelu", learned_positions=24, rotary_dim=2, parallel=True, tied=False),
    "gemma": dict(norm="rms_plus_one", norm_place="both", activation="gelu_tanh", embed_scale=4.0, query_scale=0.3,
                  attention_cap=5.0, logit_cap=3.0, window=3, window_layers=(True, True, False),
                  window_rope_theta=100.0, rope=YarnRope(factor=2, original_length=8)),
    "olmo, nope": dict(norm_place="after", qk_norm="all", rotary_layers=(True, False), window=4, mlp_bias=True,
                       activation="relu"),
    "gpt-oss, some layers sparse": dict(
        experts=Experts(count=4, per_token=2, width=8, bias=True, clamp=0.8, softmax="all", layers=(True, False)),
        sinks=True, qk_norm=None, qkv_bias=True, output_bias=True, window=4, window_layers=(True, True, False),
        norm_place="both"),
    "gemma4": dict(layers=4, window=4, window_layers=(True, False), window_rope_theta=100.0, layer_inputs=4,
                   rope=ProportionalRope(share=0.5), full=FullHeads(head_dim=8, kv_heads=2), shared_layers=2,
                   shared_mlp_width=40, value_norm=True, layer_scale=True, query_scale=1.0, norm_place="both"),
    "gemma4 with experts": dict(
        layers=3, window=4, window_layers=(True, False), full=FullHeads(head_dim=6, kv_heads=4, keys_are_values=True),
        value_norm=True, query_scale=1.0, norm_place="both", shared_layers=1, shared_mlp_width=40, layer_scale=True,
        experts=Experts(count=4, per_token=2, width=8, reads="stream", scaled=True, shared_expert="normed")),
    "qwen3.5 with experts": dict(
        layers=2, linear=Linear(key_heads=2, value_heads=4, key_dim=6, value_dim=4, layers=(True, False)),
        output_gate=True, norm="rms_plus_one", rotary_dim=2,
        experts=Experts(count=4, per_token=2, width=8, shared_expert="gated")),
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 48, (4, 12)).astype(np.int32)
POSITIONS = np.broadcast_to(np.arange(12, dtype=np.int32), TOKENS.shape)


@functools.cache
def option_model(name):
    """Returns (config, parameters), every parameter random: norms and biases too."""
    cfg = dataclasses.replace(CFG, **OPTIONS[name])

    def random(path, s):
        draw = np.random.default_rng([len(path), *s.shape]).normal(size=s.shape).astype(np.float32) * np.float32(0.3)
        return jnp.asarray(1 + np.float32(0.3) * draw if path[-1].key == "layer_scale" else draw)

    return cfg, jax.tree_util.tree_map_with_path(random, abstract(MODEL.spec(cfg)))


@functools.partial(jax.jit, static_argnums=4)
def run(params, tokens, positions, segment, cfg):
    hidden, _ = MODEL.forward(params, tokens, positions, segment, cfg)
    return MODEL.unembed(params, hidden, cfg)


@functools.cache
def fresh(cfg):
    return drawn_params(MODEL.spec(cfg))


def logits(name, tokens=TOKENS, positions=POSITIONS, segment=None):
    cfg, params = option_model(name)
    return run(params, tokens, positions, segment, cfg)


@functools.partial(jax.jit, static_argnames=("cfg", "layers"))
def gradient(params, tokens, positions, cfg, layers="scanned"):
    """Returns the sum of squared logits, and its gradient."""

    def loss(params):
        params = MODEL.unstack(params, cfg) if layers == "unrolled" else params
        hidden, _ = MODEL.forward(params, tokens, positions, None, cfg)
        return (MODEL.unembed(params, hidden, cfg) ** 2).sum()

    return jax.value_and_grad(loss)(params)


@functools.cache
def expected_gradient(name):
    cfg, params = option_model(name)
    return gradient(params, TOKENS, POSITIONS, cfg)


def close_gradients(actual, expected):
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(actual[1]), jax.tree.leaves(expected[1])):
        assert np.linalg.norm(a - b) <= 1e-5 * max(1, np.linalg.norm(b))


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * max(1, np.abs(expected).max()))


# Every option with scanned layers. Unrolled those whose layers differ in more than a window: what is unrolled then is
# another program.
UNROLLED = ("neox, gpt2", "gpt-oss, some layers sparse", "gemma4", "qwen3.5 with experts")


@pytest.mark.parametrize(
    "name, layers", [*((name, "scanned") for name in OPTIONS), *((name, "unrolled") for name in UNROLLED)]
)
def test_prefill_and_decode_equal_one_full_forward(name, layers):
    cfg, params = option_model(name)

    @jax.jit
    def prefill_and_decode(params):
        cache = MODEL.init_cache(cfg, 4, 12)
        hidden, cache = MODEL.forward(params, TOKENS[:, :7], POSITIONS[:, :7], None, cfg, cache)
        actual = [MODEL.unembed(params, hidden, cfg)]
        if layers == "unrolled":
            params = MODEL.unstack(params, cfg)
            cache = unstack_cache(cache)

        def step(cache, column):
            token, position = column
            hidden, cache = MODEL.forward(params, token[:, None], position[:, None], None, cfg, cache)
            return cache, MODEL.unembed(params, hidden, cfg)[:, 0]

        _, rest = jax.lax.scan(step, cache, (TOKENS[:, 7:].T, POSITIONS[:, 7:].T))
        return jnp.concatenate([*actual, rest.swapaxes(0, 1)], 1)

    close(prefill_and_decode(params), logits(name))


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_equals_separate(name):
    # Row 0: 7 and 5 tokens of two rows. The others are one sequence each, as given.
    tokens, positions, segment = TOKENS.copy(), POSITIONS.copy(), np.zeros(TOKENS.shape, np.int32)
    tokens[0, 7:], positions[0, 7:], segment[0, 7:] = TOKENS[1, :5], np.arange(5), 1
    packed, separate = logits(name, tokens, positions, segment), logits(name)
    close(packed[0, :7], separate[0, :7])
    close(packed[0, 7:], separate[1, :5])
    close(packed[1:], separate[1:])


@pytest.mark.parametrize("name", ["gemma4", "qwen3.5 with experts"])
def test_a_trunk_that_branches_share_equals_separate(name):
    # Rows 0 and 1 begin with the same 5 tokens; row 0 has 4 more and row 1 has 2. See pack.py.
    prefix, a, b = TOKENS[0, :5], TOKENS[0, 5:9], TOKENS[1, 5:7]
    tokens = np.concatenate([prefix, a, b, [0]])[None]
    positions = np.concatenate([np.arange(9), np.arange(5, 7), [0]])[None].astype(np.int32)
    sequence, other = [[9] * 5 + [0] * 4 + [1] * 2 + [8]], [[9] * 11 + [8]]
    actual = logits(name, tokens, positions, np.stack([sequence, other], -1).astype(np.int32))[0]
    alone = TOKENS.copy()
    alone[1, :5] = prefix  # what comes later in a row does not matter
    close(actual[:9], logits(name, alone)[0, :9])
    close(actual[9:11], logits(name, alone)[1, 5:7])


def test_a_state_counts_the_tokens_it_is_told_to():
    # Prompts of 7, 5 and 1 tokens in rows of 7; the last one of each is given again, as the sampler does.
    cfg, params = option_model("qwen3.5 with experts")
    length = np.array([7, 5, 1, 0])

    @jax.jit
    def run(params):
        cache = MODEL.init_cache(cfg, 4, 12)
        later = (np.arange(7) >= length[:, None] - 1).astype(np.int32)
        _, cache = MODEL.forward(params, TOKENS[:, :7], POSITIONS[:, :7], later, cfg, cache)
        last = np.maximum(length - 1, 0)[:, None]
        hidden, _ = MODEL.forward(params, np.take_along_axis(TOKENS, last, 1), last, None, cfg, cache)
        return MODEL.unembed(params, hidden, cfg)[:, 0]

    actual = run(params)
    for i, n in enumerate(length[:3]):
        close(actual[i], logits("qwen3.5 with experts")[i, n - 1])


@pytest.mark.parametrize(
    "name", ["neox, gpt2", "gemma", "olmo, nope", "gemma4", "gemma4 with experts", "qwen3.5 with experts"]
)
def test_a_mesh_computes_the_same_loss_and_gradient(name):
    cfg, params = option_model(name)
    mesh = make_mesh(MeshShape(fsdp=2, tensor=2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        spread = jax.device_put(params, shardings(axes(MODEL.spec(cfg)), mesh, TRAIN))
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(batch_axes(mesh.shape)))
        actual = gradient(spread, *jax.device_put((TOKENS, np.array(POSITIONS)), rows), cfg)
    close_gradients(actual, expected_gradient(name))


def test_sampling_with_shared_keys_is_a_plain_forward_on_every_mesh():
    shape = dict(window=4, window_layers=(True, False), shared_layers=2, full=FullHeads(head_dim=8, kv_heads=2))
    agree_on_every_mesh(dataclasses.replace(CFG, layers=4, layer_inputs=4, **shape), "unrolled")


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("gemma", "scanned"),
        ("olmo, nope", "unrolled"),
        ("gemma4", "scanned"),
        ("qwen3.5 with experts", "scanned"),
    ],
)
def test_what_is_computed_again_has_the_same_gradient(name, layers):
    cfg, params = option_model(name)
    saving = dataclasses.replace(cfg, remat="layer", attention_block=5)
    close_gradients(gradient(params, TOKENS, POSITIONS, saving, layers), expected_gradient(name))


@pytest.mark.parametrize("name", ["neox, gpt2", "gemma"])  # every bias, both kinds of norm
def test_fresh_norms_and_biases_change_nothing(name):
    cfg, _ = option_model(name)
    params = fresh(cfg)
    for leaf, value in {**params["layers"], **params}.items():
        if leaf.endswith("bias"):
            np.testing.assert_array_equal(value, 0)
        elif leaf.endswith("norm"):
            np.testing.assert_array_equal(value, 0 if cfg.norm == "rms_plus_one" else 1)


def test_a_window_of_one_sees_itself_alone():
    # Every layer looks at its own token only, so that the order of the others cannot matter.
    cfg = dataclasses.replace(CFG, window=1)
    params = fresh(cfg)
    at = lambda tokens: run(params, tokens, POSITIONS[:1], None, cfg)[0, -1]
    other = TOKENS[:1].copy()
    other[0, :-1] = other[0, :-1][::-1]
    np.testing.assert_array_equal(at(TOKENS[:1]), at(other))
    without_window = dataclasses.replace(cfg, window=None)
    actual = run(params, TOKENS[:1], POSITIONS[:1], None, without_window)[0, -1]
    assert np.abs(actual - at(TOKENS[:1])).max() > 1e-3


def test_a_block_of_queries_at_a_time_on_a_mesh():
    cfg, params = option_model("gemma")
    mesh = make_mesh(MeshShape(fsdp=2, tensor=2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        spread = jax.device_put(params, shardings(axes(MODEL.spec(cfg)), mesh, TRAIN))
        actual = run(spread, TOKENS, POSITIONS, None, dataclasses.replace(cfg, attention_block=5))
    close(np.asarray(actual), np.asarray(logits("gemma")))


def test_no_array_has_the_scores_of_more_than_a_block():
    cfg, params = dataclasses.replace(CFG, attention_block=4), fresh(CFG)
    loss = lambda params: (run(params, TOKENS, POSITIONS, None, cfg) ** 2).sum()
    text = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
    # Scores are [4 rows, 2 key heads, 2 of each, queries, 12 keys], in any order of the first.
    widths = {dims for dims in re.findall(r"f32\[([\d,]+),12\]", text) if dims.startswith(("4,2,2", "3,4,2,2"))}
    assert {"4,2,2,4"} <= widths and not any(dims.endswith(",12") for dims in widths)


def test_without_rotation_the_order_of_earlier_tokens_does_not_matter():
    cfg = dataclasses.replace(CFG, rotary_layers=(False,), layers=1)
    params = fresh(cfg)
    at = lambda tokens: run(params, tokens, POSITIONS[:1], None, cfg)[0, -1]
    other = TOKENS[:1].copy()
    other[0, :-1] = other[0, :-1][::-1]
    np.testing.assert_allclose(at(TOKENS[:1]), at(other), atol=1e-6)


def test_layer_norm_by_hand():
    # [1, 3]: mean 2, variance 1; (-1, 1) * (2, 3) + (1, 1) = (-1, 4).
    actual = layer_norm(jnp.array([[1.0, 3.0]]), jnp.array([2.0, 3.0]), jnp.array([1.0, 1.0]), 0.0)
    np.testing.assert_allclose(actual, [[-1, 4]], atol=1e-6)


def test_caps_bound_logits():
    cfg = dataclasses.replace(CFG, logit_cap=0.01)
    params = fresh(cfg)
    plain = run(params, TOKENS, POSITIONS, None, CFG)
    np.testing.assert_allclose(run(params, TOKENS, POSITIONS, None, cfg), 0.01 * np.tanh(plain / 0.01), rtol=1e-4)


@pytest.mark.parametrize(
    "wrong", [dict(rotary_dim=3), dict(rotary_dim=6), dict(window=0), dict(rotary_layers=()), dict(window_layers=())]
)
def test_options_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(CFG, **wrong)


@pytest.mark.parametrize("wrong, message", [
    (dict(shared_layers=1, shared_mlp_width=40, mlp="plain"), "shared_mlp_width needs mlp='gated'"),
    (dict(shared_layers=1, shared_mlp_width=40, mlp_bias=True), "shared_mlp_width needs mlp='gated'"),
    (dict(window=4, qkv_bias=True, full=FullHeads(head_dim=4, kv_heads=2, keys_are_values=True)),
     "keys_are_values cannot be combined with Decoder.qkv_bias"),
    (dict(norm="layer", experts=Experts(count=2, per_token=1, width=8, shared_expert="normed")),
     "shared_expert='normed' cannot be combined with norm="),
    (dict(linear=Linear(key_heads=2, value_heads=2, key_dim=4, value_dim=4), shared_layers=1),
     "Decoder.linear cannot be combined with full or shared_layers"),
])  # fmt: skip
def test_options_that_do_not_go_together_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CFG, **wrong)


@pytest.mark.parametrize("options, shape, message", [
    (dict(width=18), dict(tensor=4), "Decoder.width = 18 does not divide over MeshShape.tensor = 4"),
    (dict(shared_layers=1, shared_mlp_width=18), dict(tensor=4), r"Decoder.shared_mlp_width = 18 .*tensor = 4"),
    (dict(layer_inputs=3), dict(fsdp=2), r"Decoder.layers \* layer_inputs = 9 .* MeshShape.fsdp = 2"),
    (dict(layer_inputs=3), dict(tensor=2), r"Decoder.layers \* layer_inputs = 9 .* MeshShape.tensor = 2"),
])  # fmt: skip
def test_a_mesh_that_does_not_divide_is_refused_by_name(options, shape, message):
    cfg = dataclasses.replace(CFG, kv_heads=4, **options)
    check_divides(cfg, make_mesh(MeshShape(), jax.devices()[:1]))
    with pytest.raises(ValueError, match=message):
        check_divides(cfg, make_mesh(MeshShape(**shape), jax.devices()[:4]))


def test_gates_of_full_layers_are_cast_for_decoding():
    cfg = dataclasses.replace(CFG, output_gate=True, window=4, window_layers=(True, False), dtype="bfloat16",
                              full=FullHeads(head_dim=8, kv_heads=2))  # fmt: skip
    ready = jax.eval_shape(lambda: MODEL.prepare_for_decode(drawn_params(MODEL.spec(cfg)), cfg)[0])
    assert ready["layers"]["full_q_gate"].dtype == ready["layers"]["full_q"].dtype == jnp.bfloat16


CROSS_ROW = {"windows, shared": dict(window=4, window_layers=(True, False), shared_layers=2, layers=4),
         "blocks": dict(attention_block=3), "sinks": dict(attention_cap=5.0, sinks=True)}  # fmt: skip


@pytest.mark.parametrize("params_of", [lambda params, cfg: params, decoder.unstack], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("name", CROSS_ROW)
def test_continuations_see_a_prefix_in_another_row(name, params_of):
    cfg = dataclasses.replace(CFG, **CROSS_ROW[name])
    params = fresh(cfg)
    rng = np.random.default_rng(0)
    prefix, one, two, three = (rng.integers(0, cfg.vocab_size, n).astype(np.int32) for n in (5, 6, 3, 2))

    @jax.jit
    def logits(params, tokens, positions, segment):
        hidden, _ = decoder.forward(params_of(params, cfg), tokens, positions, segment, cfg)
        return decoder.unembed(params, hidden, cfg)

    # Row 0: something else. Row 1: the prefix and a continuation of 3. Row 2: continuations of 6 and 2 that see row 1.
    tokens = np.stack([np.zeros(8, np.int32), np.concatenate([prefix, two]), np.concatenate([one, three])])
    positions = np.array([[*range(8)], [*range(8)], [5, 6, 7, 8, 9, 10, 5, 6]], np.int32)
    segment = np.array([[0] * 8, [9] * 5 + [0] * 3, [0] * 6 + [1] * 2], np.int32)
    prefix_row = np.array([[-1] * 6, [1] * 5 + [-1], [1] * 5 + [-1]], np.int32)  # five of six columns are seen
    actual = logits(params, tokens, positions, PrefixSegments(segment, segment < 9, prefix_row))
    # Each alone in a row, filled up with what comes later and so does not matter.
    rows = [tokens[0], *(np.concatenate([prefix, continuation]) for continuation in (two, one, three))]
    alone = np.stack([np.pad(row, (0, 11 - len(row))) for row in rows])
    other, two, one, three = logits(params, alone, np.tile(np.arange(11, dtype=np.int32), (4, 1)), None)
    expected = [
        (actual[0], other[:8]),
        (actual[1, 5:], two[5:8]),
        (actual[2, :6], one[5:]),
        (actual[2, 6:], three[5:7]),
    ]
    for got, expected_logits in expected:
        np.testing.assert_allclose(got, expected_logits, atol=3e-6 * max(1, np.abs(actual).max()))
