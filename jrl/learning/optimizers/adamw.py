"""AdamW, from optax."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import optax

from jrl.learning.optimizers.contract import Optimizer
from jrl.learning.optimizers.settings import OptimizerSettings, check_rates
from jrl.types import PyTree, traced

# bfloat16 has 8 bits: a moment that changes by less than half of 2^-8 of itself does not change at all.
SLOWEST = 0.99


@traced
class AdamW(OptimizerSettings):
    """Adam with decoupled weight decay (1711.05101), gradients clipped by global norm, learning rate scheduled."""

    b1: float = 0.9  # decay of the first moment
    b2: float = 0.95  # decay of the second moment
    eps: float = 1e-8  # added to the root of the second moment
    # Dtype of the stored moments, which are computed in float32 or wider; None: that of the parameters.
    moments: Literal["bfloat16"] | None = None
    # Where the moments are stored between updates; those on the host are fetched leaf by leaf.
    memory: Literal["device", "host"] = "device"

    def __post_init__(self) -> None:
        decays = lambda x: 0 <= x < 1
        check_rates(self, b1=decays, b2=decays, eps=lambda x: x > 0)
        for name in ("b1", "b2"):
            value = getattr(self, name)
            if self.moments == "bfloat16" and isinstance(value, int | float) and value > SLOWEST:
                raise ValueError(
                    f"AdamW.{name} = {value} does not go with moments='bfloat16': a step of {1 - value:.2g} of one "
                    f"is lost in its rounding; set it to {SLOWEST} or less, or moments=None"
                )


def direction(config: AdamW, leaves: PyTree) -> optax.GradientTransformation:
    """Returns O1, Adam's direction: m / (sqrt(v) + eps), both moments corrected for their start at 0.

    Source: 1412.6980 algorithm 1; decoupled weight decay: 1711.05101. With a constant gradient g the first
    direction is sign(g).
    """
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    return adam if config.moments is None else _stored_narrow(adam)


def _stored_narrow(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns `adam` with its moments in bfloat16 between steps, rounded to nearest."""

    wide = lambda moment, weight: moment.astype(jnp.promote_types(weight.dtype, jnp.float32))
    narrow = lambda state: optax.tree.map_params(adam, lambda moment: moment.astype(jnp.bfloat16), state)

    def update(gradient: PyTree, state: optax.OptState, params: PyTree) -> tuple[PyTree, optax.OptState]:
        updates, state = adam.update(gradient, optax.tree.map_params(adam, wide, state, params), params)
        return updates, narrow(state)

    return optax.GradientTransformation(lambda params: narrow(adam.init(params)), update)


OPTIMIZER = Optimizer(config=AdamW, direction=direction)
