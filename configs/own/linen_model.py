"""A model of one's own in Flax Linen: attention without rotation, learned positions, and a cache for decoding."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from jrl.models.flax_adapter import from_linen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Small:
    """The shape, as a configuration binds it: Small.width = 64."""

    vocab_size: int | None = None  # None: the tokenizer's
    dtype: str = "float32"
    param_dtype: str = "float32"
    layers: int = 2
    width: int = 64
    heads: int = 4
    longest: int = 64  # tokens of a sequence


class Block(nn.Module):
    cfg: Small

    def setup(self):
        heads = (self.cfg.heads, self.cfg.width // self.cfg.heads)
        self.before_attention, self.before_mlp = nn.RMSNorm(), nn.RMSNorm()
        self.query, self.key, self.value = (nn.DenseGeneral(heads, use_bias=False) for _ in range(3))
        self.out = nn.DenseGeneral(self.cfg.width, axis=(-2, -1), use_bias=False)
        self.up, self.down = nn.Dense(4 * self.cfg.width), nn.Dense(self.cfg.width)

    def __call__(self, x, mask, cache=None, start=None):
        h = self.before_attention(x)
        q, k, v = self.query(h), self.key(h), self.value(h)
        if cache is not None:  # the new columns go where the row's sequence has come to
            write = jax.vmap(lambda old, new, at: jax.lax.dynamic_update_slice_in_dim(old, new, at, 0))
            k, v = cache = write(cache[0], k, start), write(cache[1], v, start)
        scores = jnp.einsum("blhk,bmhk->bhlm", q, k) / q.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30))
        x = x + self.out(jnp.einsum("bhlm,bmhk->blhk", weights, v))
        return x + self.down(nn.gelu(self.up(self.before_mlp(x)))), cache


class Network(nn.Module):
    cfg: Small

    def setup(self):
        self.embed = nn.Embed(self.cfg.vocab_size, self.cfg.width)
        self.place = nn.Embed(self.cfg.longest, self.cfg.width)
        self.blocks = [Block(self.cfg) for _ in range(self.cfg.layers)]
        self.norm = nn.RMSNorm()
        self.head = nn.Dense(self.cfg.vocab_size, use_bias=False)

    def __call__(self, tokens, positions, mask):
        x = self.embed(tokens) + self.place(positions)
        for block in self.blocks:
            x, _ = block(x, mask)
        return self.norm(x)

    def unembed(self, hidden):
        return self.head(hidden)

    def init_cache(self, batch, length):
        shape = (batch, length, self.cfg.heads, self.cfg.width // self.cfg.heads)
        return [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(self.cfg.layers)]

    def decode(self, tokens, positions, cache):
        mask = jnp.arange(cache[0][0].shape[1])[None, None, :] <= positions[:, :, None]
        x, new_cache = self.embed(tokens) + self.place(positions), []
        for block, layer_cache in zip(self.blocks, cache):
            x, layer_cache = block(x, mask, layer_cache, positions[:, 0])
            new_cache.append(layer_cache)
        return self.norm(x), new_cache


MODELS = {"Small": from_linen(Small, Network)}
