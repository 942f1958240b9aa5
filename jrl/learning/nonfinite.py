"""Finds where a step stopped being finite: in the weights, the batch, a layer, the loss or the gradient.

It runs once, after a run has stopped, and is no part of a step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrl.algos.contract import Objective
from jrl.device.host_memory import to_device
from jrl.device.placement import fetch
from jrl.device.precision import full_precision
from jrl.learning.layout import RouterLoss
from jrl.learning.learner import (
    Teacher,
    Weights,
    as_read,
    frozen_of,
    hidden_of,
    loss_sums,
    micro_batch,
    model_outputs,
    sequence_terms,
    teacher_of,
    token_terms,
)
from jrl.learning.row_layout import row_layout
from jrl.models.contract import Model, merge_params
from jrl.models.leaves import layers_of
from jrl.models.shape import Decoder
from jrl.types import Array, PackedBatch, PyTree, TrainBatch, TrainState

PLACES = ("activations", "log-probs", "values", "scores", "loss", "loss of sequences")  # of a forward pass, in order


class Fault(NamedTuple):
    """The first place, in the order of computation, that holds a value which is not finite."""

    place: str  # "weights", "optimizer", "batch", one of PLACES, "gradient"
    name: str = ""  # the leaf or the field; "" if the place is enough
    layer: int | None = None  # counted from 0; None: no layer, or not known
    sequences: tuple[int, ...] = ()  # indices among the step's; (): not in particular sequences

    def __str__(self) -> str:
        layer = "" if self.layer is None else f" of layer {self.layer}"
        return f"{self.place}{f' ({self.name})' if self.name else ''}{layer}"


@full_precision()
def find_fault(
    state: TrainState,
    batch: TrainBatch,
    config: PyTree,
    router: RouterLoss | None = None,
    *,
    role: str,
    objective: Objective,
    model: Model,
    cfg: Any,
    chunk: int,
    teacher_kind: tuple[Model, Any] | None = None,
) -> Fault | None:
    """Returns the first fault of an update of the model in `role`, computed with the weights in `state`; None if it is
    finite.

    Args:
      config: the objective's, floats as arrays. router: the terms that a mixture of experts adds to the loss.
      teacher_kind: as in `jrl.learning.learner.loss_sums`.
    """
    trained, frozen = state.models[role], frozen_of(state.models, role)
    weights = Weights(merge_params(frozen, trained.params), trained.heads)
    for place, tree in (("weights", weights), ("optimizer", trained.opt_state)):
        for name, (layer, _) in _bad_leaves(tree, cfg):
            return Fault(place, name, layer)
    bad_places, inputs, sums = _compiled(objective, model, cfg, chunk, teacher_kind)
    teacher = teacher_of(state, config, objective)
    if (fault := _bad_field(batch)) is not None:
        return fault
    for i in range(int(batch.packed.num_real)):
        flags = bad_places(weights, batch, config, state.objective, i, teacher)
        for place in (place for place in PLACES if place in flags):
            flag = fetch(flags[place])
            if flag.any():
                layer = None
                if place == "activations":
                    packed = inputs(weights.params, batch, config, i)
                    layer = _first_bad_layer(weights.params, packed, model, cfg)
                return Fault(place, "", layer, _sequences(batch, i, flag))
    trainable = Weights(trained.params, trained.heads)
    total = sums(trainable, batch, config, state.objective, router, frozen=frozen, teacher=teacher)
    if not np.isfinite(np.asarray(total.loss)):
        return Fault("loss", "sum")
    if (bad := _bad_gradient(total.gradient, cfg)) is not None:
        return Fault("gradient", *bad)
    # The update takes the norm: the squares of a finite gradient may overflow.
    norm = optax.tree.norm(jax.tree.map(lambda g: g / batch.denominator, total.gradient))
    if not np.isfinite(np.asarray(norm)):
        return Fault("gradient", "norm")
    return None


def bad_weights(state: TrainState, cfg: Any) -> tuple[Fault, str] | None:
    """Returns the first fault in the weights of any role, and the role; None if all are finite."""
    for role in sorted(state.models, key=lambda role: (role != "policy", role)):
        trained = state.models[role]
        for name, (layer, _) in _bad_leaves(Weights(trained.params, trained.heads), cfg):
            return Fault("weights", name, layer), role
    return None


@functools.lru_cache(maxsize=4)
def _compiled(
    objective: Objective, model: Model, cfg: Any, chunk: int, teacher_kind: tuple[Model, Any] | None
) -> tuple[Callable, Callable, Callable]:
    """Returns `_read`, `_inputs` and `loss_sums`, compiled once for all batches of a step."""
    static = dict(objective=objective, model=model, cfg=cfg, chunk=chunk)
    bad_places, sums = (functools.partial(fn, **static, teacher_kind=teacher_kind) for fn in (_read, loss_sums))
    return jax.jit(bad_places), jax.jit(functools.partial(_inputs, **static)), jax.jit(sums)


def _inputs(
    params: PyTree,
    batch: TrainBatch,
    config: PyTree,
    i: Array,
    *,
    objective: Objective,
    model: Model,
    cfg: Any,
    chunk: int,
) -> PackedBatch:
    """Returns micro-batch `i` as the model reads it."""
    micro = micro_batch(batch, i)
    return as_read(params, micro.packed, micro.loss_mask, model, cfg, chunk, objective.needs(config))


def _read(
    weights: Weights, batch: TrainBatch, config: PyTree, state: PyTree, i: Array, teacher: PyTree | None, *,
    objective: Objective, model: Model, cfg: Any, chunk: int, teacher_kind: tuple[Model, Any] | None,
) -> dict[str, Array]:  # fmt: skip
    """Returns where micro-batch `i` is not finite: {place of PLACES: [R, L] or [R, S] bool}."""
    micro, needs = micro_batch(batch, i), objective.needs(config)
    places = micro.packed.sequence.shape[-1]
    packed = _inputs(weights.params, batch, config, i, objective=objective, model=model, cfg=cfg, chunk=chunk)
    hidden, _ = hidden_of(weights.params, packed, model, cfg)
    teacher_model = None if teacher is None else Teacher(teacher, *(teacher_kind or (model, cfg)))
    outputs = model_outputs(weights, micro.packed, micro.loss_mask, model, cfg, chunk, needs, teacher_model)
    flags = {"activations": row_layout().joined(~jnp.isfinite(hidden).all(-1)) & (micro.packed.segment < places)}
    for name, value in (("log-probs", outputs.logprobs), ("values", outputs.values)):
        if value is not None:
            flags[name] = ~jnp.isfinite(value) & micro.loss_mask
    if outputs.scores is not None:
        flags["scores"] = _of_any_output(~jnp.isfinite(outputs.scores), micro.targets.counts)
    if objective.token_loss is not None:
        flags["loss"] = ~jnp.isfinite(token_terms(outputs, micro, config, state, objective)[0])
    if objective.sequence_loss is not None:
        flags["loss of sequences"] = ~jnp.isfinite(sequence_terms(outputs, micro, config, state, objective)[0])
    return flags


def _bad_field(batch: TrainBatch) -> Fault | None:
    """Returns the first field of a batch that is not finite where the loss reads it; None if all are."""
    packed, before = batch.packed, batch.recomputed
    token_fields = {
        "behaviour_logprobs": packed.behaviour_logprobs,
        "old_logprobs": before.old_logprobs,
        "old_values": before.old_values,
        "old_entropy": before.old_entropy,
        "old_sum_squared": before.old_sum_squared,
        "ref_logprobs": before.ref_logprobs,
        "teacher_logprobs": before.teacher_logprobs,
        "loss_weights": batch.loss_weights,
        "advantages": batch.advantages,
        "returns": batch.returns,
    }
    masked = [(name, value, batch.loss_mask) for name, value in token_fields.items()]
    if batch.targets is not None:
        masked += [(name, getattr(batch.targets, name), batch.targets.counts) for name in ("label", "weight", "value")]
    for name, value, mask in masked:
        if value is None:
            continue
        value, mask = fetch((value, mask))
        # With several attributes, NaN is an attribute that nobody rated.
        rated = name == "value" and value.ndim > mask.ndim
        flag = _of_any_output(np.isinf(value) if rated else ~np.isfinite(value), mask)
        for i in np.flatnonzero(flag.any(axis=(1, 2))):
            return Fault("batch", name, None, _sequences(batch, int(i), flag[i]))
    if not np.isfinite(np.asarray(batch.denominator)):
        return Fault("batch", "denominator")
    return None


def _of_any_output(flag: Array | np.ndarray, mask: Array | np.ndarray) -> Array | np.ndarray:
    """Returns where the mask is set and the flag, [..., S], or any of the flags of a reward head's K outputs,
    [..., S, K]."""
    return (flag.any(axis=-1) if flag.ndim > mask.ndim else flag) & mask


def _sequences(batch: TrainBatch, i: int, flag: np.ndarray) -> tuple[int, ...]:
    """Returns the sequences of micro-batch `i` that `flag` marks, by token, [R, L], or by place, [R, S]."""
    sequence, segment = (array[i] for array in fetch((batch.packed.sequence, batch.packed.segment)))
    rows, columns = np.nonzero(flag)
    places = segment[rows, columns] if flag.shape == segment.shape else columns
    inside = places < sequence.shape[-1]
    return tuple(sorted({int(n) for n in sequence[rows[inside], places[inside]]}))


def _bad_gradient(gradient: PyTree, cfg: Any) -> tuple[str, int | None] | None:
    """Returns (name, layer) of the leaf of Weights whose gradient is the first that is not finite in the backward pass:
    it runs from the heads through the last norm, the last layer to the first, and on to the embedding. None if all are
    finite."""

    def place(leaf: tuple[str, int | None]) -> tuple[int, int]:
        name, layer = leaf
        is_head, is_norm = name.startswith("heads/") or name == "params/head", name.startswith("params/final_norm")
        return 2 if is_head else 1 if is_norm else 0, -1 if layer is None else layer

    bad = ((name, last) for name, (_, last) in _bad_leaves(gradient, cfg))
    return max(bad, key=place, default=None)


def _bad_leaves(tree: PyTree, cfg: Any) -> Iterator[tuple[str, tuple[int | None, int | None]]]:
    """Yields (name, first and last layer that are not finite) of every leaf with a value that is not finite. Leaves are
    checked on their devices; the host fetches a flag per row."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        bad = fetch(_bad_rows(leaf))
        if bad.any():
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            *above, last = name.split("/")
            stacked = "layers" in above and leaf.ndim > 1
            rows = np.flatnonzero(bad)[[0, -1]] if stacked else (None, None)
            yield name, tuple(None if row is None else _layer_of(last, int(row), cfg) for row in rows)


