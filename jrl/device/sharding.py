"""Mesh, logical axes and shardings: the one place where logical axes become mesh axes.

Models and parameters name logical axes only. Three tables map them to the mesh: for parameters and optimizer state in
training (TRAIN), for weights gathered over fsdp, in decoding and inside a block of the learner (GATHERED), and for
activations (ACTIVATIONS). Axes are explicit: an unintended contraction over a sharded dimension is an error at trace
time, not a silent all-gather.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jrl.types import Array, PyTree

AXES = ("data", "fsdp", "tensor", "sequence", "expert")
SEQUENCE, EXPERT = "sequence", "expert"
ROW_AXES = ("data", "fsdp", EXPERT)  # of packed rows
# Of rows of tokens, and of shares of packed rows, both of which `sequence` divides (jrl/device/row_shares.py).
BATCH_AXES = (*ROW_AXES, SEQUENCE)
OPTIONAL_AXES = (SEQUENCE, EXPERT)  # left out of shardings if their size is 1: see `mesh_axes`
MEMBERS = "members"  # of a population (`members_mesh`); not in the mesh of a run

TRAIN = {
    "embed": ("fsdp", EXPERT, SEQUENCE),  # without EXPERT for experts, whose number is sharded over it: see `spec`
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "experts": EXPERT,
    "all_experts": None,  # of a router
    "head_dim": None,
    "layers": None,
    "norm": None,
    "rank": None,
}
GATHERED = {**TRAIN, "embed": None}
ACTIVATIONS = {
    "batch": BATCH_AXES,
    "rows": ROW_AXES,
    "columns": SEQUENCE,
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "embed_shard": "tensor",
    "experts": EXPERT,
    None: None,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Devices along each mesh axis. One axis may be -1: all devices that are left."""

    data: int = 1  # copies of the model, each with its share of the batch
    fsdp: int = 1  # shards of parameters and optimizer state; also shares of the batch
    tensor: int = 1  # shards of heads, MLP and vocabulary
    sequence: int = 1  # shares of every row that is learned from; also shares of the batch and of parameters
    expert: int = 1  # shards of a sparse layer's experts by number; shards of all else as fsdp, and shares of the batch
    slices: int = 1  # TPU slices that `data` is divided over first: only gradients cross the network between them

    def __post_init__(self) -> None:
        sizes = [getattr(self, axis) for axis in AXES]
        if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
            raise ValueError(f"mesh axes must be positive, at most one of them -1; got {dict(zip(AXES, sizes))}")
        if self.slices < 1 or (self.data != -1 and self.data % self.slices):
            raise ValueError(
                f"MeshShape.data = {self.data} cannot be divided over MeshShape.slices = {self.slices}: every slice "
                "holds complete copies of the model, as fsdp and tensor do not cross the network between slices; make "
                "data a multiple of slices"
            )

    def sizes(self, num_devices: int) -> tuple[int, ...]:
        """Returns the size of every axis on `num_devices`. Raises ValueError if they are too few, or if an axis of -1
        does not divide them."""
        sizes = [getattr(self, axis) for axis in AXES]
        known = math.prod(size for size in sizes if size != -1)
        if -1 in sizes and num_devices % known == 0:
            sizes[sizes.index(-1)] = num_devices // known
        if -1 in sizes or math.prod(sizes) > num_devices:
            needed = f"a multiple of {known}" if -1 in sizes else f"{known}"
            raise ValueError(
                f"the mesh {dict(zip(AXES, sizes))} needs {needed} devices; there are {num_devices} "
                "(`jrl train --devices N` starts N virtual ones on a CPU, `jrl plan --search` finds a mesh)"
            )
        if sizes[0] % self.slices:
            raise ValueError(
                f"{num_devices} devices make MeshShape.data = {sizes[0]}, which cannot be divided over "
                f"MeshShape.slices = {self.slices}; make fsdp or tensor smaller"
            )
        return tuple(sizes)


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns a mesh over the first devices, as many as `shape` needs, with explicit axes. With several slices, data is
    divided over them first. Devices without slices, such as CPUs, stand in for them in order.

    Raises: ValueError if there are too few devices, or the mesh would cross slices without MeshShape.slices.
    """
    devices = list(jax.devices() if devices is None else devices)
    data, *others = sizes = shape.sizes(len(devices))
    groups = devices_by_slice(devices, math.prod(sizes), shape.slices)
    # An axis may use part of a torus dimension, without which a v6e of 16 x 16 as (fsdp 64, tensor 4) is rejected.
    slice_meshes = [create_device_mesh((data // shape.slices, *others), group, allow_split_physical_axes=True)
              for group in groups]  # fmt: skip
    return Mesh(np.concatenate(slice_meshes), AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def members_mesh(count: int, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns the mesh that the `count` members of a population are distributed over: the first devices, as many as
    divide the members evenly."""
    devices = list(jax.devices() if devices is None else devices)
    size = max(n for n in range(1, len(devices) + 1) if count % n == 0)
    grid = np.array(devices[:size]).reshape(size, *[1] * len(AXES))
    return Mesh(grid, (MEMBERS, *AXES), axis_types=(AxisType.Explicit,) * grid.ndim)


