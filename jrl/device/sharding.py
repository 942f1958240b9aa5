"""Mesh, logical axes and shardings: the one place where logical axes become mesh axes.

Models and parameters name logical axes only. Three tables map them to the mesh: how parameters and optimizer state are
stored for training (TRAIN), how weights are held for decoding and inside a block of the learner, gathered over fsdp
(GATHERED), and how activations are sharded (ACTIVATIONS). Axes are explicit: a contraction over a sharded dimension
that nobody asked for is an error at trace time, not a silent all-gather.
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
# Of rows of tokens, and of the shares of packed rows: the axis `sequence` divides both (jrl/device/row_shares.py).
BATCH_AXES = (*ROW_AXES, SEQUENCE)
OPTIONAL_AXES = (SEQUENCE, EXPERT)  # no sharding names them where they are 1: see `mesh_axes`
MEMBERS = "members"  # of a population (`members_mesh`); no run has it

TRAIN = {
    "embed": ("fsdp", EXPERT, SEQUENCE),  # of experts, whose number is sharded over expert, without it: see `spec`
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
        """Returns the size of every axis on `num_devices`. Raises ValueError where they do not multiply to it."""
        sizes = [getattr(self, axis) for axis in AXES]
        known = math.prod(size for size in sizes if size != -1)
        if -1 in sizes and num_devices % known == 0:
            sizes[sizes.index(-1)] = num_devices // known
        if -1 in sizes or math.prod(sizes) > num_devices:
            raise ValueError(
                f"the mesh {dict(zip(AXES, sizes))} needs a multiple of {known} devices; there are {num_devices} "
                "(--devices N starts N virtual ones on a CPU)"
            )
        if sizes[0] % self.slices:
            raise ValueError(
                f"{num_devices} devices make MeshShape.data = {sizes[0]}, which cannot be divided over "
                f"MeshShape.slices = {self.slices}; make fsdp or tensor smaller"
            )
        return tuple(sizes)


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns a mesh over the first devices that `shape` asks for, every axis explicit. With several slices, data is
    divided over them first. Devices that know no slices, such as CPUs, stand in for them in order.

    Raises: ValueError where there are too few devices, or the mesh would cross slices that `shape` does not name.
    """
    devices = list(jax.devices() if devices is None else devices)
    data, *others = sizes = shape.sizes(len(devices))
    groups = devices_by_slice(devices, math.prod(sizes), shape.slices)
    # An axis may take part of a torus dimension: a v6e of 16 x 16 as (fsdp 64, tensor 4) is refused without.
    places = [create_device_mesh((data // shape.slices, *others), group, allow_split_physical_axes=True)
              for group in groups]  # fmt: skip
    return Mesh(np.concatenate(places), AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def members_mesh(count: int, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns the mesh over which the `count` members of a population are dealt out: the first devices, as many of them
    as divide the members evenly."""
    devices = list(jax.devices() if devices is None else devices)
    size = max(n for n in range(1, len(devices) + 1) if count % n == 0)
    places = np.array(devices[:size]).reshape(size, *[1] * len(AXES))
    return Mesh(places, (MEMBERS, *AXES), axis_types=(AxisType.Explicit,) * places.ndim)


def devices_by_slice(devices: Sequence[Any], count: int, slices: int) -> list[list[Any]]:
    """Returns the first `count` devices of as many slices, equally many of each.

    Raises: ValueError where the devices are of fewer slices, or have too few in one.
    """
    share, present = count // slices, slices_of(devices)
    if devices[0].platform != "tpu":  # these know no slices
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
    """Returns two meshes without a device in common: the learner's over the first devices, the sampler's over the next,
    in several processes of each; where there are several slices, over the first slices and the next.

    Raises: ValueError where there are too few devices for both, or a mesh would cross slices.
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
    """Returns `learn` devices, and `sample` others. Of several processes each has equally many of both, so that it
    copies weights between its own devices; of a TPU's hosts, whose chips make a torus, they are one after the other,
    and so are slices.

    Args:
      slices: of either. Where one of them is above 1, devices that know no slices stand in for them, in their order.

    Raises: ValueError where there are several slices and these are not taken whole, or several processes and the
      devices of a mesh cannot be divided over them.
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
    every = lambda a, b: [device for host in hosts.values() for device in host[a:b]]
    return every(0, first), every(first, first + second)


def slices_of(devices: Sequence[Any]) -> list[list[Any]]:
    """Returns the devices of every slice; devices that know none are of one."""
    groups: dict[int, list[Any]] = {}
    for device in devices:
        # On other platforms slice_index, where there is one, is a host. A topology of one slice describes none.
        index = getattr(device, "slice_index", 0) if device.platform == "tpu" else 0
        groups.setdefault(index, []).append(device)
    return [groups[index] for index in sorted(groups)]


def check_whole_slices(taken: tuple[int, int], slices: tuple[int, int], sizes: Sequence[int]) -> None:
    """Raises ValueError unless a learner's mesh takes the first slices whole, and a sampler's the next ones.

    Args:
      taken: devices of either mesh. slices: of either. sizes: devices of every slice.
    """
    first, second = sizes[: slices[0]], sizes[slices[0] : sum(slices)]
    if sum(slices) > len(sizes) or (sum(first), sum(second)) != tuple(taken):
        raise ValueError(
            f"Config.mesh takes {taken[0]} devices on {slices[0]} slices (MeshShape.slices) and Config.sampler_mesh "
            f"{taken[1]} on {slices[1]}, and the slices here have {' + '.join(map(str, sizes))}: where there are "
            "several, devices of their own for sampling are whole slices, behind those of Config.mesh"
        )


def split_sizes(learner: MeshShape, sampler: MeshShape, num_devices: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the size of every axis of both meshes. One axis of one of them may be -1: all devices that are left.

    Raises: ValueError where there are too few devices for both.
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
    """Returns the fewest rows, at least `count`, that the shards of the batch divide."""
    return -(-count // batch_shards(mesh)) * batch_shards(mesh)


def row_shards(mesh: Mesh) -> int:
    """Returns the number of shards of packed rows, each of which the axis `sequence` divides further."""
    return num_shards(ROW_AXES, mesh.shape)


def axis_size(axis: str) -> int:
    """Returns the devices along an axis of the mesh in use, 1 without a mesh."""
    return jax.sharding.get_abstract_mesh().shape.get(axis, 1)


def axis_names(part: Any) -> tuple[str, ...]:
    """Returns the mesh axes that a part of a PartitionSpec, or an entry of a table, names: an axis, several or None."""
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def num_shards(part: Any, sizes: Mapping[str, int]) -> int:
    """Returns the number of shards that a dimension is cut into. part: as in `axis_names`."""
    return math.prod(sizes[axis] for axis in axis_names(part))


def axis_fields(axes: Sequence[str], sizes: Mapping[str, int]) -> str:
    """Returns the fields of MeshShape that mesh axes are set by, with their sizes: of those that shard anything."""
    return " x ".join(f"MeshShape.{axis} = {sizes[axis]}" for axis in axes if sizes[axis] > 1)


def mesh_axes(
    name: str | None, rules: dict[str | None, Any], sizes: Mapping[str, int] | None = None
) -> tuple[str, ...]:
    """Returns the mesh axes that a logical axis is sharded over: without OPTIONAL_AXES where they are 1, so that
    programs without them stay what they were.

    Args:
      sizes: devices along each mesh axis; None: of the mesh in use.
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
    one dimension of an array, the first that asks for it.

    Args:
      sizes: as in `mesh_axes`.
    """
    here = jax.sharding.get_abstract_mesh()
    taken = set(here.manual_axes) if not here.empty else set()

    def place(name: str | None) -> Any:
        left = tuple(axis for axis in mesh_axes(name, rules, sizes) if axis not in taken)
        taken.update(left)
        return left if len(left) > 1 else left[0] if left else None

    return PartitionSpec(*(place(name) for name in axes))


def split_rules(rules: dict[str | None, Any]) -> tuple[dict[str | None, Any], dict[str | None, Any]]:
    """Returns `rules` twice, with the batch axes alone and without them: for a map over the batch axes."""
    only = lambda batch: {
        name: tuple(axis for axis in mesh_axes(name, rules) if (axis in BATCH_AXES) is batch) for name in rules
    }
    return only(True), only(False)


def constrain(x: Array, *axes: str | None) -> Array:
    """Returns `x` laid out as logical activation axes say. Outside a mesh, `x`."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.sharding.reshard(x, spec(axes, ACTIVATIONS))


def gather(weight: Array, *axes: str | None) -> Array:
    """Returns a parameter gathered over fsdp, and expert where it is none of experts, as a block computes with it.
    Outside a mesh, the parameter."""
    if jax.sharding.get_abstract_mesh().empty:
        return weight
    return jax.sharding.reshard(weight, spec(axes, GATHERED))


def reshape(x: Array, shape: Sequence[int], *axes: str | None) -> Array:
    """Returns `x` in another shape, laid out as logical activation axes say: which of two split dimensions is sharded
    cannot be guessed."""
    if jax.sharding.get_abstract_mesh().empty:
        return x.reshape(shape)
    return jnp.reshape(x, shape, out_sharding=spec(axes, ACTIVATIONS))


def einsum(formula: str, x: Array, y: Array, out: Sequence[str | None], dtype: Any = None) -> Array:
    """Returns the contraction laid out as logical activation axes `out`, summed and returned in `dtype` where given.

    The gradient of `y`, which is a weight, is contracted straight into the order of its dimensions. JAX's own rule
    computes it in another order and transposes it, and the activations before: on a CPU a tenth of an update's time.
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
    x_letters, rest = formula.split(",")
    weight, result = rest.split("->")
    summed = [letter for letter in x_letters if letter in result and letter not in weight]
    operands = [(x_letters, x), (result, gradient)]
    left = lambda pair: "".join(letter for letter in pair[0] if letter not in summed)
    if left(operands[0]) + left(operands[1]) != weight:
        operands.reverse()
    of_x = jax.vjp(lambda x: _plain_product(formula, x, y, out, dtype), x)[1](gradient)[0]
    if left(operands[0]) + left(operands[1]) != weight:
        return of_x, jax.vjp(lambda y: _plain_product(formula, x, y, out, dtype), y)[1](gradient)[0]
    dimensions = tuple(tuple(letters.index(letter) for letter in summed) for letters, _ in operands)
    sharding = None if jax.sharding.get_abstract_mesh().empty else jax.typeof(y).sharding.spec
    wide = y.dtype if dtype is None else dtype
    of_y = jax.lax.dot_general(
        operands[0][1], operands[1][1], (dimensions, ((), ())), preferred_element_type=wide, out_sharding=sharding
    )
    return of_x, of_y.astype(y.dtype)


_product.defvjp(_product_forward, _product_backward)


def take_rows(table: Array, index: Array, out: Sequence[str | None]) -> Array:
    """Returns table[index], laid out as logical activation axes `out`. The table's rows must not be sharded."""
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
      ins, out: logical activation axes of the arguments, which are laid out so, and of the result.
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
      ins, outs: logical activation axes of the arguments, which are laid out so, and of the results.
      checked: JAX makes sure that results differ between devices only where `outs` says so.
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
    """Returns the mesh axes along which devices may differ in `x`, by its type inside a map that is `checked`."""
    kind = jax.typeof(x)
    return frozenset(kind.vma if hasattr(kind, "vma") else kind.mat.varying)  # the name differs between versions of JAX


def shardings(axes: PyTree, mesh: Mesh, rules: dict[str | None, Any]) -> PyTree:
    """Returns the NamedSharding of every leaf of `axes`, a tree whose leaves are tuples of logical names."""
    return jax.tree.map(
        lambda a: NamedSharding(mesh, spec(a, rules, mesh.shape)),
        axes,
        is_leaf=lambda a: isinstance(a, tuple) and not hasattr(a, "_fields"),
    )  # no record


def batch_sharding(mesh: Mesh, rank: int, dimension: int = 0) -> NamedSharding:
    """Returns the sharding of an array whose `dimension` is sharded over the batch axes."""
    parts: list[Any] = [None] * rank
    parts[dimension] = batch_axes(mesh.shape)
    return NamedSharding(mesh, PartitionSpec(*parts))


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array of packed rows, [M, R, ...]."""
    return NamedSharding(mesh, PartitionSpec(None, row_axes(mesh.shape)))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
