"""jrl's functions on many cases at once: one compiled program a function."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.agreement.cases import Case

DIFFERENTIATED = ("logprobs", "values", "logits")


def function_of(function: str) -> Callable:
    """Returns the function named module:name."""
    module, name = function.split(":")
    return vars(importlib.import_module(module))[name]


def static_inputs(case: Case) -> Case:
    """Returns the inputs of a case that are a part of the program: counts and sizes."""
    return {key: value for key, value in case.items() if isinstance(value, int | tuple)}


def apply(compute: Callable, inputs: Case) -> tuple:
    """Returns a function's outputs, as a tuple, for inputs in its parameters' order."""
    parameters = inspect.signature(compute).parameters
    keyword = {key for key in inputs if parameters[key].kind is inspect.Parameter.KEYWORD_ONLY}
    output = compute(
        *(value for key, value in inputs.items() if key not in keyword), **{key: inputs[key] for key in keyword}
    )
    return output if isinstance(output, tuple) else (output,)


def answers(
    function: str,
    cases: list[Case],
    differentiate: bool,
    inputs: list[str] | None = None,
    finish: Callable[[tuple, Case], tuple] = lambda outputs, case: outputs,
) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Returns what a function of the parts list gives for the cases, and the derivative of the sum of its first output.

    Args:
        function: module:name.
        cases: its arguments by name; those that are plain ints are the same in all.
        inputs: the function's parameters in order; by default all that a case has.
        finish: what is done with a case's outputs before they are returned and differentiated.
        differentiate: whether to take the derivative by the log-probs, the values or the logits.

    Returns:
        ([cases, ...] for each output, [cases, ...] or None).
    """
    compute = function_of(function)
    static = static_inputs(cases[0])
    names = [key for key in cases[0] if key not in static]
    inputs = inputs or list(cases[0])

    def call(*arrays: Any) -> tuple:
        by_name = dict(zip(names, arrays)) | static
        return finish(apply(compute, {key: by_name[key] for key in inputs}), by_name)

    given = [jnp.asarray(np.stack([each[key] for each in cases])) for key in names]
    if not differentiate:
        return [np.asarray(x) for x in jax.jit(jax.vmap(call))(*given)], None
    place = next(names.index(key) for key in DIFFERENTIATED if key in names)

    def with_slope(*arrays: Any) -> tuple:
        def summed(differentiated: jax.Array) -> tuple:
            output = call(*arrays[:place], differentiated, *arrays[place + 1 :])
            return jnp.sum(output[0]), output

        slope, output = jax.grad(summed, has_aux=True)(arrays[place])
        return output, slope

    outputs, slopes = jax.jit(jax.vmap(with_slope))(*given)
    return [np.asarray(x) for x in outputs], np.asarray(slopes)
