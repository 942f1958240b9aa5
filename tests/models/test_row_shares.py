"""Rows divided over the mesh axis `sequence` give what whole rows give: in the decoder, and in the kernel for TPUs."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.device import row_shares
from jrl.device.sharding import TRAIN, MeshShape, constrain, make_mesh, shardings
from jrl.learning.row_layout import model_inputs, row_layout
from jrl.models.attention import splash
from jrl.models.attention.reference import attend
from jrl.models.contract import ShareSegments, abstract, axes
from jrl.models.decoder import MODEL, visible
from jrl.models.shape import Decoder

R, L = 2, 16
# Of two shares of eight tokens, in blocks of four; segments begin and end inside of blocks, and cross the cuts.
LENGTHS = ((7, 6, 3), (2, 9, 5))
CFG = Decoder(vocab_size=48, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=32, query_scale=0.4,
              window=5, window_layers=(True, False), attention_cap=4.0, sinks=True)  # fmt: skip


def on_mesh(shape):
    return jax.set_mesh(make_mesh(shape, jax.devices()[: np.prod(shape.sizes(8))]))


def segments_of(lengths):
    return np.stack([np.repeat(np.arange(len(row)), row) for row in lengths]).astype(np.int32)


def hidden_and_gradient(shape, cfg):
    """Returns hidden states of packed rows, and the gradient of a sum in which every entry has a weight of its own."""
    segment = segments_of(LENGTHS)
    positions = np.stack([np.concatenate([np.arange(n) for n in row]) for row in LENGTHS]).astype(np.int32)
    tokens = np.random.default_rng(0).integers(0, 48, (R, L)).astype(np.int32)
    weight = np.cos(np.arange(R * L * cfg.width)).reshape(R, L, cfg.width).astype(np.float32)
    spec = MODEL.spec(cfg)
    with on_mesh(shape):
        normal = lambda path, s: jax.random.normal(jax.random.key(len(path) + sum(s.shape)), s.shape) * 0.3
        params = jax.tree_util.tree_map_with_path(normal, abstract(spec))
        params = jax.device_put(params, shardings(axes(spec), jax.sharding.get_mesh(), TRAIN))

        @jax.jit
        def run(params, tokens, positions, segment):
            micro = SimpleNamespace(tokens=tokens, positions=positions, segment=segment, shared_prefix=None,
                                    prefix_row=None)  # fmt: skip
            hidden = lambda p: row_layout().joined(MODEL.routed(p, *model_inputs(micro), cfg)[0])
            return hidden(params), jax.grad(lambda p: (hidden(p) * weight).sum())(params)

        return jax.tree.map(np.asarray, run(params, tokens, positions, segment))


def apart(actual, expected):
    """How far two trees are apart, in parts of the norm of the second."""
    norm = lambda tree: np.sqrt(sum(float((x.astype(np.float64) ** 2).sum()) for x in jax.tree.leaves(tree)))
    return norm(jax.tree.map(lambda x, y: x - y, actual, expected)) / norm(expected)


@functools.cache
def of_whole_rows():
    return hidden_and_gradient(MeshShape(), CFG)


@pytest.mark.parametrize("cfg", [CFG, dataclasses.replace(CFG, attention_block=3, remat="dots"),
                                 dataclasses.replace(CFG, attention="splash", remat="layer")],
                         ids=["reference", "blocks", "splash"])  # fmt: skip
def test_a_decoder_sees_the_whole_row(cfg, monkeypatch):
    monkeypatch.setattr(splash, "attend", functools.partial(splash.attend, interpret=True))
    hidden, gradient = hidden_and_gradient(MeshShape(tensor=2, sequence=2), cfg)
    expected, their_gradient = of_whole_rows()
    np.testing.assert_allclose(hidden, expected, rtol=0, atol=5e-6)
    assert apart(gradient, their_gradient) < 1e-5


def test_the_kernel_skips_blocks_of_a_share_that_nothing_sees():
    """600 tokens in two shares of 300, which are padded to three blocks of queries; five blocks of keys."""
    length, heads, kv_heads = 600, 2, 1
    segment = jnp.asarray(segments_of(((450, 150), (200, 300, 100))))
    normal = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, jnp.float32)
    arrays = (normal(0, 2, length, heads, 16), normal(1, 2, kv_heads, length, 16), normal(2, 2, kv_heads, length, 16),
              normal(3, heads))  # fmt: skip
    weight = jnp.cos(jnp.arange(arrays[0].size)).reshape(arrays[0].shape)

    def of_shares(q, k, v, sinks):
        columns = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), segment.shape)
        cut, copied = row_shares.cut, row_shares.copied
        shares = ShareSegments(cut(segment), cut(columns), copied(segment), copied(columns))
        k, v = (row_shares.gathered(cut(x.swapaxes(1, 2)).swapaxes(1, 2)) for x in (k, v))
        return row_shares.joined(splash.attend(cut(q), k, v, shares, sinks=sinks, interpret=True))

    def of_rows(q, k, v, sinks):
        # Sharded as the decoder's are: jax 0.12 multiplies no other ones with the queries.
        k, v = (constrain(x, "batch", "kv_heads", None, None) for x in (k, v))
        return attend(q, k, v, visible(jnp.zeros_like(segment), segment), sinks=sinks)

    def both(fn, arrays):
        weighed = lambda arrays: (fn(*arrays) * weight).sum()
        return jax.tree.map(np.asarray, jax.jit(lambda arrays: (fn(*arrays), jax.grad(weighed)(arrays)))(arrays))

    with on_mesh(MeshShape(sequence=2)):
        out, gradients = both(of_shares, arrays)
    with on_mesh(MeshShape()):
        expected, their_gradients = both(of_rows, arrays)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)
    for actual, theirs in zip(gradients, their_gradients, strict=True):
        assert apart(actual, theirs) < 1e-5


def test_a_share_has_an_early_block_and_a_late_one():
    np.testing.assert_array_equal(row_shares.columns_of_shares(8, 2), [[0, 1, 6, 7], [2, 3, 4, 5]])
    pairs = (row_shares.columns_of_shares(96, 4) + 1).sum(axis=1)  # of a query and the keys up to it
    assert len(set(pairs.tolist())) == 1  # every share has as many
    with on_mesh(MeshShape(data=2, sequence=4)):
        rows = constrain(jnp.arange(4 * 24).reshape(4, 24), "rows", None)
        shares = jax.jit(row_shares.cut)(rows)
        np.testing.assert_array_equal(jax.jit(row_shares.joined)(shares), rows)
        # Shares of rows that one device has are next to each other: of rows 0 and 1 the first, then the second.
        np.testing.assert_array_equal(
            np.asarray(shares)[:2], np.asarray(rows)[:2, row_shares.columns_of_shares(24, 4)[0]]
        )
