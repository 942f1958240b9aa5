"""Parameters for tests; and what the sampler says of its draws against a plain forward pass, on one device and four."""

import dataclasses
import functools
import math

import jax
import numpy as np

from jrl.device.sharding import TRAIN, MeshShape, make_mesh, shardings
from jrl.models.adapters.lora import adapted as adapted_anew
from jrl.models.contract import Adapted, abstract, axes
from jrl.models.decoder import MODEL
from jrl.rollout import sampler
from jrl.types import PromptBatch

adapted = functools.cache(adapted_anew)  # else what is compiled for one call's functions is not found by the next


def one_device():
    return make_mesh(MeshShape(), jax.devices()[:1])


@functools.cache
def fresh(model, cfg):
    """Returns parameters as they are drawn, as numpy; in float32 first, as float64 takes long to compile."""
    narrow = dataclasses.replace(cfg, dtype="float32", param_dtype="float32")
    with jax.enable_x64(False), jax.set_mesh(one_device()):
        params = jax.jit(lambda key: model.init(key, narrow))(jax.random.key(0))
    return jax.tree.map(lambda x, due: np.asarray(x, due.dtype), params, abstract(model.spec(cfg)))


@functools.cache
def learned(model, cfg):
    """Returns parameters after some training: every number of the adapters away from its beginning."""
    rng = np.random.default_rng(1)
    moved = lambda x: (x + 0.1 * rng.normal(size=x.shape)).astype(x.dtype)
    params = fresh(model, cfg)
    return params._replace(adapters=jax.tree.map(moved, params.adapters))


def places_of(model, cfg, mesh):
    """Returns the sharding of every parameter for training."""
    names = axes(model.spec(cfg))
    if isinstance(names, Adapted):  # a tuple, which `shardings` would take for a leaf
        return Adapted(*(shardings(part, mesh, TRAIN) for part in names))
    return shardings(names, mesh, TRAIN)


def drawn_on(shape, cfg, layers, model, params, attention="auto", prefill_chunk=None):
    """Returns what a mesh of that shape draws: of eight prompts of 1 to 3 tokens two samples of 6 each, in three slots,
    prefilled in two rounds; `cfg`: 48 ids; `attention`, `prefill_chunk`: of the sampler."""
    rng = np.random.default_rng(0)
    prompts = PromptBatch(
        tokens=rng.integers(0, 48, (8, 3)).astype(np.int32),
        length=np.array([3, 1, 2, 3, 2, 3, 1, 2], np.int32),
        uid=rng.integers(0, 2**32, (8, 2), dtype=np.uint32),
    )
    mesh = make_mesh(shape, jax.devices()[: math.prod(shape.sizes(8))])
    with jax.set_mesh(mesh):
        spread = jax.device_put(params, places_of(model, cfg, mesh))
    out = sampler.sample(
        sampler.BehaviorPolicy(model, cfg, spread, version=0), prompts, jax.random.key(1), stream=0, mesh=mesh,
        samples=2, stop=sampler.StopRules((7,), 0),
        config=sampler.Sampler(completion_length=6, slots=3, layers=layers, attention=attention,
                               prefill_chunk=prefill_chunk),
    )  # fmt: skip
    return jax.tree.map(np.asarray, out)


def agree_with_a_plain_forward(rollout, cfg, model, params):
    """The sampler's log-probs are those of a forward pass over whole rows on one device."""
    positions = np.broadcast_to(np.arange(9, dtype=np.int32), rollout.tokens.shape)

    @jax.jit
    def plain(params):
        hidden, _ = model.forward(params, rollout.tokens, positions, None, cfg)
        return jax.nn.log_softmax(model.unembed(params, hidden, cfg))

    logprobs = np.asarray(plain(params))
    expected = np.take_along_axis(logprobs[:, :-1], rollout.tokens[:, 1:, None], 2)[..., 0]
    difference = np.where(rollout.action_mask[:, 1:], rollout.sampler_logprobs[:, 1:] - expected, 0)
    assert rollout.action_mask.any(1).all()
    assert np.abs(difference).max() <= 2e-6 * max(1, np.abs(logprobs).max())


ON_FOUR_DEVICES = MeshShape(data=2, tensor=2)


def agree_on_four_devices(cfg, layers, model=MODEL, params=None):
    """`agree_with_a_plain_forward` of what four devices draw. `params`: of `model`; None: fresh ones."""
    params = fresh(model, cfg) if params is None else params
    agree_with_a_plain_forward(drawn_on(ON_FOUR_DEVICES, cfg, layers, model, params), cfg, model, params)


def agree_on_every_mesh(cfg, layers, model=MODEL, params=None, many=ON_FOUR_DEVICES, prefill_chunk=None):
    """One device and `many`, which prefills in chunks, draw the same tokens, with the log-probs of a plain forward.
    `params`: as above."""
    params = fresh(model, cfg) if params is None else params
    one = drawn_on(MeshShape(), cfg, layers, model, params)
    many = drawn_on(many, cfg, layers, model, params, prefill_chunk=prefill_chunk)
    np.testing.assert_array_equal(one.tokens, many.tokens)
    np.testing.assert_allclose(one.sampler_logprobs, many.sampler_logprobs, atol=1e-5)
    agree_with_a_plain_forward(one, cfg, model, params)
