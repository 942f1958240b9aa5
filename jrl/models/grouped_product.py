"""Products of rows that are sorted by expert with their experts' matrices: `jax.lax.ragged_dot`, whose gradient of the
matrices is a kernel of our own on TPUs (`expert_gradient`), where XLA's multiplies every row with a mask per expert."""

from __future__ import annotations

import jax

from jrl.device.sharding import varying_axes
from jrl.models.remat import is_narrow
from jrl.types import Array


def grouped_product(x: Array, matrices: Array, sizes: Array) -> Array:
    """Returns each row of x [rows, in], which are sorted by expert, times its expert's matrix, of [experts, in, out].
    `sizes` says how many rows each expert has; the result in rows beyond them is undefined."""
    axes = frozenset().union(*map(varying_axes, (x, matrices)))
    # JAX sums a gradient over the axes along which its argument was copied, and does so where the copy was made.
    alike = lambda a: jax.lax.pcast(a, tuple(axes - varying_axes(a)), to="varying")
    return _product(alike(x), alike(matrices), sizes)


def _ragged(x: Array, matrices: Array, sizes: Array) -> Array:
    # Products of narrow numbers are exact in one pass, and the TPU's kernel refuses to compile for more.
    precision = jax.lax.Precision.DEFAULT if is_narrow(x.dtype) else None
    return jax.lax.ragged_dot(x, matrices, sizes, precision=precision)


_product = jax.custom_vjp(_ragged)


def _forward(x: Array, matrices: Array, sizes: Array) -> tuple[Array, tuple]:
    return _ragged(x, matrices, sizes), (x, matrices, sizes)


def _backward(inputs: tuple, gradient: Array) -> tuple[Array, Array, None]:
    # Pallas is half a second of import, on a CPU too: the branches of all platforms are traced.
    from jrl.models.expert_gradient import of_matrices

    x, matrices, sizes = inputs
    (of_x,) = jax.vjp(lambda x: _ragged(x, matrices, sizes), x)[1](gradient)

    def reference(x: Array, gradient: Array, sizes: Array) -> Array:
        return jax.vjp(lambda matrices: _ragged(x, matrices, sizes), matrices)[1](gradient)[0]

    def kernel(x: Array, gradient: Array, sizes: Array) -> Array:
        return of_matrices(x, gradient, sizes, matrices.dtype)

    return of_x, jax.lax.platform_dependent(x, gradient, sizes, tpu=kernel, default=reference), None


_product.defvjp(_forward, _backward)
