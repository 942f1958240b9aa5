"""Two sets of weights of one model as one model, whose logits are a mixture of theirs: for sampling alone."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from jrl.models.contract import Layout, Model, Stacks
from jrl.ops.mixture import mixed_logits
from jrl.types import Array, PyTree


class Pair(NamedTuple):
    """What each of the two has: parameters, hidden states, a cache, or that of one layer."""

    policy: Any
    reference: Any


@functools.cache  # one object for one model, so that equal programs are compiled once
def mixture(model: Model, weight: float) -> Model:
    """Returns the model of parameters Pair(policy, reference), with (1 - weight) and weight of their logits."""

    def forward(params: Pair, tokens: Array, positions: Array, segment: Array | None, cfg: Any, cache: Any = None):
        pairs = zip(params, _split(cache))
        found = [model.forward(own, tokens, positions, segment, cfg, part) for own, part in pairs]
        (hidden, first), (other, second) = found
        return Pair(hidden, other), _joined(cache, first, second)

    def unembed(params: Pair, hidden: Pair, cfg: Any) -> Array:
        return mixed_logits(*(model.unembed(own, h, cfg) for own, h in zip(params, hidden)), weight=weight)

    def init_cache(cfg: Any, batch: int, length: int) -> Pair:
        cache = model.init_cache(cfg, batch, length)
        if isinstance(cache, Stacks):
            raise ValueError("a mixture of two policies needs a model whose layers are all of one kind")
        return Pair(cache, cache)

    def cut_cache(cache: Any, length: int, layout: Layout) -> Any:
        return _joined(cache, *(model.cut_cache(part, length, layout) for part in _split(cache)))

    def unstack(params: Pair, cfg: Any) -> Pair:
        return Pair(*(model.unstack(own, cfg) for own in params))

    functions = dict(forward=forward, unembed=unembed, init_cache=init_cache, cut_cache=cut_cache, unstack=unstack)
    return model._replace(**functions, routes=None)


def _split(cache: Any) -> tuple[PyTree, PyTree]:
    """Returns the caches of both. Where layers are computed one by one, a cache is a tuple of pairs, one a layer."""
    if cache is None or isinstance(cache, Pair):
        return cache or (None, None)
    return tuple(layer.policy for layer in cache), tuple(layer.reference for layer in cache)


def _joined(like: Any, first: Any, second: Any) -> Any:
    """Returns the caches of both as one, in the form of `like`."""
    if like is None or isinstance(like, Pair):
        return Pair(first, second)
    return tuple(Pair(*layer) for layer in zip(first, second))
