"""Device programs over the members of a population: a run's own programs under `vmap`.

`programs.build` is given `MemberPrograms` in place of a program cache. What it builds takes and returns trees whose
arrays have a leading axis of members; asked for shapes, and to compile, it takes and returns those of one run, so that
whatever follows the shapes of a run (precompilation, the targets of a restore) needs no second form.

Some arrays are the same for all members, and have no such axis: the frozen weights under adapters where all members
begin with the same ones, which a product with them then reads once for all rows; and the table of stop strings.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jrl.device.program_cache import Program, ProgramCache, shared_jit
from jrl.models.contract import Adapted
from jrl.rollout.stop_strings import StopTable
from jrl.types import ModelState, PyTree

SOLO = ("sample_eval",)  # programs that one member calls at a time
TAKES_WEIGHTS = ("init_from",)  # those whose first argument are published weights, the same for all members


@dataclasses.dataclass(frozen=True)
class MemberPrograms:
    """Makes programs over members, in a program cache."""

    cache: ProgramCache
    count: int  # members
    shares_base: bool  # they begin with the same frozen weights

    def program(self, name: str, fn: Callable, **jit_options: Any) -> Program | MemberProgram:
        """Returns `fn` as a program over members. Bind static arguments before."""
        if name in SOLO:
            return self.cache.program(name, fn, **jit_options)
        return MemberProgram(name, fn, self, jit_options)

    def shapes(self, tree: PyTree) -> PyTree:
        """Returns the shapes of what one run has, with the axis of members."""

        def widened(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.count, *shape.shape), shape.dtype, sharding=over_one(shape.sharding))

        leaves, structure = jax.tree.flatten(tree)
        shared = shared_leaves(tree, self.shares_base)
        return jax.tree.unflatten(structure, [x if same else widened(x) for x, same in zip(leaves, shared)])

    def stack(self, trees: Sequence[PyTree]) -> PyTree:
        """Returns what every member has of its own as one tree, on the device. For small trees: it goes over the host,
        since a program that stacks would have an argument for every array of every member."""
        shared = shared_leaves(trees[0], self.shares_base)
        split = [_split(jax.tree.leaves(tree), shared) for tree in trees]
        first, same = split[0]
        is_key = [_is_key(x) for x in first]
        parts = [_split(own, is_key) for own, _ in split]
        keys = [jnp.stack(of_members) for of_members in zip(*(keys for _, keys in parts))]
        shardings = [over_one(x.sharding) for x, key in zip(first, is_key) if not key]
        host = zip(*jax.device_get([rest for rest, _ in parts]))
        rest = jax.device_put([np.stack(of_members) for of_members in host], shardings)
        return jax.tree.unflatten(jax.tree.structure(trees[0]), _joined(_joined(rest, keys, is_key), same, shared))

    def place(self, trees: Sequence[PyTree], shardings: PyTree) -> PyTree:
        """Returns what every member has on the host as one tree, on the device.

        Args:
          shardings: of one member's arrays.
        """
        together = jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
        return jax.device_put(together, jax.tree.map(over_one, shardings))

    def on_host(self, tree: PyTree) -> list[PyTree]:
        """Returns what each member has of a tree, as views of one copy on the host. Keys stay on the device, and so
        does what is shared."""
        leaves, structure = jax.tree.flatten(tree)
        shared = shared_leaves(tree, self.shares_base)
        own, same = _split(leaves, shared)
        is_key = [_is_key(x) for x in own]
        rest, keys = _split(own, is_key)
        rest, keys = jax.device_get(rest), _unstack(keys, self.count) if keys else [[]] * self.count
        return [
            jax.tree.unflatten(structure, _joined(_joined([x[i] for x in rest], keys[i], is_key), same, shared))
            for i in range(self.count)
        ]

    def unstack(self, tree: PyTree) -> list[PyTree]:
        """Returns what each member has of a tree, on the device; what is shared is not copied."""
        leaves, structure = jax.tree.flatten(tree)
        shared = shared_leaves(tree, self.shares_base)
        own, same = _split(leaves, shared)
        return [jax.tree.unflatten(structure, _joined(mine, same, shared)) for mine in _unstack(own, self.count)]


class MemberProgram:
    """A program over members: called with arrays that have their axis, asked for shapes and to compile with one's."""

    def __init__(self, name: str, fn: Callable, members: MemberPrograms, jit_options: dict[str, Any]) -> None:
        self._members, self._takes_weights = members, name in TAKES_WEIGHTS
        self._solo = Program(name, fn, members.cache, {})  # for shapes; never compiled
        over = functools.partial(
            over_members, fn=fn, shares_base=members.shares_base, takes_weights=self._takes_weights
        )
        if self._takes_weights and not members.shares_base:
            jit_options = {**jit_options, "donate_argnums": ()}  # every member gets a copy
        self._program = members.cache.program(name, over, **jit_options)

    def __call__(self, *args: Any) -> Any:
        return self._program(*args)

    def shape(self, *args: Any) -> Any:
        """Returns shape, dtype and sharding of the result for one member."""
        return self._solo.shape(*args)

    def compile(self, *args: Any) -> Any:
        """Starts to compile for the population of a member with these arguments; returns what `shape` does."""
        weights = args[:1] if self._takes_weights else ()
        self._program.compile(*weights, *map(self._members.shapes, args[len(weights) :]))
        return self.shape(*args)


