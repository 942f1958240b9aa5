"""Pallas TPU kernels for the gradients of the product of rows, sorted by expert, with their experts' matrices.

    d matrices_e = sum over the rows r of expert e of x_r^T gradient_r         d x_r = gradient_r matrices_e^T

For the first, libtpu's product covers all rows for every expert, those of other experts masked; for the second, it
reads a transposed copy of all matrices. Here each expert visits only the tiles that hold its rows, and its matrix is
read as it is stored; a tile with rows of two experts is visited by both. The reference is the gradient of
`jax.lax.ragged_dot`. Compiled for TPUs and interpreted on CPUs so far; no TPU has run them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jrl.device.sharding import varying_axes
from jrl.models.expert_tiles import ROWS, columns_at_once, matrix_block
from jrl.models.kernel_ops import product
from jrl.types import Array


def of_matrices(x: Array, gradient: Array, sizes: Array, dtype: Any, *, interpret: bool = False) -> Array:
    """Returns the gradient of matrices [experts, in, out] in `dtype`, summed in float32; 0 for an expert without rows.

    Args:
      x: [rows, in], sorted by expert. gradient: [rows, out], in the same order, with respect to each row's product with
        its expert's matrix. Rows past the experts' own are ignored, whatever they hold.
      sizes: [experts] int32, number of rows per expert.
      interpret: runs the kernel in interpret mode, on any device. For tests.
    """
    (rows, inputs), outputs, experts = x.shape, gradient.shape[1], len(sizes)
    itemsize = max(jnp.dtype(of).itemsize for of in (x.dtype, gradient.dtype, dtype))
    by_in, by_out = (columns_at_once(columns, itemsize) for columns in (inputs, outputs))
    visits = _visits(rows, sizes)
    varying = jax.sharding.ManualAxisType(varying=frozenset().union(*map(varying_axes, (x, gradient, sizes))))
    grid = (-(-inputs // by_in), -(-outputs // by_out), len(visits[0]))
    run = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=grid,
            in_specs=[
                pl.BlockSpec((ROWS, by_in), lambda i, o, visit, expert, tile, *_: (tile[visit], i)),
                pl.BlockSpec((ROWS, by_out), lambda i, o, visit, expert, tile, *_: (tile[visit], o)),
            ],
            out_specs=pl.BlockSpec((None, by_in, by_out), lambda i, o, visit, expert, *_: (expert[visit], i, o)),
            scratch_shapes=[pltpu.VMEM((by_in, by_out), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((experts, inputs, outputs), dtype, manual_axis_type=varying),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="expert_gradient",
    )
    return run(*visits, x, gradient)


def of_rows(gradient: Array, matrices: Array, sizes: Array, *, interpret: bool = False) -> Array:
    """Returns the gradient of the rows [rows, in] in the dtype of `gradient`, summed in float32; undefined in rows past
    the experts' own.

    Args:
      gradient: [rows, out], as in `of_matrices`. matrices: [experts, in, out]. sizes: [experts] int32.
      interpret: runs the kernel in interpret mode, on any device. For tests.
    """
    (rows, outputs), inputs = gradient.shape, matrices.shape[1]
    itemsize = max(jnp.dtype(of).itemsize for of in (gradient.dtype, matrices.dtype))
    by_in, by_out = matrix_block(inputs, outputs, itemsize)
    visits = _visits(rows, sizes)
    varying = jax.sharding.ManualAxisType(varying=frozenset().union(*map(varying_axes, (gradient, matrices, sizes))))
    run = pl.pallas_call(
        _rows_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(-(-inputs // by_in), len(visits[0]), outputs // by_out),
            in_specs=[
                pl.BlockSpec((ROWS, by_out), lambda i, visit, o, expert, tile, *_: (tile[visit], o)),
                pl.BlockSpec((None, by_in, by_out), lambda i, visit, o, expert, *_: (expert[visit], i, o)),
            ],
            out_specs=pl.BlockSpec((ROWS, by_in), lambda i, visit, o, expert, tile, *_: (tile[visit], i)),
            scratch_shapes=[pltpu.VMEM((ROWS, by_in), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((rows, inputs), gradient.dtype, manual_axis_type=varying),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="expert_rows_gradient",
    )
    return run(*visits, gradient, matrices)


def _visits(rows: int, sizes: Array) -> tuple[Array, ...]:
    """Returns the kernel's schedule, int32: the expert and the row tile of each visit, in order, [tiles + experts];
    each expert's first row and the row after its last, [experts]; and the number of visits, [1]. An expert without rows
    is visited once, to write its zeros. Visits after the last repeat it and do nothing."""
    tiles = -(-rows // ROWS)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts = ends - sizes
    first = jnp.minimum(starts // ROWS, tiles - 1)
    last = jnp.where(sizes > 0, (ends - 1) // ROWS, first)
    visit_ends = jnp.cumsum(last - first + 1, dtype=jnp.int32)
    visit = jnp.arange(tiles + len(sizes), dtype=jnp.int32)
    expert = (visit[:, None] >= visit_ends[None]).sum(1, dtype=jnp.int32)
    expert = jnp.minimum(expert, len(sizes) - 1)
    tile = jnp.minimum(last[expert] - (visit_ends[expert] - 1 - visit), last[expert])
    return expert, tile, starts, ends, visit_ends[-1:]


# Pallas fixes the signature: one ref per prefetched scalar, input, output and scratch buffer, in this order.
def _kernel(
    expert: Any, tile: Any, starts: Any, ends: Any, count: Any, x: Any, gradient: Any, out: Any, total: Any
) -> None:
    """Adds one visit's product to its expert's sum; writes the sum at the expert's last visit.

    Args:
      x: [ROWS, inputs], gradient: [ROWS, outputs], a tile of rows. out: [inputs, outputs]. total: the same in float32.
    """
    visit, last_visit = pl.program_id(2), pl.num_programs(2) - 1
    current = expert[visit]

    @pl.when((visit == 0) | (expert[jnp.maximum(visit - 1, 0)] != current))
    def begin() -> None:
        total[...] = jnp.zeros_like(total)

    @pl.when((visit < count[0]) & (ends[current] > starts[current]))
    def add() -> None:
        masked = functools.partial(_mask_rows, first=tile[visit] * ROWS, start=starts[current], end=ends[current])
        total[...] += product(masked(x[...]).T, masked(gradient[...]))

    @pl.when((visit == last_visit) | (expert[jnp.minimum(visit + 1, last_visit)] != current))
    def finish() -> None:
        out[...] = total[...].astype(out.dtype)


def _rows_kernel(
    expert: Any, tile: Any, starts: Any, ends: Any, count: Any, gradient: Any, matrix: Any, out: Any, total: Any
) -> None:
    """Adds one visit's product to its tile's sum; writes the sum at the tile's last visit.

    Args:
      gradient: [ROWS, outputs], a tile of rows. matrix: [inputs, outputs]. out: [ROWS, inputs]. total: the same in
        float32.
    """
    visit, last_visit = pl.program_id(1), pl.num_programs(1) - 1
    part, last_part = pl.program_id(2), pl.num_programs(2) - 1
    current, of_tile = expert[visit], tile[visit]

    @pl.when((part == 0) & ((visit == 0) | (tile[jnp.maximum(visit - 1, 0)] != of_tile)))
    def begin() -> None:
        total[...] = jnp.zeros_like(total)

    @pl.when((visit < count[0]) & (ends[current] > starts[current]))
    def add() -> None:
        own = _mask_rows(gradient[...], first=of_tile * ROWS, start=starts[current], end=ends[current])
        total[...] += product(own, matrix[...], inputs=1)

    @pl.when((part == last_part) & ((visit == last_visit) | (tile[jnp.minimum(visit + 1, last_visit)] != of_tile)))
    def finish() -> None:
        out[...] = total[...].astype(out.dtype)


def _mask_rows(x: Array, first: Array, start: Array, end: Array) -> Array:
    """Returns a tile, whose first row has index `first`, with the rows outside [start, end) set to 0."""
    row = first + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where((row >= start) & (row < end), x, jnp.zeros_like(x))
