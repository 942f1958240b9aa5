"""A model of one's own in Flax NNX: a causal average of what came before, mixed by an MLP. It brings no cache."""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from jrl.models.flax_adapter import from_nnx


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bag:
    """The shape, as a configuration binds it: Bag.width = 64."""

    vocab_size: int | None = None  # None: the tokenizer's
    dtype: str = "float32"
    param_dtype: str = "float32"
    layers: int = 3
    width: int = 64
    longest: int = 64  # tokens of a sequence


class Layer(nnx.Module):
    def __init__(self, cfg, rngs):
        self.norm = nnx.RMSNorm(cfg.width, rngs=rngs)
        self.up = nnx.Linear(3 * cfg.width, 4 * cfg.width, rngs=rngs)
        self.down = nnx.Linear(4 * cfg.width, cfg.width, rngs=rngs)

    def __call__(self, x, mean, last):
        h = self.norm(x)
        mixed = jnp.concatenate([h, mean @ h, last @ h], axis=-1)  # itself, all before it, the one before it
        return x + self.down(nnx.gelu(self.up(mixed)))


class Network(nnx.Module):
    def __init__(self, cfg, rngs):
        self.embed = nnx.Embed(cfg.vocab_size, cfg.width, rngs=rngs)
        self.place = nnx.Embed(cfg.longest, cfg.width, rngs=rngs)
        self.layers = nnx.List([Layer(cfg, rngs) for _ in range(cfg.layers)])
        self.norm = nnx.RMSNorm(cfg.width, rngs=rngs)
        self.head = nnx.Linear(cfg.width, cfg.vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, tokens, positions, mask):
        x = self.embed(tokens) + self.place(positions)
        mean = mask / mask.sum(-1, keepdims=True)
        last = mask & (positions[:, None, :] == positions[:, :, None] - 1)
        for layer in self.layers:
            x = layer(x, mean, last.astype(x.dtype))
        return self.norm(x)

    def unembed(self, hidden):
        return self.head(hidden)


MODELS = {"Bag": from_nnx(Bag, Network)}
