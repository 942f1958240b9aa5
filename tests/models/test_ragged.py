"""The kernel of one new token a row gives what the reference gives, and samples the same. Interpreted on a CPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_params import drawn_params

from jrl.config.compare import identity
from jrl.device.sharding import MeshShape, constrain, make_mesh
from jrl.experiment import FREE
from jrl.models import decoder
from jrl.models.attention import ragged
from jrl.models.attention.cached import attend_cached
from jrl.models.attention.kernels import cache_block, check_ragged
from jrl.models.attention.kv_cache import cut_cache, ends
from jrl.models.contract import Cache
from jrl.models.shape import Decoder, FullHeads
from jrl.resolve import load_config
from jrl.rollout import sampler
from jrl.rollout.sampler import Sampler
from jrl.run.checks import check_cache
from jrl.run.policy import open_policy
from jrl.tasks.tokenizers.bytes import ByteTokenizer
from jrl.types import PromptBatch

COLUMNS = 384  # three blocks of 128
# Rows that see one column, the edges of blocks, the middle of one, and all: without a window, and with several.
FILLED = ((0, 0, 0, 0, 0), (0, 127, 128, 200, 383))
WINDOWS = ((0, 3, 128, 130, 250), (0, 127, 128, 300, 383))


def operands(heads=4, kv_heads=2, head_dim=16, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    cache = lambda: constrain(make(5, kv_heads, COLUMNS, head_dim), "batch", "kv_heads", None, None)
    return make(5, 1, heads, head_dim), cache(), cache(), make(heads)


def mask_of(first, last):
    column = np.arange(COLUMNS)[None]
    return jnp.asarray((column >= np.array(first)[:, None]) & (column <= np.array(last)[:, None]))[:, None]


@functools.partial(jax.jit, static_argnames=("scale", "cap"))
def kernel(q, k, v, layer, bounds, sinks=None, scale=None, cap=None):
    first, last = (jnp.asarray(x, jnp.int32) for x in bounds)
    return ragged.attend(q, k, v, layer, first, last, scale=scale, cap=cap, sinks=sinks, interpret=True)


@pytest.mark.parametrize("bounds", [FILLED, WINDOWS], ids=["filled", "windows"])
@pytest.mark.parametrize("heads, kv_heads, options", [(4, 2, False), (3, 3, True), (4, 1, True)])
def test_it_is_attention_over_the_columns_that_a_row_sees(bounds, heads, kv_heads, options):
    q, k, v, sinks = operands(heads, kv_heads)
    scale, cap, sinks = (0.4, 2.0, sinks) if options else (None, None, None)
    expected = attend_cached(q, (k,), (v,), None, mask_of(*bounds), scale=scale, cap=cap, sinks=sinks)
    np.testing.assert_allclose(kernel(q, k, v, None, bounds, sinks, scale, cap), expected, rtol=0, atol=1e-6)


def test_many_heads_are_read_in_few_columns():
    q, k, v, _ = operands(heads=32, kv_heads=32, head_dim=128)
    expected = attend_cached(q, (k,), (v,), None, mask_of(*WINDOWS))
    np.testing.assert_allclose(kernel(q, k, v, None, WINDOWS), expected, rtol=0, atol=1e-6)


def test_a_mean_by_hand():
    # Queries of 0 score all alike: a row gets the mean of the columns that it sees, and a sink of 0 is one value of 0.
    v = jnp.broadcast_to(jnp.arange(COLUMNS, dtype=jnp.float32)[:, None], (2, 1, COLUMNS, 2))
    q, bounds = jnp.zeros((2, 1, 1, 2)), ((0, 120), (99, 139))
    np.testing.assert_allclose(kernel(q, v, v, None, bounds)[:, 0, 0, 0], [49.5, 129.5], rtol=1e-6)
    actual = kernel(q, v, v, None, bounds, jnp.zeros(1))[:, 0, 0, 0]
    np.testing.assert_allclose(actual, [49.5 * 100 / 101, 129.5 * 20 / 21], rtol=1e-6)


def test_weights_of_bfloat16_values_are_not_rounded():
    # To 8 bits they would move the result by its last bit in a tenth of the entries or more.
    q, k, v, sinks = operands(dtype=jnp.bfloat16)
    expected = attend_cached(q, (k,), (v,), None, mask_of(*FILLED), sinks=sinks)
    with jax.default_matmul_precision("highest"):  # as in a run
        actual = kernel(q, k, v, None, FILLED, sinks)
    assert actual.dtype == jnp.bfloat16
    assert np.mean(np.asarray(actual != expected)) < 0.01
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (actual, expected)), rtol=2**-7, atol=1e-6)


def test_blocks_that_a_row_does_not_see_are_not_read():
    q, k, v, _ = operands()
    spoiled = lambda x: x.at[:4, :, 256:].set(jnp.nan).at[2:, :, :128].set(jnp.nan)
    bounds = ((0, 100, 128, 130, 250), (3, 127, 128, 255, 383))
    np.testing.assert_array_equal(kernel(q, spoiled(k), spoiled(v), None, bounds), kernel(q, k, v, None, bounds))


def test_a_row_does_not_depend_on_how_far_the_others_are():
    q, k, v, _ = operands()
    alone = kernel(q, k, v, None, ((0,) * 5, (50,) * 5))
    np.testing.assert_array_equal(alone[1], kernel(q, k, v, None, ((0, 0, 7, 300, 9), (383, 50, 180, 383, 9)))[1])


def test_heads_and_rows_over_a_mesh_and_a_layer_of_a_stack():
    mesh = make_mesh(MeshShape(tensor=2), jax.devices()[:2])
    q, k, v, sinks = operands()
    expected = attend_cached(q, (k,), (v,), None, mask_of(*WINDOWS), sinks=sinks)
    with jax.set_mesh(mesh):
        q, k, v, sinks = operands()
        stack = lambda x: jnp.stack([x * jnp.nan, x])
        actual = kernel(q, stack(k), stack(v), jnp.int32(1), WINDOWS, sinks)
        assert actual.sharding.spec[2] == "tensor"
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


def test_a_cache_is_filled_up_to_whole_blocks():
    one = lambda columns: Cache(k=(jnp.ones((2, 3, 2, columns, 48)),), v=(jnp.ones((2, 3, 2, columns, 48)),))
    actual = cut_cache(one(130), 999, "single_block")
    assert actual.k[0].shape == actual.v[0].shape == (2, 3, 2, 256, 128)
    assert actual.k[0].sum() == 2 * 3 * 2 * 130 * 48
    assert ends(130, 999, "single_block") == (256,) and ends(130, 999, "token_major") == (64, 128, 130)


def test_blocks_by_hand():
    # 8 heads of 128 in bfloat16 are 2 KiB a column: 128 columns are a quarter of a MiB. 896 are 7 blocks of 128.
    assert cache_block(1000, 2048) == 128 and cache_block(1024, 1024) == 256
    assert cache_block(1024, 512) == 512 and cache_block(896, 512) == 128
    # 32 heads of 128 in float32 are 16 KiB a column: 16 columns. The fewest, though these would be 1 MiB.
    assert cache_block(512, 2**14) == cache_block(512, 2**16) == 16


# In the sampler: rows of two blocks of 128 columns, which see very different parts of them.

CFG = Decoder(vocab_size=96, layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp_width=48)
OPTIONS = dict(query_scale=0.4, window=9, window_layers=(True, False), attention_cap=4.0, sinks=True)
KINDS = {  # layers, mesh, options of the decoder, max_batch_compactions
    "unrolled": ("unrolled", {}, dict(layers=1), 1),
    "scanned": ("scanned", dict(fsdp=2, tensor=2), OPTIONS, 0),
    "two shapes": ("unrolled", dict(tensor=2), dict(
        window=9, window_layers=(True, False), full=FullHeads(head_dim=16, kv_heads=2)), 0),
}  # fmt: skip


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(ragged, "attend", functools.partial(ragged.attend, interpret=True))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_sampling_takes_the_same_tokens(kind, interpreted):
    layers, shape, options, max_batch_compactions = KINDS[kind]
    cfg = dataclasses.replace(CFG, **options)
    params = drawn_params(decoder.spec(cfg))
    rng, lengths = np.random.default_rng(0), np.array([1, 129, 40, 125, 2, 130, 126, 60], np.int32)
    prompts = PromptBatch(rng.integers(0, 96, (8, 130)).astype(np.int32), lengths, np.zeros((8, 2), np.uint32))
    mesh = make_mesh(MeshShape(**shape), jax.devices()[: int(np.prod(list(shape.values()), initial=1))])
    reference = Sampler(
        completion_length=5, slots=3, temperature=None, layers=layers, max_batch_compactions=max_batch_compactions
    )
    draw = lambda config: sampler.sample(
        sampler.BehaviorPolicy(decoder.MODEL, cfg, params, version=0), prompts, jax.random.key(1), stream=0,
        config=config, samples=1, stop=sampler.StopRules((3, 7), 95), mesh=mesh,
    )  # fmt: skip
    actual, expected = draw(dataclasses.replace(reference, attention="ragged")), draw(reference)
    np.testing.assert_array_equal(actual.tokens, expected.tokens)
    np.testing.assert_allclose(actual.sampler_logprobs, expected.sampler_logprobs, rtol=0, atol=1e-5)
    assert expected.action_mask.sum() > 20


# What is asked for and missing


def test_a_run_that_asks_for_it_does_not_start_on_a_cpu():
    config, parts = load_config("configs/tiny.gin", ["Sampler.attention='ragged'"])
    with pytest.raises(
        ValueError, match=r"Sampler\.attention='ragged' is a kernel for TPUs, and these devices are CPUs"
    ):
        open_policy(config, parts, ByteTokenizer())


def test_it_makes_no_other_run():
    of = lambda *bindings: load_config("configs/tiny.gin", bindings)[0]
    assert identity(of("Sampler.attention='ragged'"), FREE) == identity(of(), FREE)  # nor one from before the field


def test_what_it_does_not_know_is_refused():
    with pytest.raises(ValueError, match=r"Sampler\.attention='ragged' reads keys token by token"):
        Sampler(completion_length=1, attention="ragged", kv_layout="head_dim_major")
    config, _ = load_config("configs/tiny.gin", ["Sampler.attention='ragged'"])
    check_cache(config, CFG, 2)
    with pytest.raises(ValueError, match="computes in float32"):
        check_cache(config, dataclasses.replace(CFG, dtype="float64"), 1)
    with pytest.raises(ValueError, match=r"Sampler\.attention='ragged' reads jrl's cache"):
        check_cache(config, object(), 1)
    check_ragged(dataclasses.replace(CFG, heads=24, kv_heads=24), 1)
    with pytest.raises(ValueError, match=r"not 12 \(kv_heads=24 over MeshShape.tensor=2\)"):
        check_ragged(dataclasses.replace(CFG, heads=24, kv_heads=24), 2)


def test_a_cpu_without_an_interpreter_refuses_the_kernel():
    q, k, v, _ = operands()
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
        ragged.attend(q, k, v, None, *jnp.asarray(FILLED))
