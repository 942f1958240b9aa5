"""What a layer keeps for the backward pass, by name; what it does not keep is computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from jrl.device.host_memory import HOST
from jrl.types import Array

# none: all that it needs. layer: its input. dots: that and what its matrices made. offload: its input, on the host.
Remat = Literal["none", "layer", "dots", "offload"]

INPUT, PRODUCT = "input", "product"  # names of values in a layer

_policies = jax.checkpoint_policies
POLICIES = {
    "layer": None,
    "dots": _policies.save_only_these_names(PRODUCT),
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[INPUT], offload_src="device", offload_dst=HOST
    ),
}


def layer_input(x: Array) -> Array:
    """Returns `x`, said to be the input of a layer."""
    return checkpoint_name(x, INPUT)


def product(x: Array) -> Array:
    """Returns `x`, said to be what a matrix made of activations."""
    return checkpoint_name(x, PRODUCT)


def keeping(remat: Remat, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a layer's function that keeps what `remat` says."""
    return run if remat == "none" else jax.checkpoint(run, policy=POLICIES[remat])
