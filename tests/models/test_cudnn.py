"""cuDNN's attention is asked for what our own gives: computed by XLA here, and lowered for a GPU that is not there."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.device.sharding import constrain
from jrl.models.attention import cudnn
from jrl.models.attention.kernels import check_attention
from jrl.models.attention.reference import attend
from jrl.models.contract import abstract
from jrl.models.decoder import MODEL
from jrl.models.shape import Decoder
from jrl.resolve import load_config
from jrl.run.checks import check_shared
from jrl.run.policy import open_policy
from jrl.tasks.tokenizers.bytes import ByteTokenizer

CFG = Decoder(vocab_size=48, layers=2, width=16, heads=4, kv_heads=2, head_dim=8, mlp_width=32, query_scale=0.4,
              window=5, window_layers=(True, False), dtype="bfloat16")  # fmt: skip
CUDNN = dataclasses.replace(CFG, attention="cudnn")
TOKENS = np.random.default_rng(0).integers(0, 48, (2, 13)).astype(np.int32)
POSITIONS = np.array([[*range(7), *range(4), 0, 1], range(13)], np.int32)
SEGMENT = np.array([[0] * 7 + [1] * 4 + [2] * 2, [0] * 13], np.int32)


@pytest.fixture
def by_xla(four, monkeypatch):
    """The same, on which XLA computes what cuDNN is asked for."""
    monkeypatch.setattr(cudnn, "attend", functools.partial(cudnn.attend, implementation="xla"))
    return four


@pytest.fixture
def a_gpu_is_there(four, monkeypatch):
    """The same, on which JAX is told of a cuDNN and of a Hopper, which it asks for while it traces."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)
    return four


@pytest.mark.parametrize("queries, keys", [(6, 6), (5, 9)])
def test_it_is_the_reference_and_so_is_its_gradient(four, queries, keys):
    """Lengths that are odd are made even, and what is added counts for nothing."""
    rng = np.random.default_rng(0)
    make = lambda names, *shape: constrain(jnp.asarray(rng.normal(size=shape), jnp.float32), *names)
    q = make(("batch", None, "heads", None), 2, queries, 4, 8)
    k, v = (make(("batch", "kv_heads", None, None), 2, 2, keys, 8) for _ in range(2))
    mask = rng.random((2, queries, keys)) < 0.5
    mask[..., 0] = True
    mask = constrain(jnp.asarray(mask), "batch", None, None)
    weights = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)

    def both(fn):
        weighed = lambda *x: (jax.checkpoint(fn)(*x) * constrain(weights, "batch", None, "heads", None)).sum()
        return jax.jit(lambda *x: (fn(*x), jax.grad(weighed, (0, 1, 2))(*x)))(q, k, v)

    actual = both(lambda q, k, v: cudnn.attend(q, k, v, mask, scale=0.3, implementation="xla"))
    expected = both(lambda q, k, v: attend(q, k, v, mask, scale=0.3))
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-6)


def logprobs(params, cfg):
    hidden, _ = MODEL.forward(params, TOKENS, POSITIONS, SEGMENT, cfg)
    return jax.nn.log_softmax(constrain(MODEL.unembed(params, hidden, cfg), "batch", None, None))


def test_logprobs_of_packed_rows_with_windows(by_xla, drawn):
    params = drawn(CFG)
    configs = (CUDNN, CFG, dataclasses.replace(CFG, dtype="float32"))
    actual, expected, exact = (np.asarray(jax.jit(lambda p, cfg=cfg: logprobs(p, cfg))(params)) for cfg in configs)
    # Both are as far from float32 as bfloat16 takes them, and no farther from one another.
    assert 0 < np.abs(actual - expected).max() <= 2 * np.abs(expected - exact).max()


def test_shared_prompts_are_seen(by_xla, drawn):
    weights, both = drawn(CFG), np.stack([SEGMENT, np.where(SEGMENT == 1, 0, SEGMENT)], -1)

    @functools.partial(jax.jit, static_argnums=1)
    def hidden(params, cfg):
        return MODEL.forward(params, TOKENS, POSITIONS, both, cfg)[0]

    actual, expected = (np.asarray(hidden(weights, cfg), np.float32) for cfg in (CUDNN, CFG))
    assert np.linalg.norm(actual - expected) < 2**-6 * np.linalg.norm(expected)
    check_shared(load_config("configs/tiny.gin", ["Learner.prefix_sharing='in_row'"])[0], CUDNN)


def test_forward_and_gradient_are_lowered_for_a_gpu(a_gpu_is_there, drawn):
    params = drawn(CFG)
    gradient = jax.jit(jax.grad(lambda p: -logprobs(p, CUDNN)[..., 0].mean()))
    text = gradient.trace(params).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaScaleBiasSoftmax" in text and "__cudnn$fmhaScaleBiasSoftmaxBackward" in text


def test_heads_that_cudnn_does_not_know_are_refused_by_name(a_gpu_is_there):
    narrow = dataclasses.replace(CUDNN, head_dim=4)
    tree = abstract(MODEL.spec(narrow))
    with pytest.raises(NotImplementedError, match="multiple of 8, but got 4"):
        jax.eval_shape(lambda p: MODEL.forward(p, TOKENS, POSITIONS, SEGMENT, narrow), tree)


def test_what_is_asked_for_and_missing_is_refused():
    check_attention(CUDNN, "gpu")
    for platform in ("cpu", "tpu"):
        with pytest.raises(ValueError, match=rf"attention='cudnn' is a kernel for GPUs, .* {platform.upper()}s"):
            check_attention(CUDNN, platform)
    for dtype in ("float32", "float64"):
        with pytest.raises(ValueError, match=r"attention='cudnn' computes in .*needs 'reference'"):
            dataclasses.replace(CUDNN, dtype=dtype)
    for option in ({"attention_cap": 4.0}, {"sinks": True}):
        with pytest.raises(ValueError, match="neither attention_cap nor sinks"):
            dataclasses.replace(CUDNN, **option)
    with pytest.raises(ValueError, match="cudnn has its own blocks"):
        dataclasses.replace(CUDNN, attention_block=512)


def test_a_run_that_asks_for_it_does_not_start_on_a_cpu():
    config, parts = load_config("configs/tiny.gin", ["Decoder.attention='cudnn'", "Decoder.dtype='bfloat16'"])
    with pytest.raises(ValueError, match="is a kernel for GPUs, and these devices are CPUs; set attention='reference'"):
        open_policy(config, parts, ByteTokenizer())