def over_members(*args: Any, fn: Callable, shares_base: bool, takes_weights: bool) -> Any:
    """Returns what `fn` returns, called once for all members.

    Args:
      args: of `fn`, with an axis of members where `shared_leaves` does not say otherwise.
      takes_weights: the first is the same for all members.
    """
    solo = shared_jit(fn, {})  # traced for its shapes before, and not again
    structure: Any = None
    shared_out: list[bool] = []

    def one(flat: list) -> tuple[list, list]:
        nonlocal structure, shared_out
        result = solo(*jax.tree.unflatten(tree, flat))
        leaves, structure = jax.tree.flatten(result)
        shared_out = shared_leaves(result, shares_base)
        return _split(leaves, shared_out)

    flat, tree = jax.tree.flatten(args)
    shared = shared_leaves(args, shares_base)
    if takes_weights:
        count = len(jax.tree.leaves(args[0]))
        shared = [True] * count + shared[count:]
    axes = [None if same else 0 for same in shared]
    own, same = jax.vmap(one, in_axes=(axes,), out_axes=(0, None))(flat)
    return jax.tree.unflatten(structure, _joined(own, same, shared_out))


def shared_leaves(tree: PyTree, shares_base: bool) -> list[bool]:
    """Returns for every leaf of `tree` whether it is the same for all members."""
    shared: list[bool] = []
    for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, ModelState | Adapted | StopTable)):
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(node)]
        if isinstance(node, ModelState):
            shared += [shares_base and path[0].name == "frozen" for path in paths]
        elif isinstance(node, Adapted):
            shared += [shares_base and path[0].name == "base" for path in paths]
        else:
            shared += [isinstance(node, StopTable)] * len(paths)
    return shared


def _split(leaves: list, shared: list[bool]) -> tuple[list, list]:
    """Returns the leaves that members have of their own, and those that are shared."""
    return [x for x, same in zip(leaves, shared) if not same], [x for x, same in zip(leaves, shared) if same]


def _joined(own: Sequence, same: Sequence, shared: list[bool]) -> list:
    """Returns the leaves that `_split` has split."""
    own, same = iter(own), iter(same)
    return [next(same if is_same else own) for is_same in shared]


def over_one(sharding: NamedSharding) -> NamedSharding:
    """Returns how an array over members is placed, each of whose parts is placed so."""
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


@functools.partial(jax.jit, static_argnums=1)
def _unstack(leaves: list[jax.Array], count: int) -> list[list[jax.Array]]:
    return [[x[i] for x in leaves] for i in range(count)]
