"""A model that mixes the logits of two sets of weights. Only for sampling."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from jrl.models.contract import Layout, Model, Stacks
from jrl.ops.mixture import mixed_logits
from jrl.types import Array, PyTree


class PolicyAndReference(NamedTuple):
    """A pair of parameters, hidden states, caches, or caches of one layer."""

    policy: Any
    reference: Any


@functools.cache  # one object per model, so that equal programs are compiled once
def mixture(model: Model, weight: float) -> Model:
    """Returns the model whose parameters are a PolicyAndReference. It mixes their logits by 1 - weight and weight."""

    def forward(
        params: PolicyAndReference, tokens: Array, positions: Array, segment: Array | None, cfg: Any, cache: Any = None
    ):
        policy_cache, reference_cache = _split(cache)
        policy, policy_cache = model.forward(params.policy, tokens, positions, segment, cfg, policy_cache)
        reference, reference_cache = model.forward(params.reference, tokens, positions, segment, cfg, reference_cache)
        return PolicyAndReference(policy, reference), _joined(cache, policy_cache, reference_cache)

    def unembed(params: PolicyAndReference, hidden: PolicyAndReference, cfg: Any) -> Array:
        policy = model.unembed(params.policy, hidden.policy, cfg)
        reference = model.unembed(params.reference, hidden.reference, cfg)
        return mixed_logits(policy, reference, weight=weight)

    def init_cache(cfg: Any, batch: int, length: int) -> PolicyAndReference:
        cache = model.init_cache(cfg, batch, length)
        if isinstance(cache, Stacks):
            raise ValueError("a mixture of two policies needs a model whose layers are all of one kind")
        return PolicyAndReference(cache, cache)

    def cut_cache(cache: Any, length: int, layout: Layout) -> Any:
        return _joined(cache, *(model.cut_cache(part, length, layout) for part in _split(cache)))

    def unstack(params: PolicyAndReference, cfg: Any) -> PolicyAndReference:
        return PolicyAndReference(model.unstack(params.policy, cfg), model.unstack(params.reference, cfg))

    functions = dict(forward=forward, unembed=unembed, init_cache=init_cache, cut_cache=cut_cache, unstack=unstack)
    return model._replace(**functions, routes=None)


def _split(cache: Any) -> tuple[PyTree, PyTree]:
    """Returns the caches of policy and reference. With unrolled layers a cache is a tuple of pairs, one per layer."""
    if cache is None or isinstance(cache, PolicyAndReference):
        return cache or (None, None)
    return tuple(layer.policy for layer in cache), tuple(layer.reference for layer in cache)


def _joined(like: Any, first: Any, second: Any) -> Any:
    """Returns two caches as one, in the structure of `like`."""
    if like is None or isinstance(like, PolicyAndReference):
        return PolicyAndReference(first, second)
    return tuple(PolicyAndReference(*layer) for layer in zip(first, second))
