"""What a layer keeps for the backward pass, by name; what it does not keep is computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

from jrl.device.host_memory import HOST
from jrl.types import Array

# none: all that it needs. layer: its input. dots: that, what its matrices made, and the sums that its norms took.
# offload: its input, on the host.
Remat = Literal["none", "layer", "dots", "offload"]

INPUT, PRODUCT, STREAM, MEAN = "input", "product", "stream", "mean"  # names of values in a layer

_policies = jax.checkpoint_policies
POLICIES = {
    "layer": None,
    # What nothing reads on the way back is not kept: of an output that is added to the stream, the sum is.
    "dots": _policies.save_only_these_names(INPUT, PRODUCT, STREAM, MEAN),
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


def stream(x: Array) -> Array:
    """Returns `x`, said to be the residual stream between a layer's two parts."""
    return checkpoint_name(x, STREAM)


def mean_square(x: Array) -> Array:
    """Returns `x`, said to be what a norm divides by: small, and a pass over all that it is the mean of."""
    return checkpoint_name(x, MEAN)


def keeping(remat: Remat, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a layer's function that keeps what `remat` says."""
    return run if remat == "none" else jax.checkpoint(run, policy=POLICIES[remat])
