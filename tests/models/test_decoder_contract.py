"""What every model must hold: causality, one answer whether cached, packed or padded."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_params import drawn_params

from jrl.models.contract import abstract, num_params, unrolled, unstack_cache
from jrl.models.decoder import MODEL
from jrl.models.shape import Decoder
from jrl.ops.logprobs import token_logprobs

CFG = Decoder(vocab_size=48, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=32)
TOKENS = np.random.default_rng(0).integers(0, 48, (3, 10)).astype(np.int32)
ALL = np.ones(TOKENS.shape, bool)
POSITIONS = np.broadcast_to(np.arange(10, dtype=np.int32), TOKENS.shape)


@functools.cache
def params(cfg=CFG):
    return drawn_params(MODEL.spec(cfg))


@functools.partial(jax.jit, static_argnums=3)
def forward(weights, tokens, positions, cfg, segment=None, cache=None):
    return MODEL.forward(weights, tokens, positions, segment, cfg, cache)


def logits(tokens=TOKENS, positions=POSITIONS, segment=None, cfg=CFG):
    hidden, _ = forward(params(cfg), tokens, positions, cfg, segment)
    return MODEL.unembed(params(cfg), hidden, cfg)


def test_a_position_does_not_depend_on_later_tokens():
    """The gradient of position t's logits with respect to later embeddings is zero, to earlier ones it is not."""
    table = params()["embed"]

    def at(offset, position):
        hidden, _ = MODEL.forward({**params(), "embed": table + offset}, ids, POSITIONS[:1], None, CFG)
        return hidden[0, position].sum()

    ids = np.arange(10, dtype=np.int32)[None]  # every position has a token, so an embedding row, of its own
    moved = jax.jit(jax.grad(at), static_argnums=1)(jnp.zeros_like(table), 4)
    assert (np.abs(moved[:5]).sum(axis=1) > 0).all()
    np.testing.assert_array_equal(moved[5:10], 0)


def test_layers_that_are_alike_are_traced_once_though_a_program_computes_them_one_by_one():
    cfg = dataclasses.replace(CFG, layers=6, window=4, window_layers=(True, True, False))
    weights = MODEL.unstack(params(cfg), cfg)
    traced = jax.make_jaxpr(lambda weights: MODEL.forward(weights, TOKENS, POSITIONS, None, cfg)[0])(weights)
    layers = [eqn.params["jaxpr"] for eqn in traced.eqns if eqn.params.get("name") == "_layer"]
    assert len(layers) == 6 and len(set(map(id, layers))) == 2


@pytest.mark.parametrize("layers", ["scanned", "unrolled"])
def test_prefill_and_decode_equal_one_full_forward(layers):
    weights = params() if layers == "scanned" else MODEL.unstack(params(), CFG)
    cache = MODEL.init_cache(CFG, 3, 10)
    if layers == "unrolled":
        cache = unstack_cache(cache)
    actual = []
    for start, stop in [(0, 4), *((t, t + 1) for t in range(4, 10))]:
        hidden, cache = forward(weights, TOKENS[:, start:stop], POSITIONS[:, start:stop], CFG, cache=cache)
        actual.append(MODEL.unembed(weights, hidden, CFG))
    expected = logits()
    np.testing.assert_allclose(jnp.concatenate(actual, 1), expected, atol=2e-6 * max(1, np.abs(expected).max()))


def test_packed_sequences_see_only_themselves():
    # Rows 0 and 1, cut to 6 and 4 tokens, in one row of 10.
    tokens = np.concatenate([TOKENS[0, :6], TOKENS[1, :4]])[None]
    positions = np.concatenate([np.arange(6), np.arange(4)])[None].astype(np.int32)
    segment = np.array([[0] * 6 + [1] * 4], np.int32)
    packed = logits(tokens, positions, segment)[0]
    np.testing.assert_allclose(packed[:6], logits()[0, :6], atol=1e-5)
    np.testing.assert_allclose(packed[6:], logits()[1, :4], atol=1e-5)


@pytest.mark.parametrize("layers", ["scanned", "unrolled"])
def test_a_decode_loop_holds_its_cache_once(layers):
    cfg = dataclasses.replace(CFG, layers=4)
    rows, columns = 4, 4096

    def decode(params):
        cache = MODEL.init_cache(cfg, rows, columns)
        if layers == "unrolled":
            params, cache = MODEL.unstack(params, cfg), unstack_cache(cache)

        def step(at):
            i, cache = at
            token = jnp.zeros((rows, 1), jnp.int32)
            hidden, cache = MODEL.forward(params, token, jnp.broadcast_to(i, token.shape), None, cfg, cache)
            return i + 1 + (0 * hidden.sum()).astype(jnp.int32), cache

        cache = jax.lax.while_loop(lambda at: at[0] < 9, step, (jnp.int32(0), cache))[1]
        return jax.tree.leaves(cache)[0].sum()

    compiled = jax.jit(decode).lower(abstract(MODEL.spec(cfg))).compile()
    cache_bytes = 2 * 4 * rows * columns * 2 * 4 * 4  # k and v, layers, rows, columns, heads of 4, float32
    # A second cache would be 2; one layer at work is a quarter.
    assert compiled.memory_analysis().temp_size_in_bytes < 1.6 * cache_bytes


