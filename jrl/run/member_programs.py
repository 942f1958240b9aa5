"""Device programs over the members of a population: a run's own programs for all of them at once or in turn, on one or
several devices.

`programs.build` is given `MemberPrograms` in place of a program cache. What it builds takes and returns trees whose
arrays have a leading axis of members; asked for shapes, and to compile, it takes and returns those of one run, so that
whatever follows the shapes of a run (precompilation, the targets of a restore) needs no second form.

Members are dealt out over devices: each runs the program of its own members (`shard_map`), and none waits for another.
What is a run's is on a mesh of one device; what is of all members is on `MemberPrograms.mesh`.

Some arrays are the same for all members, and have no axis of members: the frozen weights under adapters where all
begin with the same ones, which a product with them then reads once for all rows; and the table of stop strings. Each
device holds them.
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
from jrl.types import ModelState, PyTree

SOLO = ("sample_eval",)  # programs that one member calls at a time
DRAWS_WEIGHTS = "init"  # where members begin with the same ones it is asked for shapes only
TAKES_WEIGHTS = ("init_from",)  # those whose first argument are published weights, the same for all members
# Fields of StagePrograms that read whole batches. On a CPU a device takes members through them one after the other:
# what one member writes in between stays in caches; that of all is mapped from the kernel and given back each time.
IN_TURN = ("update", "update_critic", "recompute", "critic_values", "reference", "teacher", "row_values")


@dataclasses.dataclass(frozen=True)
class MemberPrograms:
    """Makes programs over members, in a program cache."""

    cache: ProgramCache
    count: int  # members
    shares_base: bool  # they begin with the same frozen weights
    run_mesh: Mesh  # of a run that is a member, one device
    mesh: Mesh  # that members are dealt out over

    def program(self, name: str, fn: Callable, **jit_options: Any) -> Program | MemberProgram:
        """Returns `fn` as a program over members. Bind static arguments before."""
        if name in SOLO or (self.shares_base and name == DRAWS_WEIGHTS):
            return self.cache.program(name, fn, **jit_options)
        return MemberProgram(name, fn, self, jit_options)

    def takes_in_turn(self, name: str) -> bool:
        """Whether a device computes a program for one member after the other. name: in the cache."""
        return name.rpartition(".")[2] in IN_TURN and self.mesh.devices.flat[0].platform == "cpu"

    def shapes(self, tree: PyTree) -> PyTree:
        """Returns the shapes of what one run has, with the axis of members."""

        def widened(x: jax.ShapeDtypeStruct, is_shared: bool) -> jax.ShapeDtypeStruct:
            return _shape(x.shape if is_shared else (self.count, *x.shape), x, self.over(x.sharding, is_shared))

        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, map(widened, leaves, shared_leaves(tree, self.shares_base)))

    def shapes_of_one(self, tree: PyTree) -> PyTree:
        """Returns the shapes of what one run has, without the axis of members."""

        def narrowed(x: jax.ShapeDtypeStruct, is_shared: bool) -> jax.ShapeDtypeStruct:
            return _shape(x.shape if is_shared else x.shape[1:], x, self.of_run(x.sharding, is_shared))

        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, map(narrowed, leaves, shared_leaves(tree, self.shares_base)))

    def over(self, sharding: NamedSharding, is_shared: bool = False) -> NamedSharding:
        """Returns how an array over members is placed, each of whose parts a run places so; or one that they share."""
        return NamedSharding(self.mesh, PartitionSpec(*() if is_shared else (MEMBERS,), *sharding.spec))

    def of_run(self, sharding: NamedSharding, is_shared: bool) -> NamedSharding:
        """Returns how a run places its part of what `over` places."""
        return NamedSharding(self.run_mesh, PartitionSpec(*sharding.spec[0 if is_shared else 1 :]))

    def share(self, tree: PyTree) -> PyTree:
        """Returns arrays of a run that are the same for all members, on all devices."""
        return jax.device_put(tree, jax.tree.map(lambda x: self.over(x.sharding, is_shared=True), tree))

    def stack(self, trees: Sequence[PyTree]) -> PyTree:
        """Returns what every member has of its own as one tree, on the devices. For small trees: it goes over the host,
        since a program that stacks would have an argument for every array of every member."""
        return self.place(trees, jax.tree.map(lambda x: x.sharding, trees[0]))

    def place(self, trees: Sequence[PyTree], shardings: PyTree) -> PyTree:
        """Returns what every member has of its own, on the host mostly, as one tree on the devices.

        Args:
          shardings: of one member's arrays.
        """
        return jax.device_put(jax.tree.map(_stacked, *trees), jax.tree.map(self.over, shardings))

    def on_host(self, tree: PyTree) -> list[PyTree]:
        """Returns what each member has of a tree, as views of one copy on the host. Keys are on the device, and so is
        what is shared."""
        leaves, structure = jax.tree.flatten(tree)
        shared = shared_leaves(tree, self.shares_base)
        fetched = iter(jax.device_get([x for x, same in zip(leaves, shared) if not same and not _is_key(x)]))
        parts: list[Sequence] = []  # of each leaf, of each member
        for x, same in zip(leaves, shared):
            if same:
                parts.append([jax.device_put(x, self.of_run(x.sharding, same))] * self.count)
            elif _is_key(x):
                parts.append(_unstack(jax.device_put(x, NamedSharding(self.run_mesh, PartitionSpec())), self.count))
            else:
                parts.append(next(fetched))
        return [jax.tree.unflatten(structure, [part[i] for part in parts]) for i in range(self.count)]

    def unstack(self, tree: PyTree) -> Iterator[PyTree]:
        """Yields what each member has of a tree, on the device as a run has it: one member's at a time."""
        shardings = jax.tree.map(lambda x: x.sharding, self.shapes_of_one(tree))
        for own in self.on_host(tree):
            yield jax.device_put(own, shardings)


