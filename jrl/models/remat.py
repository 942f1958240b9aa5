"""What a layer saves for the backward pass, by name; everything else is recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jrl.device.host_memory import HOST
from jrl.types import Array

# none: everything that it needs. layer: its input. dots: also the outputs of its matrix products and, in dtypes
# narrower than float32, the stream after attention and the mean squares of its norms. offload: its input, on the host.
Remat = Literal["none", "layer", "dots", "offload"]

INPUT, PRODUCT, STREAM, MEAN = "input", "product", "stream", "mean"  # names of values in a layer

_policies = jax.checkpoint_policies
POLICIES = {
    "layer": None,
    # What the backward pass does not read is not saved: of an output that is added to the stream, only the sum is.
    "dots": _policies.save_only_these_names(PRODUCT, STREAM, MEAN),
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[INPUT], offload_src="device", offload_dst=HOST
    ),
}


def layer_input(x: Array) -> Array:
    """Returns `x`, named as the input of a layer."""
    return checkpoint_name(x, INPUT)


def product(x: Array) -> Array:
    """Returns `x`, named as the output of a matrix product."""
    return checkpoint_name(x, PRODUCT)


def stream(x: Array) -> Array:
    """Returns `x`, named as the residual stream between attention and MLP if its dtype is narrow."""
    return checkpoint_name(x, STREAM) if is_narrow(x.dtype) else x


def mean_square(x: Array, dtype: jnp.dtype) -> Array:
    """Returns `x`, named as the mean square of a norm's input if the input's `dtype` is narrow. It is small, and
    recomputing it takes a pass over the input."""
    return checkpoint_name(x, MEAN) if is_narrow(dtype) else x


def is_narrow(dtype: jnp.dtype | str) -> bool:
    """Whether layers in `dtype` are arranged for accelerators. Float32 results on CPUs must stay bit-identical, and XLA
    rounds a sum differently when it is moved."""
    return jnp.dtype(dtype).itemsize < 4


def keeping(remat: Remat, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a layer's function `run`, saving only what `remat` names."""
    return run if remat == "none" else jax.checkpoint(run, policy=POLICIES[remat])
