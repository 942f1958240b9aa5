"""Advantages, losses, KL terms, reductions and values against plain loops, with derivatives taken by hand.

The loops are those of benchmarks/agreement, which were written before the functions were read; `python -m
benchmarks.agreement` takes 1,000 cases and the functions of other libraries too. Masked entries hold NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.agreement import ours
from benchmarks.agreement.compare import BAR, against_loop, cases_of, loop_of, parts_compared

PARTS = {part["function"].rpartition(":")[2]: part for part in parts_compared() if loop_of(part) is not None}


@pytest.mark.parametrize("name", PARTS)
def test_it_equals_a_plain_loop(name):
    value, slope = against_loop(PARTS[name], count=20, seed=0)
    assert value <= BAR
    assert slope is None or slope <= BAR


ARITHMETIC = {
    "add",
    "sub",
    "mul",
    "div",
    "exp",
    "expm1",
    "log",
    "log1p",
    "logistic",
    "reduce_sum",
    "cumsum",
    "max",
    "min",
}


def equations(program):
    """Yields the equations of a program and of those within it."""
    for equation in program.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


# But for those that hand on what they are given, and a reference that has the parameters' own dtype.
@pytest.mark.parametrize("name", sorted(set(PARTS) - {"spread_nodes", "spread_turns", "averaged_reference"}))
def test_bfloat16_is_widened(name):
    case = cases_of(PARTS[name], 1, seed=0)[0]
    static = ours.static_inputs(case)
    narrow = lambda x: jnp.asarray(x, jnp.bfloat16) if x.dtype.kind == "f" and x.ndim else jnp.asarray(x)
    arrays = {key: narrow(value) for key, value in case.items() if key not in static}
    compute = ours.function_of(PARTS[name]["function"])
    run = lambda arrays: ours.apply(compute, {key: (arrays | static)[key] for key in case})
    if name == "sampling_probabilities":  # on the host
        wide = {"advantage": arrays["advantage"].astype(jnp.float32)}
        np.testing.assert_array_equal(run(arrays)[0], run(wide)[0])
        return
    program = jax.make_jaxpr(run)(arrays)
    computed = [each for each in equations(program.jaxpr) if each.primitive.name in ARITHMETIC]
    assert not [each for each in computed if any(x.aval.dtype == jnp.bfloat16 for x in each.invars)]
    assert all(x.dtype != jnp.bfloat16 for x in program.out_avals)
