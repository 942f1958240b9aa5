"""What the tests of published models share: a random model of transformers in a folder, and our logits of tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jrl.device.sharding import MeshShape, make_mesh
from jrl.models.decoder import MODEL
from jrl.models.pretrained.published import Published, decoder_of, load
from jrl.models.shape import for_length
from jrl.rollout import sampler
from jrl.types import PromptBatch


def one_device():
    return make_mesh(MeshShape(), jax.devices()[:1])


def opened(folder, mesh=None, **fields):
    """Returns (decoder, parameters) of a folder."""
    published = Published(path=str(folder), **fields)
    return decoder_of(published)[1], load(published, mesh or one_device())


WIDE = dict(dtype="float64", param_dtype="float64")  # fields of a folder read for float64, under jax.enable_x64


def logits(cfg, params, tokens, mesh=None):
    """Returns logits [B, L, V] of tokens [B, L], by one full forward."""
    tokens = np.asarray(tokens, np.int32)
    cfg = for_length(cfg, tokens.shape[1])
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    with jax.set_mesh(mesh or one_device()):

        def run(params, tokens, positions):
            hidden, _ = MODEL.forward(params, tokens, positions, None, cfg)
            return MODEL.unembed(params, hidden, cfg)

        return np.asarray(jax.jit(run)(params, jnp.asarray(tokens), jnp.asarray(positions)))


def greedy(cfg, params, prompt, count, mesh=None):
    """Returns `count` ids after `prompt`, each the likeliest, by the sampler: a prefill, then a token at a time."""
    mesh = mesh or one_device()
    prompts = PromptBatch(
        tokens=np.asarray(prompt, np.int32)[None],
        length=np.array([len(prompt)], np.int32),
        uid=np.zeros((1, 2), np.uint32),
    )
    rollout = sampler.sample(
        sampler.BehaviorPolicy(MODEL, cfg, params, version=0), prompts, jax.random.key(0), stream=0, mesh=mesh,
        samples=1, stop=sampler.StopRules((), 0),
        config=sampler.Sampler(completion_length=count, temperature=None, slots=1),
    )  # fmt: skip
    return np.asarray(rollout.tokens)[0, len(prompt) :].tolist()