def test_parameters_are_counted():
    # embed 48*16; a layer: q 16*16, k and v 16*8, o 16*16, MLP 3*16*32, norms 16+16+4+4; final norm 16.
    layer = 256 + 128 + 128 + 256 + 3 * 512 + 40
    assert num_params(MODEL.spec(CFG)) == 48 * 16 + 2 * layer + 16


@pytest.mark.parametrize("chunk", [1, 3, 10, 64])
def test_chunked_logprobs_equal_a_log_softmax_of_all_logits(chunk):
    hidden, _ = forward(params(), TOKENS, POSITIONS, CFG)
    actual, entropy = token_logprobs(
        hidden, TOKENS, ALL, lambda h: MODEL.unembed(params(), h, CFG), temperature=jnp.float32(0.7), chunk=chunk
    )
    log_probs = jax.nn.log_softmax(logits() / 0.7)
    expected = jnp.take_along_axis(log_probs[:, :-1], TOKENS[:, 1:, None], axis=2)[..., 0]
    np.testing.assert_allclose(actual[:, 1:], expected, atol=1e-5)
    np.testing.assert_allclose(entropy[:, 1:], -(jnp.exp(log_probs) * log_probs).sum(-1)[:, :-1], atol=1e-5)


def test_the_gradient_of_chunked_logprobs_is_that_of_all_logits():
    def chunked(h):
        values, _ = token_logprobs(
            h, TOKENS, ALL, lambda x: MODEL.unembed(params(), x, CFG), temperature=jnp.float32(1), chunk=4
        )
        return values[:, 1:].sum()

    def of_all_logits(h):
        log_probs = jax.nn.log_softmax(MODEL.unembed(params(), h, CFG))
        return jnp.take_along_axis(log_probs[:, :-1], TOKENS[:, 1:, None], axis=2).sum()

    hidden, _ = forward(params(), TOKENS, POSITIONS, CFG)
    np.testing.assert_allclose(jax.grad(chunked)(hidden), jax.grad(of_all_logits)(hidden), atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 2, 4, 64])
def test_logprobs_are_computed_where_they_are_wanted(chunk):
    mask = np.zeros(TOKENS.shape, bool)
    mask[0, [2, 5, 9]] = mask[2, 4:8] = True  # one row wants nothing, none more than 4: later chunks are skipped
    hidden, _ = forward(params(), TOKENS, POSITIONS, CFG)
    weight = np.random.default_rng(1).normal(size=TOKENS.shape)

    @functools.partial(jax.jit, static_argnames="needed")
    def both(h, needed):
        chosen = jnp.asarray(mask if needed else ALL)
        unembed = lambda x: MODEL.unembed(params(), x, CFG)
        out = token_logprobs(h, TOKENS, chosen, unembed, temperature=jnp.float32(0.7), chunk=chunk)
        return sum((jnp.where(mask, x, 0) * weight).sum() for x in out), out

    (_, some), gradient = jax.value_and_grad(both, has_aux=True)(hidden, True)
    (_, every), expected = jax.value_and_grad(both, has_aux=True)(hidden, False)
    for actual, everywhere in zip(some, every):
        np.testing.assert_allclose(actual, np.where(mask, everywhere, 0), atol=1e-6)
        assert (np.asarray(actual)[~mask] == 0).all()
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    assert np.abs(expected).max() > 0.1


def test_logprobs_of_nothing_are_zero_and_have_no_gradient():
    def total(h):
        unembed = lambda x: MODEL.unembed(params(), x, CFG)
        out = token_logprobs(h, TOKENS, ~ALL, unembed, temperature=jnp.float32(1), chunk=4)
        return sum(x.sum() for x in out)

    value, gradient = jax.value_and_grad(total)(forward(params(), TOKENS, POSITIONS, CFG)[0])
    assert value == 0 and (np.asarray(gradient) == 0).all()


def test_unrolled_layers_compute_what_scanned_layers_do():
    with jax.enable_x64(True):
        cfg = dataclasses.replace(CFG, dtype="float64", param_dtype="float64")

        def loss(p, model):
            return (model.forward(p, TOKENS, POSITIONS, None, cfg)[0] ** 3).mean()

        both = jax.jit(jax.value_and_grad(loss), static_argnums=1)
        scanned, unrolled_ = (both(params(cfg), model) for model in (MODEL, unrolled(MODEL)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), scanned, unrolled_)


def test_heads_that_do_not_share_evenly_are_refused():
    with pytest.raises(ValueError, match="kv_heads must divide heads"):
        Decoder(heads=4, kv_heads=3)