def devices_by_slice(devices: Sequence[Any], count: int, slices: int) -> list[list[Any]]:
    """Returns `count` devices of the first `slices` slices, equally many of each.

    Raises: ValueError if there are fewer slices, or a slice has too few devices.
    """
    share, present = count // slices, slices_of(devices)
    if devices[0].platform != "tpu":  # such devices have no slices
        present = [list(part) for place in range(slices) if (part := devices[place * share :][:share])]
    groups = [group[:share] for group in present[:slices]]
    if len(groups) < slices or any(len(group) < share for group in groups):
        sizes = [len(group) for group in present]
        change = f"set MeshShape.slices = {len(present)}, and data to a multiple of it"
        if len(present) == slices:
            change = f"make the mesh smaller, at most {slices} x {min(sizes)}"
        raise ValueError(
            f"MeshShape.slices = {slices} needs {slices} x {share} devices, and the slices here have "
            f"{' + '.join(map(str, sizes))}. Only data crosses slices; {change}"
        )
    return groups


def split_meshes(learner: MeshShape, sampler: MeshShape, devices: Sequence[Any] | None = None) -> tuple[Mesh, Mesh]:
    """Returns two disjoint meshes: the learner's over the first devices and the sampler's over the next, as
    `split_devices` divides them.

    Raises: ValueError if there are too few devices for both, or a mesh would cross slices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = split_sizes(learner, sampler, len(devices))
    parts = split_devices(devices, *map(math.prod, sizes), (learner.slices, sampler.slices))
    first, second = (
        make_mesh(dataclasses.replace(shape, **dict(zip(AXES, axes))), part)
        for shape, axes, part in zip((learner, sampler), sizes, parts)
    )
    return first, second


def split_devices(
    devices: Sequence[Any], learn: int, sample: int, slices: tuple[int, int] = (1, 1)
) -> tuple[list[Any], list[Any]]:
    """Returns `learn` devices, and `sample` others. With several processes each has equally many of both, so that it
    copies weights between its own devices. On a TPU, whose hosts' chips form a torus, the devices are taken in order,
    and so are slices.

    Args:
      slices: of the two meshes. If either is above 1, devices without slices stand in for them, in order.

    Raises: ValueError if there are several slices and a mesh does not use all devices of its slices, or if there are
      several processes and the devices of a mesh cannot be divided over them.
    """
    groups = slices_of(devices)
    if len(groups) > 1:
        check_whole_slices((learn, sample), slices, [len(group) for group in groups])
        flat = lambda parts: [device for part in parts for device in part]
        return flat(groups[: slices[0]]), flat(groups[slices[0] : sum(slices)])
    hosts: dict[int, list[Any]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(device)
    if len(hosts) == 1 or devices[0].platform == "tpu" or max(slices) > 1:
        return list(devices[:learn]), list(devices[learn : learn + sample])
    first, second = learn // len(hosts), sample // len(hosts)
    if learn % len(hosts) or sample % len(hosts) or any(len(host) < first + second for host in hosts.values()):
        raise ValueError(
            f"Config.mesh takes {learn} devices and Config.sampler_mesh {sample}, and there are {len(hosts)} processes "
            f"of {' and '.join(str(n) for n in sorted({len(host) for host in hosts.values()}))} devices: every process "
            "needs equally many of both meshes, which copies weights between its own devices"
        )
    of_each_host = lambda start, end: [device for host in hosts.values() for device in host[start:end]]
    return of_each_host(0, first), of_each_host(first, first + second)


def slices_of(devices: Sequence[Any]) -> list[list[Any]]:
    """Returns the devices of every slice; devices without slices form one."""
    groups: dict[int, list[Any]] = {}
    for device in devices:
        # On other platforms a slice_index is a host. The devices of a topology of one slice have none.
        index = getattr(device, "slice_index", 0) if device.platform == "tpu" else 0
        groups.setdefault(index, []).append(device)
    return [groups[index] for index in sorted(groups)]


def check_whole_slices(taken: tuple[int, int], slices: tuple[int, int], sizes: Sequence[int]) -> None:
    """Raises ValueError unless a learner's mesh uses all devices of the first slices, and a sampler's of the next.

    Args:
      taken: devices of the two meshes. slices: of the two meshes. sizes: devices of every slice.
    """
    first, second = sizes[: slices[0]], sizes[slices[0] : sum(slices)]
    if sum(slices) > len(sizes) or (sum(first), sum(second)) != tuple(taken):
        raise ValueError(
            f"Config.mesh takes {taken[0]} devices on {slices[0]} slices (MeshShape.slices) and Config.sampler_mesh "
            f"{taken[1]} on {slices[1]}, and the slices here have {' + '.join(map(str, sizes))}: where there are "
            "several, devices of their own for sampling are whole slices, behind those of Config.mesh"
        )


def split_sizes(learner: MeshShape, sampler: MeshShape, num_devices: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the size of every axis of both meshes. One axis of one of them may be -1: all remaining devices.

    Raises: ValueError if there are too few devices for both.
    """
    shapes = {"Config.mesh": learner, "Config.sampler_mesh": sampler}
    known = {name: math.prod(getattr(shape, axis) for axis in AXES) for name, shape in shapes.items()}
    if min(known.values()) < 0:
        if max(known.values()) < 0:
            raise ValueError("Config.mesh and Config.sampler_mesh both have an axis of -1, all devices that are left; "
                             "give the sizes of one of them")  # fmt: skip
        open_, fixed = sorted(known, key=known.get)
        left = num_devices - known[fixed]
        if left >= -known[open_] and left % -known[open_] == 0:
            return tuple(shape.sizes(left if name == open_ else known[name]) for name, shape in shapes.items())
        needed = f"{known[fixed]} devices for {fixed}, and a multiple of {-known[open_]} for {open_}"
    elif sum(known.values()) <= num_devices:
        return tuple(shape.sizes(known[name]) for name, shape in shapes.items())
    else:
        needed = f"{' + '.join(map(str, known.values()))} devices for Config.mesh and Config.sampler_mesh"
    raise ValueError(
        f"sampling on devices of its own needs {needed}; there are {num_devices} (--devices N starts N "
        "virtual ones on a CPU). Make a mesh smaller, or set Config.sampler_mesh = None to sample and learn in turn"
    )


