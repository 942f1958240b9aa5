"""An optimizer's step: clip, direction, weight decay, learning rate; nothing changes where the step is not sound.

    gradient --clip--> --direction (AdamW, Muon, ..)--> --weight decay--> --learning rate--> update

All floats are traced: changing one never recompiles. In every function, `row` is the row of OPTIMIZERS for `config`,
and `leaves` is a tree of Leaf.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jrl.device.host_memory import to_device, to_host
from jrl.learning.optimizers.adamw import AdamW
from jrl.learning.optimizers.contract import Optimizer
from jrl.learning.optimizers.groups import check_groups, peak_rate, trained_only, weight_decay
from jrl.learning.optimizers.schedules import share_of_peak
from jrl.types import Array, PyTree


def check(row: Optimizer, config: Any, leaves: PyTree) -> None:
    """Raises ValueError where an optimizer cannot train a model."""
    check_groups(config, leaves)
    trained = trained_only(config, leaves, leaves)
    row.check(config, trained)
    if not isinstance(direction := row.direction(config, trained), optax.GradientTransformation):
        raise ValueError(f"the direction of {type(config).__name__} is of type {type(direction).__name__}; it must be "
                         "an optax.GradientTransformation")  # fmt: skip


def transformation(row: Optimizer, config: Any, leaves: PyTree) -> optax.GradientTransformation:
    """Returns the optax transformation of the trained arrays; trees have None in place of the others. It keeps moments
    on the device; only `begin` and `step` handle moments in host memory."""
    return optax.chain(clip(config), _unclipped(row, config, trained_only(config, leaves, leaves)))


def keeps_on_host(config: Any) -> bool:
    """Whether moments are in host memory between updates."""
    return isinstance(config, AdamW) and config.memory == "host"


def begin(row: Optimizer, config: Any, params: PyTree, leaves: PyTree) -> optax.OptState:
    """Returns the initial state of the optimizer, with moments in the memory that holds them between updates."""
    state = transformation(row, config, leaves).init(trained_only(config, params, leaves))
    if not keeps_on_host(config):
        return state
    return (state[0], _map_moments(row, config, trained_only(config, leaves, leaves), to_host, state[1]))


def step(
    row: Optimizer,
    config: Any,
    gradient: PyTree,
    state: optax.OptState,
    params: PyTree,
    leaves: PyTree,
    sound: Array,
) -> tuple[PyTree, optax.OptState, PyTree]:
    """Returns parameters and state after one step, and the updates: what is added if `sound`; None for frozen arrays.

    O7, O8: where not `sound`, parameters and state keep every bit, and the schedule does not advance.

    Args:
      leaves: a Leaf for each array of `params`; what the model or a group freezes stays as it is.
      sound: [] bool.
    """
    trained_gradient, weights = (trained_only(config, tree, leaves) for tree in (gradient, params))
    trained_leaves = trained_only(config, leaves, leaves)
    if keeps_on_host(config):
        weights, state, updates = _leaf_by_leaf(row, config, trained_gradient, state, weights, trained_leaves, sound)
    else:
        updates, new_state = transformation(row, config, leaves).update(trained_gradient, state, weights)
        if_sound = lambda new, old: jax.tree.map(lambda a, b: jnp.where(sound, a, b), new, old)
        weights, state = if_sound(optax.apply_updates(weights, updates), weights), if_sound(new_state, state)
    merge = lambda old, new: old if new is None else new
    return jax.tree.map(merge, params, weights), state, updates


def _leaf_by_leaf(
    row: Optimizer,
    config: AdamW,
    gradient: PyTree,
    state: optax.OptState,
    params: PyTree,
    leaves: PyTree,
    sound: Array,
) -> tuple[PyTree, optax.OptState, PyTree]:
    """Returns what `step` does, with moments that come from the host and go back one leaf of the parameters at a time.

    A leaf is updated in a loop of one iteration, or of none where not `sound`: XLA does not move copies out of a loop.
    Barriers do not help: they are gone by the time XLA schedules copies, and all moments arrived at the start of the
    program, before the gradient (libtpu 0.0.42.1).
    """
    # Only clipping looks at several leaves together. The rest takes trees with None in all places but one.
    gradient, clipped = clip(config).update(gradient, state[0], params)
    moments = lambda fn, state, *rest: _map_moments(row, config, leaves, fn, state, *rest)
    places = jax.tree.unflatten(jax.tree.structure(params), range(len(jax.tree.leaves(params))))

    def updated_leaf(i: int) -> tuple[PyTree, optax.OptState, PyTree]:
        leaf_only = lambda tree: jax.tree.map(lambda x, place: x if place == i else None, tree, places)
        leaf_state = moments(lambda moment, place: moment if place == i else None, state[1], places)
        transform = _unclipped(row, config, leaf_only(leaves))

        def update(_: Array, carry: tuple[PyTree, optax.OptState, PyTree]) -> tuple[PyTree, optax.OptState, PyTree]:
            weight, leaf_state, gradient = carry
            added, leaf_state = transform.update(gradient, moments(to_device, leaf_state), weight)
            return optax.apply_updates(weight, added), moments(to_host, leaf_state), added

        carry = (leaf_only(params), leaf_state, leaf_only(gradient))
        return jax.lax.fori_loop(0, sound.astype(jnp.int32), update, carry)

    merge = lambda *copies: next((x for x in copies if x is not None), None)
    updated = map(updated_leaf, jax.tree.leaves(places))
    params, unclipped_state, updates = jax.tree.map(merge, *updated, is_leaf=lambda x: x is None)
    return params, (clipped, unclipped_state), updates


def _map_moments(
    row: Optimizer, config: AdamW, leaves: PyTree, fn: Any, state: optax.OptState, *rest: PyTree
) -> optax.OptState:
    """Returns the state with `fn` applied to its moments, not to its counts. `rest`: trees like the parameters."""
    same_structure = dataclasses.replace(config, moments=None)
    return optax.tree.map_params(_unclipped(row, same_structure, leaves), fn, state, *rest)


def clip(config: Any) -> optax.GradientTransformation:
    """Returns O2: the gradient times min(1, clip_norm / its global norm), over all trained arrays.

    It applies to the gradient of the whole optimizer step, divided by the step's denominator. [3, 4] clipped to norm 1
    is [0.6, 0.8].

    Source: 1211.5063.
    """
    return optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)


def _unclipped(row: Optimizer, config: Any, leaves: PyTree) -> optax.GradientTransformation:
    """Returns the part of the optimizer that treats each array separately. `leaves`: None for what is not trained."""
    return optax.chain(row.direction(config, leaves), _decayed(config, leaves), _scaled_by_rate(config, leaves))


def _decayed(config: Any, leaves: PyTree) -> optax.GradientTransformation:
    """Returns the transformation that adds weight decay to directions; both are then scaled by the learning rate."""

    def add(leaf: Any, u: Array, w: Array) -> Array:
        decay = weight_decay(config, leaf)
        return u if decay is None else u + jnp.asarray(decay, u.dtype) * w

    return optax.stateless(lambda updates, params: jax.tree.map(add, leaves, updates, params))


def _scaled_by_rate(config: Any, leaves: PyTree) -> optax.GradientTransformation:
    """Returns the transformation that multiplies directions by minus their array's learning rate at this update."""

    def update(updates: PyTree, state: optax.ScaleByScheduleState, params: PyTree = None) -> tuple[PyTree, Any]:
        share = share_of_peak(config.schedule, state.count)
        scale = lambda leaf, u: jnp.asarray(-peak_rate(config, leaf) * share, u.dtype) * u
        return jax.tree.map(scale, leaves, updates), optax.ScaleByScheduleState(optax.safe_increment(state.count))

    return optax.GradientTransformation(lambda params: optax.ScaleByScheduleState(jnp.zeros((), jnp.int32)), update)
