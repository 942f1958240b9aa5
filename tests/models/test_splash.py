"""The kernel for TPUs gives what our own attention gives: alone, in the decoder, on a mesh. Interpreted on a CPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.device.sharding import constrain
from jrl.models.attention import splash
from jrl.models.attention.kernels import block_of, causal_share, check_attention, padded_row
from jrl.models.attention.reference import attend
from jrl.models.contract import abstract
from jrl.models.decoder import MODEL, visible
from jrl.models.shape import Decoder
from jrl.resolve import load_config
from jrl.run.policy import open_policy
from jrl.tasks.tokenizers.bytes import ByteTokenizer

# 300 tokens are filled up to 384, which three blocks of 128 divide. Rows hold segments of their own lengths, and what
# fills a row up is a segment too.
LONG = dict(length=300, heads=4, kv_heads=2, ends=((30, 190), (128, 290)), window=100, cap=2.0)
SHORT = dict(length=40, heads=2, kv_heads=1, ends=((10,), (30,)), window=None, cap=None)


def draw(case, dtype=jnp.float32, head_dim=16):
    """Returns q, k, v, sinks and segment of two rows."""
    keys = jax.random.split(jax.random.key(7), 4)
    normal = lambda i, *shape: jax.random.normal(keys[i], shape, jnp.float32).astype(dtype)
    q = normal(0, 2, case["length"], case["heads"], head_dim)
    k, v = (normal(i, 2, case["kv_heads"], case["length"], head_dim) for i in (1, 2))
    segment = np.stack([np.searchsorted(ends, np.arange(case["length"]), "right") for ends in case["ends"]])
    keys_of = lambda x: constrain(x, "batch", "kv_heads", None, None)
    sinks, segment = constrain(normal(3, case["heads"]), "heads"), constrain(jnp.asarray(segment), "batch", None)
    return constrain(q, "batch", None, "heads", None), keys_of(k), keys_of(v), sinks, segment.astype(jnp.int32)


def value_and_gradients(fn, arrays):
    """Returns fn(*arrays), and the gradients of a sum in which every entry has a weight of its own, computed again on
    the way back."""

    weights = jnp.cos(jnp.arange(arrays[0].size)).reshape(arrays[0].shape)
    weights = constrain(weights, "batch", None, "heads", None)
    weighed = lambda arrays: (jax.checkpoint(fn)(*arrays).astype(jnp.float32) * weights).sum()
    both = jax.jit(lambda arrays: (fn(*arrays), jax.grad(weighed)(arrays)))
    return both(arrays)


def of_norm(actual, expected):
    """How far two arrays are apart, in parts of the norm of the second."""
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def kernel_and_reference(case, dtype):
    *arrays, segment = draw(case, dtype)
    scale, window, cap = 0.3, case["window"], case["cap"]
    mask = visible(jnp.zeros((2, case["length"]), jnp.int32), segment)
    if window is not None:
        column = jnp.arange(case["length"])
        mask = mask & (column[:, None] - column[None] < window)[None]

    def kernel(q, k, v, sinks):
        return splash.attend(q, k, v, segment, scale=scale, window=window, cap=cap, sinks=sinks, interpret=True)

    def reference(q, k, v, sinks):
        return attend(q, k, v, mask, scale=scale, cap=cap, sinks=sinks)

    return value_and_gradients(kernel, arrays), value_and_gradients(reference, arrays)


@pytest.fixture
def interpreted(four, monkeypatch):
    """The same, on which the decoder's kernel is interpreted."""
    monkeypatch.setattr(splash, "attend", functools.partial(splash.attend, interpret=True))
    return four


def test_the_kernel_equals_the_reference_and_so_does_its_gradient(four):
    (out, gradients), (expected, their_gradients) = kernel_and_reference(LONG, jnp.float32)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)
    for actual, theirs in zip(gradients, their_gradients, strict=True):
        assert of_norm(actual, theirs) < 1e-5


def test_a_row_that_is_padded_for_a_larger_block_gives_the_same(four, monkeypatch):
    monkeypatch.setattr("jrl.models.attention.kernels.LARGEST_PADDING", 1 / 2)
    assert padded_row(LONG["length"]) == 512  # and 384 without
    (out, gradients), (expected, their_gradients) = kernel_and_reference(LONG, jnp.float32)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)
    for actual, theirs in zip(gradients, their_gradients, strict=True):
        assert of_norm(actual, theirs) < 1e-5


