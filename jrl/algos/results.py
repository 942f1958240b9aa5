"""Checks what the functions of a user's objective return. An array of another shape could broadcast without an error,
and give a loss that is several times too large."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrl.algos.contract import Groups, Needs, Objective, Pairs
from jrl.algos.parts.objective import OBJECTIVE_FUNCTIONS
from jrl.tasks.wrong_result import WrongResult
from jrl.types import PyTree

Shape = tuple[int, ...]

# Metrics that a step has of its own, and what the names of the others begin with: those of an objective would replace
# them in the run's files and displays, or be replaced.
RESERVED_METRICS = ("step", "phase", "loss", "grad_norm", "policy/entropy", "policy/logprob",
                    "policy/sampler_difference", "value/return", "value/explained_variance")  # fmt: skip
RESERVED_PREFIXES = ("reward/", "reward_component/", "reward_task/", "rollout/", "refill/", "loss/", "update/",
                     "critic/", "router/", "verdict/", "eval/", "eval_task/", "mismatch/", "pretraining/",
                     "curriculum/", "data/", "time/", "host/")  # fmt: skip


def is_reserved(name: str) -> bool:
    """Returns whether jrl writes metrics of this name, which no function of an objective may give."""
    return name in RESERVED_METRICS or name.startswith(RESERVED_PREFIXES)


# Function of Objective -> the names of its arguments
ARGUMENTS = {part["function"].rpartition(".")[2]: part["inputs"] for part in OBJECTIVE_FUNCTIONS}


def wrong_function(row: Any, arguments_of: Mapping[str, Sequence[str]]) -> str | None:
    """Returns which function of a row cannot be called with the arguments of its contract, and how it is; None: none.

    Args:
      arguments_of: by field.
    """
    for name, arguments in arguments_of.items():
        function = getattr(row, name)
        if function is None and row._field_defaults.get(name, ...) is None:  # it may be left out
            continue
        if not callable(function):
            return f"{name} is {_kind(function)}; it must be a function ({', '.join(arguments)})"
        try:
            signature = inspect.signature(function)
        except ValueError:  # of a builtin
            continue
        try:
            signature.bind(*arguments)
        except TypeError:
            return f"{name} takes {signature}; it is called with ({', '.join(arguments)})"
    return None


def checked(objective: Objective) -> Objective:
    """Returns the objective with functions that raise WrongResult, when they are traced, where their results do not
    have the types and shapes of jrl.algos.contract.Objective."""
    functions = {name: getattr(objective, name) for name in CHECKS}
    return objective._replace(**{name: _checked(name, run) for name, run in functions.items() if run is not None})


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(config: Any, *args: Any) -> Any:
        returned = function(config, *args)
        problem = CHECKS[name](returned, *args)
        if problem:
            raise WrongResult(f"{type(config).__name__}: {name} must return {problem}", function)
        return returned

    return run


# Each returns "", or what a function must return and what it returned instead.


def _array(returned: Any, shape: Shape) -> str:
    return _first(f"an array of shape {list(shape)}", {"its result": returned}, shape)


def _mask(returned: Any, shape: Shape) -> str:
    kind = f"a bool array of shape {list(shape)}"
    if getattr(returned, "dtype", jnp.bool_) != jnp.bool_:
        return f"{kind}, and its result has dtype {returned.dtype}"
    return _first(kind, {"its result": returned}, shape)


def _loss(returned: Any, shape: Shape) -> str:
    kind = f"(loss of shape {list(shape)}, a dictionary of metrics of that shape)"
    if not _is_tuple(returned, 2):
        return f"{kind}, and it returned {_kind(returned)}"
    if any(not isinstance(name, str) for name in returned[1]):
        return f"{kind}, and the names of its metrics are not all texts"
    taken = next((name for name in returned[1] if is_reserved(name)), None)
    if taken is not None:
        return f"metrics with names that jrl does not use, and its metric {taken!r} would replace jrl's"
    return _first(kind, {"its loss": returned[0]} | _named("metric", returned[1]), shape)


def _advantages(returned: Any, groups: Groups, reward: Any, state: PyTree) -> str:
    shape = groups.action_mask.shape
    kind = f"(advantages of shape {list(shape)}, state, a dictionary of counters of shape [])"
    if not _is_tuple(returned, 3):
        return f"{kind}, and it returned {_kind(returned)}"
    advantages, following, counters = returned
    return (
        _first(kind, {"its array of advantages": advantages}, shape)
        or _first(kind, _named("counter", counters), ())
        or _state(following, state)
    )


def _pairs(returned: Any, groups: Groups, reward: Any) -> str:
    shape = groups.reward.shape
    kind = f"jrl.algos.contract.Pairs of arrays of shape {list(shape)}"
    if not isinstance(returned, Pairs):
        return f"{kind}, and it returned {_kind(returned)}"
    return _first(kind, {f"its {name}": x for name, x in returned._asdict().items() if x is not None}, shape)


def _state(returned: PyTree, before: PyTree) -> str:
    form = lambda state: (jax.tree.structure(state), [jnp.shape(leaf) for leaf in jax.tree.leaves(state)])
    if form(returned) != form(before):
        shapes = lambda state: jax.tree.map(jnp.shape, state)
        return f"a state of the same shapes as the one before, {shapes(before)}, and its state has {shapes(returned)}"
    dtype = lambda leaf: str(jnp.result_type(leaf))
    if [dtype(leaf) for leaf in jax.tree.leaves(returned)] != [dtype(leaf) for leaf in jax.tree.leaves(before)]:
        dtypes = lambda state: jax.tree.map(dtype, state)
        return f"a state of the same dtypes as the one before, {dtypes(before)}, and its state has {dtypes(returned)}"
    return ""


def _reason(returned: Any) -> str:
    if returned is None or (isinstance(returned, str) and returned):
        return ""
    return f"a text that says why the run must not go on, or None, and it returned {returned!r:.80}"


def _first(kind: str, arrays: Mapping[str, Any], shape: Shape) -> str:
    """Returns the kind, and what is wrong with the first of the arrays that does not have this shape; "" if all do."""
    for which, value in arrays.items():
        if not hasattr(value, "shape"):
            return f"{kind}, and {which} is {_kind(value)}"
        if value.shape != shape:
            return f"{kind}, and {which} has the shape {list(value.shape)}"
    return ""


def _named(kind: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {f"its {kind} {name!r}": value for name, value in arrays.items()}


def _is_tuple(returned: Any, count: int) -> bool:
    return isinstance(returned, tuple) and len(returned) == count and isinstance(returned[-1], dict)


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if hasattr(value, "shape"):
        return "one array"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a value of type {type(value).__name__}"


# Function of Objective -> the check of (what it returned, its arguments without the configuration)
CHECKS: Mapping[str, Callable[..., str]] = {
    "needs": lambda returned: (
        "" if isinstance(returned, Needs) else f"jrl.algos.contract.Needs, and it returned {_kind(returned)}"
    ),
    "keep": lambda returned, groups: _mask(returned, groups.reward.shape),
    "keep_tokens": lambda returned, groups: _mask(returned, groups.action_mask.shape),
    "shape": lambda returned, groups: _array(returned, groups.reward.shape),
    "shape_with_state": lambda returned, groups, *rest: _array(returned, groups.reward.shape),
    "advantages": _advantages,
    "pairs": _pairs,
    "select": lambda returned, groups, advantages: _mask(returned, groups.action_mask.shape),
    "positive": lambda returned, groups: _mask(returned, groups.reward.shape),
    "returns": lambda returned, groups, reward: _array(returned, groups.action_mask.shape),
    "token_loss": lambda returned, tokens, state: _loss(returned, tokens.mask.shape),
    "value_loss": lambda returned, tokens, state: _loss(returned, tokens.mask.shape),
    "sequence_loss": lambda returned, sequences, state: _loss(returned, sequences.mask.shape),
    "weights": lambda returned, mask, max_completion: _array(returned, mask.shape),
    "denominator": lambda returned, *rest: _array(returned, ()),
    "sequence_baseline": lambda returned, sequences: _array(returned, ()),
    "sequence_denominator": lambda returned, *rest: _array(returned, ()),
    "next_state": lambda returned, state, metrics: _state(returned, state),
    "stop": lambda returned, metrics: _reason(returned),
}