class MemberProgram:
    """A program over members: called with arrays that have their axis, asked for shapes and to compile with one's."""

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
        """Returns shape, dtype and sharding of the result for one member."""
        return self._abstract(self._program.shape, args)

    def compile(self, *args: Any) -> Any:
        """Starts to compile for the population of a member with these arguments; returns what `shape` does."""
        return self._abstract(self._program.compile, args)

    def _abstract(self, ask: Callable, args: tuple) -> Any:
        members, shared = self._members, args[:1] if self._takes_weights else ()
        weights = jax.tree.map(lambda x: _shape(x.shape, x, members.over(x.sharding, is_shared=True)), shared)
        with jax.set_mesh(members.mesh):
            return members.shapes_of_one(ask(*weights, *map(members.shapes, args[len(shared) :])))


def together(one: Callable, own: list, same: list) -> tuple[list, list]:
    """Returns what `one` returns of each member's own arrays and of what is the same for all, computed at once."""
    return jax.vmap(one, in_axes=(0, None), out_axes=(0, None))(own, same)


def in_turn(one: Callable, own: list, same: list) -> tuple[list, list]:
    """Returns what `together` does, computed for one member after the other."""
    one = jax.jit(one, inline=True)  # traced once
    found = jax.lax.map(lambda of_member: one(of_member, same)[0], own)
    return found, one([x[0] for x in own], same)[1]  # the compiler leaves out what this does not return


def over_members(*args: Any, fn: Callable, shares_base: bool, takes_weights: bool, call: Callable) -> Any:
    """Returns what `fn` returns for every member of a device, on every device of the mesh.

    Args:
      args: of `fn`, with an axis of members where `shared_leaves` does not say otherwise.
      takes_weights: the first is the same for all members.
      call: `together` or `in_turn`.
    """
    structure: Any = None
    shared_out: list[bool] = []

    def one(own: list, same: list) -> tuple[list, list]:
        nonlocal structure, shared_out
        result = fn(*jax.tree.unflatten(tree, _joined(own, same, shared)))
        leaves, structure = jax.tree.flatten(result)
        shared_out = shared_leaves(result, shares_base)
        return _split(leaves, shared_out)

    flat, tree = jax.tree.flatten(args)
    shared = shared_leaves(args, shares_base)
    if takes_weights:
        count = len(jax.tree.leaves(args[0]))
        shared = [True] * count + shared[count:]
    specs = (PartitionSpec(MEMBERS), PartitionSpec())
    dealt_out = jax.shard_map(
        functools.partial(call, one), in_specs=specs, out_specs=specs, axis_names={MEMBERS}, check_vma=False
    )
    own, same = dealt_out(*_split(flat, shared))
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


def _shape(dims: Sequence[int], like: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, like.dtype, sharding=sharding)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _stacked(*leaves: Any) -> Any:
    return jnp.stack(leaves) if _is_key(leaves[0]) else np.stack(jax.device_get(leaves))


@functools.partial(jax.jit, static_argnums=1)
def _unstack(keys: jax.Array, count: int) -> list[jax.Array]:
    return [keys[i] for i in range(count)]
