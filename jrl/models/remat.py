"""What a layer keeps for the backward pass, by name; what it does not keep is computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jrl.device.host_memory import HOST
from jrl.types import Array

# none: all that it needs. layer: its input. dots: that and what its matrices made; in dtypes narrower than float32 also
# the stream after attention and what norms divide by. offload: its input, on the host.
Remat = Literal["none", "layer", "dots", "offload"]

INPUT, PRODUCT, STREAM, MEAN = "input", "product", "stream", "mean"  # names of values in a layer

_policies = jax.checkpoint_policies
POLICIES = {
    "layer": None,
    # What nothing reads on the way back is not kept: of an output that is added to the stream, the sum is.
    "dots": _policies.save_only_these_names(PRODUCT, STREAM, MEAN),
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
    return checkpoint_name(x, STREAM) if is_narrow(x.dtype) else x


def mean_square(x: Array, dtype: jnp.dtype) -> Array:
    """Returns `x`, said to be what a norm of numbers of `dtype` divides by: small, and a pass over all that it is the
    mean of."""
    return checkpoint_name(x, MEAN) if is_narrow(dtype) else x


def is_narrow(dtype: jnp.dtype | str) -> bool:
    """Whether layers in `dtype` are arranged for accelerators. What CPUs compute in float32 keeps every bit it had: XLA
    rounds the same sums otherwise where they stand elsewhere."""
    return jnp.dtype(dtype).itemsize < 4


def keeping(remat: Remat, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a layer's function that keeps what `remat` says."""
    return run if remat == "none" else jax.checkpoint(run, policy=POLICIES[remat])
