"""Products with a decoder's matrices, including their adapters."""

from __future__ import annotations

from jrl.device.sharding import einsum, gather
from jrl.models.adapters.quantized import gathered
from jrl.models.contract import ADAPTER
from jrl.models.remat import product
from jrl.types import Array, PyTree


def multiply(formula: str, x: Array, weights: PyTree, name: str, axes: tuple[str, ...]) -> Array:
    """Returns x times the matrix `name`; with its adapter, if it has one: c * (x W + (x A) B).

    Args:
      formula: einsum of x and the matrix; letters that only the matrix and the result have are its outputs.
      axes: logical axes of the matrix.
    """
    rows, matrix, result = formula.replace("->", ",").split(",")
    into, out = [
        [i for i, letter in enumerate(matrix) if (letter in result) is in_result] for in_result in (False, True)
    ]
    out_axes = ("batch", None, *(OUTPUTS.get(axes[i]) for i in out))
    y = einsum(formula, x, gathered(weights, name, x, *axes), out_axes)
    if name not in weights.get(ADAPTER, ()):
        return product(y)
    adapter = weights[ADAPTER][name]
    a = gather(adapter["a"], *(axes[i] for i in into), "rank").astype(x.dtype)
    b = gather(adapter["b"], "rank", *(axes[i] for i in out)).astype(x.dtype)
    low = einsum(f"{rows},{''.join(matrix[i] for i in into)}r->{rows[:2]}r", x, a, ("batch", None, None))
    y = product(y + einsum(f"{rows[:2]}r,r{''.join(matrix[i] for i in out)}->{result}", low, b, out_axes))
    if "c" not in adapter:
        return y
    return y * gather(adapter["c"], *(axes[i] for i in out))[None, None].astype(y.dtype)


def plus(x: Array, weights: PyTree, name: str) -> Array:
    """Returns x [B, L, ...] plus the bias `name`, if the model has it."""
    return x + weights[name][None, None].astype(x.dtype) if name in weights else x


OUTPUTS = {"heads": "heads", "kv_heads": "kv_heads", "mlp": "mlp"}  # a matrix's axes that activations stay sharded over
