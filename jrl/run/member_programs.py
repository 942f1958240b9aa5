"""Device programs over the members of a population: the programs of a run for all members, at once or in turn, on one
or several devices.

`programs.build` is passed `MemberPrograms` in place of a program cache. The programs that it builds take and return
trees whose arrays have a leading axis of members. Their `shape` and `compile` take and return the shapes of one run, so
that code that follows a run's shapes (precompilation, the targets of a restore) also works for a population.

Members are distributed over devices: each device runs the program for its members (`shard_map`), and none waits for
another. Arrays of a single run are on a mesh of one device; arrays of all members are on `MemberPrograms.mesh`.

Some arrays are the same for all members, and have no axis of members: the frozen weights under adapters if all begin
with the same ones, which a matrix product then reads once for all rows; and the table of stop strings. They are
replicated over the devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrl.device.program_cache import Program, ProgramCache
from jrl.device.sharding import MEMBERS
from jrl.models.contract import Adapted
from jrl.rollout.stop_strings import StopTable
from jrl.run.checkpoints.digest import is_key
from jrl.types import ModelState, PyTree

SOLO = ("sample_eval",)  # programs that one member calls at a time
DRAWS_WEIGHTS = "init"  # if members begin with the same ones, only its shapes are used
TAKES_WEIGHTS = ("init_from",)  # their first argument is published weights, the same for all members
# Fields of StagePrograms that read whole batches. A CPU runs these for one member after the other: the intermediate
# arrays of one member stay in caches; those of all are mapped by the operating system and returned to it each time.
IN_TURN = ("update", "update_critic", "recompute", "critic_values", "reference", "teacher", "row_values")


@dataclasses.dataclass(frozen=True)
class MemberPrograms:
    """Makes programs over members, in a program cache."""

    cache: ProgramCache
    count: int  # members
    shares_base: bool  # they begin with the same frozen weights
    run_mesh: Mesh  # of a single member's run, one device
    mesh: Mesh  # that members are distributed over

    def program(self, name: str, fn: Callable, **jit_options: Any) -> Program | MemberProgram:
        """Returns `fn` as a program over members. Bind static arguments first."""
        if name in SOLO or (self.shares_base and name == DRAWS_WEIGHTS):
            return self.cache.program(name, fn, **jit_options)
        return MemberProgram(name, fn, self, jit_options)

    def takes_in_turn(self, name: str) -> bool:
        """Whether a device runs a program for one member after the other. name: in the cache."""
        return name.rpartition(".")[2] in IN_TURN and self.mesh.devices.flat[0].platform == "cpu"

    def shapes(self, tree: PyTree) -> PyTree:
        """Returns the shapes of one run's tree with the axis of members added."""

        def widened(x: jax.ShapeDtypeStruct, is_shared: bool) -> jax.ShapeDtypeStruct:
            return _shape(x.shape if is_shared else (self.count, *x.shape), x, self.over(x.sharding, is_shared))

        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, map(widened, leaves, shared_leaves(tree, self.shares_base)))

    def shapes_of_one(self, tree: PyTree) -> PyTree:
        """Returns the shapes of one run's tree, from those with the axis of members."""

        def narrowed(x: jax.ShapeDtypeStruct, is_shared: bool) -> jax.ShapeDtypeStruct:
            return _shape(x.shape if is_shared else x.shape[1:], x, self.of_run(x.sharding, is_shared))

        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, map(narrowed, leaves, shared_leaves(tree, self.shares_base)))

    def over(self, sharding: NamedSharding, is_shared: bool = False) -> NamedSharding:
        """Returns the sharding over members of an array that one run shards so, or of one that members share."""
        return NamedSharding(self.mesh, PartitionSpec(*() if is_shared else (MEMBERS,), *sharding.spec))

    def of_run(self, sharding: NamedSharding, is_shared: bool) -> NamedSharding:
        """Returns the sharding of one run's part of an array: the inverse of `over`."""
        return NamedSharding(self.run_mesh, PartitionSpec(*sharding.spec[0 if is_shared else 1 :]))

    def share(self, tree: PyTree) -> PyTree:
        """Returns arrays of a run that are the same for all members, replicated over the devices."""
        return jax.device_put(tree, jax.tree.map(lambda x: self.over(x.sharding, is_shared=True), tree))

    def stack(self, trees: Sequence[PyTree]) -> PyTree:
        """Returns the members' trees as one, on the devices. For small trees: the arrays pass through the host, since a
        program that stacks them would have an argument for every array of every member."""
        return self.place(trees, jax.tree.map(lambda x: x.sharding, trees[0]))

    def place(self, trees: Sequence[PyTree], shardings: PyTree) -> PyTree:
        """Returns the members' trees, most of them on the host, as one tree on the devices.

        Args:
          shardings: of one member's arrays.
        """
        return jax.device_put(jax.tree.map(_stacked, *trees), jax.tree.map(self.over, shardings))

    def on_host(self, tree: PyTree) -> list[PyTree]:
        """Returns each member's part of a tree, as views of one copy on the host. Random keys and shared arrays stay on
        the device."""
        leaves, structure = jax.tree.flatten(tree)
        shared = shared_leaves(tree, self.shares_base)
        fetched = iter(jax.device_get([x for x, is_shared in zip(leaves, shared) if not (is_shared or is_key(x))]))
        by_leaf: list[Sequence] = []  # each indexed by member
        for x, is_shared in zip(leaves, shared):
            if is_shared:
                by_leaf.append([jax.device_put(x, self.of_run(x.sharding, is_shared))] * self.count)
            elif is_key(x):
                by_leaf.append(_unstack(jax.device_put(x, NamedSharding(self.run_mesh, PartitionSpec())), self.count))
            else:
                by_leaf.append(next(fetched))
        return [jax.tree.unflatten(structure, [leaf[m] for leaf in by_leaf]) for m in range(self.count)]

    def unstack(self, tree: PyTree) -> Iterator[PyTree]:
        """Yields each member's part of a tree, placed on the device as a run does: one member's at a time."""
        shardings = jax.tree.map(lambda x: x.sharding, self.shapes_of_one(tree))
        for member_tree in self.on_host(tree):
            yield jax.device_put(member_tree, shardings)