@jax.jit
def _bad_rows(leaf: Array) -> Array:
    """Returns which rows of an array hold a value that is not finite, [rows] bool; [] bool for a scalar."""
    return ~jnp.isfinite(to_device(leaf)).all(axis=tuple(range(1, leaf.ndim)))


def _layer_of(name: str, row: int, cfg: Any) -> int:
    """Returns the layer at a row of a stacked leaf, since not all layers have every leaf."""
    layers = layers_of(cfg, name) if isinstance(cfg, Decoder) else ()
    return layers[row] if row < len(layers) else row


def _first_bad_layer(params: PyTree, packed: PackedBatch, model: Model, cfg: Any) -> int | None:
    """Returns the first layer whose output is not finite, by bisection over the number of layers that are run; None if
    layers differ and cannot be left out."""
    depth = getattr(cfg, "layers", 0)
    stacked = jax.tree.leaves(params["layers"]) if isinstance(params, dict) and "layers" in params else []
    cut = isinstance(cfg, Decoder) and not cfg.shared_layers and cfg.layer_inputs is None
    if not cut or any(leaf.shape[0] != depth for leaf in stacked):
        return None

    def is_bad(layers: int) -> bool:
        bad = jax.jit(functools.partial(_bad_hidden, model=model, cfg=dataclasses.replace(cfg, layers=layers)))
        return bool(bad(params, packed))

    low, high = 1, depth
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bad(middle) else (middle + 1, high)
    return low - 1


def _bad_hidden(params: PyTree, packed: PackedBatch, *, model: Model, cfg: Any) -> Array:
    """Returns whether the hidden states after the first `cfg.layers` layers are not finite, [] bool."""
    first = jax.tree.map(lambda leaf: leaf[: cfg.layers], params["layers"])
    if packed.routes is not None:  # in order of layers, all of them sparse
        packed = packed.replace(routes=packed.routes[..., : cfg.layers * cfg.experts.per_token])
    hidden, _ = hidden_of({**params, "layers": first}, packed, model, cfg)
    bad = row_layout().joined(~jnp.isfinite(hidden).all(-1))
    return (bad & (packed.segment < packed.sequence.shape[-1])).any()
