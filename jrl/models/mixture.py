"""Two sets of weights of one model as one model, whose logits are a mixture of theirs: for sampling alone."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from jrl.models.contract import Layout, Model, Stacks
from jrl.ops.mixture import mixed_logits
from jrl.types import Array, PyTree


class PolicyAndReference(NamedTuple):
    """What each of the two has: parameters, hidden states, a cache, or that of one layer."""

    policy: Any
    reference: Any


@functools.cache  # one object for one model, so that equal programs are compiled once
def mixture(model: Model, weight: float) -> Model:
    """Returns the model whose parameters are a PolicyAndReference, with (1 - weight) and weight of their logits."""

    def forward(
        params: PolicyAndReference, tokens: Array, positions: Array, segment: Array | None, cfg: Any, cache: Any = None
    ):
        pairs = zip(params, _split(cache))
        found = [model.forward(own, tokens, positions, segment, cfg, part) for own, part in pairs]
        (hidden, first), (other, second) = found
        return PolicyAndReference(hidden, other), _joined(cache, first, second)

    def unembed(params: PolicyAndReference, hidden: PolicyAndReference, cfg: Any) -> Array:
        return mixed_logits(*(model.unembed(own, h, cfg) for own, h in zip(params, hidden)), weight=weight)

    def init_cache(cfg: Any, batch: int, length: int) -> PolicyAndReference:
        cache = model.init_cache(cfg, batch, length)
        if isinstance(cache, Stacks):
            raise ValueError("a mixture of two policies needs a model whose layers are all of one kind")
        return PolicyAndReference(cache, cache)

    def cut_cache(cache: Any, length: int, layout: Layout) -> Any:
        return _joined(cache, *(model.cut_cache(part, length, layout) for part in _split(cache)))

    def unstack(params: PolicyAndReference, cfg: Any) -> PolicyAndReference:
        return PolicyAndReference(*(model.unstack(own, cfg) for own in params))

    functions = dict(forward=forward, unembed=unembed, init_cache=init_cache, cut_cache=cut_cache, unstack=unstack)
    return model._replace(**functions, routes=None)


def _split(cache: Any) -> tuple[PyTree, PyTree]:
    """Returns the caches of both. Where layers are computed one by one, a cache is a tuple of pairs, one a layer."""
    if cache is None or isinstance(cache, PolicyAndReference):
        return cache or (None, None)
    return tuple(layer.policy for layer in cache), tuple(layer.reference for layer in cache)


def _joined(like: Any, first: Any, second: Any) -> Any:
    """Returns the caches of both as one, in the form of `like`."""
    if like is None or isinstance(like, PolicyAndReference):
        return PolicyAndReference(first, second)
    return tuple(PolicyAndReference(*layer) for layer in zip(first, second))