class MemberProgram:
    """A program over members. It is called with the axis of members; `shape` and `compile` take one run's shapes."""

    def __init__(self, name: str, fn: Callable, members: MemberPrograms, jit_options: dict[str, Any]) -> None:
        self._members, self._takes_weights = members, name in TAKES_WEIGHTS
        over = functools.partial(
            over_members,
            fn=fn,
            shares_base=members.shares_base,
            takes_weights=self._takes_weights,
            call=in_turn if members.takes_in_turn(name) else together,
        )
        if self._takes_weights and not members.shares_base:
            jit_options = {**jit_options, "donate_argnums": ()}  # every member gets a copy
        self._program = members.cache.program(name, over, **jit_options)

    def __call__(self, *args: Any) -> Any:
        if self._takes_weights:
            args = (self._members.share(args[0]), *args[1:])
        with jax.set_mesh(self._members.mesh):
            return self._program(*args)

    def shape(self, *args: Any) -> Any:
        """Returns shape, dtype and sharding of one member's result."""
        return self._abstract(self._program.shape, args)

    def compile(self, *args: Any) -> Any:
        """Starts to compile for a population whose members have these arguments; returns what `shape` does."""
        return self._abstract(self._program.compile, args)

    def _abstract(self, call: Callable, args: tuple) -> Any:
        members, shared = self._members, args[:1] if self._takes_weights else ()
        weights = jax.tree.map(lambda x: _shape(x.shape, x, members.over(x.sharding, is_shared=True)), shared)
        with jax.set_mesh(members.mesh):
            return members.shapes_of_one(call(*weights, *map(members.shapes, args[len(shared) :])))


def together(fn: Callable, stacked: list, shared: list) -> tuple[list, list]:
    """Returns the stacked and the shared results of `fn` for all members, computed at once.

    Args:
      fn: (one member's arrays, shared arrays) -> (the member's results, results that are the same for all members).
      stacked: members' arrays, [members, ...] each. shared: arrays that are the same for all members.
    """
    return jax.vmap(fn, in_axes=(0, None), out_axes=(0, None))(stacked, shared)


def in_turn(fn: Callable, stacked: list, shared: list) -> tuple[list, list]:
    """Returns what `together` does, computed for one member after the other."""
    fn = jax.jit(fn, inline=True)  # traced once
    results = jax.lax.map(lambda member_arrays: fn(member_arrays, shared)[0], stacked)
    return results, fn([x[0] for x in stacked], shared)[1]  # the compiler drops the results that are not returned


def over_members(*args: Any, fn: Callable, shares_base: bool, takes_weights: bool, call: Callable) -> Any:
    """Returns what `fn` returns for every member of a device, on every device of the mesh.

    Args:
      args: of `fn`, with an axis of members, except the leaves that `shared_leaves` names.
      takes_weights: the first argument is the same for all members.
      call: `together` or `in_turn`.
    """
    leaves, tree = jax.tree.flatten(args)
    is_shared = shared_leaves(args, shares_base)
    if takes_weights:
        num_weights = len(jax.tree.leaves(args[0]))
        is_shared = [True] * num_weights + is_shared[num_weights:]
    result_tree: Any = None  # both are set when `member_fn` is traced
    result_is_shared: list[bool] = []

    def member_fn(member: list, shared: list) -> tuple[list, list]:
        nonlocal result_tree, result_is_shared
        result = fn(*jax.tree.unflatten(tree, _joined(member, shared, is_shared)))
        result_leaves, result_tree = jax.tree.flatten(result)
        result_is_shared = shared_leaves(result, shares_base)
        return _split(result_leaves, result_is_shared)

    specs = (PartitionSpec(MEMBERS), PartitionSpec())
    distributed = jax.shard_map(
        functools.partial(call, member_fn), in_specs=specs, out_specs=specs, axis_names={MEMBERS}, check_vma=False
    )
    stacked, shared = distributed(*_split(leaves, is_shared))
    return jax.tree.unflatten(result_tree, _joined(stacked, shared, result_is_shared))


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


def _split(leaves: list, is_shared: list[bool]) -> tuple[list, list]:
    """Returns the leaves that differ between members, and those that are shared."""
    return [x for x, same in zip(leaves, is_shared) if not same], [x for x, same in zip(leaves, is_shared) if same]


def _joined(stacked: Sequence, shared: Sequence, is_shared: list[bool]) -> list:
    """Returns the leaves in their order: the inverse of `_split`."""
    stacked, shared = iter(stacked), iter(shared)
    return [next(shared if same else stacked) for same in is_shared]


def _shape(dims: Sequence[int], like: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, like.dtype, sharding=sharding)


def _stacked(*leaves: Any) -> Any:
    return jnp.stack(leaves) if is_key(leaves[0]) else np.stack(jax.device_get(leaves))


@functools.partial(jax.jit, static_argnums=1)
def _unstack(keys: jax.Array, count: int) -> list[jax.Array]:
    return [keys[i] for i in range(count)]
