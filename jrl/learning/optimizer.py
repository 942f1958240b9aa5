"""AdamW with clipping and a schedule, from optax. Its floats are traced: changing one never recompiles."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import optax

from jrl.device.host_memory import to_device, to_host
from jrl.types import Array, PyTree, traced

# bfloat16 has 8 bits: a moment that changes by less than half of 2^-8 of itself stays as it is.
SLOWEST = 0.99


@traced
class AdamW:
    """Adam with decoupled weight decay (1711.05101), gradients clipped by global norm, learning rate scheduled."""

    learning_rate: float = 1e-4  # peak
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # from the peak to 0 over decay_steps
    warmup_steps: int = 0  # linear, the first step at peak / warmup_steps
    decay_steps: int | None = None  # optimizer steps from the peak to 0; needed by linear and cosine
    b1: float = 0.9  # decay of the first moment
    b2: float = 0.95  # decay of the second moment
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.0  # times the learning rate, subtracted from weights
    clip_norm: float | None = 1.0  # largest global norm of a gradient; None: no clipping
    moments: Literal["bfloat16"] | None = None  # how they are stored; they are computed wide. None: as the parameters
    memory: Literal["device", "host"] = "device"  # where they lie between updates; from the host they come leaf by leaf

    def __post_init__(self) -> None:
        if self.schedule != "constant" and self.decay_steps is None:
            raise ValueError(f"schedule={self.schedule!r} needs decay_steps")
        if self.schedule == "constant" and self.decay_steps is not None:
            raise ValueError("decay_steps has no effect with schedule='constant'")
        if self.warmup_steps < 0 or (self.decay_steps is not None and self.decay_steps < 1):
            raise ValueError("AdamW counts warmup_steps from 0 and decay_steps from 1")
        limits = {
            "learning_rate": lambda x: x > 0,
            "b1": lambda x: 0 <= x < 1,
            "b2": lambda x: 0 <= x < 1,
            "eps": lambda x: x > 0,
            "weight_decay": lambda x: x >= 0,
            "clip_norm": lambda x: x > 0,
        }
        for name, holds in limits.items():
            value = getattr(self, name)
            if isinstance(value, int | float) and not holds(value):  # else it is None, or traced
                raise ValueError(f"AdamW.{name} = {value} cannot train")
        for name in ("b1", "b2"):
            value = getattr(self, name)
            if self.moments == "bfloat16" and isinstance(value, int | float) and value > SLOWEST:
                raise ValueError(
                    f"AdamW.{name} = {value} does not go with moments='bfloat16': a step of {1 - value:.2g} of one "
                    f"is lost in its rounding; set it to {SLOWEST} or less, or moments=None"
                )


def optimizer(config: AdamW) -> optax.GradientTransformation:
    """Returns the optax transformation of `config`; its floats may be tracers. Moments are on the device: where they
    may not be, `begin` and `step` know."""
    return optax.chain(_clip(config), _stored(config))


def begin(config: AdamW, params: PyTree) -> optax.OptState:
    """Returns the first state of the optimizer, its moments where they lie between updates."""
    state = optimizer(config).init(params)
    if config.memory == "device":
        return state
    return (state[0], optax.tree.map_params(_adam(config), to_host, state[1]))


def step(
    config: AdamW, gradient: PyTree, state: optax.OptState, params: PyTree, trained: PyTree, sound: Array
) -> tuple[PyTree, optax.OptState, PyTree]:
    """Returns parameters and state after one step, as they were where not `sound`; and what was added, if it was.

    Args:
      trained: bool for each leaf of `params`; where False it stays as it is.
      sound: [] bool.
    """
    if config.memory == "host":
        return _leaf_by_leaf(config, gradient, state, params, trained, sound)
    updates, new = optimizer(config).update(gradient, state, params)
    updates = _only(updates, trained)
    keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(sound, a, b), new, old)
    return keep(optax.apply_updates(params, updates), params), keep(new, state), updates


def _leaf_by_leaf(
    config: AdamW, gradient: PyTree, state: optax.OptState, params: PyTree, trained: PyTree, sound: Array
) -> tuple[PyTree, optax.OptState, PyTree]:
    """Returns what `step` does, of moments that come from the host and go back a leaf of the parameters at a time.

    A leaf's turn is a loop of one turn, or of none where not `sound`: only what lies in a loop is not copied before
    it. Barriers are gone by the time that XLA schedules copies, and every moment came at the start of the program,
    before the gradient (libtpu 0.0.42.1).
    """
    # Clipping alone looks at two leaves together. The rest takes trees with None in all places but one.
    gradient, clipped = _clip(config).update(gradient, state[0], params)
    moments = lambda fn, state, *rest: optax.tree.map_params(_adam(config), fn, state, *rest)
    places = jax.tree.unflatten(jax.tree.structure(params), range(len(jax.tree.leaves(params))))

    def turn(i: int) -> tuple[PyTree, optax.OptState, PyTree]:
        alone = lambda tree: jax.tree.map(lambda x, place: x if place == i else None, tree, places)
        own = moments(lambda moment, place: moment if place == i else None, state[1], places)

        def update(_: Array, carry: tuple[PyTree, optax.OptState, PyTree]) -> tuple[PyTree, optax.OptState, PyTree]:
            weight, own, gradient = carry
            added, own = _stored(config).update(gradient, moments(to_device, own), weight)
            added = _only(added, alone(trained))
            return optax.apply_updates(weight, added), moments(to_host, own), added

        return jax.lax.fori_loop(0, sound.astype(jnp.int32), update, (alone(params), own, alone(gradient)))

    first = lambda *found: next(x for x in found if x is not None)
    turns = map(turn, jax.tree.leaves(places))
    params, own, updates = jax.tree.map(first, *turns, is_leaf=lambda x: x is None)
    return params, (clipped, own), updates


def _only(updates: PyTree, trained: PyTree) -> PyTree:
    """Returns `updates`, 0 for leaves that are not trained."""
    return jax.tree.map(lambda x, is_trained: x if is_trained else jnp.zeros_like(x), updates, trained)


def _clip(config: AdamW) -> optax.GradientTransformation:
    return optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)


def _adam(config: AdamW) -> optax.GradientTransformation:
    return optax.adamw(_schedule(config), b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay)


def _stored(config: AdamW) -> optax.GradientTransformation:
    return _adam(config) if config.moments is None else _stored_narrow(_adam(config))


def _stored_narrow(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns `adam` with its moments in bfloat16 between steps, rounded to nearest."""

    wide = lambda moment, weight: moment.astype(jnp.promote_types(weight.dtype, jnp.float32))
    narrow = lambda state: optax.tree.map_params(adam, lambda moment: moment.astype(jnp.bfloat16), state)

    def update(gradient: PyTree, state: optax.OptState, params: PyTree) -> tuple[PyTree, optax.OptState]:
        updates, state = adam.update(gradient, optax.tree.map_params(adam, wide, state, params), params)
        return updates, narrow(state)

    return optax.GradientTransformation(lambda params: narrow(adam.init(params)), update)


def _schedule(config: AdamW) -> optax.Schedule:
    peak = config.learning_rate
    if config.schedule == "linear":
        after = optax.linear_schedule(peak, 0.0, config.decay_steps)
    elif config.schedule == "cosine":
        after = lambda count: peak * optax.cosine_decay_schedule(1.0, config.decay_steps)(count)
    else:
        after = optax.constant_schedule(peak)
    if config.warmup_steps == 0:
        return after
    warm = optax.linear_schedule(peak / config.warmup_steps, peak, config.warmup_steps - 1)
    return optax.join_schedules([warm if config.warmup_steps > 1 else after, after], [config.warmup_steps])