def batch_shards(mesh: Mesh) -> int:
    """Returns the number of shards of the batch."""
    return num_shards(BATCH_AXES, mesh.shape)


def rows_over_shards(count: int, mesh: Mesh) -> int:
    """Returns the smallest number of rows, at least `count`, that is divisible by the shards of the batch."""
    return -(-count // batch_shards(mesh)) * batch_shards(mesh)


def row_shards(mesh: Mesh) -> int:
    """Returns the number of shards of packed rows, each of which the axis `sequence` divides further."""
    return num_shards(ROW_AXES, mesh.shape)


def axis_size(axis: str) -> int:
    """Returns the number of devices along an axis of the current mesh, 1 without a mesh."""
    return jax.sharding.get_abstract_mesh().shape.get(axis, 1)


def axis_names(part: Any) -> tuple[str, ...]:
    """Returns the mesh axes that a part of a PartitionSpec, or an entry of a table, names: an axis, several or None."""
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def num_shards(part: Any, sizes: Mapping[str, int]) -> int:
    """Returns the number of shards that a dimension is cut into. part: as in `axis_names`."""
    return math.prod(sizes[axis] for axis in axis_names(part))


def axis_fields(axes: Sequence[str], sizes: Mapping[str, int]) -> str:
    """Returns the fields of MeshShape for mesh axes of more than one device, with their sizes."""
    return " x ".join(f"MeshShape.{axis} = {sizes[axis]}" for axis in axes if sizes[axis] > 1)


def mesh_axes(
    name: str | None, rules: dict[str | None, Any], sizes: Mapping[str, int] | None = None
) -> tuple[str, ...]:
    """Returns the mesh axes that a logical axis is sharded over, without OPTIONAL_AXES of size 1, so that they do not
    change programs that do not use them.

    Args:
      sizes: devices along each mesh axis; None: of the current mesh.
    """
    sizes = jax.sharding.get_abstract_mesh().shape if sizes is None else sizes
    axes = axis_names(None if name is None else rules[name])
    return tuple(axis for axis in axes if axis not in OPTIONAL_AXES or sizes.get(axis, 1) > 1)


def batch_axes(sizes: Mapping[str, int] | None = None) -> tuple[str, ...]:
    """Returns the axes that rows of tokens, and shares of packed rows, are divided over. sizes: as in `mesh_axes`."""
    return mesh_axes("batch", ACTIVATIONS, sizes)


def row_axes(sizes: Mapping[str, int] | None = None) -> tuple[str, ...]:
    """Returns the axes that packed rows are divided over. sizes: as in `mesh_axes`."""
    return mesh_axes("rows", ACTIVATIONS, sizes)


def spec(
    axes: Sequence[str | None], rules: dict[str | None, Any], sizes: Mapping[str, int] | None = None
) -> PartitionSpec:
    """Returns the PartitionSpec of logical `axes` under `rules`, without axes that are manual here. A mesh axis shards
    only one dimension of an array, the first that maps to it.

    Args:
      sizes: as in `mesh_axes`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    used = set(mesh.manual_axes) if not mesh.empty else set()

    def place(name: str | None) -> Any:
        free = tuple(axis for axis in mesh_axes(name, rules, sizes) if axis not in used)
        used.update(free)
        return free if len(free) > 1 else free[0] if free else None

    return PartitionSpec(*(place(name) for name in axes))


def split_rules(rules: dict[str | None, Any]) -> tuple[dict[str | None, Any], dict[str | None, Any]]:
    """Returns `rules` restricted to the batch axes, and without them: for a map over the batch axes."""
    only = lambda batch: {
        name: tuple(axis for axis in mesh_axes(name, rules) if (axis in BATCH_AXES) is batch) for name in rules
    }
    return only(True), only(False)


def constrain(x: Array, *axes: str | None) -> Array:
    """Returns `x` sharded by logical activation axes. Outside a mesh, `x`."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.sharding.reshard(x, spec(axes, ACTIVATIONS))


def gather(weight: Array, *axes: str | None) -> Array:
    """Returns a parameter gathered over fsdp, and, unless it is an expert's, over expert, for the computation of a
    block. Outside a mesh, the parameter."""
    if jax.sharding.get_abstract_mesh().empty:
        return weight
    return jax.sharding.reshard(weight, spec(axes, GATHERED))


def reshape(x: Array, shape: Sequence[int], *axes: str | None) -> Array:
    """Returns `x` in another shape, sharded by logical activation axes, since JAX cannot infer which part of a split
    dimension is sharded."""
    if jax.sharding.get_abstract_mesh().empty:
        return x.reshape(shape)
    return jnp.reshape(x, shape, out_sharding=spec(axes, ACTIVATIONS))


def einsum(formula: str, x: Array, y: Array, out: Sequence[str | None], dtype: Any = None) -> Array:
    """Returns the contraction sharded by logical activation axes `out`, accumulated and returned in `dtype`, if set.

    The gradient of `y`, a weight, is contracted directly into the order of its dimensions. JAX's rule transposes the
    activations before and the gradient after: on a CPU that takes a tenth of an update's time.
    """
    return _product(formula, x, y, tuple(out), dtype)


def _plain_product(formula: str, x: Array, y: Array, out: tuple[str | None, ...], dtype: Any) -> Array:
    if jax.sharding.get_abstract_mesh().empty:
        return jnp.einsum(formula, x, y, preferred_element_type=dtype)
    return jnp.einsum(formula, x, y, preferred_element_type=dtype, out_sharding=spec(out, ACTIVATIONS))


_product = jax.custom_vjp(_plain_product, nondiff_argnums=(0, 3, 4))


def _product_forward(
    formula: str, x: Array, y: Array, out: tuple[str | None, ...], dtype: Any
) -> tuple[Array, tuple[Array, Array]]:
    return _plain_product(formula, x, y, out, dtype), (x, y)


def _product_backward(
    formula: str, out: tuple[str | None, ...], dtype: Any, inputs: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    x, y = inputs
    x_letters, y_and_result = formula.split(",")
    weight, result = y_and_result.split("->")
    summed = [letter for letter in x_letters if letter in result and letter not in weight]
    operands = [(x_letters, x), (result, gradient)]
    kept = lambda pair: "".join(letter for letter in pair[0] if letter not in summed)
    if kept(operands[0]) + kept(operands[1]) != weight:
        operands.reverse()
    grad_x = jax.vjp(lambda x: _plain_product(formula, x, y, out, dtype), x)[1](gradient)[0]
    if kept(operands[0]) + kept(operands[1]) != weight:
        return grad_x, jax.vjp(lambda y: _plain_product(formula, x, y, out, dtype), y)[1](gradient)[0]
    dimensions = tuple(tuple(letters.index(letter) for letter in summed) for letters, _ in operands)
    sharding = None if jax.sharding.get_abstract_mesh().empty else jax.typeof(y).sharding.spec
    wide = y.dtype if dtype is None else dtype
    grad_y = jax.lax.dot_general(
        operands[0][1], operands[1][1], (dimensions, ((), ())), preferred_element_type=wide, out_sharding=sharding
    )
    return grad_x, grad_y.astype(y.dtype)


_product.defvjp(_product_forward, _product_backward)


def take_rows(table: Array, index: Array, out: Sequence[str | None]) -> Array:
    """Returns table[index], sharded by logical activation axes `out`. The table's rows must not be sharded."""
    if jax.sharding.get_abstract_mesh().empty:
        return table[index]
    return table.at[index].get(out_sharding=spec(out, ACTIVATIONS))


def mapped(
    fn: Callable[..., Array],
    args: Sequence[Array],
    ins: Sequence[Sequence[str | None]],
    out: Sequence[str | None],
    *,
    summed: str,
    checked: bool = True,
) -> Array:
    """Returns `fn` of each device's shard of `args`, summed over the mesh axis of the logical axis `summed`.

    Args:
      ins, out: logical activation axes of the arguments, which are resharded to them, and of the result.
      checked: as in `per_shard`.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return fn(*args)
    summed_over_shards = lambda *shares: (jax.lax.psum(fn(*shares), ACTIVATIONS[summed]),)
    return per_shard(summed_over_shards, args, ins, (out,), checked=checked)[0]


def per_shard(
    fn: Callable[..., tuple[Array, ...]],
    args: Sequence[Array],
    ins: Sequence[Sequence[str | None]],
    outs: Sequence[Sequence[str | None]],
    *,
    checked: bool = True,
) -> tuple[Array, ...]:
    """Returns `fn` of each device's shard of `args`: a tuple. No device needs another's shard.

    Args:
      ins, outs: logical activation axes of the arguments, which are resharded to them, and of the results.
      checked: JAX checks that results differ between devices only along the axes of `outs`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return fn(*args)
    return jax.shard_map(
        fn,
        in_specs=tuple(spec(axes, ACTIVATIONS) for axes in ins),
        out_specs=tuple(spec(axes, ACTIVATIONS) for axes in outs),
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=checked,
    )(*(constrain(x, *axes) for x, axes in zip(args, ins, strict=True)))


def varying_axes(x: Array) -> frozenset[str]:
    """Returns the mesh axes along which `x` may differ between devices, by its type inside a `checked` map."""
    kind = jax.typeof(x)
    return frozenset(kind.vma if hasattr(kind, "vma") else kind.mat.varying)  # the name differs between versions of JAX


def shardings(axes: PyTree, mesh: Mesh, rules: dict[str | None, Any]) -> PyTree:
    """Returns the NamedSharding of every leaf of `axes`, a tree whose leaves are tuples of logical names."""
    return jax.tree.map(
        lambda a: NamedSharding(mesh, spec(a, rules, mesh.shape)),
        axes,
        is_leaf=lambda a: isinstance(a, tuple) and not hasattr(a, "_fields"),  # no NamedTuple
    )


def batch_sharding(mesh: Mesh, rank: int) -> NamedSharding:
    """Returns the sharding of an array whose first dimension is sharded over the batch axes."""
    return NamedSharding(mesh, PartitionSpec(batch_axes(mesh.shape), *[None] * (rank - 1)))


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array of packed rows, [M, R, ...]."""
    return NamedSharding(mesh, PartitionSpec(None, row_axes(mesh.shape)))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
