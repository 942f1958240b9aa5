"""IFT by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from small_batches import loss_of, tokens
from small_model import BIGRAM, PARTS
from test_pair_objectives import FACTS

from jrl.algos.contract import Needs
from jrl.algos.ift import IFT, OBJECTIVE
from jrl.config import ConfigError
from jrl.device.sharding import TRAIN, MeshShape, batch_sharding, make_mesh, row_axes, shardings
from jrl.learning.learner import Weights, model_outputs
from jrl.models.contract import MixedTokens, axes, init
from jrl.models.decoder import MODEL
from jrl.models.shape import Decoder
from jrl.ops.logprobs import likeliest_tokens
from jrl.resolve import load_config
from jrl.types import PackedBatch

CFG = Decoder(vocab_size=6, layers=1, width=8, heads=2, kv_heads=1, head_dim=4, mlp_width=8)


def test_a_token_counts_by_the_loss_that_follows_from_it():
    batch = tokens([-1.0, -2.0, -3.0], [0.0] * 3, [0.0] * 3, segment=[0, 0, 1])
    loss, _, gradient = loss_of(OBJECTIVE, IFT(), batch)
    # weights 2 * 1.45 / 2.45 and 2 * 1 / 2.45; 1 of the only token of the other completion
    np.testing.assert_allclose(loss, [1.183673, 1.632653, 3.0], 1e-5)
    np.testing.assert_allclose(gradient, [-1.183673, -0.816327, -1.0], 1e-5)
    by_itself = loss_of(OBJECTIVE, IFT(discount=0.0), batch)[2]
    np.testing.assert_allclose(by_itself, [-2 / 3, -4 / 3, -1.0], 1e-5)


def test_nothing_under_the_mask_gets_through():
    batch = tokens([-1.0, np.nan, -2.0], [0.0] * 3, [0.0] * 3).replace(mask=jnp.array([True, False, True]))
    loss, _, gradient = loss_of(OBJECTIVE, IFT(), batch)
    np.testing.assert_allclose(loss, [1.183673, 0, 1.632653], 1e-5)
    np.testing.assert_allclose(gradient, [-1.183673, 0, -0.816327], 1e-5)


def test_a_discount_is_a_share():
    with pytest.raises(ValueError, match=r"IFT\.discount = 1\.5 must be in \[0, 1\]; 0\.95 is usual"):
        OBJECTIVE.check(IFT(discount=1.5), FACTS)


@pytest.mark.parametrize("share", [0.0, 1.5, -0.2])
def test_a_share_that_mixes_nothing_or_more_than_all_is_refused(share):
    with pytest.raises(ValueError, match=rf"IFT\.share = {share} must be in \(0, 1\], or None"):
        OBJECTIVE.check(IFT(share=share), FACTS)
    OBJECTIVE.check(IFT(share=None), FACTS)
    assert OBJECTIVE.needs(IFT(share=None)) == Needs()


def test_what_a_policy_would_have_said_is_its_likeliest_token_where_it_learns():
    # Column t is read from hidden[t - 1]: the largest logit of h = -1, 2, 0.5 with rows h and 1 - h of the head.
    hidden = jnp.array([[[-1.0], [2.0], [0.5], [9.0]]])
    unembed = lambda h: jnp.concatenate([h, 1 - h, h], axis=-1)
    given, mask = jnp.array([[7, 7, 7, 7]]), jnp.array([[False, True, True, True]])
    found = jax.jit(lambda *x: likeliest_tokens(*x, unembed, chunk=2))(hidden, given, mask)
    np.testing.assert_array_equal(found, [[7, 1, 0, 0]])  # 0.5 and 0.5: of equal ones the first
    np.testing.assert_array_equal(likeliest_tokens(hidden, given, mask & (given < 0), unembed, chunk=2), given)


@pytest.fixture(scope="module")
def weights():
    return init(jax.random.key(0), MODEL.spec(CFG))


def test_a_mixture_of_two_tokens_is_read_as_the_token_whose_embedding_that_is(mesh, weights):
    # The embedding of token 5 is made 0.75 e(1) + 0.25 e(2).
    table = weights["embed"].at[5].set(0.75 * weights["embed"][1] + 0.25 * weights["embed"][2])
    params, columns = {**weights, "embed": table}, jnp.arange(3)[None]
    forward = jax.jit(lambda tokens: MODEL.routed(params, tokens, columns, None, CFG)[0])
    mixed = MixedTokens(jnp.array([[3, 1, 0]]), jnp.array([[3, 2, 0]]), jnp.float32(0.25))
    np.testing.assert_allclose(forward(mixed), forward(jnp.array([[3, 5, 0]])), atol=1e-6)


def test_the_second_pass_learns_from_inputs_that_hold_what_the_first_one_said(mesh, weights):
    rows = lambda values: jax.device_put(jnp.array([values]), batch_sharding(mesh, 2))
    token, mask, columns = rows([1, 2, 3, 4]), rows([False, True, True, False]), rows([0, 1, 2, 3])
    micro = PackedBatch(
        tokens=token, positions=columns, segment=rows([0] * 4), action_mask=mask,
        shared_prefix=None, prefix_row=None, sampler_logprobs=None, behaviour_logprobs=None,
        sequence=rows([0]), temperature=jnp.float32(1), num_real=jnp.int32(1),
    )  # fmt: skip
    logits = lambda params, tokens: MODEL.unembed(params, MODEL.routed(params, tokens, columns, None, CFG)[0], CFG)

    def as_read(params):
        found = model_outputs(
            Weights(params, {}), micro, mask, MODEL, CFG, 2, Needs(input_mix=jnp.float32(0.5))
        ).logprobs
        return found.sum(), found

    def by_two_passes(params, predicted):
        inputs = MixedTokens(token, jnp.where(mask, predicted, token), 0.5)
        found = jax.nn.log_softmax(logits(params, inputs))[:, :-1]
        found = (found * jax.nn.one_hot(token[:, 1:], CFG.vocab_size)).sum(-1)
        found = jnp.where(mask, jnp.pad(found, ((0, 0), (1, 0))), 0)
        return found.sum(), found

    said = jax.jit(lambda params: jnp.argmax(logits(params, token), axis=-1))(weights)
    predicted = jnp.pad(said[:, :-1], ((0, 0), (1, 0)))
    assert (jnp.where(mask, predicted, token) != token).any()
    differentiated = lambda fn: jax.jit(jax.value_and_grad(fn, has_aux=True))
    (_, found), gradient = differentiated(as_read)(weights)
    (_, expected), expected_gradient = differentiated(by_two_passes)(weights, predicted)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradient, expected_gradient)


def test_both_passes_over_rows_in_shares_are_those_over_rows(weights):
    token, mask = np.array([[1, 2, 3, 4, 2, 0, 5, 1]], np.int32), np.array([[0, 1, 1, 0, 1, 1, 1, 0]], bool)
    segment = np.array([[0, 0, 0, 0, 0, 1, 1, 1]], np.int32)  # cut into blocks of two columns: 0 3, 1 2
    columns = np.array([[0, 1, 2, 3, 4, 0, 1, 2]], np.int32)

    def read(shares):
        grid = make_mesh(MeshShape(sequence=shares), jax.devices()[:shares])
        rows = lambda x: jax.device_put(x, NamedSharding(grid, PartitionSpec(row_axes(grid.shape))))
        everywhere = lambda x: jax.device_put(x, NamedSharding(grid, PartitionSpec()))
        params = jax.device_put(weights, shardings(axes(MODEL.spec(CFG)), grid, TRAIN))

        def loss(params, token, mask, columns, segment, sequence, share, temperature, real):
            micro = PackedBatch(
                tokens=token, positions=columns, segment=segment, action_mask=mask, shared_prefix=None, prefix_row=None,
                sampler_logprobs=None, behaviour_logprobs=None, sequence=sequence, temperature=temperature,
                num_real=real,
            )  # fmt: skip
            found = model_outputs(Weights(params, {}), micro, mask, MODEL, CFG, 4, Needs(input_mix=share)).logprobs
            return jnp.where(mask, found, 0).sum(), found

        with jax.set_mesh(grid):
            scalars = map(everywhere, (np.float32(0.5), np.float32(1), np.int32(2)))
            batch = map(rows, (token, mask, columns, segment, np.array([[0, 1]], np.int32)))
            (_, found), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, *batch, *scalars)
            return np.where(mask, found, 0), jax.tree.map(np.asarray, gradient)

    (found, gradient), (expected, expected_gradient) = read(2), read(1)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradient, expected_gradient)


def test_only_a_decoder_mixes_embeddings():
    with pytest.raises(ConfigError, match=r"IFT mixes the embeddings of tokens, .* and Bigram does not"):
        load_config("configs/algos/ift.gin", [BIGRAM], [PARTS])
