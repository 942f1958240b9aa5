"""Products of rows, sorted by expert, with their experts' matrices: `jax.lax.ragged_dot`. On TPUs our own kernels
(`expert_gradient`) compute both gradients: for that of the matrices XLA's product covers all rows for every expert,
masked, and for that of the rows it copies all matrices, transposed."""

from __future__ import annotations

import jax

from jrl.device.sharding import varying_axes
from jrl.models.remat import is_narrow
from jrl.types import Array


def grouped_product(x: Array, matrices: Array, sizes: Array) -> Array:
    """Returns each row of x times its expert's matrix, [rows, out]; undefined in rows past the experts' own.

    Args:
      x: [rows, in], sorted by expert. matrices: [experts, in, out]. sizes: [experts] int32, rows per expert.
    """
    axes = frozenset().union(*map(varying_axes, (x, matrices)))
    # JAX sums a gradient over the axes that its argument is replicated on, where the argument is cast to varying.
    vary = lambda a: jax.lax.pcast(a, tuple(axes - varying_axes(a)), to="varying")
    return _product(vary(x), vary(matrices), sizes)


def _ragged(x: Array, matrices: Array, sizes: Array) -> Array:
    # Products of narrow dtypes are exact in one pass, and the TPU's kernel does not compile for more passes.
    precision = jax.lax.Precision.DEFAULT if is_narrow(x.dtype) else None
    return jax.lax.ragged_dot(x, matrices, sizes, precision=precision)


_product = jax.custom_vjp(_ragged)


def _forward(x: Array, matrices: Array, sizes: Array) -> tuple[Array, tuple]:
    return _ragged(x, matrices, sizes), (x, matrices, sizes)


def _backward(inputs: tuple, gradient: Array) -> tuple[Array, Array, None]:
    # Importing Pallas takes half a second, on a CPU too, since the branches of all platforms are traced.
    from jrl.models.expert_gradient import of_matrices, of_rows

    def reference(x: Array, matrices: Array, sizes: Array, gradient: Array) -> tuple[Array, Array]:
        return jax.vjp(lambda x, matrices: _ragged(x, matrices, sizes), x, matrices)[1](gradient)

    def kernels(x: Array, matrices: Array, sizes: Array, gradient: Array) -> tuple[Array, Array]:
        return of_rows(gradient, matrices, sizes).astype(x.dtype), of_matrices(x, gradient, sizes, matrices.dtype)

    return *jax.lax.platform_dependent(*inputs, gradient, tpu=kernels, default=reference), None


_product.defvjp(_forward, _backward)