def test_bfloat16_is_within_its_rounding(mesh):
    # An entry is rounded by at most 2^-9 of itself: of queries twice, of keys, values and the result once.
    with jax.default_matmul_precision("highest"):  # as in a run
        (out, gradients), (expected, their_gradients) = kernel_and_reference(SHORT, jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    assert of_norm(out, expected) < 2**-7
    for actual, theirs in zip(gradients, their_gradients, strict=True):
        assert actual.dtype == theirs.dtype and of_norm(actual, theirs) < 2**-6


# Windows in one layer of two: the scan carries which, and each has a kernel of its own.
CFG = Decoder(vocab_size=48, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=32, query_scale=0.4,
              window=5, window_layers=(True, False), attention_cap=4.0, sinks=True)  # fmt: skip
SPLASH = dataclasses.replace(CFG, attention="splash")
TOKENS = np.random.default_rng(0).integers(0, 48, (2, 12)).astype(np.int32)
POSITIONS = np.array([[*range(7), *range(4), 0], range(12)], np.int32)
SEGMENT = np.array([[0] * 7 + [1] * 4 + [2], [0] * 12], np.int32)


def test_logprobs_of_packed_rows(interpreted, drawn):
    @functools.partial(jax.jit, static_argnums=1)
    def logprobs(params, cfg):
        hidden, _ = MODEL.forward(params, TOKENS, POSITIONS, SEGMENT, cfg)
        return jax.nn.log_softmax(constrain(MODEL.unembed(params, hidden, cfg), "batch", None, None))

    weights = drawn(CFG)
    np.testing.assert_allclose(logprobs(weights, SPLASH), logprobs(weights, CFG), rtol=0, atol=5e-6)


def test_a_prompt_that_fills_its_cache_is_read_by_the_kernel(interpreted, drawn):
    @functools.partial(jax.jit, static_argnums=(1, 2))
    def prefill(params, cfg, columns):
        cache = MODEL.init_cache(cfg, 2, columns)
        positions = constrain(jnp.broadcast_to(jnp.arange(12), TOKENS.shape), "batch", None)
        return MODEL.forward(params, TOKENS, positions, None, cfg, cache)

    for actual, expected in zip(*(jax.tree.leaves(prefill(drawn(CFG), cfg, 12)) for cfg in (SPLASH, CFG))):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=5e-6)


def test_a_prompt_is_read_in_chunks(interpreted, drawn):
    """Four tokens at a time into 16 columns: of the last chunk, queries 8 to 11 see the columns up to their own, in
    windowed layers the last 5, and none of the columns that another sequence has filled."""

    @functools.partial(jax.jit, static_argnums=1)
    def prefill(params, cfg):
        cache = jax.tree.map(lambda x: x + 3.0, MODEL.init_cache(cfg, 2, 16))
        positions = constrain(jnp.broadcast_to(jnp.arange(12), TOKENS.shape), "batch", None)
        step = 12 if cfg is CFG else 4
        hidden = []
        for start in range(0, 12, step):
            part = slice(start, start + step)
            out, cache = MODEL.forward(params, TOKENS[:, part], positions[:, part], None, cfg, cache)
            hidden.append(out)
        return jnp.concatenate(hidden, axis=1), cache

    for actual, expected in zip(*(jax.tree.leaves(prefill(drawn(CFG), cfg)) for cfg in (SPLASH, CFG))):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=5e-6)


def test_what_is_asked_for_and_missing_is_refused():
    check_attention(CFG, "cpu")
    check_attention(SPLASH, "tpu")
    with pytest.raises(ValueError, match="attention='splash' is a kernel for TPUs, and these devices are CPUs"):
        check_attention(SPLASH, "cpu")
    with pytest.raises(ValueError, match="splash has its own blocks"):
        dataclasses.replace(SPLASH, attention_block=512)
    with pytest.raises(ValueError, match="computes in float32"):
        dataclasses.replace(SPLASH, dtype="float64")
    both = np.stack([SEGMENT, SEGMENT], -1)
    with pytest.raises(ValueError, match="which excludes shared prompts"):
        jax.eval_shape(lambda p: MODEL.forward(p, TOKENS, POSITIONS, both, SPLASH), abstract(MODEL.spec(CFG)))


def test_a_run_that_asks_for_it_does_not_start_on_a_cpu():
    config, parts = load_config("configs/tiny.gin", ["Decoder.attention='splash'"])
    with pytest.raises(ValueError, match="is a kernel for TPUs, and these devices are CPUs; set attention='reference'"):
        open_policy(config, parts, ByteTokenizer())


def test_fewer_queries_than_keys_need_their_column(mesh):
    q, k, v, _, _ = draw(SHORT)
    with pytest.raises(ValueError, match="12 queries and 40 keys"):
        splash.attend(q[:, :12], k, v, None, interpret=True)


def test_a_cpu_without_an_interpreter_refuses_the_kernel(mesh):
    q, k, v, _, _ = draw(SHORT)
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
        splash.attend(q, k, v, None)


def test_the_share_of_pairs_by_hand():
    # 1024 tokens are 2 blocks of 512: 3 of 4. 384 are 3 of 128: 6 of 9. 300 are computed as 384.
    assert causal_share(1024) == 3 / 4
    assert causal_share(384) == pytest.approx(2 / 3)
    assert causal_share(300) == pytest.approx(2 / 3 * (384 / 300) ** 2)


def test_rows_are_padded_for_larger_blocks_where_that_adds_little():
    # 17,500 tokens are 137 blocks of 128, or 35 of 512 with 384 tokens more than these. 2,100 are 17 of 128: 5 of 512
    # would add 384 to 2,176, and 9 of 256 add 128, a seventeenth. 640 and 1,152 stay.
    assert [padded_row(length) for length in (17_500, 2_100, 640, 1_100)] == [17_920, 2_304, 640, 1_152]
    assert [block_of(length) for length in (17_500, 2_100, 640, 1_100)] == [512, 256, 128, 128]
    assert padded_row(1) == 128 and padded_row(4096) == 4096 and padded_row(8_200) == 8_704


def test_blocks_by_hand():
    # 512 queries of 256 float32 entries are 512 KiB, and 256 of Gemma 4's 512; 640 tokens are 5 blocks of 128.
    assert block_of(1024, 256 * 4) == block_of(1024, 512 * 2) == 512 and block_of(1024, 512 * 4) == 256
    assert block_of(768, 512 * 4) == 256 and block_of(640, 512 * 4) == 128
    assert block_of(1024, 2**14) == 128  # the fewest, though these would be 2 MiB
