"""Contract tests of every row of OPTIMIZERS, ours or a user's; each raises AssertionError where it fails.

Each takes a row and a configuration of it, and trains a few small arrays, sharded as in a run: a stack of matrices, an
embedding, a norm, and one that is frozen.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrl.device.sharding import TRAIN, MeshShape, make_mesh, spec
from jrl.learning.optimizer import begin, step
from jrl.learning.optimizers.contract import Optimizer, leaf_of
from jrl.learning.optimizers.groups import trained_only
from jrl.types import Array, PyTree

SHAPES = {"embed": (5, 4), "matrices": (2, 4, 6), "norm": (2, 4), "frozen": (3, 3)}
LEAVES = {
    "embed": leaf_of("embed", ("vocab", "embed")),
    "matrices": leaf_of("layers/up", ("layers", "embed", "mlp")),
    "norm": leaf_of("layers/norm", ("layers", "norm")),
    "frozen": leaf_of("head", ("embed", "vocab"), trained=False),
}
STEPS, RATE = 100, 0.01


def directions_are_like_the_gradient(row: Optimizer, config: Any) -> None:
    """A direction has the structure, shapes and dtypes of the gradient, and is finite, that of a gradient of zeros
    too."""
    for gradient in (_drawn(1), jax.tree.map(jnp.zeros_like, _drawn(1))):
        direction, _ = _directed(row, config, gradient)
        expected = _kinds(_trained(config, gradient))
        _check(_kinds(direction) == expected, f"directions are {_kinds(direction)} for {expected}")
        _check(_all_finite(direction), "a direction is not finite")


def its_state_keeps_its_structure(row: Optimizer, config: Any) -> None:
    """After an update, the state has the structure, shapes and dtypes that it began with: it is one program's."""
    state = row.direction(config, _trained(config, LEAVES)).init(_trained(config, _drawn(0)))
    _check(
        all(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(state)),
        "its state has leaves that are no arrays; a checkpoint holds arrays",
    )
    _, after = _directed(row, config, _drawn(1))
    _check(_kinds(after) == _kinds(state), f"its state begins as {_kinds(state)} and becomes {_kinds(after)}")


def it_takes_none_for_what_is_not_trained(row: Optimizer, config: Any) -> None:
    """Arrays that are not trained are None in every tree: gradient, parameters, leaves and directions."""
    direction, _ = _directed(row, config, _drawn(1))
    is_none = lambda tree: jax.tree.map(lambda x: x is None, tree, is_leaf=lambda x: x is None)
    _check(is_none(direction) == is_none(_trained(config, LEAVES)), "the directions have not None exactly where the "
           "gradient has it")  # fmt: skip


def jit_changes_nothing(row: Optimizer, config: Any) -> None:
    """Two updates are the same compiled and plain."""
    plain, compiled = _two_steps(row, config), jax.jit(lambda config: _two_steps(row, config))(config)
    for ours, theirs in zip(jax.tree.leaves(plain), jax.tree.leaves(compiled), strict=True):
        _check(np.allclose(ours, theirs, rtol=1e-4, atol=1e-5), "another update under jit")


def another_float_compiles_nothing(row: Optimizer, config: Any) -> None:
    """Float fields are traced: changing one does not trace the functions again."""
    traces = []

    @jax.jit
    def run(config: Any) -> PyTree:
        traces.append(1)
        return _two_steps(row, config)

    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    floats = {name: float(x) for name, x in values.items() if isinstance(x, float | jax.Array)}
    for scale in (1, 0.9):
        scaled = {name: np.float32(scale * x) for name, x in floats.items()}
        run.trace(dataclasses.replace(config, **scaled))
    _check(len(traces) == 1, "changing a float of the configuration compiled again: derive it from OptimizerSettings "
           "with @traced")  # fmt: skip


def it_goes_downhill(row: Optimizer, config: Any) -> None:
    """On a sum of squares, the loss falls: a direction is what is subtracted, and without a learning rate."""
    config = dataclasses.replace(config, learning_rate=jnp.float32(RATE), clip_norm=None)
    target, params = _drawn(2), _drawn(0)
    loss = lambda params: sum(jnp.sum((params[name] - target[name]) ** 2) for name in params if name != "frozen")

    def update(_: int, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        params, state = carry
        return step(row, config, jax.grad(loss)(params), state, params, LEAVES, jnp.array(True))[:2]

    carry = (params, begin(row, config, params, LEAVES))
    params_after, _ = jax.jit(lambda carry: jax.lax.fori_loop(0, STEPS, update, carry))(carry)
    before, after = float(loss(params)), float(loss(params_after))
    _check(after < before, f"{STEPS} steps at a rate of {RATE} take a sum of squares from {before:.3g} to {after:.3g}: "
           "return directions that are subtracted, such as those of optax.scale_by_lion, and not updates with a "
           "learning rate, such as those of optax.lion")  # fmt: skip


def _on_a_mesh(test: Callable[[Optimizer, Any], None]) -> Callable[[Optimizer, Any], None]:
    """Returns a test that runs on a mesh of one device, whose axes are explicit as in a run: arrays combine only if
    their shardings agree."""

    @functools.wraps(test)
    def run(row: Optimizer, config: Any) -> None:
        with jax.set_mesh(make_mesh(MeshShape(), jax.devices()[:1])):
            test(row, config)

    return run


CONTRACT_TESTS: dict[str, Callable[[Optimizer, Any], None]] = {
    test.__name__: _on_a_mesh(test)
    for test in (
        directions_are_like_the_gradient,
        its_state_keeps_its_structure,
        it_takes_none_for_what_is_not_trained,
        jit_changes_nothing,
        another_float_compiles_nothing,
        it_goes_downhill,
    )
}


def default_config(row: Optimizer) -> Any:
    """Returns the default configuration of a row, floats as arrays."""
    return jax.tree.map(jnp.float32, row.config())


def _drawn(seed: int) -> dict[str, Array]:
    """Returns random arrays, sharded over an axis of the current mesh, which has one device."""
    rng = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return {name: jax.sharding.reshard(draw(shape), spec((*[None] * (len(shape) - 1), "embed"), TRAIN))
            for name, shape in SHAPES.items()}  # fmt: skip


def _trained(config: Any, tree: PyTree) -> PyTree:
    return trained_only(config, tree, LEAVES)


def _directed(row: Optimizer, config: Any, gradient: PyTree) -> tuple[PyTree, optax.OptState]:
    """Returns the first direction for a gradient, and the state after it. Trees have None for what is not trained."""
    params, transform = _trained(config, _drawn(0)), row.direction(config, _trained(config, LEAVES))
    return transform.update(_trained(config, gradient), transform.init(params), params)


def _two_steps(row: Optimizer, config: Any) -> PyTree:
    params = _drawn(0)
    state = begin(row, config, params, LEAVES)
    for seed in (1, 2):
        params, state, _ = step(row, config, _drawn(seed), state, params, LEAVES, jnp.array(True))
    return params


def _kinds(tree: PyTree) -> list[tuple[str, tuple[int, ...], str]]:
    """Returns path, shape and dtype of every array."""
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(name(path), jnp.shape(x), str(jnp.result_type(x))) for path, x in leaves]


def _all_finite(tree: PyTree) -> bool:
    return all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(tree))


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
