"""The gradient of a product with a weight is JAX's own, contracted in another order."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.device import sharding
from jrl.device.sharding import GATHERED, MeshShape, devices_by_slice, make_mesh, spec
from jrl.run.identity import mesh_sizes
from jrl.run.trained import mesh_that_fits

SIZES = {"b": 4, "l": 3, "d": 6, "e": 5, "f": 8, "h": 4, "k": 2, "r": 3, "v": 10}

# Formula, logical axes of the weight, logical axes of the result: every kind that decoders and adapters multiply with.
PRODUCTS = [
    ("bld,dhk->blhk", ("embed", "heads", None), ("batch", None, "heads", None)),
    ("blhk,hkd->bld", ("heads", None, "embed"), ("batch", None, None)),
    ("bld,df->blf", ("embed", "mlp"), ("batch", None, "mlp")),
    ("blf,fd->bld", ("mlp", "embed"), ("batch", None, None)),
    ("bld,vd->blv", ("vocab", "embed"), ("batch", None, "vocab")),  # the head, tied or not
    ("bld,dr->blr", ("embed", "rank"), ("batch", None, None)),
    ("blhk,hkr->blr", ("heads", None, "rank"), ("batch", None, None)),
    ("blr,rhk->blhk", ("rank", "heads", None), ("batch", None, "heads", None)),
    ("ble,ed->bld", ("experts", "norm"), ("batch", None, None)),
]
CUT = {"f": "mlp", "h": "heads"}  # what activations are cut over
MESHES = [MeshShape(), MeshShape(fsdp=2, tensor=2)]


def operands(formula, dtype):
    rng = np.random.default_rng(0)
    rows, weight = formula.split("->")[0].split(",")
    return [jnp.asarray(rng.normal(size=[SIZES[letter] for letter in letters]), dtype) for letters in (rows, weight)]


def gradients(product, formula, axes, out, x, y, dtype=None):
    """Of a sum that weighs every entry of the result differently."""

    def loss(x, y):
        product_ = product(formula, x, sharding.gather(y, *axes), out, dtype)
        return (product_ * jnp.cos(jnp.arange(product_.size, dtype=product_.dtype)).reshape(product_.shape)).sum()

    return jax.grad(loss, argnums=(0, 1))(x, y)


@pytest.mark.parametrize("mesh", MESHES, ids=["one device", "four"])
@pytest.mark.parametrize("formula, axes, out", PRODUCTS, ids=[formula for formula, *_ in PRODUCTS])
def test_both_gradients_are_those_of_jax(formula, axes, out, mesh):
    with jax.enable_x64(True):
        x, y = operands(formula, jnp.float64)
        expected = gradients(sharding._plain_product, formula, axes, out, x, y)
        with jax.set_mesh(make_mesh(mesh, jax.devices()[: mesh.fsdp * mesh.tensor])):
            x = sharding.constrain(x, "batch", None, *(CUT.get(letter) for letter in formula.split(",")[0][2:]))
            y = jax.device_put(y, jax.sharding.NamedSharding(jax.sharding.get_mesh(), spec(axes, GATHERED)))
            actual = jax.jit(gradients, static_argnums=(0, 1, 2, 3))(sharding.einsum, formula, axes, out, x, y)
        for ours, jaxs in zip(actual, expected):
            np.testing.assert_allclose(ours, jaxs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("formula, axes, out", PRODUCTS, ids=[formula for formula, *_ in PRODUCTS])
def test_no_gradient_of_a_weight_is_turned_around(formula, axes, out):
    x, y = operands(formula, jnp.float32)
    of_weight = lambda product: jax.make_jaxpr(lambda x, y: gradients(product, formula, axes, out, x, y)[1])(x, y)
    text = str(of_weight(sharding.einsum))
    assert "transpose" not in text, text


def test_a_sum_asked_for_in_float32_has_its_gradient_summed_in_float32():
    formula, axes, out = PRODUCTS[4]
    x, y = operands(formula, jnp.bfloat16)
    program = jax.make_jaxpr(lambda x, y: gradients(sharding.einsum, formula, axes, out, x, y, jnp.float32)[1])(x, y)
    last = [equation for equation in program.eqns if equation.primitive.name == "dot_general"][-1]
    assert last.outvars[0].aval.dtype == jnp.float32
    assert program.out_avals[0].dtype == jnp.bfloat16


def tpus(*per_slice):
    of = lambda i, n: SimpleNamespace(platform="tpu", slice_index=i, id=n)
    return [of(i, n) for i, count in enumerate(per_slice) for n in range(count)]


@pytest.mark.parametrize("shape", [dict(data=4, tensor=2), dict(data=-1, fsdp=2), dict(data=2)])
def test_devices_that_know_no_slices_stand_in_for_them_in_order(shape):
    assert make_mesh(MeshShape(slices=2, **shape)) == make_mesh(MeshShape(**shape))


def test_only_data_crosses_slices():
    ids = lambda groups: [[(device.slice_index, device.id) for device in group] for group in groups]
    assert ids(devices_by_slice(tpus(3, 3), 4, 2)) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    assert ids(devices_by_slice(tpus(2, 2)[::-1], 4, 2)) == [[(0, 1), (0, 0)], [(1, 1), (1, 0)]]
    assert ids(devices_by_slice(tpus(4, 4), 4, 1)) == [[(0, i) for i in range(4)]]  # the second is left


@pytest.mark.parametrize(
    "per_slice, count, slices, message",
    [
        ((4, 4), 8, 1, r"needs 1 x 8 devices, and the slices here have 4 \+ 4.*set MeshShape.slices = 2, and data"),
        ((8,), 8, 2, r"needs 2 x 4 devices, and the slices here have 8\. .*set MeshShape.slices = 1, and data"),
        ((6, 2), 8, 2, r"needs 2 x 4 devices, and the slices here have 6 \+ 2.*make the mesh smaller, at most 2 x 2"),
    ],
)
def test_a_mesh_across_slices_is_refused_with_what_would_go(per_slice, count, slices, message):
    with pytest.raises(ValueError, match=message):
        devices_by_slice(tpus(*per_slice), count, slices)


def test_a_manifest_names_slices_where_there_are_several():
    axes = {"data": 2, "fsdp": 1, "tensor": 1, "sequence": 1, "expert": 1}  # as before there were any
    sizes = lambda mesh, sampler: mesh_sizes(SimpleNamespace(mesh=mesh, sampler_mesh=sampler))
    assert sizes(MeshShape(data=2), None) == axes
    several = MeshShape(data=2, slices=2)
    assert sizes(several, several) == {**axes, "slices": 2, "sampler": {**axes, "slices": 2}}


def test_a_policy_is_read_on_fewer_slices_than_it_was_trained_on():
    shape = MeshShape(data=4, slices=2)
    assert mesh_that_fits(shape, tpus(2, 2)) == shape
    assert mesh_that_fits(shape, tpus(4)) == MeshShape(data=4)
    assert mesh_that_fits(shape, tpus(3)) == mesh_that_fits(MeshShape(fsdp=4), tpus(2, 2)) == MeshShape()


def test_hosts_of_gpus_are_no_slices():
    gpus = [SimpleNamespace(platform="gpu", slice_index=i, id=i) for i in range(4)]
    assert devices_by_slice(gpus, 4, 1) == [gpus]


def test_a_described_topology_of_one_slice_names_none():
    described = [SimpleNamespace(platform="tpu", id=i) for i in range(4)]
    assert devices_by_slice(described, 4, 1) == [described]
    with pytest.raises(ValueError, match=r"set MeshShape\.slices = 1, and data"):
        devices_by_slice(described, 4, 2)


@pytest.mark.parametrize("sizes", [dict(data=3), dict(fsdp=2), dict(data=2, slices=0)])
def test_slices_have_equally_many_copies(sizes):
    with pytest.raises(ValueError, match="make data a multiple of slices"):
        MeshShape(**{"slices": 2, **sizes})
    with pytest.raises(ValueError, match="make fsdp or tensor smaller"):
        MeshShape(data=-1, fsdp=4, slices=2).sizes(4)


def test_too_few_devices_are_told_how_many_a_mesh_takes():
    with pytest.raises(ValueError, match=r"needs a multiple of 4 devices; there are 6 "):
        MeshShape(data=-1, fsdp=4).sizes(6)
    assert MeshShape(data=2, fsdp=2).sizes(6) == (2, 2, 1, 1, 1)  # those that are left idle
    with pytest.raises(ValueError, match=r"needs 4 devices; there are 3 "):
        MeshShape(data=2, fsdp=2).sizes(3)
